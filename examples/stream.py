"""Streams the continuation of a prompt from a running server.

    python examples/stream.py "12 + 30 =" --address 127.0.0.1:50051

Keyword arguments of `Client.generate` are fields of protos/ep_server/v1/decode.proto.
"""

from __future__ import annotations

import argparse
import sys

from ep_server.client import Client
from ep_server.errors import EpServerError


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("prompt")
    parser.add_argument("--address", default="127.0.0.1:50051", help="host:port of the server")
    parser.add_argument("--max-new-tokens", type=int, default=32)
    options = parser.parse_args()

    with Client(options.address) as client:
        stream = client.generate(
            options.prompt, max_new_tokens=options.max_new_tokens, temperature=0.0, timeout=60.0
        )
        try:
            for tokens in stream:
                print(tokens.text, end="", flush=True)
        except EpServerError as error:
            print(f"{error.status}: {error}", file=sys.stderr)
            return 1
    finished = stream.output.finished
    if finished is not None:
        usage, first = finished.usage, 1000 * finished.timings.first_token_seconds
        print(
            f"\n[{usage.prompt_tokens} + {usage.output_tokens} tokens; first after {first:.1f} ms]",
            file=sys.stderr,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
