"""Checks the arguments of an exchange before anything is sent. Every transport refuses the same things.

Knows shapes, dtypes and ranges; nothing of transports.
"""

from __future__ import annotations

import torch

from ep_server.errors import InvalidArgument
from ep_server.exchange.api import ExchangeSpec, Payload, Received, Reduction, View

CPU = torch.device("cpu")


def fits(tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> bool:
    """Whether `tensor` is a contiguous CPU tensor of this dtype and shape: the hot path's first question."""
    return tensor.dtype is dtype and tensor.shape == shape and tensor.is_contiguous() and tensor.is_cpu


def check_tensor(name: str, tensor: torch.Tensor, dtype: torch.dtype, /, **dims: int) -> None:
    """Raises InvalidArgument unless `tensor` is a contiguous CPU tensor of this dtype and these dimensions.

    Args:
        dims: name=size in order, for example T=32, H=2048.
    """
    check_tensor_on(CPU, name, tensor, dtype, **dims)


def check_is_tensor(name: str, value: object) -> None:
    """Raises InvalidArgument for anything else."""
    if not isinstance(value, torch.Tensor):
        raise InvalidArgument(name, type(value).__name__, "a tensor")


def check_tensor_on(
    device: torch.device, name: str, tensor: torch.Tensor, dtype: torch.dtype, /, **dims: int
) -> None:
    """The same of a tensor on any device."""
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


def input_dtype(spec: ExchangeSpec) -> torch.dtype:
    """What x, expert_out and the result are made of."""
    return torch.float32 if spec.payload is Payload.FP32 else torch.bfloat16


def check_tokens(
    spec: ExchangeSpec, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor | None
) -> None:
    """Raises InvalidArgument where the arguments of dispatch_send do not fit the spec."""
    if x.dim() != 2 or x.shape[1] != spec.hidden or x.dtype != input_dtype(spec) or not x.is_contiguous():
        allowed = f"contiguous [T, {spec.hidden}] {input_dtype(spec)}"
        raise InvalidArgument("x", (tuple(x.shape), x.dtype), allowed)
    if len(x) > spec.max_tokens:
        raise InvalidArgument("x.shape[0]", len(x), f"at most max_tokens = {spec.max_tokens}")
    shape = (len(x), spec.top_k)
    if tuple(ids.shape) != shape or ids.dtype != torch.int64:
        raise InvalidArgument("topk_ids", (tuple(ids.shape), ids.dtype), f"{shape} torch.int64")
    outside = (ids < -1) | (ids >= spec.num_experts)
    if outside.any():
        raise InvalidArgument("topk_ids", int(ids[outside][0]), f"-1 to {spec.num_experts - 1}")
    ordered = ids.sort(dim=1).values
    repeated = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    if repeated.any():
        raise InvalidArgument("topk_ids", int(ordered[:, 1:][repeated][0]), "distinct within its token")
    if weights is None and spec.reduction is Reduction.RANK:
        raise InvalidArgument("topk_weights", None, "given at dispatch for reduction rank")
    if weights is not None:
        check_weights(weights, shape)


def check_expert_out(spec: ExchangeSpec, expert_out: torch.Tensor, received: Received) -> None:
    """Raises InvalidArgument where expert_out is not in the layout of `received`."""
    if received.view is View.PADDED:
        shape = tuple(received.rows.shape)
    else:
        shape = (int(received.offsets[-1]), spec.hidden)
    if tuple(expert_out.shape) != shape or expert_out.dtype != input_dtype(spec):
        allowed = f"{shape} {input_dtype(spec)}"
        raise InvalidArgument("expert_out", (tuple(expert_out.shape), expert_out.dtype), allowed)


def check_weights(weights: torch.Tensor, shape: tuple[int, int]) -> None:
    """Raises InvalidArgument where weights are not float32 of this [T, K]."""
    if tuple(weights.shape) != shape or weights.dtype != torch.float32:
        raise InvalidArgument("topk_weights", (tuple(weights.shape), weights.dtype), f"{shape} torch.float32")
