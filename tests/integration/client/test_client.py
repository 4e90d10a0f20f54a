"""The Python client, blocking and asynchronous, against a server over fake ranks."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import pytest
from grpc import aio

from ep_server.client import NO_RETRIES, AsyncClient, Client, FinishReason, Output, Retries, Target
from ep_server.errors import (
    DeadlineExceeded,
    Draining,
    EpServerError,
    InvalidArgument,
    NotFound,
    QueueFull,
    RequestCancelled,
    RequestError,
    Unavailable,
)
from ep_server.testing.fake_ranks import FakeRanks
from ep_server.text.chat_template import ChatTemplate
from tests.support.frontend import MODEL, WAIT, Code, serving
from tests.support.scripted_server import INFO, OK, TOKENS, End, scripted

Run = Callable[..., Awaitable[Any]]
QUICK = Retries(first_wait_seconds=0.001)
CHATS = dataclasses.replace(MODEL, chat_template=ChatTemplate({"default": "{{ messages[-1].content }}!"}, {}))


async def in_thread(address: str, use: Callable[[Any], Any], retries: Retries = NO_RETRIES) -> Any:
    def run() -> Any:
        with Client(address, retries=retries) as client:
            return use(client)

    return await asyncio.to_thread(run)


async def in_loop(address: str, use: Callable[[Any], Any], retries: Retries = NO_RETRIES) -> Any:
    async with AsyncClient(address, retries=retries) as client:
        return await use(client)


@pytest.fixture(params=[in_thread, in_loop], ids=["blocking", "async"])
def run(request: pytest.FixtureRequest) -> Run:
    """Gives a client to a function, in a thread or in the event loop."""
    made: Run = request.param
    return made


async def failed(call: Awaitable[Any]) -> EpServerError:
    with pytest.raises(EpServerError) as caught:
        await call
    assert isinstance(caught.value.__cause__, grpc.RpcError)
    return caught.value


async def test_output_of_several_sequences(run: Run) -> None:
    async with serving() as served:
        output: Output = await run(
            served.server.address,
            lambda client: client.complete(
                [65],
                max_new_tokens=2,
                num_sequences=2,
                seed=5,
                output_logprobs=True,
                top_n=1,
                cache_salt="me",
            ),
        )
    assert [each.text for each in output.sequences] == ["BC", "BC"]
    assert output.token_ids == [66, 67] and len(output.logprobs) == 2
    assert output.logprobs[0].top[0][0] == 66
    assert output.info is not None and (output.info.seed, output.info.prompt_tokens) == (5, 1)
    for each in output.sequences:
        assert each.finished is not None and each.finished.reason is FinishReason.LENGTH
        assert each.finished.usage.output_tokens == 2 and each.finished.stop_match is None
    assert {request.cache_salt for request in served.ranks.requests.values()} == {"me"}


async def test_prompt_logprobs_and_stop_match(run: Run) -> None:
    async with serving() as served:
        output: Output = await run(
            served.server.address,
            lambda client: client.complete([65, 66, 67], prompt_logprobs=1, stop_strings=["E"]),
        )
    assert len(output.prompt_logprobs) == 2 and output.text == "D"
    assert output.finished is not None and output.finished.stop_match == "E"


async def test_chat_and_control(run: Run) -> None:
    async with serving(model=CHATS) as served:
        address = served.server.address
        messages = [{"role": "user", "content": "A"}]
        output = await run(address, lambda client: client.chat(messages, max_new_tokens=2).read())
        assert bytes(served.ranks.requests[max(served.ranks.requests)].prompt_ids) == b"A!"
        assert output.text == '"#'
        assert (await run(address, lambda client: client.model_info())).has_chat_template
        assert (await run(address, lambda client: client.server_info())).ranks == 1
        assert (await run(address, lambda client: client.loads())).in_flight == 0
        assert (await run(address, lambda client: client.ep_state())).ranks[0].up
        assert (await run(address, lambda client: client.diagnostics())).config
        assert list((await run(address, lambda client: client.abort("x"))).unknown) == ["x"]
        assert await run(address, lambda client: client.serving(timeout=WAIT))


def first_then(stream: Any, leave: Callable[[Any], Any]) -> Any:
    """Reads one event, then leaves the stream: in the caller's manner."""
    if not hasattr(stream, "__anext__"):
        assert next(stream).token_ids[0] == 2
        return leave(stream)

    async def use() -> Any:
        assert (await anext(stream)).token_ids[0] == 2
        return await leave(stream)

    return use()


