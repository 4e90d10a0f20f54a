"""The sampler of a GPU against the host's, request by request: edits and log probabilities are exact, draws
follow its distribution. Without a GPU its kernels are interpreted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from ep_server.backends.cpu import sampling_ops as ops
from ep_server.backends.cpu.sampler import Sampler
from ep_server.backends.gpu.kernels.triton.sampling_table import ENTRIES, MOST_REPORTED
from ep_server.backends.gpu.sampling.sampler import GpuSampler
from ep_server.errors import InternalError, InvalidArgument
from ep_server.frontend.requests import MAX_LOGIT_BIAS, MAX_STOP_TOKENS, MAX_TOP_N
from ep_server.records import (
    NO_TOKEN,
    Grammar,
    GrammarKind,
    Request,
    SampledToken,
    Sampling,
    SeqSlice,
    Stopping,
)
from tests.support.triton.harness import DEVICE, NAN, random

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, of NaN, in the interpreter
VOCAB = 150
ROWS = 8
DRAWS = 200
INF = float("inf")


def request(number: int, prompt: Sequence[int] = (1, 2, 2, 3), stopping: Stopping | None = None, **sampling):
    chosen = Sampling(**{"temperature": 0.0, **sampling})
    return Request(f"r{number}", number, tuple(prompt), chosen, stopping or Stopping(99))


EARLY = Stopping(99, min_new_tokens=3, eos_token_ids=frozenset({0}), stop_token_ids=frozenset({149, 7}))
EDITS = {
    "plain": {},
    "repetition": {"repetition_penalty": 1.7},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": -0.8, "repetition_penalty": 0.6},
    "bias": {"logit_bias": ((5, 4.0), (7, 9.0), (149, -3.0))},
    "allowed": {"allowed_token_ids": (3, 7, 31, 32, 149)},
    "logprobs": {"logprobs": 4},
    "all": {
        "repetition_penalty": 1.2, "presence_penalty": 0.7, "frequency_penalty": 0.3, "logprobs": 20,
        "logit_bias": ((7, 8.0), (20, 6.0)), "allowed_token_ids": tuple(range(0, 150, 7)),
    },
}  # fmt: skip


@dataclass
class Both:
    """The two samplers, over the same requests and logits."""

    gpu: GpuSampler
    host: Sampler
    drawn: dict[int, int]

    def add(self, *requests: Request) -> None:
        for one in requests:
            self.gpu.add(one)
            self.host.add(one)
            self.drawn[one.number] = 0

    def launch(self, numbers: Sequence[int], logits: torch.Tensor) -> Launch:
        pieces = [SeqSlice(n, 3 + self.drawn[n], (0,), (), True) for n in numbers]  # prompts have 4 tokens
        for number in numbers:
            self.drawn[number] += 1
        tokens, told = torch.full((len(numbers),), -9, device=DEVICE), on_host(len(numbers))
        expected = self.host.sample(numbers, logits.cpu())
        return Launch(numbers, told, self.gpu.sample(pieces, logits.clone(), tokens, told), expected)

    def check(self, step: Launch) -> None:
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        told = self.gpu.sampled_tokens(step.numbers, step.tokens.tolist(), step.reported)
        assert_as(told, step.expected)


@dataclass
class Launch:
    numbers: Sequence[int]
    tokens: torch.Tensor  # on the host
    reported: object
    expected: list[SampledToken]


def on_host(count: int) -> torch.Tensor:
    """Where a step's tokens are told."""
    return torch.full((count,), -9, pin_memory=DEVICE.type == "cuda")


def assert_as(told: Sequence[SampledToken], expected: Sequence[SampledToken]) -> None:
    assert [(t.number, t.token_id) for t in told] == [(t.number, t.token_id) for t in expected]
    for ours, theirs in zip(told, expected, strict=True):
        assert (ours.logprob is None) == (theirs.logprob is None)
        if ours.logprob is not None:
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-5)
        values = [dict(t.top).values() for t in (ours, theirs)]
        assert list(values[0]) == pytest.approx(list(values[1]), abs=1e-5)
        finite = [{i for i, v in t.top if v > -INF} for t in (ours, theirs)]  # of banned ones any will do
        assert finite[0] == finite[1]


@pytest.fixture
def both() -> Both:
    return Both(GpuSampler(VOCAB, ROWS, DEVICE, 3), Sampler(VOCAB), {})


def steps(count: int, rows: int) -> Iterator[torch.Tensor]:
    """Logits that repeat, so that penalties have something to do."""
    for step in range(count):
        yield random(rows, VOCAB, seed=step % 2, scale=2.0)


