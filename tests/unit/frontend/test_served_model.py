"""What the front reads of a checkpoint directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ep_server.config import ModelConfig
from ep_server.errors import CheckpointError, ConfigError
from ep_server.frontend.served_model import ServedModel
from tests.support import tokenizers as made

CONFIG: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "vocab_size": 300,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "intermediate_size": 32,
    "norm_topk_prob": True,
    "max_position_embeddings": 160,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "eos_token_id": 7,
    "tie_word_embeddings": True,
}


def checkpoint(directory: Path, generation: dict[str, Any] | None = None) -> Path:
    (directory / "config.json").write_text(json.dumps(CONFIG))
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    return directory


def test_a_bare_checkpoint(tmp_path: Path) -> None:
    model = ServedModel.load(ModelConfig(path=str(checkpoint(tmp_path))))
    assert (model.name, model.architecture) == (tmp_path.name, "qwen3_moe")
    assert (model.vocab_size, model.max_context, model.eos_token_ids) == (300, 160, {7})
    assert (model.num_layers, model.hidden_size, model.num_experts, model.experts_per_token) == (2, 64, 6, 3)
    assert model.tokenizer is None
    assert (model.defaults.temperature, model.defaults.top_k, model.defaults.top_p) == (1.0, 0, 1.0)


def test_generation_config_gives_defaults_and_ends(tmp_path: Path) -> None:
    generation = {"eos_token_id": [1, 2], "temperature": 0.6, "top_p": 0.95, "top_k": 20, "do_sample": True}
    made.save(made.byte_level(), checkpoint(tmp_path, generation))
    model = ServedModel.load(ModelConfig(path=str(tmp_path), name="n", max_context=100))
    assert (model.name, model.max_context, model.eos_token_ids) == ("n", 100, {1, 2})
    assert (model.defaults.temperature, model.defaults.top_p, model.defaults.top_k) == (0.6, 0.95, 20)
    assert model.tokenizer is not None


def test_do_sample_false_is_greedy(tmp_path: Path) -> None:
    model = ServedModel.load(ModelConfig(path=str(checkpoint(tmp_path, {"do_sample": False}))))
    assert model.defaults.greedy


def test_what_is_wrong_is_named(tmp_path: Path) -> None:
    for path in ("", str(tmp_path / "none")):
        with pytest.raises(ConfigError, match=r"model\.path = .*a checkpoint directory"):
            ServedModel.load(ModelConfig(path=path))
    with pytest.raises(CheckpointError, match=r"config\.json"):
        ServedModel.load(ModelConfig(path=str(tmp_path)))
    with pytest.raises(ConfigError, match=r"model\.max_context = 161: must be at most the model's 160"):
        ServedModel.load(ModelConfig(path=str(checkpoint(tmp_path)), max_context=161))
    for name, value in (("temperature", "hot"), ("temperature", -1), ("top_p", 0), ("top_k", 1.5)):
        with pytest.raises(CheckpointError, match=rf"generation_config\.json: {name} = {value!r}: must be"):
            ServedModel.load(ModelConfig(path=str(checkpoint(tmp_path, {name: value}))))


def test_an_eos_id_beyond_the_vocabulary_ends_nothing(tmp_path: Path) -> None:
    """It would be refused by a rank that masks it for min_new_tokens."""
    model = ServedModel.load(ModelConfig(path=str(checkpoint(tmp_path, {"eos_token_id": [7, 300, 99999]}))))
    assert model.eos_token_ids == frozenset({7})
