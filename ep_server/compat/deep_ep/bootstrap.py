"""Opens exchanges for the ranks of a torch.distributed group on one host."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ep_server.errors import ConfigError, StartupError
from ep_server.exchange.api import Exchange, ExchangeSpec
from ep_server.exchange.bootstrap import share_segment
from ep_server.exchange.bulk import BulkExchange, HostBulk
from ep_server.exchange.factory import Opening, Topology, open_bulk, open_exchange, segment_spec
from ep_server.exchange.segment import create_segment
from ep_server.exchange.spec import Waiting, control_spec
from ep_server.exchange.validate import CPU


def from_process_group(
    group: Any,
    spec: ExchangeSpec,
    device: torch.device = CPU,
    waiting: Waiting | None = None,
    num_sms: int = 0,
) -> Exchange:
    """An exchange of tensors on `device` for the ranks of a group on one host. Collective.

    Args:
        group: a ProcessGroup with object collectives (gloo), or None for the default one.
        spec: rank and num_ranks must be those of the group.
        num_sms: multiprocessors of a GPU that a kernel may fill; 0 = all.
    Raises: ConfigError; StartupError, on every rank if rank 0 cannot create the memory.
    """
    topology = Topology((0,) * spec.num_ranks, gpus=device != CPU)
    segment = group_segment(group, segment_spec(topology, spec))
    opening = Opening(segment, waiting=waiting or Waiting(), num_sms=num_sms)
    try:
        exchange = open_exchange(topology, spec, device, opening)
    except ImportError as error:
        os.close(segment)
        raise StartupError(f"this installation was built without CUDA: {error}") from error
    exchange.barrier()
    return exchange


def bulk_from_process_group(
    group: Any, device: torch.device, timeout_ns: int, heap_bytes: int
) -> BulkExchange:
    """A BulkExchange of tensors on `device` for the ranks of a group on one host. Collective.

    Args:
        heap_bytes: memory of a GPU for received rows.
    Raises: as from_process_group.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if device == CPU:
        return HostBulk(rank, size, partial(_open_rows, group, timeout_ns))
    spec = control_spec(_rows_spec(group, 1, 2, timeout_ns))
    segment = group_segment(group, spec)
    try:
        return open_bulk(spec, device, segment, heap_bytes)
    except ImportError as error:
        os.close(segment)
        raise StartupError(f"this installation was built without CUDA: {error}") from error


def _open_rows(group: Any, timeout_ns: int, tokens: int, row_bytes: int) -> Exchange:
    """Moves rows of bytes between CPUs."""
    return from_process_group(group, _rows_spec(group, tokens, row_bytes, timeout_ns))


def _rows_spec(group: Any, tokens: int, row_bytes: int, timeout_ns: int) -> ExchangeSpec:
    """Rank r has expert r alone."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    return ExchangeSpec(
        rank=rank,
        num_ranks=size,
        placement=tuple(range(size)),
        max_tokens=tokens,
        hidden=row_bytes // 2,
        top_k=size,
        num_banks=2,
        timeout_ns=timeout_ns,
    )


def group_segment(group: Any, spec: ExchangeSpec) -> int:
    """A descriptor of one segment for each rank of a group on one host, which closes it. Collective."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if (spec.rank, spec.num_ranks) != (rank, size):
        raise ConfigError("rank, num_ranks", (spec.rank, spec.num_ranks), f"{(rank, size)}, as in the group")
    made, failed, rendezvous = -1, "", _GroupRendezvous(group)
    if rank == 0:
        try:
            made = create_segment(spec)
        except (StartupError, OSError) as error:
            failed = str(error)
    boot = Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()
    boots, failures = rendezvous.all_gather(boot), rendezvous.all_gather(failed.encode())
    if failures[0]:
        raise StartupError(failures[0].decode())
    if len(set(boots)) != 1:
        if made >= 0:
            os.close(made)
        raise ConfigError("group", f"ranks on {len(set(boots))} hosts", "on one host for shared memory")
    return share_segment(rendezvous, rank, range(size), lambda: made)


class _GroupRendezvous:
    """A process group as a Rendezvous."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def all_gather(self, record: bytes) -> list[bytes]:
        """Of records of any length."""
        records: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(records, record, group=self._group)
        return records

    def barrier(self) -> None:
        """Of the group."""
        dist.barrier(self._group)
