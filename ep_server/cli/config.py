"""`ep-server config`: lists options, prints a file with all defaults, says what a server would use."""

from __future__ import annotations

import json
from itertools import groupby
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from ep_server.cli.options import default_text, range_text
from ep_server.config import ENV_PREFIX, Config, fields, read_sources
from ep_server.errors import ConfigError

NAME = "config"


def command(
    toml: Annotated[bool, typer.Option("--toml", help="Print a TOML file with every default.")] = False,
    effective: Annotated[
        bool, typer.Option("--effective", help="Print every value that `serve` would use, and its source.")
    ] = False,
    config: Annotated[str, typer.Option("--config", help="TOML file for --effective.")] = "",
    check: Annotated[str, typer.Option("--check", help="Check a TOML file alone; exit code 1 if bad.")] = "",
) -> None:
    """List every option with its default and range.

    Later sources win: defaults, file (--config), environment, flags.
    """
    if sum([toml, effective, bool(check)]) > 1:
        raise ConfigError("config", "several outputs", "one of --toml, --effective, --check")
    if config and not effective:
        raise ConfigError("--config", config, "given only with --effective")
    if check:
        given = read_sources(check, environ={})
        Config.from_values({name: one.value for name, one in given.items()})
        print(f"{check}: {len(given)} option(s), all valid")
    elif effective:
        _print_effective(config or None)
    elif toml:
        print(_toml(), end="")
    else:
        _print_options()


def _print_effective(file: str | None) -> None:
    """Tab-separated, so that scripts can read it: option, value as JSON, source."""
    values, given = Config.load(file).values(), read_sources(file)
    for name, value in values.items():
        print(name, json.dumps(value), given[name].source if name in given else "default", sep="\t")


def _print_options() -> None:
    table = Table(title="Options of `ep-server serve`")
    table.add_column("option", no_wrap=True)
    for title in ("default", "allowed", "meaning"):
        table.add_column(title)
    for _, entries in groupby(fields(), key=lambda entry: entry[1]):
        table.add_section()
        for name, _, item in entries:
            table.add_row(name, default_text(item), range_text(item), item.metadata["help"])
    Console().print(table)
    print(f"grpc.port is also --grpc-port, {ENV_PREFIX}GRPC__PORT, and port in [grpc] of the file.")


def _toml() -> str:
    lines: list[str] = []
    for section, entries in groupby(fields(), key=lambda entry: entry[1]):
        lines += [f"[{section}]"]
        for _, _, item in entries:
            allowed = range_text(item)
            lines.append(f"# {item.metadata['help']}{f' ({allowed})' if allowed else ''}")
            lines.append(f"{item.name} = {json.dumps(item.default)}")
        lines.append("")
    return "\n".join(lines)
