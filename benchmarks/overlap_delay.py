"""What two micro-batches hide of a network's latency: steps with overlap off, on and auto, in turns.

    python benchmarks/overlap_delay.py

Two hosts (network namespaces, so it needs root) with one CPU rank each, over libfabric; with --domain lo, two
processes over loopback instead. The fabric layer makes messages visible late by each delay; the sender does
not wait. All modes must draw the same tokens. Ranks spin while they wait, so that the time to wake a process
is not measured. Times: ms.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from ep_server.backends.assembly import LoadParams, RankModel, load_model
from ep_server.backends.cpu.runner import ModelRunner
from ep_server.backends.cpu.sampler import Sampler
from ep_server.exchange.api import Exchange, ExchangeSpec
from ep_server.exchange.fabric.link import FabricLink
from ep_server.exchange.fabric.settings import FabricOptions
from ep_server.exchange.spec import Waiting
from ep_server.models.families import read_spec
from ep_server.ranks.overlap import FixedOverlap, MeasuredOverlap, Overlap, Planned, Ran
from ep_server.ranks.vote import Voter
from ep_server.records import Request, Sampling, SeqSlice, StepBatch, Stopping
from ep_server.testing import namespaces
from ep_server.testing.namespaces import Hosts

RANKS, BLOCK, CONTEXT = 2, 16, 16
SPIN_US = 20_000
MODES = ("off", "on", "auto")
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


@dataclass(frozen=True, slots=True)
class Plan:
    """delays: one way, ms. steps: of off and on in a round. auto_steps: of auto in a round.

    domain: interface; "" = hosts of their own.
    """

    domain: str
    delays: tuple[float, ...]
    tokens: int
    rounds: int
    steps: int
    auto_steps: int


@dataclass(slots=True)
class Measured:
    """One mode at one delay. times: ms of each step. two: steps that ran as two. drawn: tokens by step."""

    times: list[float] = field(default_factory=list)
    two: int = 0
    drawn: list[str] = field(default_factory=list)

    @property
    def mean(self) -> float:
        """ms of a step."""
        return statistics.fmean(self.times)


Table = dict[tuple[float, str], Measured]
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
        into.times.append(took / 1e6)
        into.two += verdict.micro_batches == 2
        into.drawn.append(hashlib.sha256(str(self._next).encode()).hexdigest())


def policy_of(mode: str, rank: int) -> Overlap:
    """As a server with this parallel.overlap has it."""
    if mode == "auto" and rank == 0:
        return MeasuredOverlap()
    return FixedOverlap(two=mode != "off")


def measure(plan: Plan, model: RankModel, spec: ExchangeSpec, delay: float, gather: Gather) -> Table:
    """All modes at one delay. Collective."""
    options = FabricOptions(domain=plan.domain or namespaces.DEVICE, delay_seconds=delay / 1e3)
    link = FabricLink(spec, options, Waiting(SPIN_US))
    exchange = link.exchange()
    try:
        link.connect(gather(link.address), round(delay * 1000) + 1)  # type: ignore[arg-type]
        exchange.barrier()
        runner = model.runner(exchange, Sampler(model.spec.vocab_size), 2 * plan.tokens, BLOCK)
        steps = Steps(runner, exchange, Voter(), plan.tokens)
        steps.prefill()
        table = {(delay, mode): Measured() for mode in MODES}
        policies = {mode: policy_of(mode, spec.rank) for mode in MODES}
        for mode in ("off", "on"):  # warm
            for _ in range(5):
                steps.run(policies[mode], Measured())
        for _ in range(plan.rounds):
            for mode in MODES:
                steps.restart()
                for _ in range(plan.auto_steps if mode == "auto" else plan.steps):
                    steps.run(policies[mode], table[delay, mode])
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


def run(plan: Plan) -> list[Table]:
    """By rank: every mode at every delay."""
    context = multiprocessing.get_context("spawn")
    with nullcontext() if plan.domain else Hosts(RANKS) as hosts, tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SHAPE))
        pipes, processes = [], []
        for rank, host in enumerate([""] * RANKS if hosts is None else hosts.names):
            ours, theirs = context.Pipe()
            args = (rank, host, folder, plan, theirs)
            processes.append(context.Process(target=rank_main, args=args, daemon=True))
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


def check_tokens(plan: Plan, tables: list[Table]) -> None:
    """Every mode, at every delay, drew the same tokens. Raises SystemExit."""
    for rank, table in enumerate(tables):
        expected = table[plan.delays[0], "off"].drawn[: plan.steps]
        for (delay, mode), measured in table.items():
            per_round = plan.auto_steps if mode == "auto" else plan.steps
            for start in range(0, len(measured.drawn), per_round):
                compared = measured.drawn[start : start + min(per_round, plan.steps)]
                if compared != expected[: len(compared)]:
                    raise SystemExit(f"rank {rank}, {delay} ms, overlap {mode}: other tokens than with off")


def report(plan: Plan, table: Table) -> None:
    """Rank 0's steps; W and C2 as in docs/concepts/overlap.md."""
    base_off, base_on = (table[0.0, mode].mean for mode in ("off", "on"))
    print(f"C2 = {base_on:.2f} ms: two micro-batches, no delay; one micro-batch: {base_off:.2f} ms")
    print(
        "delay     off      on    auto  two in auto       W   hidden  hidden / min(W, C2/2)   auto / better"
    )
    for delay in plan.delays:
        off, on, auto = (table[delay, mode] for mode in MODES)
        wait = off.mean - base_off
        hidden = wait - (on.mean - base_on)
        share = f"{hidden / min(wait, base_on / 2):8.2f}" if delay else "       -"
        print(
            f"{delay:5.1f} {off.mean:7.2f} {on.mean:7.2f} {auto.mean:7.2f} {auto.two / len(auto.times):12.1%}"
            f" {wait:7.2f} {hidden:8.2f} {share:>23} {auto.mean / min(off.mean, on.mean):15.3f}"
        )


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--delays", type=float, nargs="+", default=[0.2, 1.0, 5.0], help="one way, ms")
    parser.add_argument("--tokens", type=int, default=64, help="sequences of each rank")
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--steps", type=int, default=10, help="of off and on in a round")
    parser.add_argument("--auto-steps", type=int, default=51, help="of auto in a round")
    parser.add_argument("--domain", default="", help="interface that both ranks use, instead of two hosts")
    given = parser.parse_args()
    if not given.domain and (why := namespaces.missing()):
        raise SystemExit(why)
    delays = (0.0, *(delay for delay in given.delays if delay))
    plan = Plan(given.domain, delays, given.tokens, given.rounds, given.steps, given.auto_steps)
    tables = run(plan)
    check_tokens(plan, tables)
    report(plan, tables[0])
    print("all modes drew the same tokens")


if __name__ == "__main__":
    main()
