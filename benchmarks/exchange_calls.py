"""The calls that the exchange benchmark times, on tensors that stay in place, and the check of their results.

Also NCCL's all-gather + reduce-scatter and all-to-all of the same rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from exchange_case import Case, Inputs, factors, rows_between, wanted

from ep_server.exchange.api import Received, View
from ep_server.exchange.nvlink.exchange import NvlinkExchange
from ep_server.exchange.quant import dequantise

# Root mean square error of the sums, relative; a little above what the formats' steps can give.
MOST_ERROR = {"bf16": 0.005, "log10": 0.02, "fp8": 0.04}


class Pair:
    """Dispatch and combine of one case, in every order that is timed."""

    def __init__(self, exchange: NvlinkExchange, case: Case) -> None:
        mine = Inputs.of(case, exchange.spec.rank)
        weights, late = mine.weights.cuda(), case.form == "deepep"
        self.exchange, self.case = exchange, case
        self.given = (mine.x.cuda(), mine.ids.cuda(), None if late else weights)
        self.late = weights if late else None
        self.padded, self.source_map = exchange.empty_padded(), exchange.shapes.source_map()
        self.out = torch.empty_like(self.given[0])
        self.answers = torch.zeros(self.padded[0].shape, dtype=torch.bfloat16, device="cuda")
        self.received: Received | None = None

    def dispatch(self) -> Received:
        self.received = self.exchange.dispatch(
            *self.given, View.PADDED, out=self.padded, source_map=self.source_map
        )
        return self.received

    def send(self) -> Callable[[], Received]:
        """The first half of dispatch; what it returns is the second."""
        pending = self.exchange.dispatch_send(*self.given)
        return lambda: pending.recv(View.PADDED, out=self.padded, source_map=self.source_map)

    def combine(self, wire: str | None = None) -> torch.Tensor:
        assert self.received is not None, "dispatch first"
        options = self._options(wire)
        return self.exchange.combine(self.answers, self.received, self.late, out=self.out, **options)

    def combine_send(self, received: Received, wire: str | None = None) -> Callable[[], torch.Tensor]:
        """The first half of combine; what it returns is the second."""
        pending = self.exchange.combine_send(self.answers, received, self.late, **self._options(wire))
        return lambda: pending.recv(self.out)

    def pair(self) -> None:
        self.dispatch()
        self.combine()

    def halves(self) -> None:
        self.combine_send(self.send()())()

    def _options(self, wire: str | None) -> dict[str, Any]:
        chosen = wire or self.case.wire
        return {} if chosen == "bf16" else {"wire": chosen}

    def poison(self) -> None:
        rows, scales = self.padded
        rows.view(torch.uint8).fill_(0x7F)
        if scales is not None:
            scales.fill_(torch.nan if scales.dtype.is_floating_point else -1)
        self.out.fill_(torch.nan)

    def run_experts(self, received: Received) -> None:
        """Answers every row; rows that none asked for stay NaN."""
        values = received.rows.float()
        if received.scales is not None:
            values = dequantise(received.rows, received.scales)
        mine = factors(self.case)[list(self.exchange.spec.local_experts)].cuda().view(-1, 1, 1)
        self.answers.copy_((values * mine).to(torch.bfloat16))


def check(pair: Pair) -> dict[str, float]:
    """Halves apart and together must give the sums on paper, bit by bit where answers travel as BF16.

    Returns: relative errors against the float64 sum: "<wire> rms", "<wire> max", BF16's always among them.
    Raises: SystemExit, before anything was timed.
    """
    case, rank = pair.case, pair.exchange.spec.rank
    want = wanted(case, rank)
    errors: dict[str, float] = {}
    for wire in dict.fromkeys(("bf16", case.wire)):
        apart = _once(pair, wire, apart=True)
        fused = _once(pair, wire, apart=False)
        if wire == "bf16":
            _same(apart, want.exact, f"rank {rank}: halves apart")
        _same(fused, apart, f"rank {rank}: {wire}, both halves in one kernel")
        errors |= _errors(fused, want.sums, wire)
        if not errors[f"{wire} rms"] < MOST_ERROR[wire]:  # NaN fails too
            raise SystemExit(f"rank {rank}: {wire} error {errors[f'{wire} rms']}; nothing was timed")
    return errors


def _once(pair: Pair, wire: str, *, apart: bool) -> torch.Tensor:
    pair.poison()
    received = pair.send()() if apart else pair.dispatch()
    pair.run_experts(received)
    if apart:
        pair.combine_send(received, wire)()
    else:
        pair.combine(wire)
    pair.exchange.synchronize()
    return pair.out.cpu()


def _same(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    wrong = (got.view(torch.int16) != want.view(torch.int16)).nonzero().tolist()
    if wrong:
        t, h = wrong[0]
        first = f"first at token {t}, channel {h}: {float(got[t, h])}, wanted {float(want[t, h])}"
        raise SystemExit(f"{what}: {len(wrong)} elements are wrong, {first}; nothing was timed")


def _errors(got: torch.Tensor, sums: torch.Tensor, wire: str) -> dict[str, float]:
    off = got.double() - sums
    scale = sums.pow(2).mean().sqrt()
    return {
        f"{wire} rms": float(off.pow(2).mean().sqrt() / scale),
        f"{wire} max": float(off.abs().max() / scale),
    }


def nccl_calls(case: Case, rank: int, group: dist.ProcessGroup) -> dict[str, Callable[[], object]]:
    """Name -> the same routing by NCCL: rows with scales, ids and weights out, BF16 rows back."""
    scales = {"bf16": 0, "fp8_ue8m0": case.hidden // 512 * 4}.get(case.payload, case.hidden // 128 * 4)
    width = case.hidden * (2 if case.payload == "bf16" else 1) + scales + case.top_k * 8
    everyone = case.ranks * case.tokens
    table = rows_between(case)
    to, back = table[rank].tolist(), table[:, rank].tolist()

    def rows(count: int) -> torch.Tensor:
        return torch.zeros(count, width, dtype=torch.uint8, device="cuda")

    def answers(count: int) -> torch.Tensor:
        return torch.zeros(count, case.hidden, dtype=torch.bfloat16, device="cuda")

    mine, all_rows, partial, out = rows(case.tokens), rows(everyone), answers(everyone), answers(case.tokens)
    sent, came, returned, home = rows(sum(to)), rows(sum(back)), answers(sum(back)), answers(sum(to))

    def gather_and_scatter() -> None:
        dist.all_gather_into_tensor(all_rows, mine, group=group)
        dist.reduce_scatter_tensor(out, partial, group=group)

    def all_to_all() -> None:
        dist.all_to_all_single(came, sent, back, to, group=group)
        dist.all_to_all_single(home, returned, to, back, group=group)

    return {"AG+RS": gather_and_scatter, "A2A": all_to_all}
