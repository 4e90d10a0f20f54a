"""Streams the continuation of a prompt from a running server.

    python examples/stream.py "12 + 30 =" --address 127.0.0.1:50051

Keyword arguments of `Client.generate` are fields of protos/ep_server/v1/decode.proto.
"""

from __future__ import annotations

import argparse
import sys

import grpc

from ep_server.client import Client


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("prompt")
    parser.add_argument("--address", default="127.0.0.1:50051", help="host:port of the server")
    parser.add_argument("--max-new-tokens", type=int, default=32)
    options = parser.parse_args()

    with Client(options.address) as client:
        events = client.generate(
            options.prompt, max_new_tokens=options.max_new_tokens, temperature=0.0, timeout=60.0
        )
        try:
            for event in events:
                match event.WhichOneof("event"):
                    case "prompt_info":
                        print(f"[{event.prompt_info.prompt_tokens} prompt tokens]", file=sys.stderr)
                    case "tokens":
                        print(event.tokens.text, end="", flush=True)
                    case "finished":
                        usage, timings = event.finished.usage, event.finished.timings
                        print(
                            f"\n[{usage.output_tokens} tokens; first after "
                            f"{1000 * timings.first_token_seconds:.1f} ms]",
                            file=sys.stderr,
                        )
        except grpc.RpcError as error:
            print(f"{error.code().name}: {error.details()}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
