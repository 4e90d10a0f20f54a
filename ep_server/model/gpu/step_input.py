"""What the kernels of one step read, in device memory at fixed addresses, and how a StepBatch gets there.

Rows are tokens. Sequences that run one token come first, one row each; chunks of prompts follow. A captured
graph reads the first rows of these tensors whatever the step is: rows beyond it are padding, marked by slot
-1 and length 0. One copy per step carries all of it. Units: tokens, blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ep_server.errors import InternalError
from ep_server.records import PENDING_TOKEN, SeqSlice, StepBatch

# ids, sources, positions, slots, lengths, query starts, sampled rows, numbers; the last one holds counts.
_COLUMNS = 9
NOT_DRAWN = -1
_LOW = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class InputShape:
    """tokens: rows of the largest step. sequences: of them at once. blocks: of the longest context."""

    tokens: int
    sequences: int
    blocks: int
    block_size: int

    @property
    def words(self) -> int:
        """int32 words of one step."""
        return _COLUMNS * (self.tokens + 1) + self.sequences * self.blocks


@dataclass(frozen=True, slots=True)
class StepTensors:
    """One step on the device. All int32; T rows, S sequences, of which the first `decode` have one row each.

    ids: [T] tokens; sources: [T] where a token is one that the last step drew, its place there, else -1.
    numbers: [T] low 31 bits of each row's request. positions: [T].
    slots: [T] place in the cache, block * block_size + offset; -1 = padding.
    blocks: [S, W] tables. lengths: [S] positions that a sequence attends to, its own included; 0 = padding.
    query_start: [S - decode + 1] rows of the chunks, counted from row `decode`.
    sample_rows: [N] rows that are sampled, ascending; None where all rows are.
    live: [1] rows that are no padding; these come first.
    """

    ids: torch.Tensor
    sources: torch.Tensor
    numbers: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    blocks: torch.Tensor
    lengths: torch.Tensor
    query_start: torch.Tensor
    decode: int
    sample_rows: torch.Tensor | None
    live: torch.Tensor

    @property
    def tokens(self) -> int:
        """Rows, padding included."""
        return len(self.ids)


class StepInput:
    """The memory of the steps of one rank. One thread fills it; a fill is ordered by the current stream."""

    def __init__(self, shape: InputShape, device: torch.device, staging: int = 3) -> None:
        """staging: host buffers used in turn; a buffer is written again only `staging` fills later."""
        self.shape, self.device = shape, device
        self._host = [self.host_buffer(shape.words, torch.int32) for _ in range(staging)]
        _write(self._host[0].numpy(), shape, (), {})
        self._device = self._host[0].to(device, copy=True)  # a step of padding alone
        self._fills = 0

    def host_buffer(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        """[size] on the host, of which copies need not wait."""
        return torch.zeros(size, dtype=dtype, pin_memory=self.device.type == "cuda")

    def padded(self, rows: int) -> StepTensors:
        """The step that was filled last, or any later one, as so many rows of single tokens, all sampled."""
        return self._view(rows, rows, rows, None)

    def fill(self, batch: StepBatch, drawn: Mapping[int, int], padded: int = 0) -> StepTensors:
        """Sends a step to the device.

        Args:
            drawn: place of each request's token among those that the last step drew.
            padded: rows of a step of single tokens, if more than it has; 0 = none.
        Raises: InternalError for a step beyond the shape, or a token that nobody drew.
        """
        slices = sorted(batch.slices, key=lambda s: len(s.token_ids) != 1)
        decode = sum(len(s.token_ids) == 1 for s in slices)
        tokens, sequences = max(batch.num_tokens, padded), len(slices)
        if padded:
            if decode != sequences or sequences > padded or not all(s.sample for s in slices):
                raise InternalError(f"a step of {batch.num_tokens} tokens is not one of {padded} single ones")
            decode = sequences = tokens
        if tokens > self.shape.tokens or sequences > self.shape.sequences:
            raise InternalError(f"a step of {tokens} tokens, {sequences} sequences exceeds {self.shape}")
        host = self._host[self._fills % len(self._host)]
        self._fills += 1
        sampled = _write(host.numpy(), self.shape, slices, drawn)
        self._device.copy_(host, non_blocking=True)
        all_sampled = padded > 0 or sampled == tokens
        return self._view(tokens, sequences, decode, None if all_sampled else sampled)

    def _view(self, tokens: int, sequences: int, decode: int, sampled: int | None) -> StepTensors:
        pitch = self.shape.tokens + 1
        columns = self._device[: _COLUMNS * pitch].view(_COLUMNS, pitch)
        table = self._device[_COLUMNS * pitch :].view(self.shape.sequences, self.shape.blocks)
        return StepTensors(
            ids=columns[0, :tokens],
            sources=columns[1, :tokens],
            numbers=columns[7, :tokens],
            positions=columns[2, :tokens],
            slots=columns[3, :tokens],
            blocks=table[:sequences],
            lengths=columns[4, :sequences],
            query_start=columns[5, : sequences - decode + 1],
            decode=decode,
            sample_rows=None if sampled is None else columns[6, :sampled],
            live=columns[8, :1],
        )


def sampled_slices(batch: StepBatch) -> list[SeqSlice]:
    """Those that draw a token, in the order of the rows they draw from."""
    slices = sorted(batch.slices, key=lambda s: len(s.token_ids) != 1)
    return [s for s in slices if s.sample]


def _write(words: np.ndarray, shape: InputShape, slices: Sequence[SeqSlice], drawn: Mapping[int, int]) -> int:
    """The columns and tables of a step; every row that it does not have is padding. Returns: rows sampled."""
    pitch, size = shape.tokens + 1, shape.block_size
    columns = words[: _COLUMNS * pitch].reshape(_COLUMNS, pitch)
    tables = words[_COLUMNS * pitch :].reshape(shape.sequences, shape.blocks)
    columns[:] = np.array([[0], [NOT_DRAWN], [0], [-1], [0], [0], [0], [0], [0]], dtype=np.int32)
    ids, sources, positions, slots, lengths, starts, samples, numbers, counts = columns
    row = chunk = chunk_rows = sampled = 0
    for sequence, piece in enumerate(slices):
        count = len(piece.token_ids)
        end, stop = piece.start + count, row + count
        held = -(-end // size)
        if held > shape.blocks or len(piece.blocks) < held:
            raise InternalError(f"request {piece.number}: {end} tokens in {len(piece.blocks)} blocks")
        tables[sequence, :held] = piece.blocks[:held]
        at = np.arange(piece.start, end, dtype=np.int32)
        positions[row:stop] = at
        slots[row:stop] = tables[sequence, at // size] * size + at % size
        lengths[sequence] = end
        numbers[row:stop] = piece.number & _LOW
        if piece.token_ids[0] == PENDING_TOKEN:
            sources[row] = _place(piece, drawn)
        else:
            ids[row:stop] = piece.token_ids
        if count > 1:
            chunk, chunk_rows = chunk + 1, chunk_rows + count
            starts[chunk] = chunk_rows
        if piece.sample:
            samples[sampled] = stop - 1
            sampled += 1
        row = stop
    counts[0] = row
    return sampled


def _place(piece: SeqSlice, drawn: Mapping[int, int]) -> int:
    if len(piece.token_ids) != 1 or piece.number not in drawn:
        raise InternalError(f"request {piece.number} goes on with a token that the last step did not draw")
    return drawn[piece.number]