def broken_out_of(client: Any) -> Any:
    if isinstance(client, Client):
        for tokens in client.generate([1], ignore_eos=True):
            return tokens.token_ids[0]

    async def use() -> Any:
        async for tokens in client.generate([1], ignore_eos=True):
            return tokens.token_ids[0]
        return None

    return use()


async def test_close_and_break_cancel_the_request(run: Run) -> None:
    async with serving() as served:
        await run(
            served.server.address,
            lambda client: first_then(client.generate([1], ignore_eos=True), lambda stream: stream.close()),
        )
        await served.idle()
        assert await run(served.server.address, broken_out_of) == 2
        await served.idle()
        assert len(served.ranks.cancelled) == 2


async def test_break_cancels_while_the_client_lives() -> None:
    async with serving() as served, AsyncClient(served.server.address) as client:
        async for _ in client.generate([1], ignore_eos=True):
            break
        await served.idle()
        stream = client.generate([1], ignore_eos=True)
        served.ranks.hold()
        reader = asyncio.create_task(stream.read())
        await served.until(lambda: bool(served.server.engine.statistics().in_flight))
        await stream.close()
        async with asyncio.timeout(WAIT):
            assert (await reader).finished is None  # close() ends a loop in another task as well
        with Client(served.server.address) as blocking:

            def leave() -> None:
                for _ in blocking.generate([1], ignore_eos=True):
                    break

            served.ranks.release()
            await asyncio.to_thread(leave)
            await served.idle()
        assert len(served.ranks.cancelled) == 3


@pytest.mark.parametrize(
    ("fields", "kind", "field"),
    [
        ({"top_p": 7.0}, InvalidArgument, "sampling.top_p"),
        ({"model": "other"}, NotFound, None),
        ({"deadline_ms": 50}, DeadlineExceeded, None),
    ],
    ids=str,
)
async def test_errors_are_those_of_the_server(run: Run, fields: Any, kind: Any, field: str | None) -> None:
    async with serving() as served:
        served.ranks.hold()
        use = lambda client: client.complete([1], **fields)  # noqa: E731
        error = await failed(run(served.server.address, use, QUICK))
        assert type(error) is kind and getattr(error, "field", None) == field
        assert error.status in kind.status and str(error)
        if field:
            assert str(error) == "sampling.top_p = 7.0: must be above 0, at most 1"


async def test_full_queue_says_when_to_come_back(run: Run) -> None:
    async with serving(FakeRanks(), scheduler__max_running=1, scheduler__max_queue=1) as served:
        served.ranks.hold()
        calls = [served.client.generate([n], max_new_tokens=2) for n in range(2)]
        await served.until(lambda: served.server.engine.statistics().in_flight == 2)
        address, use = served.server.address, lambda client: client.complete([1], max_new_tokens=1)
        error = await failed(run(address, use))
        assert isinstance(error, QueueFull) and error.retry_after_ms > 0
        retried = asyncio.create_task(run(address, use, QUICK))
        await served.until(lambda: len(served.heard.refused) == 2)
        served.ranks.release()
        async with asyncio.timeout(WAIT):
            assert (await retried).token_ids == [2]
        del calls


async def test_draining_server_is_named(run: Run) -> None:
    async with serving() as served:
        await served.server.engine.drain(0)
        error = await failed(run(served.server.address, lambda client: client.complete([1]), QUICK))
        assert type(error) is Draining
        await served.until(lambda: served.heard.refused == ["UNAVAILABLE"] * QUICK.attempts)


UNAVAILABLE = End(Code.UNAVAILABLE)
DRAINING = End(Code.UNAVAILABLE, (("epserver-error", "Draining"),))


