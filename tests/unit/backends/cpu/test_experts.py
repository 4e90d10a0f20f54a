"""Torch's expert FFNs against one row at a time; received rows back to floats. Native ones: test_kernels."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from ep_server.backends.torch_compute import TorchCompute, TorchGatedFfn
from ep_server.exchange.api import Payload, Received
from ep_server.exchange.quant import quantise
from ep_server.models.moe import dense_ffn, received_rows
from tests.support.compare import assert_close, assert_equal

HIDDEN, FFN = 24, 10


def weights(experts: int) -> TorchGatedFfn:
    torch.manual_seed(experts)
    return TorchCompute().gated_ffn(torch.randn(experts, 2 * FFN, HIDDEN), torch.randn(experts, HIDDEN, FFN))


@pytest.mark.parametrize("counts", [(3, 0, 1, 7), (0, 0, 0), (0, 5), (1,), ()])
def test_each_row_meets_its_expert(counts: tuple[int, ...]) -> None:
    w = weights(len(counts))
    rows = torch.randn(sum(counts), HIDDEN)
    offsets = torch.tensor([sum(counts[:i]) for i in range(len(counts) + 1)])
    expected = torch.empty_like(rows).double()
    row = 0
    for e, count in enumerate(counts):
        gate, up = w.gate_up[e, :FFN].double(), w.gate_up[e, FFN:].double()
        for _ in range(count):
            x = rows[row].double()
            expected[row] = w.down[e].double() @ (F.silu(gate @ x) * (up @ x))
            row += 1
    assert_close(w(rows, offsets), expected, "experts", abs_tol=1e-4)


def test_a_dense_ffn_is_one_expert() -> None:
    w = weights(1)
    rows = torch.randn(5, HIDDEN)
    dense = dense_ffn(rows, w)
    assert_close(dense, w(rows, torch.tensor([0, 5])).double(), "dense", abs_tol=1e-5)


@pytest.mark.parametrize("payload", [Payload.FP8, Payload.FP8_POW2, Payload.FP8_UE8M0])
def test_fp8_rows_come_back(payload: Payload) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 512).bfloat16()
    codes, scales = quantise(x, payload)
    offsets = torch.tensor([0, 3])
    rows = received_rows(Received(codes, torch.tensor([3]), offsets, None, scales=scales), torch.float32)
    assert rows.dtype is torch.float32
    assert_close(rows, x.float(), str(payload), abs_tol=0.25)
    assert (rows - x.float()).abs().mean() < 0.03  # e4m3 keeps three bits of mantissa


def test_plain_rows_are_not_copied() -> None:
    x = torch.randn(3, 8)
    received = Received(x, torch.tensor([3]), torch.tensor([0, 3]), None)
    assert received_rows(received, torch.float32).data_ptr() == x.data_ptr()
    assert_equal(received_rows(received, torch.bfloat16), x.bfloat16(), "cast")
