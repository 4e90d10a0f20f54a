"""The main program of a rank's process: tie it to its parent, build its parts, run its steps.

Any failure ends the process, with one last message to the frontend that names the cause.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from ep_server import logs
from ep_server.config import Config
from ep_server.errors import EpServerError, InternalError, StartupError
from ep_server.ranks.background import run_behind
from ep_server.ranks.channel import ChannelClosed, RankChannel
from ep_server.ranks.messages import fatal_message, one_line, ready_message
from ep_server.ranks.process import STANDBY
from ep_server.ranks.protocol import THREAD_TURN_SECONDS
from ep_server.ranks.standby import receive
from ep_server.ranks.worker import RankWorker
from ep_server.v1 import rank_pb2 as pb

if TYPE_CHECKING:  # torch is imported once the process is tied to its parent
    from ep_server.exchange.api import Abortable
    from ep_server.ranks.build import RankParts
    from ep_server.ranks.parts import Device

log = logging.getLogger(__name__)

LAST_MESSAGE_SECONDS = 2.0  # to send the last message
PR_SET_PDEATHSIG = 1

Choose: TypeAlias = "Callable[[pb.Start, Config], Device]"


def serve(channel: RankChannel, choose: Choose | None = None, *, standby: bool = False) -> int:
    """Runs a rank behind a channel until it ends. choose: see main(). Returns: the exit code.

    standby: others serve meanwhile, maybe on the same cores.
    """
    exchanges: list[Abortable] = []
    parts: RankParts | None = None
    try:
        # Imported here: torch takes a second or more, and the process must be tied to its parent by then. A
        # process on standby gets its Start message later.
        gc.disable()  # scanning freshly imported objects would cost a tenth of that second
        if standby:
            run_behind(partial(importlib.import_module, "ep_server.ranks.build"))
            channel.send(
                pb.FromRank(progress=pb.Progress(stage="import", done=1, total=1)).SerializeToString()
            )
        import torch

        from ep_server.ranks.build import build_rank
        from ep_server.ranks.devices import device_of
        from ep_server.ranks.exchanges import Opening

        gc.freeze()
        gc.enable()
        start = _first_message(channel)
        receive(start)
        logs.configure(Config.from_values(json.loads(start.config_json)).log, rank=start.rank)

        def progress(stage: str, done: int, total: int) -> None:
            message = pb.FromRank(progress=pb.Progress(stage=stage, done=done, total=total))
            channel.send(message.SerializeToString())

        def meet(introduction: pb.Introduction, seconds: float) -> pb.Connect:
            channel.send(pb.FromRank(introduction=introduction).SerializeToString())
            return _answer(channel, seconds)

        parts = build_rank(start, progress, Opening(exchanges.append, meet), choose or device_of)
        worker = RankWorker(parts, channel, outlives=start.outlives)
        gc.collect()
        gc.freeze()  # these objects live as long as the process: no collection needs to scan them
        channel.send(ready_message(parts.ready).SerializeToString())
        with torch.inference_mode():
            if start.joins:
                worker.join()
            worker.run()
        channel.drain(LAST_MESSAGE_SECONDS)
    except ChannelClosed:
        return 1  # the frontend has exited
    except Exception as error:
        if not isinstance(error, EpServerError):
            log.exception("the rank failed")
            logs.flush()  # whoever hears the last message may kill this process at once
        _send_fatal(channel, error)
        for exchange in exchanges:  # after the last message, so that the peers' errors arrive after the cause
            exchange.abort()
        return 1
    finally:
        if parts is not None and parts.filler is not None:
            parts.filler.close()
    return 0


def _first_message(channel: RankChannel) -> pb.Start:
    first, *more = channel.wait()
    message = pb.ToRank.FromString(first)
    if message.WhichOneof("kind") != "start" or more:
        raise InternalError("the first message to a rank must be Start, alone")
    return message.start


def _answer(channel: RankChannel, seconds: float) -> pb.Connect:
    """Waits for the frontend's answer to an introduction. Raises: StartupError after `seconds`."""
    payloads = channel.wait(seconds)
    if not payloads:
        raise StartupError(f"the other ranks did not connect within {seconds:g} s")
    message = pb.ToRank.FromString(payloads[0])
    if message.WhichOneof("kind") != "connect" or len(payloads) > 1:
        raise InternalError("the answer to an introduction must be Connect, alone")
    return message.connect


def _send_fatal(channel: RankChannel, error: Exception) -> None:
    try:
        channel.send(fatal_message(error).SerializeToString())
        channel.drain(LAST_MESSAGE_SECONDS)
    except ChannelClosed:
        log.error("%s", one_line(error))


def die_with(parent: int) -> None:
    """Ties this process to its parent: it gets SIGKILL when the parent ends, and exits if that happened."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        sys.exit(1)


def main(choose: Choose | None = None) -> int:
    """Runs a rank on the inherited channel. choose: picks its device; None = as configured."""
    parser = argparse.ArgumentParser(description="One rank. The server starts it; do not run it by hand.")
    for name in ("--rank", "--channel", "--parent"):
        parser.add_argument(name, type=int, required=True)
    options = parser.parse_args()
    die_with(options.parent)
    sys.setswitchinterval(THREAD_TURN_SECONDS)
    logging.basicConfig(format=f"rank {options.rank}: %(levelname)s %(message)s")
    channel = RankChannel(socket.socket(fileno=options.channel))
    try:
        return serve(channel, choose, standby=options.rank == STANDBY)
    finally:
        channel.close()


if __name__ == "__main__":
    sys.exit(main())
