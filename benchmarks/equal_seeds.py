"""Counts the requests whose tokens are the same alone and among others, on a running server.

    ep-server serve --model DIR ... &
    python benchmarks/equal_seeds.py 127.0.0.1:50051 --requests 12 --tokens 256

Each request has its own prompt of random ids and its own seed, and is sent twice: alone, then with all the
others at once. docs/how-to/clients.md says what to expect.
"""

from __future__ import annotations

import argparse
import asyncio
import random

from ep_server.client import AsyncClient, Target

PROMPT_TOKENS = 32


async def answer(client: AsyncClient, vocabulary: int, number: int, tokens: int) -> list[int]:
    """The tokens of one request."""
    prompt = random.Random(number).choices(range(vocabulary), k=PROMPT_TOKENS)
    output = await client.complete(
        prompt, max_new_tokens=tokens, temperature=1.0, seed=number, ignore_eos=True, output_text=False
    )
    return output.token_ids


async def measure(address: str, requests: int, tokens: int) -> None:
    """Prints how many are equal, and where the others part."""
    async with AsyncClient(Target(address)) as client:
        size = (await client.model_info()).vocab_size
        alone = [await answer(client, size, number, tokens) for number in range(requests)]
        again = [await answer(client, size, number, tokens) for number in range(requests)]
        together = await asyncio.gather(*(answer(client, size, number, tokens) for number in range(requests)))
    for name, others in (("alone again", again), ("all at once", together)):
        pairs = zip(alone, others, strict=True)
        parted = sorted(
            next(at for at, (a, b) in enumerate(zip(one, other, strict=True)) if a != b)
            for one, other in pairs
            if one != other
        )
        where = f"; the others part at tokens {parted}" if parted else ""
        print(f"{name}: {requests - len(parted)} of {requests} requests give the same {tokens} tokens{where}")


def main() -> None:
    """Reads the arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("address", help="host:port of the server")
    parser.add_argument("--requests", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=256)
    options = parser.parse_args()
    asyncio.run(measure(options.address, options.requests, options.tokens))


if __name__ == "__main__":
    main()
