"""[6] Cuts the contexts of a decode step into shares, once for all layers (csrc/kernels/hopper/shares).

Only the device knows how long contexts are. One that is much longer than the others is read by many teams,
and the last to finish joins what they leave.
"""

from __future__ import annotations

from typing import Any

import torch

from ep_server.backends.gpu.capability import native

_WORDS = 8  # of a share
_PAIRS = 2  # (share, KV head) pairs of contexts that are cut, for each team, at most


class ContextShares:
    """The shares of some contexts. Enqueues the cuts on the current stream when made; can be captured.

    native: for the kernels' arguments. sums, stats: what shares leave of contexts that are cut, float32:
    [pairs, group, dim] unnormalised sums, [pairs, group, 2] maximum and total, by (share, KV head).
    """

    def __init__(
        self,
        lengths: torch.Tensor,
        slots: torch.Tensor,
        *,
        kv_heads: int,
        group: int,
        dim: int,
        teams: int,
        tile: int,
        least: int,
    ) -> None:
        """
        Args:
            lengths: [S] int32, with the newest token. slots: [S] int32, of that token.
            kv_heads, group, dim: query heads of a KV head; channels of a value.
            teams: that process (share, KV head) pairs at the same time.
            tile: positions. least: tiles that a share should have; some have a quarter less.
        """
        count, device, module = len(lengths), lengths.device, native()
        pairs = _PAIRS * teams
        most = count + pairs // kv_heads
        self.at = torch.empty(most, _WORDS, dtype=torch.int32, device=device)
        self.counts = torch.empty(1 + pairs, dtype=torch.int32, device=device)  # in all, then finished ones
        self.sums = torch.empty(pairs, group, dim, dtype=torch.float32, device=device)
        self.stats = torch.empty(pairs, group, 2, dtype=torch.float32, device=device)
        at = self.counts.data_ptr()
        self.native: Any = module.Shares(
            at=self.at.data_ptr(), most=most, total=at, finished=at + self.counts.element_size()
        )
        self.native.cut(
            stream=torch.cuda.current_stream(device).cuda_stream,
            device=device.index,
            lengths=lengths.data_ptr(),
            slots=slots.data_ptr(),
            sequences=count,
            heads=kv_heads,
            teams=teams,
            tile=tile,
            least=least,
        )
