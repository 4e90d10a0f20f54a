"""Programs with DeepEP's high-throughput calls, on CPU and CUDA tensors. Each rank checks its own results.

Every rank makes the inputs of all ranks, so the oracle is plain torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ep_server.compat import deep_ep
from ep_server.errors import InvalidArgument
from tests.support.compare import assert_equal
from tests.support.exchange import buffer_user
from tests.support.exchange.conformance import failure_of

HIDDEN, TOP_K, NUM_EXPERTS, GROUP = 256, 3, 8, 128
TOKENS = (5, 33, 0, 16)  # of each rank
HEAP = 32 << 20
FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Sent:
    """What one rank sends, on the CPU: rows [T, H], scales [T, H / 128], choices [T, K]."""

    bf16: torch.Tensor
    fp8: torch.Tensor
    scales: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    bias: torch.Tensor

    def ranks(self, num_ranks: int) -> torch.Tensor:
        """[T, R] bool, by the loop that anyone would write."""
        share = NUM_EXPERTS // num_ranks
        found = [
            [any(r * share <= e < (r + 1) * share for e in row) for r in range(num_ranks)]
            for row in self.ids.tolist()
        ]
        return torch.tensor(found, dtype=torch.bool).view(-1, num_ranks)


def make_sent(rank: int, routing: str, seed: int, hidden: int = HIDDEN, tokens: int | None = None) -> Sent:
    """Of a rank. routing: uniform, one_rank (rank 0 gets all), dropped (ids of -1) or nobody."""
    random = torch.Generator().manual_seed(1000 * seed + rank)
    count = TOKENS[rank % len(TOKENS)] if tokens is None else tokens
    ids = (
        torch.stack([torch.randperm(NUM_EXPERTS, generator=random)[:TOP_K] for _ in range(count)])
        if count
        else torch.empty(0, TOP_K, dtype=torch.int64)
    )
    if routing == "one_rank":
        ids = torch.arange(TOP_K).expand(count, TOP_K) % max(NUM_EXPERTS // 4, 1)
    if routing == "dropped":
        ids = torch.where(torch.rand(ids.shape, generator=random) < 0.6, -1, ids)
    if routing == "nobody":
        ids = torch.full_like(ids, -1)
    return Sent(
        bf16=torch.randn(count, hidden, generator=random).to(torch.bfloat16),
        fp8=torch.randn(count, hidden, generator=random).to(FP8),
        scales=torch.rand(count, hidden // GROUP, generator=random),
        ids=ids.contiguous(),
        weights=torch.rand(count, TOP_K, generator=random),
        bias=torch.randn(count, hidden, generator=random).to(torch.bfloat16),
    )


class NormalUser:
    """A caller of the library: one Buffer in high-throughput mode."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: str = "cpu",
        heap: int = HEAP,
        seconds: float = 60.0,
        network: deep_ep.Network | None = None,
    ) -> None:
        self.group, self.rank, self.num_ranks = group, group.rank(), group.size()
        self.device = torch.device("cpu")
        if device == "cuda":
            self.device = buffer_user.gpu_device(self.rank)
        self.buffer = deep_ep.Buffer(
            group, heap, explicitly_destroy=True, timeout_seconds=seconds, network=network
        )
        self.share = NUM_EXPERTS // self.num_ranks

    def synchronize(self) -> None:
        """Waits for what was enqueued."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def everyone(self, routing: str, seed: int, **sizes: int) -> list[Sent]:
        return [make_sent(rank, routing, seed, **sizes) for rank in range(self.num_ranks)]

    def rows(self, sent: Sent, kind: str) -> Any:
        """x as a caller gives it."""
        if kind == "bf16":
            return sent.bf16.to(self.device)
        scales = sent.scales.to(self.device)
        if kind == "fp8_columns":
            scales = scales.T.contiguous().T
        return sent.fp8.to(self.device), scales

    def layout(self, sent: Sent) -> dict[str, torch.Tensor]:
        """The arguments that get_dispatch_layout makes, checked."""
        ids = sent.ids.to(self.device)
        ranks, nothing, experts, in_rank, _ = self.buffer.get_dispatch_layout(ids, NUM_EXPERTS)
        known = sent.ranks(self.num_ranks)
        assert nothing is None
        assert_equal(in_rank.cpu(), known, "is_token_in_rank")
        assert ranks.tolist() == known.sum(0).tolist()
        assert experts.tolist() == [int((sent.ids == e).sum()) for e in range(NUM_EXPERTS)]
        return {"num_tokens_per_rank": ranks, "is_token_in_rank": in_rank, "num_tokens_per_expert": experts}

    def expected(self, everyone: list[Sent], field: str, rank: int) -> torch.Tensor:
        """What a rank receives of one field, in the order of (source, token)."""
        return torch.cat([getattr(s, field)[s.ranks(self.num_ranks)[:, rank]] for s in everyone])

    def local_ids(self, everyone: list[Sent], rank: int) -> torch.Tensor:
        ids = self.expected(everyone, "ids", rank) - rank * self.share
        return torch.where((ids >= 0) & (ids < self.share), ids, -1)

    def check_received(self, everyone: list[Sent], kind: str, recv_x: Any) -> None:
        if kind == "bf16":
            assert_equal(recv_x.cpu(), self.expected(everyone, "bf16", self.rank), "recv_x")
            return
        values, scales = recv_x
        wanted = self.expected(everyone, "fp8", self.rank)
        assert_equal(values.cpu().view(torch.uint8), wanted.view(torch.uint8), "recv_x[0]")
        assert scales.is_contiguous()
        assert_equal(scales.cpu(), self.expected(everyone, "scales", self.rank), "recv_x[1]")

    def check_choices(self, everyone: list[Sent], ids: torch.Tensor, weights: torch.Tensor) -> None:
        wanted = self.local_ids(everyone, self.rank)
        assert_equal(ids.cpu(), wanted, "recv_topk_idx")
        known = torch.where(wanted >= 0, self.expected(everyone, "weights", self.rank), 0.0)
        assert_equal(weights.cpu(), known, "recv_topk_weights")

    def check_handle(self, everyone: list[Sent], handle: Any) -> None:
        sent = torch.stack([s.ranks(self.num_ranks).sum(0) for s in everyone])
        assert handle[0].tolist() == sent.cumsum(0).tolist()
        known = [s.ranks(self.num_ranks)[:, self.rank].nonzero().view(-1) for s in everyone]
        assert handle[3].tolist() == torch.cat(known).tolist()
        in_rank = everyone[self.rank].ranks(self.num_ranks)
        assert_equal(handle[4].cpu(), in_rank, "handle[4]")
        numbers = torch.where(in_rank, in_rank.cumsum(0) - 1, -1)
        assert handle[5].tolist() == numbers.tolist()

    def counts(self, everyone: list[Sent], alignment: int) -> list[int]:
        ids = self.local_ids(everyone, self.rank)
        found = [int((ids == e).sum()) for e in range(self.share)]
        return [-(-count // alignment) * alignment for count in found]

    def results(self, everyone: list[Sent], rank: int) -> torch.Tensor:
        """What the experts of a rank make of its rows: other bits on every rank."""
        return (self.expected(everyone, "bf16", rank).float() * (1 + rank / 8)).to(torch.bfloat16)

    def sums(self, everyone: list[Sent], biases: int) -> torch.Tensor:
        """float32, in the order bias, then ranks; rounded once."""
        mine = everyone[self.rank]
        total = torch.zeros(mine.bf16.shape)
        for _ in range(biases):
            total += mine.bias.float()
        for rank in range(self.num_ranks):
            to = mine.ranks(self.num_ranks)[:, rank]
            total[to] += (mine.bf16[to].float() * (1 + rank / 8)).to(torch.bfloat16).float()
        return total.to(torch.bfloat16)

    def check_combine(self, everyone: list[Sent], handle: Any, biases: int = 0, **options: Any) -> None:
        x, mine = self.results(everyone, self.rank).to(self.device), everyone[self.rank]
        weights = self.expected(everyone, "weights", self.rank).to(self.device) if biases != 1 else None
        bias = mine.bias.to(self.device)
        options["bias"] = (None, bias, (bias, bias))[biases]
        combined, sums, event = self.buffer.combine(x, handle, topk_weights=weights, **options)
        if options.get("async_finish"):
            event.current_stream_wait()
        assert_equal(combined.cpu(), self.sums(everyone, biases), "combined_x")
        if weights is None:
            assert sums is None
            return
        assert sums is not None
        known = torch.zeros(mine.weights.shape)
        for rank in range(self.num_ranks):
            to = mine.ranks(self.num_ranks)[:, rank]
            known[to] += mine.weights[to]
        assert_equal(sums.cpu(), known, "combined_topk_weights")


def cases() -> Iterator[tuple[str, str, bool]]:
    yield from product(
        ("bf16", "fp8", "fp8_columns"), ("uniform", "one_rank", "dropped", "nobody"), (False, True)
    )


def pairs(user: NormalUser) -> None:
    """Every kind of row and routing, in new and old routes, with and without choices, events and biases."""
    for seed, (kind, routing, choices) in enumerate(cases()):
        everyone = user.everyone(routing, seed)
        mine = everyone[user.rank]
        options: dict[str, Any] = {"async_finish": seed % 2 == 0, "config": deep_ep.Config(2 + seed % 3)}
        if seed % 3 == 0:
            options["previous_event"] = user.buffer.capture()
        given: dict[str, Any] = {"x": user.rows(mine, kind), **user.layout(mine), **options}
        if choices:
            given |= {"topk_idx": mine.ids.to(user.device), "topk_weights": mine.weights.to(user.device)}
        alignment = 1 + 3 * (seed % 2)
        recv_x, ids, weights, counts, handle, event = user.buffer.dispatch(
            **given, expert_alignment=alignment
        )
        if options["async_finish"]:
            event.current_stream_wait()
        user.check_received(everyone, kind, recv_x)
        user.check_handle(everyone, handle)
        assert counts == user.counts(everyone, alignment)
        if choices:
            user.check_choices(everyone, ids, weights)
        else:
            assert ids is weights is None
        again, *rest, event = user.buffer.dispatch(given["x"], handle=tuple(handle), **options)
        if options["async_finish"]:
            event.current_stream_wait()
        assert rest == [None] * 4
        user.check_received(everyone, kind, again)
        user.check_received(everyone, kind, recv_x)
        user.check_combine(everyone, handle, seed % 3, **options)


def worst_case(user: NormalUser) -> None:
    """Room for more rows than arrive: the host waits for nothing, ids behind the last row are -1."""
    for seed, kind in enumerate(("bf16", "fp8")):
        everyone = user.everyone("dropped", seed)
        mine, worst = everyone[user.rank], sum(TOKENS) + 3
        given = {"topk_idx": mine.ids.to(user.device), "topk_weights": mine.weights.to(user.device)}
        recv_x, ids, weights, counts, handle, _ = user.buffer.dispatch(
            user.rows(mine, kind), **user.layout(mine), **given, num_worst_tokens=worst
        )
        rows = user.expected(everyone, "ids", user.rank).shape[0]
        parts = recv_x if isinstance(recv_x, tuple) else (recv_x,)
        assert counts == [] and all(part.shape[0] == worst for part in (*parts, ids, weights))
        cut = tuple(part[:rows] for part in parts)
        user.check_received(everyone, kind, cut if kind == "fp8" else cut[0])
        user.check_choices(everyone, ids[:rows], weights[:rows])
        assert (ids[rows:] == -1).all()
        x = torch.full((worst, HIDDEN), torch.nan, dtype=torch.bfloat16, device=user.device)
        x[:rows] = user.results(everyone, user.rank).to(user.device)
        combined, _, _ = user.buffer.combine(x, handle)
        assert_equal(combined.cpu(), user.sums(everyone, 0), "combined_x")


def kept_tensors(user: NormalUser) -> None:
    """What was received stays as it is, however many calls follow, also when memory is short."""
    kept = []
    for seed in range(40):
        everyone = user.everyone("uniform", seed)
        mine = everyone[user.rank]
        recv_x, _, _, _, handle, _ = user.buffer.dispatch(user.rows(mine, "bf16"), **user.layout(mine))
        kept.append((everyone, recv_x, handle))
        if seed % 3 == 2:
            del kept[seed // 3]
    for everyone, recv_x, handle in kept:
        user.check_received(everyone, "bf16", recv_x)
        user.check_combine(everyone, handle)


def long_rows(user: NormalUser) -> None:
    """Rows of many pieces, and more of them than a block of the GPU takes at once, many times."""
    for hidden, tokens in ((24 * 1024, 3), (1024, 61), (8 * 1024, 150)):
        everyone = user.everyone("uniform", 7, hidden=hidden, tokens=tokens)
        mine = everyone[user.rank]
        recv_x, _, _, _, handle, _ = user.buffer.dispatch(user.rows(mine, "bf16"), **user.layout(mine))
        user.check_received(everyone, "bf16", recv_x)
        user.check_combine(everyone, handle, 2)


def misuse(user: NormalUser) -> None:
    """Wrong arguments are refused before anything is sent, and change nothing."""
    everyone = user.everyone("uniform", 3)
    mine, buffer = everyone[user.rank], user.buffer
    x, known = user.rows(mine, "bf16"), user.layout(mine)
    ids, weights = mine.ids.to(user.device), mine.weights.to(user.device)
    _, _, _, _, handle, _ = buffer.dispatch(x, **known)
    answers = user.results(everyone, user.rank).to(user.device)
    without = {key: value for key, value in known.items() if key != "is_token_in_rank"}
    calls: list[tuple[str, Callable[[], Any]]] = [
        (
            "num_experts",
            lambda: buffer.get_dispatch_layout(ids, NUM_EXPERTS + 1 if user.num_ranks > 1 else 0),
        ),
        ("topk_idx", lambda: buffer.get_dispatch_layout(ids.to(torch.int32), NUM_EXPERTS)),
        ("x", lambda: buffer.dispatch(x.float(), **known)),
        ("x", lambda: buffer.dispatch((x, x.float()), **known)),
        ("is_token_in_rank", lambda: buffer.dispatch(x, **without)),
        ("topk_idx, topk_weights", lambda: buffer.dispatch(x, **known, topk_idx=ids)),
        ("topk_idx", lambda: buffer.dispatch(x, handle=handle, topk_idx=ids, topk_weights=weights)),
        ("expert_alignment", lambda: buffer.dispatch(x, **known, expert_alignment=0)),
        ("num_worst_tokens", lambda: buffer.dispatch(x, **known, num_worst_tokens=-1)),
        ("handle", lambda: buffer.combine(answers, ())),
        ("x", lambda: buffer.combine(answers[:-1] if len(answers) else answers.float(), handle)),
        ("bias", lambda: buffer.combine(answers, handle, bias=x.float())),
        ("topk_idx", lambda: buffer.get_dispatch_layout(None, NUM_EXPERTS)),  # type: ignore[arg-type]
        ("previous_event", lambda: buffer.dispatch(x, **known, previous_event="x")),  # type: ignore[arg-type]
        ("config", lambda: buffer.combine(answers, handle, config=24)),  # type: ignore[arg-type]
        ("num_sms", lambda: deep_ep.Config(0)),
        ("new_num_sms", lambda: deep_ep.Buffer.set_num_sms(0)),
    ]
    if user.device.type == "cpu" and len(ids):  # GPUs take them for no expert
        far = torch.full_like(ids, NUM_EXPERTS)
        calls.append(("topk_idx", lambda: buffer.get_dispatch_layout(far, NUM_EXPERTS)))
        calls.append(("topk_idx", lambda: buffer.dispatch(x, **known, topk_idx=far, topk_weights=weights)))
    for field, call in calls:
        with pytest.raises(InvalidArgument) as caught:
            call()
        assert caught.value.field.startswith(field), (field, str(caught.value))
    user.check_combine(everyone, handle)


PROGRAMS = {each.__name__: each for each in (pairs, worst_case, kept_tensors, long_rows, misuse)}


def run_programs(
    group: dist.ProcessGroup, device: str, network: deep_ep.Network | None = None
) -> dict[str, str]:
    """Program -> why it failed; empty if it did not."""
    user = NormalUser(group, device, network=network)
    found = {name: failure_of(partial(program, user)) for name, program in PROGRAMS.items()}
    dist.barrier(group)
    user.buffer.destroy()
    return found
