"""Makes Triton's interpreter round as the hardware does.

Its own conversions to narrower floats cut bits off, or lose the carry of a rounding. Here torch converts: to
nearest, ties to even. Products are those of the operands' exact values, summed in float32.
"""

from __future__ import annotations

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

_TORCH = {
    tl.float64: torch.float64,
    tl.float32: torch.float32,
    tl.float16: torch.float16,
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
}
_STORED = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def convert(data: np.ndarray, source: tl.dtype, target: tl.dtype, rounding: object) -> np.ndarray:
    """The bits of `data` in another format, as unsigned integers of its width."""
    kind = _TORCH[target.scalar]
    bits = np.ascontiguousarray(data).view(f"i{data.dtype.itemsize}" if data.dtype.itemsize > 1 else "u1")
    values = torch.from_numpy(bits.copy()).view(_TORCH[source.scalar]).to(kind)
    return values.view(_STORED[kind.itemsize]).numpy().view(f"u{kind.itemsize}").reshape(data.shape)


def _values(operand: interpreter.TensorHandle) -> np.ndarray:
    kind = operand.dtype.scalar
    if kind in (tl.bfloat16, tl.float8e4nv):
        return convert(operand.data, kind, tl.float32, None).view(np.float32)
    return operand.data.astype(np.float32)


def dot(
    self: object,
    a: interpreter.TensorHandle,
    b: interpreter.TensorHandle,
    d: interpreter.TensorHandle,
    input_precision: object,
    max_num_imprecise_acc: object,
) -> interpreter.TensorHandle:
    """a @ b + d."""
    return interpreter.TensorHandle(np.matmul(_values(a), _values(b)) + d.data, d.dtype.scalar)


def make_exact() -> None:
    """Installs both; for the rest of the process."""
    interpreter._convert_float = convert
    interpreter.InterpreterBuilder.create_dot = dot
