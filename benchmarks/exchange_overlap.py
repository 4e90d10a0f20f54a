"""How much of the exchange a GEMM hides: the pair beside it, and the wait for a late peer behind it.

Pair beside a GEMM. The four halves run on a stream of high priority, bounded to num_sms multiprocessors; on
another a GEMM of the same length, told to leave num_sms alone (torch's SM carve-out).
hidden = (t_pair + t_gemm - t_both) / t_pair; 20 of each drift ("free") or are joined after each ("joined").
t_all: the pair where it may fill the GPU, to see what bounding it costs.

Late peer. All ranks meet in a pair of one token; the last rank then sleeps 20 us on its stream before it
sends and has no GEMM, the others put a GEMM of 30 us between their halves. wait: mean of what the others'
receive spent on that peer by its own clock, without and with the GEMM. "by time" is the same from the length
of the whole round: 1 - (gemm and late - gemm) / (late - neither).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
from exchange_calls import Pair, check
from exchange_case import Case
from exchange_timing import OPERATIONS, Timer

from ep_server.compat.deep_ep.bootstrap import from_process_group

SHAPES = ((1024, 2048), (2048, 2048), (4096, 4096))  # rows and columns of the product
SMS = (16, 24, 32, 48, 66, 132)
DELAY_US, GEMM_US = 20.0, 30.0
HALVES = ("dispatch", "combine")


class Gemm:
    """[m, k] x [k, n] in BF16; k makes it as long as is wanted."""

    def __init__(self, m: int, n: int, k: int) -> None:
        self.size = (m, n, k)
        self.x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
        self.weight = torch.randn(n, k, device="cuda", dtype=torch.bfloat16)
        self.bias = torch.zeros(n, device="cuda", dtype=torch.bfloat16)

    def __call__(self) -> torch.Tensor:
        return torch.nn.functional.linear(self.x, self.weight, self.bias)

    @staticmethod
    def lasting(us: float, m: int, n: int, timer: Timer) -> Gemm:
        """One that takes about `us` alone; the same on all ranks."""
        short, long = (timer.graph(Gemm(m, n, k)).median for k in (1024, 5120))
        slope = max((long - short) / 4096, 1e-4)
        return Gemm(m, n, max(64, round((1024 + (us - short) / slope) / 64) * 64))


def carve_out(sms: int) -> None:
    """From here on GEMMs leave so many multiprocessors alone; 0 or all = none."""
    some = 0 < sms < torch.cuda.get_device_properties().multi_processor_count
    torch._C._set_sm_carveout_experimental(sms if some else None)


def overlap(case: Case, rank: int, timer: Timer) -> None:
    """Prints both measurements for one case; collective."""
    with checked_pair(case, rank, timer) as pair:
        whole = timer.graph(pair.halves).median
    if rank == 0:
        print(f"EP{case.ranks} T={case.tokens} {case.payload} {case.form}: pair beside a GEMM, us")
        print("num_sms  m x n x k              t_pair  t_gemm    free  joined   t_all  hidden free / joined")
    torch.backends.cuda.preferred_blas_library("cublaslt")  # the one that keeps to a carve-out
    total, found = torch.cuda.get_device_properties().multi_processor_count, []
    for sms in dict.fromkeys(min(sms, total) for sms in SMS):
        with checked_pair(replace(case, num_sms=sms), rank, timer) as pair:
            found += beside(pair, sms, whole, timer)
    if rank == 0:
        hidden, line = max(found)
        print(
            f"best: {hidden:.2f} hidden, joined after each, with num_sms, m x n x k, t_pair {line}",
            flush=True,
        )
    if case.ranks > 1:
        late_peer(case, rank, timer)


def beside(pair: Pair, sms: int, whole: float, timer: Timer) -> list[tuple[float, str]]:
    """One line for each shape of GEMM. Returns what was hidden when joined, and where."""
    carve_out(sms)
    found = []
    comm = torch.cuda.Stream(priority=-1)
    alone = timer.graph(partial(on_stream, comm, pair.halves)).median
    for m, n in SHAPES:
        gemm = Gemm.lasting(alone, m, n, timer)
        t_gemm = timer.graph(gemm).median
        free = timer.graph(partial(side_by_side, comm, pair.halves, gemm, OPERATIONS), calls=1).median
        joined = timer.graph(partial(side_by_side, comm, pair.halves, gemm, 1)).median
        hidden = [(alone + t_gemm - both) / alone for both in (free, joined)]
        size = " x ".join(map(str, gemm.size))
        found.append((hidden[1], f"{sms}, {size}, {alone:.1f} us ({whole:.1f} on all)"))
        if pair.exchange.spec.rank == 0:
            times = "".join(f"{t:8.1f}" for t in (alone, t_gemm, free, joined, whole))
            print(f"{sms:7}  {size:20} {times}  {hidden[0]:6.2f} / {hidden[1]:.2f}", flush=True)
    carve_out(0)
    return found


def on_stream(stream: torch.cuda.Stream, call: Callable[[], object]) -> None:
    """The call on a stream that branches off the current one and joins it again."""
    here = torch.cuda.current_stream()
    stream.wait_stream(here)
    with torch.cuda.stream(stream):
        call()
    here.wait_stream(stream)


def side_by_side(
    comm: torch.cuda.Stream, pair: Callable[[], object], gemm: Callable[[], object], times: int
) -> None:
    """So many of both, one kind on each stream, joined at the end."""
    here = torch.cuda.current_stream()
    comm.wait_stream(here)
    with torch.cuda.stream(comm):
        for _ in range(times):
            pair()
    for _ in range(times):
        gemm()
    here.wait_stream(comm)


@contextmanager
def checked_pair(case: Case, rank: int, timer: Timer) -> Iterator[Pair]:
    """A pair on an exchange of its own, checked; closed on all ranks together."""
    device = torch.device("cuda", torch.cuda.current_device())
    exchange = from_process_group(timer.group, case.spec(rank), device, num_sms=case.num_sms)
    pair = Pair(exchange, case)
    check(pair)
    yield pair
    exchange.check()
    timer.together()
    exchange.close()


@dataclass(frozen=True)
class Round:
    """All ranks meet, one of them may be late with one half, the others may have a GEMM behind theirs."""

    meet: Pair
    pair: Pair
    half: str
    sleep_cycles: int  # of the last rank; 0 = in time
    gemm: Callable[[], object] | None

    @property
    def last(self) -> int:
        return self.pair.case.ranks - 1

    def __call__(self) -> None:
        is_last = self.pair.exchange.spec.rank == self.last
        self.meet.pair()
        received = None
        for half in HALVES:
            here = half == self.half
            if here and is_last and self.sleep_cycles:
                torch.cuda._sleep(self.sleep_cycles)
            receive = self.pair.send() if half == "dispatch" else self.pair.combine_send(received)
            if here and not is_last and self.gemm is not None:
                self.gemm()
            received = receive()

    def measure(self, timer: Timer) -> tuple[float, float]:
        """us of the round; mean us that a receive of the others waited for the last rank, on the worst."""
        before = self._waited()
        length = timer.graph(self).median
        spent, count = (b - a for a, b in zip(before, self._waited(), strict=True))
        mine = 0.0 if self.pair.exchange.spec.rank == self.last else spent / count / 1e3
        return length, timer.most({"wait": mine})["wait"]

    def _waited(self) -> tuple[int, int]:
        found = self.pair.exchange.statistics()
        times = sum(found["histograms"].get(f"{self.half}/wait", (0,)))
        return found["peer_wait_ns"][self.half, self.last], times


def late_peer(case: Case, rank: int, timer: Timer) -> None:
    """One line for each half that may be late."""
    if rank == 0:
        print(f"EP{case.ranks} T={case.tokens}: last rank {DELAY_US:.0f} us late, us")
        print("half      round: neither  gemm  late  both   wait: late  both   hidden  by time")
    cycles = round(DELAY_US * 1e5 / timer.graph(partial(torch.cuda._sleep, 100_000)).median)
    gemm = Gemm.lasting(GEMM_US, 2048, 2048, timer)
    with (
        checked_pair(replace(case, tokens=1), rank, timer) as meet,
        checked_pair(case, rank, timer) as pair,
    ):
        for half in HALVES:
            found = [
                Round(meet, pair, half, sleep, work).measure(timer)
                for sleep, work in ((0, None), (0, gemm), (cycles, None), (cycles, gemm))
            ]
            (neither, busy, late, both), (_, _, wait, left) = zip(*found, strict=True)
            if rank == 0:
                hidden, by_time = 1 - left / wait, 1 - (both - busy) / (late - neither)
                rounds = "".join(f"{t:6.1f}" for t in (neither, busy, late, both))
                print(
                    f"{half:14} {rounds}   {wait:11.1f}{left:6.1f}   {hidden:6.2f}  {by_time:7.2f}",
                    flush=True,
                )
