"""[7] Copies KV blocks between a GPU's cache and pinned host memory, on streams of their own.

A block is in pieces on the GPU, one per layer and tensor, but in one piece in host memory. A kernel gathers
blocks into a buffer on the GPU and the copy engine takes it to the host, or the other way round. So the link
carries long copies, and the SMs work on them for a few microseconds only. Units: bytes, blocks.
"""

from __future__ import annotations

import logging
import mmap
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ep_server.backends.gpu.kernels.triton.kv_blocks import gather_blocks, scatter_blocks
from ep_server.backends.gpu.waiting import STEP_SECONDS
from ep_server.backends.kv_copies import counters_of
from ep_server.errors import InternalError, StartupError
from ep_server.exchange.device_wait import await_current, await_idle
from ep_server.models.kv_cache import KvCache
from ep_server.records import KvLoad, KvMoves

log = logging.getLogger(__name__)

STAGING_BYTES = 64 << 20  # of each direction: long enough for the link, short beside a KV cache


@dataclass(frozen=True, slots=True)
class _Started:
    """A copy in flight. blocks: of the cache, which it reads or writes. ticket: of a load; 0 for saves."""

    event: torch.cuda.Event
    blocks: frozenset[int]
    ticket: int
    deadline: float


class GpuCopies:
    """As backends.kv_copies.CpuCopies, but asynchronous. One thread uses it, with the stream of the steps.

    Saves and loads have a stream each, so that both directions of the link are busy. A save reads its blocks
    behind all steps launched so far. A step waits for a copy only if the copy uses a block that it may write.
    Enqueuing the loads of a long prompt takes the host milliseconds, so it follows the launch of the step.
    """

    def __init__(self, cache: KvCache, slots: int, device: torch.device) -> None:
        self.slots, self._device = slots, device
        parts = cache.parts()
        self._parts, self._part_bytes = parts, parts[0].shape[1]
        self._block_bytes = len(parts) * self._part_bytes
        self._addresses = torch.tensor([part.data_ptr() for part in parts], device=device)
        # An even number keeps slices of index lists aligned to 16 bytes, which kernels are compiled for.
        self._chunk = max(2, STAGING_BYTES // self._block_bytes // 2 * 2)
        staging = (self._chunk, len(parts), self._part_bytes)
        self._out = torch.zeros(staging, dtype=torch.uint8, device=device)
        self._in = torch.zeros(staging, dtype=torch.uint8, device=device)
        memory = pinned(slots * self._block_bytes, device)
        self._host = memory.view(slots, len(parts), self._part_bytes)
        if device.type == "cuda":  # the end of the process unpins too
            weakref.finalize(self, unpin, memory, device).atexit = False
        self._save_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._load_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._started: list[_Started] = []
        self._loads: Sequence[KvLoad] = ()  # not begun
        self._ended: list[int] = []
        self._saved = self._loaded = 0
        self._warm_up()

    def start(self, moves: KvMoves) -> None:
        """As KvCopier.start."""
        self.start_loads()
        self._take_ended()
        steps, fresh = torch.cuda.current_stream(self._device), set(moves.fresh)
        if moves.saves:
            self._save_stream.wait_event(steps.record_event())
            with torch.cuda.stream(self._save_stream):
                self._save(moves.saves)
            self._note(self._save_stream, moves.saves, 0)
        for copy in self._started:
            if not fresh.isdisjoint(copy.blocks):
                steps.wait_event(copy.event)
        if moves.loads:  # behind steps, and copies that use their blocks, and saves that fill their slots
            self._load_stream.wait_event(steps.record_event())
            self._load_stream.wait_event(self._save_stream.record_event())
            self._loads = moves.loads

    def start_loads(self) -> None:
        """As KvCopier.start_loads."""
        loads, self._loads = self._loads, ()
        for load in loads:
            with torch.cuda.stream(self._load_stream):
                self._load(load)
            self._note(self._load_stream, load.copies, load.ticket)

    def loaded(self) -> list[int]:
        """As KvCopier.loaded."""
        self.start_loads()
        self._take_ended()
        ended, self._ended = self._ended, []
        return ended

    def counters(self) -> dict[str, int]:
        """As KvCopier.counters."""
        return counters_of(self._saved, self._loaded)

    def _save(self, copies: Sequence[tuple[int, int]]) -> None:
        pairs = sorted(copies, key=lambda copy: copy[1])
        blocks = self._on_device([block for block, _ in pairs])
        for first in range(0, len(pairs), self._chunk):
            part = pairs[first : first + self._chunk]
            gather_blocks(self._addresses, blocks[first : first + len(part)], self._out)
            for at, slot, count in runs([slot for _, slot in part]):
                self._host[slot : slot + count].copy_(self._out[at : at + count], non_blocking=True)
        self._saved += len(pairs) * self._block_bytes

    def _load(self, load: KvLoad) -> None:
        pairs = sorted(load.copies, key=lambda copy: copy[1])
        blocks = self._on_device([block for block, _ in pairs])
        for first in range(0, len(pairs), self._chunk):
            part = pairs[first : first + self._chunk]
            for at, slot, count in runs([slot for _, slot in part]):
                self._in[at : at + count].copy_(self._host[slot : slot + count], non_blocking=True)
            scatter_blocks(self._addresses, blocks[first : first + len(part)], self._in)
        self._loaded += len(pairs) * self._block_bytes

    def _on_device(self, numbers: list[int]) -> torch.Tensor:
        """On the current stream, whose later work may read it."""
        host = torch.tensor(numbers, dtype=torch.int64, pin_memory=self._device.type == "cuda")
        return host.to(self._device, non_blocking=True)

    def _note(self, stream: torch.cuda.Stream, copies: Sequence[tuple[int, int]], ticket: int) -> None:
        blocks, deadline = frozenset(block for block, _ in copies), time.monotonic() + STEP_SECONDS
        self._started.append(_Started(stream.record_event(), blocks, ticket, deadline))

    def _take_ended(self) -> None:
        going, now = list[_Started](), time.monotonic()
        for copy in self._started:
            if copy.event.query():  # type: ignore[no-untyped-call]
                if copy.ticket:
                    self._ended.append(copy.ticket)
            elif now > copy.deadline:
                raise InternalError(f"a copy of {len(copy.blocks)} KV blocks has not ended")
            else:
                going.append(copy)
        self._started = going

    def _warm_up(self) -> None:
        """Compiles the kernels, by moving block 0, which nobody uses yet, onto itself.

        Memory for lists of blocks of every length is allocated too: in traffic that may wait for a step.
        """
        most = min(self.slots, len(self._parts[0]))
        await_current(self._device, STEP_SECONDS, "the first values of the KV cache")
        for stream, staging in ((self._save_stream, self._out), (self._load_stream, self._in)):
            with torch.cuda.stream(stream):
                for power in range(1, most.bit_length() + 1):
                    block = self._on_device([0] * (1 << power))
                gather_blocks(self._addresses, block[:1], staging)
                scatter_blocks(self._addresses, block[:1], staging)
                await_current(self._device, STEP_SECONDS, "the first copy of a KV block")


def runs(slots: Sequence[int]) -> list[tuple[int, int, int]]:
    """Cuts ascending slots where one is left out: (index of the first, first slot, number of slots)."""
    found = list[tuple[int, int, int]]()
    for index, slot in enumerate(slots):
        if found and sum(found[-1][1:]) == slot:
            at, first, count = found[-1]
            found[-1] = at, first, count + 1
        else:
            found.append((index, slot, 1))
    return found


def pinned(size: int, device: torch.device) -> torch.Tensor:
    """Zeros of exactly this size, page-locked for a GPU: torch's allocator rounds up to a power of two.

    Raises: StartupError if the system refuses to lock so many pages.
    """
    memory = torch.frombuffer(
        mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8
    )
    if device.type != "cuda":
        return memory
    status = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), size, 0)  # type: ignore[no-untyped-call]
    if int(status) != 0:
        raise StartupError(
            f"scheduler.kv_host_gib: {size / 2**30:.2f} GiB of host memory cannot be pinned (CUDA error "
            f"{int(status)}): must be less, or 0"
        )
    return memory


def unpin(memory: torch.Tensor, device: torch.device) -> None:
    """Ends what pinned() began, before the memory is given back. Where copies do not end it stays pinned."""
    try:
        await_idle(device, STEP_SECONDS, used=memory)
    except InternalError as error:
        log.error("%.2f GiB of host memory for KV blocks stay in use: %s", len(memory) / 2**30, error)
        return
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())  # type: ignore[no-untyped-call]
