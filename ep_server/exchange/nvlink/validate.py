"""What the exchange on GPUs refuses before anything is sent, by name: specs, tensors, choices of a call."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import TypeVar

import torch

from ep_server import _cuda
from ep_server.errors import ConfigError, InvalidArgument
from ep_server.exchange.api import AddNorm, ExchangeSpec, Payload, Received, Reduction, View
from ep_server.exchange.limits import check_spec
from ep_server.exchange.nvlink.handle import Handle
from ep_server.exchange.nvlink.requests import CombineMode, Wire
from ep_server.exchange.nvlink.shapes import Shapes

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
