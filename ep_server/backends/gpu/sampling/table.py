"""[9] The sampling parameters of a request as a row of the device tables, and how rows get there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ep_server.backends.gpu.kernels.triton.sampling_table import (
    COUNT_STEP,
    DRAWN,
    ENTRIES,
    FLOATS,
    IN_PROMPT,
    LONGS,
    MOST_REPORTED,
    RECORD,
    SamplingTable,
    Wants,
    write_slots,
)
from ep_server.errors import InternalError, InvalidArgument
from ep_server.records import Request, Sampling, Stopping

_SEED_BITS = (1 << 63) - 1
_WIDTH = FLOATS.value  # columns of `floats`, and of `longs`
assert LONGS.value == _WIDTH and RECORD >= 1 + 3 * _WIDTH


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """One request. Columns as in SamplingTable; what nobody has drawn yet.

    tokens, values, until: [L] int32, float32, int32. mask: [ceil(V / 32)] int32 or None.
    prompt: distinct ids that count as seen, int64.
    """

    wants: int
    floats: np.ndarray
    longs: np.ndarray
    tokens: np.ndarray
    values: np.ndarray
    until: np.ndarray
    mask: np.ndarray | None
    prompt: np.ndarray

    @staticmethod
    def of(request: Request, vocab: int) -> SamplingRow:
        """Raises: InvalidArgument for a random request without a seed, or what the tables cannot hold."""
        s = request.sampling
        if not s.greedy and s.seed is None:
            raise InvalidArgument("seed", None, "an integer once the request is on a rank")
        if s.logprobs is not None and s.logprobs > MOST_REPORTED:
            raise InvalidArgument("logprobs", s.logprobs, f"0 to {MOST_REPORTED}")
        tokens, values, until = _listed(s, request.stopping, vocab)
        wants = _wants(s, vocab) | (Wants.LIST if len(tokens) else Wants.NOTHING)
        wants |= Wants.NOTHING if request.grammar is None else Wants.MASK
        reported = -1 if s.logprobs is None else min(s.logprobs, vocab)
        penalties = (s.repetition_penalty, s.presence_penalty, s.frequency_penalty)
        numbers = (min(s.top_k, vocab), (s.seed or 0) & _SEED_BITS, 0, reported, len(tokens), int(wants))
        repeats = s.repetition_penalty != 1.0
        return SamplingRow(
            wants=int(wants),
            floats=_padded((s.temperature, s.top_p, s.min_p, *penalties), np.float32),
            longs=_padded(numbers, np.int64),
            tokens=tokens,
            values=values,
            until=until,
            mask=_mask(s.allowed_token_ids, vocab) if s.allowed_token_ids else None,
            prompt=np.unique(np.array(request.prompt_ids if repeats else (), dtype=np.int64)),
        )


@dataclass(frozen=True, slots=True)
class SlotEntry:
    """A row that goes into a slot. drawn: tokens drawn before. output: which, where there are penalties."""

    slot: int
    row: SamplingRow
    drawn: int
    output: Sequence[int]


def write(table: SamplingTable, entries: Sequence[SlotEntry], records: torch.Tensor) -> None:
    """Enqueues rows into their slots, which may be anything before. Nothing waits for it.

    Args:
        records: [.., RECORD] int32 on the host, pinned, with room for all of them; see write_slots().
    """
    rows, slots = (
        [entry.row for entry in entries],
        np.array([entry.slot for entry in entries], dtype=np.int64),
    )
    longs = np.stack([row.longs for row in rows])
    longs[:, DRAWN.value] = [entry.drawn for entry in entries]
    words = records[: len(entries)].numpy()
    words[:, 0], words[:, 1 : 1 + _WIDTH] = slots, np.stack([row.floats for row in rows]).view(np.int32)
    words[:, 1 + _WIDTH : 1 + 3 * _WIDTH] = longs.view(np.int32)
    write_slots(records[: len(entries)], table)
    width = max(len(row.tokens) for row in rows)
    if width:
        _write_lists(table, slots, rows, width)
    masks = [(entry.slot, entry.row.mask) for entry in entries if entry.row.mask is not None]
    if masks:
        given = _sent(np.stack([mask for _, mask in masks]), table)
        table.masks.index_copy_(0, _sent(np.array([slot for slot, _ in masks]), table), given)
    counted = [entry for entry in entries if entry.row.wants & Wants.PENALTY]
    if counted:
        _write_counts(table, counted)


def _write_lists(table: SamplingTable, slots: np.ndarray, rows: Sequence[SamplingRow], width: int) -> None:
    place = _sent(slots, table)
    for name in ("tokens", "values", "until"):
        lists = np.stack([np.resize(getattr(row, name), width) for row in rows])
        getattr(table, name)[:, :width].index_copy_(0, place, _sent(lists, table))


def _write_counts(table: SamplingTable, entries: Sequence[SlotEntry]) -> None:
    vocab = table.counts.shape[1]
    places, words = [], []
    for entry in entries:
        if len(entry.output) != entry.drawn:
            raise InternalError(f"{len(entry.output)} of {entry.drawn} drawn tokens are known")
        drawn, times = np.unique(np.array(entry.output, dtype=np.int64), return_counts=True)
        both = np.concatenate([entry.row.prompt, drawn])
        ids, index = np.unique(both, return_inverse=True)
        word = np.zeros(len(ids), dtype=np.int32)
        prompt = np.full(len(entry.row.prompt), IN_PROMPT.value, dtype=np.int32)
        np.add.at(word, index, np.concatenate([prompt, COUNT_STEP.value * times]))
        places.append(entry.slot * vocab + ids)
        words.append(word)
    slots = np.array([entry.slot for entry in entries], dtype=np.int64)
    table.counts.index_fill_(0, _sent(slots, table), 0)
    where, what = _sent(np.concatenate(places), table), _sent(np.concatenate(words), table)
    table.counts.view(-1).scatter_(0, where, what)


def _sent(values: np.ndarray, table: SamplingTable) -> torch.Tensor:
    """On the table's device; on its way to a GPU."""
    given, device = torch.from_numpy(values), table.floats.device
    return given.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else given


