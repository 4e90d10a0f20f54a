"""Log probabilities of a prompt, as a caller gets them, and the step of every token."""

from __future__ import annotations

from itertools import pairwise

import pytest

from tests.support.frontend import Code, failure, rest, serving, trailers

PROMPT = [n % 200 for n in range(600)]


@pytest.mark.parametrize("count", [1, 3])
async def test_they_come_once_before_all_tokens(count: int) -> None:
    async with serving(scheduler__max_step_tokens=4096) as served:
        call = served.client.generate(
            PROMPT, prompt_logprobs=2, num_sequences=count, max_new_tokens=3, seed=1
        )
        events = [event async for event in call]
        kinds = [event.WhichOneof("event") for event in events]
        parts = [event.prompt_logprobs for event in events if event.HasField("prompt_logprobs")]
        assert kinds[: len(parts) + 2] == ["prompt_info", *["prompt_logprobs"] * len(parts), "tokens"]
        entries = [entry for part in parts for entry in part.logprobs]
        assert [part.start for part in parts][:1] == [1] and len(entries) == len(PROMPT) - 1
        assert all(b.start == a.start + len(a.logprobs) for a, b in pairwise(parts))
        for token, entry in zip(PROMPT[1:], entries, strict=True):  # as FakeRanks makes them up
            assert entry.logprob == -0.5
            assert [(top.token_id, top.logprob) for top in entry.top] == [(token, -0.5), (token + 1, -1.5)]


async def test_every_message_is_small() -> None:
    async with serving() as served:
        ids = [n % 200 for n in range(3000)]
        call = served.client.generate(ids, prompt_logprobs=20, max_new_tokens=1)
        assert max([event.ByteSize() async for event in call]) < 1 << 16


async def test_the_cache_is_filled_but_not_read() -> None:
    async with serving() as served:
        cached = []
        for wanted in (0, 0, None):
            output = await served.client.complete(PROMPT, prompt_logprobs=wanted, max_new_tokens=1)
            cached.append(output.finished.usage.cached_tokens)
            assert len(output.prompt_logprobs) == (0 if wanted is None else len(PROMPT) - 1)
        assert cached == [0, 0, len(PROMPT) // 16 * 16]


async def test_a_prompt_of_one_token_has_none() -> None:
    async with serving() as served:
        output = await served.client.complete([1], prompt_logprobs=0, max_new_tokens=2)
        assert output.prompt_logprobs == [] and len(output.token_ids) == 2


async def test_more_than_twenty_are_refused() -> None:
    async with serving() as served:
        error = await failure(served.client.generate([1], prompt_logprobs=21))
        assert error.code() is Code.INVALID_ARGUMENT
        assert error.details() == "response.prompt_logprobs = 21: must be 0 to 20"
        assert trailers(error)["epserver-field"] == "response.prompt_logprobs"


async def test_each_message_names_the_step_of_its_last_token() -> None:
    async with serving() as served:
        served.ranks.hold()
        call = served.client.generate([1, 2], max_new_tokens=5, stream_interval=2)
        assert (await call.read()).HasField("prompt_info")
        served.ranks.step(5)
        served.ranks.release()
        tokens = [event.tokens for event in await rest(call) if event.HasField("tokens")]
        ends = [0]
        for message in tokens:
            ends.append(ends[-1] + len(message.token_ids))
            assert message.step == ends[-1] - 1
        assert ends[-1] == 5
