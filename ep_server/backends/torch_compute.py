"""`Compute` in plain torch: any device and dtype, and what the native kernels are tested against."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F

from ep_server.models.batch import AttentionMeta
from ep_server.models.compute import FfnScales, FfnTensors
from ep_server.models.families.spec import FP8_BLOCK
from ep_server.models.kv_cache import KvLayer
from ep_server.models.loading import widen


class TorchCompute:
    """See `compute.Compute`."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device, self.fp8 = torch.device(device), True

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> TorchLinear:
        """Keeps the matrix as it is."""
        return TorchLinear(weight, bias)

    def head_linear(self, weight: torch.Tensor) -> TorchHeadLinear:
        """Keeps the matrices as they are."""
        return TorchHeadLinear(weight)

    def gated_ffn(
        self,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        scales: FfnScales | None = None,
        *,
        held: Sequence[int] | None = None,
    ) -> TorchGatedFfn:
        """Keeps the matrices as they are."""
        return TorchGatedFfn(gate_up, down, scales)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See `compute.Compute`."""
        if weight.dim() == 1:
            return F.rms_norm(x, weight.shape, weight, eps)
        return F.rms_norm(x, weight.shape[1:], None, eps) * weight

    def attend(self, meta: AttentionMeta, window: int, dtype: torch.dtype) -> TorchAttend:
        """Lists the slots that each sequence reads."""
        return TorchAttend(meta, _gather(meta, window, dtype))


@dataclass(frozen=True, slots=True)
class TorchLinear:
    """weight: [n, k]. bias: [n]."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See `compute.Linear`."""
        return F.linear(x, self.weight, self.bias)

    def unrounded(self, x: torch.Tensor) -> torch.Tensor:
        """See `compute.Linear`."""
        out = x.new_empty(len(x), len(self.weight), dtype=torch.float32)
        self.write_unrounded(x, out)
        return out

    def write_unrounded(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """As unrounded(), into out: [T, n] float32, contiguous. A CPU rounds products of bfloat16."""
        if self.bias is None and x.dtype is torch.float32:
            torch.mm(x, self.weight.t(), out=out)
        elif self.bias is None and x.is_cuda:
            torch.mm(x, self.weight.t(), out_dtype=torch.float32, out=out)
        else:
            out.copy_(self(x))


@dataclass(frozen=True, slots=True)
class TorchHeadLinear:
    """weight: [heads, k, n]."""

    weight: torch.Tensor

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See `compute.HeadLinear`."""
        return torch.bmm(x.transpose(0, 1), self.weight).transpose(0, 1)


@dataclass(frozen=True, slots=True)
class TorchGatedFfn:
    """gate_up: [E, 2 * I, H]. down: [E, H, I]. scales: where these are FP8 codes."""

    gate_up: torch.Tensor
    down: torch.Tensor
    scales: FfnScales | None = None

    def __call__(self, rows: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """See `compute.GatedFfn`. FP8 weights are widened to the rows' dtype, expert by expert."""
        hidden = rows.new_empty(len(rows), self.gate_up.shape[1])
        busy = [(e, a, b) for e, (a, b) in enumerate(pairwise(offsets.tolist())) if a < b]
        for e, a, b in busy:
            torch.mm(rows[a:b], self._gate_up(e, rows.dtype).t(), out=hidden[a:b])
        gate, up = hidden.chunk(2, dim=-1)
        gated = F.silu(gate) * up
        out = torch.empty_like(rows)
        for e, a, b in busy:
            torch.mm(gated[a:b], self._down(e, rows.dtype).t(), out=out[a:b])
        return out

    def room(self, index: int) -> FfnTensors:
        """Where they belong. See `compute.GatedFfn`."""
        one = slice(index, index + 1)
        scales = self.scales and FfnScales(self.scales.gate_up[one], self.scales.down[one])
        return self.gate_up[one], self.down[one], scales

    def put(self, index: int, values: FfnTensors) -> None:
        """They are there."""

    def _gate_up(self, e: int, dtype: torch.dtype) -> torch.Tensor:
        if self.scales is None:
            return self.gate_up[e]
        halves = zip(self.gate_up[e].chunk(2), self.scales.gate_up[e].chunk(2), strict=True)
        return torch.cat([widen(codes, scale, (FP8_BLOCK, FP8_BLOCK)) for codes, scale in halves]).to(dtype)

    def _down(self, e: int, dtype: torch.dtype) -> torch.Tensor:
        if self.scales is None:
            return self.down[e]
        return widen(self.down[e], self.scales.down[e], (FP8_BLOCK, FP8_BLOCK)).to(dtype)


@dataclass(frozen=True, slots=True)
class _Gather:
    """Which cache slots each sequence reads.

    longest: positions read per decoding sequence. decode_slots: [D * longest] int64; a shorter sequence is
      filled up with its own first slot, so that memory never written is never read.
    decode_mask: [D, 1, 1, longest] additive, None = all visible.
    prefill: per other sequence its slots [L] and its mask [rows, L] additive.
    """

    longest: int
    decode_slots: torch.Tensor
    decode_mask: torch.Tensor | None
    prefill: tuple[tuple[torch.Tensor, torch.Tensor], ...]


@dataclass(frozen=True, slots=True)
class TorchAttend:
    """Decoding sequences as one batch, every other sequence by itself."""

    meta: AttentionMeta
    gather: _Gather

    def __call__(self, q: torch.Tensor, kv: KvLayer, scale: float) -> torch.Tensor:
        """See `compute.Attend`."""
        meta, gather, kv_heads = self.meta, self.gather, kv.k.shape[2]
        grouped = q.view(len(q), kv_heads, q.shape[1] // kv_heads, q.shape[2])  # [T, kv_heads, group, k_dim]
        outputs, count, mask = [], meta.num_decode, gather.decode_mask
        if count:
            k, v = (x.transpose(1, 2) for x in _read(kv, gather.decode_slots, (count, gather.longest)))
            out = F.scaled_dot_product_attention(grouped[:count], k, v, attn_mask=mask, scale=scale)
            outputs.append(out.flatten(1, 2))
        for i, (slots, mask) in enumerate(gather.prefill, start=count):
            rows = grouped[meta.query_start[i] : meta.query_start[i + 1]].permute(1, 2, 0, 3)
            # All heads of a group read the same keys: the group becomes the heads, kv_heads the batch.
            k, v = (
                x.transpose(0, 1)[:, None].expand(-1, rows.shape[1], -1, -1) for x in _read(kv, slots, (-1,))
            )
            out = F.scaled_dot_product_attention(rows, k, v, attn_mask=mask, scale=scale)
            outputs.append(out.permute(2, 0, 1, 3).flatten(1, 2))
        joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return joined[..., : kv.v_dim]


def _gather(meta: AttentionMeta, window: int, dtype: torch.dtype) -> _Gather:
    count, device = meta.num_decode, meta.blocks.device
    context = torch.tensor(meta.context, dtype=torch.int64, device=device)
    offsets = torch.arange(meta.block_size, device=device)
    all_slots = (meta.blocks[:, :, None] * meta.block_size + offsets).flatten(1)
    longest = max(meta.context[:count], default=0)
    columns = torch.arange(longest, device=device)
    last = context[:count, None] - 1
    slots = all_slots[:count, :longest]
    slots = torch.where(columns <= last, slots, slots[:, :1])
    mask = None
    if count and (window or min(meta.context[:count]) < longest):
        mask = _additive(_visible(last, columns, window), dtype)[:, None, None, :]
    prefill = []
    for i in range(count, len(meta.context)):
        rows = meta.positions[meta.query_start[i] : meta.query_start[i + 1], None]
        columns = torch.arange(meta.context[i], device=device)
        visible = _visible(rows, columns, window)
        prefill.append((all_slots[i, : meta.context[i]], _additive(visible, dtype)))
    return _Gather(longest, slots.flatten(), mask, tuple(prefill))


def _read(kv: KvLayer, slots: torch.Tensor, shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of the slots as [*shape, kv_heads, dim]; latent attention reads its keys as values."""
    k = kv.k.flatten(0, 1).index_select(0, slots).view(*shape, *kv.k.shape[2:])
    if kv.v is None:
        return k, k
    return k, kv.v.flatten(0, 1).index_select(0, slots).view(*shape, *kv.v.shape[2:])


def _visible(rows: torch.Tensor, columns: torch.Tensor, window: int) -> torch.Tensor:
    visible = columns <= rows
    return visible & (columns > rows - window) if window else visible


def _additive(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros_like(visible, dtype=dtype).masked_fill_(~visible, float("-inf"))
