"""[9] Draws the tokens of a step on the device; what the kernels cannot do, the sampler of sampler.py does.

A request's way is its own: whether it asks for edits or log probabilities, not who else is in the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ep_server.model.sampler import Sampler
from ep_server.model.triton.sampling import SamplingRows, SamplingSpace, sample
from ep_server.records import Request, SampledToken

_FLOATS, _INTS, _LONGS = 3, 1, 2  # temperature, top-p, min-p; top-k; seed, position
_SEED_BITS = (1 << 63) - 1
SPLITS = 16


@dataclass(frozen=True, slots=True)
class Draw:
    """Who draws from a row of logits, and how many tokens it has drawn before."""

    number: int
    position: int


class GpuSampler:
    """The sampling state of a rank's requests. One thread uses it.

    Args:
        host: for requests that edit logits or report them; on the same device.
        rows: most that are drawn in a step. staging: host buffers used in turn.
    """

    def __init__(self, host: Sampler, rows: int, device: torch.device, staging: int) -> None:
        self._host, self._device, self._rows = host, device, rows
        self._requests: dict[int, Request] = {}
        words = rows * (_FLOATS + _INTS + 2 * _LONGS)
        pinned = device.type == "cuda"
        self._staging = [torch.zeros(words, dtype=torch.int32, pin_memory=pinned) for _ in range(staging)]
        self._given = torch.zeros(words, dtype=torch.int32, device=device)
        self._space = SamplingSpace.of(rows, SPLITS, device)
        self._calls = 0

    def add(self, request: Request) -> None:
        """A request joins. Raises: what Sampler.add raises."""
        self._host.add(request)
        self._requests[request.number] = request

    def remove(self, number: int) -> None:
        """Forgets a request; unknown numbers are ignored."""
        self._host.remove(number)
        self._requests.pop(number, None)

    def draws(self, number: int, end: int) -> Draw:
        """The draw of a request after position end - 1."""
        return Draw(number, end - len(self._requests[number].prompt_ids))

    def sample(
        self, draws: Sequence[Draw], logits: torch.Tensor, tokens: torch.Tensor
    ) -> dict[int, SampledToken]:
        """Draws one token per row into `tokens`: [N] int64, NO_TOKEN where none can be drawn.

        Args:
            logits: [N, V]; not changed.
        Returns: the tokens that the host has drawn, by number; only for these it waits.
        """
        if not draws:
            return {}
        rows, random = self._send(draws)
        count = len(draws)
        space = SamplingSpace(
            self._space.values[:count],
            self._space.ids[:count],
            self._space.highest[:count],
            self._space.cutoff[:count],
        )
        sample(logits, rows, space, tokens, random=random)
        others = [row for row, draw in enumerate(draws) if not self._host.plain(draw.number)]
        if not others:
            return {}
        index = torch.tensor(others, device=self._device)
        drawn = self._host.sample([draws[row].number for row in others], logits[index].float())
        tokens[index] = torch.tensor([token.token_id for token in drawn], device=self._device)
        return {token.number: token for token in drawn}

    def _send(self, draws: Sequence[Draw]) -> tuple[SamplingRows, bool]:
        """How each row is drawn, on its way to the device; whether any of them draws at random."""
        staging = self._staging[self._calls % len(self._staging)]
        self._calls += 1
        settings = [self._requests[draw.number].sampling for draw in draws]
        host = _columns(staging, self._rows, len(draws))
        for column, values in zip(
            host,
            (
                [s.temperature for s in settings],
                [s.top_p for s in settings],
                [s.min_p for s in settings],
                [s.top_k for s in settings],
                [(s.seed or 0) & _SEED_BITS for s in settings],
                [draw.position for draw in draws],
            ),
            strict=True,
        ):
            column.numpy()[:] = np.array(values)
        self._given.copy_(staging, non_blocking=True)
        temperature, top_p, min_p, top_k, seed, position = _columns(self._given, self._rows, len(draws))
        rows = SamplingRows(temperature, top_k, top_p, min_p, seed, position)
        return rows, not all(s.greedy for s in settings)


def _columns(words: torch.Tensor, rows: int, count: int) -> list[torch.Tensor]:
    """Three of float32, one of int32, two of int64, each [count]."""
    longs = words[: rows * 2 * _LONGS].view(torch.int64).view(_LONGS, rows)
    rest = words[rows * 2 * _LONGS :].view(_FLOATS + _INTS, rows)
    floats = [rest[i].view(torch.float32)[:count] for i in range(_FLOATS)]
    return [*floats, rest[_FLOATS, :count], *(longs[i, :count] for i in range(_LONGS))]
