"""Runs a function in several real processes, each with its end of one native exchange.

Owns spawning, the group's memory, collection of results and the end of every process by a hard
deadline. Knows nothing of what the function does, and of what carries the exchange only that each rank has
an `End` of it: of one host's segment, if the test gives no other. Units: seconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import inspect
import os
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import DupFd
from typing import Any, Protocol

import torch

from ep_server import _C
from ep_server.exchange.api import ExchangeSpec
from ep_server.exchange.host import HostExchange, open_shm
from ep_server.exchange.segment import create_segment
from ep_server.exchange.spec import Waiting, geometry_of
from tests.support import forks

PR_SET_PDEATHSIG = 1


class End(Protocol):
    """What a rank's process is given to make its exchange from; it is pickled."""

    def open(self, spec: ExchangeSpec, **options: Any) -> HostExchange: ...


@dataclass(frozen=True)
class Outcome:
    """How one rank ended: a value, an exception (with its traceback as text), or a signal.

    exitcode: of the process; negative = the signal that ended it; 0 with `error` None is success.
    seconds: from the start of the group to the answer of this rank.
    """

    rank: int
    value: Any = None
    error: BaseException | None = None
    trace: str = ""
    exitcode: int | None = None
    seconds: float = 0.0

    def __reduce__(self) -> tuple[Any, ...]:
        """Errors whose __init__ takes several arguments do not pickle by themselves: take them apart."""
        error = self.error
        parts = None if error is None else (type(error), error.args, dict(error.__dict__))
        return (_rebuild, (self.rank, self.value, parts, self.trace, self.exitcode, self.seconds))


def _rebuild(rank: int, value: Any, parts: Any, trace: str, exitcode: int | None, seconds: float) -> Outcome:
    error = None
    if parts is not None:
        error = parts[0].__new__(parts[0])
        error.args = parts[1]
        error.__dict__.update(parts[2])
    return Outcome(rank, value, error, trace, exitcode, seconds)


class RanksFailed(AssertionError):
    """At least one rank raised, died or passed the deadline; the message holds every traceback."""

    def __init__(self, outcomes: list[Outcome]) -> None:
        lines = [f"rank {o.rank}: exit {o.exitcode}\n{o.trace}" for o in outcomes if o.error or o.exitcode]
        super().__init__("\n".join(lines))
        self.outcomes = outcomes


