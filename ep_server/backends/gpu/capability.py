"""What a rank's GPU can run: its multiprocessors, and whether it supports our compiled kernels."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from ep_server.errors import StartupError

NATIVE = "ep_server._cuda"


def gpus_found() -> tuple[int, str]:
    """The number of GPUs that this process can use and, if 0, the reason as text to append to the number."""
    count = torch.cuda.device_count()
    if count:
        return count, ""
    if torch.version.cuda is None:
        return 0, f": torch {torch.__version__} is a build without CUDA"
    return 0, (
        f": torch {torch.__version__} finds none; does nvidia-smi list them, is the driver new enough for "
        f"CUDA {torch.version.cuda}, and does CUDA_VISIBLE_DEVICES leave some?"
    )


def sm_count(device: torch.device) -> int:
    """Multiprocessors of a GPU; 0 if kernels are interpreted."""
    if device.type != "cuda":
        return 0
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def native() -> Any:
    """The package's CUDA module. Raises: ImportError if there is no module or no driver."""
    return import_module(NATIVE)


def native_built() -> bool:
    """Whether the package has its CUDA module."""
    return find_spec(NATIVE) is not None


def require_native(purpose: str) -> None:
    """Requires the CUDA module. Raises: StartupError if the package was built without it."""
    if not native_built():
        raise StartupError(
            f"{purpose} needs {NATIVE}, without which ep_server was built: there was no nvcc; install it "
            "again with one in CUDA_HOME or PATH"
        )


def runs_hopper_kernels(device: torch.device) -> bool:
    """Whether the kernels of csrc/kernels/hopper run on this device."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9 and native_built()
