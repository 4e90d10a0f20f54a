"""Predicts dispatch, combine and step times of 8 to 512 ranks over 400 Gb/s NICs; checked on published rows.

    python benchmarks/fabric_simulator.py                             tables: check, exchange, steps
    python benchmarks/fabric_simulator.py --hosts 4 --tokens 32,64 --copies rank --json
    python benchmarks/fabric_simulator.py --chart docs/figures/fabric.svg     needs the extra 'chart'

fabric_traffic.py models rows, fabric_times.py an operation, fabric_steps.py a step. Their assumptions and
limits are in docs/design-notes/2026-11-fabric-prediction.md. Nothing is random or measured here. Times in us.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

from fabric_steps import MODELS, step
from fabric_times import (
    DEEPEP,
    OTHERS,
    Machine,
    Published,
    calibrated,
    errors,
    left_out,
    our_wire,
    pair,
    predicted,
)
from fabric_traffic import Case, Copies, Inside, both_ways, rows

HOSTS, TOKENS = (1, 2, 4, 8, 16, 32, 64), (1, 8, 32, 128)
MOST_RANKS = 4096
ASSUMED = {
    "fixed_us": "of each operation",
    "proxy_us": "more where it crosses hosts",
    "forward_us": "more where rows are forwarded inside a host",
    "post_us": "CPU time of a write",
}


@dataclass(frozen=True)
class Sweep:
    """What is predicted: every combination of these."""

    hosts: tuple[int, ...]
    tokens: tuple[int, ...]
    copies: tuple[Copies, ...]
    base: Case
    machine: Machine
    context: int

    def cases(self) -> Iterator[Case]:
        """By tokens, then hosts, then copies."""
        sizes = asdict(self.base)
        for tokens, hosts, copies in product(self.tokens, self.hosts, self.copies):
            yield Case(**{**sizes, "tokens": tokens, "hosts": hosts, "copies": copies})


def numbers(text: str) -> tuple[int, ...]:
    """ "1,2,4" -> (1, 2, 4)."""
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: must be whole numbers above 0, separated by commas")
    return found


def kinds(text: str) -> tuple[Copies, ...]:
    """ "rank,host" -> members."""
    try:
        return tuple(Copies(part) for part in text.split(","))
    except ValueError:
        allowed = ", ".join(Copies)
        raise argparse.ArgumentTypeError(f"{text!r}: must be of {allowed}, separated by commas") from None


def parse(arguments: list[str] | None) -> tuple[Sweep, argparse.Namespace]:
    """Exits with status 2 and a message that names the argument, its value and what is allowed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    case, machine = Case(), Machine()
    parser.add_argument("--hosts", type=numbers, default=HOSTS, metavar="N,N", help="hosts")
    parser.add_argument("--ranks-per-host", type=int, default=case.ranks_per_host)
    parser.add_argument("--tokens", type=numbers, default=TOKENS, metavar="N,N", help="tokens a rank")
    parser.add_argument("--hidden", type=int, default=case.hidden)
    parser.add_argument("--top-k", type=int, default=case.top_k)
    parser.add_argument("--experts", type=int, default=case.experts)
    parser.add_argument("--groups", type=int, default=case.groups, help="equal groups of experts")
    parser.add_argument("--kept", type=int, default=case.kept, help="groups that a token's experts come from")
    parser.add_argument("--copies", type=kinds, default=tuple(Copies), metavar="KIND,KIND")
    parser.add_argument(
        "--inside", choices=list(Inside), default=case.inside, help="what joins ranks of a host"
    )
    parser.add_argument("--nic-gbps", type=float, default=machine.nic_gbps, help="of the NIC of each rank")
    parser.add_argument("--nvlink-gbs", type=float, default=machine.nvlink_gbs, help="one direction")
    for name, what in ASSUMED.items():
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=float, default=getattr(machine, name), metavar="US", help=what)
    parser.add_argument("--context", type=int, default=4096, help="cached tokens a sequence, for steps")
    parser.add_argument("--json", action="store_true", help="everything as JSON")
    parser.add_argument("--chart", type=Path, help="also draw an SVG")
    given = parser.parse_args(arguments)
    try:
        return sweep_of(given), given
    except ValueError as error:
        parser.error(str(error))


def sweep_of(given: argparse.Namespace) -> Sweep:
    """Raises ValueError naming what is out of range."""
    base = Case(
        ranks_per_host=given.ranks_per_host,
        hidden=given.hidden,
        top_k=given.top_k,
        experts=given.experts,
        inside=Inside(given.inside),
        groups=given.groups,
        kept=given.kept,
    )
    if given.context < 0:
        raise ValueError(f"context = {given.context}: must be at least 0")
    if max(given.hosts) * given.ranks_per_host > MOST_RANKS:
        ranks = max(given.hosts) * given.ranks_per_host
        raise ValueError(f"hosts x ranks-per-host = {ranks}: must be 1 to {MOST_RANKS}")
    assumed = {name: getattr(given, name) for name in ASSUMED}
    machine = Machine(nic_gbps=given.nic_gbps, nvlink_gbs=given.nvlink_gbs, **assumed)
    sweep = Sweep(given.hosts, given.tokens, given.copies, base, machine, given.context)
    list(sweep.cases())  # each checks itself
    return sweep


# -- results as plain data -----------------------------------------------------------------------------------


