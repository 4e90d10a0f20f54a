"""`ep-server`: the commands by name, and what an error looks like. Each command is a file of commands/."""

from __future__ import annotations

import sys

import grpc
import typer

import ep_server
from ep_server.commands import bench, config, demo, generate, inspect, serve
from ep_server.errors import EpServerError

app = typer.Typer(
    name="ep-server",
    help="Expert-parallel decode server for Mixture-of-Experts models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
for command in (serve, generate, bench, inspect, config, demo):
    app.command(command.NAME)(command.command)


@app.callback(invoke_without_command=True)
def options(version: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
    """Expert-parallel decode server for Mixture-of-Experts models."""
    if version:
        typer.echo(ep_server.__version__)
        raise typer.Exit()


def main() -> int:
    """Runs a command. Errors that a user can mend are one line on standard error and exit code 1."""
    try:
        return int(app(standalone_mode=True) or 0)
    except EpServerError as error:
        print(f"ep-server: error: {error}", file=sys.stderr)
    except grpc.RpcError as error:
        code, details = getattr(error, "code", None), getattr(error, "details", None)
        status = code().name if callable(code) else "UNKNOWN"
        print(f"ep-server: error: {status}: {details() if callable(details) else error}", file=sys.stderr)
    return 1
