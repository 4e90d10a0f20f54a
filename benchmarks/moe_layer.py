"""Microseconds of a MoE layer, from router to residual, beside what its bytes alone take.

    python3 benchmarks/moe_layer.py --ranks 1,2 [--device cpu --shape small-moe -- --bandwidth 31]

Runs `ep-server bench offline` for each number of ranks, with random weights and experts drawn uniformly. The
layer's time is the sum of router, dispatch, experts and combine in decode steps, divided by the layers; on
GPUs by stamps of the device. The bound counts weights of the experts that get tokens at the bandwidth of
memory, and rows at that of the link. Tokens are of one rank. All prompts fit into one step, so all sequences
decode together; `seen` is what the steps really held, and a row that holds less is marked.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

SHAPES = Path(__file__).parent / "shapes"
PHASES = ("router", "dispatch", "experts", "combine")
PROMPT = 16  # tokens: experts do not see the context
FEWER = 0.97  # share of the sequences: below, steps with fewer of them make the layer look fast


def measured(given: argparse.Namespace, ranks: int, folder: Path) -> list[dict[str, Any]]:
    """Each batch of one group of ranks, as JSON of bench offline. Raises: CalledProcessError."""
    values = json.loads((SHAPES / given.shape / "config.json").read_text())
    if given.layers:
        values["num_hidden_layers"] = given.layers
    (folder / "config.json").write_text(json.dumps(values))
    found = folder / f"{ranks}.json"
    most = max(map(int, given.batch.split(",")))
    settings = {
        "parallel.device": given.device,
        "parallel.overlap": "off",
        "scheduler.max_step_tokens": max(PROMPT * most, 256),
    }
    command = [sys.executable, "-m", "ep_server", "bench", "offline", "--model", str(folder)]
    command += ["--load-format", "dummy", "--routing", "uniform", "--ranks", str(ranks)]
    command += [argument for name, value in settings.items() for argument in ("--set", f"{name}={value}")]
    command += ["--batch", given.batch, "--prompt-tokens", str(PROMPT), "--new-tokens", str(given.new_tokens)]
    command += ["--rounds", "1", "--json-file", str(found), *given.rates]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=Path(__file__).parents[1])
    return json.loads(found.read_text())["batches"]


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--shape", default="qwen3-30b-a3b")
    parser.add_argument("--layers", type=int, default=0, help="of the model; 0: as the shape")
    parser.add_argument("--ranks", default="1,2")
    parser.add_argument("--batch", default="1,8,64,128", help="tokens of a rank")
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("rates", nargs="*", help="options of bench offline, such as -- --bandwidth 31")
    given = parser.parse_args()
    print(f"{'EP':>3} {'tokens':>7} {'seen':>7} {'layer, us':>10} {'bound, us':>10} {'ratio':>6}  phases, us")
    with tempfile.TemporaryDirectory() as folder:
        for ranks in map(int, given.ranks.split(",")):
            for batch in measured(given, ranks, Path(folder)):
                step, tokens = batch["step"], batch["sequences_per_rank"]
                if step is None:
                    print(f"{ranks:>3} {tokens:>7} too few steps were measured")
                    continue
                took, bound = step["moe_layer"] * 1e6, step["moe_layer_bound"] * 1e6
                whole = sum(step["phases"][name] for name in PHASES)
                parts = [f"{name} {step['phases'][name] / whole * took:.1f}" for name in PHASES]
                seen = step["tokens"] / ranks
                if seen < FEWER * tokens:
                    parts.append("(steps with fewer tokens among them)")
                print(
                    f"{ranks:>3} {tokens:>7} {seen:>7.1f} {took:>10.1f} {bound:>10.1f} {took / bound:>6.2f}  "
                    + ", ".join(parts),
                    flush=True,
                )


if __name__ == "__main__":
    main()
