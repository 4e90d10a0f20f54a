"""Placement: requests to ranks by load, experts to ranks by count. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence

from ep_server.errors import InternalError, InvalidArgument
from ep_server.records import RankLoad, Request

HEAD_START = 1  # requests by which a near rank may be ahead of the least loaded one
HEAD_SHARE = 8  # or this fraction (1/8) of its KV blocks, if that is more


def choose_rank(loads: Sequence[RankLoad], request: Request, near: range = range(0)) -> int:
    """The rank for a request: the fewest KV blocks, then the fewest requests, then the lowest number.

    A near rank wins where it would have no more KV blocks than that rank without one request of its mean
    size, or without an eighth of its blocks: so other nodes' ranks get their share, whichever node is called.

    Args:
        loads: by rank, of requests not yet ended; waiting ones count with the KV they will need.
        near: ranks of the node that was called; empty where all are alike.
    Raises: InvalidArgument if the request asks for a rank that is not there.
    """
    if not loads:
        raise InternalError("no rank to place a request on")
    if request.dp_rank is not None:
        if not 0 <= request.dp_rank < len(loads):
            raise InvalidArgument("dp_rank", request.dp_rank, f"0 to {len(loads) - 1}")
        return request.dp_rank
    best = _least_loaded(loads, range(len(loads)))
    if not near:
        return best
    nearest = _least_loaded(loads, near)
    return nearest if _keeps_up(loads[nearest], loads[best]) else best


def _least_loaded(loads: Sequence[RankLoad], ranks: range) -> int:
    return min(ranks, key=lambda rank: (loads[rank].kv_blocks_used, _requests(loads[rank]), rank))


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
