"""One rank of two on the loopback, as a program that may run by another clock: prints how its start ended.

unshare --time --monotonic 1000 python -m tests.support.fabric.other_clock RANK MEETING
"""

from __future__ import annotations

import subprocess
import sys

from ep_server.errors import EpServerError
from ep_server.exchange.api import ExchangeSpec
from tests.support.exchange.fault_programs import SECOND, spec_of
from tests.support.fabric.fabric_ends import FabricEnd, loopback

DELAY_SECONDS = 0.001


def by_clock(seconds: int) -> list[str]:
    """The start of a command that runs by a clock that is so much ahead."""
    return ["unshare", "--time", "--monotonic", str(seconds)]


def missing() -> str:
    """ "" or why no process can have another clock here."""
    try:
        made = subprocess.run([*by_clock(1), "true"], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return "another clock needs util-linux"
    return "" if made.returncode == 0 else f"no time namespace can be made here: {made.stderr.strip()}"


def main() -> None:
    """Prints "started", or the error."""
    rank, meeting = int(sys.argv[1]), sys.argv[2]
    end = FabricEnd(meeting, loopback(delay_seconds=DELAY_SECONDS, connect_seconds=20.0))
    try:
        end.open(ExchangeSpec(rank=rank, num_ranks=2, **spec_of(2, timeout_ns=3 * SECOND))).close()  # type: ignore[arg-type]
        print("started")
    except EpServerError as error:
        print(error)


if __name__ == "__main__":
    main()
