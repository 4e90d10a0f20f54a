"""A running server with real ranks: every series it exports moves under a load that should move it."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

import grpc
import pytest
from grpc import aio

from ep_server.cli.app import App, assemble
from ep_server.cli.demo.run import DEMO_MODEL
from ep_server.client import generate_request
from ep_server.config import Config
from ep_server.observability.metrics import FAULTS
from ep_server.v1.control_pb2 import UpdateWeightsRequest
from ep_server.v1.decode_pb2_grpc import DecodeStub
from tests.support.frontend import parked
from tests.support.observability.reports import Series, series, value
from tests.support.raw_client import RawClient

RANKS = 2
LAYERS = 3
BEFORE = 22  # requests that end well before one is dropped
DIGITS = 10  # of the vocabulary: any of them may stand in a prompt
# Facts, not measurements. A rank that lives stays up; the one that is killed goes down.
CONSTANT = {
    ("epserver_kv_blocks", "0"),
    ("epserver_kv_blocks", "1"),
    ("epserver_ep_rank_up", "0"),
    ("epserver_rank_losses_total", "0"),
    ("epserver_build_info", None),
    ("epserver_node_info", None),
    ("epserver_kv_block_size", None),
    ("epserver_queue_limit", None),
    ("epserver_padded_tokens_total", "0"),  # nothing pads on CPU
    ("epserver_padded_tokens_total", "1"),
    ("epserver_graph_steps_total", "0"),  # nor is anything captured
    ("epserver_graph_steps_total", "1"),
    ("epserver_comm_sleeps_total", "0"),  # on a busy machine giving the core away is wait enough
    ("epserver_comm_sleeps_total", "1"),
}

STANDING = {"epserver_running_limit", "epserver_rank_memory_bytes", "epserver_state"}
STANDING |= {"epserver_normal_steps_total"}  # steps take what was faster at the start
# A lost rank ends this server: nothing recovers.
STANDING |= {
    "epserver_generation",
    "epserver_recovery_seconds_sum",
    "epserver_recovery_seconds_count",
    "epserver_recovery_phase_seconds_sum",
    "epserver_recovery_phase_seconds_count",
    "epserver_requests_recovered_total",
    "epserver_recovery_copied_tokens_total",
    "epserver_live_ranks",
    "epserver_rank_loss_lacking_bytes",
}
# Experts do not move, and there is one node.
STANDING |= {
    "epserver_expert_imbalance",
    "epserver_expert_moves_total",
    "epserver_expert_placements_total",
    "epserver_nodes_out",
}


class Watch:
    """Scrapes now and then and remembers which values each series has had; an absent one counts as 0."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.seen: dict[tuple[str, frozenset[tuple[str, str]]], set[float]] = {}
        self.last: Series = {}
        self._scrapes = 0

    async def scrape(self) -> Series:
        text = await asyncio.to_thread(self._read)
        self.last = {key: number for key, number in series(text).items() if key[0].startswith("epserver_")}
        for key in self.last.keys() | self.seen.keys():
            default = {0.0} if self._scrapes else set()
            self.seen.setdefault(key, default).add(self.last.get(key, 0.0))
        self._scrapes += 1
        return self.last

    async def until(self, holds: Callable[[Series], bool], seconds: float = 60.0) -> None:
        async with asyncio.timeout(seconds):
            while not holds(await self.scrape()):
                await asyncio.sleep(0.05)

    def dead(self) -> list[str]:
        """Series that never moved. Single buckets may lie outside of what happened: their count is judged."""
        still = [
            key for key, values in self.seen.items() if len(values) < 2 and not key[0].endswith("_bucket")
        ]
        return sorted(
            f"{name}{dict(labels)} = {self.last.get((name, labels))}"
            for name, labels in still
            if (name, dict(labels).get("rank")) not in CONSTANT
            and name not in STANDING
            and dict(labels).get("status") not in FAULTS  # counted from 0, whether they happen or not
            and dict(labels).get("cause", "signal") == "signal"  # so are these; the rank is killed
        )

    def _read(self) -> str:
        with urllib.request.urlopen(self._url, timeout=30) as page:
            return page.read().decode()


