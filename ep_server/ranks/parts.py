"""The parts of a rank as its loop uses them, on any device. devices.py chooses the implementations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy as np

from ep_server.backends.assembly import RankModel
from ep_server.backends.cpu.runner import RunnerStatistics
from ep_server.backends.cpu.shared_kv import SharedKv
from ep_server.backends.kv_copies import KvCopier, NoCopies
from ep_server.backends.kv_rows import KvRows
from ep_server.backends.masks import Masks
from ep_server.exchange.api import Exchange, ExchangeSpec
from ep_server.models.compute import Compute
from ep_server.models.slots import Held, Routes
from ep_server.ranks.exchanges import Opening
from ep_server.ranks.modes import ExchangeModes
from ep_server.ranks.overlap import Overlap
from ep_server.records import PromptLogprobs, Request, SampledToken, StepBatch

Progress = Callable[[str, int, int], None]
Step = TypeVar("Step")


class Runner(Protocol[Step]):
    """The model of a rank, as its loop drives it: launch steps in order, collect their tokens in order.

    Step: what launch() returns and the other calls take.
    """

    def add(self, request: Request) -> None:
        """Creates the sampling state of a request."""
        ...

    def remove(self, number: int) -> None:
        """Drops the sampling state of a request."""
        ...

    def bucket_of(self, batch: StepBatch) -> int:
        """Rows that a step could be padded to for a captured graph; 0 = no graph fits."""
        ...

    def micro_batches_of(self, bucket: int, agreed: int) -> int:
        """How many micro-batches a step really runs as, if the ranks agreed on so many."""
        ...

    def launch(self, batch: StepBatch, micro_batches: int, bucket: int, normal: bool) -> Step:
        """Starts a step. Collective. normal: with the exchange of many rows."""
        ...

    def complete(self, launched: Step) -> Sequence[int]:
        """Draws tokens that wait for masks. Call it once, before collect() or the next launch().

        Returns: requests left out because their masks are late; collect() returns LATE_TOKEN for them.
        """
        ...

    def collect(self, launched: Step) -> list[SampledToken]:
        """One token per slice that samples, in the order of the batch."""
        ...

    def prompt_logprobs(self, launched: Step) -> Sequence[PromptLogprobs]:
        """Scores of prompt tokens, for the slices with `scored` rows of a collected step."""
        ...

    def run(self, batch: StepBatch, micro_batches: int = 1) -> list[SampledToken]:
        """launch() and collect() in one."""
        ...

    def place(self, routes: Routes, held: Held) -> None:
        """The slots of this rank hold these experts, and tokens take these routes, from the next launch on.

        Steps in flight keep the routes before. Raises: InternalError if experts stay where they are.
        """
        ...

    def expert_rows(self) -> np.ndarray:
        """[layers, E] int64: rows this rank received for each expert, cumulative.

        Raises: InternalError if experts stay where they are.
        """
        ...

    def weights_changed(self) -> None:
        """The weights have new values in place: renews what was made of them. No step is in flight."""
        ...

    def drop_steps(self) -> None:
        """Forgets the steps in flight, none of which will be collected: another rank was lost.

        The exchange has been reset. Requests stay, and continue after the tokens collected so far.
        """
        ...

    def statistics(self) -> RunnerStatistics:
        """Measurements since the start."""
        ...


AnyRunner = Runner[Any]  # the loop does not look into steps


@dataclass(frozen=True, slots=True)
class Built:
    """A runner and the cache it has. exchange_bytes: of this rank. attention: kernels of a GPU, by name.

    copier: the host tier's; NoCopies if there is none. rows: of the cache, for hand-offs.
    step_sizes: as SchedulerLimits.step_sizes. shared: where the cache outlives the rank.
    """

    runner: AnyRunner
    kv_blocks: int
    exchange_bytes: int
    rows: KvRows
    attention: str = ""
    copier: KvCopier = field(default_factory=NoCopies)
    step_sizes: tuple[int, ...] = ()
    shared: SharedKv | None = None


class Device(Protocol):
    """ahead: steps launched before the tokens of the last one are known.

    warms_alone: a rank that joins others warms up before it meets them: its exchange masks them until then.
    """

    ahead: int
    warms_alone: bool

    @property
    def compute(self) -> Compute:
        """The arithmetic that weights are prepared for."""
        ...

    def open(self, spec: ExchangeSpec, opening: Opening) -> Exchange:
        """The exchange of this rank. Collective. Raises: StartupError; ExchangeError if a peer fails."""
        ...

    def build(self, model: RankModel, exchange: Exchange, masks: Masks) -> Built:
        """Allocates the KV cache and joins the parts.

        masks: of requests with a grammar. Raises: StartupError.
        """
        ...

    def prepare(self, progress: Progress) -> None:
        """Measures and captures graphs for the runner of build(), after its first steps. Collective."""
        ...

    def modes(self) -> ExchangeModes:
        """Which steps use the exchange of many rows; as measured, after prepare()."""
        ...

    def overlap(self) -> Overlap:
        """The policy that decides when its steps run as two micro-batches."""
        ...