def _wants(s: Sampling, vocab: int) -> Wants:
    wants = Wants.NOTHING
    if s.repetition_penalty != 1.0 or s.presence_penalty or s.frequency_penalty:
        wants |= Wants.PENALTY
    if s.allowed_token_ids:
        wants |= Wants.MASK
    if s.logprobs is not None:
        wants |= Wants.REPORT
    if not s.greedy:
        if 0 < s.top_k < vocab:
            wants |= Wants.FILTER
        else:
            wants |= Wants.FILTER | Wants.NUCLEUS if s.top_p < 1 else Wants.DRAW
    return wants


def _listed(s: Sampling, stopping: Stopping, vocab: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Biased tokens, and those that may not end the output too early."""
    bias, least = dict(s.logit_bias), stopping.min_new_tokens
    stops = stopping.eos_token_ids | stopping.stop_token_ids if least else frozenset()
    _check_ids("logit_bias", bias, vocab)
    _check_ids("stop_token_ids", sorted(stops), vocab)
    tokens = sorted(bias.keys() | stops)
    if len(tokens) > ENTRIES:
        count = f"{len(tokens)} tokens"
        raise InvalidArgument("logit_bias", count, f"at most {ENTRIES} together with the tokens that end it")
    return (
        np.array(tokens, dtype=np.int32),
        np.array([bias.get(token, 0.0) for token in tokens], dtype=np.float32),
        np.array([least if token in stops else 0 for token in tokens], dtype=np.int32),
    )


def _mask(allowed: Sequence[int], vocab: int) -> np.ndarray:
    _check_ids("allowed_token_ids", allowed, vocab)
    bits = np.zeros(-(-vocab // 32) * 32, dtype=np.uint8)
    bits[list(allowed)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def _check_ids(field: str, ids: Sequence[int] | dict[int, float], vocab: int) -> None:
    for token in ids:
        if not 0 <= token < vocab:
            raise InvalidArgument(field, token, f"a token id, 0 to {vocab - 1}")


def _padded(values: Sequence[float], dtype: type) -> np.ndarray:
    row: np.ndarray = np.zeros(_WIDTH, dtype=dtype)
    row[: len(values)] = values
    return row
