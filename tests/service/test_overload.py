"""More calls than the server can take: each one gets a status of the server and is counted."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from pathlib import Path

import grpc

from ep_server.service import GENERATE
from ep_server.v1 import decode_pb2 as pb
from tests.service.harness import WAIT, Code, Served, failure, next_event, serving

BURST = 3500  # gRPC itself holds at most 3000 calls that no one has accepted
REQUEST = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1]), stopping=pb.Stopping(max_new_tokens=1))


def burst(address: str, count: int, sent: threading.Event) -> Counter[str]:
    """Calls Generate at once, so often, on one connection. Returns: how many ended with which status."""
    codes: Counter[str] = Counter()
    with grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        grpc.channel_ready_future(channel).result(WAIT)
        call = channel.unary_stream(GENERATE)
        calls = [call(REQUEST.SerializeToString(), timeout=4 * WAIT) for _ in range(count)]
        sent.set()
        for one in calls:
            codes[one.code().name] += 1
    return codes


async def blocked_burst(served: Served, count: int) -> Counter[str]:
    """A burst that arrives while the event loop of the server does nothing."""
    sent = threading.Event()
    ended = asyncio.create_task(asyncio.to_thread(burst, served.server.address, count, sent))
    while not sent.is_set():
        await asyncio.sleep(0)
        time.sleep(0.5)
    time.sleep(1.0)  # the last of them are on their way
    return await ended


async def test_every_call_of_a_burst_gets_a_status_of_ours() -> None:
    async with serving(scheduler__max_running=1, scheduler__max_queue=0) as served:
        served.ranks.hold()
        running = served.client.generate([1], max_new_tokens=1)
        await next_event(running)
        codes = await blocked_burst(served, BURST)
        assert codes == {"RESOURCE_EXHAUSTED": BURST}
        assert Counter(served.heard.refused) == codes
        served.ranks.release()
        await served.idle()


async def test_calls_refused_unread_are_counted(tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text("secret\n")
    known = [("authorization", "Bearer secret")]
    async with serving(grpc__token_file=str(tmp_path / "tokens"), grpc__max_message_bytes=2048) as served:
        call = served.client.channel.unary_stream(GENERATE)
        for data, metadata, code in (
            (b"", [], Code.UNAUTHENTICATED),
            (b"\xff", known, Code.INVALID_ARGUMENT),
            (bytes(2049), known, Code.RESOURCE_EXHAUSTED),
            (b"", known, Code.INVALID_ARGUMENT),
        ):
            assert (await failure(call(data, metadata=metadata))).code() is code
        assert served.heard.refused == [
            "UNAUTHENTICATED",
            "INVALID_ARGUMENT",
            "RESOURCE_EXHAUSTED",
            "INVALID_ARGUMENT",
        ]
        assert (await failure(call(bytes(8192), metadata=known))).code() is Code.RESOURCE_EXHAUSTED
        await served.until(lambda: len(served.heard.refused) == 5)  # gRPC refuses more than twice the limit