def poison(fd: int, spec: ExchangeSpec) -> None:
    """Fills all data of a new segment with NaNs (bfloat16 and float32), as ids impossible experts."""
    layout = _C.Layout(geometry_of(spec))
    for begin in _C.Segment(fd).regions:
        os.pwrite(fd, b"\xff\x7f" * ((layout.total - layout.meta) // 2), begin + layout.meta)


class Ranks:
    """A running group. `with Ranks(...) as ranks:` lets a test stop, continue or kill ranks by pid."""

    def __init__(
        self,
        fn: Callable[..., Any],
        num_ranks: int,
        spec_kwargs: dict[str, Any],
        *,
        args: tuple[Any, ...] = (),
        exchange_kwargs: dict[str, Any] | None = None,
        ends: list[End] | None = None,
    ) -> None:
        specs = [ExchangeSpec(rank=r, num_ranks=num_ranks, **spec_kwargs) for r in range(num_ranks)]
        context = forks.context()
        self.processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        self._outcomes: dict[int, Outcome] = {}
        self._start = time.monotonic()
        with contextlib.ExitStack() as stack:
            if ends is None:
                fd = create_segment(specs[0])
                stack.callback(os.close, fd)
                poison(fd, specs[0])
                ends = [_SegmentEnd(fd)] * num_ranks
            pairs = zip(specs, ends, strict=True)
            self._spawn(context, [(fn, spec, end, exchange_kwargs or {}, args) for spec, end in pairs])

    def _spawn(self, context: Any, ranks: list[tuple[Any, ...]]) -> None:
        try:
            for rank in ranks:
                ours, theirs = context.Pipe()
                process = context.Process(target=_rank_main, args=(theirs, *rank), daemon=True)
                process.start()
                theirs.close()
                self.processes.append(process)
                self._pipes.append(ours)
        except BaseException:
            self.stop()
            raise

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def pid(self, rank: int) -> int:
        """Process id of a rank."""
        pid = self.processes[rank].pid
        assert pid is not None
        return pid

    def kill(self, rank: int, signum: int = signal.SIGKILL) -> None:
        """Sends a signal to one rank."""
        os.kill(self.pid(rank), signum)

    def message(self, rank: int, timeout: float) -> Any:
        """The next value that the rank's function passed to `tell`.

        Raises: RanksFailed if the rank ended instead; TimeoutError.
        """
        if not self._pipes[rank].poll(timeout):
            raise TimeoutError(f"rank {rank} said nothing for {timeout} s")
        kind, value = self._pipes[rank].recv()
        if kind != "tell":
            self._outcomes[rank] = value
            raise RanksFailed([value])
        return value

    def tell(self, rank: int, value: Any) -> None:
        """Sends a value that the rank's function gets from `hear()`."""
        self._pipes[rank].send(value)

    def join(self, timeout: float) -> list[Outcome]:
        """Outcomes in rank order once all ranks ended; whoever passes the deadline is killed (exit -9)."""
        deadline = time.monotonic() + timeout
        waiting: dict[Any, int] = {p: r for r, p in enumerate(self._pipes) if r not in self._outcomes}
        while waiting and (left := deadline - time.monotonic()) > 0:
            for pipe in wait(list(waiting), left):
                rank = waiting[pipe]
                try:
                    kind, value = pipe.recv()  # type: ignore[union-attr]
                except EOFError:  # killed: the exit code below says by what
                    value, kind = Outcome(rank), "end"
                if kind == "end":
                    self._outcomes[rank] = value
                    del waiting[pipe]
        for rank in waiting.values():
            self._outcomes[rank] = Outcome(
                rank, error=TimeoutError(), trace="passed the deadline of the test"
            )
        return [self._ended(rank, deadline) for rank in range(len(self.processes))]

    def stop(self) -> None:
        """Kills what still runs, by pid, and reaps it; idempotent."""
        for process in self.processes:
            if process.is_alive():
                process.kill()
            process.join(10)
        for pipe in self._pipes:
            pipe.close()

    def _ended(self, rank: int, deadline: float) -> Outcome:
        process, outcome = self.processes[rank], self._outcomes[rank]
        process.join(max(1.0, deadline - time.monotonic()) if outcome.error is None else 5.0)
        if process.is_alive():
            process.kill()
            process.join(10)
        return Outcome(rank, outcome.value, outcome.error, outcome.trace, process.exitcode, outcome.seconds)


class Peer:
    """What a rank's function may use to talk to the test: `tell(value)` and `hear() -> value`."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def tell(self, value: Any) -> None:
        """Hands a value to `Ranks.message`."""
        self._pipe.send(("tell", value))

    def hear(self, timeout: float = 60.0) -> Any:
        """The next value of `Ranks.tell`."""
        if not self._pipe.poll(timeout):
            raise TimeoutError(f"the test said nothing for {timeout} s")
        return self._pipe.recv()


def run_ranks(
    fn: Callable[..., Any],
    num_ranks: int,
    spec_kwargs: dict[str, Any],
    timeout: float = 60.0,
    *,
    args: tuple[Any, ...] = (),
    exchange_kwargs: dict[str, Any] | None = None,
    ends: list[End] | None = None,
) -> list[Any]:
    """Runs fn(exchange, *args) on every rank and returns their values in rank order.

    Args:
        fn: a module-level function (it is pickled); its value and exceptions must pickle. Where it has a
          keyword parameter `peer` it gets a `Peer`.
        spec_kwargs: fields of ExchangeSpec without rank and num_ranks.
        exchange_kwargs: keywords of HostExchange (spin_us, on_timeout, ...).
        ends: in rank order; None = of one segment.
    Raises: RanksFailed if any rank raised, died or ran longer than `timeout` seconds.
    """
    outcomes = run_outcomes(
        fn, num_ranks, spec_kwargs, timeout, args=args, exchange_kwargs=exchange_kwargs, ends=ends
    )
    if any(o.error is not None or o.exitcode for o in outcomes):
        raise RanksFailed(outcomes)
    return [o.value for o in outcomes]


def run_outcomes(
    fn: Callable[..., Any],
    num_ranks: int,
    spec_kwargs: dict[str, Any],
    timeout: float = 60.0,
    *,
    args: tuple[Any, ...] = (),
    exchange_kwargs: dict[str, Any] | None = None,
    ends: list[End] | None = None,
) -> list[Outcome]:
    """As run_ranks, for tests of failure: returns how each rank ended and never raises for them."""
    with Ranks(fn, num_ranks, spec_kwargs, args=args, exchange_kwargs=exchange_kwargs, ends=ends) as ranks:
        return ranks.join(timeout)


class _SegmentEnd:
    """An end of one host's memory: the descriptor survives pickling into a spawned child."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __reduce__(self) -> tuple[Any, ...]:
        return (_detach, (DupFd(self.fd),))

    def open(self, spec: ExchangeSpec, **options: Any) -> HostExchange:
        try:
            return open_shm(spec, self.fd, Waiting(**options))
        finally:
            os.close(self.fd)


def _detach(handle: Any) -> _SegmentEnd:
    return _SegmentEnd(int(handle.detach()))


def _rank_main(
    pipe: Connection,
    fn: Callable[..., Any],
    spec: ExchangeSpec,
    end: End,
    exchange_kwargs: dict[str, Any],
    args: tuple[Any, ...],
) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    torch.set_num_threads(1)
    start = time.monotonic()
    value, error, trace = None, None, ""
    try:
        exchange = end.open(spec, **exchange_kwargs)
        named = {"peer": Peer(pipe)} if "peer" in inspect.signature(fn).parameters else {}
        with contextlib.closing(exchange):
            value = fn(exchange, *args, **named)
    except BaseException as raised:
        error, trace = raised, traceback.format_exc()
    with contextlib.suppress(BrokenPipeError):
        outcome = Outcome(spec.rank, value, error, trace, seconds=time.monotonic() - start)
        pipe.send_bytes(forks.by_value(("end", outcome)))
    pipe.close()
