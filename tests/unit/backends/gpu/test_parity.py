"""The step of a GPU gives the tokens of transformers in float32, for every family.

Without a GPU its kernels are interpreted, which takes seconds. Where there is a GPU the same runs on it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from ep_server.backends.gpu import decoder
from ep_server.backends.gpu import runner as gpu
from ep_server.backends.gpu.attention import attention
from ep_server.backends.gpu.graphs import GraphKey
from ep_server.backends.gpu.kernels.triton.partial import Partial
from ep_server.backends.gpu.moe.rows import LocalRows
from ep_server.backends.gpu.runner import Launched
from ep_server.backends.gpu.waiting import STEP_SECONDS
from ep_server.errors import GroupAborted, InternalError
from ep_server.records import StepBatch
from ep_server.scheduler import RankScheduler, SchedulerLimits
from tests.support.gpu.runners import TOKENS, SingleTokens, Together, gpu_runner
from tests.support.gpu.streams import Passed
from tests.support.models.checkpoints import CASES, Tiny
from tests.support.models.driver import BLOCK, BLOCKS, generate
from tests.support.ranks.rank_group import greedy

SCHEDULED = 2  # prompts
QUICK = {"deepseek_v2-lite-yarn"}  # with those below, every kernel's keys
NAMES = [pytest.param(c.name, marks=[pytest.mark.slow] * (c.name not in QUICK)) for c in CASES]


@pytest.mark.parametrize("micro_batches", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize(
    "cut",
    [
        pytest.param({"chunk": 5, "budget": 13}, id="chunked"),
        pytest.param({}, id="whole", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("name", NAMES)
def test_prompts_together(
    tiny: Callable[[str], Tiny], name: str, cut: dict[str, int], micro_batches: int
) -> None:
    """Chunks that end within a micro-batch, odd numbers of tokens, and a last step of one sequence."""
    model = tiny(name)
    runner, count = gpu_runner(model.path), 3
    for number, prompt in enumerate(model.prompts):
        runner.add(greedy(number, prompt, count))
    drawn = generate(runner, model.prompts, count, micro_batches=micro_batches, **cut)
    assert drawn == [tokens[:count] for tokens in model.tokens]


@pytest.mark.parametrize("name", NAMES)
def test_rows_that_stay_where_they_are(tiny: Callable[[str], Tiny], name: str) -> None:
    """A token's answers, shared experts' too, are summed in the kernel of the norm behind them."""
    model = tiny(name)
    runner, count = gpu_runner(model.path, rows=LocalRows()), 3
    for number, prompt in enumerate(model.prompts):
        runner.add(greedy(number, prompt, count))
    drawn = generate(runner, model.prompts, count, micro_batches=2, chunk=5, budget=13)
    assert drawn == [tokens[:count] for tokens in model.tokens]


class InParts:
    """Stands for the products' kernel for Hopper: the sums over three runs of channels."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight, self.rows = weight, 0

    def takes(self, x: torch.Tensor) -> bool:
        return True

    def __call__(self, x: torch.Tensor) -> Partial:
        self.rows += len(x)
        runs = zip(x.tensor_split(3, 1), self._weight.tensor_split(3, 1), strict=True)
        return Partial(torch.stack([a @ b.T for a, b in runs]).float())


