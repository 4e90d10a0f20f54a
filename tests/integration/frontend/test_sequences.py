"""Several continuations of one prompt: one stream, one id, events told apart by index."""

from __future__ import annotations

import pytest

from ep_server.records import Request
from ep_server.testing.fake_ranks import LIMITS, FakeRanks
from tests.support.frontend import Code, failure, next_event, rest, serving, trailers


def by_seed(request: Request, index: int) -> int:
    """A token that names its request's seed and its place."""
    return ((request.sampling.seed or 0) * 16 + index) % 256


def long_by_seed(request: Request, index: int) -> int:
    """Sequence i ends by the stop token 0 after i + 1 tokens."""
    return 0 if index == request.sampling.seed else 5


async def test_every_sequence_has_its_own_seed_and_finish() -> None:
    async with serving(FakeRanks(2, next_token=by_seed)) as served:
        call = served.client.generate([7, 7], num_sequences=3, seed=2**64 - 1, max_new_tokens=4)
        events = [event async for event in call]
        kinds = [event.WhichOneof("event") for event in events]
        assert kinds.count("prompt_info") == 1 and kinds[0] == "prompt_info"
        assert kinds.count("finished") == 3 and kinds[-1] == "finished"
        assert events[0].prompt_info.seed == 2**64 - 1
        seeds = [2**64 - 1, 0, 1]
        for index, seed in enumerate(seeds):
            own = [e.tokens for e in events if e.HasField("tokens") and e.tokens.index == index]
            assert [t for tokens in own for t in tokens.token_ids] == [
                (seed * 16 + i) % 256 for i in range(4)
            ]
        assert sorted(e.finished.index for e in events if e.HasField("finished")) == [0, 1, 2]
        requests = list(served.ranks.requests.values())
        assert [request.sampling.seed for request in requests] == seeds
        assert len({request.dp_rank for request in requests}) == 1
        assert {request.prompt_ids for request in requests} == {(7, 7)}
        await served.idle()
        assert [summary.status for summary in served.heard.finished] == ["OK"] * 3


async def test_the_stream_ends_after_the_longest_sequence() -> None:
    async with serving(FakeRanks(next_token=long_by_seed)) as served:
        fields = {"seed": 0, "stop_token_ids": [0], "max_new_tokens": 20}
        output = await served.client.complete([1], num_sequences=4, **fields)
        outputs = [output, *output.others]
        assert [len(o.token_ids) for o in outputs] == [1, 2, 3, 4]
        assert [o.finished.usage.output_tokens for o in outputs] == [1, 2, 3, 4]


async def test_each_sequence_has_a_text_and_a_stop_string_of_its_own() -> None:
    scripts = {0: b"abSTOPxx", 1: b"STabcdef", 2: b"zzzzSTOP"}
    fake = FakeRanks(next_token=lambda request, index: scripts[request.sampling.seed or 0][index])
    async with serving(fake) as served:
        output = await served.client.complete(
            [1], num_sequences=3, seed=0, stop_strings=["STOP"], max_new_tokens=8
        )
        assert [o.text for o in (output, *output.others)] == ["ab", "STabcdef", "zzzz"]


async def test_a_long_prompt_is_shared_through_the_prefix_cache() -> None:
    async with serving(FakeRanks(limits=LIMITS)) as served:
        output = await served.client.complete([3] * 4096, num_sequences=2, max_new_tokens=1)
        cached = [o.finished.usage.cached_tokens for o in (output, *output.others)]
        assert cached == [0, 4096 - LIMITS.block_size]


async def test_one_id_names_all_of_them_until_the_last_has_ended() -> None:
    async with serving(FakeRanks(next_token=long_by_seed)) as served:
        served.ranks.hold()
        fields = {"seed": 0, "stop_token_ids": [0], "max_new_tokens": 20, "request_id": "both"}
        call = served.client.generate([1], num_sequences=2, **fields)
        await next_event(call)
        served.ranks.step()  # sequence 0 ends
        while not (await next_event(call)).HasField("finished"):
            pass
        again = await failure(served.client.generate([1], **fields))
        assert again.code() is Code.ALREADY_EXISTS
        await served.client.abort("both")
        assert (await failure(call)).code() is Code.CANCELLED
        served.ranks.release()
        await served.idle()
        assert [s.status for s in served.heard.finished] == ["OK", "CANCELLED"]
        served.ranks.check_integrity(idle=True)


async def test_leaving_cancels_all_and_a_failure_ends_all() -> None:
    async with serving() as served:
        served.ranks.hold()
        left = served.client.generate([1], num_sequences=3)
        await next_event(left)
        left.cancel()
        await served.until(lambda: served.server.engine.statistics().open_streams == 0)
        failed = served.client.generate([1], num_sequences=3)
        await next_event(failed)
        served.ranks.fail(5, "a broken row")
        error = await failure(failed)
        assert error.code() is Code.INTERNAL and "a broken row" in (error.details() or "")
        served.ranks.release()
        await served.idle()
        statuses = [s.status for s in served.heard.finished]
        assert statuses == ["CANCELLED"] * 3 + ["INTERNAL"] + ["CANCELLED"] * 2
        served.ranks.check_integrity(idle=True)


@pytest.mark.parametrize("fields", [{}, {"dp_rank": 0}])
async def test_all_are_admitted_or_none(fields: dict[str, int]) -> None:
    async with serving(scheduler__max_running=2, scheduler__max_queue=2) as served:
        served.ranks.hold()
        error = await failure(served.client.generate([1], num_sequences=5, **fields))
        assert error.code() is Code.INVALID_ARGUMENT and "at most 4" in error.details()
        assert "scheduler.max_queue" in error.details()
        assert "grpc-retry-pushback-ms" not in trailers(error)  # it would never fit
        assert trailers(error)["epserver-field"] == "sampling.num_sequences"
        blocker = served.client.generate([1], max_new_tokens=2, **fields)
        await next_event(blocker)
        error = await failure(served.client.generate([1], num_sequences=4, **fields))
        assert error.code() is Code.RESOURCE_EXHAUSTED and "grpc-retry-pushback-ms" in trailers(error)
        served.ranks.release()
        await rest(blocker)
        served.ranks.requests.clear()
        served.ranks.hold()
        assert served.ranks.requests == {} and served.heard.admitted == 1
        call = served.client.generate([1], num_sequences=4, max_new_tokens=2, **fields)
        await next_event(call)
        served.ranks.release()
        assert sum(event.HasField("finished") for event in await rest(call)) == 4


class Choosy(FakeRanks):
    def submit(self, rank: int, request: Request) -> None:
        if len(self.requests) == 2:
            raise ValueError("no more")
        super().submit(rank, request)


async def test_a_sequence_that_no_rank_takes_takes_the_others_along() -> None:
    async with serving(Choosy()) as served:
        error = await failure(served.client.generate([1], num_sequences=3))
        assert error.code() is Code.INTERNAL
        await served.idle()
        assert served.server.engine.statistics().open_streams == 0
        served.ranks.check_integrity(idle=True)


@pytest.mark.parametrize("count", [0, 129])
async def test_how_many(count: int) -> None:
    async with serving() as served:
        error = await failure(served.client.generate([1], num_sequences=count))
        assert error.code() is Code.INVALID_ARGUMENT
        assert error.details() == f"sampling.num_sequences = {count}: must be 1 to 128"
