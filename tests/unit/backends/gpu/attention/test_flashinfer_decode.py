"""What FlashInfer's XQA is told, against the oracle of our own kernels; the library is a stand-in."""

from __future__ import annotations

import pytest
import torch

from ep_server.backends.gpu.attention.flashinfer_decode import FlashInferDecode, XqaShape
from ep_server.backends.gpu.kernels.triton.paged import AttentionRule, Sequences
from ep_server.errors import InternalError
from tests.support.gpu.xqa import Xqa, step_case
from tests.support.triton.harness import DEVICE, FP8, NAN, assert_near, random
from tests.support.triton.paged_case import Heads, PagedCase

HEADS = Heads(8, 2, 32, 32)
BF16 = torch.bfloat16


def decoder(windowed: bool = False) -> tuple[FlashInferDecode, Xqa]:
    xqa, shape = Xqa(), XqaShape(HEADS.heads, HEADS.kv_heads, HEADS.k_dim, 16, windowed)
    return FlashInferDecode(xqa, shape, 3, DEVICE), xqa


def run(case: PagedCase, q: torch.Tensor, rule: AttentionRule, windowed: bool = False) -> torch.Tensor:
    out = torch.full_like(q, NAN)
    decoder(windowed)[0].over(case.sequences)(q, case.kv, rule, out)
    return out


def test_results_are_those_of_attention_and_padding_is_finite() -> None:
    lengths = [1, 0, 64, 130]
    case = step_case(lengths, HEADS)
    q = random(4, HEADS.heads, HEADS.k_dim, dtype=BF16, seed=1)
    got = run(case, q, AttentionRule(0.3))
    for s in (0, 2, 3):
        assert_near(got[s], case.attend(s, q[s], lengths[s] - 1, 0.3), 4)
    assert bool(got[1].isfinite().all())


def test_a_window_is_the_same_number_of_positions() -> None:
    lengths = [3, 40, 150]
    case = step_case(lengths, HEADS)
    q = random(3, HEADS.heads, HEADS.k_dim, dtype=BF16)
    got = run(case, q, AttentionRule(0.2, window=70), windowed=True)
    for s, length in enumerate(lengths):
        assert_near(got[s], case.attend(s, q[s], length - 1, 0.2, window=70), 4)


def test_layers_of_a_step_read_the_tables_where_they_lie() -> None:
    case, (kernels, xqa) = step_case([20, 33], HEADS), decoder()
    q = random(2, HEADS.heads, HEADS.k_dim, dtype=BF16)
    out = torch.full_like(q, NAN)
    layer = kernels.over(case.sequences)
    for _ in range(2):
        layer(q, case.kv, AttentionRule(0.5), out)
    assert_near(out[1], case.attend(1, q[1], 32, 0.5), 4)
    assert [call["page_table"].data_ptr() for call in xqa.calls] == [case.sequences.blocks.data_ptr()] * 2
    assert xqa.calls[0]["seq_lens"] is xqa.calls[1]["seq_lens"]


def test_prepare_runs_the_module_that_steps_will_use() -> None:
    for windowed in (False, True):
        kernels, xqa = decoder(windowed)
        kernels.prepare()
        assert [bool(call["sliding_win_size"]) for call in xqa.calls] == [windowed]


def test_no_sequences_are_no_call() -> None:
    kernels, xqa = decoder()
    case = step_case([16], HEADS)
    none = Sequences(case.sequences.blocks[:0], case.sequences.lengths[:0])
    empty = torch.empty(0, HEADS.heads, HEADS.k_dim, dtype=BF16, device=DEVICE)
    kernels.over(none)(empty, case.kv, AttentionRule(1.0), empty)
    assert not xqa.calls


def test_wrong_inputs_are_named() -> None:
    case, (kernels, xqa) = step_case([5, 9], HEADS), decoder()
    q, rule = random(2, HEADS.heads, HEADS.k_dim, dtype=BF16), AttentionRule(0.3)
    layer = kernels.over(case.sequences)
    with pytest.raises(InternalError, match=r"lengths: torch\.int64"):
        kernels.over(Sequences(case.sequences.blocks, case.sequences.lengths.long()))
    with pytest.raises(InternalError, match=r"blocks: .* strides"):
        kernels.over(Sequences(case.sequences.blocks[:, :2], case.sequences.lengths))
    with pytest.raises(InternalError, match=r"q: torch.float32"):
        layer(q.float(), case.kv, rule, torch.empty_like(q))
    with pytest.raises(InternalError, match=r"q: .*, expected contiguous torch.bfloat16 \[2, 8, 32\]"):
        layer(q[:1], case.kv, rule, torch.empty_like(q[:1]))
    with pytest.raises(InternalError, match=r"cache k: torch\.float8_e4m3fn"):
        layer(q, step_case([5, 9], HEADS, FP8).kv, rule, torch.empty_like(q))
    with pytest.raises(InternalError, match="cache v: None"):
        layer(q, step_case([5, 9], Heads(8, 2, 32, None, latent=16)).kv, rule, torch.empty_like(q))
    with pytest.raises(InternalError, match=r"window = 7: .* windowed=False"):
        layer(q, case.kv, AttentionRule(0.3, window=7), torch.empty_like(q))
    assert not xqa.calls
