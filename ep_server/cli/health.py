"""`ep-server health`: one question to a server's health service; the exit code is the answer."""

from __future__ import annotations

from typing import Annotated

import typer

from ep_server.cli import options
from ep_server.client import SERVICE, Client

NAME = "health"


def command(
    service: Annotated[
        str, typer.Option(help="Service to ask: does it take requests? Empty: does the process work?")
    ] = SERVICE,
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds until DEADLINE_EXCEEDED.")] = 5.0,
    address: options.Address = options.ADDRESS,
    tls_ca: options.TlsCa = "",
    tls_cert: options.TlsCert = "",
    tls_key: options.TlsKey = "",
) -> None:
    """Ask whether a server takes requests. Exit code 0: yes. 1: no, or the server cannot be reached.

    A server that loads or drains takes no requests. To ask only whether its process works, use
    `--service ""`. No token is needed.
    """
    with Client(options.target(address, tls_ca, tls_cert, tls_key, "")) as client:
        serving = client.serving(service, timeout=timeout)
    print("SERVING" if serving else "NOT_SERVING")
    raise typer.Exit(0 if serving else 1)
