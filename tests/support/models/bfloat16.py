"""The rule for bfloat16: with the same routing, logits as close to float32 as transformers' own bfloat16 is.

Forcing works by answering the router's choices of groups and experts with the float32 oracle's, in turn.
Making the oracle needs transformers; reading it from a file does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

FACTOR = 1.5  # of transformers' largest error


@dataclass(frozen=True)
class Rounding:
    """ids: [T]. routing: choices in the order of the router's calls, [T, k] each.

    expected: [T, V] float32 logits. bound: how far others may be from them.
    """

    ids: list[int]
    routing: list[torch.Tensor]
    expected: torch.Tensor
    bound: float

    @staticmethod
    def of(path: Path, ids: Sequence[int]) -> Rounding:
        """Asks transformers."""
        import transformers

        load, given = transformers.AutoModelForCausalLM.from_pretrained, torch.tensor([list(ids)])
        with torch.inference_mode(), recorded_routing() as routing:
            expected = load(path, dtype=torch.float32)(given).logits[0]
        with torch.inference_mode(), forced_routing(routing):
            theirs = load(path, dtype=torch.bfloat16)(given).logits[0].float()
        return Rounding(list(ids), routing, expected, FACTOR * float((theirs - expected).abs().max()))

    def write(self, file: Path) -> None:
        """For read()."""
        torch.save([self.ids, self.routing, self.expected, self.bound], file)

    @staticmethod
    def read(file: Path) -> Rounding:
        """What write() has written."""
        return Rounding(*torch.load(file, weights_only=True))

    def routing_of(self, pieces: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
        """For a model that runs positions [start, end), piece after piece."""
        return [layer[start:end] for start, end in pieces for layer in self.routing]


@contextmanager
def recorded_routing() -> Iterator[list[torch.Tensor]]:
    """Collects the chosen experts (and groups), [tokens, k] per choice."""
    calls: list[torch.Tensor] = []
    with _patched_topk(calls.append):
        yield calls


@contextmanager
def forced_routing(calls: Sequence[torch.Tensor]) -> Iterator[None]:
    """Answers the choices with these, in turn; all must be used up."""
    left = list(calls)
    with _patched_topk(lambda _: left.pop(0)):
        yield
    assert not left


@contextmanager
def _patched_topk(answer: Callable[[torch.Tensor], torch.Tensor | None]) -> Iterator[None]:
    plain = torch.topk

    def topk(x: torch.Tensor, k: int, dim: int = -1, sorted: bool = True) -> tuple[torch.Tensor, ...]:
        values, ids = plain(x, k, dim=dim, sorted=sorted)
        answered = None if k == x.shape[-1] else answer(ids)  # to take all is no choice
        if answered is None:
            return torch.return_types.topk((values, ids))
        assert answered.shape == ids.shape
        answered = answered.to(x.device)
        return torch.return_types.topk((x.gather(-1, answered), answered))

    torch.topk = topk  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.topk = plain
