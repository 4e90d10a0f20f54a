"""`ep-server serve` in a fork of a process that has imported it, whose ranks are forks too.

The first argument is a network namespace to move to, or nothing.
"""

from __future__ import annotations

import sys

from ep_server.__main__ import main
from ep_server.testing.namespaces import enter
from tests.support.ranks.zygote import fork_ranks, forked_zygote

if host := sys.argv.pop(1):
    enter(host)
fork_ranks(forked_zygote())
sys.exit(main())
