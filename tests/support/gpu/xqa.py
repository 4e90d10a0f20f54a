"""FlashInfer's XQA in plain torch, by its documentation, and with what it leaves where a length is 0."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch

from ep_server.backends.gpu.kernels.triton.paged import Sequences
from tests.support.triton.paged_case import Heads, PagedCase


def step_case(lengths: list[int], heads: Heads, dtype: torch.dtype = torch.bfloat16) -> PagedCase:
    """Blocks of 16; tables and lengths as a step has them: int32, and padding's first entry is a block."""
    case = PagedCase.of(lengths, heads, 16, dtype)
    blocks = case.sequences.blocks.int()
    owner = max(range(len(lengths)), key=lengths.__getitem__)
    for s, length in enumerate(lengths):
        if not length:
            blocks[s, 0] = blocks[owner, 0]
    case.sequences = Sequences(blocks, case.sequences.lengths.int())
    return case


@dataclass
class Xqa:
    """calls: arguments of each. Float64 inside; refuses what the library would misread without a word."""

    calls: list[dict[str, Any]] = field(default_factory=list)

    def __call__(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        page_table: torch.Tensor,
        seq_lens: torch.Tensor,
        output: torch.Tensor,
        workspace_buffer: torch.Tensor,
        semaphores: torch.Tensor,
        num_kv_heads: int,
        page_size: int,
        **rest: Any,
    ) -> None:
        count, beams, heads, channels = q.shape
        assert beams == 1 and output.shape == q.shape and q.is_contiguous() and output.is_contiguous()
        assert seq_lens.dtype is torch.uint32 and tuple(seq_lens.shape) == (count, 1)
        assert page_table.dtype is torch.int32 and len(page_table) == count and page_table.is_contiguous()
        assert rest["kv_layout"] == "NHD" and rest["kv_scale"] == 1.0
        assert k_cache.shape[1:] == v_cache.shape[1:] == (page_size, num_kv_heads, channels)
        assert workspace_buffer.dtype is torch.uint8 and semaphores.dtype is torch.uint32
        assert not semaphores.view(torch.int32).any()
        self.calls.append(rest | {"page_table": page_table, "seq_lens": seq_lens})
        scale, window = rest["q_scale"] / math.sqrt(channels), rest["sliding_win_size"]
        for s in range(count):
            length = int(seq_lens[s, 0])
            if not length:
                output[s] = float("nan")
                continue
            pages = page_table[s, : -(-length // page_size)].long()
            first = max(0, length - window) if window else 0
            k, v = (c[pages].flatten(0, 1)[first:length].double() for c in (k_cache, v_cache))
            k, v = (x.repeat_interleave(heads // num_kv_heads, dim=1) for x in (k, v))
            scores = torch.einsum("hc,lhc->hl", q[s, 0].double(), k) * scale
            output[s, 0] = torch.einsum("hl,lhc->hc", scores.softmax(1), v).to(output.dtype)
