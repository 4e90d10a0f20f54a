"""What ranks of several hosts run with their exchange of many rows: NVLink inside, memory between them."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch.distributed as dist

from ep_server.compat.deep_ep.bootstrap import from_process_group
from ep_server.exchange.api import View
from ep_server.exchange.fabric.device import FabricDeviceExchange
from ep_server.exchange.hierarchical.exchange import HierarchicalExchange
from ep_server.exchange.nvlink.normal import NvlinkNormal
from tests.support.exchange.conformance import failure_of, run_pair
from tests.support.exchange.gpu_many import SHAPES, spec_of
from tests.support.exchange.routing import ROUTINGS
from tests.support.fabric.hierarchical_ends import on_gpus


def cases(group: dist.ProcessGroup, hosts: tuple[int, ...], shapes: Iterable[str] = SHAPES) -> dict[str, str]:
    """Name -> failure text, of every shape and routing, in turns with the exchange of few rows."""
    results = {}
    for name in shapes:
        inter = FabricDeviceExchange(from_process_group(group, spec_of(group, name)), "cpu")
        few = on_gpus(inter, hosts)
        many = few.normal
        assert isinstance(many, HierarchicalExchange)
        assert isinstance(many.intra, NvlinkNormal) is (len(many.intra_ranks) > 1)
        for seed, routing in enumerate(ROUTINGS):
            for exchange, view in ((many, View.INDEX), (few, View.INDEX), (many, View.COMPACT)):
                what = f"{name}-{routing}-{view.value}-{'few' if exchange is few else 'many'}"
                results[what] = failure_of(partial(run_pair, exchange, routing, seed, view))
        few.barrier()
        few.close()
    return results
