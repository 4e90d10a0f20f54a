"""`ep-server`: its commands by name, and how errors are printed. Each command has a module or a package."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import grpc
import typer

import ep_server
from ep_server import logs
from ep_server.cli import config, diagnose, generate, health, inspect, placement, scale, serve
from ep_server.cli.bench import command as bench
from ep_server.cli.chaos import command as chaos
from ep_server.cli.demo import run as demo
from ep_server.cli.options import Command
from ep_server.errors import EpServerError

app = typer.Typer(
    name="ep-server",
    help="Expert-parallel decode server for Mixture-of-Experts models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
for command in (serve, generate, health, inspect, placement, scale, diagnose, config, demo, chaos):
    app.command(command.NAME, cls=Command)(command.command)
app.add_typer(bench.app, name="bench")


@app.callback(invoke_without_command=True)
def options(version: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
    """Expert-parallel decode server for Mixture-of-Experts models."""
    if version:
        typer.echo(ep_server.__version__)
        raise typer.Exit()


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command. Expected errors become one line on standard error and exit code 1.

    Args:
        arguments: command line; sys.argv if None.
    """
    try:
        app(arguments)
    except SystemExit as end:
        return int(end.code or 0)
    except EpServerError as error:
        cause = error.__cause__
        _say(_status(cause) if isinstance(cause, grpc.RpcError) else str(error))
    except grpc.RpcError as error:
        _say(_status(error))
    return 1


def _say(error: str) -> None:
    """Prints the error after all log lines, unless nobody reads standard error."""
    if logs.flush():
        print(f"ep-server: error: {error}", file=sys.stderr)


def _status(error: grpc.RpcError) -> str:
    """Status and details in one line, for errors of both clients."""
    if isinstance(error, (grpc.Call, grpc.aio.AioRpcError)):
        return f"{error.code().name}: {error.details()}"
    return str(error)
