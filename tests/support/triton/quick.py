"""Spares Triton's interpreter what changes no result, which is most of its work on small blocks.

Written for the version in constraints.txt; what another one does differently shows in every kernel test.
"""

from __future__ import annotations

import inspect
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
    """Replaces _patch_builtin, which looks through all names of a module for its builtins each time."""

    def __init__(self) -> None:
        self._names: dict[Any, list[str]] = {}

    def __call__(self, holder: Any, builder: Any, scope: Any) -> None:
        if holder not in self._names:  # nothing of it is patched yet
            members = inspect.getmembers(holder)
            self._names[holder] = [name for name, member in members if tl.core.is_builtin(member)]
        for name in self._names[holder]:
            member = getattr(holder, name)
            if tl.core.is_builtin(member):
                interpreter._patch_attr(holder, name, member, builder, scope)


class _Types:
    """What types of blocks and their values are made of, kept by shape; nobody changes a shape."""

    def __init__(self) -> None:
        self._make_block = tl.block_type.__init__
        self._np_dtype = interpreter._get_np_dtype
        self._shapes: dict[tuple[int, ...], tuple[Any, int, str, tuple[Any, Any]]] = {}
        self._dtypes: dict[str, Any] = {}
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

    def make_value(self, value: Any, handle: Any, kind: Any) -> None:
        """tensor.__init__."""
        value.handle, value.type, value.dtype = handle, kind, kind.scalar
        value.numel, value.shape = kind.of_values if kind.is_block() else self._scalar

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

    def of_value(self: Any, handle: Any, type: Any) -> None:
        types.make_value(self, handle, type)

    tl.block_type.__init__, tl.tensor.__init__ = of_block, of_value
    interpreter._get_np_dtype = types.np_dtype
