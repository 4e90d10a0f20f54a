"""Orders to all ranks, and the answer of each. See `ranks.protocol.Ranks.order`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ep_server.scheduler.placement import Placement


@dataclass(frozen=True, slots=True)
class FlushCache:
    """Order to a rank: forget every cached prefix."""


@dataclass(frozen=True, slots=True)
class StartProfile:
    """Order to a rank: record until StopProfile, at most `steps` steps. name: common part of file names."""

    name: str
    steps: int


@dataclass(frozen=True, slots=True)
class StopProfile:
    """Order to a rank: stop recording and write the files."""


@dataclass(frozen=True, slots=True)
class PrepareWeights:
    """Order to a rank: read its part of a checkpoint, while it serves. Answered once that is in memory.

    change: its number; of all changes, from 1. version: of these weights. path: on the rank's host.
    files: models.identity.files_identity() of them; "" = not checked.
    """

    change: int
    version: int
    path: str
    files: str = ""


@dataclass(frozen=True, slots=True)
class PreparePlacement:
    """Order to a rank: read the experts that a placement gives it, while it serves.

    They go into slots that serve no expert now. Answered once they are there.
    change: see PrepareWeights. placement: of the same slots.
    """

    change: int
    placement: Placement


@dataclass(frozen=True, slots=True)
class PrepareGeneration:
    """Order to a rank: make ready for other live ranks, as for another placement.

    The switch regroups the ranks; those that are not in `live` end their requests and wait for their end.
    """

    change: int
    generation: int
    live: tuple[int, ...]
    placement: Placement


@dataclass(frozen=True, slots=True)
class CountExperts:
    """Order to a rank: report how many rows it received for each expert of each layer."""


@dataclass(frozen=True, slots=True)
class SwitchChange:
    """Order to a rank that has prepared a change: offer it in the vote. Answered once the vote switched.

    Like a request it wakes parked ranks.
    """

    change: int


@dataclass(frozen=True, slots=True)
class DropChange:
    """Order to a rank: forget a change that it prepares or has prepared, if it does."""

    change: int


@dataclass(frozen=True, slots=True)
class ReleaseKv:
    """Order to a rank: free the blocks that it holds for another server under this key, if it does."""

    key: bytes


Prepare = PrepareWeights | PreparePlacement | PrepareGeneration
Change = Prepare | SwitchChange | DropChange
RankOrder = FlushCache | StartProfile | StopProfile | CountExperts | Change | ReleaseKv


@dataclass(frozen=True, slots=True)
class OrderDone:
    """A rank's answer to an order. error: why it was not carried out, "" if it was.

    blocks: that FlushCache dropped or ReleaseKv freed. files: that StopProfile wrote, paths on the rank's
      host.
    nbytes: that the switch of a prepared change copies, at `rate` bytes per second as measured.
    seconds: for which SwitchChange kept the rank from running steps.
    rows: that CountExperts found, cumulative, by layer and by expert, end to end.
    """

    number: int
    error: str = ""
    blocks: int = 0
    files: tuple[str, ...] = ()
    nbytes: int = 0
    rate: float = 0.0
    seconds: float = 0.0
    rows: tuple[int, ...] = ()


def refusals(answers: Mapping[int, OrderDone]) -> str:
    """Which ranks have not carried out an order, and why; "" if all have. answers: by rank."""
    return "; ".join(f"rank {rank}: {done.error}" for rank, done in sorted(answers.items()) if done.error)
