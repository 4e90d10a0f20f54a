"""`python -m ep_server` and `ep-server`."""

import sys

from ep_server.cli import main as cli
from ep_server.stop_signals import ignore_stop_signals


def main() -> int:
    """The whole process. A signal to a server that comes when it has ended changes no exit code."""
    try:
        return cli.main()
    finally:
        ignore_stop_signals()


if __name__ == "__main__":
    sys.exit(main())
