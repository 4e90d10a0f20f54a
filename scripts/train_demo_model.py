#!/usr/bin/env python3
"""Trains the demo model: a small Qwen3-MoE that adds and subtracts numbers from 0 to 999.

It learns from text made here, one sum per line, without the pairs that `ep_server.sums.is_held_out` keeps
out; the final check asks it such pairs only. The tokenizer drops spaces and pads operands with zeros to
three digits ("7 + 12 =" reads as 007+012=), so that digits of equal weight stand at equal distances; the
answer is right-aligned to four characters ("  19"), its most significant digit first. Takes about 7 minutes
on one core (measured: 0.25 s per step on an AMD EPYC); the same seed and thread count give the same model.

    python scripts/train_demo_model.py [--steps N] [--seed N] [--threads N] [--out DIR]
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tokenizers
import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
from torch.nn import functional
from transformers import GenerationConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.utils import logging

from ep_server.sums import LIMIT, OPERATORS, draw_held_out, is_held_out, parse_answer

OUT = Path(__file__).parent.parent / "ep_server" / "assets" / "demo_model"
VOCABULARY = [*"0123456789", "+", "-", "=", " ", "<eos>", "<unk>"]  # the id of a digit is the digit
SPACE, EOS = VOCABULARY.index(" "), VOCABULARY.index("<eos>")
OPERAND_DIGITS, ANSWER_WIDTH = 3, 4
PROMPT_TOKENS = 2 * OPERAND_DIGITS + 2
NEEDED = 0.999  # share of held-out sums that must be right


@dataclass(frozen=True)
class Recipe:
    """Everything that shapes the training, besides the model."""

    steps: int = 1600
    batch: int = 256
    peak_rate: float = 3e-3
    warmup: int = 100
    balance: float = 0.02  # weight of the balance loss of a layer
    seed: int = 0


def make_tokenizer() -> tokenizers.Tokenizer:
    """One token per character; operands padded with zeros, spaces dropped."""
    tokenizer = tokenizers.Tokenizer(
        models.WordLevel({text: number for number, text in enumerate(VOCABULARY)}, unk_token="<unk>")
    )
    tokenizer.add_special_tokens(["<eos>", "<unk>"])
    alone, pair = (rf"(?<![0-9])(?=[0-9]{{{digits}}}(?![0-9]))" for digits in (1, 2))
    tokenizer.normalizer = normalizers.Sequence(
        [
            normalizers.Replace(Regex(r"\s+"), ""),
            normalizers.Replace(Regex(alone), "00"),
            normalizers.Replace(Regex(pair), "0"),
        ]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def make_model() -> Qwen3MoeForCausalLM:
    """16 experts of which a token visits 4: enough for every rank of a small group to have some."""
    config = Qwen3MoeConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=16,
        num_experts_per_tok=4,
        norm_topk_prob=True,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=EOS,
    )
    model = Qwen3MoeForCausalLM(config)
    model.set_experts_implementation("eager")  # as fast as any at this size
    model.generation_config = GenerationConfig(do_sample=False, eos_token_id=EOS, pad_token_id=EOS)
    return model


def held_out_table() -> np.ndarray:
    """[operator, a, b] bool of every pair."""
    table = np.zeros((len(OPERATORS), LIMIT, LIMIT), dtype=bool)
    for index, op in enumerate(OPERATORS):
        for a in range(LIMIT):
            for b in range(a, LIMIT):
                table[index, a, b] = table[index, b, a] = is_held_out(a, op, b)
    return table


def encode(a: np.ndarray, op: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Token ids [n, PROMPT_TOKENS + ANSWER_WIDTH + 1] of whole sums, EOS last."""
    answer = np.where(op == 0, a + b, a - b)
    size = np.abs(answer)
    columns = [
        *_digits(a, OPERAND_DIGITS),
        VOCABULARY.index("+") + op,
        *_digits(b, OPERAND_DIGITS),
        np.full_like(a, VOCABULARY.index("=")),
    ]
    for place in range(ANSWER_WIDTH - 1, -1, -1):
        blank = (size < 10**place) & (place > 0)
        sign = blank & (answer < 0) & ((size >= 10 ** (place - 1)) | (place == 1))
        columns.append(np.where(sign, VOCABULARY.index("-"), np.where(blank, SPACE, size // 10**place % 10)))
    return np.stack([*columns, np.full_like(a, EOS)], axis=1)


def _digits(numbers: np.ndarray, width: int) -> list[np.ndarray]:
    return [numbers // 10**place % 10 for place in range(width - 1, -1, -1)]


class Batches:
    """Draws training sums: half uniform, half rich in what is rare and hard, long carries and borrows."""

    def __init__(self, seed: int) -> None:
        self._draw = np.random.default_rng(seed)
        self._held_out = held_out_table()

    def next(self, size: int) -> torch.Tensor:
        """[size, tokens] int64, no pair of which is held out."""
        number = 4 * size  # enough after the held-out ones are gone
        a, b, op = (self._draw.integers(0, high, number) for high in (LIMIT, LIMIT, len(OPERATORS)))
        b = np.where(self._chance(0.5, number), self._carrying(a, op), b)
        a, b = (
            np.where(self._chance(0.15, number), n // 10 ** self._draw.integers(0, 3, number), n)
            for n in (a, b)
        )
        kept = np.nonzero(~self._held_out[op, a, b])[0][:size]
        return torch.from_numpy(encode(a[kept], op[kept], b[kept]))

    def _carrying(self, a: np.ndarray, op: np.ndarray) -> np.ndarray:
        """Second operands whose digits often add up to 9 with those of a, or equal them for a subtraction."""
        b = np.zeros_like(a)
        for digit in _digits(a, OPERAND_DIGITS):
            hard = np.where(op == 0, 9 - digit, digit)
            b = 10 * b + np.where(self._chance(0.6, len(a)), hard, self._draw.integers(0, 10, len(a)))
        return b

    def _chance(self, share: float, number: int) -> np.ndarray:
        return self._draw.random(number) < share


def imbalance(router_logits: torch.Tensor, top_k: int) -> torch.Tensor:
    """Experts times the product of an expert's share of visits and its mean probability, summed: 1 is even.

    Args:
        router_logits: [tokens, experts] of one layer. Layers are not pooled: each has to be even by itself.
    """
    experts = router_logits.shape[1]
    chosen = router_logits.topk(top_k, dim=-1).indices.flatten()
    share = torch.bincount(chosen, minlength=experts) / chosen.numel()
    return experts * (share * router_logits.softmax(dim=-1).mean(dim=0)).sum()


def train(model: Qwen3MoeForCausalLM, recipe: Recipe, progress: Progress) -> None:
    """AdamW with warm-up and cosine decay; loss on the answer alone, plus the balance loss of each layer."""
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.01},
            {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
        ],
        lr=recipe.peak_rate,
        betas=(0.9, 0.98),
        fused=True,
    )
    rate = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: (
            min(1.0, (step + 1) / recipe.warmup)
            * (0.02 + 0.49 * (1 + math.cos(math.pi * step / recipe.steps)))
        ),
    )
    batches = Batches(recipe.seed)
    task = progress.add_task("training", total=recipe.steps, note="")
    for step in range(recipe.steps):
        ids = batches.next(recipe.batch)
        output = model(ids, output_router_logits=True, use_cache=False)
        predicted = output.logits[:, PROMPT_TOKENS - 1 : -1].flatten(0, 1)
        loss = functional.cross_entropy(predicted, ids[:, PROMPT_TOKENS:].flatten())
        balance = sum(imbalance(layer, model.config.num_experts_per_tok) for layer in output.router_logits)
        (loss + recipe.balance * balance).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        rate.step()
        progress.update(task, completed=step + 1, note=f"loss {loss.item():.4f}")
        if (step + 1) % 200 == 0:
            progress.console.print(f"step {step + 1}: loss {loss.item():.4f}")


@torch.inference_mode()
def accuracy(model: Qwen3MoeForCausalLM, tokenizer: tokenizers.Tokenizer, count: int, seed: int) -> float:
    """Share of `count` held-out sums that greedy generation answers as Python does, EOS included."""
    right = 0
    sums = draw_held_out(seed, count)
    for first in range(0, count, 500):
        asked = sums[first : first + 500]
        prompts = torch.tensor([tokenizer.encode(each.prompt).ids for each in asked])
        mask = torch.ones_like(prompts)
        tokens = model.generate(prompts, attention_mask=mask, max_new_tokens=ANSWER_WIDTH + 1)
        for each, written in zip(asked, tokens[:, PROMPT_TOKENS:].tolist(), strict=True):
            right += written[-1] == EOS and parse_answer(tokenizer.decode(written)) == each.answer
    return right / count


@torch.inference_mode()
def expert_shares(model: Qwen3MoeForCausalLM, batches: Batches) -> list[tuple[float, float]]:
    """Per layer: the smallest and largest share of token visits of one expert; 1 / 16 would be even."""
    logits = model(batches.next(1000), output_router_logits=True, use_cache=False).router_logits
    config = model.config
    shares = []
    for layer in logits:
        chosen = layer.topk(config.num_experts_per_tok, dim=-1).indices.flatten()
        share = torch.bincount(chosen, minlength=config.num_experts) / chosen.numel()
        shares.append((share.min().item(), share.max().item()))
    return shares


def main() -> int:
    parser = argparse.ArgumentParser(description="Train the demo model on the CPU.")
    parser.add_argument("--steps", type=int, default=Recipe.steps)
    parser.add_argument("--seed", type=int, default=Recipe.seed)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--check", type=int, default=4000, help="held-out sums of the final check")
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    recipe = Recipe(steps=arguments.steps, seed=arguments.seed)
    tokenizer, model = make_tokenizer(), make_model()
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters")
    start = time.monotonic()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, TimeRemainingColumn()) as progress:
        train(model, recipe, progress)
    wall, processor = time.monotonic() - start, time.process_time()
    print(f"trained in {wall:.0f} s, {processor:.0f} s of CPU time, with {arguments.threads} thread(s)")
    model.eval()
    for layer, (low, high) in enumerate(expert_shares(model, Batches(recipe.seed + 1))):
        print(f"layer {layer}: an expert gets {low:.1%} to {high:.1%} of the visits")
    shares = {"float32": accuracy(model, tokenizer, arguments.check, recipe.seed)}
    model = model.to(torch.bfloat16)
    shares["bfloat16"] = accuracy(model, tokenizer, arguments.check, recipe.seed)
    for dtype, share in shares.items():
        print(f"{dtype}: {share:.3%} of {arguments.check} held-out sums right")
    if min(shares.values()) < NEEDED:
        print(f"not saved: fewer than {NEEDED:.1%} are right", file=sys.stderr)
        return 1
    arguments.out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(arguments.out)
    tokenizer.save(str(arguments.out / "tokenizer.json"))
    size = sum(file.stat().st_size for file in arguments.out.iterdir())
    print(f"saved {size / 1e6:.1f} MB to {arguments.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
