"""[9] Draws the tokens of a step on the device, with all sampling parameters, without waiting.

A request gets a slot of the device's tables at its first draw. The kernels update what changes with a token
(the number drawn, their counts), so the next step can be launched before the host knows the tokens. There
is a slot for every sequence of a step. A preempted request may lose its slot; at its next draw it gets a new
one, written again with the tokens drawn so far.

FlashInfer's sampling kernels (0.6.18) cannot replace these: they read one seed for the whole batch and use
the row number as the Philox subsequence, so a draw would depend on the batch. They also lack the edits and
log probabilities (docs/design-notes/2026-11-flashinfer-sampling.md, benchmarks/gpu_sampling.py).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ep_server.backends.gpu.kernels.triton.logit_edits import add_listed, advance, allow_only, penalise
from ep_server.backends.gpu.kernels.triton.logprobs import SamplingReport, report
from ep_server.backends.gpu.kernels.triton.sampling import sample
from ep_server.backends.gpu.kernels.triton.sampling_table import (
    MOST_REPORTED,
    RECORD,
    SamplingSpace,
    SamplingTable,
    Wants,
    splits_of,
    write_slots,
)
from ep_server.backends.gpu.kernels.triton.step_words import Packed, room_for, spread
from ep_server.backends.gpu.sampling.mask_upload import MaskUpload
from ep_server.backends.gpu.sampling.table import SamplingRow, SlotEntry, write
from ep_server.errors import InternalError
from ep_server.records import NO_TOKEN, Request, SampledToken, SeqSlice


@dataclass(frozen=True, slots=True)
class _Sampled:
    """A request. prompt: its tokens. reported: alternatives per token, None = no log probabilities."""

    row: SamplingRow
    prompt: int
    reported: int | None


@dataclass(frozen=True, slots=True)
class _Sent:
    """What kernels read of the host. slots: [room_for(rows)] int32; records: see write_slots()."""

    slots: torch.Tensor
    records: torch.Tensor

    @staticmethod
    def of(rows: int, pinned: bool) -> _Sent:
        slots = torch.zeros(room_for(rows), dtype=torch.int32, pin_memory=pinned)
        return _Sent(slots, torch.zeros(rows, RECORD, dtype=torch.int32, pin_memory=pinned))


class _Group:
    """Rows of consecutive steps that are drawn together, and what kernels read and write for them."""

    def __init__(self, rows: int, device: torch.device, staging: int) -> None:
        pinned, words = device.type == "cuda", rows * (1 + 2 * MOST_REPORTED)
        self.slots = torch.zeros(rows, dtype=torch.int32, device=device)
        self.numbers: list[int] = []  # of the last step
        self.wants = Wants.NOTHING
        self.words, self.out = _report_of(torch.zeros(words, device=device), rows)
        self._sent = [_Sent.of(rows, pinned) for _ in range(staging)]
        self._reports = [_report_of(torch.zeros(words, pin_memory=pinned), rows) for _ in range(staging)]
        self._assigned = self._reported = 0

    def next_sent(self) -> _Sent:
        """The host's buffer of the next assignment."""
        self._assigned += 1
        return self._sent[(self._assigned - 1) % len(self._sent)]

    def copied_report(self) -> SamplingReport:
        """Log probabilities on the host once the stream gets there."""
        host, reported = self._reports[self._reported % len(self._reports)]
        self._reported += 1
        host.copy_(self.words, non_blocking=True)
        return reported


