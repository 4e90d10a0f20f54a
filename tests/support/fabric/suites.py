"""The conformance suite over a network, as programs of ranks."""

from __future__ import annotations

from functools import partial

import torch.distributed as dist

from ep_server.compat.deep_ep.bootstrap import from_process_group
from ep_server.exchange.api import Exchange, ExchangeSpec
from ep_server.exchange.fabric.link import FabricLink
from ep_server.exchange.fabric.settings import FabricOptions
from tests.support.exchange.conformance import case_names, run_cases
from tests.support.exchange.sequences import run_sequences, sequence_names
from tests.support.fabric.fabric_ends import connected, through_group


def make(options: FabricOptions, spec: ExchangeSpec, group: dist.ProcessGroup) -> Exchange:
    return connected(FabricLink(spec, options), through_group(group))


def whole_suite(group: dist.ProcessGroup, options: FabricOptions) -> dict[str, str]:
    factory = partial(make, options)
    return run_cases(group, factory) | run_sequences(group, factory)


def on_one_host(spec: ExchangeSpec, group: dist.ProcessGroup) -> Exchange:
    return from_process_group(group, spec)


def failures(by_rank: list[dict[str, str]], *, without: str = "-") -> str:
    """Of all ranks; asserts that the whole suite ran, but for names that end so."""
    names = {name for name in (*case_names(), *sequence_names()) if not name.endswith(without)}
    assert all(set(results) == names for results in by_rank)
    failed = [
        f"rank {rank}, {name}: {text}"
        for rank, results in enumerate(by_rank)
        for name, text in results.items()
        if text
    ]
    return "\n".join(failed[:5])
