"""One stream: what it carries and how it ends."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from ep_server.ranks.messages import add_message, request_of
from ep_server.testing.fake_ranks import LATENCY_NS, FakeRanks, scripted
from ep_server.v1 import decode_pb2 as pb
from tests.support.frontend import MODEL, NO_TOKENIZER, failure, next_event, rest, serving
from tests.support.tokenizers import EOS


async def test_token_ids_in_token_ids_out() -> None:
    async with serving() as served:
        call = served.client.generate([5, 6, 7], max_new_tokens=4, request_id="one", seed=9)
        events = [event async for event in call]
        kinds = [event.WhichOneof("event") for event in events]
        assert kinds[0] == "prompt_info" and kinds[-1] == "finished"
        assert set(kinds[1:-1]) == {"tokens"}
        info = events[0].prompt_info
        assert (info.request_id, info.model, info.prompt_tokens, info.seed) == ("one", "fake", 3, 9)
        assert [token for event in events[1:-1] for token in event.tokens.token_ids] == [8, 9, 10, 11]
        finished = events[-1].finished
        assert finished.reason == pb.FINISH_REASON_LENGTH and finished.WhichOneof("stop_match") is None
        assert finished.usage == pb.Usage(prompt_tokens=3, output_tokens=4)
        assert 0 < finished.timings.first_token_seconds <= finished.timings.total_seconds
        assert finished.timings.max_token_gap_seconds > 0
        assert finished.timings.queued_seconds == pytest.approx(LATENCY_NS / 1e9)
        parts = finished.timings.queued_seconds + finished.timings.prefill_seconds
        assert parts == pytest.approx(finished.timings.first_token_seconds)
        await served.idle()
        (summary,) = served.heard.finished
        assert (summary.status, summary.reason, summary.output_tokens) == ("OK", "length", 4)
        assert (served.heard.first_tokens, served.heard.gaps, served.heard.load) == (1, 3, (0, 0))


async def test_a_least_length_needs_a_token_that_does_not_end_it() -> None:
    small = replace(MODEL, vocab_size=20, eos_token_ids=frozenset({19}))
    async with serving(model=small) as served:
        fields = {"min_new_tokens": 1, "max_new_tokens": 4, "output_text": False}
        error = await failure(served.client.generate([1], stop_token_ids=list(range(19)), **fields))
        assert error.details().startswith("stopping.min_new_tokens = 1: must be 0 where every token")
        output = await served.client.complete([1], stop_token_ids=list(range(4, 19)), **fields)
        assert output.token_ids == [2, 3, 4]


@pytest.mark.parametrize("seed", [0, 2**63, 2**64 - 1])
async def test_every_seed_that_the_contract_has(seed: int) -> None:
    async with serving() as served:
        output = await served.client.complete([5], max_new_tokens=2, seed=seed)
        assert output.info.seed == seed and len(output.token_ids) == 2
        (request,) = served.ranks.requests.values()
        wire = request_of(add_message(request, 1).add.request)  # as it goes to a rank process
        assert wire.sampling.seed == seed


async def test_text_in_text_out() -> None:
    async with serving(FakeRanks(next_token=scripted(*"né😀".encode(), EOS))) as served:
        events = [event async for event in served.client.generate("hello")]
        pieces = [event.tokens.text for event in events if event.HasField("tokens")]
        assert "".join(pieces) == "né😀"
        assert all("\ufffd" not in piece for piece in pieces)
        (request,) = served.ranks.requests.values()
        assert request.prompt_ids == tuple(b"hello")
        assert events[-1].finished.reason == pb.FINISH_REASON_EOS
        assert events[-1].finished.token_id == EOS


async def test_an_emoji_cut_over_messages_is_never_cut_in_text() -> None:
    async with serving(FakeRanks(next_token=scripted(*"😀".encode()))) as served:
        served.ranks.hold()
        call = served.client.generate([1], max_new_tokens=8)
        await next_event(call)
        texts = []
        for _ in range(8):
            served.ranks.step()
            texts.append((await next_event(call)).tokens.text)
        assert texts == ["", "", "", "😀"] * 2


async def test_a_stop_string_may_span_the_minimum() -> None:
    async with serving(FakeRanks(next_token=scripted(*b"ABC"))) as served:
        output = await served.client.complete([1], stop_strings=["AB"], min_new_tokens=1, max_new_tokens=9)
        assert output.text == "" and output.finished.stop_string == "AB"
        output = await served.client.complete([1], stop_strings=["AB"], min_new_tokens=2, max_new_tokens=9)
        assert output.text == "ABC" and output.finished.stop_string == "AB"


@pytest.mark.parametrize("include, text", [(False, "ab"), (True, "abST")])
async def test_a_stop_string_over_several_tokens(include: bool, text: str) -> None:
    async with serving(FakeRanks(next_token=scripted(*b"abSTOP"))) as served:
        output = await served.client.complete([1], stop_strings=["XX", "ST"], include_stop=include)
        assert output.text == text
        assert output.finished.reason == pb.FINISH_REASON_STOP_STRING
        assert output.finished.stop_string == "ST"
        assert output.token_ids == list(b"abST")
        assert output.finished.usage.output_tokens == 4
        await served.idle()
        assert served.ranks.cancelled == [1]  # the rank was told not to go on
        served.ranks.check_integrity(idle=True)


async def test_text_that_may_become_a_stop_string_waits() -> None:
    async with serving(FakeRanks(next_token=scripted(*b"aSbSTc"))) as served:
        served.ranks.hold()
        call = served.client.generate([1], stop_strings=["STOP"], max_new_tokens=6)
        await next_event(call)
        texts = []
        for _ in range(6):
            served.ranks.step()
            texts.append((await next_event(call)).tokens.text)
        assert texts == ["a", "", "Sb", "", "", "STc"]


async def test_stop_strings_without_text_output() -> None:
    async with serving(FakeRanks(next_token=scripted(*b"abcd"))) as served:
        output = await served.client.complete([1], stop_strings=["c"], output_text=False)
        assert (output.text, output.token_ids) == ("", list(b"abc"))
        assert output.finished.stop_string == "c"


async def test_a_stop_token_ends_without_its_text() -> None:
    async with serving(FakeRanks(next_token=scripted(*b"ab."))) as served:
        output = await served.client.complete([1], stop_token_ids=[ord(".")])
        assert (output.text, output.token_ids) == ("ab", list(b"ab."))
        assert output.finished.reason == pb.FINISH_REASON_STOP_TOKEN
        assert output.finished.token_id == ord(".")


async def test_ignore_eos() -> None:
    async with serving(FakeRanks(next_token=scripted(ord("a"), EOS))) as served:
        output = await served.client.complete([1], ignore_eos=True, max_new_tokens=4)
        assert output.token_ids == [ord("a"), EOS] * 2 and output.text == "aa"
        assert output.finished.reason == pb.FINISH_REASON_LENGTH


async def test_logprobs() -> None:
    async with serving() as served:
        output = await served.client.complete([5], max_new_tokens=3, output_logprobs=True, top_n=2)
        assert [entry.logprob for entry in output.logprobs] == [-0.5] * 3
        assert [(c.token_id, c.logprob) for c in output.logprobs[0].top] == [(6, -0.5), (7, -1.5)]
        plain = await served.client.complete([5], max_new_tokens=3)
        assert plain.logprobs == []


async def test_only_what_was_asked_for_is_sent() -> None:
    async with serving() as served:
        output = await served.client.complete([65], max_new_tokens=3, output_token_ids=False)
        assert (output.token_ids, output.text) == ([], "BCD")
        output = await served.client.complete([65], max_new_tokens=3, output_text=False)
        assert (output.token_ids, output.text) == ([66, 67, 68], "")


async def test_tokens_that_wait_travel_together() -> None:
    async with serving() as served:
        served.ranks.hold()
        call = served.client.generate([0], max_new_tokens=100)
        await next_event(call)
        served.ranks.step(40)  # nothing can be written meanwhile: one event loop
        event = await next_event(call)
        assert list(event.tokens.token_ids) == list(range(1, 41))


async def test_stream_interval() -> None:
    async with serving() as served:
        served.ranks.hold()
        call = served.client.generate([0], max_new_tokens=10, stream_interval=4)
        await next_event(call)
        sizes = []
        for at in range(10):
            served.ranks.step()
            if at in (0, 4, 8, 9):  # the first at once, then four each, then the end
                sizes.append(len((await next_event(call)).tokens.token_ids))
        assert sizes == [1, 4, 4, 1]
        assert (await next_event(call)).HasField("finished")


async def test_without_a_tokenizer() -> None:
    async with serving(model=NO_TOKENIZER) as served:
        output = await served.client.complete([5], max_new_tokens=2)
        assert (output.token_ids, output.text) == ([6, 7], "")


async def test_a_long_prompt_is_encoded_elsewhere_and_arrives_whole() -> None:
    async with serving() as served:
        await served.client.complete("xyz" * 5000, max_new_tokens=1)
        (request,) = served.ranks.requests.values()
        assert bytes(request.prompt_ids) == b"xyz" * 5000


async def test_absent_fields_mean_the_defaults_of_the_model() -> None:
    async with serving() as served:
        await served.client.complete([5], max_new_tokens=1)
        await served.client.complete([5], max_new_tokens=1, temperature=0.0, top_k=0)
        first, second = (request.sampling for request in served.ranks.requests.values())
        assert (first.temperature, first.top_k, first.top_p) == (0.5, 40, 1.0)
        assert (second.temperature, second.top_k) == (0.0, 0)  # present, though zero
        assert first.seed is not None and first.seed != second.seed


async def test_every_field_reaches_the_rank() -> None:
    async with serving(FakeRanks(3)) as served:
        await served.client.complete(
            [5],
            **{"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "seed": 2**64 - 1},
            **{"repetition_penalty": 1.1, "presence_penalty": -0.5, "frequency_penalty": 2.0},
            logit_bias={3: -100.0, 1: 1.5},
            allowed_token_ids=[9, 3, 9],
            **{"max_new_tokens": 3, "min_new_tokens": 1, "stop_token_ids": [200], "stop_strings": ["x"]},
            **{
                "priority": -3,
                "dp_rank": 2,
                "cache_salt": "s",
                "bypass_prefix_cache": True,
                "request_id": "id",
            },
        )
        (request,) = served.ranks.requests.values()
        sampling, stopping = request.sampling, request.stopping
        assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.7, 5, 0.9, 0.1)
        assert sampling.seed == 2**64 - 1
        assert (sampling.repetition_penalty, sampling.presence_penalty) == (1.1, -0.5)
        assert sampling.frequency_penalty == 2.0 and sampling.logit_bias == ((1, 1.5), (3, -100.0))
        assert sampling.allowed_token_ids == (3, 9)
        assert (stopping.max_new_tokens, stopping.min_new_tokens) == (3, 1)
        assert stopping.stop_token_ids == {200} and stopping.eos_token_ids == {EOS}
        assert (request.priority, request.dp_rank, request.cache_salt) == (-3, 2, "s")
        assert request.bypass_prefix_cache and request.request_id == "id"


async def test_the_default_length_is_what_the_context_leaves() -> None:
    model = MODEL.__class__(name="small", vocab_size=256, max_context=10)
    async with serving(model=model) as served:
        output = await served.client.complete([1, 2, 3])
        assert len(output.token_ids) == 7 and math.isclose(output.finished.usage.output_tokens, 7)


async def test_many_streams_over_several_ranks() -> None:
    async with serving(FakeRanks(3)) as served:
        served.ranks.hold()
        calls = [served.client.generate([n], max_new_tokens=5) for n in range(60)]
        ranks = [(await next_event(call)).prompt_info.rank for call in calls]
        assert {ranks.count(rank) for rank in range(3)} == {20}
        served.ranks.release()
        for n, call in enumerate(calls):
            tokens = [token for event in await rest(call) for token in event.tokens.token_ids]
            assert tokens == [n + 1 + i for i in range(5)]
