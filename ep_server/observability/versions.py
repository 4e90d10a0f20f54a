"""Versions of what runs, for reports of faults. Imports none of the libraries that it names."""

from __future__ import annotations

import platform
from importlib import metadata

import ep_server

LIBRARIES = (
    "torch",
    "grpcio",
    "protobuf",
    "uvloop",
    "prometheus-client",
    "safetensors",
    "tokenizers",
    "numpy",
)


def versions() -> dict[str, str]:
    """ep_server, python, kernel and the libraries, by name; "absent" for one that is not installed."""
    return {
        "ep_server": ep_server.__version__,
        "python": platform.python_version(),
        "kernel": f"{platform.system()} {platform.release()} {platform.machine()}",
        **{name: _version(name) for name in LIBRARIES},
    }


def _version(library: str) -> str:
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return "absent"