@pytest.fixture
async def app() -> AsyncIterator[App]:
    flags = {
        "model.path": str(DEMO_MODEL),
        "model.updates": str(DEMO_MODEL.parent),
        "parallel.ranks": RANKS,
        "parallel.threads_per_rank": 1,
        "parallel.overlap": "on",
        "exchange.spin_us": 0,  # every wait sleeps
        "grpc.port": 0,
        "metrics.port": 0,
        "resilience.on_rank_loss": "stop",
        "scheduler.max_running": 4,
        "scheduler.kv_blocks": 24,  # 384 tokens: four long sequences do not fit
        "scheduler.max_queue": 16,
    }
    async with assemble(Config.load(flags=flags, environ={})) as app:
        await app.server.start(lambda *_: None)
        yield app
        await app.server.stop()


def _total(found: Series, name: str) -> float:
    return sum(number for (each, _), number in found.items() if each == name)


async def test_every_exported_series_moves(app: App) -> None:
    watch = Watch(app.metrics_url)
    draw = random.Random(3)
    prompt = [draw.randrange(DIGITS) for _ in range(48)]
    await watch.scrape()
    assert value(watch.last, "epserver_ep_rank_up", rank="1") == 1
    async with RawClient(app.server.address) as client:
        # One rank alone: the other takes part without tokens.
        await client.complete(prompt, max_new_tokens=8, dp_rank=0, timeout=60)
        await client.complete(prompt, max_new_tokens=8, dp_rank=1, timeout=60)
        await watch.until(lambda found: _total(found, "epserver_parks_total") > 0)
        # More sequences than fit: some wait, some are preempted, prefixes are found again.
        many = [
            client.complete(prompt, max_new_tokens=120, ignore_eos=True, dp_rank=n % RANKS, timeout=120)
            for n in range(BEFORE - 2)
        ]
        load = asyncio.gather(*many)
        while not load.done():
            await watch.scrape()
            await asyncio.sleep(0.05)
        outputs = await load
        # Ends of every other kind.
        dropped = await _drop(client, prompt, watch)
        with pytest.raises(grpc.RpcError):
            await client.complete(prompt, temperature=-1.0)
        await watch.until(lambda found: _total(found, "epserver_rank_running") == 0)
        await parked(app.server)  # the reports of both ranks count the same steps
        await watch.scrape()
        tokens = sum(len(output.token_ids) for output in outputs)
        _check_sums(watch.last, outputs_tokens=tokens, requests=BEFORE + dropped)
        await _end_unread(client, watch)
        await client.control.UpdateWeights(UpdateWeightsRequest(path=str(DEMO_MODEL)))
        await watch.until(lambda found: value(found, "epserver_weights_version") == 1)
        info = await client.server_info()
        os.kill(next(rank.pid for rank in info.rank_info if rank.rank == 1), signal.SIGKILL)
        with suppress(grpc.RpcError):
            await client.complete(prompt, max_new_tokens=100, timeout=30)
    await watch.until(lambda found: value(found, "epserver_ep_rank_up", rank="1") == 0)
    assert watch.dead() == []


async def _drop(client: RawClient, prompt: list[int], watch: Watch) -> int:
    """A caller leaves a stream. Returns: how many streams that took; one may have ended before."""
    cancelled = frozenset({("status", "CANCELLED"), ("finish_reason", "")})
    for times in itertools.count(1):
        dropped = client.generate(prompt, max_new_tokens=200, ignore_eos=True)
        async for event in dropped:
            if event.WhichOneof("event") == "tokens":
                dropped.cancel()
                break
        await watch.until(lambda found, n=times: value(found, "epserver_request_seconds_count") == BEFORE + n)
        if watch.last.get(("epserver_requests_total", cancelled)) == 1:
            await watch.until(lambda found: value(found, "epserver_cancel_to_free_seconds_count") > 0)
            return times
    raise AssertionError("unreachable")


