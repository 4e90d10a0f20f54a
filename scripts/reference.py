"""Writes the generated tables of docs/reference from the code: `make reference`.

A page holds prose, and blocks between `<!-- generated: NAME -->` and `<!-- end -->`. The source of a block is
options, metrics, protos, errors, commands or tensors. --check writes nothing and fails where a page differs.
"""

from __future__ import annotations

import argparse
import difflib
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, get_args

import typer
from prometheus_client import CollectorRegistry

from ep_server import errors
from ep_server.cli.main import app
from ep_server.cli.options import SHORT, default_text, range_text
from ep_server.config import Config, field_type, fields
from ep_server.engine.engine import Engine, EngineSettings
from ep_server.frontend.doors.oip.sampling import KEYS
from ep_server.frontend.doors.oip.tensors import INPUTS, OUTPUTS
from ep_server.observability.metrics import PREFIX, ServerMetrics
from ep_server.observability.node_metrics import NodeFacts, NodeMetrics
from ep_server.observability.rank_metrics import COUNTERS, LABELLED
from ep_server.observability.server_state import ServerState, TlsFiles
from ep_server.records import RankLoad, RankReady, RankStatistics
from ep_server.testing.fake_ranks import FakeRanks

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "docs" / "reference"
BLOCK = re.compile(r"(<!-- generated: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def code(text: str) -> str:
    """Inline code, empty for nothing."""
    return f"`{text}`" if text else ""


def options() -> str:
    """Every option by section."""
    parts = []
    for section, entries in groupby(fields(), key=lambda entry: entry[1]):
        rows = []
        for name, _, item in entries:
            short = f" (`{SHORT[name]}`)" if name in SHORT else ""
            kind = field_type(section, item.name).__name__
            default = code(default_text(item)) or "empty"
            allowed = range_text(item)
            words = allowed.split(" | ")
            allowed = ", ".join(code(word) for word in words) if len(words) > 1 else allowed
            rows.append((f"`{name}`{short}", kind, default, allowed, item.metadata["help"]))
        about = inspect.getdoc(type(getattr(Config(), section))) or ""
        titles = ("option", "type", "default", "allowed", "meaning")
        parts.append(f"## {section}\n\n{about}\n\n{table(titles, rows)}")
    return "\n\n".join(parts)


# What a family's values are, by the first part of its name that matches.
UNITS = {
    r"_seconds$": "seconds",
    r"_bytes$": "bytes",
    r"_ratio$|_balancedness$": "0 to 1",
    r"expert_imbalance": "1 or more",
    r"expert_moves": "experts",
    r"_info$": "always 1",
    r"_up$|^state$": "0 or 1",
    r"live_ranks": "ranks",
    r"nodes_out": "nodes",
    r"weights_version|^generation$": "a number",
    r"tokens|_hits$|_queries$|kv_block_size": "tokens",
    r"kv_(host_)?blocks": "blocks",
    r"_steps|^steps": "steps",
    r"rows": "rows",
    r"request|queue_depth|queue_limit|relayed": "requests",
    r"rank_running|running_limit|capacity_left|preempt|unread": "sequences",
}
AREAS = {
    "Requests": r"request|recover|accept|token_latency|to_first|generated|^prompt|unread|cancel|queue_limit|"
    r"relayed",
    "Network": r"network_|nic_",
    "Exchange": r"comm_|overlap|balancedness|expert|step_skew|ep_rank|rank_loss|live_ranks|^generation$|"
    r"^nodes_out$",
    "Memory": r"kv_|prefix|preempt",
    "Steps": r"step|moe_layer|graph|padded|parks|compiled|queue_depth|running",
    "Process": r"info|^state|capacity|memory|tls|weights",
}


def unit(name: str) -> str:
    """Of a family's values."""
    return next((found for pattern, found in UNITS.items() if re.search(pattern, name)), "events")


def report(rank: int) -> RankStatistics:
    """What a rank measured, with something for every family."""
    network = [f"network_{kind}/{1 - rank}/mlx5_0" for kind in ("bytes", "retries")]
    operations = dict.fromkeys(("dispatch/total", "dispatch/wait", "combine/total", "vote/wait"), (0, 1))
    return RankStatistics(
        rank=rank,
        load=RankLoad(kv_blocks_total=1, steps=1, host_blocks_total=1),
        counters=dict.fromkeys((*COUNTERS, *(f"{kind}/dispatch" for kind in LABELLED), *network), 1),
        histograms={**operations, "step/total": (0, 1), "request/queue": (0, 1)},
        sums=dict.fromkeys(operations, 4),
        peer_wait_ns={("dispatch", 1 - rank): 1},
        expert_tokens={rank: 1},
    )


def families() -> Iterator[Any]:
    """Every Prometheus family of this server, once."""
    leader, follower = CollectorRegistry(), CollectorRegistry()
    metrics = ServerMetrics(leader, model="m", version="v", max_queue=1, nodes=2)
    for rank in range(2):
        metrics.on_rank_ready(RankReady(rank, 1, 1, 1, 1, 1, 1, 1.0))
        metrics.on_statistics(report(rank))
    metrics.on_imbalance(1.0, 1.0)
    engine = Engine(FakeRanks(), EngineSettings(max_context=1))
    engine.ready = [RankReady(0, 1, 1, 1, 1, 1, 1, 1.0)]
    leader.register(ServerState(engine, 1, lambda: TlsFiles({"tls.crt": 1.0}, 0), 2, 1))
    NodeMetrics(follower, NodeFacts(1, 2, range(1), "host:1", "m", "v"))
    found = {each.name: each for registry in (leader, follower) for each in registry.collect()}
    yield from (found[name] for name in sorted(found) if name.startswith(PREFIX))


def labels_of(family: Any) -> str:
    """Label names, without the one that Prometheus adds."""
    names = {label for sample in family.samples for label in sample.labels} - {"le"}
    return ", ".join(code(name) for name in sorted(names))


def metrics() -> str:
    """Every family, by what it is about."""
    rows: dict[str, list[tuple[str, ...]]] = {area: [] for area in AREAS}
    for family in families():
        bare = family.name.removeprefix(PREFIX)
        area = next(area for area, pattern in AREAS.items() if re.search(pattern, bare))
        name = family.name + ("_total" if family.type == "counter" else "")
        rows[area].append((code(name), family.type, unit(bare), labels_of(family), family.documentation))
    titles = ("name", "type", "unit", "labels", "meaning")
    return "\n\n".join(f"## {area}\n\n{table(titles, found)}" for area, found in rows.items())


@dataclass
class Node:
    """A service, message or enum of a proto file; rows are its methods, fields or values."""

    kind: str
    name: str
    about: str
    rows: list[tuple[str, ...]] = field(default_factory=list)


FIELD = re.compile(
    r"(?P<repeated>repeated |optional )?(?P<type>map<.*?>|[\w.]+) (?P<name>\w+) = (?P<number>\d+);"
)
METHOD = re.compile(r"rpc (?P<name>\w+)\((?P<asks>[\w. ]+)\) returns \((?P<gives>[\w. ]+)\);")
VALUE = re.compile(r"(?P<name>[A-Z_0-9]+) = (?P<number>\d+);")


def parse(proto: Path) -> tuple[str, list[Node]]:
    """(the file's own comment, its nodes). Knows the style of protos/ep_server, no other proto."""
    about: list[str] = []
    nodes: list[Node] = []
    comment: list[str] = []
    oneof = ""
    for line in (raw.strip() for raw in proto.read_text(encoding="utf-8").splitlines()):
        if line.startswith("//"):
            comment.append(line.removeprefix("//").strip())
            continue
        if line.startswith("syntax"):
            about, comment = comment, []
        if found := re.match(r"(service|message|enum) (\w+) \{(\})?", line):
            nodes.append(Node(found[1], found[2], paragraphs(comment)))
        elif found := re.match(r"oneof (\w+) \{", line):
            oneof = join([f"One of `{found[1]}`.", *comment])
        elif line == "}":
            oneof = ""
        elif nodes and (row := read_row(nodes[-1].kind, line, join([*([oneof] if oneof else []), *comment]))):
            nodes[-1].rows.append(row)
        elif line:
            comment = []
            continue
        if line:
            comment = []
    return paragraphs(about), nodes


def read_row(kind: str, line: str, about: str) -> tuple[str, ...] | None:
    """A line of a node as a row, None where it is none."""
    if kind == "service" and (found := METHOD.match(line)):
        return code(found["name"]), linked(found["asks"]), linked(found["gives"]), about
    if kind == "enum" and (found := VALUE.match(line)):
        return code(found["name"]), found["number"], about
    if kind == "message" and (found := FIELD.match(line)):
        return (
            code(found["name"]),
            f"{found['repeated'] or ''}{linked(found['type'])}",
            found["number"],
            about,
        )
    return None


def linked(text: str) -> str:
    """A type; a message of ours leads to its heading."""
    linked = re.sub(r"\b([A-Z]\w+)", lambda found: f"[{found[1]}](#{found[1].lower()})", text)
    return code(text) if linked == text else linked


def join(lines: Sequence[str]) -> str:
    """Lines of a comment as one line."""
    return " ".join(line for line in lines if line)


def paragraphs(lines: Sequence[str]) -> str:
    """Lines of a comment as they are; empty ones divide paragraphs and `- ` begins a bullet."""
    return "\n".join(lines).strip()


TITLES = {
    "service": ("method", "request", "response", "what it does"),
    "message": ("field", "type", "number", "meaning"),
    "enum": ("value", "number", "meaning"),
}


def protos(name: str) -> str:
    """A public proto file."""
    about, nodes = parse(ROOT / "protos" / "ep_server" / "v1" / name)
    parts = [about]
    for node in nodes:
        parts.append(f"### {node.name}")
        if node.about:
            parts.append(node.about)
        parts.append(table(TITLES[node.kind], node.rows) if node.rows else "No fields.")
    return "\n\n".join(parts)


def error_tree() -> str:
    """Every error: where it stands in the tree, the status a caller sees, when it is raised."""
    rows = []

    def visit(cls: type[errors.EpServerError], depth: int) -> None:
        about = (inspect.getdoc(cls) or "").split("\n\n")[0].replace("\n", " ")
        indent = "&nbsp;" * 4 * depth
        rows.append((f"{indent}`{cls.__name__}`", code(cls.status), about))
        below = [each for each in cls.__subclasses__() if each.__module__ == errors.__name__]
        for each in below:
            if each.__bases__[-1] is cls and each is not errors.FieldError:
                visit(each, depth + 1)

    visit(errors.EpServerError, 0)
    return table(("error", "gRPC status", "when"), rows)


def commands() -> str:
    """Every command, its arguments and flags. Those of the configuration are left to their own page."""
    return "\n\n".join(describe(typer.main.get_command(app), "ep-server"))


def describe(command: Any, path: str) -> Iterator[str]:
    """A command and the commands below it."""
    below = getattr(command, "commands", {})
    for name, each in below.items():
        yield from describe(each, f"{path} {name}")
    if below:
        return
    configured = {name.replace(".", "__") for name, _, _ in fields()}
    parameters = [each for each in command.params if each.name not in configured and each.name != "help"]
    arguments = [
        name_of(each) if each.required else f"[{name_of(each)}]" for each in parameters if is_argument(each)
    ]
    yield f"## {path}"
    yield f"```text\n{' '.join([path, *arguments])} [OPTIONS]\n```"
    yield "\n\n".join(textwrap.fill(plain(each), 110) for each in (command.help or "").split("\n\n"))
    if configured & {each.name for each in command.params}:
        yield "Every option of the [configuration](configuration.md) is a flag of this command too."
    panels: dict[str, list[tuple[str, ...]]] = {}
    for each in parameters:
        title = each.rich_help_panel or ("Arguments" if is_argument(each) else "Options")
        panels.setdefault(title, []).append(row_of(each))
    for panel, rows in panels.items():
        yield f"**{panel}**"
        yield table(("name", "type", "default", "meaning"), rows)


def is_argument(parameter: Any) -> bool:
    """Not a flag."""
    return not parameter.opts[0].startswith("-")


def name_of(parameter: Any) -> str:
    """An argument, as in a usage line."""
    return (parameter.name or "").upper()


def row_of(parameter: Any) -> tuple[str, ...]:
    """A flag or an argument."""
    names = [name_of(parameter)] if is_argument(parameter) else [*parameter.opts, *parameter.secondary_opts]
    kind = kind_of(parameter.type_descriptor.annotation)
    if parameter.multiple:
        kind += ", repeatable"
    low, high = parameter.min, parameter.max
    if low is not None:
        kind += f", {low:,g} to {high:,g}" if high is not None else f", at least {low:,g}"
    default, shown = parameter.default, parameter.show_default
    given = shown.strip("()") if isinstance(shown, str) else default
    text = " ".join(map(str, given)) if isinstance(given, tuple) else str(given)
    value = "required" if parameter.required else "" if text in ("None", "", "False") else code(text)
    return ", ".join(map(code, names)), kind, value, plain(parameter.help or "")


def kind_of(annotation: Any) -> str:
    """Of one value; of several, each."""
    if inner := get_args(annotation):
        return " ".join(map(kind_of, inner))
    if issubclass(annotation, str):
        return "str"  # also of a StrEnum
    return "flag" if annotation is bool else str(annotation.__name__)


def plain(text: str) -> str:
    """Without the marks that the terminal turns into colours."""
    return re.sub(r"\[/?(?:b|dim)?\]", "", text)


def oip_tensors() -> str:
    """Inputs and outputs of the Open Inference Protocol."""
    parts = []
    for title, specs in (("Inputs", INPUTS), ("Outputs", OUTPUTS)):
        rows = [
            (code(each.name), " or ".join(each.datatypes), "1" if each.one else "any", each.meaning)
            for each in specs.values()
        ]
        parts.append(f"### {title}\n\n{table(('name', 'type', 'elements', 'meaning'), rows)}")
    return "\n\n".join(parts)


def oip_parameters() -> str:
    """Sampling parameters of the Open Inference Protocol."""
    rows = [(code(name), each.kind, code(each.field), each.meaning) for name, each in KEYS.items()]
    return table(("key", "type", "field of the gRPC API", "note"), rows)


BLOCKS: dict[str, Callable[[], str]] = {
    "options": options,
    "metrics": metrics,
    "decode": lambda: protos("decode.proto"),
    "control": lambda: protos("control.proto"),
    "errors": error_tree,
    "commands": commands,
    "oip-tensors": oip_tensors,
    "oip-parameters": oip_parameters,
}


def rendered(page: str) -> str:
    """A page with its blocks as the code has them now."""
    return BLOCK.sub(lambda found: f"{found[1]}\n{BLOCKS[found[2]]()}\n\n{found[3]}", page)


def main() -> int:
    """Returns: exit code, 1 where --check finds a difference."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, fail where a page differs")
    check, stale = parser.parse_args().check, 0
    for path in sorted(PAGES.glob("*.md")):
        before = path.read_text(encoding="utf-8")
        after = rendered(before)
        if before == after:
            continue
        name = str(path.relative_to(ROOT))
        if check:
            print(*difflib.unified_diff(before.splitlines(), after.splitlines(), name, n=0), sep="\n")
            stale += 1
        else:
            path.write_text(after, encoding="utf-8")
            print(f"wrote {name}")
    if stale:
        print(f"{stale} pages differ from their sources: run `make reference` and commit", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
