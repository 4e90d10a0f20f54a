"""A node that joins node 0 and runs no rank, as a process: it does what it reads from its standard input.

Arguments: host:port of node 0, cluster.silent_seconds, its Hello in hexadecimal digits. Units: seconds.
"""

from __future__ import annotations

import asyncio
import ctypes
import sys

from ep_server.cluster.follower import Joining, joined
from ep_server.v1 import nodes_pb2 as pb

CONNECT = 60.0


def hold_up(seconds: int) -> None:
    """Keeps the interpreter to itself: no other thread runs Python meanwhile."""
    ctypes.PyDLL(None).sleep(seconds)


async def main(address: str, silent_seconds: str, hello: str) -> None:
    joining = Joining(address, None, tuple, CONNECT, float(silent_seconds))
    async with joined(joining, pb.Hello.FromString(bytes.fromhex(hello)), lambda _: None) as link:
        print("joined", flush=True)
        while line := (await asyncio.to_thread(sys.stdin.readline)).strip():
            if line == "hold up":
                hold_up(int(3 * joining.silent_seconds))
                print("went on", flush=True)
            elif line == "reason":
                print(link.reason or "alive", flush=True)
            elif line == "end":
                print(await link.ended(), flush=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
