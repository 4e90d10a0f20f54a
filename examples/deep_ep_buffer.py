"""Two ranks exchange tokens through DeepEP's low-latency `Buffer`, on CPU tensors over shared memory.

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
TOKENS, HIDDEN = 16, 512


def run_rank(rank: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    size = deep_ep.Buffer.get_low_latency_rdma_size_hint(TOKENS, HIDDEN, RANKS, EXPERTS)
    buffer = deep_ep.Buffer(dist.group.WORLD, num_rdma_bytes=size, low_latency_mode=True)

    torch.manual_seed(rank)
    x = torch.randn(TOKENS, HIDDEN, dtype=torch.bfloat16)
    topk_idx = torch.rand(TOKENS, EXPERTS).topk(TOP_K).indices
    topk_weights = torch.rand(TOKENS, TOP_K)

    # Dispatch: send tokens to the ranks that own their experts. The hook receives.
    recv_x, recv_count, handle, _, hook = buffer.low_latency_dispatch(
        x, topk_idx, TOKENS, EXPERTS, use_fp8=False, return_recv_hook=True
    )
    # Other work can run here, while tokens are in flight.
    hook()

    # A stand-in for real experts: expert e multiplies its tokens by e + 1.
    first = rank * EXPERTS // RANKS
    outputs = torch.zeros_like(recv_x)
    for local, count in enumerate(recv_count.tolist()):
        outputs[local, :count] = recv_x[local, :count] * (first + local + 1)

    # Combine: return the outputs to their tokens and add them up, weighted.
    combined, _, hook = buffer.low_latency_combine(
        outputs, topk_idx, topk_weights, handle, return_recv_hook=True
    )
    hook()

    expected = x.float() * (topk_weights * (topk_idx + 1)).sum(1, keepdim=True)
    torch.testing.assert_close(combined.float(), expected, rtol=0.02, atol=0.05)
    # One write for the whole line: both ranks share this output.
    sys.stdout.write(f"rank {rank}: received {recv_count.sum()} rows, combined {TOKENS} tokens correctly\n")
    sys.stdout.flush()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run_rank, args=(f"{folder}/store",), nprocs=RANKS)
