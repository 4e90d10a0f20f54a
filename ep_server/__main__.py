"""`python -m ep_server` and `ep-server`."""

import sys

from ep_server.cli import main

if __name__ == "__main__":
    sys.exit(main())
