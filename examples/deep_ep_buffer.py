"""Two ranks exchange tokens through DeepEP's `Buffer` in both modes, on CPU tensors over shared memory.

    PYTHONPATH=ep_server/compat python examples/deep_ep_buffer.py

The calls are DeepEP's own: on GPUs the same code runs with CUDA tensors, one process per GPU.
"""

from __future__ import annotations

import sys
import tempfile

import deep_ep
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

RANKS, EXPERTS, TOP_K = 2, 8, 2
TOKENS, MANY_TOKENS, HIDDEN = 16, 1024, 512
LOCAL = EXPERTS // RANKS  # experts of a rank


def low_latency(buffer: deep_ep.Buffer, rank: int) -> str:
    """For decode steps: few tokens, rows of a fixed layout."""
    x, topk_idx, topk_weights = inputs(TOKENS)

    # Dispatch: send tokens to the ranks that own their experts. The hook receives.
    recv_x, recv_count, handle, _, hook = buffer.low_latency_dispatch(
        x, topk_idx, TOKENS, EXPERTS, use_fp8=False, return_recv_hook=True
    )
    # Other work can run here, while tokens are in flight.
    hook()

    # A stand-in for real experts: expert e multiplies its tokens by e + 1.
    outputs = torch.zeros_like(recv_x)
    for local, count in enumerate(recv_count.tolist()):
        outputs[local, :count] = recv_x[local, :count] * (rank * LOCAL + local + 1)

    # Combine: return the outputs to their tokens and add them up, weighted.
    combined, _, hook = buffer.low_latency_combine(
        outputs, topk_idx, topk_weights, handle, return_recv_hook=True
    )
    hook()
    check(combined, x, topk_idx, topk_weights)
    return f"low latency: received {recv_count.sum()} rows, combined {TOKENS} tokens correctly"


def high_throughput(buffer: deep_ep.Buffer, rank: int) -> str:
    """For prompts and training: many tokens, one row for each token and rank."""
    x, topk_idx, topk_weights = inputs(MANY_TOKENS)
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, EXPERTS)
    recv_x, recv_idx, recv_weights, _, handle, _ = buffer.dispatch(
        x,
        num_tokens_per_rank=per_rank,
        is_token_in_rank=in_rank,
        num_tokens_per_expert=per_expert,
        topk_idx=topk_idx,
        topk_weights=topk_weights,
    )
    # recv_idx numbers this rank's experts; -1 is an expert of another rank, with weight 0.
    factors = (recv_weights * (recv_idx + rank * LOCAL + 1)).sum(1, keepdim=True)
    combined, _, _ = buffer.combine((recv_x * factors).bfloat16(), handle)
    check(combined, x, topk_idx, topk_weights)
    return f"high throughput: received {len(recv_x)} rows, combined {MANY_TOKENS} tokens correctly"


def inputs(tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows, and the experts and weights of each."""
    x = torch.randn(tokens, HIDDEN, dtype=torch.bfloat16)
    return x, torch.rand(tokens, EXPERTS).topk(TOP_K).indices, torch.rand(tokens, TOP_K)


def check(
    combined: torch.Tensor, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor
) -> None:
    """Against plain torch."""
    expected = x.float() * (topk_weights * (topk_idx + 1)).sum(1, keepdim=True)
    torch.testing.assert_close(combined.float(), expected, rtol=0.02, atol=0.1)


def run_rank(rank: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    buffer = deep_ep.Buffer(
        dist.group.WORLD,
        # Limits: of high-throughput calls on GPUs, and of low-latency calls.
        num_nvl_bytes=deep_ep.Buffer.get_dispatch_config(RANKS).get_nvl_buffer_size_hint(2 * HIDDEN, RANKS),
        num_rdma_bytes=deep_ep.Buffer.get_low_latency_rdma_size_hint(TOKENS, HIDDEN, RANKS, EXPERTS),
        low_latency_mode=True,
    )
    torch.manual_seed(rank)
    for mode in (low_latency, high_throughput):
        # One write for the whole line: both ranks share this output.
        sys.stdout.write(f"rank {rank}: {mode(buffer, rank)}\n")
        sys.stdout.flush()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run_rank, args=(f"{folder}/store",), nprocs=RANKS)
