"""A rank like any other until SIGUSR1: from then on the fault injector holds up each dispatch for 2 ms."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable

from ep_server.ep.faults import Action, Fault
from ep_server.ep.native import NativeExchange
from ep_server.ranks import build, worker
from ep_server.v1 import rank_pb2 as pb

DELAY_NS = 2_000_000
exchanges: list[NativeExchange] = []
build_as_ever = build.build_rank


def build_rank(
    start: pb.Start, progress: build.Progress, on_exchange: Callable[[NativeExchange], None]
) -> build.RankParts:
    def keep(exchange: NativeExchange) -> None:
        exchanges.append(exchange)
        on_exchange(exchange)

    return build_as_ever(start, progress, keep)


def hold_up(*_: object) -> None:
    (exchange,) = exchanges
    fault = Fault(exchange.spec.rank, "dispatch", "send_header", Action.DELAY, delay_ns=DELAY_NS)
    exchange.set_faults([fault])


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, hold_up)
    build.build_rank = build_rank
    sys.exit(worker.main())
