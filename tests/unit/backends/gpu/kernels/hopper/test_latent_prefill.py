"""What a launch of the Hopper kernel for chunks of latent attention is given, and what is refused. No GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ep_server.backends.gpu.kernels.hopper import prefill
from ep_server.backends.gpu.kernels.hopper.prefill import HopperLatentPrefill
from ep_server.backends.gpu.kernels.triton.expand import TILE, ExpandedKv
from ep_server.backends.gpu.kernels.triton.paged import Sequences
from ep_server.errors import InternalError

BF16, HEADS, ALL, TOKENS = torch.bfloat16, 4, 12, 9
SCRATCH = torch.zeros(64, dtype=torch.uint8)


class Recorder:
    """In place of the module's Prefill; keeps what it is given."""

    def __init__(self, **given: Any) -> None:
        self.given = given

    def run(self, **given: Any) -> None:
        self.given |= given

    @staticmethod
    def scratch_bytes(device: int | None) -> int:
        return len(SCRATCH)


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "native", lambda: SimpleNamespace(Prefill=Recorder))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(cuda_stream=7))


def expanded(tiles: int = 3) -> dict[str, torch.Tensor]:
    positions = tiles * TILE
    shapes = {"k": (HEADS, positions, 128), "v": (HEADS, positions, 128), "rope": (positions, 64)}
    return {name: torch.zeros(shape, dtype=BF16) for name, shape in shapes.items()}


def rows(channels: int, heads: int = ALL, more: int = 0) -> torch.Tensor:
    """Of all heads; their rows have a pitch with `more` channels behind them."""
    whole = torch.zeros(TOKENS, heads * channels + more, dtype=BF16)
    return whole[:, : heads * channels].view(TOKENS, heads, channels)


def launch(q: torch.Tensor, out: torch.Tensor, **scales: Any) -> dict[str, Any]:
    kernel = HopperLatentPrefill(ExpandedKv(**expanded()), 0.1, SCRATCH)
    lengths = torch.tensor([300, 9], dtype=torch.int32)
    sequences = Sequences(torch.zeros(2, 5, dtype=torch.int32)[:, :4], lengths)
    kernel.run(q, torch.tensor([0, 5, TOKENS], dtype=torch.int32), sequences, out, **scales)
    given: dict[str, Any] = kernel._native.given
    return given


def test_some_heads_of_rows_with_a_pitch() -> None:
    """As of a projection that holds more than queries."""
    q, out = rows(192, more=576), rows(128)
    given = launch(q[:, 4:8], out[:, 4:8])
    assert given["q"] == q.data_ptr() + 4 * 192 * 2 and given["q_pitch"] == (ALL * 192 + 576) * 2
    assert given["out"] == out.data_ptr() + 4 * 128 * 2 and given["row_heads"] == ALL
    assert (given["tokens"], given["sequences"], given["blocks_pitch"]) == (TOKENS, 2, 5)
    assert (given["kv_heads"], given["group"], given["block_size"]) == (HEADS, 1, TILE)
    assert given["positions"] == 3 * TILE and given["rotary"] and given["k_scale"] == 0


def test_one_scale_for_each_head() -> None:
    scale = torch.ones(HEADS)
    given = launch(rows(192, HEADS), rows(128, HEADS), scales=(scale, scale))
    assert given["k_scale"] == given["v_scale"] == scale.data_ptr() and given["row_heads"] == HEADS
    with pytest.raises(InternalError, match="k_scale: "):
        launch(rows(192, HEADS), rows(128, HEADS), scales=(torch.ones(1), scale))


@pytest.mark.parametrize("name", ["k", "v", "rope"])
def test_other_keys_and_values_are_refused(name: str) -> None:
    given = expanded()
    for wrong in (given[name].float(), given[name][..., 1:], given[name][..., :-1, :]):
        with pytest.raises(
            InternalError, match=f"expanded {'[kv]' if name == 'rope' else name}|expanded {name}"
        ):
            HopperLatentPrefill(ExpandedKv(**given | {name: wrong}), 0.1, SCRATCH)


@pytest.mark.parametrize(
    ("q", "out", "wrong"),
    [
        (rows(128, HEADS), rows(128, HEADS), "q"),
        (rows(192, HEADS - 1), rows(128, HEADS), "q"),
        (rows(192, HEADS).float(), rows(128, HEADS), "q"),
        (rows(192, HEADS, more=4), rows(128, HEADS), "q"),
        (rows(192, HEADS), rows(192, HEADS), "out"),
        (rows(192, HEADS), rows(128, HEADS, more=64), "out"),
    ],
)
def test_other_rows_are_refused(q: torch.Tensor, out: torch.Tensor, wrong: str) -> None:
    with pytest.raises(InternalError, match=f"^{wrong}: "):
        launch(q, out)