def full(pushback_ms: str) -> End:
    return End(
        Code.RESOURCE_EXHAUSTED, (("epserver-error", "QueueFull"), ("grpc-retry-pushback-ms", pushback_ms))
    )


async def test_calls_without_events_are_sent_again(run: Run) -> None:
    for script in ([UNAVAILABLE, DRAINING, full("1"), OK], [OK]):
        async with scripted(*script) as server:
            output = await run(server.address, lambda client: client.complete([1], timeout=WAIT), QUICK)
            assert output.text == "seven" and len(server.timeouts) == len(script)
            assert all(left is not None and left < 2 * WAIT for left in server.timeouts)


@pytest.mark.parametrize(
    ("end", "kind"),
    [
        (End(Code.UNAVAILABLE, events=(INFO,)), Unavailable),
        (End(Code.UNAVAILABLE, events=(INFO, TOKENS)), Unavailable),
        (full("-1"), QueueFull),
        (full("60000"), QueueFull),
        (full("soon"), QueueFull),
        (End(Code.RESOURCE_EXHAUSTED), RequestError),
        (End(Code.INVALID_ARGUMENT), RequestError),
        (End(Code.DEADLINE_EXCEEDED), DeadlineExceeded),
        (End(Code.CANCELLED), RequestCancelled),
        (End(Code.INTERNAL), EpServerError),
        (End(Code.UNKNOWN, (("epserver-error", "Any"),)), EpServerError),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
async def test_other_calls_are_sent_once(run: Run, end: End, kind: type[EpServerError]) -> None:
    async with scripted(end, OK) as server:
        error = await failed(run(server.address, lambda client: client.complete([1], timeout=WAIT), QUICK))
        assert type(error) is kind and str(error) == "as the script says"
        assert len(server.timeouts) == 1


async def test_attempts_and_deadline_bound_the_retries(run: Run) -> None:
    async with scripted(DRAINING) as server:
        error = await failed(run(server.address, lambda client: client.complete([1]), QUICK))
        assert type(error) is Draining and len(server.timeouts) == QUICK.attempts
    for bound in ({"timeout": WAIT}, {"deadline_ms": 30_000}):
        async with scripted(UNAVAILABLE, full("40000"), OK) as server:
            error = await failed(run(server.address, lambda client: client.complete([1], **bound), QUICK))  # noqa: B023
            assert type(error) is QueueFull and len(server.timeouts) == 2
            assert (server.timeouts[1] or 2 * WAIT) < 2 * WAIT  # of the second attempt as well


async def test_tokens_seen_before_a_failure_are_kept() -> None:
    async with (
        scripted(End(Code.UNAVAILABLE, events=(INFO, TOKENS))) as server,
        AsyncClient(server.address) as client,
    ):
        stream = client.generate([1])
        await failed(stream.read())
        assert stream.output.text == "seven" and stream.output.finished is None


async def test_unreachable_servers_and_unread_files(run: Run) -> None:
    error = await failed(run("127.0.0.1:1", lambda client: client.complete([1], timeout=WAIT), QUICK))
    assert type(error) is Unavailable and "failed to connect" in str(error)
    with pytest.raises(OSError, match="no-such-file"):
        Client(Target("127.0.0.1:1", tls_ca="/no-such-file"))


async def test_a_cancellation_that_meets_the_end_of_a_call() -> None:
    """gRPC reports the end alone then. The request is not tried again."""

    class Ending:
        async def read(self) -> Any:
            try:
                await asyncio.sleep(WAIT)
            except asyncio.CancelledError:
                nothing = aio.Metadata()
                raise aio.AioRpcError(Code.UNAVAILABLE, nothing, nothing, "connection refused") from None

        def cancel(self) -> None:
            pass

    async with scripted(OK) as server, AsyncClient(server.address, retries=QUICK) as client:
        stream = client.generate([1])
        stream._call = Ending()
        reading = asyncio.create_task(stream.read())
        await asyncio.sleep(0)
        reading.cancel()
        await asyncio.wait((reading,), timeout=WAIT)
        assert reading.cancelled()
        await stream.close()
