"""`ep-server serve`: one server in the foreground, with progress while the weights load."""

from __future__ import annotations

import logging
import sys

import typer
from rich.console import Console

from ep_server import logs
from ep_server.cli import app
from ep_server.cli.options import with_config
from ep_server.cli.progress import Bars
from ep_server.config import Config

NAME = "serve"
log = logging.getLogger(__name__)


@with_config
def command(config: Config) -> None:
    """Serve a Mixture-of-Experts checkpoint over gRPC.

    SIGTERM or Ctrl-C drains: open requests complete, new ones get UNAVAILABLE. A second signal stops at once.
    """
    logs.configure(config.log)
    live = sys.stderr.isatty() and config.log.format == "text"
    with Bars(Console(stderr=True) if live else None, log.info) as bars:

        def serving(metrics_url: str) -> None:
            bars.close()
            if metrics_url:
                log.info("metrics at %s", metrics_url)

        code = app.run(config, bars.loading, serving)
    raise typer.Exit(code)
