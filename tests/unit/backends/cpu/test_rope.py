"""Frequencies equal transformers' functions; rotating adjacent pairs equals rotating halves."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ep_server.models.attention import adjacent_pairs, frequencies, rotate, rotation_table
from ep_server.models.families.common import rope
from ep_server.models.families.fields import Fields
from ep_server.models.families.spec import RopeSpec
from tests.support.compare import assert_close, assert_equal

CONTEXT = 4096
TABLES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 3.0},
    "yarn": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512},
    "yarn-mscale": {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 100,
        "beta_fast": 16,
        "beta_slow": 2,
        "mscale": 0.7,
        "mscale_all_dim": 0.9,
    },
    "yarn-attention-factor": {
        "rope_type": "yarn",
        "factor": 2.0,
        "attention_factor": 1.25,
        "original_max_position_embeddings": 2048,
        "truncate": False,
    },
    "yarn-narrow-ramp": {
        "rope_type": "yarn",
        "factor": 2.0,
        "beta_fast": 1,
        "original_max_position_embeddings": 7,
    },
}


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("theta", [10_000.0, 1e6])
def test_frequencies(name: str, theta: float) -> None:
    import transformers
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    table = TABLES[name] | {"rope_theta": theta}
    shape = {"hidden_size": 64, "num_attention_heads": 2, "head_dim": 32}
    config = transformers.Qwen3MoeConfig(
        **shape, max_position_embeddings=CONTEXT, rope_parameters=dict(table)
    )
    expected, factor = ROPE_INIT_FUNCTIONS[table["rope_type"]](config)
    spec = rope(Fields({"max_position_embeddings": CONTEXT, "rope_parameters": table}, "test"), 32)
    assert_equal(frequencies(spec), expected, name)
    assert spec.attention_factor == pytest.approx(factor)


def test_adjacent_pairs_rotate_like_halves() -> None:
    from transformers.models.qwen3_moe.modeling_qwen3_moe import apply_rotary_pos_emb

    torch.manual_seed(0)
    spec = RopeSpec(16, 1e4, attention_factor=1.3)
    q, k = torch.randn(2, 1, 3, 9, 16)  # [batch, heads, T, dim]
    angles = torch.outer(torch.arange(9.0), 1e4 ** -(torch.arange(0, 16, 2) / 16)).repeat(1, 2)[None]
    halves = apply_rotary_pos_emb(q, k, 1.3 * angles.cos(), 1.3 * angles.sin())
    expected = halves[0][0] @ halves[1][0].transpose(1, 2)
    rotation = rotation_table(spec, 9)[:, None]
    ours = []
    for x in (q, k):
        reordered = adjacent_pairs(x[0].permute(2, 0, 1), 16).permute(2, 1, 0).contiguous()
        ours.append(rotate(reordered, rotation).transpose(0, 1))
    assert_close(ours[0] @ ours[1].transpose(1, 2), expected, "scores", abs_tol=1e-5)


def test_adjacent_pairs_of_several_heads() -> None:
    rows = torch.arange(12.0)
    assert adjacent_pairs(rows, 6).tolist() == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]
    weight = torch.arange(24.0).view(12, 2)
    assert_equal(adjacent_pairs(weight, 6)[:, 0], adjacent_pairs(rows, 6) * 2, "rows move whole")
