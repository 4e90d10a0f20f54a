"""`ep-server health`: one question to a server's health service; the exit code is the answer."""

from __future__ import annotations

from typing import Annotated

import typer

from ep_server.cli import options
from ep_server.client import SERVICE, Client

NAME = "health"


def command(
    service: Annotated[
        str, typer.Option(help="Full name of a service: does it take requests? Empty: does the process work?")
    ] = SERVICE,
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds until DEADLINE_EXCEEDED.")] = 5.0,
    address: options.Address = options.ADDRESS,
    tls_ca: options.TlsCa = "",
    tls_cert: options.TlsCert = "",
    tls_key: options.TlsKey = "",
) -> None:
    """Ask whether a server takes requests. Exit code 0 if it does, 1 if it does not or cannot be asked.

    A server that loads or drains takes none, but its process works, which `--service ""` asks.
    For probes that speak TLS and containers without another client; needs no token.
    """
    with Client(options.target(address, tls_ca, tls_cert, tls_key, "")) as client:
        serving = client.serving(service, timeout=timeout)
    print("SERVING" if serving else "NOT_SERVING")
    raise typer.Exit(0 if serving else 1)
