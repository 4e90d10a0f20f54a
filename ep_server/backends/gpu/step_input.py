"""The inputs of a step's kernels at fixed device addresses, and how a StepBatch gets there.

Rows are tokens. Sequences with one token come first, one row each, those that are sampled before the others;
chunks of prompts follow. A captured graph always reads the first rows; slot -1 and length 0 mark padding.
Where chunks may follow, only the device knows how many sequences have one token. Both attention kernels then
get all sequences: in the kernel for single tokens chunks have length 0, and in the kernel for chunks single
tokens have no rows. One kernel per step copies all inputs. Units: tokens, blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch

from ep_server.backends.gpu.chunk_copies import CopiedBlocks, CopiedBlocksInput, CopyRule
from ep_server.backends.gpu.kernels.triton.step_words import Packed, room_for, spread
from ep_server.errors import InternalError
from ep_server.models.batch import row_order
from ep_server.records import PENDING_TOKEN, SeqSlice, StepBatch

# ids, sources, positions, slots, lengths, query starts, sampled rows, numbers, counts; lengths and slots for
# single tokens, slots for chunks.
_COLUMNS, _ALIGNED = 12, 32  # a column's length is a multiple of so many words
NOT_DRAWN = -1
_PADDING = np.array([[0, NOT_DRAWN, 0, -1, 0, 0, 0, 0, 0, 0, -1, -1]], dtype=np.int32).T
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
        """int32 words of one step, at most."""
        return room_for(_COLUMNS * (self.tokens + 1) + self.sequences * self.blocks)


@dataclass(frozen=True, slots=True)
class Singles:
    """Sequences that run one token, on the device: among the first D, one row each. int32.

    lengths, slots: [D] as for the whole step, but 0 and -1 for chunks and padding.
    """

    lengths: torch.Tensor
    slots: torch.Tensor

    def __len__(self) -> int:
        return len(self.lengths)


@dataclass(frozen=True, slots=True)
class Chunks:
    """Sequences that run several tokens, on the device. int32.

    query_start: [S + 1] where the rows of each sequence of the step begin; a single token has none.
    slots: [T] as for the whole step, but -1 for single tokens too.
    padded: whether rows may belong to no sequence. copied: the copy of the cache to attend to, if any.
    """

    query_start: torch.Tensor
    slots: torch.Tensor
    padded: bool
    copied: CopiedBlocks | None = None


@dataclass(frozen=True, slots=True)
class StepTensors:
    """One step on the device. All int32; T rows, S sequences.

    ids: [T] tokens; sources: [T] for a token drawn by the last step its place there, else -1.
    numbers: [T] low 31 bits of each row's request. positions: [T].
    slots: [T] place in the cache, block * block_size + offset; -1 = padding.
    blocks: [S, W] tables. lengths: [S] positions that a sequence attends to, its own included; 0 = padding.
    singles: sequences of one token. chunks: the others; None if there cannot be any.
    sample_rows: [N] rows that are sampled, ascending; None if all rows are.
    live: [1] number of rows before the padding.
    """

    ids: torch.Tensor
    sources: torch.Tensor
    numbers: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    blocks: torch.Tensor
    lengths: torch.Tensor
    singles: Singles
    chunks: Chunks | None
    sample_rows: torch.Tensor | None
    live: torch.Tensor

    @property
    def tokens(self) -> int:
        """Rows, padding included."""
        return len(self.ids)

    @property
    def copied(self) -> bool:
        """Whether chunks attend to a copy of the cache."""
        return self.chunks is not None and self.chunks.copied is not None


class StepInput:
    """The memory of the steps of one rank. One thread fills it; a fill is ordered by the current stream."""

    def __init__(
        self, shape: InputShape, device: torch.device, staging: int = 3, copies: CopyRule | None = None
    ) -> None:
        """staging: host buffers used in turn; a buffer is written again only `staging` fills later.

        copies: when chunks attend to a copy; None = never.
        """
        self.shape, self.device = shape, device
        self._host = [self.host_buffer(shape.words, torch.int32) for _ in range(staging)]
        self._tables = BlockTables(shape.sequences, shape.blocks, shape.block_size)
        pitch = -(-(shape.tokens + 1) // _ALIGNED) * _ALIGNED
        padding = torch.from_numpy(np.repeat(_PADDING, pitch, axis=1))
        self._columns = padding.to(device, copy=True)  # a step of padding alone
        self._blocks = torch.zeros(shape.sequences, shape.blocks, dtype=torch.int32, device=device)
        self._copies: CopiedBlocksInput | None = None
        if copies is not None:
            self._copies = CopiedBlocksInput(copies, shape.sequences, shape.blocks, device, staging)
        self._fills = 0

    def host_buffer(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        """[size] on the host, which can be copied without waiting."""
        return torch.zeros(size, dtype=dtype, pin_memory=self.device.type == "cuda")

    def padded(self, rows: int, *, copied: bool = False) -> StepTensors:
        """A view of so many rows on the step filled last, or on later ones.

        Up to `shape.sequences` rows are single tokens, and all have logits. With more rows, some may belong
        to chunks, and `shape.sequences` rows are sampled. Rows beyond those of the step and its padding are
        left over from earlier steps. copied: chunks attend to a copy.
        """
        sequences = min(rows, self.shape.sequences)
        mixed = rows > sequences
        sampled = sequences if mixed else None
        return self._view(
            rows, sequences, sequences, sampled, chunks=mixed, padded=True, copied=mixed and copied
        )

    def fill(
        self, batch: StepBatch, drawn: Mapping[int, int], padded: int = 0, *, copy: bool | None = None
    ) -> StepTensors:
        """Sends a step to the device.

        Args:
            drawn: place of each request's token among the tokens drawn by the last step.
            padded: rows, see padded(); 0 = no padding.
            copy: see CopiedBlocksInput.fill().
        Raises: InternalError for a step beyond the shape, or a token that was not drawn.
        """
        slices = ordered(batch)
        spans = Spans.of(slices)
        tokens, sequences = max(batch.num_tokens, padded), len(slices)
        if padded and not self._fits(batch, spans.singles, padded):
            raise InternalError(f"a step of {batch.num_tokens} tokens is not one of {padded} rows")
        if tokens > self.shape.tokens or sequences > self.shape.sequences:
            raise InternalError(f"a step of {tokens} tokens, {sequences} sequences exceeds {self.shape}")
        host = self._host[self._fills % len(self._host)]
        self._fills += 1
        tables = self._tables.of(slices, spans)
        columns = host.numpy()[: _COLUMNS * (tokens + 1)].reshape(_COLUMNS, tokens + 1)
        sampled = _write(columns, slices, spans, _slots(tables, spans, self.shape.block_size), drawn)
        self._send(host, tokens + 1, tables)
        first = spans.singles
        copied = self._copies is not None and self._copies.fill(
            tables[first:], spans.sizes[first:], spans.ends[first:], first, copy
        )
        if padded:
            return self.padded(padded, copied=copied)
        rows = None if sampled == tokens else sampled
        chunks = first < sequences
        return self._view(tokens, sequences, first, rows, chunks=chunks, padded=False, copied=copied)

    def _fits(self, batch: StepBatch, singles: int, rows: int) -> bool:
        """Whether a step may be padded to so many rows, see padded()."""
        if batch.num_tokens > rows:
            return False
        if rows > self.shape.sequences:  # chunks may be among them
            return True
        return singles == len(batch.slices)

    def _send(self, host: torch.Tensor, rows: int, tables: np.ndarray) -> None:
        """Columns of so many rows, followed by the tables."""
        used = _COLUMNS * rows
        end = used + tables.size
        host.numpy()[used:end] = tables.reshape(-1)
        spread(Packed(host[: room_for(end)], rows, *tables.shape), self._columns, self._blocks)

    def _view(
        self,
        tokens: int,
        sequences: int,
        singles: int,
        sampled: int | None,
        *,
        chunks: bool,
        padded: bool,
        copied: bool,
    ) -> StepTensors:
        columns = self._columns
        copy = self._copies.view(sequences) if self._copies is not None and copied else None
        starts, slots = columns[5, : sequences + 1], columns[11, :tokens]
        return StepTensors(
            ids=columns[0, :tokens],
            sources=columns[1, :tokens],
            numbers=columns[7, :tokens],
            positions=columns[2, :tokens],
            slots=columns[3, :tokens],
            blocks=self._blocks[:sequences],
            lengths=columns[4, :sequences],
            singles=Singles(columns[9, :singles], columns[10, :singles]),
            chunks=Chunks(starts, slots, padded, copy) if chunks else None,
            sample_rows=None if sampled is None else columns[6, :sampled],
            live=columns[8, :1],
        )


def ordered(batch: StepBatch) -> Sequence[SeqSlice]:
    """The slices in the order of rows, see row_order()."""
    if all(len(piece.token_ids) == 1 and piece.sample for piece in batch.slices):
        return batch.slices
    return sorted(batch.slices, key=row_order)


def sampled_slices(batch: StepBatch) -> list[SeqSlice]:
    """The slices that draw a token, in the order of their rows."""
    return [piece for piece in ordered(batch) if piece.sample]


def prompts_of(rows: int, shape: InputShape, blocks: int, max_context: int) -> StepBatch:
    """Prompts of `rows` rows together, or of as many as fit, in the first blocks of the cache.

    Args:
        shape: of the largest step. blocks: of the cache. max_context: longest sequence, tokens.
    """
    pieces = list[SeqSlice]()
    held, left = min(shape.blocks, blocks), rows  # blocks of a sequence, rows still to place
    while left > 0 and len(pieces) < shape.sequences:
        first = len(pieces) * held
        own = range(first, min(first + held, blocks))
        count = min(left, len(own) * shape.block_size, max_context)
        if count == 0:
            break
        used = tuple(own[: -(-count // shape.block_size)])
        pieces.append(SeqSlice(len(pieces), 0, (0,) * count, used, sample=False))
        left -= count
    return StepBatch(tuple(pieces), rows - left)


def _write(
    columns: np.ndarray, slices: Sequence[SeqSlice], spans: Spans, slots: np.ndarray, drawn: Mapping[int, int]
) -> int:
    """Writes the columns of a step; missing rows are padding. Returns: number of sampled rows."""
    columns[:] = _PADDING
    ids, sources, positions, places, lengths, starts, samples, numbers, counts, *of_kinds = columns
    count, sizes, singles = len(slots), spans.sizes, spans.singles
    ids[:count] = np.fromiter(chain.from_iterable([s.token_ids for s in slices]), np.int32, count)
    pending = np.flatnonzero(ids[:count] == PENDING_TOKEN)
    if len(pending):
        sources[pending] = _places(spans, spans.rows[pending], drawn)
        ids[pending] = 0
    positions[:count], places[:count] = spans.positions, slots
    lengths[: len(slices)] = spans.ends
    starts[: singles + 1], starts[singles + 1 :] = singles, count
    starts[singles + 1 : len(slices) + 1] = singles + sizes[singles:].cumsum()
    single_lengths, single_slots, chunk_slots = of_kinds
    single_lengths[:singles], single_slots[:singles] = lengths[:singles], slots[:singles]
    chunk_slots[singles:count] = slots[singles:]
    rows = (sizes.cumsum() - 1)[np.array([s.sample for s in slices], dtype=bool)]
    samples[: len(rows)] = rows
    numbers[:count] = (np.array(spans.numbers, dtype=np.int64) & _LOW)[spans.rows]
    counts[0] = count
    return len(rows)


def _slots(tables: np.ndarray, spans: Spans, size: int) -> np.ndarray:
    """[T] places in the cache."""
    block = tables[spans.rows, spans.positions // size].astype(np.int64)
    slots: np.ndarray = block * size + spans.positions % size
    return slots


def _places(spans: Spans, pending: np.ndarray, drawn: Mapping[int, int]) -> list[int]:
    """The places of the tokens of pending slices. Raises: InternalError if one was not drawn."""
    places = [drawn.get(spans.numbers[at], NOT_DRAWN) for at in pending.tolist()]
    wrong = (np.array(places) == NOT_DRAWN) | (spans.sizes[pending] != 1)
    if wrong.any():
        number = spans.numbers[pending[wrong.argmax()]]
        raise InternalError(f"request {number} goes on with a token that the last step did not draw")
    return places


@dataclass(frozen=True, slots=True)
class Spans:
    """Positions of the S slices of a step, in tokens: [S] int64 starts, sizes; ends = starts + sizes.

    numbers: of their requests. singles: how many run one token. rows: [T] int64, the slice of each row.
    positions: [T] int64.
    """

    numbers: list[int]
    singles: int
    starts: np.ndarray
    sizes: np.ndarray
    ends: np.ndarray
    rows: np.ndarray
    positions: np.ndarray

    @staticmethod
    def of(slices: Sequence[SeqSlice]) -> Spans:
        """Reads the slices."""
        starts = np.array([piece.start for piece in slices], dtype=np.int64)
        sizes = np.array([len(piece.token_ids) for piece in slices], dtype=np.int64)
        numbers, ends = [piece.number for piece in slices], starts + sizes
        singles = int((sizes == 1).sum())
        rows, positions = np.arange(len(sizes)), starts
        if len(sizes) and sizes.max() > 1:
            rows, firsts = np.repeat(rows, sizes), sizes.cumsum() - sizes
            positions = np.arange(len(rows)) + (starts - firsts)[rows]
        return Spans(numbers, singles, starts, sizes, ends, rows, positions)


class BlockTables:
    """Block table rows of the most recent sequences. One thread uses it.

    Args:
        sequences: most of a step. width: blocks of the longest context. block_size: tokens.
    """

    def __init__(self, sequences: int, width: int, block_size: int) -> None:
        self._store = np.zeros((sequences, width), dtype=np.int32)
        self._size = block_size
        self._row_of: dict[int, int] = {}  # by request
        self._free = list(range(sequences))
        self._last: tuple[list[int], np.ndarray] = ([], np.zeros(0, dtype=np.int64))
        self._admission, self._end, self._held = (np.full(sequences, -1, dtype=np.int64) for _ in range(3))

    def of(self, slices: Sequence[SeqSlice], spans: Spans) -> np.ndarray:
        """[S, most blocks of any slice] int32; beyond a slice's own blocks anything.

        Raises: InternalError for a slice beyond the width, or with too few blocks.
        """
        held = -(-spans.ends // self._size)
        given = np.array([len(piece.blocks) for piece in slices], dtype=np.int64)
        for index in np.flatnonzero((held > self._store.shape[1]) | (given < held)).tolist():
            piece = slices[index]
            raise InternalError(
                f"request {piece.number}: {spans.ends[index]} tokens in {len(piece.blocks)} blocks"
            )
        rows = self._rows(spans.numbers)
        admissions = np.array([piece.admission for piece in slices], dtype=np.int64)
        # A sequence that continues where it stopped has its old blocks, and perhaps more.
        goes_on = (self._admission[rows] == admissions) & (self._end[rows] == spans.starts)
        known = np.where(goes_on, self._held[rows], 0)
        for at in np.flatnonzero(known < held).tolist():
            first, last = int(known[at]), int(held[at])
            self._store[rows[at], first:last] = slices[at].blocks[first:last]
        self._admission[rows], self._end[rows] = admissions, spans.ends
        self._held[rows] = np.maximum(known, held)
        return self._store[rows, : int(held.max(initial=0))]

    def _rows(self, numbers: list[int]) -> np.ndarray:
        if numbers == self._last[0]:
            return self._last[1]
        row_of = self._row_of
        new = [number for number in numbers if number not in row_of]
        if len(new) > len(self._free):
            present = set(numbers)
            gone = [number for number in row_of if number not in present]
            self._free += [row_of.pop(number) for number in gone]
        for number in new:
            row_of[number] = self._free.pop()
            self._admission[row_of[number]] = -1
        self._last = (numbers, np.array([row_of[number] for number in numbers], dtype=np.int64))
        return self._last[1]
