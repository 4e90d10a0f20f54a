"""A process in place of a rank that does one thing wrong; model.name of the configuration says which."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

from ep_server.errors import PeerTimeout
from ep_server.ranks.channel import RankChannel
from ep_server.ranks.messages import fatal_message
from ep_server.v1 import rank_pb2 as pb


def main() -> None:
    channel = RankChannel(socket.socket(fileno=int(sys.argv[sys.argv.index("--channel") + 1])))
    (first,) = channel.wait()
    start = pb.ToRank.FromString(first).start
    config = json.loads(start.config_json)
    fault, deadline = config["model.name"], config["exchange.timeout_seconds"]
    if fault == "deaf":  # to shutdown and SIGTERM
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if fault in ("deaf", "garbage-later", "times-out", "hangs", "busy"):
        ready = pb.Ready(rank=start.rank, pid=os.getpid(), kv_blocks=1, block_size=1)
        channel.send(pb.FromRank(ready=ready).SerializeToString())
    if fault == "times-out":  # waits for work, says that a peer kept it waiting, exits
        channel.wait()
        error = PeerTimeout("dispatch", "recv_header", start.rank, 1 - start.rank, 3, 1)
        channel.send(fatal_message(error).SerializeToString())
        sys.exit(1)
    if fault == "hangs" and start.rank == 1:  # once it has waited for a while
        channel.wait(1.0)
        time.sleep(600.0)
    while fault == "busy":  # with each request for longer than any deadline
        for payload in channel.wait():
            message = pb.ToRank.FromString(payload)
            if message.WhichOneof("kind") == "shutdown":
                sys.exit(0)
            time.sleep(3 * deadline)
            freed = pb.Freed(number=message.add.request.number)
            channel.send(pb.FromRank(freed=freed).SerializeToString())
    if fault == "exits":  # and closes its channel at the same moment
        os._exit(7)
    if fault.startswith("garbage"):
        channel.wait() if fault == "garbage-later" else None
        channel.send(b"\xff\xff\xff")
    if fault == "closes":
        channel.close()
        channel = RankChannel(socket.socketpair()[0])
    if fault == "fills":  # descriptor of the segment must be what the launcher made
        Path(f"/proc/self/fd/{start.exchange_fd}").stat()
    while True:
        signal.pause() if fault == "closes" else channel.wait()


if __name__ == "__main__":
    main()
