"""A caller of the library in DeepEP's form, and what its calls must return. Knows no program.

It sees the library only as `import deep_ep`. The oracle is paper arithmetic over all ranks' inputs.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from ep_server.compat import deep_ep as ours
from ep_server.exchange.api import ExchangeSpec, Payload, Reduction
from ep_server.exchange.quant import dequantise
from tests.support.compare import assert_equal
from tests.support.exchange.expected import Expected, expect, expert
from tests.support.exchange.routing import Inputs, make_inputs
from tests.support.gpus import gpu_of

MAX_TOKENS, HIDDEN, TOP_K, NUM_EXPERTS = 8, 512, 3, 8
MASK = (1 << 32) - 1
FLAGS = {
    Payload.BF16: {"use_fp8": False},
    Payload.FP8: {"use_fp8": True},
    Payload.FP8_POW2: {"use_fp8": True, "round_scale": True},
    Payload.FP8_UE8M0: {"use_fp8": True, "round_scale": True, "use_ue8m0": True},
}


def gpu_device(rank: int) -> torch.device:
    """The GPU of a rank, from now on the current one."""
    device = torch.device("cuda", gpu_of(rank))
    torch.cuda.set_device(device)
    return device


class User:
    """A caller of the library: one buffer, and one way to check what a pair of calls returns.

    Args:
        largest: tokens that the buffer's size hint is for. device: of all tensors, "cpu" or "cuda".
    """

    def __init__(
        self, group: dist.ProcessGroup, largest: int = MAX_TOKENS, device: str = "cpu", **options: Any
    ) -> None:
        ours.install()
        self.deep_ep = importlib.import_module("deep_ep")
        self.group, self.rank, self.num_ranks = group, group.rank(), group.size()
        self.on_gpu, self.device = device == "cuda", torch.device("cpu")
        if self.on_gpu:
            self.device = gpu_device(self.rank)
        hint = self.deep_ep.Buffer.get_low_latency_rdma_size_hint
        self.buffer = self.deep_ep.Buffer(
            group,
            num_rdma_bytes=hint(largest, HIDDEN, self.num_ranks, NUM_EXPERTS),
            low_latency_mode=True,
            num_qps_per_rank=NUM_EXPERTS // self.num_ranks,
            explicitly_destroy=True,
            **options,
        )

    def known(
        self,
        routing: str,
        seed: int,
        payload: Payload,
        *,
        weights_first: bool = False,
        num_experts: int = NUM_EXPERTS,
        silent: Collection[int] = (),
        gone: Collection[int] = (),
    ) -> tuple[Inputs, Expected, ExchangeSpec]:
        """This rank's inputs, on its device, and what must come of them.

        Args:
            silent: ranks whose tokens do not come. gone: ranks whose experts do not answer.
        """
        share, more = divmod(num_experts, self.num_ranks)
        owners = [rank for rank in range(self.num_ranks) for _ in range(share + (rank < more))]
        reduction = Reduction.RANK if weights_first or self.on_gpu else Reduction.SOURCE
        spec = ExchangeSpec(
            self.rank, self.num_ranks, tuple(owners), MAX_TOKENS, HIDDEN, TOP_K, payload, reduction
        )
        inputs = make_inputs(spec, routing, seed)
        mine = inputs[self.rank]
        answered = torch.tensor([owner not in gone for owner in owners])[mine.ids] & (mine.ids >= 0)
        inputs[self.rank] = replace(mine, ids=torch.where(answered, mine.ids, -1))
        combined = expect(spec, inputs).combined
        for rank in silent:
            inputs[rank] = replace(inputs[rank], ids=torch.full_like(inputs[rank].ids, -1))
        inputs[self.rank] = mine
        expected = replace(expect(spec, inputs), combined=combined)
        return Inputs(*(self.here(t) for t in (mine.x, mine.ids, mine.weights))), expected, spec

    def here(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor on this rank's device."""
        return tensor.to(self.device)

    def masked(self) -> set[int]:
        """What the buffer says."""
        status = self.here(torch.full((self.num_ranks,), 9, dtype=torch.int32))
        self.buffer.low_latency_query_mask_buffer(status)
        assert set(status.tolist()) <= {0, 1}
        return set(status.nonzero().flatten().tolist())

    def wait_for_device(self) -> None:
        """Until kernels launched so far have ended."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def experts(self, recv_x: Any, counts: torch.Tensor, spec: ExchangeSpec) -> torch.Tensor:
        """A grouped product with a mask: rows beyond the counts are NaN on both sides."""
        values = dequantise(*recv_x) if isinstance(recv_x, tuple) else recv_x.float()
        out = torch.full(values.shape, torch.nan, dtype=torch.bfloat16, device=self.device)
        for local, (expert_id, count) in enumerate(zip(spec.local_experts, counts.tolist(), strict=True)):
            out[local, :count] = expert(values[local, :count], expert_id, torch.bfloat16)
        return out

    def check_dispatch(
        self, recv_x: Any, counts: torch.Tensor, handle: tuple, expected: Expected, spec: ExchangeSpec
    ) -> None:
        """Shapes, dtypes, strides, devices as documented; rows, counts and both parts of the handle exact."""
        local, capacity = len(spec.local_experts), self.num_ranks * MAX_TOKENS
        src_info, layout_range, max_tokens, hidden, num_experts = handle
        assert (max_tokens, hidden, num_experts) == (MAX_TOKENS, HIDDEN, spec.num_experts)
        assert (src_info.shape, src_info.dtype) == ((local, capacity), torch.int32)
        assert (layout_range.shape, layout_range.dtype) == ((local, self.num_ranks), torch.int64)
        assert (counts.shape, counts.dtype) == ((local,), torch.int32)
        rows, scales = recv_x if isinstance(recv_x, tuple) else (recv_x, None)
        assert rows.shape == (local, capacity, HIDDEN)
        assert rows.dtype == (torch.bfloat16 if scales is None else torch.float8_e4m3fn)
        assert {t.device for t in (rows, counts, src_info, layout_range)} == {self.device}
        if scales is not None:
            packed = spec.payload is Payload.FP8_UE8M0
            assert scales.dtype == (torch.int32 if packed else torch.float32)
            assert scales.shape == (local, capacity, HIDDEN // (512 if packed else 128))
            assert scales.stride()[1] == 1, "the token dimension is the contiguous one"
        kept = counts.tolist()
        found = []
        for e, ranges in enumerate(layout_range.tolist()):
            assert sum(packed & MASK for packed in ranges) == kept[e]
            for source, packed in enumerate(ranges):
                begin, count = packed >> 32, packed & MASK
                found += [(e, source, t) for t in src_info[e, begin : begin + count].tolist()]
        assert found == expected.entries
        places = [(e, i) for e, count in enumerate(kept) for i in range(count)]
        at = tuple(self.here(torch.tensor(places, dtype=torch.int64).view(-1, 2).t()))
        assert_equal(rows[at].cpu(), expected.rows, "recv_x")
        if scales is not None and expected.scales is not None:
            assert_equal(scales[at].cpu(), expected.scales, "scales")

    def pair(self, routing: str, seed: int, payload: Payload, hook: bool = False, **changes: Any) -> None:
        """One dispatch and combine, checked; with hooks, after the returned tensors were found untouched."""
        mine, expected, spec = self.known(routing, seed, payload, **changes)
        stats = self.here(torch.ones(len(spec.local_experts), dtype=torch.int32))
        first = {"topk_weights": mine.weights} if changes.get("weights_first") else {}
        recv_x, counts, handle, event, receive = self.buffer.low_latency_dispatch(
            mine.x,
            mine.ids,
            MAX_TOKENS,
            spec.num_experts,
            cumulative_local_expert_recv_stats=stats,
            async_finish=not hook,
            return_recv_hook=hook,
            **FLAGS[payload],
            **first,
        )
        if hook:
            assert stats.eq(1).all(), "counted before the hook"
            assert event.event is None
            receive()
        else:
            assert receive is None
            event.current_stream_wait()
        self.check_dispatch(recv_x, counts, handle, expected, spec)
        assert_equal(stats, counts + 1, "cumulative stats")
        out = self.here(torch.full_like(expected.combined, torch.nan))
        combined, event, receive = self.buffer.low_latency_combine(
            self.experts(recv_x, counts, spec),
            mine.ids,
            mine.weights,
            handle,
            async_finish=not hook,
            return_recv_hook=hook,
            out=out,
        )
        assert combined is out
        if hook:
            receive()
        else:
            with event:
                pass
        assert_equal(combined.cpu(), expected.combined, f"{routing} {payload} combined")
