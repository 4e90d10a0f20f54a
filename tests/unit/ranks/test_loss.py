"""Of the signs of one loss the one that explains the others is told, in whatever order they came."""

from __future__ import annotations

from itertools import permutations

import pytest

from ep_server.errors import (
    CheckpointError,
    ConfigError,
    EpServerError,
    InternalError,
    RankLost,
    StartupError,
)
from ep_server.ranks.signs import Kind, Sign, cause, kind_of, loss_cause, start_error
from ep_server.records import LossCause


def sign(kind: Kind, rank: int, peer: int | None = None) -> Sign:
    return Sign(kind, rank, RankLost(f"{kind.name} {rank}"), peer)


@pytest.mark.parametrize(
    ("signs", "best"),
    [
        ((sign(Kind.CLOSED, 0), sign(Kind.EXIT, 1), sign(Kind.PEER, 2)), sign(Kind.EXIT, 1)),
        ((sign(Kind.EXIT, 0), sign(Kind.OWN_ERROR, 1), sign(Kind.EXIT, 1)), sign(Kind.OWN_ERROR, 1)),
        # One that ends because it waited in vain is no cause, another one's silent end is.
        ((sign(Kind.PEER, 0), sign(Kind.EXIT, 0), sign(Kind.EXIT, 1)), sign(Kind.EXIT, 1)),
        ((sign(Kind.PEER, 0), sign(Kind.EXIT, 0), sign(Kind.HOST, 1)), sign(Kind.HOST, 1)),
        (
            (sign(Kind.ABORT, 0), sign(Kind.EXIT, 0), sign(Kind.PEER, 1), sign(Kind.EXIT, 1)),
            sign(Kind.PEER, 1),
        ),
        ((sign(Kind.CLOSED, 0), sign(Kind.EXIT, 0)), sign(Kind.EXIT, 0)),
        ((sign(Kind.CLOSED, 0),), sign(Kind.CLOSED, 0)),
    ],
)
def test_the_sign_that_explains_the_others(signs: tuple[Sign, ...], best: Sign) -> None:
    for arrived in permutations(signs):
        found = cause(arrived)
        assert (found.kind, found.rank) == (best.kind, best.rank)


@pytest.mark.parametrize(
    ("waits", "end", "said_by"),
    [
        ([(3, 2)], 2, {3}),
        ([(0, 2), (1, 2), (3, 2)], 2, {0, 1, 3}),
        ([(0, 1), (1, 3), (3, 2)], 2, {3}),  # one deadline passes before its end is known
        ([(0, 1), (1, 0)], None, {0, 1}),  # a message was lost: either may be named
    ],
)
def test_the_end_of_a_chain_of_waits_is_lost(
    waits: list[tuple[int, int]], end: int | None, said_by: set[int]
) -> None:
    """Not a rank that waited, of which each says so and exits."""
    signs = [sign(Kind.PEER, rank, peer) for rank, peer in waits]
    signs += [sign(Kind.EXIT, rank) for rank, _ in waits]
    for arrived in permutations(signs) if len(signs) < 7 else [signs, signs[::-1]]:
        found = cause(arrived)
        assert found.rank in ({end} if end is not None else said_by)
        assert str(found.error) in {f"PEER {rank}" for rank in said_by}


def test_what_the_end_of_a_chain_said_itself_comes_first() -> None:
    signs = [sign(Kind.PEER, 0, 1), sign(Kind.PEER, 1, 2), sign(Kind.OWN_ERROR, 2)]
    assert cause(signs) is signs[2]


@pytest.mark.parametrize(
    ("signs", "expected"),
    [
        ([Sign(Kind.EXIT, 1, RankLost("killed by SIGKILL"), killed=True)], LossCause.SIGNAL),
        ([sign(Kind.EXIT, 1)], LossCause.EXIT),
        ([Sign(Kind.OWN_ERROR, 1, InternalError("IndexError: 7")), sign(Kind.EXIT, 1)], LossCause.EXCEPTION),
        ([Sign(Kind.OWN_ERROR, 1, InternalError("RuntimeError: CUDA error: 700"))], LossCause.CUDA),
        ([Sign(Kind.OWN_ERROR, 1, InternalError("AcceleratorError: launch failed"))], LossCause.CUDA),
        ([sign(Kind.PEER, 0, 1)], LossCause.HANG),
        ([sign(Kind.CLOSED, 1), sign(Kind.PEER, 0, 1)], LossCause.HANG),
        ([sign(Kind.CLOSED, 1), sign(Kind.EXIT, 1)], LossCause.EXIT),
        ([sign(Kind.HOST, 1), sign(Kind.CLOSED, 1)], LossCause.NODE),
    ],
)
def test_the_cause_of_a_loss(signs: list[Sign], expected: LossCause) -> None:
    for arrived in permutations(signs):
        assert cause(arrived).rank == 1
        assert loss_cause(arrived, 1) is expected


def test_errors_caused_by_a_peer_are_known_by_class() -> None:
    found = {name: kind_of(name) for name in ("PeerTimeout", "PeerLost", "ProtocolViolation", "GroupAborted")}
    assert list(found.values()) == [Kind.PEER, Kind.PEER, Kind.PEER, Kind.ABORT]
    assert kind_of("CheckpointError") is kind_of("") is Kind.OWN_ERROR


@pytest.mark.parametrize(
    ("error", "several", "wanted"),
    [
        (ConfigError("model.path", "x", "a directory"), False, None),
        (ConfigError("model.path", "x", "a directory"), True, StartupError),
        (CheckpointError("broken"), False, CheckpointError),
        (RankLost("killed"), False, StartupError),
    ],
)
def test_what_a_start_raises_names_the_rank(
    error: EpServerError, several: bool, wanted: type[StartupError] | None
) -> None:
    made = start_error(Sign(Kind.OWN_ERROR, 3, error), several=several)
    if wanted is None:  # all ranks of a host read the same configuration
        assert made is error
    else:
        assert type(made) is wanted
        assert str(made) == f"rank 3: {error}"
