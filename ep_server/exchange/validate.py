"""Checks the arguments of an exchange before anything is sent. All transports refuse the same things."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from ep_server.errors import InvalidArgument
from ep_server.exchange.api import Handle, Received, RecvOptions, Reduction, Wire, chosen
from ep_server.exchange.spec import ExchangeSpec, Payload

CPU = torch.device("cpu")
GROUP = 128  # channels that share a scale


class CombineMode(NamedTuple):
    """How a combine runs; the same on all ranks."""

    reduction: Reduction
    wire: Wire


def fits(tensor: torch.Tensor, device: torch.device, dtype: torch.dtype, shape: tuple[int, ...]) -> bool:
    """Whether `tensor` is as check_tensor wants it: the first and fast question of each call."""
    return (
        tensor.dtype is dtype and tensor.shape == shape and tensor.is_contiguous() and tensor.device == device
    )


def check_tensor(
    name: str, tensor: torch.Tensor, device: torch.device, dtype: torch.dtype, /, **dims: int
) -> None:
    """Raises InvalidArgument unless `tensor` is contiguous on `device`, of this dtype and these dimensions.

    Args:
        dims: name=size in order, for example T=32, H=2048.
    """
    check_is_tensor(name, tensor)
    good = tensor.dtype is dtype and tensor.shape == (*dims.values(),) and tensor.device == device
    if good and tensor.is_contiguous():
        return
    given = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} on {tensor.device}"
    if not tensor.is_contiguous():
        given += f" with strides {tensor.stride()}"
    wanted = ", ".join(f"{key}={size}" for key, size in dims.items())
    raise InvalidArgument(
        name, given, f"contiguous {str(dtype).removeprefix('torch.')} [{wanted}] on {device}"
    )


def check_is_tensor(name: str, value: object) -> None:
    """Raises InvalidArgument for anything else."""
    if not isinstance(value, torch.Tensor):
        raise InvalidArgument(name, type(value).__name__, "a tensor")


def input_dtype(spec: ExchangeSpec) -> torch.dtype:
    """Of x, expert_out and the result."""
    return torch.float32 if spec.payload is Payload.FP32 else torch.bfloat16


def check_dispatch(
    spec: ExchangeSpec,
    device: torch.device,
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor | None,
    *,
    pushes_weights: bool = False,
) -> int:
    """T of a dispatch. Raises InvalidArgument for tensors that do not fit the spec; reads no values.

    Args:
        pushes_weights: weights may be given at combine whatever the reduction.
    """
    tokens = x.shape[0] if x.dim() == 2 else -1
    dtype, choices = input_dtype(spec), (tokens, spec.top_k)
    if not fits(x, device, dtype, (tokens, spec.hidden)):
        check_tensor("x", x, device, dtype, T=tokens, H=spec.hidden)
    if tokens > spec.max_tokens:
        raise InvalidArgument("x", f"T = {tokens}", f"at most max_tokens = {spec.max_tokens} tokens")
    if not fits(ids, device, torch.int64, choices):
        check_tensor("topk_ids", ids, device, torch.int64, T=tokens, K=spec.top_k)
    if weights is not None:
        if not fits(weights, device, torch.float32, choices):
            check_tensor("topk_weights", weights, device, torch.float32, T=tokens, K=spec.top_k)
    elif spec.reduction is Reduction.RANK and not pushes_weights:
        raise InvalidArgument("topk_weights", None, "given at dispatch for reduction rank")
    return tokens


def check_ids(spec: ExchangeSpec, ids: torch.Tensor) -> None:
    """Raises InvalidArgument for ids out of range or repeated within a token. Waits for their device."""
    ids = ids.cpu()
    outside = (ids < -1) | (ids >= spec.num_experts)
    if outside.any():
        raise InvalidArgument("topk_ids", int(ids[outside][0]), f"-1 to {spec.num_experts - 1}")
    ordered = ids.sort(dim=1).values
    repeated = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    if repeated.any():
        raise InvalidArgument("topk_ids", int(ordered[:, 1:][repeated][0]), "distinct within its token")


def rank_bits(spec: ExchangeSpec, ranks: Iterable[int]) -> int:
    """A bit for each of the other ranks given. Raises InvalidArgument."""
    bits = 0
    for rank in ranks:
        if not 0 <= rank < spec.num_ranks or rank == spec.rank:
            raise InvalidArgument("ranks", rank, f"0 to {spec.num_ranks - 1}, not this rank itself")
        bits |= 1 << rank
    return bits


def handle_of(received: Received, owner: object) -> Handle[Any]:
    """What this owner's dispatch left in what it received. Raises InvalidArgument for another's."""
    handle = received.handle
    if not isinstance(handle, Handle) or handle.owner is not owner:
        given = "of another exchange, or of before a reset"
        raise InvalidArgument("received.handle", given, "of a dispatch of this exchange")
    return handle


def combine_mode(
    spec: ExchangeSpec, reduction: Reduction | None, wire: Wire, wires: frozenset[Wire]
) -> CombineMode:
    """Reduction and wire of a combine. Raises InvalidArgument for what spec or exchange cannot carry."""
    if reduction is None and wire is Wire.BF16:
        return CombineMode(spec.reduction, wire)
    mode = CombineMode(
        chosen("reduction", Reduction, spec.reduction if reduction is None else reduction),
        chosen("wire", Wire, wire),
    )
    if mode.reduction is Reduction.SOURCE and spec.reduction is Reduction.RANK:
        raise InvalidArgument("reduction", str(mode.reduction), "rank, as the spec says")
    if mode.wire not in wires:
        raise InvalidArgument("wire", str(mode.wire), "one of " + ", ".join(w for w in Wire if w in wires))
    if mode.wire is not Wire.BF16 and (mode.reduction is Reduction.SOURCE or spec.hidden % GROUP):
        allowed = f"bf16, or reduction rank and hidden a multiple of {GROUP}"
        raise InvalidArgument("wire", str(mode.wire), allowed)
    return mode


def check_combine_weights(
    spec: ExchangeSpec,
    device: torch.device,
    handle: Handle[Any],
    weights: torch.Tensor | None,
    reduction: Reduction,
    *,
    pushes_weights: bool = False,
) -> None:
    """Raises InvalidArgument unless either dispatch or combine has the weights. See check_dispatch."""
    if weights is None:
        if not handle.weighted and (handle.tokens or reduction is Reduction.RANK):
            raise InvalidArgument("topk_weights", None, "given at dispatch or at combine")
        return
    if handle.weighted:
        raise InvalidArgument("topk_weights", "a tensor", "None: this dispatch was given them")
    if reduction is Reduction.RANK and not pushes_weights:
        raise InvalidArgument("topk_weights", "a tensor", "given at dispatch for reduction rank")
    check_tensor("topk_weights", weights, device, torch.float32, T=handle.tokens, K=spec.top_k)


def check_hints_only(options: RecvOptions) -> None:
    """Raises InvalidArgument for options of an exchange that fills no tensors of its callers."""
    for name in ("out", "counts", "source_map", "expert_stats", "wait_stats"):
        if options.get(name) is not None:
            raise InvalidArgument(name, "given", "None: this exchange allocates what it receives")