@pytest.mark.slow
def test_products_that_come_in_parts(tiny: Callable[[str], Tiny], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of both projections and the router, added up by the kernels that read them."""
    made: list[InParts] = []

    def hopper(weight: torch.Tensor, most_rows: int, *_: object, **__: object) -> InParts:
        made.append(InParts(weight))
        return made[-1]

    monkeypatch.setattr(attention, "hopper_product", hopper)
    monkeypatch.setattr(decoder, "hopper_product", hopper)
    model = tiny("qwen3_moe")
    runner, count = gpu_runner(model.path), 2
    for number, prompt in enumerate(model.prompts):
        runner.add(greedy(number, prompt, count))
    drawn = generate(runner, model.prompts, count)
    assert drawn == [tokens[:count] for tokens in model.tokens]
    assert len(made) % 3 == 0 and len({each.rows for each in made}) == 1


@pytest.mark.parametrize("parts", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_single_tokens_beside_chunks_by_a_kernel_of_their_own(
    tiny: Callable[[str], Tiny], monkeypatch: pytest.MonkeyPatch, parts: bool
) -> None:
    """Chunks of prompts go to the other kernels, and the same step may have both."""
    monkeypatch.setattr(decoder, "hopper_attention", Together)
    monkeypatch.setattr(decoder, "HopperAttentionStep", SingleTokens)
    monkeypatch.setattr(SingleTokens, "rows", 0)
    if parts:
        monkeypatch.setattr(attention, "hopper_product", lambda weight, *_: InParts(weight))
    model = tiny("qwen3_moe")
    runner, count = gpu_runner(model.path), 3
    for number, prompt in enumerate(model.prompts):
        runner.add(greedy(number, prompt, count))
    drawn = generate(runner, model.prompts, count, micro_batches=2, chunk=5, budget=13)
    assert drawn == [tokens[:count] for tokens in model.tokens]
    assert SingleTokens.rows >= len(model.prompts) * (count - 1)


def scheduled(
    model: Tiny, ahead: int, count: int, keys: tuple[GraphKey, ...] = (), **sampling: object
) -> dict[int, list[int]]:
    """Tokens by request number, with so many steps launched before the tokens of the first are known.

    Steps of a bucket are run in its last key.
    """
    runner = gpu_runner(model.path, keys)
    micro_batches = {key.bucket: key.micro_batches for key in keys}
    with torch.inference_mode():
        runner.graphs.capture()
    limits = SchedulerLimits(
        max_running=8, max_step_tokens=TOKENS, block_size=BLOCK, kv_blocks=BLOCKS,
        prefix_cache=True, max_context=128, ahead=ahead,
    )  # fmt: skip
    scheduler, tokens = RankScheduler(limits), dict[int, list[int]]()
    for number, prompt in enumerate(model.prompts[:SCHEDULED]):
        request = greedy(number, prompt, count)
        request = replace(request, sampling=replace(request.sampling, **sampling))
        runner.add(request)
        scheduler.add(request)
    flying: deque[tuple[StepBatch, Launched]] = deque()
    with torch.inference_mode():
        while scheduler.has_work:
            while len(flying) <= ahead and (batch := scheduler.plan()).slices:
                bucket = runner.bucket_of(batch)
                flying.append((batch, runner.launch(batch, micro_batches.get(bucket, 1), bucket)))
            batch, launched = flying.popleft()
            for event in scheduler.commit(batch, runner.collect(launched)):
                tokens.setdefault(event.number, []).append(event.token_id)
    return tokens


@pytest.mark.parametrize("ahead", [1, pytest.param(2, marks=pytest.mark.slow)])  # ranks have 1
def test_steps_launched_before_their_tokens_are_known(tiny: Callable[[str], Tiny], ahead: int) -> None:
    model = tiny("qwen3_moe")
    expected = {number: list(tokens[:4]) for number, tokens in enumerate(model.tokens[:SCHEDULED])}
    assert scheduled(model, ahead, 4) == expected


@pytest.mark.parametrize(
    "keys",
    [
        (GraphKey(2), GraphKey(4)),
        pytest.param((GraphKey(1, 2), GraphKey(2, 2)), marks=pytest.mark.slow),  # halves of one row, or none
        (GraphKey(3, 2),),  # an odd bucket, its second half not full
        pytest.param((GraphKey(2), GraphKey(2, 2), GraphKey(8, 2)), marks=pytest.mark.slow),
        pytest.param((GraphKey(8, 2),), marks=pytest.mark.slow),  # nothing but padding in its second half
    ],
    ids=str,
)
def test_steps_padded_to_a_bucket(tiny: Callable[[str], Tiny], keys: tuple[GraphKey, ...]) -> None:
    model = tiny("qwen3_moe")
    expected = {number: list(tokens[:3]) for number, tokens in enumerate(model.tokens[:SCHEDULED])}
    assert scheduled(model, 1, 3, keys) == expected


def test_graphs_leave_their_logits_in_one_place(tiny: Callable[[str], Tiny]) -> None:
    """Each keeps what it returns for as long as it is there: a place for each would be gigabytes."""
    keys = (GraphKey(1), GraphKey(4), GraphKey(4, 2))
    runner = gpu_runner(tiny("qwen3_moe").path, keys)
    with torch.inference_mode():
        runner.graphs.capture()
        left = [runner.graphs.replay(key) for key in keys]
    assert len({logits.data_ptr() for logits in left}) == 1
    assert [logits.shape[0] for logits in left] == [1, 4, 4]


def test_a_step_may_take_longer_than_any_wait_for_a_peer(
    tiny: Callable[[str], Tiny], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the wait's own error is told, which names the peer."""
    runner, seconds = gpu_runner(tiny("qwen3_moe").path), []
    monkeypatch.setattr(gpu, "await_event", lambda event, limit, what: seconds.append(limit))
    with torch.inference_mode():
        launched = runner.launch(StepBatch((), 0))
        launched.arrived = Passed(1)
        runner.collect(launched)
    assert seconds == [STEP_SECONDS + 10]


def test_a_form_that_was_not_captured_is_run_as_one_micro_batch(tiny: Callable[[str], Tiny]) -> None:
    runner = gpu_runner(tiny("qwen3_moe").path, (GraphKey(2), GraphKey(4), GraphKey(4, 2)))
    assert [runner.micro_batches_of(bucket, 2) for bucket in (0, 2, 4)] == [2, 1, 2]
    assert [runner.micro_batches_of(bucket, 1) for bucket in (0, 2, 4)] == [1, 1, 1]
    with torch.inference_mode(), pytest.raises(InternalError, match="no graph for a step of"):
        runner.launch(StepBatch((), 0), 2, 2)


def test_what_a_kernel_found_is_raised_with_the_tokens(tiny: Callable[[str], Tiny]) -> None:
    def check() -> None:
        raise GroupAborted("of a kernel")

    runner = gpu_runner(tiny("qwen3_moe").path, check=check)
    with torch.inference_mode():
        launched = runner.launch(StepBatch((), 0))
        with pytest.raises(GroupAborted):
            runner.collect(launched)
