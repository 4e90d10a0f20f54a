"""Buffer and `import deep_ep`: DeepEP programs on gloo ranks (tests/support/exchange/buffer_*.py)."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch

from ep_server.compat import deep_ep
from ep_server.compat.deep_ep.sessions import Sizes
from ep_server.errors import ConfigError, InvalidArgument
from ep_server.exchange.api import Payload
from tests.support.exchange import buffer_masks, buffer_programs
from tests.support.exchange.buffer_masks import LOSSES, Lost
from tests.support.exchange.process_group import run_group


@cache
def results(num_ranks: int) -> dict[str, list[str]]:
    """program -> failure texts of the ranks that failed; one group of processes for all."""
    by_rank = run_group(buffer_programs.run_programs, num_ranks, args=("cpu",))
    return {
        name: [f"rank {rank}: {answers[name]}" for rank, answers in enumerate(by_rank) if answers[name]]
        for name in by_rank[0]
    }


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("program", [*buffer_programs.CPU_PROGRAMS, buffer_programs.LAST])
def test_program(num_ranks: int, program: str) -> None:
    failures = results(num_ranks)[program]
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_masks_on_request(num_ranks: int) -> None:
    run_group(buffer_masks.masks, num_ranks, args=("cpu",))


def test_masks_of_all_sizes() -> None:
    run_group(buffer_masks.masks_of_all_sizes, 3, args=("cpu",))


@pytest.mark.parametrize("shrink", [True, False])
def test_a_rank_that_stays_away(shrink: bool) -> None:
    run_group(buffer_masks.a_rank_that_stays_away, 3, args=("cpu", shrink))


@pytest.mark.parametrize("killed", [False, True])
@pytest.mark.parametrize(("num_ranks", "losses"), [(n, each) for n, all in LOSSES.items() for each in all])
def test_ranks_are_lost_one_after_the_other(num_ranks: int, losses: Lost, killed: bool) -> None:
    run_group(
        buffer_masks.shrink, num_ranks, args=("cpu", killed, losses), killed=losses.ranks if killed else ()
    )


def test_more_sizes_than_sessions() -> None:
    run_group(buffer_programs.sizes_in_use, 2)


def test_import_deep_ep_finds_the_package() -> None:
    program = (
        "from ep_server.compat.deep_ep import install; install(); install(); import deep_ep, torch;"
        "from deep_ep import Buffer, Config, EventOverlap, topk_idx_t;"
        "from deep_ep.utils import EventHandle; assert EventHandle is deep_ep.EventHandle;"
        "import ep_server.compat.deep_ep.buffer as b; assert Buffer is b.Buffer;"
        "assert topk_idx_t is torch.int64"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_the_folder_of_the_package_as_a_path_is_enough() -> None:
    folder = str(Path(deep_ep.__file__).parents[1])
    program = "import deep_ep, ep_server.compat.deep_ep.buffer as b; assert deep_ep.Buffer is b.Buffer"
    environment = os.environ | {"PYTHONPATH": folder}
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60, env=environment)


def test_install_refuses_to_replace_another_library() -> None:
    program = (
        "import sys, types; sys.modules['deep_ep'] = types.ModuleType('deep_ep')\n"
        "from ep_server.compat.deep_ep import install\n"
        "from ep_server.errors import StartupError\n"
        "try: install()\n"
        "except StartupError: print('refused')"
    )
    answer = subprocess.run([sys.executable, "-c", program], check=True, timeout=60, capture_output=True)
    assert answer.stdout.strip() == b"refused"


def test_size_hint_covers_every_call_of_those_sizes() -> None:
    hint = deep_ep.Buffer.get_low_latency_rdma_size_hint(128, 7168, 4, 64)
    from ep_server.compat.deep_ep.sessions import region_bytes

    for payload in (Payload.BF16, Payload.FP8, Payload.FP8_UE8M0):
        for top_k in (1, 8, 16):
            for device in ("cpu", "cuda"):
                sizes = Sizes(128, 7168, top_k, 64, payload, torch.device(device))
                assert region_bytes(sizes.spec(3, 4, 1)) <= hint
    assert hint < deep_ep.Buffer.get_low_latency_rdma_size_hint(129, 7168, 4, 64)


@pytest.mark.parametrize(
    ("field", "given"),
    [
        ("max_tokens", (0, 7168, 4, 64)),
        ("max_tokens", ("8", 7168, 4, 64)),
        ("hidden", (128, 0, 4, 64)),
        ("num_ranks", (128, 7168, 0, 64)),
        ("num_ranks", (128, 7168, 65, 64)),
        ("num_experts", (128, 7168, 4, 0)),
        ("num_experts", (128, 7168, 4, 1 << 34)),
    ],
)
def test_sizes_that_have_no_hint(field: str, given: tuple[int, int, int, int]) -> None:
    with pytest.raises(ConfigError) as caught:
        deep_ep.Buffer.get_low_latency_rdma_size_hint(*given)
    assert caught.value.field == field


def test_a_buffer_without_a_group_or_mode_is_refused() -> None:
    for given in ((None, None), (object(), object())):
        with pytest.raises(InvalidArgument, match="group, comm"):
            deep_ep.Buffer(given[0], comm=given[1])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("timeout_seconds", seconds) for seconds in (0, -1.0, 1e-12, math.nan, math.inf, "1")),
        *(("low_latency_num_sms", count) for count in (-1, 1.5)),
        *(("num_rdma_bytes", count) for count in (-1, "1")),
    ],
)
def test_a_bad_option_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(InvalidArgument, match=name):
        deep_ep.Buffer(object(), **{name: value})


def test_num_sms_is_even() -> None:
    assert deep_ep.Buffer.num_sms == 20
    deep_ep.Buffer.set_num_sms(24)
    assert deep_ep.Buffer.num_sms == 24
    deep_ep.Buffer.set_num_sms(20)
    with pytest.raises(InvalidArgument, match="even"):
        deep_ep.Buffer.set_num_sms(3)


def test_events() -> None:
    deep_ep.Buffer.capture().current_stream_wait()
    kept = torch.zeros(1)
    with deep_ep.EventOverlap(extra_tensors=(kept,)) as event:
        assert event.extra_tensors == (kept,)
    with pytest.raises(InvalidArgument, match="async_finish"):
        deep_ep.EventOverlap().current_stream_wait()
    assert deep_ep.Config(24, 8).num_max_nvl_chunked_send_tokens == 8
