"""Decode throughput with and without grammars, at equal numbers of live sequences.

    python benchmarks/structured_output.py --device cuda --tokenizer tokenizer.json

Weights are random, of benchmarks/shapes/qwen3-30b-a3b, and so is what the model draws at temperature 1. Each
sequence has a JSON schema of its own; one that ends is replaced at once. Without grammars, outputs are as
long as they were with them. Rounds alternate. Without --tokenizer a vocabulary is trained.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import logging
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grammar_libraries import CASES, trained

from ep_server.cli.bench.breakdown import TIMED_EVERY, Steps, steps_between
from ep_server.cli.bench.offline import running
from ep_server.config import Config
from ep_server.engine.active_request import Submission
from ep_server.engine.engine import Engine
from ep_server.errors import EpServerError
from ep_server.frontend.served_model import ServedModel
from ep_server.models.families import read_spec
from ep_server.records import Grammar, GrammarKind, Request, Sampling, Stopping
from ep_server.text.grammars.notation import program_of

SHAPES = Path(__file__).parent / "shapes"
PROMPT = 32  # tokens
EOS = 0  # of the trained vocabulary


@dataclass
class Load:
    """What keeps `live` sequences in an engine. lengths: of outputs that ended."""

    engine: Engine
    live: int
    most: int
    programs: list[Grammar | None]
    wanted: Iterator[int]
    lengths: list[int] = field(default_factory=list)
    tokens: int = 0
    failed: int = 0
    stopped: bool = False

    async def run(self, warm: float, seconds: float) -> tuple[float, Steps | None, dict[str, int]]:
        """Tokens per second of a window, its steps, and what the ranks counted in it."""
        tasks = [asyncio.create_task(self._slot(slot)) for slot in range(self.live)]
        await asyncio.sleep(warm)
        begin, first, before = time.monotonic(), self.tokens, dict(self.engine.rank_statistics)
        await asyncio.sleep(seconds)
        rate = (self.tokens - first) / (time.monotonic() - begin)
        after = dict(self.engine.rank_statistics)
        self.stopped = True
        await asyncio.gather(*tasks)
        counts = {
            name: sum(after[rank].counters[name] - before[rank].counters.get(name, 0) for rank in after)
            for name in after[0].counters
        }
        return rate, steps_between(before, after, 1), counts

    async def _slot(self, slot: int) -> None:
        draws = random.Random(slot)
        while not self.stopped:
            request = Request(
                request_id=f"slot-{slot}-{draws.random()}",
                number=0,
                prompt_ids=tuple(draws.randrange(3, 100_000) for _ in range(PROMPT)),
                sampling=Sampling(temperature=1.0, seed=draws.getrandbits(32)),
                stopping=self._stopping(),
                bypass_prefix_cache=True,
                grammar=self.programs[slot],
            )
            ((_, stream),) = self.engine.submit([Submission(request)])
            count, done = 0, False
            try:
                while not done and not self.stopped:
                    chunk = await stream.read()
                    count += len(chunk.events)
                    self.tokens += len(chunk.events)
                    done = chunk.completion is not None
            except EpServerError as error:
                self.failed += 1
                print(f"slot {slot}: {error}")
            finally:
                stream.close()
            if done:
                self.lengths.append(count)

    def _stopping(self) -> Stopping:
        if self.programs[0] is None:
            return Stopping(next(self.wanted))
        return Stopping(self.most, eos_token_ids=frozenset({EOS}))


def schemas(live: int) -> list[Grammar]:
    """A program for each sequence: real schemas in turn, each with a title of its own."""
    found = []
    for slot, (name, (schema, _)) in zip(range(live), itertools.cycle(CASES.items()), strict=False):
        source = json.dumps({**schema, "title": f"{name} {slot}"})
        found.append(Grammar(GrammarKind.PROGRAM, program_of(Grammar(GrammarKind.JSON_SCHEMA, source), {})))
    return found


def checkpoint(options: argparse.Namespace, folder: Path) -> Path:
    """The shape with the tokenizer beside it."""
    config = json.loads((SHAPES / options.shape / "config.json").read_text())
    config["eos_token_id"] = EOS
    if options.layers:
        config["num_hidden_layers"] = options.layers
    (folder / "config.json").write_text(json.dumps(config))
    if options.tokenizer is None:
        trained(options.vocab, folder / "tokenizer.json")
    else:
        shutil.copy(options.tokenizer, folder / "tokenizer.json")
    return folder


def shown(steps: Steps | None, counts: dict[str, int]) -> dict[str, float]:
    """Milliseconds per step; of masked steps too."""
    told: dict[str, float] = {"steps": counts["run_steps"]}
    if steps is not None:
        told |= {"ms": steps.seconds * 1e3, "device": (steps.device or 0) * 1e3}
        told |= {name: seconds * 1e3 for name, seconds in steps.phases.items()}
    masked = counts.get("masked_steps", 0)
    if masked:
        told |= {"mask wait": counts["mask_wait_ns"] / masked / 1e6, "starved": counts["mask_starved_steps"]}
    return {name: round(value, 3) for name, value in told.items()}


async def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    values: dict[str, object] = {
        "model.path": str(checkpoint(options, folder)),
        "model.load_format": "dummy",
        "model.routing": "uniform",
        "parallel.device": options.device,
        "scheduler.max_running": options.live,
        "scheduler.max_step_tokens": options.live * 8,
        "scheduler.max_queue": options.live * 4,
        "scheduler.kv_blocks": options.live * (options.most + PROMPT) // 16 * 2,
    }
    if options.device == "cuda":
        values["metrics.device_phases"] = TIMED_EVERY
    config = Config.from_values(values)
    lengths, rows = [options.most], []
    spec = read_spec(folder)
    assert spec.vocab_size > EOS
    async with running(config, ServedModel.load(config.model), lambda *_: None) as engine:
        programs = schemas(options.live)
        for number in range(options.rounds):
            for bound in (True, False):
                grammars = list[Grammar | None](programs) if bound else [None] * options.live
                load = Load(engine, options.live, options.most, grammars, itertools.cycle(lengths))
                rate, steps, counts = await load.run(options.warm, options.seconds)
                if bound and load.lengths:
                    lengths = load.lengths
                mean = statistics.mean(load.lengths or [0])
                row = {
                    "grammars": bound,
                    "round": number,
                    "tokens/s": round(rate, 1),
                    "ended": len(load.lengths),
                }
                row |= {"length": round(mean, 1), "failed": load.failed, **shown(steps, counts)}
                rows.append(row)
                print(json.dumps(row), flush=True)
                await asyncio.sleep(1.0)
    rates = {
        bound: statistics.mean(r["tokens/s"] for r in rows if r["grammars"] is bound)
        for bound in (True, False)
    }
    share = rates[True] / rates[False]
    print(f"{rates[True]:.0f} tokens/s with grammars, {rates[False]:.0f} without: {share:.3f}")
    return {"rows": rows, "share": share}


def main() -> None:
    parser = argparse.ArgumentParser(description="Throughput with and without grammars.")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--shape", default="qwen3-30b-a3b")
    parser.add_argument("--layers", type=int, default=0, help="of the model; 0: as the shape")
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.json; default: one is trained")
    parser.add_argument("--vocab", type=int, default=151_643, help="size of a vocabulary that is trained")
    parser.add_argument("--live", type=int, default=64, help="sequences at once")
    parser.add_argument("--most", type=int, default=256, help="tokens of an output")
    parser.add_argument("--warm", type=float, default=5.0, help="seconds before a window")
    parser.add_argument("--seconds", type=float, default=15.0, help="of a window")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path, help="file for the rows")
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(measure(options, Path(folder)))
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
