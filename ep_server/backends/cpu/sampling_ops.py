"""Row-wise tensor arithmetic of the sampler: edits, filters and draws from a batch of logits.

Every function treats each row as if it were alone, bit for bit, so a request's tokens do not depend on its
neighbours. Shapes: N rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

_BLOCK = 64  # argmax and draw look at block maxima and sums first: those reductions vectorise
_TOP_CANDIDATES = 128  # a nucleus larger than this is found by bisection instead of top-k
_ONE_AS_BITS = 0x3F800000  # float32 1.0; non-negative floats order as their bit patterns


@dataclass(frozen=True, slots=True)
class TokenList:
    """A ragged list of distinct token ids per row, flattened.

    rows: [M] int64, row of each entry. ids: [M] int64. values: [M] float32, meaning given by its user.
    """

    rows: torch.Tensor
    ids: torch.Tensor
    values: torch.Tensor

    @staticmethod
    def of(parts: Sequence[tuple[int, torch.Tensor, torch.Tensor]], device: torch.device) -> TokenList:
        """Flattens (row, ids [m] int64, values [m] float32) of at least one row."""
        rows, ids, values = zip(*parts, strict=True)
        flat_rows = torch.repeat_interleave(torch.tensor(rows), torch.tensor([len(part) for part in ids]))
        return TokenList(flat_rows.to(device), torch.cat(ids).to(device), torch.cat(values).to(device))

    def spread(self, per_row: torch.Tensor) -> torch.Tensor:
        """[N] -> [M], the value of each entry's row."""
        return per_row[self.rows]


def penalize(
    logits: torch.Tensor,
    seen: TokenList,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
) -> None:
    """Applies the three penalties in place.

    Args:
        logits: [N, V] float32.
        seen: ids of prompt and output; values count how often the id is in the output.
        repetition, presence, frequency: [N] float32; 1, 0, 0 change nothing.
    """
    values = logits[seen.rows, seen.ids]
    factor = seen.spread(repetition)
    values = torch.where(values > 0, values / factor, values * factor)
    values = values - seen.spread(frequency) * seen.values - seen.spread(presence) * (seen.values > 0)
    logits[seen.rows, seen.ids] = values


def add_bias(logits: torch.Tensor, bias: TokenList) -> None:
    """Adds `bias.values` to [N, V] float32 logits in place; -inf bans a token."""
    logits[bias.rows, bias.ids] += bias.values


def argmax_rows(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Maximum and its lowest index per row.

    Returns: values [N] (NaN if the row holds one), ids [N] int64.
    """
    blocks = _blocked(logits, float("-inf"))
    maxima = blocks.amax(-1)
    values, block = maxima.max(-1)
    inside = blocks.gather(1, block[:, None, None].expand(-1, 1, _BLOCK))[:, 0].argmax(-1)
    return values, block * _BLOCK + inside


def relative_weights(logits: torch.Tensor, maxima: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """Unnormalised probabilities exp((logits - maxima) / temperature) in [0, 1]; the likeliest is 1.

    Args:
        logits: [N, V] float32. maxima: [N], finite. temperature: [N] float32, > 0.
    """
    # One that underflows would make 0 / 0 of the likeliest token, an infinite one inf / inf of a banned one.
    return ((logits - maxima[:, None]) / temperature.clamp(1e-30, 1e30)[:, None]).exp_()


def filter_weights(
    weights: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> None:
    """Zeroes what the filters remove, in place: top-k, then top-p of what is left, then min-p.

    Equal weights are kept or removed together. The likeliest token always stays.

    Args:
        weights: [N, V] float32 of relative_weights(). top_k: [N] int64, 0 = off. top_p, min_p: [N] float32.
    """
    vocab = weights.shape[1]
    top_k = torch.where((top_k <= 0) | (top_k > vocab), vocab, top_k)
    limited = top_k < vocab
    nucleus = top_p < 1
    # A row reads the same leading values whatever the others ask for, so one call serves all.
    deepest = int(torch.where(limited, top_k, 0).max()) if bool(limited.any()) else 0
    if bool(nucleus.any()):
        deepest = max(deepest, _TOP_CANDIDATES)
    if deepest:
        leading = weights.topk(min(deepest, vocab), dim=-1).values
        cutoff = leading.gather(1, (top_k - 1).clamp(max=leading.shape[1] - 1)[:, None])
        weights.masked_fill_((weights < cutoff) & limited[:, None], 0)
        if bool(nucleus.any()):
            cutoff = _nucleus_cutoff(weights, leading[:, :_TOP_CANDIDATES], top_p)
            weights.masked_fill_((weights < cutoff[:, None]) & nucleus[:, None], 0)
    weights.masked_fill_(weights < min_p[:, None], 0)


def _nucleus_cutoff(weights: torch.Tensor, leading: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Smallest weight v per row such that the weights above v sum to less than top_p of all: [N]."""
    mass = weights.sum(-1) * top_p
    before = leading.cumsum(-1) - leading
    count = (before < mass[:, None]).sum(-1).clamp(min=1)
    cutoff = leading.gather(1, count[:, None] - 1)[:, 0]
    wide = count == leading.shape[1]
    if leading.shape[1] < weights.shape[1] and bool(wide.any()):
        cutoff[wide] = _bisect_cutoff(weights[wide], mass[wide])
    return cutoff


def _bisect_cutoff(weights: torch.Tensor, mass: torch.Tensor) -> torch.Tensor:
    """As _nucleus_cutoff, by bisection over the bit patterns of [0, 1]: exact, 30 passes, no sort."""
    low = torch.zeros(len(weights), dtype=torch.int32, device=weights.device)
    high = torch.full_like(low, _ONE_AS_BITS)
    while bool((low < high).any()):
        middle = (low + high) // 2
        cutoff = middle.view(torch.float32)
        above = torch.where(weights > cutoff[:, None], weights, 0).sum(-1)
        enough = above < mass
        high = torch.where(enough, middle, high)
        low = torch.where(enough, low, middle + 1)
    return high.view(torch.float32)


def draw(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Draws one id per row by inverting the cumulative distribution, in two steps: block, then id.

    Args:
        weights: [N, V] float32, >= 0, with a positive sum.
        uniforms: [N] float64 in [0, 1), one per row.
    Returns: [N] int64; never an id of weight 0.
    """
    blocks = _blocked(weights, 0.0)
    block_cdf = blocks.sum(-1).cumsum(-1, dtype=torch.float64)
    target = uniforms[:, None] * block_cdf[:, -1:]
    block = _first_above(block_cdf, target)
    start = torch.where(block > 0, block_cdf.gather(1, (block - 1).clamp(min=0)), 0)
    chosen = blocks.gather(1, block[:, :, None].expand(-1, 1, _BLOCK))[:, 0]
    inside = _first_above(chosen.cumsum(-1, dtype=torch.float64), target - start)
    return (block * _BLOCK + inside)[:, 0]


def _first_above(cdf: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """[N, M], [N, 1] -> [N, 1] first index whose cdf exceeds target; rounding cannot pass the end."""
    last = torch.nextafter(cdf[:, -1:], torch.zeros_like(target))
    return torch.searchsorted(cdf, torch.minimum(target, last), right=True)


def _blocked(rows: torch.Tensor, filler: float) -> torch.Tensor:
    """[N, V] -> [N, B, _BLOCK], padded with `filler` where V is no multiple."""
    missing = -rows.shape[1] % _BLOCK
    if missing:
        rows = torch.nn.functional.pad(rows, (0, missing), value=filler)
    return rows.reshape(len(rows), -1, _BLOCK)
