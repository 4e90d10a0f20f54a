"""Programs with DeepEP's high-throughput calls that need a GPU's streams, graphs or size."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ep_server.compat import deep_ep
from tests.support.compare import assert_equal
from tests.support.exchange.normal_programs import HIDDEN, TOKENS, NormalUser

CYCLES = 20_000_000  # of a GPU's clock, about 10 ms


def done(user: NormalUser) -> None:
    torch.cuda.synchronize()
    dist.barrier(user.group)
    user.buffer.destroy()


def captured(group: dist.ProcessGroup) -> None:
    """Dispatch and combine in a graph: replays follow the inputs, beside calls outside of it."""
    user = NormalUser(group, "cuda")
    worst, first = sum(TOKENS) + 1, user.everyone("uniform", 0)
    mine = first[user.rank]
    x, layout = user.rows(mine, "bf16"), user.layout(mine)
    choices = {"topk_idx": mine.ids.to(user.device), "topk_weights": mine.weights.to(user.device)}

    def pair() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        recv_x, ids, _, _, handle, _ = user.buffer.dispatch(x, **layout, **choices, num_worst_tokens=worst)
        scaled = (recv_x.float() * (1 + user.rank / 8)).to(torch.bfloat16)
        combined, _, _ = user.buffer.combine(scaled, handle)
        return recv_x, ids, combined

    pair()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recv_x, ids, combined = pair()
    for seed in range(4):
        everyone = user.everyone(("uniform", "dropped")[seed % 2], seed)
        mine = everyone[user.rank]
        x.copy_(mine.bf16)
        choices["topk_idx"].copy_(mine.ids)
        choices["topk_weights"].copy_(mine.weights)
        for name, tensor in user.layout(mine).items():
            layout[name].copy_(tensor)
        graph.replay()
        rows = user.expected(everyone, "ids", user.rank).shape[0]
        user.check_received(everyone, "bf16", recv_x[:rows])
        assert_equal(ids[:rows].cpu(), user.local_ids(everyone, user.rank), "ids")
        assert (ids[rows:] == -1).all()
        assert_equal(combined.cpu(), user.sums(everyone, 0), "combined")
        received, _, _, _, handle, _ = user.buffer.dispatch(user.rows(mine, "fp8"), **user.layout(mine))
        user.check_received(everyone, "fp8", received)
        user.check_combine(everyone, handle)
    done(user)


def streams(group: dist.ProcessGroup) -> None:
    """Asynchronous calls behind slow work; inputs and results are freed as early as a caller may."""
    user = NormalUser(group, "cuda")
    everyone = user.everyone("uniform", 1)
    mine = everyone[user.rank]
    layout = user.layout(mine)
    found = []
    for round in range(6):
        x = torch.full((mine.bf16.shape[0], HIDDEN), torch.nan, dtype=torch.bfloat16, device="cuda")
        torch.cuda._sleep(CYCLES)
        x.copy_(user.rows(mine, "bf16"))
        before = user.buffer.capture() if round % 2 else None
        recv_x, _, _, _, handle, event = user.buffer.dispatch(
            x, **layout, async_finish=True, previous_event=before, allocate_on_comm_stream=True
        )
        del x
        torch.full((mine.bf16.shape[0], HIDDEN), torch.nan, dtype=torch.bfloat16, device="cuda")
        event.current_stream_wait()
        scaled = (recv_x.float() * (1 + user.rank / 8)).to(torch.bfloat16)
        before = user.buffer.capture()
        combined, _, event = user.buffer.combine(scaled, handle, async_finish=True, previous_event=before)
        del scaled, recv_x
        with event:
            torch.cuda._sleep(CYCLES // 10)
        found.append(combined)
    for combined in found:
        assert_equal(combined.cpu(), user.sums(everyone, 0), "combined")
    done(user)


def many_rows(group: dist.ProcessGroup) -> None:
    """4,096 tokens of 7,168 channels, again and again, with few and many multiprocessors."""
    user = NormalUser(group, "cuda", heap=1 << 30)
    everyone = user.everyone("uniform", 5, hidden=7168, tokens=4096)
    mine = everyone[user.rank]
    layout = user.layout(mine)
    results = user.results(everyone, user.rank).to(user.device)
    sums = user.sums(everyone, 0).to(user.device)
    wanted = {kind: user.expected(everyone, kind, user.rank).to(user.device) for kind in ("bf16", "fp8")}
    for sms in (1, 24, 132):
        config = deep_ep.Config(sms)
        for kind in ("bf16", "fp8", "fp8_columns"):
            recv_x, _, _, _, handle, _ = user.buffer.dispatch(user.rows(mine, kind), **layout, config=config)
            found = recv_x[0] if isinstance(recv_x, tuple) else recv_x
            known = wanted[kind.removesuffix("_columns")]
            assert torch.equal(found.view(torch.uint8), known.view(torch.uint8)), (sms, kind)
        for _ in range(20):
            combined, _, _ = user.buffer.combine(results, handle, config=config)
            assert torch.equal(combined, sums), sms
    done(user)
