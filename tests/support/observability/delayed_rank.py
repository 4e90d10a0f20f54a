"""A rank like any other until SIGUSR1: from then on the fault injector holds up each dispatch for 2 ms."""

from __future__ import annotations

import signal
import sys

from ep_server.exchange.api import ExchangeSpec
from ep_server.exchange.faults import Action, Fault
from ep_server.exchange.host import HostExchange
from ep_server.ranks import life
from ep_server.ranks.devices import CpuDevice
from ep_server.ranks.exchanges import Opening

DELAY_NS = 2_000_000
exchanges: list[HostExchange] = []


class Delayed(CpuDevice):
    """Keeps its exchange for the signal."""

    def open(self, spec: ExchangeSpec, opening: Opening) -> HostExchange:
        exchanges.append(super().open(spec, opening))
        return exchanges[0]


def hold_up(*_: object) -> None:
    (exchange,) = exchanges
    fault = Fault(exchange.spec.rank, "dispatch", "send_header", Action.DELAY, delay_ns=DELAY_NS)
    exchange.group.set_faults([fault])


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, hold_up)
    sys.exit(life.main(Delayed))
