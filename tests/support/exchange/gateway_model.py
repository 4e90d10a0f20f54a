"""The model of the cell protocol where some ranks share a host: one rank there takes rows in for all of them.

A dispatch to another host is one row and one completion record, to a gateway there. The gateway's carrier, a
party of its own that moves whatever the rank itself does, then sets the header at every rank of its host; all
of them read the row at the gateway. All else, combine and consumed cells too, goes from rank to rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tests.support.exchange.protocol_model import DISPATCH, NEVER, Fault, Model, Rules, Status, Step


@dataclass(frozen=True)
class GatewayRules(Rules):
    """hosts: of each rank. all_consume: a source waits until all have read the row, not the gateway alone."""

    hosts: tuple[int, ...] = (0, 1, 1)
    all_consume: bool = True


class GatewayModel(Model):
    """Adds to a state: per (gateway, bank, source) the epoch of the record that came."""

    def __init__(self, programs: list[list[str]], rules: GatewayRules, fault: Fault | None = None) -> None:
        super().__init__(programs, rules, fault)
        self.hosts, self.all_consume = rules.hosts, rules.all_consume
        self.steps = [[s for s in steps if self._sent(rank, s)] for rank, steps in enumerate(self.steps)]
        self.read_at = [
            {
                (s.op, s.epoch, peer): at
                for at, s in enumerate(steps)
                if s.kind == "read"
                for peer in self._peers(s)
            }
            for steps in self.steps
        ]
        self.record = self.size
        self.size += self.ranks * rules.num_banks * self.ranks
        # Per gateway and (bank, source): its record, and the header cell of each rank of the gateway's host.
        self._carried = [
            [
                (
                    self._record(gateway, bank) + source,
                    source,
                    [(self._at(self.header, DISPATCH, r, bank) + source, r) for r in self._mates(gateway)],
                )
                for bank in range(rules.num_banks)
                for source in range(self.ranks)
            ]
            for gateway in range(self.ranks)
        ]

    def successors(self, state: bytes) -> Iterator[tuple[str, bytes, str]]:
        """The steps of the ranks, and of the carriers of all that live."""
        yield from super().successors(state)
        for gateway in range(self.ranks):
            if state[self.status + gateway] == Status.DEAD:
                continue
            for record, source, cells in self._carried[gateway]:
                if epoch := state[record]:
                    for cell, reader in cells:
                        if state[cell] < epoch:
                            following = bytearray(state)
                            following[cell] = epoch
                            yield f"{gateway} tells {reader}: D{epoch} of {source}", bytes(following), ""

    def _mates(self, rank: int) -> list[int]:
        return [r for r in range(self.ranks) if self.hosts[r] == self.hosts[rank]]

    def _gateway(self, source: int, reader: int) -> int:
        """Where a source writes its dispatch for a reader."""
        if self.hosts[source] == self.hosts[reader]:
            return reader
        mates = self._mates(reader)
        return mates[source % len(mates)]

    def _sent(self, rank: int, step: Step) -> bool:
        far = step.op == DISPATCH and step.kind in ("write", "publish", "send")
        return not far or self._gateway(rank, step.peer) == step.peer

    def _record(self, gateway: int, bank: int) -> int:
        return self.record + (gateway * self.rules.num_banks + bank) * self.ranks

    def _missing(self, state: bytes, rank: int, step: Step) -> int:
        missing = super()._missing(state, rank, step)
        if step.kind == "open" and step.op == DISPATCH and not self.all_consume:
            missing &= sum(1 << p for p in range(self.ranks) if self._gateway(rank, p) == p)
        return missing

    def _act(self, state: bytearray, rank: int, step: Step) -> str:
        far = step.op == DISPATCH and step.peer >= 0 and self.hosts[step.peer] != self.hosts[rank]
        if not far or step.kind not in ("publish", "send"):
            return super()._act(state, rank, step)
        problem = self._write(state, rank, step) if step.kind == "send" else ""
        state[self._record(step.peer, step.epoch % self.rules.num_banks) + rank] = step.epoch
        return problem

    def _write(self, state: bytearray, rank: int, step: Step) -> str:
        old = state[self._slot(step, step.peer, rank)]
        problem = super()._write(state, rank, step)
        if step.op != DISPATCH or self.hosts[step.peer] == self.hosts[rank] or not old:
            return problem
        for reader in self._mates(step.peer):
            running = state[self.status + reader] == Status.RUNNING
            if running and state[reader] <= self.read_at[reader].get((step.op, old, rank), NEVER):
                return f"rank {rank} overwrites D{old}, which rank {reader} has not read at rank {step.peer}"
        return problem

    def _read(self, state: bytearray, rank: int, step: Step, peer: int) -> str:
        if step.op != DISPATCH or self.hosts[peer] == self.hosts[rank]:
            return super()._read(state, rank, step, peer)
        at = self._gateway(peer, rank)
        found = state[self._slot(step, at, peer)]
        wrong = f"rank {rank} reads D{step.epoch} of {peer} at rank {at} and finds epoch {found}"
        return "" if found == step.epoch else wrong
