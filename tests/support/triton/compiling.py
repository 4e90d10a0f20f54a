"""Compiles kernels for the H200 on a machine without a GPU, exactly as their launchers ask for it.

Run in a process of its own, where Triton does not interpret. The launchers get meta tensors of real shapes;
instead of a launch, the kernel is compiled down to machine code and its resources are read from that.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import tempfile
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from tests.support.triton.reads import before_waiting

TARGET = GPUTarget("cuda", 90, 32)
_POINTERS = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.bool: "*i1",
    torch.uint8: "*u8",
}


@dataclass(frozen=True, slots=True)
class Compiled:
    """One kernel. registers: per thread. shared, stack: bytes, per block and per thread. grid: programs.

    early: as before_waiting() has it, of one that is set up before the kernel ahead has ended.
    """

    name: str
    grid: tuple[int, ...]
    warps: int
    registers: int
    shared: int
    stack: int
    early: list[str]


class Recorder:
    """Takes the place of every launch while it is entered.

    once: compiles none of these kernels, and of each other one a variant for tensors of the same types.
    """

    def __init__(self, once: Collection[str] | None = None) -> None:
        self.compiled: list[Compiled] = []
        self._once = once
        self._variants: set[tuple[str, ...]] = set()

    def __enter__(self) -> Recorder:
        self._run = JITFunction.run
        JITFunction.run = lambda kernel, *args, **kwargs: self._compile(kernel, args, kwargs)
        return self

    def __exit__(self, *_: object) -> None:
        JITFunction.run = self._run

    def _compile(self, kernel: JITFunction, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        grid = kwargs.pop("grid")
        kwargs.pop("warmup")
        names = [p.name for p in kernel.params]
        bound = dict(zip(names, args, strict=False)) | {n: kwargs.pop(n) for n in names if n in kwargs}
        signature: dict[str, str] = {}
        constants: dict[str, Any] = {}
        attributes: dict[tuple[int], list[list[Any]]] = {}
        for index, p in enumerate(kernel.params):
            value = bound[p.name]
            signature[p.name] = "constexpr" if p.is_constexpr else _type_of(value, p.do_not_specialize)
            if signature[p.name] == "constexpr":
                constants[p.name] = value
            elif isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0):
                if p.do_not_specialize or p.do_not_specialize_on_alignment:
                    continue
                attributes[(index,)] = [["tt.divisibility", 16]]
        if self._once is not None:
            variant = (kernel.__name__, *(kind for kind in signature.values() if kind.startswith("*")))
            if variant in self._variants or kernel.__name__ in self._once:
                return
            self._variants.add(variant)
        source = ASTSource(kernel, signature, constants, attributes)
        made = triton.compile(source, target=TARGET, options=kwargs)
        registers, stack = _resources(_shown(made.asm["cubin"], "-res-usage"))
        early: list[str] = []
        if kwargs.get("launch_pdl"):
            given = [name for name, kind in signature.items() if kind != "constexpr"]
            early = before_waiting(made.asm["ptx"], _shown(made.asm["cubin"], "-sass"), given)
        meta = made.metadata
        self.compiled.append(
            Compiled(kernel.__name__, tuple(grid), meta.num_warps, registers, meta.shared, stack, early)
        )


def _type_of(value: Any, any_number: bool) -> str:
    if isinstance(value, torch.Tensor):
        return _POINTERS[value.dtype]
    if value is None or (isinstance(value, int) and value == 1 and not any_number):
        return "constexpr"
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def _resources(usage: str) -> tuple[int, int]:
    """Registers and stack bytes of a thread; a stack means that registers were spilled."""
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found, usage
    return int(found[1]), int(found[2])


def _shown(cubin: bytes, what: str) -> str:
    """What cuobjdump prints of machine code. Kept in Triton's cache: disassembly is slow."""
    digest = hashlib.blake2b(cubin + triton.__version__.encode(), digest_size=16).hexdigest()
    kept = Path(triton.knobs.cache.dir) / f"{digest}{what}.txt"
    if not kept.exists():
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        with tempfile.NamedTemporaryFile(suffix=".cubin", dir=kept.parent) as file:
            file.write(cubin)
            file.flush()
            command = [tool, what, file.name]
            done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
        new = Path(f"{file.name}.txt")
        new.write_text(done.stdout)
        new.rename(kept)
    return kept.read_text()
