"""Sizes that the exchange on GPUs is tested with beside those of the suite. Needs no GPU itself."""

from __future__ import annotations

from dataclasses import dataclass

from ep_server.exchange.api import Payload, Reduction
from tests.support.exchange.conformance import SCATTERED, UNEVEN, Shape


@dataclass(frozen=True)
class Size:
    shape: Shape
    payload: Payload
    routings: tuple[str, ...] = ("max_tokens", "zipf", "dropped", "single_token")
    num_sms: int = 0
    most_tokens: int | None = None  # that kernels get blocks for


def sizes(num_ranks: int) -> dict[str, Size]:
    """The largest, the odd ones, and few multiprocessors."""
    spread = tuple(e % 4 for e in range(32))
    uneven = tuple(e * 4 // 30 for e in range(30))
    six = max(1, 6 // num_ranks)  # R * T = 6 where R divides it: scale columns are padded
    return {
        "hidden_640": Size(Shape(6, 640, 2, UNEVEN), Payload.FP8),
        "six_rows": Size(Shape(six, 640, 2, SCATTERED), Payload.FP8),
        "sixteen_choices": Size(Shape(7, 256, 16, spread), Payload.FP8, ("max_tokens", "all_to_one")),
        "experts_not_divisible": Size(Shape(9, 896, 8, uneven), Payload.FP8_POW2),
        "one_wide_token": Size(Shape(1, 7168, 8, spread), Payload.FP8),
        "wide": Size(Shape(16, 7168, 8, spread), Payload.FP8_UE8M0),
        "tokens_1024": Size(Shape(1024, 512, 8, spread), Payload.FP8, ("max_tokens", "all_to_one")),
        "tokens_1024_bf16": Size(
            Shape(1024, 256, 8, spread), Payload.BF16, ("uniform", "zipf", "empty_rank")
        ),
        # More cells of banks than a kernel reads at its start: R * banks is 16, 32, 64.
        "sixteen_banks": Size(Shape(6, 640, 4, UNEVEN, num_banks=16), Payload.FP8),
        "eight_sms": Size(Shape(64, 1024, 8, spread), Payload.FP8, num_sms=8),
        # Four blocks to a half: each takes many tokens in turn, of all sources.
        "one_sm": Size(Shape(8, 1024, 8, spread), Payload.FP8, ("max_tokens", "all_to_one"), num_sms=1),
        "one_sm_many_tokens": Size(
            Shape(200, 512, 8, spread), Payload.BF16, ("max_tokens", "empty_rank"), num_sms=1
        ),
        # More tokens come than blocks were launched for.
        "blocks_for_few": Size(Shape(24, 640, 4, UNEVEN), Payload.BF16, most_tokens=3),
        "blocks_for_few_fp8": Size(Shape(24, 640, 4, UNEVEN), Payload.FP8, most_tokens=1),
    }


def size_names() -> list[str]:
    return [f"{name}-{reduction.value}" for name in sizes(1) for reduction in Reduction]