async def _end_unread(client: RawClient, watch: Watch) -> None:
    """Finished sequences that nobody reads, of more bytes than HTTP/2 takes unread; Abort ends them."""
    options = [("grpc.http2.bdp_probe", 0)]  # else gRPC widens the window of a fast link
    async with aio.insecure_channel(client.target.address, options=options) as channel:
        fields = {"max_new_tokens": 350, "ignore_eos": True, "output_logprobs": True, "top_n": DIGITS}
        call = DecodeStub(channel).Generate(
            generate_request([1], request_id="unread", num_sequences=4, **fields)
        )
        await call.wait_for_connection()
        await watch.until(lambda found: value(found, "epserver_requests_unread") == 4)
        assert list((await client.abort("unread")).aborted) == ["unread"]
        await watch.until(lambda found: value(found, "epserver_unread_ended_total") == 4)


def in_all_modes(found: Series, name: str, **labels: str) -> float:
    """Of steps with few rows and with many, whichever the ranks have used."""
    modes = ("low_latency", "normal")
    return sum(found.get((name, frozenset({**labels, "mode": mode}.items())), 0) for mode in modes)


def _check_sums(found: Series, outputs_tokens: int, requests: int) -> None:
    """Numbers that are known beforehand, and numbers that have to agree with each other."""
    assert value(found, "epserver_requests_admitted_total") == requests
    assert value(found, "epserver_prompt_tokens_total") == requests * 48
    assert value(found, "epserver_requests_total", status="OK", finish_reason="length") >= 20
    assert value(found, "epserver_requests_total", status="CANCELLED", finish_reason="") == 1
    assert value(found, "epserver_requests_total", status="INVALID_ARGUMENT", finish_reason="") == 1
    assert value(found, "epserver_requests_total", status="UNAVAILABLE", finish_reason="") == 0
    assert value(found, "epserver_request_seconds_count") == requests
    lived = (value(found, f"epserver_request_{part}_seconds_sum") for part in ("prefill", "decode"))
    assert 0 < sum(lived) <= value(found, "epserver_request_seconds_sum")
    assert value(found, "epserver_request_decode_seconds_count") == requests
    assert value(found, "epserver_time_to_first_token_seconds_count") == requests
    assert value(found, "epserver_generated_tokens_total") >= outputs_tokens == 2400
    for rank in map(str, range(RANKS)):
        steps = value(found, "epserver_steps_total", rank=rank)
        assert steps > 120
        overlapped = found.get(("epserver_overlap_steps_total", frozenset({("rank", rank)})), 0)
        assert value(found, "epserver_step_seconds_count", rank=rank, phase="total") == steps
        for op in ("dispatch", "combine"):
            labels = {"rank": rank, "op": op}
            count = in_all_modes(found, "epserver_comm_latency_seconds_count", part="total", **labels)
            assert count == LAYERS * (steps + overlapped)  # one per MoE layer and micro-batch
            parts = (
                in_all_modes(found, "epserver_comm_latency_seconds_sum", part=p, **labels)
                for p in ("send", "wait")
            )
            total = in_all_modes(found, "epserver_comm_latency_seconds_sum", part="total", **labels)
            assert sum(parts) <= total
            assert in_all_modes(found, "epserver_comm_bytes_total", **labels) > 0
        hits = value(found, "epserver_prefix_cache_hits_total", rank=rank)
        assert 0 < hits <= value(found, "epserver_prefix_cache_queries_total", rank=rank)
        assert 0 <= value(found, "epserver_overlap_ratio", rank=rank) <= 1
    tokens = value(found, "epserver_comm_tokens_total", rank="0") + value(
        found, "epserver_comm_tokens_total", rank="1"
    )
    assert _total(found, "epserver_expert_tokens_total") == 4 * tokens  # top-4
    assert tokens >= LAYERS * _total(found, "epserver_step_tokens_total")
    assert tokens <= _total(found, "epserver_comm_rows_total") <= RANKS * tokens
