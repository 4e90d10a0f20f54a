"""Starts two nodes on this machine that form one server, and asks each of them.

    python examples/two_nodes.py

On two machines, run `ep-server serve` on each, with node 0's host in --rendezvous and the default ports.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import ep_server
from ep_server.client import Client
from ep_server.errors import EpServerError

MODEL = Path(ep_server.__file__).parent / "assets" / "demo_model"
START_SECONDS = 120.0


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def start_node(node: int, port: int, rendezvous: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "ep_server", "serve", f"--model={MODEL}", "--ranks=2"]
    command += ["--nodes=2", f"--node-rank={node}", f"--rendezvous=127.0.0.1:{rendezvous}"]
    command += [f"--port={port}", "--metrics-port=0"]
    return subprocess.Popen(command)


def wait_until_serving(address: str, nodes: list[subprocess.Popen[bytes]]) -> None:
    end = time.monotonic() + START_SECONDS
    with Client(address) as client:
        while time.monotonic() < end:
            if any(node.poll() is not None for node in nodes):
                raise SystemExit("a node stopped while starting; its log is above")
            try:
                if client.serving(timeout=1.0):
                    return
            except EpServerError:
                pass  # not listening yet
            time.sleep(0.2)
    raise SystemExit(f"{address} was not ready within {START_SECONDS:g} s")


def main() -> None:
    first, second, rendezvous = free_ports(3)
    nodes = [start_node(0, first, rendezvous), start_node(1, second, rendezvous)]
    try:
        for port in (first, second):
            address = f"127.0.0.1:{port}"
            wait_until_serving(address, nodes)
            with Client(address) as client:
                ranks = len(client.loads().ranks)
                answer = client.complete("12 + 30 =", max_new_tokens=8, temperature=0.0, timeout=60.0)
                print(f"{address}: {ranks} ranks, 12 + 30 = {answer.text.strip()}")
    finally:
        for node in nodes:
            node.send_signal(signal.SIGTERM)  # drains, then exits
        for node in nodes:
            node.wait(60)


if __name__ == "__main__":
    main()
