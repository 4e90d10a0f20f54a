from __future__ import annotations

import pytest
import torch

from ep_server.backends.gpu.kernels.triton.paged import AttentionRule
from ep_server.backends.gpu.kernels.triton.paged_decode import Workspace, decode, splits_for
from ep_server.errors import InternalError
from tests.support.triton.harness import DEVICE, FP8, NAN, assert_near, random
from tests.support.triton.paged_case import Heads, PagedCase

GQA, ODD, MHA = Heads(8, 2, 32, 32), Heads(7, 1, 20, 12), Heads(3, 3, 16, 16)
LATENT = Heads(18, 1, 40, None, latent=32)  # two tiles of heads
ODD_LATENT = Heads(3, 1, 25, None, latent=18)
TYPES = {
    "float32": (torch.float32, torch.float32),
    "bfloat16": (torch.bfloat16, torch.bfloat16),
    "fp8": (torch.bfloat16, FP8),
}
each_type = pytest.mark.parametrize("types", TYPES)


def run(case: PagedCase, q: torch.Tensor, splits: int, rule: AttentionRule) -> torch.Tensor:
    """Workspace and output start as NaN."""
    count, heads = q.shape[:2]
    work = Workspace.of(count, heads, splits, case.kv.layer.v_dim, DEVICE)
    work.sums.fill_(NAN)
    work.stats.fill_(NAN)
    out = torch.full((count, heads, case.kv.layer.v_dim), NAN, dtype=q.dtype, device=DEVICE)
    decode(q, case.kv, case.sequences, rule, work, out)
    return out


@each_type
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(
    "heads", [GQA, ODD, MHA, LATENT, ODD_LATENT], ids=("gqa", "odd", "mha", "mla", "odd-mla")
)
def test_decode(heads: Heads, splits: int, types: str) -> None:
    """Lengths around tiles and blocks; a padded row in the middle, of NaN, gives zeros."""
    dtype, cache = TYPES[types]
    lengths = [1, 0, 64, 130]
    case = PagedCase.of(lengths, heads, 5, cache)
    q = random(4, heads.heads, heads.k_dim, dtype=dtype, seed=1)
    q[1] = NAN
    if cache is FP8 and heads.k_dim % 8:
        with pytest.raises(InternalError, match="must be multiples of 8"):
            run(case, q, splits, AttentionRule(0.3))
        return
    got = run(case, q, splits, AttentionRule(0.3))
    assert not got[1].any()
    for s in (0, 2, 3):
        assert_near(got[s], case.attend(s, q[s], lengths[s] - 1, 0.3), 4)


@pytest.mark.parametrize("splits", [1, 4])
def test_window(splits: int) -> None:
    lengths = [3, 40, 150]
    case = PagedCase.of(lengths, GQA, 16, torch.float32)
    q = random(3, 8, 32)
    got = run(case, q, splits, AttentionRule(0.2, window=70))
    for s, length in enumerate(lengths):
        assert_near(got[s], case.attend(s, q[s], length - 1, 0.2, window=70))


def test_large_scores_do_not_overflow() -> None:
    case = PagedCase.of([100], MHA, 16, torch.float32)
    q = random(1, 3, 16) * 1e4
    assert_near(run(case, q, 2, AttentionRule(1.0))[0], case.attend(0, q[0], 99, 1.0), 100)


def test_a_sequence_does_not_depend_on_its_neighbours() -> None:
    """The same bits alone and in a batch, for the same number of splits."""
    lengths = [90, 17, 129]
    case = PagedCase.of(lengths, GQA, 16, torch.bfloat16)
    q = random(3, 8, 32, dtype=torch.bfloat16)
    together = run(case, q, 2, AttentionRule(0.3))
    for s in range(3):
        alone = PagedCase.of(lengths, GQA, 16, torch.bfloat16)
        alone.sequences.lengths[[t for t in range(3) if t != s]] = 0
        assert torch.equal(run(alone, q, 2, AttentionRule(0.3))[s], together[s])


def test_nan_in_a_sequence_reaches_that_sequence_only() -> None:
    case = PagedCase.of([20, 20], MHA, 16, torch.float32)
    q = random(2, 3, 16)
    q[0, 1, 2] = NAN
    got = run(case, q, 2, AttentionRule(0.3)).isnan().all(-1)
    assert got.tolist() == [[False, True, False], [False] * 3]


def test_no_sequences() -> None:
    case = PagedCase.of([], GQA, 16, torch.float32)
    assert run(case, random(0, 8, 32), 2, AttentionRule(0.3)).shape == (0, 8, 32)


def test_splits_fill_the_device_and_are_not_short() -> None:
    assert splits_for(1, 4, 132, 32768) == 64
    assert splits_for(128, 4, 132, 32768) == 1
    assert splits_for(16, 4, 132, 32768) == 5
    assert splits_for(1, 1, 132, 100) == 1


def test_wrong_inputs_are_named() -> None:
    case = PagedCase.of([5], GQA, 16, torch.float32)
    with pytest.raises(InternalError, match=r"q: .* 7 heads|q: 7 heads"):
        run(case, random(1, 7, 32), 1, AttentionRule(0.3))
    with pytest.raises(InternalError, match="lengths"):
        run(case, random(2, 8, 32), 1, AttentionRule(0.3))
    with pytest.raises(InternalError, match="cache: "):
        run(case, random(1, 8, 32, dtype=torch.bfloat16), 1, AttentionRule(0.3))
    with pytest.raises(InternalError, match="splits = 65"):
        run(case, random(1, 8, 32), 65, AttentionRule(0.3))
