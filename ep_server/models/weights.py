"""Loads the weights one rank owns: everything replicated, plus its own experts.

Only the bytes of those tensors are read, into fresh memory of the device, several layers at a time. Experts
come from either layout on disk: one tensor per expert, or stacked. On a GPU that serves bfloat16, FP8 experts
stay codes with their scales in blocks of 128 x 128; everything else becomes the serving dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager
from typing import Any

import torch

from ep_server.errors import CheckpointError
from ep_server.models.attention import adjacent_pairs
from ep_server.models.checkpoint import Checkpoint
from ep_server.models.compute import Compute, GatedFfn, Linear
from ep_server.models.experts import ExpertLoader, sparse_block
from ep_server.models.families.spec import EMBEDDING, HEAD, GqaSpec, MlaSpec, ModelSpec, QkNorm
from ep_server.models.layers import GqaWeights, KvScales, LayerWeights, MlaWeights, ModelWeights, MoeWeights
from ep_server.models.loading import PlainFiles, TensorFiles, TensorReader, TensorSource

# Of a layer's attention, for keys (or the latent) and values; the first that is there counts.
_KV_SCALE_NAMES = {
    "k": ("k_scale", "attn.k_scale", "k_proj.k_scale"),
    "v": ("v_scale", "attn.v_scale", "v_proj.v_scale"),
}
Progress = Callable[[str, int, int], None]
LayerExperts = Callable[[int], Sequence[int]]  # layer -> expert in each slot of this rank


def load_weights(
    checkpoint: Checkpoint,
    spec: ModelSpec,
    experts: Sequence[int] | LayerExperts,
    dtype: torch.dtype,
    compute: Compute,
    progress: Progress = lambda stage, done, total: None,
    threads: int = 1,
    files: AbstractContextManager[TensorFiles] | None = None,
) -> ModelWeights:
    """Reads a model.

    Args:
        experts: global ids of this rank's experts, ascending; or what the slots of a layer hold, with EMPTY.
        dtype: of all weights but the router's, which stay float32, and experts that stay FP8.
        compute: prepares the matrices.
        progress: called as progress("weights", layers done, layers in all), by the calling thread.
        threads: layers to load at once; on the CPU each needs memory of its own size.
        files: how to read the shards; None = PlainFiles.
    Raises: CheckpointError naming file, tensor, expected and found shape.
    """
    with files or PlainFiles(compute.device) as opened:
        reader = TensorReader(checkpoint, spec.quant_block, opened)
        weights = weights_from(reader, spec, experts, dtype, compute, progress, threads)
        opened.finish()
        return weights


def weights_from(
    source: TensorSource,
    spec: ModelSpec,
    experts: Sequence[int] | LayerExperts,
    dtype: torch.dtype,
    compute: Compute,
    progress: Progress = lambda stage, done, total: None,
    threads: int = 1,
) -> ModelWeights:
    """As load_weights, from any source of tensors. Raises: what the source raises."""
    loader = _Loader(source, spec, experts, dtype, compute)
    pool = ThreadPoolExecutor(threads, "weights")
    try:
        # The largest tensors first: nothing else is left for the other threads to do beside the last one.
        ends = [pool.submit(loader.keep, name, spec.vocab_size, spec.hidden) for name in _ends(spec, source)]
        norm = pool.submit(loader.keep, "model.norm.weight", spec.hidden)
        layers = [pool.submit(loader.layer, index) for index in range(spec.num_layers)]
        _follow(layers, [*ends, norm], progress)
        made = tuple(layer.result() for layer in layers)
        return ModelWeights(ends[0].result(), made, norm.result(), compute.linear(ends[-1].result()))
    finally:
        pool.shutdown(cancel_futures=True)


def _ends(spec: ModelSpec, source: TensorSource) -> tuple[str, ...]:
    """What turns ids into hidden states and these into logits, one tensor or two of the same shape."""
    if not spec.tied_head:
        return EMBEDDING, HEAD
    return (HEAD,) if source.has(HEAD) else (EMBEDDING,)  # tied: the file holds either


def _follow(layers: Sequence[Future[Any]], others: Sequence[Future[Any]], progress: Progress) -> None:
    """Until all are made. What takes time in them, reads, copies and packing, runs without the GIL."""
    done, total = 0, len(layers)
    progress("weights", done, total)
    for made in as_completed((*layers, *others)):
        made.result()  # the first error ends all
        if made in layers:
            done += 1
            progress("weights", done, total)


class _Loader:
    """Fuses the tensors of a checkpoint into the records of layers.py."""

    def __init__(
        self,
        reader: TensorSource,
        spec: ModelSpec,
        experts: Sequence[int] | LayerExperts,
        dtype: torch.dtype,
        compute: Compute,
    ) -> None:
        self._reader, self._spec, self._dtype = reader, spec, dtype
        self._compute, self._experts = compute, experts
        self._expert_loader = ExpertLoader(reader, spec, dtype, compute)

    def keep(self, name: str, *shape: int) -> torch.Tensor:
        """One tensor as it is, in fresh memory."""
        return self._stack([name], *shape)

    def _stack(self, names: Sequence[str], *shape: int) -> torch.Tensor:
        """Tensors of one shape below each other, straight from where they are stored."""
        rows, *rest = shape
        stack = torch.empty(len(names) * rows, *rest, dtype=self._dtype, device=self._compute.device)
        for at, name in enumerate(names):
            self._reader.copy(stack[at * rows : (at + 1) * rows], name, shape)
        self._reader.flush()
        return stack

    def layer(self, index: int) -> LayerWeights:
        """One decoder layer."""
        spec, prefix = self._spec, f"model.layers.{index}"
        attention = spec.attention
        scales = read_kv_scales(self._reader, f"{prefix}.self_attn", attention) if self._compute.fp8 else None
        return LayerWeights(
            attention_norm=self.keep(f"{prefix}.input_layernorm.weight", spec.hidden),
            attention=self._gqa(f"{prefix}.self_attn", attention)
            if isinstance(attention, GqaSpec)
            else self._mla(f"{prefix}.self_attn", attention),
            ffn_norm=self.keep(f"{prefix}.post_attention_layernorm.weight", spec.hidden),
            ffn=self._moe(prefix, self._experts(index) if callable(self._experts) else self._experts)
            if spec.sparse_layers[index]
            else self._ffn(f"{prefix}.mlp", spec.dense_ffn),
            kv_scales=None if scales is None else scales.to(self._compute.device),
        )

    def _gqa(self, prefix: str, a: GqaSpec) -> GqaWeights:
        hidden, q_rows, kv_rows = self._spec.hidden, a.heads * a.head_dim, a.kv_heads * a.head_dim

        def pairs(name: str, *shape: int) -> torch.Tensor:
            rows = self._reader.read(f"{prefix}.{name}", shape)
            return rows if self._spec.rope.interleaved else adjacent_pairs(rows, a.head_dim)

        def qkv(kind: str, *columns: int) -> torch.Tensor:
            q, k = pairs(f"q_proj.{kind}", q_rows, *columns), pairs(f"k_proj.{kind}", kv_rows, *columns)
            return self._fuse([q, k, self._reader.read(f"{prefix}.v_proj.{kind}", (kv_rows, *columns))])

        head_norm = q_norm = k_norm = None
        if a.qk_norm is QkNorm.HEAD:
            q, k = pairs("q_norm.weight", a.head_dim), pairs("k_norm.weight", a.head_dim)
            head_norm = self._fuse([q.expand(a.heads, -1), k.expand(a.kv_heads, -1)])
        elif a.qk_norm is QkNorm.FULL:
            q_norm = self._fuse([pairs("q_norm.weight", q_rows)])
            k_norm = self._fuse([pairs("k_norm.weight", kv_rows)])
        return GqaWeights(
            qkv=self._compute.linear(qkv("weight", hidden), qkv("bias") if a.bias else None),
            out=self._out(prefix, q_rows, a.bias),
            head_norm=head_norm,
            q_norm=q_norm,
            k_norm=k_norm,
        )

    def _mla(self, prefix: str, a: MlaSpec) -> MlaWeights:
        hidden, q_dim = self._spec.hidden, a.nope_dim + a.rope_dim

        def read(name: str, *shape: int) -> torch.Tensor:
            return self._reader.read(f"{prefix}.{name}", shape)

        def pairs(rows: torch.Tensor, plain: int) -> torch.Tensor:
            """Reorders the rope rows behind `plain` other rows of each head."""
            if self._spec.rope.interleaved:
                return rows
            heads = rows.view(-1, plain + a.rope_dim, *rows.shape[1:])
            turned = [adjacent_pairs(head, a.rope_dim) for head in heads[:, plain:]]
            return torch.cat([heads[:, :plain], torch.stack(turned)], dim=1).flatten(0, 1)

        query = "q_b_proj.weight" if a.q_lora else "q_proj.weight"
        q_up = pairs(read(query, a.heads * q_dim, a.q_lora or hidden), a.nope_dim)
        q_down = read("q_a_proj.weight", a.q_lora, hidden) if a.q_lora else q_up
        kv_rows = a.kv_lora + a.rope_dim
        down_bias = None
        if a.bias:
            q_bias = read("q_a_proj.bias", a.q_lora) if a.q_lora else q_down.new_zeros(len(q_down))
            kv_bias = pairs(read("kv_a_proj_with_mqa.bias", kv_rows), a.kv_lora)
            down_bias = self._fuse([q_bias, kv_bias])
        kv_up = read("kv_b_proj.weight", a.heads * (a.nope_dim + a.v_dim), a.kv_lora)
        kv_up = kv_up.view(a.heads, a.nope_dim + a.v_dim, a.kv_lora)
        return MlaWeights(
            down=self._compute.linear(
                self._fuse([q_down, pairs(read("kv_a_proj_with_mqa.weight", kv_rows, hidden), a.kv_lora)]),
                down_bias,
            ),
            kv_norm=self.keep(f"{prefix}.kv_a_layernorm.weight", a.kv_lora),
            k_up=self._compute.head_linear(self._fuse([kv_up[:, : a.nope_dim]])),
            v_up=self._compute.head_linear(self._fuse([kv_up[:, a.nope_dim :].transpose(1, 2)])),
            out=self._out(prefix, a.heads * a.v_dim, a.bias),
            q_norm=self.keep(f"{prefix}.q_a_layernorm.weight", a.q_lora) if a.q_lora else None,
            q_up=self._compute.linear(self._fuse([q_up])) if a.q_lora else None,
        )

    def _out(self, prefix: str, columns: int, bias: bool) -> Linear:
        """The projection from the heads back to H."""
        hidden = self._spec.hidden
        weight = self.keep(f"{prefix}.o_proj.weight", hidden, columns)
        return self._compute.linear(weight, self.keep(f"{prefix}.o_proj.bias", hidden) if bias else None)

    def _moe(self, layer: str, experts: Sequence[int]) -> MoeWeights:
        spec = self._spec
        block = sparse_block(self._reader, spec, layer)
        router = self._reader.read(f"{block}.gate.weight", (spec.router.num_experts, spec.hidden))
        bias = None
        if spec.router.bias:
            bias = self._reader.read(f"{block}.gate.e_score_correction_bias", (spec.router.num_experts,))
        return MoeWeights(
            router=self._compute.linear(router.to(self._compute.device, torch.float32, copy=True)),
            experts=self._expert_loader.load(f"{block}.experts", experts),
            bias=None if bias is None else bias.to(self._compute.device, torch.float32, copy=True),
            shared=self._ffn(f"{block}.shared_experts", spec.shared_ffn) if spec.shared_ffn else None,
        )

    def _ffn(self, prefix: str, ffn: int) -> GatedFfn:
        names = [f"{prefix}.{one}_proj.weight" for one in ("gate", "up")]
        gate_up = self._stack(names, ffn, self._spec.hidden)
        down = self.keep(f"{prefix}.down_proj.weight", self._spec.hidden, ffn)
        return self._compute.gated_ffn(gate_up[None], down[None])

    def _fuse(self, rows: Sequence[torch.Tensor]) -> torch.Tensor:
        """Concatenates along rows into fresh contiguous memory of the serving dtype."""
        shape = (sum(r.shape[0] for r in rows), *rows[0].shape[1:])
        fused = torch.empty(shape, dtype=self._dtype, device=rows[0].device)
        return torch.cat([r.to(self._dtype) for r in rows], out=fused)


def read_kv_scales(source: TensorSource, prefix: str, attention: GqaSpec | MlaSpec) -> KvScales | None:
    """What the checkpoint has for the attention whose tensors begin with `prefix`; None where nothing.

    Raises: CheckpointError for k without v, or a scale that is not a positive number.
    """
    heads = attention.kv_heads if isinstance(attention, GqaSpec) else 1
    k, v = (_kv_scale(source, prefix, kind, heads) for kind in ("k", "v"))
    if isinstance(attention, MlaSpec):
        return None if k is None else KvScales(k, None)
    if k is None and v is None:
        return None
    if k is None or v is None:
        there, lost = ("v", "k") if k is None else ("k", "v")
        raise CheckpointError(f"{prefix}: there is a {there}_scale of the KV cache, but no {lost}_scale")
    return KvScales(k, v)


def _kv_scale(source: TensorSource, prefix: str, kind: str, heads: int) -> torch.Tensor | None:
    """[heads] float32."""
    for name in (f"{prefix}.{end}" for end in _KV_SCALE_NAMES[kind]):
        scale = source.read_vector(name, (1, heads))
        if scale is None:
            continue
        if not bool((scale.isfinite() & (scale > 0)).all()):
            raise CheckpointError(f"{name} = {scale.tolist()}: must be positive numbers")
        return scale.expand(heads).contiguous()
    return None
