"""The pair of bench_fabric.py: one rank's tokens, and dispatch + combine of them over several carriers."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ep_server.exchange.api import View
from ep_server.exchange.host import HostExchange

PAIR = {"max_tokens": 32, "hidden": 2048, "top_k": 8}
EXPERTS = 64
PLACEMENT = tuple(e * 2 // EXPERTS for e in range(EXPERTS))


class Case:
    """Tokens of one rank, and how many rows it sends to each and gets back from each, deduplicated."""

    def __init__(self, index: int) -> None:
        tokens, hidden, top_k = PAIR["max_tokens"], PAIR["hidden"], PAIR["top_k"]
        generator = torch.Generator().manual_seed(index)
        self.index = index
        self.x = torch.randn(tokens, hidden, generator=generator).bfloat16()
        self.ids = torch.stack([torch.randperm(EXPERTS, generator=generator)[:top_k] for _ in range(tokens)])
        self.weights = torch.full((tokens, top_k), 1 / top_k)
        self.sends = [int((self.ids * 2 // EXPERTS == r).any(dim=1).sum()) for r in range(2)]
        gathered: list[Any] = [None, None]
        dist.all_gather_object(gathered, self.sends)
        self.receives = [gathered[r][index] for r in range(2)]

    def over(self, exchange: HostExchange) -> Callable[[], None]:
        local = exchange.dispatch_send(self.x, self.ids, self.weights).recv()
        answers, result = torch.randn(local.rows.shape).bfloat16(), torch.empty_like(self.x)
        exchange.combine_send(answers, local).recv(result)

        def run() -> None:
            received = exchange.dispatch_send(self.x, self.ids, self.weights).recv(View.INDEX)
            exchange.combine_send(answers, received).recv(result)

        return run

    def over_gloo(self) -> Callable[[], None]:
        out, back = (torch.zeros(sum(self.sends), PAIR["hidden"]).bfloat16() for _ in range(2))
        rows = torch.zeros(sum(self.receives), PAIR["hidden"]).bfloat16()

        def run() -> None:
            dist.all_to_all_single(rows, out, self.receives, self.sends)
            dist.all_to_all_single(back, rows, self.sends, self.receives)

        return run

    def over_sockets(self, connection: socket.socket) -> Callable[[], None]:
        """The least that the kernel asks for: the bytes for the other rank, both ways, and nothing else."""
        row = 2 * PAIR["hidden"]
        there = memoryview(bytearray(row * self.sends[1 - self.index]))
        here = memoryview(bytearray(row * self.receives[1 - self.index]))

        def run() -> None:
            swap(connection, there, here)
            swap(connection, here, there)

        return run


def connect(address: str, index: int, other: Any) -> socket.socket:
    """A connection between the two processes; rank 0 listens on `address`. other: a pipe to the other one."""
    if index == 0:
        with socket.create_server((address, 0)) as server:
            other.send(server.getsockname())
            connection, _ = server.accept()
    else:
        connection = socket.create_connection(other.recv())
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setblocking(False)
    return connection


def swap(connection: socket.socket, out: memoryview, into: memoryview) -> None:
    """Sends and receives at once, spinning."""
    sent = received = 0
    while sent < len(out) or received < len(into):
        with contextlib.suppress(BlockingIOError):
            if sent < len(out):
                sent += connection.send(out[sent:])
        with contextlib.suppress(BlockingIOError):
            if received < len(into):
                received += connection.recv_into(into[received:])
