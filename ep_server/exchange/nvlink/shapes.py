"""What the exchange on GPUs accepts, and the tensors that it fills. Knows no kernels, streams or peers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

import torch

from ep_server import _cuda
from ep_server.errors import ConfigError, InvalidArgument
from ep_server.exchange.api import AddNorm, ExchangeSpec, Payload, Received, Reduction, View
from ep_server.exchange.geometry import FP8, check_spec
from ep_server.exchange.nvlink.requests import CombineMode, Handle, Receipt, Wire
from ep_server.exchange.views import Tensors

VECTOR = 16  # bytes of one access


@dataclass(slots=True)
class RecvTensors:
    """Where a receive writes. rows is empty and row_ids given for INDEX; limit: rows of a compact view."""

    rows: torch.Tensor
    scales: torch.Tensor | None
    row_ids: torch.Tensor | None
    counts: torch.Tensor
    offsets: torch.Tensor
    limit: int


class Shapes:
    """Sizes of one rank's tensors on its GPU."""

    def __init__(self, spec: ExchangeSpec, device: torch.device) -> None:
        self.spec, self.device = spec, device
        self.fp8 = spec.payload in FP8
        self.ue8m0 = spec.payload == Payload.FP8_UE8M0
        self.row_dtype = torch.float8_e4m3fn if self.fp8 else torch.bfloat16
        self.local = len(spec.local_experts)
        self.padded = spec.num_ranks * spec.max_tokens

    def empty_padded(self) -> Tensors:
        """Rows and scales of a PADDED view; each scale column starts at a multiple of 16 bytes."""
        shape = (self.local, self.padded, self.spec.hidden)
        rows = torch.empty(shape, dtype=self.row_dtype, device=self.device)
        if not self.fp8:
            return rows, None
        plane = (self.local, self.groups, self.scale_pitch)
        scales = torch.empty(plane, dtype=self.scale_dtype, device=self.device)
        return rows, scales.transpose(1, 2)[:, : self.padded]

    def empty_compact(self, rows: int) -> Tensors:
        """Rows and scales of a COMPACT view."""
        values = torch.empty((rows, self.spec.hidden), dtype=self.row_dtype, device=self.device)
        if not self.fp8:
            return values, None
        return values, torch.empty((rows, self.groups), dtype=self.scale_dtype, device=self.device)

    @property
    def groups(self) -> int:
        """Scale words of a row."""
        return self.spec.hidden // (512 if self.ue8m0 else 128)

    @property
    def scale_dtype(self) -> torch.dtype:
        """int32 where four exponents share a word."""
        return torch.int32 if self.ue8m0 else torch.float32

    @property
    def scale_pitch(self) -> int:
        """Tokens from one scale column to the next: a multiple of 16 bytes."""
        return -(-self.padded // 4) * 4

    @property
    def most_rows(self) -> int:
        """Of a compact view."""
        return self.padded * min(self.spec.top_k, self.local)

    def check(self, name: str, tensor: torch.Tensor, dtype: torch.dtype, *shape: int) -> int:
        """The address of a contiguous tensor of this dtype and shape here, or InvalidArgument."""
        good = tensor.dtype == dtype and tuple(tensor.shape) == shape and tensor.is_contiguous()
        if not good or tensor.device != self.device:
            given = f"{tensor.dtype} {list(tensor.shape)} {tensor.stride()} on {tensor.device}"
            raise InvalidArgument(name, given, f"contiguous {dtype} {list(shape)} on {self.device}")
        return int(tensor.data_ptr())

    def optional(self, name: str, tensor: torch.Tensor | None, dtype: torch.dtype, *shape: int) -> int:
        """As check(); 0 for None."""
        return 0 if tensor is None else self.check(name, tensor, dtype, *shape)

    def narrow(self, row_bytes: int, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether 16-byte accesses are not possible."""
        return row_bytes % VECTOR != 0 or any(t.data_ptr() % VECTOR for t in tensors)

    def recv_tensors(self, receipt: Receipt) -> RecvTensors:
        """The tensors that `receipt` gives, and new ones for the rest. Raises InvalidArgument."""
        view, padded = receipt.view, receipt.view == View.PADDED
        if not padded and (receipt.out is not None or receipt.source_map):
            raise InvalidArgument("out, source_map", f"with view {view}", "given with view padded only")
        limit = self.most_rows if receipt.capacity is None else receipt.capacity
        if limit < 0 or (padded and receipt.capacity is not None):
            allowed = "at least 0, and given with view compact or index only"
            raise InvalidArgument("capacity", f"{receipt.capacity} with view {view}", allowed)
        counts, row_ids = receipt.counts, None
        if counts is None:
            counts = torch.empty(self.local, dtype=torch.int32, device=self.device)
        self.check("counts", counts, torch.int32, self.local)
        offsets = torch.empty(self.local + 1, dtype=torch.int64, device=self.device)
        if padded:
            rows, scales = self.empty_padded() if receipt.out is None else self.check_out(receipt.out)
        elif view == View.COMPACT:
            rows, scales = self.empty_compact(limit)
        else:
            rows, scales = torch.empty(0, device=self.device), None
            row_ids = torch.empty(limit, dtype=torch.int64, device=self.device)
        return RecvTensors(rows, scales, row_ids, counts, offsets, limit)

    def source_map(self) -> tuple[torch.Tensor, torch.Tensor]:
        """DeepEP's src_info [E_local, R * max_tokens] and layout_range [E_local, R], not yet written."""
        info = torch.empty((self.local, self.padded), dtype=torch.int32, device=self.device)
        ranges = torch.empty((self.local, self.spec.num_ranks), dtype=torch.int64, device=self.device)
        return info, ranges

    def check_out(self, out: Tensors) -> Tensors:
        """`out`, if it is as empty_padded() makes it."""
        rows, scales = out
        self.check("out rows", rows, self.row_dtype, self.local, self.padded, self.spec.hidden)
        if (scales is not None) != self.fp8:
            raise InvalidArgument("out scales", scales is not None, f"as payload {self.spec.payload} has it")
        if scales is not None:
            shape, plane = (self.local, self.padded, self.groups), self.groups * scales.stride(2)
            good = scales.dtype == self.scale_dtype and tuple(scales.shape) == shape
            if not good or scales.device != self.device or scales.stride()[:2] != (plane, 1):
                raise InvalidArgument("out scales", tuple(scales.shape), "as empty_padded() makes them")
        return out

    def result(self, handle: Handle, out: torch.Tensor | None) -> torch.Tensor:
        """The tensor that a combine fills."""
        shape = (handle.tokens, self.spec.hidden)
        if out is None:
            return torch.empty(shape, dtype=torch.bfloat16, device=self.device)
        self.check("out", out, torch.bfloat16, *shape)
        return out


MAX_EXPERTS = 2048  # tables of a block's shared memory
MAX_TOKENS = 32768  # counts of a header have 16 bits
GROUP = 128  # channels that share a scale
Choice = TypeVar("Choice", bound=StrEnum)


def check_device_spec(spec: ExchangeSpec, on_timeout: str) -> None:
    """Raises ConfigError for what no GPU of a host can carry."""
    check_spec(spec)
    if spec.num_ranks > _cuda.MAX_RANKS:
        raise ConfigError("num_ranks", spec.num_ranks, f"at most {_cuda.MAX_RANKS} on one host")
    if spec.num_experts > MAX_EXPERTS:
        raise ConfigError("placement", spec.num_experts, f"at most {MAX_EXPERTS} experts on GPUs")
    if spec.max_tokens > MAX_TOKENS:
        raise ConfigError("max_tokens", spec.max_tokens, f"at most {MAX_TOKENS} on GPUs")
    if spec.payload == Payload.FP32:
        raise ConfigError("payload", spec.payload, "bf16 or one of fp8 on a GPU")
    if on_timeout not in {"raise", "mask"}:
        raise ConfigError("on_timeout", on_timeout, "one of raise, mask")


def check_num_sms(num_sms: int, available: int) -> int:
    """How many multiprocessors a kernel may fill. They bound its grid, so one is enough for any operation."""
    if not 0 <= num_sms <= available:
        raise ConfigError("num_sms", num_sms, f"0 to {available}")
    return num_sms or available


def bits_of(spec: ExchangeSpec, ranks: Iterable[int]) -> int:
    """A bit for each rank. Raises InvalidArgument for one that is none of the group's."""
    bits = 0
    for rank in ranks:
        if not 0 <= rank < spec.num_ranks:
            raise InvalidArgument("ranks", rank, f"0 to {spec.num_ranks - 1}")
        bits |= 1 << rank
    return bits


def choose(field: str, kind: type[Choice], value: str) -> Choice:
    """The member of `kind` with this value, or InvalidArgument."""
    try:
        return kind(value)
    except ValueError as error:
        raise InvalidArgument(field, str(value), "one of " + ", ".join(kind)) from error


def check_dispatch(shapes: Shapes, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor | None) -> int:
    """T of a dispatch. Raises InvalidArgument."""
    spec, tokens = shapes.spec, x.shape[0] if x.dim() == 2 else -1
    shapes.check("x", x, torch.bfloat16, tokens, spec.hidden)
    if tokens > spec.max_tokens:
        raise InvalidArgument("x", f"T = {tokens}", f"at most max_tokens = {spec.max_tokens} tokens")
    shapes.check("topk_ids", ids, torch.int64, tokens, spec.top_k)
    shapes.optional("topk_weights", weights, torch.float32, tokens, spec.top_k)
    return tokens


def handle_of(received: Received) -> Handle:
    """The state that a dispatch left in what it returned."""
    if not isinstance(received.handle, Handle):
        raise InvalidArgument("received.handle", received.handle, "of a dispatch of this exchange")
    return received.handle


def combine_mode(spec: ExchangeSpec, reduction: Reduction | None, wire: str) -> CombineMode:
    """How a combine runs. Raises InvalidArgument for what the spec has no room for."""
    reduction = choose("reduction", Reduction, spec.reduction if reduction is None else reduction)
    mode = CombineMode(reduction, choose("wire", Wire, wire))
    if reduction == Reduction.SOURCE and spec.reduction == Reduction.RANK:
        raise InvalidArgument("reduction", str(reduction), "rank, as the spec says")
    if mode.wire != Wire.BF16 and (reduction == Reduction.SOURCE or spec.hidden % GROUP):
        allowed = f"bf16, or reduction rank and hidden a multiple of {GROUP}"
        raise InvalidArgument("wire", str(mode.wire), allowed)
    return mode


def check_answer(
    shapes: Shapes,
    expert_out: torch.Tensor,
    received: Received,
    weights: torch.Tensor | None,
    mode: CombineMode,
) -> Handle:
    """The handle of a combine's dispatch. Raises InvalidArgument."""
    spec, handle = shapes.spec, handle_of(received)
    if handle.answering:
        raise InvalidArgument("received.handle", "of a combine that was not received", "of one at a time")
    rows = (shapes.local, shapes.padded) if received.view == View.PADDED else (handle.rows,)
    shapes.check("expert_out", expert_out, torch.bfloat16, *rows, spec.hidden)
    if weights is not None:
        if handle.weighted:
            raise InvalidArgument("topk_weights", "a tensor", "None: this dispatch was given them")
        shapes.check("topk_weights", weights, torch.float32, handle.tokens, spec.top_k)
    elif not handle.weighted and (mode.reduction == Reduction.RANK or handle.tokens):
        raise InvalidArgument("topk_weights", None, "given at dispatch or at combine")
    return handle


def can_norm(shapes: Shapes, norm: AddNorm) -> bool:
    """Whether combine's kernel takes these tensors; else another one has to norm its sums."""
    tensors = [t for t in (norm.residual, norm.weight, norm.shared) if t is not None]
    plain = all(t.dtype == torch.bfloat16 and t.is_contiguous() for t in tensors)
    return plain and not shapes.narrow(shapes.spec.hidden * 2, tensors)


def check_norm(shapes: Shapes, tokens: int, norm: AddNorm, mode: CombineMode) -> None:
    """Raises InvalidArgument for what a combine of T = `tokens` cannot norm."""
    hidden = shapes.spec.hidden
    shapes.check("add_norm.residual", norm.residual, torch.bfloat16, tokens, hidden)
    shapes.check("add_norm.weight", norm.weight, torch.bfloat16, hidden)
    shapes.optional("add_norm.shared", norm.shared, torch.bfloat16, tokens, hidden)
    if mode.wire != Wire.BF16:
        raise InvalidArgument("wire", str(mode.wire), "bf16 with add_norm")
    if not can_norm(shapes, norm):
        raise InvalidArgument("add_norm", f"H = {hidden}", "rows at multiples of 16 bytes")