def test_edits_and_log_probabilities_are_the_hosts(both: Both) -> None:
    """Every kind of request in one batch, each step launched before the tokens of the last are told."""
    both.add(*(request(n, stopping=EARLY, **edits) for n, edits in enumerate(EDITS.values())))
    numbers, flying = list(range(len(EDITS))), None
    for logits in steps(6, len(EDITS)):
        launched = both.launch(numbers, logits)
        if flying is not None:
            both.check(flying)
        flying = launched
    assert flying is not None
    both.check(flying)


@pytest.mark.parametrize("name", EDITS)
def test_a_request_alone(both: Both, name: str) -> None:
    """Nobody else in the step asks for the kernels that it needs."""
    both.add(request(1, stopping=EARLY, **EDITS[name]))
    for logits in steps(4, 1):
        both.check(both.launch([1], logits))


def test_masks_of_grammars_are_the_hosts(both: Both) -> None:
    """Beside bias, penalties and log probabilities, in a group of their own: other rows keep theirs."""
    edits = {name: value for name, value in EDITS["all"].items() if name != "allowed_token_ids"}
    grammar = Grammar(GrammarKind.PROGRAM, "")
    asked = [replace(request(n, **fields), grammar=grammar) for n, fields in enumerate(({}, edits))]
    both.add(*asked, request(2, temperature=0.0))
    draws = np.random.default_rng(0)
    for step, logits in enumerate(steps(4, 3)):
        masks = [draws.integers(-(2**31), 2**31, -(-VOCAB // 32), dtype=np.int32) for _ in range(2)]
        expected = both.host.sample([0, 1, 2], logits.cpu(), dict(enumerate(masks)))
        pieces = [SeqSlice(n, 3 + step, (0,), (), True) for n in range(3)]
        drawn, told = torch.full((3,), -9, device=DEVICE), on_host(3)
        none = both.gpu.sample(pieces[2:], logits[2:].clone(), drawn[2:], told[2:], pieces)
        reported = both.gpu.sample(pieces[:2], logits[:2].clone(), drawn[:2], told[:2], pieces, masks)
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        tokens = told.tolist()
        got = both.gpu.sampled_tokens([0, 1], tokens[:2], reported)
        assert_as(got + both.gpu.sampled_tokens([2], tokens[2:], none), expected)


def test_requests_come_go_and_change_rows(both: Both) -> None:
    both.add(*(request(n, **EDITS[name]) for n, name in enumerate(("all", "plain", "frequency", "bias"))))
    for numbers in ([0, 1], [1, 0, 2], [2], [3, 2, 0]):
        both.check(both.launch(numbers, random(len(numbers), VOCAB, seed=1)))
    both.gpu.remove(2)
    both.add(request(9, prompt=(5, 5, 6, 8), **EDITS["all"]))  # in the place of the one that left
    for numbers in ([9, 0], [9, 0], [0, 9, 1]):
        both.check(both.launch(numbers, random(len(numbers), VOCAB, seed=1)))


def test_who_has_lost_a_slot_is_written_anew(both: Both) -> None:
    """Two slots, three requests: as after preemption the counts are rebuilt from what was drawn."""
    both.gpu = GpuSampler(VOCAB, 2, DEVICE, 3)
    both.add(*(request(n, **EDITS["all"]) for n in range(3)))
    for numbers in ([0, 1], [0, 1], [1, 2], [2, 0], [0, 1], [2, 1]):
        both.check(both.launch(numbers, random(2, VOCAB, seed=3)))


def test_a_token_that_is_not_known_cannot_be_counted(both: Both) -> None:
    both.gpu = GpuSampler(VOCAB, 1, DEVICE, 3)
    both.add(*(request(n, presence_penalty=1.0) for n in range(2)))
    for number in (0, 1):
        both.launch([number], random(1, VOCAB))
    with pytest.raises(InternalError, match="0 of 1 drawn tokens are known"):
        both.launch([0], random(1, VOCAB))


def test_random_tokens_do_not_depend_on_slots_or_neighbours(both: Both) -> None:
    asked = {"temperature": 1.0, "seed": 5, "presence_penalty": 0.5}
    logits, alone, together = random(3, VOCAB, seed=4), [], []
    both.gpu.add(request(1, **asked))
    other = GpuSampler(VOCAB, 3, DEVICE, 3)
    for number, seed in ((7, 1), (8, 5), (9, 2)):
        other.add(request(number, **{**asked, "seed": seed}))
    for start in range(3, 7):
        for sampler, numbers, out in ((both.gpu, [1], alone), (other, [7, 8, 9], together)):
            tokens = torch.zeros(len(numbers), dtype=torch.int64, device=DEVICE)
            pieces = [SeqSlice(n, start, (0,), (), True) for n in numbers]
            rows = logits[1:2].clone() if len(numbers) == 1 else logits.clone()
            sampler.sample(pieces, rows, tokens, on_host(len(numbers)))
            out.append(tokens.tolist()[len(numbers) // 2])
    assert alone == together and len(set(alone)) > 1


@pytest.mark.parametrize(
    "filters",
    [{"min_p": 0.1}, pytest.param({"top_k": 7, "top_p": 0.8}, marks=pytest.mark.slow)],
    ids=str,
)
def test_draws_follow_the_hosts_distribution(filters: dict[str, float]) -> None:
    """Chi-squared over DRAWS draws of edited logits; passes 999 of 1000 seeds."""
    vocab, count, temperature = 12, 20, 1.3
    gpu, host = GpuSampler(vocab, count, DEVICE, 3), Sampler(vocab)
    logits = random(1, vocab, seed=8, scale=1.5)
    bias = ((3, 2.0), (4, -50.0))
    for number in range(count):
        asked = request(number, temperature=temperature, seed=977 * number, logit_bias=bias, **filters)
        gpu.add(asked)
        host.add(asked)
    drawn = torch.zeros(10, count, dtype=torch.int64, device=DEVICE)
    for step in range(10):
        pieces = [SeqSlice(n, 3 + step, (0,), (), True) for n in range(count)]
        gpu.sample(pieces, logits.repeat(count, 1), drawn[step], on_host(count))
    edited = logits.cpu().clone()
    for token, value in bias:
        edited[0, token] += value
    weights = ops.relative_weights(edited, edited.amax(-1), torch.tensor([temperature]))
    given = (filters.get("top_k", 0), filters.get("top_p", 1.0), filters.get("min_p", 0.0))
    ops.filter_weights(weights, *(torch.tensor([value]) for value in given))
    share = (weights / weights.sum())[0].double()
    seen = drawn.flatten().cpu().bincount(minlength=vocab).double()
    assert seen[share == 0].sum() == 0
    likely = share * DRAWS >= 5
    parts = torch.cat([seen[likely], seen[~likely].sum()[None]])
    expected = torch.cat([share[likely], share[~likely].sum()[None]]) * DRAWS
    chi = ((parts - expected).square() / expected.clamp(min=1)).sum()
    assert float(chi) < 31.3  # 11 degrees of freedom; fewer have less


def test_broken_logits_give_no_token_and_change_nothing(both: Both) -> None:
    both.add(*(request(n, **EDITS["all"]) for n in range(2)))
    logits = random(2, VOCAB)
    logits[1, 9] = NAN
    told = both.launch([0, 1], logits)
    both.check(told)
    assert told.expected[1].token_id == NO_TOKEN
    both.drawn[1] = 0
    both.check(both.launch([0, 1], random(2, VOCAB)))


def test_warming_up_leaves_nothing_behind(both: Both) -> None:
    both.gpu.warm_up()
    both.add(*(request(n, stopping=EARLY, **edits) for n, edits in enumerate(EDITS.values())))
    both.check(both.launch(list(range(len(EDITS))), random(len(EDITS), VOCAB)))


def test_what_a_server_accepts_fits_the_tables() -> None:
    assert ENTRIES >= MAX_LOGIT_BIAS + MAX_STOP_TOKENS + 64  # of generation_config.json
    assert MOST_REPORTED >= MAX_TOP_N


@pytest.mark.parametrize(
    ("sampling", "field"),
    [
        ({"temperature": 1.0}, "seed"),
        ({"logit_bias": ((VOCAB, 1.0),)}, "logit_bias"),
        ({"allowed_token_ids": (1, VOCAB)}, "allowed_token_ids"),
        ({"logprobs": MOST_REPORTED + 1}, "logprobs"),
    ],
    ids=str,
)
def test_what_cannot_be_drawn_is_refused(both: Both, sampling: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidArgument, match=field):
        both.gpu.add(request(1, **sampling))
    both.gpu.add(request(1))  # nothing of it is left
    with pytest.raises(InternalError, match="already"):
        both.gpu.add(request(1))


def test_a_list_too_long_is_refused() -> None:
    bias = tuple((token, 1.0) for token in range(ENTRIES + 1))
    with pytest.raises(InvalidArgument, match="logit_bias"):
        GpuSampler(2000, 1, DEVICE, 3).add(request(1, logit_bias=bias))


def test_steps_that_cannot_be(both: Both) -> None:
    none = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    assert both.gpu.sample([], random(0, VOCAB), none, on_host(0)) is None
    with pytest.raises(InternalError, match="request number 4 is not in the sampler"):
        both.gpu.sample([SeqSlice(4, 3, (0,), (), True)], random(1, VOCAB), none, on_host(0))
