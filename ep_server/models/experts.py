"""Reads experts of a layer: all that a rank holds at once, or one into a slot while the rank serves."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ep_server.errors import CheckpointError
from ep_server.models.compute import Compute, FfnScales, FfnTensors, GatedFfn
from ep_server.models.families.spec import FP8_BLOCK, ModelSpec
from ep_server.models.layers import ModelWeights, MoeWeights, tensors_of
from ep_server.models.loading import Codes, TensorSource
from ep_server.records import EMPTY

BATCH_SECONDS = 60.0  # for a thread to read a batch from a slow disk; one that takes longer counts as hung
LOOK_SECONDS = 0.25  # between two signs of life while it does


def sparse_block(source: TensorSource, spec: ModelSpec, layer: str) -> str:
    """What the tensors of a layer's router and experts begin with. layer: what all of its tensors do."""
    blocks = [f"{layer}.{block}" for block in spec.names.blocks]
    return next((b for b in blocks if source.has(f"{b}.gate.weight")), blocks[0])


def load_slots(
    source: TensorSource,
    spec: ModelSpec,
    dtype: torch.dtype,
    compute: Compute,
    weights: ModelWeights,
    moves: Sequence[SlotMove],
    threads: int = 1,
    alive: Callable[[], None] = lambda: None,
    batch_bytes: int = 0,
) -> None:
    """Reads experts into slots that no rows are for meanwhile. Several threads share the work.

    Args:
        source, spec, dtype, compute: as of weights_from(), which made `weights`.
        alive: called in this thread again and again, but for a batch that takes longer than BATCH_SECONDS.
        batch_bytes: of experts that a thread reads at once; at least one expert.
    Raises: what the source raises. No slot is written any more then.
    """
    loader = ExpertLoader(source, spec, dtype, compute)
    fitting = batch_bytes // (3 * spec.expert_ffn * spec.hidden * dtype.itemsize)
    with ThreadPoolExecutor(threads, "experts") as pool:
        batches = in_batches(moves, max(1, min(fitting, -(-len(moves) // threads))), threads)
        loads = [pool.submit(loader.load_slots, weights, batch) for batch in batches]
        try:
            for load in loads:
                _await(load, alive)
        finally:
            pool.shutdown(cancel_futures=True)


def _await(load: Future[None], alive: Callable[[], None]) -> None:
    """Raises: what it raised."""
    deadline = time.monotonic() + BATCH_SECONDS
    while time.monotonic() < deadline and not wait([load], LOOK_SECONDS).done:
        alive()
    load.result()
    alive()


def in_batches(moves: Sequence[SlotMove], most: int, threads: int) -> Iterator[Sequence[SlotMove]]:
    """Batches of `most`; those that threads begin with grow up to it, so that not all threads end at once."""
    first, number = 0, 0
    while first < len(moves):
        number += 1
        last = first + max(1, min(most, most * number // threads))
        yield moves[first:last]
        first = last


def read_experts(
    loader: ExpertLoader,
    wanted: Sequence[tuple[int, int]],
    take: Callable[[int, int, list[torch.Tensor]], None],
    threads: int = 1,
) -> None:
    """Reads experts as slots hold them, one at a time in each of several threads.

    Args:
        wanted: (layer, expert), of layers with experts. take: gets layer, expert and slot_parts().
    Raises: what the source and take() raise.
    """

    def read(layer: int, expert: int) -> None:
        take(layer, expert, slot_parts(loader.load(loader.prefix(layer), [expert]), 0))

    with ThreadPoolExecutor(threads, "experts") as pool:
        for done in [pool.submit(read, *one) for one in wanted]:
            done.result()


def slot_parts(ffn: GatedFfn, slot: int) -> list[torch.Tensor]:
    """What a slot holds, as it lies in memory: tensors of bytes."""
    return [tensor[slot].reshape(-1).view(torch.uint8) for tensor in tensors_of(ffn)]


class SlotMove(NamedTuple):
    """An expert of a layer into a slot, by its number on this rank."""

    layer: int
    slot: int
    expert: int


@dataclass(frozen=True, slots=True)
class ExpertLoader:
    """dtype: served."""

    source: TensorSource
    spec: ModelSpec
    dtype: torch.dtype
    compute: Compute

    def load(self, prefix: str, experts: Sequence[int]) -> GatedFfn:
        """Experts of the layer whose tensors begin with `prefix`. Raises: what the source raises.

        experts: global ids, EMPTY = a slot without values.
        """
        held = [row for row, expert in enumerate(experts) if expert != EMPTY]
        values = self._room(prefix, experts)
        self._fill(values, prefix, experts)
        self.source.flush()
        return self.compute.gated_ffn(*values, held=held)

    def load_slots(self, weights: ModelWeights, moves: Sequence[SlotMove]) -> None:
        """Experts into slots of weights that load() made. Raises: what the source raises."""
        rooms: list[tuple[GatedFfn, int, FfnTensors]] = []
        for layer, slot, expert in moves:
            ffn = weights.layers[layer].ffn
            if isinstance(ffn, MoeWeights):  # a placement names slots of dense layers too
                rooms.append((ffn.experts, slot, ffn.experts.room(slot)))
                self._fill(rooms[-1][2], self.prefix(layer), [expert])
        self.source.flush()
        for experts, slot, room in rooms:
            experts.put(slot, room)

    def prefix(self, layer: int) -> str:
        """What the tensors of a layer's experts begin with."""
        return f"{sparse_block(self.source, self.spec, f'model.layers.{layer}')}.experts"

    def _room(self, prefix: str, experts: Sequence[int]) -> FfnTensors:
        """Memory for all of them, FP8 as they are stored."""
        rows, ffn, hidden = len(experts), self.spec.expert_ffn, self.spec.hidden
        some = next((expert for expert in experts if expert != EMPTY), 0)
        stacked = self.source.has(f"{prefix}.gate_up_proj")
        first = f"{prefix}.gate_up_proj" if stacked else f"{prefix}.{some}.{self.spec.names.gate}.weight"
        fp8 = self._stay_fp8(first)
        if fp8 and stacked and ffn % FP8_BLOCK:
            raise CheckpointError(
                f"{first}: a block of {FP8_BLOCK} rows has gate and up rows, as an expert has "
                f"{ffn} channels: such FP8 weights can only be served with model.dtype = float32"
            )
        dtype, device = torch.float8_e4m3fn if fp8 else self.dtype, self.compute.device
        gate_up = torch.empty(rows, 2 * ffn, hidden, dtype=dtype, device=device)
        down = torch.empty(rows, hidden, ffn, dtype=dtype, device=device)
        if not fp8:
            return gate_up, down, None
        channels, columns = -(-ffn // FP8_BLOCK), -(-hidden // FP8_BLOCK)
        of_gate_up = torch.empty(rows, 2 * channels, columns, device=device)
        return gate_up, down, FfnScales(of_gate_up, torch.empty(rows, columns, channels, device=device))

    def _fill(self, room: FfnTensors, prefix: str, experts: Sequence[int]) -> None:
        """Reads them, with the source's next flush(); those of EMPTY stay unwritten."""
        spec, names, ffn = self.spec, self.spec.names, self.spec.expert_ffn
        stacked, count = self.source.has(f"{prefix}.gate_up_proj"), spec.router.num_experts
        scales = room[2] or (None, None)
        gate_up = _Fused(self.source, ffn, room[0], scales[0])
        down = _Fused(self.source, spec.hidden, room[1], scales[1])
        for row, expert in enumerate(experts):
            if expert == EMPTY:
                continue
            if stacked:
                gate_up.fill(row, 0, f"{prefix}.gate_up_proj", (count, 2 * ffn, spec.hidden), expert)
                down.fill(row, 0, f"{prefix}.down_proj", (count, spec.hidden, ffn), expert)
                continue
            one = f"{prefix}.{expert}"
            gate_up.fill(row, 0, f"{one}.{names.gate}.weight", (ffn, spec.hidden))
            gate_up.fill(row, 1, f"{one}.{names.up}.weight", (ffn, spec.hidden))
            down.fill(row, 0, f"{one}.{names.down}.weight", (spec.hidden, ffn))

    def _stay_fp8(self, first: str) -> bool:
        """first: a tensor of the layer; the others must be stored alike."""
        return (
            self.compute.fp8
            and self.dtype is torch.bfloat16
            and self.spec.fp8_blocks
            and self.source.is_fp8(first)
        )


@dataclass(frozen=True, slots=True)
class _Fused:
    """A matrix of every expert in the making. rows: of one part, gate or up; see FfnScales for `scale`."""

    source: TensorSource
    rows: int
    values: torch.Tensor
    scale: torch.Tensor | None

    def fill(self, row: int, part: int, name: str, shape: tuple[int, ...], entry: int | None = None) -> None:
        """Copies a tensor, or one entry of a stack, into expert `row`, from its part `part` on."""
        first = part * self.rows
        into = self.values[row, first : first + shape[-2]]
        if self.scale is None:
            self.source.copy(into, name, shape, entry)
            return
        block = part * -(-self.rows // FP8_BLOCK)
        scale = self.scale[row, block : block + -(-shape[-2] // FP8_BLOCK)]
        self.source.copy_codes(Codes(into, scale), name, shape, entry)
