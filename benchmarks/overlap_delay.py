"""What two micro-batches hide of a network's latency: steps with overlap off, on and auto, in turns.

    python benchmarks/overlap_delay.py
    python benchmarks/overlap_delay.py --device cuda --model benchmarks/shapes/qwen3-30b-a3b

Two hosts (network namespaces, so it needs root) with one CPU rank each, over libfabric; with --domain lo, two
processes over loopback instead. The fabric layer makes messages visible late by each delay; the sender does
not wait. All modes must draw the same tokens. Ranks spin while they wait, so that the time to wake a process
is not measured. With --device cuda, two GPUs over NVLink, whose exchange makes rows visible late: see
overlap_delay_gpu.py. Times: ms.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from overlap_modes import (
    BLOCK,
    RANKS,
    Measured,
    Plan,
    Table,
    check_same,
    check_same_by_way,
    measure_rounds,
    policies_of,
    report,
)

from ep_server.backends.assembly import LoadParams, RankModel, load_model
from ep_server.backends.cpu.runner import ModelRunner
from ep_server.backends.cpu.sampler import Sampler
from ep_server.exchange.api import Exchange, ExchangeSpec
from ep_server.exchange.fabric.link import FabricLink
from ep_server.exchange.fabric.settings import FabricOptions
from ep_server.exchange.spec import Waiting
from ep_server.models.families import read_spec
from ep_server.ranks.overlap import Overlap, Planned, Ran
from ep_server.ranks.vote import Voter
from ep_server.records import Request, Sampling, SeqSlice, StepBatch, Stopping
from ep_server.testing import namespaces
from ep_server.testing.namespaces import Hosts

CONTEXT = 16
SPIN_US = 20_000
LEAST = 1e-9  # s, of delay 0: what makes messages late then runs too, and is not taken for the delay
SHAPE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "dtype": "bfloat16",
    "eos_token_id": 0,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 512,
    "intermediate_size": 512,
    "max_position_embeddings": 64,
    "mlp_only_layers": [],
    "moe_intermediate_size": 256,
    "norm_topk_prob": True,
    "num_attention_heads": 8,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 8,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "vocab_size": 512,
}


Gather = Callable[[object], list[object]]


class Steps:
    """Decode steps of one rank: always at the same position, each with the tokens that the last one drew."""

    def __init__(self, runner: ModelRunner, exchange: Exchange, voter: Voter, tokens: int) -> None:
        self._runner, self._exchange, self._voter = runner, exchange, voter
        self._blocks = [(2 * n, 2 * n + 1) for n in range(tokens)]
        self._next: list[int] = []

    def prefill(self) -> None:
        """Fills the cache of every sequence; one sequence at a time, since steps have few rows."""
        rank = self._exchange.spec.rank
        self._next = []
        for number, blocks in enumerate(self._blocks, start=1):
            prompt = tuple((rank * 131 + number * 7 + i) % 500 for i in range(CONTEXT))
            self._runner.add(Request(str(number), number, prompt, Sampling(temperature=0.0), Stopping(2)))
            batch = StepBatch((SeqSlice(number, 0, prompt, blocks, True),), CONTEXT)
            self._next += [token.token_id for token in self._runner.run(batch)]
        self._first = list(self._next)

    def restart(self) -> None:
        """The next step is the first one again."""
        self._next = list(self._first)

    def run(self, policy: Overlap, into: Measured) -> None:
        """One step, as RankWorker.step does it: vote, run, collect."""
        slices = tuple(
            SeqSlice(number, CONTEXT, (token,), blocks, True)
            for number, (token, blocks) in enumerate(zip(self._next, self._blocks, strict=True), start=1)
        )
        count, begin = len(slices), time.perf_counter_ns()
        agrees = policy.wants_two(Planned(count, count))
        record = self._voter.cast(tokens=count, has_work=True, micro_batch_ok=agrees)
        verdict = self._voter.decide(self._exchange.all_gather(record))
        sampled = self._runner.collect(self._runner.launch(StepBatch(slices, count), verdict.micro_batches))
        took = time.perf_counter_ns() - begin
        policy.stepped(Ran(took, max(verdict.tokens), micro_batches=verdict.micro_batches))
        self._next = [token.token_id for token in sampled]
        into.add(took, verdict.micro_batches, self._next)


def measure(plan: Plan, model: RankModel, spec: ExchangeSpec, delay: float, gather: Gather) -> Table:
    """All modes at one delay. Collective."""
    options = FabricOptions(domain=plan.domain or namespaces.DEVICE, delay_seconds=max(delay / 1e3, LEAST))
    link = FabricLink(spec, options, Waiting(SPIN_US))
    exchange = link.exchange()
    try:
        link.connect(gather(link.address), round(delay * 1000) + 1)  # type: ignore[arg-type]
        exchange.barrier()
        runner = model.runner(exchange, Sampler(model.spec.vocab_size), 2 * plan.tokens, BLOCK)
        steps = Steps(runner, exchange, Voter(), plan.tokens)
        steps.prefill()
        table = measure_rounds(plan, delay, policies_of(spec.rank), steps.run, steps.restart)
        exchange.barrier()
        return table
    finally:
        exchange.close()


def rank_main(rank: int, host: str, folder: str, plan: Plan, parent: Connection) -> None:
    """One rank: enters its namespace and measures every delay."""
    if host:
        namespaces.enter(host)
    torch.set_num_threads(1)
    shape = read_spec(folder)
    experts = shape.router.num_experts
    placement = tuple(e * RANKS // experts for e in range(experts))
    spec = ExchangeSpec(rank, RANKS, placement, max(plan.tokens, CONTEXT), shape.hidden, shape.router.top_k)
    model = load_model(LoadParams(folder, rank, placement, load_format="dummy"))

    def gather(mine: object) -> list[object]:
        parent.send(mine)
        return list(parent.recv())

    with torch.inference_mode():
        for delay in plan.delays:
            parent.send(measure(plan, model, spec, delay, gather))


def run(plan: Plan, main: Callable[..., None], config: dict[str, Any], *, hosts: bool) -> list[Table]:
    """By rank: every mode at every delay.

    Args:
        main: of a rank: rank, host, folder of config.json, plan, pipe. hosts: a network namespace for each.
    """
    context = multiprocessing.get_context("spawn")
    with Hosts(RANKS) if hosts else nullcontext() as made, tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        pipes, processes = [], []
        for rank, host in enumerate([""] * RANKS if made is None else made.names):
            ours, theirs = context.Pipe()
            args = (rank, host, folder, plan, theirs)
            processes.append(context.Process(target=main, args=args, daemon=True))
            processes[-1].start()
            theirs.close()
            pipes.append(ours)
        tables: list[Table] = [{} for _ in pipes]
        for _ in plan.delays:
            everyone = [pipe.recv() for pipe in pipes]
            for pipe in pipes:
                pipe.send(everyone)
            for table, pipe in zip(tables, pipes, strict=True):
                table.update(pipe.recv())
        for process in processes:
            process.join(60)
    return tables


def config_of(model: str, layers: int) -> dict[str, Any]:
    """The values of a model's config.json, with so many layers; 0 = all that it has."""
    config: dict[str, Any] = json.loads((Path(model) / "config.json").read_text())
    return config | {"num_hidden_layers": layers} if layers else config


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--delays", type=float, nargs="+", help="one way, ms")
    parser.add_argument("--tokens", type=int, help="sequences of each rank")
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--steps", type=int, default=10, help="of off and on in a round")
    parser.add_argument("--auto-steps", type=int, default=51, help="of auto in a round")
    parser.add_argument(
        "--domain", default="", help="interface that both CPU ranks use, instead of two hosts"
    )
    parser.add_argument(
        "--model", default=str(Path(__file__).parent / "shapes/qwen3-30b-a3b"), help="of GPUs"
    )
    parser.add_argument("--layers", type=int, default=0, help="on GPUs; 0 = all of the model")
    parser.add_argument("--context", type=int, default=256, help="tokens of a sequence on GPUs")
    given = parser.parse_args()
    cuda = given.device == "cuda"
    delays = given.delays or ([0.05, 0.2, 1.0] if cuda else [0.2, 1.0, 5.0])
    tokens = given.tokens or (256 if cuda else 64)
    delays = (0.0, *(delay for delay in delays if delay))
    plan = Plan(given.domain, delays, tokens, given.rounds, given.steps, given.auto_steps)
    if cuda:
        from overlap_delay_gpu import gpu_rank_main

        ranks = partial(gpu_rank_main, context=given.context)
        tables = run(plan, ranks, config_of(given.model, given.layers), hosts=False)
        report(plan, tables[0])
        print(check_same_by_way(tables))
        return
    if not given.domain and (why := namespaces.missing()):
        raise SystemExit(why)
    tables = run(plan, rank_main, SHAPE, hosts=not given.domain)
    report(plan, tables[0])
    print(check_same(plan, tables))


if __name__ == "__main__":
    main()
