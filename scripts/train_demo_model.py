#!/usr/bin/env python3
"""Trains the demo model: a small Qwen3-MoE that adds and subtracts numbers from 0 to 999.

It learns from text made here, one sum per line, without the pairs that
`ep_server.cli.demo.sums.is_held_out` keeps out; the final check asks it all of these. Takes about 7 minutes
on one core, and 2 to check (measured: 0.25 s per step on an AMD EPYC); the same seed and thread count give
the same model.

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
from demo_text import (
    ANSWER_WIDTH,
    EOS,
    PROMPT_TOKENS,
    VOCABULARY,
    Batches,
    encode,
    held_out_table,
    make_tokenizer,
)
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch.nn import functional
from transformers import GenerationConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.utils import logging

from ep_server.cli.demo.sums import draw_held_out, parse_answer

OUT = Path(__file__).parent.parent / "ep_server" / "assets" / "demo_model"
NEEDED = 0.9999  # share of held-out sums that must be right


@dataclass(frozen=True)
class Recipe:
    """Everything that shapes the training, besides the model."""

    steps: int = 1600
    batch: int = 256
    peak_rate: float = 3e-3
    warmup: int = 100
    balance: float = 0.02  # weight of the balance loss of a layer
    seed: int = 0


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
def wrong_anywhere(model: Qwen3MoeForCausalLM) -> tuple[int, int]:
    """(wrong, all) held-out sums, one pass each: greedy writes what ranks first at every token."""
    op, a, b = np.nonzero(held_out_table())
    sums = torch.from_numpy(encode(a, op, b))
    wrong = 0
    for ids in sums.split(2000):
        written = model(ids[:, :-1], use_cache=False).logits[:, PROMPT_TOKENS - 1 :].argmax(dim=-1)
        wrong += int((written != ids[:, PROMPT_TOKENS:]).any(dim=1).sum())
    return wrong, len(sums)


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
    wrong, everything = wrong_anywhere(model)
    print(f"bfloat16: {wrong} wrong of all {everything} held-out sums")
    if min(*shares.values(), 1 - wrong / everything) < NEEDED:
        print(f"not saved: fewer than {NEEDED:.2%} are right", file=sys.stderr)
        return 1
    arguments.out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(arguments.out)
    tokenizer.save(str(arguments.out / "tokenizer.json"))
    size = sum(file.stat().st_size for file in arguments.out.iterdir())
    print(f"saved {size / 1e6:.1f} MB to {arguments.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