class GpuSampler:
    """The sampling state of a rank's requests. One thread uses it; its work is ordered by the current stream.

    Args:
        rows: most that are drawn in a step, and slots. staging: host buffers used in turn: a step's are read
          before so many later ones are launched.
    """

    def __init__(self, vocab: int, rows: int, device: torch.device, staging: int) -> None:
        self._vocab, self._device, self._staging = vocab, device, staging
        self._requests: dict[int, _Sampled] = {}
        self._outputs: dict[int, list[int]] = {}  # what requests with penalties have drawn
        self._rows = rows
        self._slot_of: dict[int, int] = {}
        self._free = list(range(rows))
        self._table = SamplingTable.of(rows, vocab, device)
        self._space = SamplingSpace.of(rows, vocab, splits_of(vocab), device)
        self._plain, self._masked = (_Group(rows, device, staging) for _ in range(2))
        self._upload: MaskUpload | None = None  # made with the first grammar
        self._no_tables = torch.zeros(0, 0, dtype=torch.int32, device=device)

    def add(self, request: Request) -> None:
        """A request joins.

        Raises:
            InvalidArgument: it draws at random without a seed, names an id outside the vocabulary, or asks
              for more than a row of the tables holds.
            InternalError: its number is in use.
        """
        if request.number in self._requests:
            raise InternalError(f"request number {request.number} is already in the sampler")
        row = SamplingRow.of(request, self._vocab)
        if row.wants & Wants.PENALTY:
            self._outputs[request.number] = list(request.output_ids)
        prompt, logprobs = len(request.prompt_ids), request.sampling.logprobs
        reported = None if logprobs is None else min(logprobs, self._vocab)
        self._requests[request.number] = _Sampled(row, prompt, reported)

    def remove(self, number: int) -> None:
        """Forgets a request; unknown numbers are ignored."""
        self._requests.pop(number, None)
        self._outputs.pop(number, None)
        slot = self._slot_of.pop(number, None)
        if slot is not None:
            self._free.append(slot)
            self._plain.numbers, self._masked.numbers = [], []

    def drop_steps(self) -> None:
        """Forgets the draws that sampled_tokens() has not seen: the tables are written again.

        No draw may be in flight.
        """
        self._slot_of, self._free = {}, list(range(self._rows))
        self._plain.numbers, self._masked.numbers = [], []

    def sample(
        self,
        pieces: Sequence[SeqSlice],
        logits: torch.Tensor,
        tokens: torch.Tensor,
        host_tokens: torch.Tensor,
        step: Sequence[SeqSlice] = (),
        masks: Sequence[np.ndarray | None] | None = None,
    ) -> SamplingReport | None:
        """Enqueues the draw of one token per row into `tokens`: [N] int64, NO_TOKEN where none can be drawn.

        Args:
            pieces: what row by row draws, of distinct requests.
            logits: [N, V] float32; edited in place.
            host_tokens: [N] int64 on the host, pinned: a copy of `tokens` once the stream gets there.
            step: all that draw in this step, where `pieces` are only some of them.
            masks: what the grammars of `pieces` allow, see Masks.mask(); None where they have no grammar.
        Returns: log probabilities on the host once the stream gets there; None if no request asked.
        Raises: InternalError for an unknown request.
        """
        numbers = [piece.number for piece in pieces]
        if not numbers:
            return None
        group = self._plain if masks is None else self._masked
        if numbers != group.numbers:
            self._assign_slots(group, numbers, pieces, {piece.number for piece in step})
        slots = group.slots[: len(numbers)]
        if masks is not None:
            self._write_masks(masks, slots)
        self._draw(logits, slots, tokens, group.wants, group.out)
        advance(tokens, slots, self._table, host_tokens)
        return group.copied_report() if group.wants & Wants.REPORT else None

    def sampled_tokens(
        self, numbers: Sequence[int], tokens: Sequence[int], reported: SamplingReport | None
    ) -> list[SampledToken]:
        """The tokens of a step that has ended, in the order of its rows.

        Args:
            tokens: what sample() drew. reported: what it returned.
        """
        for number, token in zip(numbers, tokens, strict=True) if self._outputs else ():
            if token != NO_TOKEN and number in self._outputs:
                self._outputs[number].append(token)
        if reported is None:
            return [SampledToken(n, token) for n, token in zip(numbers, tokens, strict=True)]
        columns = [part[: len(numbers)].numpy() for part in (reported.chosen, reported.top, reported.ids)]
        rows = zip(numbers, tokens, *columns, strict=True)
        return [self._with_logprobs(number, token, *row) for number, token, *row in rows]

    def warm_up(self) -> None:
        """Runs every kernel once: the first launch compiles it."""
        sent, slots = self._plain.next_sent(), self._plain.slots[:1]
        write_slots(sent.records[:1], self._table)
        self._send_slots(self._plain, sent, 1)
        tokens = torch.zeros(1, dtype=torch.int64, device=self._device)
        wants = Wants(sum(Wants))
        logits = torch.zeros(1, self._vocab, device=self._device)
        self._draw(logits, slots, tokens, wants, self._plain.out)
        host_tokens = torch.zeros(1, dtype=torch.int64, pin_memory=self._device.type == "cuda")
        advance(tokens, slots, self._table, host_tokens)

    def _write_masks(self, masks: Sequence[np.ndarray | None], slots: torch.Tensor) -> None:
        table = self._table.masks
        if self._upload is None:
            self._upload = MaskUpload(len(table), table.shape[1], self._device, self._staging)
        self._upload.write(masks, slots, table)

    def _draw(
        self,
        logits: torch.Tensor,
        slots: torch.Tensor,
        tokens: torch.Tensor,
        wants: Wants,
        reported: SamplingReport,
    ) -> None:
        table, count = self._table, len(tokens)
        if wants & Wants.PENALTY:
            penalise(logits, slots, table)
        if wants & Wants.LIST:
            add_listed(logits, slots, table)
        if wants & Wants.MASK:
            allow_only(logits, slots, table)
        sample(logits, slots, table, self._space, tokens, wants)
        if wants & Wants.REPORT:
            out = SamplingReport(reported.chosen[:count], reported.top[:count], reported.ids[:count])
            report(logits, slots, table, self._space, tokens, out)

    def _assign_slots(
        self, group: _Group, numbers: list[int], pieces: Sequence[SeqSlice], others: Collection[int]
    ) -> None:
        """Gives every row its slot. others: requests that keep theirs."""
        try:
            asked = [self._requests[number] for number in numbers]
        except KeyError as error:
            raise InternalError(f"request number {error} is not in the sampler") from None
        entries, present = [], {*numbers, *others}
        for piece, one in zip(pieces, asked, strict=True):
            if piece.number not in self._slot_of:
                slot = self._slot_of[piece.number] = self._free_slot(present)
                drawn = piece.start + len(piece.token_ids) - one.prompt
                entries.append(SlotEntry(slot, one.row, drawn, self._outputs.get(piece.number, ())))
        sent = group.next_sent()
        if entries:
            write(self._table, entries, sent.records)
        sent.slots.numpy()[: len(numbers)] = [self._slot_of[number] for number in numbers]
        self._send_slots(group, sent, len(numbers))
        wants = 0
        for one in asked:
            wants |= one.row.wants
        group.numbers, group.wants = numbers, Wants(wants)

    def _send_slots(self, group: _Group, sent: _Sent, count: int) -> None:
        packed = Packed(sent.slots[: room_for(count)], count, 0, 0)
        spread(packed, group.slots.view(1, -1), self._no_tables)

    def _free_slot(self, present: Collection[int]) -> int:
        """One of nobody, or of a request that is not present in this step."""
        if self._free:
            return self._free.pop()
        victim = next((number for number in self._slot_of if number not in present), None)
        if victim is None:
            raise InternalError(f"a step of {len(present)} rows has more than {len(self._slot_of)} slots")
        return self._slot_of.pop(victim)

    def _with_logprobs(
        self, number: int, token: int, chosen: np.floating[Any], top: np.ndarray, ids: np.ndarray
    ) -> SampledToken:
        one = self._requests.get(number)  # None: it has ended meanwhile
        if one is None or one.reported is None or token == NO_TOKEN:
            return SampledToken(number, token)
        best = zip(ids[: one.reported].tolist(), top[: one.reported].tolist(), strict=True)
        return SampledToken(number, token, float(chosen), tuple(best))


def _report_of(words: torch.Tensor, rows: int) -> tuple[torch.Tensor, SamplingReport]:
    """One buffer, and what lies where in it."""
    shape, size = (rows, MOST_REPORTED), rows * MOST_REPORTED
    chosen, top, ids = words[:rows], words[rows : rows + size], words[rows + size :]
    return words, SamplingReport(chosen, top.view(shape), ids.view(torch.int32).view(shape))
