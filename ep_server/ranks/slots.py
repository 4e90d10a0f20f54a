"""How many ranks a group has and may have, and the slots of each for experts. From the configuration alone.

Slots are the physical experts of the exchange: slot p belongs to rank p // slots_per_rank for good.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

from ep_server.config import Config
from ep_server.errors import ConfigError, InvalidArgument
from ep_server.models.families import ModelSpec
from ep_server.models.footprint import footprint
from ep_server.models.sizes import serving_dtype
from ep_server.scheduler.placement import Placement, first_placement, slots_lacking, slots_needed
from ep_server.scheduler.placement_file import placement_from


def num_ranks(config: Config) -> int:
    """Ranks of all hosts that start."""
    return config.cluster.nodes * config.parallel.ranks


def most_ranks(config: Config) -> int:
    """Ranks of all hosts that there can be."""
    return max(config.parallel.max_ranks, num_ranks(config))


@dataclass(frozen=True, slots=True)
class SpareSlots:
    """Expert slots of a group.

    spares: per layer and rank. slots_per_rank: 0 = experts stay where they are. num_experts: of a layer.
    slot_bytes: of one slot in every layer.
    """

    spares: int
    slots_per_rank: int
    num_experts: int
    slot_bytes: int

    def lacking_bytes(self, live: int) -> int:
        """Memory that all live ranks lack, so that the others can go on without any one of them; 0 = none.

        live: how many there are.
        """
        slots = self.slots_per_rank or slots_needed(self.num_experts, live)
        return live * self.slot_bytes * slots_lacking(self.num_experts, slots, live)

    def ranks_to_lose(self, live: int) -> int:
        """How many live ranks may be lost together, and the others have slots for all experts."""
        slots = self.slots_per_rank or slots_needed(self.num_experts, live)
        return live + -self.num_experts // slots  # but those that it takes to hold every expert

    def described(self, live: int) -> str:
        """For people: how many of the live ranks may be lost now."""
        if live == 1:
            return "one rank: after its loss the streams wait for a new one"
        lacking = self.lacking_bytes(live)
        if lacking:
            return (
                f"expert slots: after the loss of a rank the others wait for a new one; to go on without it "
                f"takes {lacking / 2**20:,.1f} MiB more for spare slots (resilience.spare_slots)"
            )
        most = self.ranks_to_lose(live)
        any_of = "one" if most == 1 else str(most)
        spares = f"{self.spares} spare slots per layer and rank"
        return f"expert slots: any {any_of} of {live} ranks may be lost now, with {spares}"


def with_spares(config: Config, spares: int) -> Config:
    """The configuration of a group that has so many."""
    return replace(config, resilience=replace(config.resilience, spare_slots=str(spares)))


def slots_per_rank(config: Config, spec: ModelSpec) -> int:
    """Expert slots of a layer on each rank. 0: experts stay where place_experts() puts them.

    An automatic number of spares counts as none: with_spares() has it.
    """
    given, experts, ranks = config.resilience.spare_slots, spec.router.num_experts, num_ranks(config)
    spares = 0 if given == "auto" else int(given)
    if not spares and most_ranks(config) == ranks:
        return 0
    return min(experts, slots_needed(experts, ranks) + spares)


def slot_bytes(config: Config, spec: ModelSpec, *, packed: bool) -> int:
    """Memory of a slot of every layer."""
    held = footprint(spec, serving_dtype(spec, config.model.dtype), packed=packed)
    return held.expert * held.sparse_layers


def placement_at_start(config: Config, spec: ModelSpec) -> Placement | None:
    """The experts in the slots of the ranks that start; None where experts stay where they are.

    GPU ranks hold spare copies from the start, so that the survivors of a loss read as little as possible.
    Raises: ConfigError for a placement file that does not fit.
    """
    per = slots_per_rank(config, spec)
    if not per and config.resilience.placement:
        allowed = "empty without spare slots (resilience.spare_slots), as experts stay where they are"
        raise ConfigError("resilience.placement", config.resilience.placement, allowed)
    if not per:
        return None
    live = range(num_ranks(config))
    placed = first_placement(spec.num_layers, spec.router.num_experts, per, live, most_ranks(config))
    if config.resilience.placement:
        return read_placement(config.resilience.placement, placed, live)
    return placed.with_copies(live) if config.parallel.device == "cuda" else placed


def read_placement(path: str, like: Placement, live: Collection[int]) -> Placement:
    """The placement in a file. like: one of the same sizes. live: ranks that must serve every expert.

    Raises: ConfigError, which names the file and what is wrong in it.
    """
    option = "resilience.placement"
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(option, path, f"a readable file: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(option, path, f"JSON: {error}") from error
    try:
        return placement_from(values, like, live)
    except InvalidArgument as error:
        raise ConfigError(option, path, f"a placement of this model and group: {error}") from error
