"""The tensors of the model: what they mean, how inputs are read and outputs written.

Data comes in `raw_input_contents`, in the order of `inputs`, or in the `contents` of each tensor. Outputs are
always raw, as Triton's are. A string is its length in 4 bytes, little-endian, and then its bytes.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import numpy as np

from ep_server.errors import ContextLengthExceeded, InvalidArgument

SHOWN = 80  # characters of a value that an error message repeats


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor by name. datatypes: the first one is reported as its own.

    one: it has a single element, else any number. meaning: for the reference.
    """

    name: str
    datatypes: tuple[str, ...]
    one: bool
    meaning: str


def _by_name(*specs: TensorSpec) -> Mapping[str, TensorSpec]:
    return {spec.name: spec for spec in specs}


INPUTS: Final = _by_name(
    TensorSpec("text_input", ("BYTES",), True, "The prompt, as UTF-8 text. Either this or `input_ids`."),
    TensorSpec("input_ids", ("INT64", "INT32"), False, "The prompt, as token ids. Used exactly as given."),
    TensorSpec("stream", ("BOOL",), True, "Respond as tokens are drawn. `ModelStreamInfer` only."),
    TensorSpec("sampling_parameters", ("BYTES",), True, "A JSON object with the keys listed below."),
    TensorSpec(
        "exclude_input_in_output",
        ("BOOL",),
        True,
        "Leave the prompt out of `text_output`. Default: true with `stream` or `input_ids`, else false.",
    ),
    TensorSpec("return_finish_reason", ("BOOL",), True, "Return `finish_reason`."),
    TensorSpec("return_cumulative_logprob", ("BOOL",), True, "Return `cumulative_logprob`."),
    TensorSpec("return_logprobs", ("BOOL",), True, "Return `logprobs`."),
    TensorSpec("return_num_input_tokens", ("BOOL",), True, "Return `num_input_tokens`."),
    TensorSpec("return_num_output_tokens", ("BOOL",), True, "Return `num_output_tokens`."),
)
OUTPUTS: Final = _by_name(
    TensorSpec("text_output", ("BYTES",), False, "The text of each sequence; with `stream`, what is new."),
    TensorSpec("output_ids", ("INT64",), False, "Its token ids; with `stream`, the new ones. Needs `n` = 1."),
    TensorSpec(
        "finish_reason", ("BYTES",), False, "Of each sequence: `stop`, `length`, or `None` before its end."
    ),
    TensorSpec(
        "cumulative_logprob", ("FP32",), False, "Of each sequence: the sum over all its tokens so far."
    ),
    TensorSpec(
        "logprobs",
        ("BYTES",),
        False,
        "Of each sequence: a JSON list with one object per token, from token id to logprob, rank and text.",
    ),
    TensorSpec("num_input_tokens", ("UINT32",), True, "Length of the prompt."),
    TensorSpec("num_output_tokens", ("UINT32",), False, "Of each sequence; with `stream`, the new tokens."),
)
FLAGS: Final = {f"return_{name}": name for name in OUTPUTS if f"return_{name}" in INPUTS}

_CONTENTS: Final = {
    "BOOL": "bool_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "BYTES": "bytes_contents",
}
_DTYPES: Final = {"INT32": "<i4", "INT64": "<i8"}  # of inputs
_FORMATS: Final = {"INT64": "q", "UINT32": "I", "FP32": "f"}  # of outputs


def read_inputs(request: Any, max_elements: int) -> dict[str, Sequence[Any]]:
    """Elements of each input by name. max_elements: of `input_ids`.

    Raises: InvalidArgument, ContextLengthExceeded.
    """
    raw = request.raw_input_contents
    if raw and len(raw) != len(request.inputs):
        allowed = f"one per input, {len(request.inputs)}, or none"
        raise InvalidArgument("raw_input_contents", f"{len(raw)} buffers", allowed)
    found: dict[str, Sequence[Any]] = {}
    for index, tensor in enumerate(request.inputs):
        spec = INPUTS.get(tensor.name)
        if spec is None or tensor.name in found:
            allowed = f"each given once, one of {', '.join(INPUTS)}"
            raise InvalidArgument("inputs.name", tensor.name[:SHOWN], allowed)
        _check_kind(tensor, spec)
        size = _size(tensor, spec)
        data = _raw(tensor, raw[index]) if raw else _typed(tensor)
        if len(data) != size:
            allowed = f"as many as its shape {list(tensor.shape)} has"
            raise InvalidArgument(tensor.name, f"{len(data)} elements", allowed)
        if len(data) > max_elements:
            raise ContextLengthExceeded(f"{tensor.name} has {len(data)} tokens: at most {max_elements}")
        found[tensor.name] = data
    return found


