"""The ranks of another node as node 0 sees them: each looks like a RankProcess, all go over one link."""

from __future__ import annotations

import asyncio
import signal

from ep_server.cluster.link import Link
from ep_server.errors import InternalError
from ep_server.ranks.process import RankCallbacks
from ep_server.v1 import nodes_pb2 as pb


class RemoteRank:
    """One rank of another node. Satisfies ranks.hosts.Rank."""

    def __init__(self, rank: int, link: Link) -> None:
        self.rank = rank
        self.pid = 0
        self.returncode: int | None = None
        self.exited = asyncio.Event()
        self._link = link

    def __repr__(self) -> str:
        return f"RemoteRank(rank={self.rank}, pid={self.pid}, returncode={self.returncode})"

    @property
    def buffered(self) -> int:
        """Bytes that wait for the node, of all its ranks."""
        return self._link.buffered

    def send(self, payload: bytes) -> None:
        """Sends a frame; does not block."""
        self._link.send(rank_frame=pb.RankFrame(rank=self.rank, payload=payload))

    def signal(self, number: signal.Signals) -> None:
        """Has the process signalled unless it has ended."""
        if not self.exited.is_set():
            self._link.send(rank_signal=pb.RankSignal(rank=self.rank, number=number))

    def close(self) -> None:
        """Nothing: the link is all ranks'."""


class RemoteRanks:
    """All ranks of one node. on_message() gets what the node sends, lost() that it is gone."""

    def __init__(self, node: int, ranks: range, link: Link, callbacks: RankCallbacks) -> None:
        self.ranks = [RemoteRank(rank, link) for rank in ranks]
        several = f"ranks {ranks[0]}-{ranks[-1]}" if len(ranks) > 1 else f"rank {ranks[0]}"
        self._name = f"node {node} ({several})"
        self._callbacks = callbacks
        self._by_number = {rank.rank: rank for rank in self.ranks}

    def on_message(self, message: pb.NodeMessage) -> None:
        """What the node says of its ranks. Raises: InternalError for what no node says."""
        kind = message.WhichOneof("kind")
        if kind == "rank_frame":
            self._callbacks.on_frame(self._known(message.rank_frame.rank).rank, message.rank_frame.payload)
        elif kind == "rank_closed":
            self._callbacks.on_closed(self._known(message.rank_closed.rank).rank, message.rank_closed.reason)
        elif kind == "rank_exited":
            self._exited(self._known(message.rank_exited.rank), message.rank_exited.code)
        elif kind == "spawned":
            for rank, pid in zip(self.ranks, message.spawned.pids, strict=True):
                rank.pid = pid
        elif kind == "failed":
            self._end(message.failed.message)
        else:
            raise InternalError(f"a message of kind {kind!r} from {self._name}")

    def lost(self, reason: str) -> None:
        """The node is gone, and its ranks with it: one sign for all of them."""
        self._end(reason)

    def _end(self, reason: str) -> None:
        left = [rank for rank in self.ranks if not rank.exited.is_set()]
        for rank in left:
            rank.exited.set()
        if left:
            self._callbacks.on_host_lost(self.ranks[0].rank, f"{self._name} {reason}")

    def _exited(self, rank: RemoteRank, code: int) -> None:
        if not rank.exited.is_set():
            rank.returncode = code
            rank.exited.set()
            self._callbacks.on_exit(rank.rank, code)

    def _known(self, number: int) -> RemoteRank:
        if number not in self._by_number:
            raise InternalError(f"rank {number} is not of {self._name}")
        return self._by_number[number]
