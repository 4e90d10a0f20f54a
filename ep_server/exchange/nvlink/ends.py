"""How an exchange between GPUs begins and ends, whatever it sends."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ep_server.errors import ConfigError, ExchangeError, InternalError, StartupError
from ep_server.exchange.device_wait import await_idle, longest_wait
from ep_server.exchange.host import HostGroup
from ep_server.exchange.spec import ExchangeSpec

log = logging.getLogger(__name__)


@contextmanager
def begins(spec: ExchangeSpec, control: HostGroup) -> Iterator[None]:
    """If the body fails, so do the other ranks. Closes `control` then. Raises: StartupError; ConfigError."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, ConfigError):  # which all ranks find alike
            control.abort()  # the others would wait for this rank
        control.close()
        if isinstance(error, RuntimeError | ExchangeError):
            raise StartupError(f"rank {spec.rank}: {error}") from error
        raise


def end(spec: ExchangeSpec, control: HostGroup, device: torch.device, group: object) -> None:
    """Closes an exchange, whose group of csrc nobody else has. Raises: RuntimeError of the GPU.

    A GPU that does not end its work keeps the group: to free that would wait for the GPU without a deadline.
    """
    try:
        await_idle(device, longest_wait(spec), group)
    except InternalError as error:
        control.abort()  # the group keeps this rank's heartbeat: the others would take it for alive
        why = str(error)  # a record with the error itself would keep the group, too
        log.error("rank %d: the exchange is closed, but its memory stays in use: %s", spec.rank, why)
    finally:
        control.close()