def text_of(name: str, data: bytes) -> str:
    """An element of a BYTES tensor as text. Raises: InvalidArgument."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        shown = data[:SHOWN].decode(errors="replace")
        raise InvalidArgument(name, shown, f"UTF-8 text ({error.reason} at byte {error.start})") from None


def encode(spec: TensorSpec, values: Sequence[Any]) -> bytes:
    """The raw contents of an output."""
    datatype = spec.datatypes[0]
    if datatype == "BYTES":
        return b"".join(struct.pack("<I", len(value)) + value for value in values)
    return struct.pack(f"<{len(values)}{_FORMATS[datatype]}", *values)


def _check_kind(tensor: Any, spec: TensorSpec) -> None:
    if tensor.datatype not in spec.datatypes:
        allowed = " or ".join(spec.datatypes)
        raise InvalidArgument(f"{tensor.name}.datatype", tensor.datatype[:SHOWN], allowed)
    for key in sorted(tensor.parameters)[:1]:
        allowed = "absent: data comes in the message, shared memory is not supported"
        raise InvalidArgument(f"{tensor.name}.parameters", key[:SHOWN], allowed)


def _size(tensor: Any, spec: TensorSpec) -> int:
    """Elements that the shape promises."""
    shape = list(tensor.shape[:3])
    lengths = {1} if spec.one else range(1, 1 << 63)
    if not 1 <= len(shape) <= 2 or shape[-1] not in lengths or shape[:-1] not in ([], [1]):
        forms = "[1] or [1, 1]" if spec.one else "[n] or [1, n], n at least 1"
        raise InvalidArgument(
            f"{tensor.name}.shape", shape, f"{forms}: a message is one request, not a batch"
        )
    return math.prod(shape)


def _raw(tensor: Any, data: bytes) -> Sequence[Any]:
    """Elements of a buffer, as many as there are."""
    if tensor.HasField("contents"):
        allowed = "absent beside raw_input_contents"
        raise InvalidArgument(f"{tensor.name}.contents", "given", allowed)
    if tensor.datatype == "BYTES":
        return _strings(tensor.name, data)
    if tensor.datatype == "BOOL":
        return [byte != 0 for byte in data]
    dtype = np.dtype(_DTYPES[tensor.datatype])
    if len(data) % dtype.itemsize:
        allowed = f"a multiple of {dtype.itemsize} bytes, the size of {tensor.datatype}"
        raise InvalidArgument(tensor.name, f"{len(data)} bytes", allowed)
    elements: Sequence[Any] = cast(Any, np.frombuffer(data, dtype))
    return elements


def _strings(name: str, data: bytes) -> list[bytes]:
    """At most one: no input has more."""
    size = struct.unpack_from("<I", data)[0] if len(data) >= 4 else -1
    if size != len(data) - 4:
        allowed = "one string: its length in 4 bytes, little-endian, and then as many bytes"
        raise InvalidArgument(name, f"{len(data)} bytes", allowed)
    return [data[4:]]


def _typed(tensor: Any) -> Sequence[Any]:
    field = _CONTENTS[tensor.datatype]
    for other, _ in tensor.contents.ListFields():
        if other.name != field:
            allowed = f"absent: {tensor.datatype} comes in {field}"
            raise InvalidArgument(f"{tensor.name}.contents.{other.name}", "given", allowed)
    elements: Sequence[Any] = getattr(tensor.contents, field)
    return elements
