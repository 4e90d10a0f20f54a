"""Spares Triton's interpreter what changes no result, which is most of its work on small blocks.

Written for the version in constraints.txt; what another one does differently shows in every kernel test.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


class _OncePerLaunch:
    """Replaces _patch_lang, which each call of a function inside a kernel repeats over the whole language."""

    def __init__(self, patch: Callable[[Any], Any]) -> None:
        self._patch = patch
        self._seen_by: dict[Any, tuple[bool, bool]] = {}
        self._done: set[tuple[bool, bool]] = set()

    def __call__(self, fn: Any) -> Any:
        if (sees := self._seen_by.get(fn)) is None:
            modules = [value for value in fn.__globals__.values() if value is tl or value is tl.core]
            sees = self._seen_by[fn] = (tl in modules, tl.core in modules)
        if sees in self._done:
            return interpreter._LangPatchScope()
        self._done.add(sees)
        scope = self._patch(fn)
        restore = scope.restore

        def end() -> None:  # the interpreter undoes a kernel's own patch alone, at the end of its launch
            self._done.clear()
            restore()

        scope.restore = end
        return scope


class _Builtins:
    """Replaces _patch_builtin, which looks through all names of a module for its builtins each time.

    A builtin that it puts in place calls the builtin's function itself, without two wrappers around it.
    """

    def __init__(self) -> None:
        self._names: dict[Any, list[str]] = {}
        self._made: dict[Any, Any] = {}

    def __call__(self, holder: Any, builder: Any, scope: Any) -> None:
        if holder not in self._names:  # nothing of it is patched yet
            members = inspect.getmembers(holder)
            self._names[holder] = [name for name, member in members if tl.core.is_builtin(member)]
        for name in self._names[holder]:
            member = getattr(holder, name)
            if tl.core.is_builtin(member):
                if member not in self._made:
                    self._made[member] = _interpreted(member)
                scope.set_attr(holder, name, self._made[member])


def _interpreted(member: Any) -> Callable[..., Any]:
    semantic = interpreter.interpreter_semantic
    only_checks = member.__code__ is _CHECK  # that there is a _semantic
    inner = member.__wrapped__ if only_checks else member

    def call(*given: Any, **named: Any) -> Any:
        named["_semantic"] = semantic
        return inner(*given, **named)

    return call


_CHECK = tl.core.add.__code__


class _Types:
    """What types of blocks and their values are made of, kept by shape; nobody changes a shape."""

    def __init__(self) -> None:
        self._make_block = tl.block_type.__init__
        self._np_dtype = interpreter._get_np_dtype
        self._fits = interpreter._validate_np_data_size
        self._shapes: dict[tuple[int, ...], tuple[Any, int, str, tuple[Any, Any]]] = {}
        self._blocks: dict[tuple[str, tuple[int, ...]], Any] = {}
        self._dtypes: dict[str, Any] = {}
        self._sizes: dict[str, float] = {}
        self._scalar = self._of_values(())

    def make_block(self, block: Any, element_ty: Any, shape: Any) -> None:
        """block_type.__init__."""
        sizes = tuple([size.value if isinstance(size, tl.constexpr) else size for size in shape])
        known = self._shapes.get(sizes)
        if known is None:
            self._make_block(block, element_ty, shape)
            known = (block.shape, block.numel, str(block.shape), self._of_values(sizes))
            self._shapes[sizes] = known
        block.element_ty = element_ty
        block.shape, block.numel, written, block.of_values = known
        block.name = f"<{written}, {element_ty}>"

    def with_element(self, block: Any, element_ty: Any) -> Any:
        """block_type.with_element_ty."""
        if type(element_ty) is not tl.dtype:  # a pointer
            return tl.block_type(element_ty, block.shape)
        key = (element_ty.name, tuple(block.shape.values))
        if key not in self._blocks:
            self._blocks[key] = tl.block_type(element_ty, block.shape)
        return self._blocks[key]

    def make_value(self, value: Any, handle: Any, kind: Any) -> None:
        """tensor.__init__."""
        value.handle, value.type, value.dtype = handle, kind, kind.scalar
        value.numel, value.shape = kind.of_values if kind.is_block() else self._scalar

    def make_handle(self, handle: Any, data: Any, dtype: Any) -> None:
        """TensorHandle.__init__."""
        handle.data, handle.dtype, handle.attr = data, dtype, {}
        name = dtype.name
        if name not in self._sizes:
            pointer = isinstance(dtype, tl.pointer_type)
            self._sizes[name] = float("inf") if pointer else max(1, dtype.primitive_bitwidth // 8)
        if data.itemsize > self._sizes[name]:
            raise ValueError(f"{data.dtype} holds values of {name}")

    def np_dtype(self, kind: Any) -> Any:
        """interpreter._get_np_dtype."""
        name = kind.scalar.name
        if name not in self._dtypes:
            self._dtypes[name] = self._np_dtype(kind)
        return self._dtypes[name]

    def _of_values(self, sizes: tuple[int, ...]) -> tuple[Any, Any]:
        numel = 1
        for size in sizes:
            numel *= size
        return tl.constexpr(numel), tl.tuple([tl.constexpr(size) for size in sizes])


class _Operands:
    """Replaces how a semantic brings both operands of an operation to one type and shape.

    It is asked once for two types. Numbers become values once: nobody changes a value.
    """

    def __init__(self, semantic: Any) -> None:
        self._semantic = semantic
        self._of_both = semantic.binary_op_type_checking_impl
        self._broadcast = semantic.broadcast_impl_value
        self._cast = semantic.cast
        self._constant = semantic.scalar_constant
        self._types: dict[Any, Any] = {}
        self._numbers: dict[Any, Any] = {}

    def both(self, left: Any, right: Any, *options: bool) -> tuple[Any, Any]:
        """binary_op_type_checking_impl."""
        of_left = left.dtype.name if (is_left := type(left) is tl.tensor) else (type(left), left)
        of_right = right.dtype.name if (is_right := type(right) is tl.tensor) else (type(right), right)
        key = (of_left, of_right, options)
        wanted = self._types.get(key)
        if wanted is None:
            made = self._of_both(left, right, *options)
            self._types[key] = tuple(None if each.dtype.is_ptr() else each.dtype for each in made)
            return made  # type: ignore[no-any-return]
        to_left, to_right = wanted
        if not is_left:
            left = self.constant(left, to_left)
        elif to_left is not None:
            left = self.cast(left, to_left)
        if not is_right:
            right = self.constant(right, to_right)
        elif to_right is not None:
            right = self.cast(right, to_right)
        return self.broadcast(left, right)

    def constant(self, number: Any, dtype: Any) -> Any:
        """scalar_constant."""
        if not number or math.isnan(number):  # zeros have signs
            return self._constant(number, dtype=dtype)
        key = (number, type(number), dtype.name)
        if key not in self._numbers:
            made = self._numbers[key] = self._constant(number, dtype=dtype)
            made.handle.data.flags.writeable = False
        return self._numbers[key]

    def cast(self, value: Any, dtype: Any, rounding: Any = None) -> Any:
        """cast."""
        return value if value.dtype is dtype else self._cast(value, dtype, rounding)

    def broadcast(self, left: Any, right: Any) -> tuple[Any, Any]:
        """broadcast_impl_value."""
        of_left, of_right = left.type, right.type
        if not of_left.is_block():
            return (self._filled(left, of_right), right) if of_right.is_block() else (left, right)
        if not of_right.is_block():
            return left, self._filled(right, of_left)
        if of_left.shape is of_right.shape:
            return left, right
        sizes = list(zip(of_left.shape.values, of_right.shape.values, strict=False))
        fits = all(1 in pair or pair[0] == pair[1] for pair in sizes)
        if not fits or len(of_left.shape) != len(of_right.shape):
            return self._broadcast(left, right)  # type: ignore[no-any-return]
        shape = [max(pair) for pair in sizes]
        return self._stretched(left, shape), self._stretched(right, shape)

    def _filled(self, value: Any, block: Any) -> Any:
        kind = block.with_element_ty(value.dtype)
        return tl.tensor(self._semantic.builder.create_splat(kind, value.handle), kind)

    def _stretched(self, value: Any, shape: list[int]) -> Any:
        if value.type.shape.values == shape:
            return value
        handle = self._semantic.builder.create_broadcast(value.handle, shape)
        return tl.tensor(handle, tl.block_type(value.dtype, shape))


def _unwrapped(given: Any) -> Any:
    """core._unwrap_if_constexpr, which most often gets a value."""
    return given if type(given) is tl.tensor else _UNWRAP(given)


def _equal(one: Any, other: Any) -> bool:
    """dtype.__eq__, most often of one object."""
    return one is other or _EQUAL(one, other)


_UNWRAP, _EQUAL = tl.core._unwrap_if_constexpr, tl.dtype.__eq__


def make_quick() -> None:
    """For the rest of the process; once or more."""
    if isinstance(interpreter._patch_lang, _OncePerLaunch):
        return
    interpreter._patch_lang = _OncePerLaunch(interpreter._patch_lang)
    interpreter._patch_builtin = _Builtins()
    options = interpreter.interpreter_builder.options
    assert not options.debug, "overflows are looked for, and then nobody is told"
    interpreter.interpreter_builder.options = replace(options, sanitize_overflow=False)
    types = _Types()

    def of_block(self: Any, element_ty: Any, shape: Any) -> None:
        types.make_block(self, element_ty, shape)

    def with_element(self: Any, element_ty: Any) -> Any:
        return types.with_element(self, element_ty)

    def of_value(self: Any, handle: Any, type: Any) -> None:
        types.make_value(self, handle, type)

    def of_handle(self: Any, data: Any, dtype: Any) -> None:
        types.make_handle(self, data, dtype)

    tl.block_type.__init__, tl.tensor.__init__ = of_block, of_value
    tl.block_type.with_element_ty = with_element
    interpreter.TensorHandle.__init__ = of_handle
    interpreter._get_np_dtype = types.np_dtype
    tl.core._unwrap_if_constexpr, tl.dtype.__eq__ = _unwrapped, _equal
    semantic = interpreter.interpreter_semantic
    operands = _Operands(semantic)
    semantic.binary_op_type_checking_impl = operands.both
    semantic.broadcast_impl_value = operands.broadcast
    semantic.scalar_constant = operands.constant
    semantic.cast = operands.cast
