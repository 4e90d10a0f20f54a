"""What the loop of a rank needs of its parts, whatever it computes on; which they are: devices.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from ep_server.backends.assembly import RankModel
from ep_server.backends.cpu.runner import RunnerStatistics
from ep_server.exchange.api import Exchange, ExchangeSpec
from ep_server.models.compute import Compute
from ep_server.ranks.exchanges import Opening
from ep_server.ranks.overlap import Overlap
from ep_server.records import Request, SampledToken, StepBatch

Progress = Callable[[str, int, int], None]


class Runner(Protocol):
    """The model of a rank, as its loop drives it: launch steps in order, collect their tokens in order."""

    def add(self, request: Request) -> None:
        """Creates the sampling state of a request."""
        ...

    def remove(self, number: int) -> None:
        """Drops the sampling state of a request."""
        ...

    def bucket_of(self, batch: StepBatch) -> int:
        """Rows that a step could be padded to for a captured graph; 0 = none."""
        ...

    def micro_batches_of(self, bucket: int, agreed: int) -> int:
        """How many a step is run as, where the ranks agreed on so many."""
        ...

    def launch(self, batch: StepBatch, micro_batches: int, bucket: int) -> Any:
        """Starts a step. Collective. Returns: what collect() takes."""
        ...

    def collect(self, launched: Any) -> list[SampledToken]:
        """One token per slice that samples, in the order of the batch."""
        ...

    def run(self, batch: StepBatch, micro_batches: int = 1) -> list[SampledToken]:
        """launch() and collect() in one."""
        ...

    def statistics(self) -> RunnerStatistics:
        """What was measured since the start."""
        ...


@dataclass(frozen=True, slots=True)
class Built:
    """A runner and the cache it has. exchange_bytes: of this rank. attention: kernels of a GPU, by name."""

    runner: Runner
    kv_blocks: int
    exchange_bytes: int
    attention: str = ""


class Device(Protocol):
    """ahead: steps launched before the tokens of the last one are known."""

    ahead: int

    @property
    def compute(self) -> Compute:
        """The arithmetic that weights are prepared for."""
        ...

    def open(self, spec: ExchangeSpec, opening: Opening) -> Exchange:
        """The exchange of this rank. Collective. Raises: StartupError; ExchangeError if a peer fails."""
        ...

    def build(self, model: RankModel, exchange: Exchange) -> Built:
        """Allocates the KV cache and joins the parts. Raises: StartupError."""
        ...

    def prepare(self, runner: Any, progress: Progress) -> None:
        """What is made once the first steps have run: graphs. Collective."""
        ...

    def overlap(self, runner: Any) -> Overlap:
        """What decides when steps are run as two micro-batches."""
        ...
