"""Opens exchanges for the ranks of a torch.distributed group."""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ep_server.errors import ConfigError, InternalError, StartupError
from ep_server.exchange.api import Exchange, ExchangeSpec
from ep_server.exchange.bootstrap import share_descriptors, share_segment
from ep_server.exchange.bulk import BulkExchange, ExchangeBulk
from ep_server.exchange.fabric.settings import SESSION_BITS, EndpointAddress, FabricOptions
from ep_server.exchange.factory import Opening, Topology, open_bulk, open_exchange, segment_spec
from ep_server.exchange.segment import create_host_share, create_segment
from ep_server.exchange.spec import Waiting, control_spec, ranks_of_host
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


@dataclass(frozen=True, slots=True)
class Network:
    """Where the ranks of a group are, and what lies between.

    hosts: [R] number of each rank's host; the ranks of a host follow one another. () = as their kernels say.
    fabric: settings of the network between hosts.
    """

    hosts: tuple[int, ...] = ()
    fabric: FabricOptions = field(default_factory=FabricOptions)


def bulk_from_process_group(
    group: Any, device: torch.device, timeout_ns: int, heap_bytes: int, network: Network
) -> BulkExchange:
    """A BulkExchange of tensors on `device` for the ranks of a group. Collective.

    Args:
        heap_bytes: memory of a GPU for received rows; of one host only.
    Raises: as from_process_group.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    hosts = _hosts_of(group, network.hosts)
    if len(set(hosts)) > 1 or device == CPU:
        opened = partial(_open_rows, group, timeout_ns)
        if len(set(hosts)) > 1:
            opened = partial(_open_between_hosts, group, replace(network, hosts=hosts), device, timeout_ns)
        exchange = ExchangeBulk(rank, size, opened, device)
        ranks_of_host(hosts, _rows_spec(group, 1, 2, timeout_ns))  # refuses hosts that cannot be
        return exchange
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


def _open_between_hosts(
    group: Any, network: Network, device: torch.device, timeout_ns: int, tokens: int, row_bytes: int
) -> Exchange:
    """As _open_rows, between hosts: a row goes to each once, there through shared memory or NVLink."""
    spec, rendezvous = _rows_spec(group, tokens, row_bytes, timeout_ns), _Rendezvous(group)
    hosts, ranks = network.hosts, ranks_of_host(network.hosts, spec)
    all_have_several = min(map(hosts.count, hosts)) > 1
    topology = Topology(hosts, gpus=device != CPU, hierarchical=all_have_several)
    met = False

    def connect(address: EndpointAddress, seconds: float) -> tuple[list[EndpointAddress], int]:
        nonlocal met
        met = True
        answers = rendezvous.gather((address, secrets.randbits(SESSION_BITS)))
        for rank, answer in enumerate(answers):
            if isinstance(answer, str):
                raise StartupError(f"rank {rank}: {answer}")
        return [where for where, _ in answers], answers[0][1]

    fd, *bells = _host_descriptors(rendezvous, spec, hosts, ranks)
    opening = Opening(fd, connect=connect, bells=tuple(bells), options=network.fabric, many=True)
    try:
        exchange = open_exchange(topology, spec, device, opening)
    except Exception as error:
        if not met:  # the others wait for the address of this rank
            rendezvous.gather(str(error))
        if isinstance(error, ImportError):
            raise StartupError(f"this installation was built without CUDA: {error}") from error
        raise
    if device == CPU or not all_have_several:
        return exchange
    if exchange.normal is None:  # the kernels for few rows take some bytes for an empty slot
        raise InternalError("an exchange between hosts of GPUs has no operations for many rows")
    return exchange.normal


def _host_descriptors(
    rendezvous: _Rendezvous, spec: ExchangeSpec, hosts: tuple[int, ...], ranks: range
) -> list[int]:
    """What the ranks of this host share, for this rank to close."""
    made: tuple[int, ...] = ()
    failed = ""
    if spec.rank == ranks.start:
        try:
            made = create_host_share(spec, hosts, hosts[spec.rank]).descriptors
        except (StartupError, ConfigError, OSError) as error:
            failed = str(error)
    if failures := [text for text in rendezvous.gather(failed) if text]:
        for one in made:
            os.close(one)
        raise StartupError(failures[0])
    try:
        return share_descriptors(rendezvous, spec.rank, ranks, lambda: made)
    except StartupError as error:
        hint = "Network(hosts=...) tells which ranks share memory"
        raise StartupError(f"{error}; {hint}") from error


def group_segment(group: Any, spec: ExchangeSpec) -> int:
    """A descriptor of one segment for each rank of a group on one host, which closes it. Collective."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if (spec.rank, spec.num_ranks) != (rank, size):
        raise ConfigError("rank, num_ranks", (spec.rank, spec.num_ranks), f"{(rank, size)}, as in the group")
    made, failed, rendezvous = -1, "", _Rendezvous(group)
    if rank == 0:
        try:
            made = create_segment(spec)
        except (StartupError, ConfigError, OSError) as error:
            failed = str(error)
    count, failures = len(set(_hosts_of(group))), rendezvous.gather(failed)
    if failures[0]:
        raise StartupError(failures[0])
    if count != 1:
        if made >= 0:
            os.close(made)
        raise ConfigError("group", f"ranks on {count} hosts", "on one host for shared memory")
    return share_segment(rendezvous, rank, range(size), lambda: made)


def _hosts_of(group: Any, given: tuple[int, ...] = ()) -> tuple[int, ...]:
    """The number of each rank's host: as given, or by kernel, in the order of their first ranks. Collective.

    Raises: ConfigError where ranks are given others.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()
    told = _Rendezvous(group).gather((boot, given))
    if len({hosts for _, hosts in told}) > 1:
        raise ConfigError("hosts", given, "the same on all ranks")
    numbers = {boot: number for number, boot in enumerate(dict.fromkeys(boot for boot, _ in told))}
    return given or tuple(numbers[boot] for boot, _ in told)


class _Rendezvous:
    """A process group as a Rendezvous."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def gather(self, record: Any) -> list[Any]:
        """What each rank gives, in rank order."""
        records: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(records, record, group=self._group)
        return records

    def all_gather(self, record: bytes) -> list[bytes]:
        """Of records of any length."""
        return self.gather(record)

    def barrier(self) -> None:
        """Of the group."""
        dist.barrier(self._group)
