"""Starts a group in a process of its own, prints its pids once requests run, then waits to be killed."""

from __future__ import annotations

import asyncio
import json
import sys

from ep_server.config import Config
from ep_server.ranks.launcher import RankProcesses
from tests.support.ranks.rank_group import Recorder, greedy


async def main() -> None:
    ranks, heard = RankProcesses(Config.from_values(json.loads(sys.argv[1]))), Recorder()
    await ranks.start(heard, heard.on_progress)
    for number in range(1, 1000):
        ranks.submit(number % ranks.num_ranks, greedy(number, (1, 2, 3), 100))
    await heard.until(lambda: heard.tokens)
    print(json.dumps(ranks.pids), flush=True)
    await asyncio.Event().wait()


asyncio.run(main())
