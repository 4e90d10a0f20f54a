"""Placement: requests to ranks by load, experts to slots of ranks. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ep_server.errors import InternalError, InvalidArgument, Unavailable
from ep_server.records import EMPTY, RankLoad, Request

HEAD_START = 1  # requests by which a near rank may be ahead of the least loaded one
HEAD_SHARE = 8  # or this fraction (1/8) of its KV blocks, if that is more


def choose_rank(
    loads: Mapping[int, RankLoad], request: Request, num_ranks: int, near: range = range(0)
) -> int:
    """The rank for a request: the fewest KV blocks, then the fewest requests, then the lowest number.

    A near rank wins where it would have no more KV blocks than that rank without one request of its mean
    size, or without an eighth of its blocks: so other nodes' ranks get their share, whichever node is called.

    Args:
        loads: by live rank, of requests not yet ended; waiting ones count with the KV they will need.
        num_ranks: absent ones included.
        near: ranks of the node that was called; empty where all are alike.
    Raises: InvalidArgument if the request asks for a rank that does not exist; Unavailable if it is absent.
    """
    if not loads:
        raise InternalError("no rank to place a request on")
    if request.dp_rank is not None:
        if not 0 <= request.dp_rank < num_ranks:
            raise InvalidArgument("dp_rank", request.dp_rank, f"0 to {num_ranks - 1}")
        if request.dp_rank not in loads:
            raise Unavailable(f"dp_rank = {request.dp_rank}: the node of this rank is out")
        return request.dp_rank
    best = _least_loaded(loads, loads)
    present = [rank for rank in near if rank in loads]
    if not present:
        return best
    nearest = _least_loaded(loads, present)
    return nearest if _keeps_up(loads[nearest], loads[best]) else best


def spread_rank(loads: Mapping[int, RankLoad], tokens: Mapping[int, int]) -> int:
    """The rank for a request whose stream waits until it has run again, when many move at once.

    The one that has the fewest tokens to run again, not the least loaded one: a rank that has just joined has
    little load, and would run all of them while the others wait for its long steps.

    A rank without free KV blocks comes last.

    Args:
        loads: by live rank. tokens: by rank, to run again.
    """

    def key(rank: int) -> tuple[bool, int, tuple[int, int, int]]:
        full = loads[rank].kv_blocks_used >= loads[rank].kv_blocks_total
        return full, tokens.get(rank, 0), _least(loads, rank)

    return min(loads, key=key)


def _least_loaded(loads: Mapping[int, RankLoad], ranks: Iterable[int]) -> int:
    return min(ranks, key=lambda rank: _least(loads, rank))


def _least(loads: Mapping[int, RankLoad], rank: int) -> tuple[int, int, int]:
    return loads[rank].kv_blocks_used, _requests(loads[rank]), rank


def _keeps_up(near: RankLoad, best: RankLoad) -> bool:
    """No more loaded than `best`, but for its head start. Never turns true when near's load grows."""
    held, least, requests = near.kv_blocks_used, best.kv_blocks_used, max(_requests(near), 1)
    by_requests = held * (requests - HEAD_START) <= least * requests
    return by_requests or held * (HEAD_SHARE - 1) <= least * HEAD_SHARE


def _requests(load: RankLoad) -> int:
    return load.running + load.waiting


def place_experts(num_experts: int, num_ranks: int) -> tuple[int, ...]:
    """Owner rank of each expert: contiguous runs, whose lengths differ by at most one, longer ones first.

    With fewer experts than ranks the last ranks own none.
    Raises: InternalError for a negative number of experts or no rank.
    """
    if num_experts < 0 or num_ranks < 1:
        raise InternalError(f"cannot place {num_experts} experts on {num_ranks} ranks")
    each, more = divmod(num_experts, num_ranks)
    return tuple(rank for rank in range(num_ranks) for _ in range(each + (rank < more)))


