"""[2] Other protocols on the same engine, one folder each.

A door is a thin, total mapping: its messages become a GenerateRequest, our events become its messages, and
what it cannot express is refused by name. Its stubs come from a package that the protocol's clients use.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, Protocol

from grpc import aio

from ep_server.config import Config, GrpcConfig
from ep_server.engine.engine import Engine
from ep_server.errors import ConfigError
from ep_server.frontend.generation import Generator
from ep_server.frontend.messages import Method
from ep_server.frontend.served_model import ServedModel

log = logging.getLogger(__name__)

# Folder of the door, as grpc.doors names it -> package on PyPI that has its stubs.
STUBS: Mapping[str, str] = {"oip": "tritonclient[grpc]", "vllm_engine": "smg-grpc-proto"}
ALL = "all"


class Door(Protocol):
    """One protocol of this server. Create it once; add it to each port that serves it."""

    service: Any  # its ServiceDescriptor, for reflection, health and relays

    def methods(self) -> Mapping[str, Method]:
        """Limits of its calls, by "/service/method"; the others get those of a plain call."""
        ...

    def add_to(self, server: aio.Server, generator: Generator) -> None:
        """Adds the service to a port. generator: of that port."""
        ...


class DoorModule(Protocol):
    """The face of a door's folder."""

    SERVICE: Any  # ServiceDescriptor

    def open_door(self, config: Config, engine: Engine, model: ServedModel) -> Door:
        """The door of one server."""
        ...


def installed_doors(config: GrpcConfig) -> Sequence[DoorModule]:
    """The doors of grpc.doors. With "all", a door whose stubs are not installed is left out.

    Raises: ConfigError (grpc.doors).
    """
    if config.doors == ALL:
        return [module for name in STUBS if (module := _imported(name)) is not None]
    names = [name for part in config.doors.split(",") if (name := part.strip())]
    modules = []
    for name in dict.fromkeys(names):
        if name not in STUBS:
            raise ConfigError("grpc.doors", name, f"{ALL}, or some of {', '.join(STUBS)}")
        if (module := _imported(name)) is None:
            raise ConfigError("grpc.doors", name, f"left out, or its package {STUBS[name]} installed")
        modules.append(module)
    return modules


def services(modules: Sequence[DoorModule]) -> Sequence[Any]:
    """Their ServiceDescriptors."""
    return [module.SERVICE for module in modules]


def open_doors(config: Config, engine: Engine, model: ServedModel) -> Sequence[Door]:
    """The doors of grpc.doors. Raises: ConfigError (grpc.doors)."""
    return [module.open_door(config, engine, model) for module in installed_doors(config.grpc)]


def _imported(name: str) -> Any:
    """A DoorModule; None if its stubs are not installed."""
    try:
        return import_module(f"{__name__}.{name}")
    except ModuleNotFoundError as error:
        if (error.name or "").startswith(__name__.partition(".")[0]):
            raise
        log.info("grpc.doors: %s is off, as %s is not installed", name, STUBS[name])
        return None
