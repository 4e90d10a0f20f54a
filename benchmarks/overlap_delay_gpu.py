"""One rank of overlap_delay.py on a GPU: captured steps of a shape, over NVLink with an injected delay.

Every step has the same tokens at the same positions, behind a cache of zeros, so steps that run alike must
draw the same. A step is what RankWorker does without running ahead: vote, replay, draw, collect. All graphs
are captured once: the delay is in device memory. Times: ms.
"""

from __future__ import annotations

import os
import time
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
from overlap_modes import BLOCK, RANKS, Measured, Plan, measure_rounds, policies_of

from ep_server.backends.assembly import LoadParams, RankModel, load_model
from ep_server.backends.gpu.assembly import GpuPlan, decode_kernels, gpu_runner
from ep_server.backends.gpu.graphs import GraphKey
from ep_server.backends.gpu.runner import GpuRunner
from ep_server.backends.torch_compute import TorchCompute
from ep_server.compat.deep_ep.bootstrap import group_segment
from ep_server.exchange.api import ExchangeSpec, Payload
from ep_server.exchange.host import open_group
from ep_server.exchange.nvlink.exchange import NvlinkExchange
from ep_server.exchange.spec import control_spec
from ep_server.models.families import read_spec
from ep_server.ranks.devices import rows_of
from ep_server.ranks.overlap import Overlap, Planned, Ran
from ep_server.ranks.vote import Voter
from ep_server.records import Request, Sampling, SeqSlice, StepBatch, Stopping

TIMEOUT_NS = 300_000_000_000  # ranks compile their kernels at different times


class GpuSteps:
    """Captured decode steps of one rank."""

    def __init__(self, runner: GpuRunner, exchange: NvlinkExchange, plan: Plan, context: int) -> None:
        self._runner, self._exchange, self._voter, self._tokens = runner, exchange, Voter(), plan.tokens
        held, first = -(-context // BLOCK), exchange.spec.rank * plan.tokens
        slices = []
        for n in range(plan.tokens):
            number, blocks = first + n + 1, tuple(range(n * held, (n + 1) * held))
            prompt = (0,) * (context - 1)
            runner.add(Request(str(number), number, prompt, Sampling(temperature=0.0), Stopping(1 << 20)))
            slices.append(SeqSlice(number, context - 1, (number % 1000,), blocks, True))
        self._batch = StepBatch(tuple(slices), plan.tokens)

    def run(self, policy: Overlap, into: Measured) -> None:
        """One step."""
        begin, size = time.perf_counter_ns(), self._tokens
        agrees = policy.wants_two(Planned(size, size, size))
        record = self._voter.cast(tokens=size, bucket=size, has_work=True, micro_batch_ok=agrees)
        verdict = self._voter.decide(self._exchange.all_gather(record))
        count = self._runner.micro_batches_of(size, verdict.micro_batches)
        sampled = self._runner.collect(self._runner.launch(self._batch, count, size))
        took = time.perf_counter_ns() - begin
        policy.stepped(Ran(took, size, size, count))
        into.add(took, count, [token.token_id for token in sampled])


def open_exchange(model: RankModel, params: LoadParams, tokens: int, device: torch.device) -> NvlinkExchange:
    """This rank's end. Collective."""
    hidden, top_k = model.spec.hidden, model.spec.router.top_k
    spec = ExchangeSpec(
        params.rank, RANKS, params.placement, tokens, hidden, top_k, Payload.BF16, timeout_ns=TIMEOUT_NS
    )
    control = control_spec(spec)
    segment = group_segment(dist.group.WORLD, control)
    try:
        group = open_group(control, segment)
        return NvlinkExchange(spec, control=group, device=device.index)
    finally:
        os.close(segment)


def captured(model: RankModel, exchange: NvlinkExchange, tokens: int, context: int) -> GpuRunner:
    """A runner with two graphs, of one and of two micro-batches."""
    blocks = tokens * -(-context // BLOCK)
    plan = GpuPlan(blocks, BLOCK, tokens, tokens, blocks, overlap="auto")
    kernels = decode_kernels("auto", model, BLOCK).kernels
    runner = gpu_runner(model, exchange, rows_of(exchange), plan, blocks, kernels)
    runner.graphs.record_only([GraphKey(tokens, 1), GraphKey(tokens, 2)])
    runner.graphs.capture()
    return runner


def gpu_rank_main(rank: int, host: str, folder: str, plan: Plan, parent: Connection, *, context: int) -> None:
    """One rank: measures every delay. host: none."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group(
        "gloo", init_method=f"file://{Path(folder) / 'store'}", rank=rank, world_size=RANKS
    )
    experts = read_spec(folder).router.num_experts
    params = LoadParams(
        folder,
        rank,
        tuple(e * RANKS // experts for e in range(experts)),
        "bfloat16",
        context + 64,
        compute=TorchCompute(device),
        load_format="dummy",
        routing="uniform",
    )
    with torch.inference_mode():
        model = load_model(params)
        exchange = open_exchange(model, params, plan.tokens, device)
        delay = exchange.inject_delay(0.0)  # captured steps have its kernels
        steps = GpuSteps(captured(model, exchange, plan.tokens, context), exchange, plan, context)
        if rank == 0:
            print(torch.cuda.get_device_name(device), f"{model.spec.num_layers} layers, context {context}")
        for one_way in plan.delays:
            parent.send(None)  # the ranks begin together
            parent.recv()
            policies = policies_of(rank, [plan.tokens])
            delay.set(one_way / 1e3)
            began, before = time.perf_counter(), delay.compare_clocks()
            table = measure_rounds(plan, one_way, policies, steps.run, delay.compare_clocks)
            drift = max(abs(a - b) for a, b in zip(delay.compare_clocks(), before, strict=True))
            if rank == 0:
                seconds = time.perf_counter() - began
                print(f"{one_way} ms: the clocks drifted apart by {drift / 1e3:.1f} us in {seconds:.1f} s")
            parent.send(table)
        exchange.synchronize()
        exchange.barrier()
        exchange.close()
    dist.destroy_process_group()
