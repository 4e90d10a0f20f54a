"""As interpreted_rank, with rank 0 as one host and the others as another: the exchange of two parts.

`python -m tests.support.ranks.interpreted_hierarchical`, as the launcher starts ep_server.ranks.life.
"""

from __future__ import annotations

import sys
from typing import Any

from ep_server.backends.gpu.moe.rows import RowsOfSteps
from ep_server.exchange.api import ExchangeSpec
from ep_server.exchange.fabric.device import FabricDeviceExchange
from ep_server.ranks import life
from ep_server.ranks.devices import rows_of
from ep_server.ranks.exchanges import Opening
from tests.support.fabric.hierarchical_ends import beside
from tests.support.ranks.interpreted_rank import Interpreted


class OnTwoHosts(Interpreted):
    """Shared memory for NVLink, staging as for a GPU. What waits for the host is not captured."""

    graphs = False

    def open(self, spec: ExchangeSpec, opening: Opening) -> Any:
        inter = FabricDeviceExchange(super().open(spec, opening), "cpu")
        return beside(inter, tuple(min(rank, 1) for rank in range(spec.num_ranks)))

    def rows(self, exchange: Any) -> RowsOfSteps:
        return rows_of(exchange)


if __name__ == "__main__":
    sys.exit(life.main(OnTwoHosts))