def slots_needed(num_experts: int, ranks: int) -> int:
    """Slots per rank in which so many ranks hold every expert."""
    return -(-num_experts // ranks)


def slots_lacking(num_experts: int, slots_per_rank: int, live: int) -> int:
    """Slots that each of the live ranks lacks, so that the others can go on without any one of them.

    0 for a single rank too, which has no others.
    """
    return max(0, slots_needed(num_experts, live - 1) - slots_per_rank) if live > 1 else 0


@dataclass(frozen=True, slots=True)
class Placement:
    """Which expert each slot holds, layer by layer.

    Slot p belongs to rank p // slots_per_rank. The exchange's physical experts are the slots, so their number
    and owners never change; which expert a token's choice means there is looked up in routes().
    A slot that holds an expert and does not serve is a spare copy: ready if its rank must take over.

    num_experts: of a layer. slots_per_rank: the same on all ranks.
    experts: by layer, by slot: the expert, or EMPTY.
    serves: by layer, by slot: the slot's part of its expert's tokens, relative to the other slots that serve
      it; 0 in a spare copy and in an empty slot.
    """

    num_experts: int
    slots_per_rank: int
    experts: tuple[tuple[int, ...], ...]
    serves: tuple[tuple[int, ...], ...]

    @property
    def num_ranks(self) -> int:
        """Ranks with slots, absent ones included."""
        return len(self.experts[0]) // self.slots_per_rank

    def of_rank(self, rank: int) -> tuple[tuple[int, ...], ...]:
        """By layer: the expert in each slot of a rank, or EMPTY."""
        first = rank * self.slots_per_rank
        return tuple(held[first : first + self.slots_per_rank] for held in self.experts)

    def slots_of(self, layer: int, expert: int, live: Collection[int]) -> tuple[int, ...]:
        """The slots of live ranks that serve an expert, ascending."""
        held, serves = self.experts[layer], self.serves[layer]
        return tuple(
            p for p, e in enumerate(held) if e == expert and serves[p] and p // self.slots_per_rank in live
        )

    def routes(
        self, layer: int, source: int, ways: int, live: Collection[int]
    ) -> tuple[tuple[int, ...], ...]:
        """By expert: the slots that tokens of a source rank choose from; token t takes way t % ways.

        Replicas get exactly their shares where `ways` is a multiple of the sum of their parts. Sources start
        at different replicas, so that few tokens of many ranks spread too.
        Raises: InternalError if no live rank serves an expert.
        """
        parts: list[dict[int, int]] = [{} for _ in range(self.num_experts)]
        for slot, part in enumerate(self.serves[layer]):
            if part and slot // self.slots_per_rank in live:
                parts[self.experts[layer][slot]][slot] = part
        table = []
        for expert, shares in enumerate(parts):
            if not shares:
                raise InternalError(f"layer {layer}: no live rank serves expert {expert}")
            if len(shares) == 1:
                table.append(tuple(shares) * ways)
                continue
            turns = _turns(shares)
            table.append(tuple(turns[(source + way) % len(turns)] for way in range(ways)))
        return tuple(table)

    def with_copies(self, live: Sequence[int]) -> Placement:
        """Fills the empty slots of these ranks with spare copies: first of what the next rank serves."""
        experts = tuple(self._copied(layer, live) for layer in range(len(self.experts)))
        return replace(self, experts=experts)

    def _copied(self, layer: int, live: Sequence[int]) -> tuple[int, ...]:
        per, before = self.slots_per_rank, self.experts[layer]
        held = list(before)
        served = {rank: [e for e in before[rank * per : (rank + 1) * per] if e != EMPTY] for rank in live}
        for index, rank in enumerate(live):
            others = [*live[index + 1 :], *live[:index]]
            own = set(served[rank])
            wanted = iter([e for other in others for e in served[other] if e not in own])
            for slot in range(rank * per, (rank + 1) * per):
                if held[slot] == EMPTY and (expert := next(wanted, None)) is not None:
                    held[slot] = expert
        return tuple(held)

    def missing(self, live: Collection[int]) -> tuple[tuple[int, int], ...]:
        """(layer, expert) pairs that no slot of a live rank holds."""
        per = self.slots_per_rank
        found = []
        for layer, held in enumerate(self.experts):
            here = {e for p, e in enumerate(held) if p // per in live}
            found += [(layer, expert) for expert in range(self.num_experts) if expert not in here]
        return tuple(found)


def _turns(shares: dict[int, int]) -> tuple[int, ...]:
    """Slots in turn, each as often as its part: any few in a row are close to the shares."""
    period, ahead, turns = sum(shares.values()), dict.fromkeys(shares, 0), []
    for _ in range(period):
        for slot, part in shares.items():
            ahead[slot] += part
        slot = max(ahead, key=lambda slot: (ahead[slot], -slot))
        ahead[slot] -= period
        turns.append(slot)
    return tuple(turns)


def has_copies(placement: Placement | None) -> bool:
    """Whether a slot holds an expert that it does not serve."""
    layers = () if placement is None else zip(placement.experts, placement.serves, strict=True)
    return any(
        expert != EMPTY and not part
        for held, serves in layers
        for expert, part in zip(held, serves, strict=True)
    )


def first_placement(
    layers: int, num_experts: int, slots_per_rank: int, live: Sequence[int], num_ranks: int
) -> Placement:
    """Every expert once, as place_experts() spreads them over the live ranks; the other slots are empty.

    Raises: InternalError if the live ranks have fewer slots than experts need.
    """
    owners = place_experts(num_experts, len(live))
    held = [EMPTY] * (num_ranks * slots_per_rank)
    for index, rank in enumerate(live):
        own = [expert for expert, owner in enumerate(owners) if owner == index]
        if len(own) > slots_per_rank:
            raise InternalError(f"{len(own)} experts do not fit into the {slots_per_rank} slots of a rank")
        held[rank * slots_per_rank : rank * slots_per_rank + len(own)] = own
    experts = (tuple(held),) * layers
    return Placement(num_experts, slots_per_rank, experts, (tuple(int(e != EMPTY) for e in held),) * layers)


def covers_any_loss(placement: Placement, live: Collection[int]) -> bool:
    """Whether slots of two or more live ranks hold each expert, serving or not."""
    for held in placement.experts:
        ranks: list[set[int]] = [set() for _ in range(placement.num_experts)]
        for slot, expert in enumerate(held):
            rank = slot // placement.slots_per_rank
            if expert != EMPTY and rank in live:
                ranks[expert].add(rank)
        if any(len(each) < 2 for each in ranks):
            return False
    return True
