"""The check of a tensor at the boundary: one message with the expected and the given."""

from __future__ import annotations

import torch

from ep_server.errors import InvalidArgument

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
