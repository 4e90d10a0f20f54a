"""Asks a running server for an output that matches a grammar.

python examples/structured_output.py "12 + 30 =" --json-schema '{"type": "integer", "maximum": 99}'
python examples/structured_output.py "12 + 30 =" --regex "[0-9]{3}"
python examples/structured_output.py "12 + 30 =" --choice 042 --choice 100
"""

from __future__ import annotations

import argparse
import sys

import grpc

from ep_server.client import Client
from ep_server.v1.decode_pb2 import Choices, Grammar


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("prompt")
    parser.add_argument("--address", default="127.0.0.1:50051", help="host:port of the server")
    kind = parser.add_mutually_exclusive_group(required=True)
    kind.add_argument("--json-schema")
    kind.add_argument("--regex")
    kind.add_argument("--choice", action="append")
    options = parser.parse_args()

    if options.choice:
        grammar = Grammar(choice=Choices(choices=options.choice))
    else:
        grammar = Grammar(json_schema=options.json_schema, regex=options.regex)
    with Client(options.address) as client:
        try:
            output = client.complete(options.prompt, grammar=grammar, temperature=1.0, timeout=60.0)
        except grpc.RpcError as error:
            print(f"{error.code().name}: {error.details()}", file=sys.stderr)
            return 1
    print(output.text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
