"""Several ranks as threads of one process: the exchange in host memory, the passing of GPUs' regions.

Regions are anonymous memory here, passed by the same descriptors and sockets as those of GPUs.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ep_server.errors import ConfigError, EpServerError, ExchangeError, PeerLost, StartupError
from ep_server.exchange.api import ExchangeSpec, Payload, Reduction, View
from ep_server.exchange.bootstrap import share_regions
from ep_server.exchange.host import HostExchange, open_shm
from ep_server.exchange.segment import create_segment, report_lost
from tests.support.exchange.conformance import PAYLOAD_SHAPES, run_pair
from tests.support.exchange.local_ranks import from_local, run_together

RANKS = (1, 2, 4)
SECOND = 1_000_000_000
DESCRIPTORS = Path("/proc/self/fd")


def spec_of(num_ranks: int, payload: Payload = Payload.BF16) -> ExchangeSpec:
    return PAYLOAD_SHAPES[payload].spec(0, num_ranks, payload, Reduction.RANK)


def open_ranks(spec: ExchangeSpec) -> list[HostExchange]:
    """The whole group in this process: one segment, mapped once for each rank."""
    fd = create_segment(spec)
    try:
        return [open_shm(replace(spec, rank=rank), fd=fd) for rank in range(spec.num_ranks)]
    finally:
        os.close(fd)


@pytest.fixture
def leaves_nothing() -> Iterator[None]:
    """No descriptor and no thread is left."""
    threads, descriptors = set(threading.enumerate()), len(list(DESCRIPTORS.iterdir()))
    yield
    assert set(threading.enumerate()) <= threads
    assert len(list(DESCRIPTORS.iterdir())) == descriptors


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("payload", [Payload.BF16, Payload.FP8])
def test_the_suites_pairs_in_threads(num_ranks: int, payload: Payload, leaves_nothing: None) -> None:
    exchanges = open_ranks(spec_of(num_ranks, payload))

    def rank_thread(rank: int) -> None:
        for generation in range(2):
            for seed, routing in enumerate(("zipf", "max_tokens", "empty_rank", "dropped")):
                for view in View:
                    run_pair(exchanges[rank], routing, seed + generation, view)
            exchanges[rank].group.reset()

    run_together(rank_thread, num_ranks)
    for exchange in exchanges:
        exchange.close()


@pytest.mark.parametrize("num_ranks", RANKS)
def test_votes_and_barriers_in_threads(num_ranks: int, leaves_nothing: None) -> None:
    exchanges = open_ranks(spec_of(num_ranks))
    passed = [0] * num_ranks

    def rank_thread(rank: int) -> list[list[bytes]]:
        votes = []
        for turn in range(50):
            votes.append(exchanges[rank].all_gather(bytes([rank, turn])))
            passed[rank] = turn
            exchanges[rank].barrier()
            assert min(passed) == turn, "a barrier let a rank through before the others had come"
            exchanges[rank].barrier()
        return votes

    wanted = [[bytes([rank, turn]) for rank in range(num_ranks)] for turn in range(50)]
    assert run_together(rank_thread, num_ranks) == [wanted] * num_ranks
    for exchange in exchanges:
        exchange.close()


# -- regions ------------------------------------------------------------------------------------------


class Region:
    """Anonymous memory whose first word says whose it is, and the peers' regions by rank."""

    BYTES = 4096

    def __init__(self, rank: int, refuses: int = -1) -> None:
        """refuses: the rank whose memory cannot be mapped."""
        self.rank, self.refuses = rank, refuses
        self.fd = os.memfd_create("region")
        os.ftruncate(self.fd, self.BYTES)
        os.pwrite(self.fd, self.name(rank), 0)
        self.peers: dict[int, mmap.mmap] = {}

    @staticmethod
    def name(rank: int) -> bytes:
        return f"of rank {rank}".encode()

    def export_fd(self) -> int:
        return os.dup(self.fd)

    def attach(self, rank: int, fd: int) -> None:
        if rank == self.refuses:
            raise RuntimeError(f"GPU {self.rank} has no peer access to rank {rank}")
        self.peers[rank] = mmap.mmap(fd, self.BYTES)

    def close(self) -> None:
        for memory in self.peers.values():
            memory.close()
        os.close(self.fd)