def checked(
    row: Published, fixed_us: float, about: Callable[[Published], tuple[float, float]]
) -> dict[str, Any]:
    """One published row beside its prediction."""
    return {
        "ranks": row.ranks,
        "published_us": (row.dispatch, row.combine),
        "predicted_us": predicted(row, fixed_us),
        "error": about(row),
    }


def check() -> dict[str, Any]:
    """How well the model gives the rows that others published."""
    fixed_us = calibrated(DEEPEP)

    def plain(row: Published) -> tuple[float, float]:
        return errors(row, fixed_us)

    held_out = [checked(row, calibrated(tuple(r for r in DEEPEP if r != row)), left_out) for row in DEEPEP]
    return {
        "calibrated": {"fixed_us": fixed_us},
        "deepep": [checked(row, fixed_us, plain) for row in DEEPEP],
        "deepep, each row left out": held_out,
        **{name: [checked(row, fixed_us, plain) for row in group] for name, group in OTHERS.items()},
    }


def exchanges(sweep: Sweep) -> list[dict[str, Any]]:
    """Dispatch and combine of the busiest rank."""
    found = []
    for case in sweep.cases():
        dispatch, combine = pair(case, sweep.machine, our_wire(case))
        out, back = (asdict(rows(each)) for each in both_ways(case))
        found.append(
            {
                "case": asdict(case),
                "ranks": case.ranks,
                "rows_out": out,
                "rows_back": back,
                "dispatch_us": dispatch.total,
                "combine_us": combine.total,
                "network_bytes": (dispatch.network_bytes, combine.network_bytes),
            }
        )
    return found


def steps(sweep: Sweep) -> list[dict[str, Any]]:
    """Decode steps of the models, with the best of the kinds of copies that are built."""
    found, built = [], tuple(copies for copies in sweep.copies if copies is not Copies.HOST_SUM)
    for model, tokens, hosts in product(MODELS.values(), sweep.tokens, sweep.hosts):
        sizes = {**asdict(sweep.base), "hosts": hosts, "tokens": tokens}
        made = {
            copies: step(model, Case(**{**sizes, "copies": copies}), sweep.machine, context=sweep.context)
            for copies in built or sweep.copies
        }
        copies, best = min(made.items(), key=lambda item: (item[1].best_us, item[1].off_us))
        row = {"model": model.name, "ranks": hosts * sweep.base.ranks_per_host, "copies": copies}
        found.append({**row, **asdict(best), "tokens_per_second": best.tokens_per_second})
    return found


def everything(sweep: Sweep) -> dict[str, Any]:
    """All results, as --json prints them."""
    return {
        "machine": asdict(sweep.machine),
        "check": check(),
        "exchange": exchanges(sweep),
        "steps": steps(sweep),
    }


# -- tables --------------------------------------------------------------------------------------------------


def print_check(found: dict[str, Any]) -> None:
    print(
        f"calibrated on DeepEP's EP8 to EP64: fixed = {found['calibrated']['fixed_us']:.1f} us (one number)\n"
    )
    print("| rows | EP | dispatch, published | predicted | | combine, published | predicted | |")
    print("|---|---|---|---|---|---|---|---|")
    for name, group in found.items():
        for row in group if name != "calibrated" else ():
            cells = [
                f"{published:g} | {model:.0f} | {error:+.0%}"
                for published, model, error in zip(
                    row["published_us"], row["predicted_us"], row["error"], strict=True
                )
            ]
            print(f"| {name} | {row['ranks']} | {' | '.join(cells)} |")


def print_exchanges(found: list[dict[str, Any]]) -> None:
    print("\n| T | ranks | copies | rows over the network, out | back | dispatch, us | combine, us | pair |")
    print("|---|---|---|---|---|---|---|---|")
    for row in found:
        sizes = (row["case"]["tokens"], row["ranks"], row["case"]["copies"])
        dispatch, combine = row["dispatch_us"], row["combine_us"]
        numbers = (
            row["rows_out"]["network"],
            row["rows_back"]["network"],
            dispatch,
            combine,
            dispatch + combine,
        )
        print(f"| {' | '.join(map(str, sizes))} | {' | '.join(f'{number:.0f}' for number in numbers)} |")


def print_steps(found: list[dict[str, Any]], context: int) -> None:
    print(f"\nSteps at {context} cached tokens a sequence, copies as they are fastest:\n")
    print("| model | T | ranks | copies | exchange, ms | step, ms | overlapped | tokens/s a rank, at best |")
    print("|---|---|---|---|---|---|---|---|")
    for row in found:
        times = " | ".join(f"{row[key] / 1e3:.1f}" for key in ("exchange_us", "off_us", "on_us"))
        print(
            f"| {row['model']} | {row['tokens']} | {row['ranks']} | {row['copies']} | {times} |"
            f" {row['tokens_per_second']:,.0f} |"
        )


def main(arguments: list[str] | None = None) -> None:
    """The command."""
    sweep, given = parse(arguments)
    found = everything(sweep)
    if given.json:
        print(json.dumps(found, indent=2))
    else:
        print_check(found["check"])
        print_exchanges(found["exchange"])
        print_steps(found["steps"], sweep.context)
    if given.chart:
        from fabric_chart import write  # matplotlib is not everywhere

        write(found, given.chart)


if __name__ == "__main__":
    main()
