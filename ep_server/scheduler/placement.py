"""Who goes where: requests to ranks by load, experts to ranks by count. Pure functions.

Knows loads and numbers; not why a rank is loaded, nor where it runs.
"""

from __future__ import annotations

from collections.abc import Sequence

from ep_server.errors import InternalError, InvalidArgument
from ep_server.records import RankLoad, Request


def choose_rank(loads: Sequence[RankLoad], request: Request) -> int:
    """The rank for a request: the fewest KV blocks, then the fewest requests, then the lowest number.

    Args:
        loads: by rank, of requests not yet ended; what waits counts with the KV it will need.
    Raises: InvalidArgument if the request asks for a rank that is not there.
    """
    if not loads:
        raise InternalError("no rank to place a request on")
    if request.dp_rank is not None:
        if not 0 <= request.dp_rank < len(loads):
            raise InvalidArgument("dp_rank", request.dp_rank, f"0 to {len(loads) - 1}")
        return request.dp_rank
    return min(
        range(len(loads)),
        key=lambda rank: (loads[rank].kv_blocks_used, loads[rank].running + loads[rank].waiting, rank),
    )


def place_experts(num_experts: int, num_ranks: int) -> tuple[int, ...]:
    """Owner rank of each expert: contiguous runs, whose lengths differ by at most one, longer ones first.

    With fewer experts than ranks the last ranks own none.
    Raises: InternalError for a negative number of experts or no rank.
    """
    if num_experts < 0 or num_ranks < 1:
        raise InternalError(f"cannot place {num_experts} experts on {num_ranks} ranks")
    each, more = divmod(num_experts, num_ranks)
    return tuple(rank for rank in range(num_ranks) for _ in range(each + (rank < more)))
