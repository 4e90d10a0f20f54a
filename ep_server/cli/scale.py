"""`ep-server scale`: which ranks of a running server serve."""

from __future__ import annotations

from typing import Annotated

import typer

from ep_server.cli import options
from ep_server.client import Client

NAME = "scale"


def command(
    ranks: Annotated[
        int, typer.Option(min=0, help="Ranks that shall serve, at most parallel.max_ranks. 0: as before.")
    ] = 0,
    hold_out: Annotated[
        list[int] | None, typer.Option(help="A rank that shall not serve; may be given several times.")
    ] = None,
    address: options.Address = options.ADDRESS,
    tls_ca: options.TlsCa = "",
    tls_cert: options.TlsCert = "",
    tls_key: options.TlsKey = "",
    token_file: options.TokenFile = "",
) -> None:
    """Change which ranks of a server serve, while it serves. No stream ends.

    Without options, all ranks that were held out or lost too often return.
    """
    with Client(options.target(address, tls_ca, tls_cert, tls_key, token_file)) as client:
        done = client.scale(ranks, hold_out or ())
    print(f"ranks {', '.join(map(str, done.live))} serve; steps paused {done.pause_seconds * 1000:.1f} ms")
