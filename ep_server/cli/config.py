"""`ep-server config`: lists every option, or prints a configuration file with all defaults."""

from __future__ import annotations

import json
from itertools import groupby
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from ep_server.cli.options import default_text, range_text
from ep_server.config import ENV_PREFIX, fields

NAME = "config"


def command(
    toml: Annotated[bool, typer.Option("--toml", help="Print a TOML file with every default.")] = False,
) -> None:
    """List every option with its default and range.

    Later sources win: defaults, file (--config), environment, flags.
    """
    if toml:
        print(_toml(), end="")
        return
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
