"""Names for what was built to read vLLM: those its dashboard and endpoint pickers ask for, live."""

from __future__ import annotations

import asyncio
import urllib.request

from ep_server.cli.app import assemble
from ep_server.cli.demo.run import DEMO_MODEL
from ep_server.config import Config
from tests.support.frontend import parked
from tests.support.observability.reports import Series, series, value
from tests.support.raw_client import RawClient

PROMPT = [1, 2, 3, 4, 5]
LABELS = {"model_name": "demo_model", "engine": "0"}
RANKS = 2
# The Gateway API inference extension's model server protocol, required and optional.
PICKER = ("num_requests_waiting", "num_requests_running", "kv_cache_usage_perc")
# Every name that the queries of vLLM's own Grafana dashboard hold.
DASHBOARD = {
    "e2e_request_latency_seconds": ("bucket", "sum", "count"),
    "inter_token_latency_seconds": ("bucket", "sum", "count"),
    "time_to_first_token_seconds": ("bucket", "sum", "count"),
    "request_prompt_tokens": ("bucket",),
    "request_generation_tokens": ("bucket",),
    "request_queue_time_seconds": ("sum",),
    "request_prefill_time_seconds": ("sum",),
    "request_decode_time_seconds": ("sum",),
    "request_inference_time_seconds": ("sum", "count"),
    "request_time_per_output_token_seconds": ("bucket", "sum", "count"),
    "iteration_tokens_total": ("bucket", "sum", "count"),
    "request_max_num_generation_tokens": ("sum",),
}


async def scrape_after_load(vllm_names: bool) -> tuple[Series, Series, tuple[int, int]]:
    """Of a server with two ranks.

    Returns: while two requests decode; after all have ended; how many ended at their length, were aborted.
    """
    flags = {"model.path": str(DEMO_MODEL), "parallel.ranks": 2, "grpc.port": 0, "metrics.port": 0}
    config = Config.load(flags={**flags, "metrics.vllm_names": vllm_names}, environ={})
    async with assemble(config) as app:
        await app.server.start(lambda *_: None)
        try:
            async with RawClient(app.server.address) as client:
                during, (length, aborted) = await _hold_two(client, app.metrics_url)
                some = [
                    client.complete(PROMPT, max_new_tokens=6, ignore_eos=True, timeout=60) for _ in range(8)
                ]
                await asyncio.gather(*some)
            await parked(app.server)
            found = await asyncio.to_thread(_read, app.metrics_url)
            if vllm_names:
                picked = await asyncio.to_thread(_read, f"{app.metrics_url}/picker")
                names = {f"vllm:{name}" for name in (*PICKER, "cache_config_info")}
                assert {key: found[key] for key in found if key[0] in names}.items() <= picked.items()
                assert {name for name, _ in picked} == names
            return during, found, (length + 8, aborted)
        finally:
            await app.server.stop()


async def _hold_two(client: RawClient, url: str) -> tuple[Series, tuple[int, int]]:
    """Scrapes while two requests decode, then aborts them; again with two more if one had ended.

    Returns: the scrape; how many ended at their length, were aborted.
    """
    asked = aborted = 0
    while True:
        names = [f"held-{number}" for number in range(asked, asked + 2)]
        held = [
            client.generate(PROMPT, max_new_tokens=2000, ignore_eos=True, request_id=name) for name in names
        ]
        for stream in held:
            async for event in stream:
                if event.WhichOneof("event") == "tokens":
                    break
        during = await asyncio.to_thread(_read, url)
        ended = len((await client.abort(*names)).aborted)
        asked, aborted = asked + 2, aborted + ended
        if ended == 2:
            return during, (asked - aborted, aborted)


def _read(url: str) -> Series:
    with urllib.request.urlopen(url, timeout=30) as page:
        return series(page.read().decode())


def ranks_sum(found: Series, name: str) -> float:
    return sum(number for (each, _), number in found.items() if each == f"epserver_{name}")


async def test_what_pickers_and_dashboards_ask_for_is_there_and_right() -> None:
    during, found, (length, aborted) = await scrape_after_load(vllm_names=True)
    total = length + aborted
    for engine in map(str, range(RANKS)):  # one series per data-parallel engine, which are the ranks
        labels = {**LABELS, "engine": engine}
        assert value(during, "vllm:num_requests_running", **labels) == 1
        assert value(during, "vllm:num_requests_waiting", **labels) == 0
        assert value(found, "vllm:num_requests_waiting_by_reason", reason="capacity", **labels) == 0
        usage = value(found, "epserver_kv_cache_usage_ratio", rank=engine)
        assert value(found, "vllm:kv_cache_usage_perc", **labels) == usage
        blocks = int(value(found, "epserver_kv_blocks", rank=engine))
        sizes = {"block_size": "16", "num_gpu_blocks": str(blocks)}
        assert value(found, "vllm:cache_config_info", **labels, **sizes) == 1
        steps = value(found, "epserver_steps_total", rank=engine)
        assert value(found, "vllm:iteration_tokens_total_count", **labels) == steps
        tokens = value(found, "epserver_step_tokens_total", rank=engine)
        assert value(found, "vllm:iteration_tokens_total_sum", **labels) == tokens
    for name in PICKER:
        assert len([key for key in found if key[0] == f"vllm:{name}"]) == RANKS
    assert value(found, "vllm:prompt_tokens_total", **LABELS) == total * len(PROMPT)
    assert value(found, "vllm:generation_tokens_total", **LABELS) == ranks_sum(
        found, "generated_tokens_total"
    )
    assert value(found, "vllm:request_success_total", finished_reason="length", **LABELS) == length
    assert value(found, "vllm:request_success_total", finished_reason="abort", **LABELS) == aborted
    assert value(found, "vllm:request_success_total", finished_reason="stop", **LABELS) == 0
    assert value(found, "vllm:num_preemptions_total", **LABELS) == 0
    _check_histograms(found, total)


def _check_histograms(found: Series, requests: int) -> None:
    """Every name of vLLM's dashboard has a series; ranks add up."""
    for name, parts in DASHBOARD.items():
        for part in parts:
            edge = {"le": "+Inf"} if part == "bucket" else {}
            assert value(found, f"vllm:{name}_{part}", **LABELS, **edge) > 0, name
    queued = [
        value(found, "vllm:request_queue_time_seconds_bucket", **{**LABELS, "engine": engine}, le="+Inf")
        for engine in "01"
    ]
    assert sum(queued) == ranks_sum(found, "request_queue_seconds_count") == requests
    first = value(found, "vllm:time_to_first_token_seconds_bucket", **LABELS, le="0.25")
    assert first == value(found, "epserver_time_to_first_token_seconds_bucket", le="0.25")


async def test_they_are_off_unless_asked_for() -> None:
    _, found, _ = await scrape_after_load(vllm_names=False)
    assert not [name for name, _ in found if name.startswith("vllm:")]