def pass_regions(spec: ExchangeSpec, regions: list[Region], *, odd: int = -1) -> list[object]:
    """What each rank's share_regions raised, or None. odd: the rank whose spec differs."""
    controls = open_ranks(spec_of(spec.num_ranks))

    def rank_thread(rank: int) -> object:
        mine = replace(spec, rank=rank, hidden=2 * spec.hidden if rank == odd else spec.hidden)
        try:
            share_regions(controls[rank].group, mine, regions[rank])
        except (EpServerError, RuntimeError) as error:
            if not isinstance(error, ConfigError):
                controls[rank].group.abort()
            return error
        return None

    found = run_together(rank_thread, spec.num_ranks)
    for control in controls:
        control.close()
    return found


@pytest.mark.parametrize("num_ranks", RANKS)
def test_every_rank_maps_the_memory_of_every_other(num_ranks: int, leaves_nothing: None) -> None:
    regions = [Region(rank) for rank in range(num_ranks)]
    assert pass_regions(spec_of(num_ranks), regions) == [None] * num_ranks
    for region in regions:
        assert set(region.peers) == set(range(num_ranks)) - {region.rank}
        for peer, memory in region.peers.items():
            assert memory[: len(Region.name(peer))] == Region.name(peer)
            memory[64 * (region.rank + 1)] = region.rank + 1  # one memory, not a copy of it
    for region in regions:
        for peer in region.peers:
            assert os.pread(region.fd, 1, 64 * (peer + 1)) == bytes([peer + 1])
        region.close()


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_memory_that_cannot_be_mapped_ends_the_start_of_all(num_ranks: int, leaves_nothing: None) -> None:
    regions = [Region(rank, refuses=0 if rank == num_ranks - 1 else -1) for rank in range(num_ranks)]
    found = pass_regions(spec_of(num_ranks), regions)
    assert str(found[-1]) == f"GPU {num_ranks - 1} has no peer access to rank 0"
    for error in found[:-1]:
        assert isinstance(error, ExchangeError | StartupError), error
    for region in regions:
        region.close()


def test_specs_that_differ_are_refused_by_all(leaves_nothing: None) -> None:
    regions = [Region(rank) for rank in range(3)]
    found = pass_regions(spec_of(3), regions, odd=1)
    assert [type(error) for error in found] == [ConfigError] * 3
    assert [error.field for error in found if isinstance(error, ConfigError)] == ["spec"] * 3
    for region in regions:
        region.close()


# -- from_local ---------------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="of machines without a CUDA device")
@pytest.mark.parametrize("num_ranks", RANKS)
def test_without_a_gpu_the_start_fails_and_leaves_nothing(num_ranks: int, leaves_nothing: None) -> None:
    pytest.importorskip("ep_server._cuda", reason="built without nvcc")
    with pytest.raises(StartupError, match="needs a CUDA device"):
        from_local(range(num_ranks), spec_of(num_ranks))


def test_a_second_loss_does_not_hide_the_first() -> None:
    """Ranks 2 and 1 are lost before rank 0 looks: it must leave its generation, and not wait for them."""
    spec = replace(spec_of(3), timeout_ns=600 * SECOND)
    fd = create_segment(spec)
    group = open_shm(spec, fd=fd).group
    try:
        report_lost(fd, 2, 0)
        report_lost(fd, 1, 1)  # while the others form generation 1
        with pytest.raises(PeerLost, match=r"^rank 1 has ended, as the launcher reports$"):
            group.all_gather(b"")
        report_lost(fd, 2, 0)  # late
        with pytest.raises(PeerLost):
            group.reset({2}, 1)
        group.reset({1, 2}, 2)
        assert group.all_gather(b"alone") == [b"alone", b"", b""]
    finally:
        group.close()
        os.close(fd)
