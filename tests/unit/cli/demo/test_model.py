"""The committed demo model, run by transformers: it is what `ep-server demo` says it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from jinja2 import TemplateError
from safetensors import safe_open

import ep_server
from ep_server.cli.demo.sums import Sum, draw_held_out, parse_answer
from ep_server.text.tokenizer import Detokenizer, Tokenizer

MODEL = Path(ep_server.__file__).parent / "assets" / "demo_model"
MAX_BYTES = 8_000_000
SUMS = 1000


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    tokenizer = Tokenizer.load(MODEL)
    assert tokenizer is not None
    return tokenizer


def test_the_files_are_a_small_checkpoint() -> None:
    names = {file.name for file in MODEL.iterdir()}
    files = {"chat_template.jinja", "config.json", "generation_config.json", "model.safetensors"}
    assert names == files | {"tokenizer.json", "tokenizer_config.json"}
    assert sum(file.stat().st_size for file in MODEL.iterdir()) <= MAX_BYTES
    with safe_open(MODEL / "model.safetensors", "pt") as weights:
        assert {weights.get_tensor(name).dtype for name in weights.keys()} == {torch.bfloat16}  # noqa: SIM118
    config = json.loads((MODEL / "config.json").read_text())
    generation = json.loads((MODEL / "generation_config.json").read_text())
    assert config["model_type"] == "qwen3_moe" and config["norm_topk_prob"] is True
    assert generation["eos_token_id"] == config["eos_token_id"]


def test_spaces_and_leading_zeros_do_not_matter(tokenizer: Tokenizer) -> None:
    expected = tokenizer.encode("007+012=")
    for text in ("7 + 12 =", "7+12=", " 07  + 012 = "):
        assert tokenizer.encode(text) == expected
    assert len(expected) == 8


def test_chat_template_asks_the_last_sum(tokenizer: Tokenizer) -> None:
    from transformers import AutoTokenizer

    transformer = AutoTokenizer.from_pretrained(MODEL)
    earlier = [{"role": "user", "content": "1 + 1"}, {"role": "assistant", "content": "2"}]
    for question in ("7 + 12", " 7 + 12 = "):
        messages = [*earlier, {"role": "user", "content": question}]
        rendered = transformer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert rendered == "7 + 12 ="
        assert transformer(rendered).input_ids == tokenizer.encode("7 + 12 =")
    with pytest.raises(TemplateError, match="the last message must have the role user"):
        transformer.apply_chat_template(earlier, tokenize=False)


def test_answers_stream_as_text(tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode("7 - 12 =")
    detokenizer = Detokenizer(tokenizer, prompt)
    written = [13, 13, 11, 5]  # two spaces, the sign, the digit
    assert [detokenizer.push(token) for token in written] == [" ", " ", "-", "5"]
    assert tokenizer.decode([*written, 14]) == "  -5"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_it_adds_and_subtracts_pairs_kept_out_of_training(tokenizer: Tokenizer, dtype: torch.dtype) -> None:
    from transformers import Qwen3MoeForCausalLM

    torch.set_num_threads(1)
    model = Qwen3MoeForCausalLM.from_pretrained(MODEL, dtype=dtype)
    hard = [
        Sum(999, "+", 999),
        Sum(0, "-", 999),
        Sum(0, "+", 0),
        Sum(500, "-", 500),
        Sum(95, "+", 905),
        Sum(697, "-", 702),
    ]
    sums = [*draw_held_out(2026, SUMS), *hard]
    prompts = torch.tensor([tokenizer.encode(each.prompt) for each in sums])
    with torch.inference_mode():
        tokens = model.generate(prompts, max_new_tokens=8)[:, prompts.shape[1] :].tolist()
    wrong = [
        (each, text)
        for each, written in zip(sums, tokens, strict=True)
        if parse_answer(text := tokenizer.decode(written)) != each.answer
    ]
    assert wrong == []
