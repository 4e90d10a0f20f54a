"""How a process on standby gets the memory of its group."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from ep_server.errors import StartupError
from ep_server.ranks.standby import receive
from ep_server.v1 import rank_pb2 as pb


@pytest.fixture
def front() -> Iterator[tuple[socket.socket, int]]:
    """The front's end of the socket, and the number of the other end."""
    ours, theirs = socket.socketpair()
    with ours:
        yield ours, theirs.detach()


@pytest.mark.parametrize("shadow", [None, 10])
def test_a_rank_gets_all_descriptors_in_order(front: tuple[socket.socket, int], shadow: int | None) -> None:
    ours, inside = front
    names = ["segment", "first", "second"] + ["shadow"] * (shadow is not None)
    made = [os.memfd_create(name) for name in names]
    socket.send_fds(ours, [b"x"], made)
    start = pb.Start(exchange_fd=7, bells=[8, 9], handover=inside, shadow_fd=shadow)
    receive(start)
    got = [start.exchange_fd, *start.bells, *([start.shadow_fd] if start.HasField("shadow_fd") else [])]
    assert [str(Path(f"/proc/self/fd/{fd}").readlink()).split(":")[1].split()[0] for fd in got] == names
    assert not start.HasField("handover")
    for fd in (*made, *got):
        os.close(fd)


@pytest.mark.parametrize("sent", [0, 1, 3])
def test_another_number_of_descriptors_is_an_error(front: tuple[socket.socket, int], sent: int) -> None:
    ours, inside = front
    made = [os.memfd_create("each") for _ in range(sent)]
    socket.send_fds(ours, [b"x"], made)
    with pytest.raises(StartupError, match=f"{sent} descriptors were handed over, 2 are needed"):
        receive(pb.Start(bells=[8], handover=inside))
    for fd in made:
        os.close(fd)


def test_a_front_that_has_ended_is_an_error(front: tuple[socket.socket, int]) -> None:
    ours, inside = front
    ours.close()
    with pytest.raises(StartupError, match="handed over"):
        receive(pb.Start(handover=inside))


def test_an_inherited_segment_stays_as_it_is() -> None:
    start = pb.Start(exchange_fd=7, bells=[8, 9])
    receive(start)
    assert (start.exchange_fd, list(start.bells)) == (7, [8, 9])
