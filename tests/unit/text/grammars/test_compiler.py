"""Grammars are checked in a process of their own: once if equal, within limits, with a clear reason."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest

from ep_server.errors import InvalidArgument, QueueFull, Unavailable
from ep_server.records import Grammar, GrammarKind
from ep_server.text.grammars import compiler as module
from ep_server.text.grammars.compiler import CompileLimits, GrammarCompiler
from tests.support.tokenizers import EOS, byte_level, loaded

ENDLESS = Grammar(GrammarKind.JSON_SCHEMA, '{"type": "integer", "multipleOf": 99999989}')
LARGE = Grammar(GrammarKind.REGEX, "([a-z]{1,400}[0-9]{1,400}){1,400}")


def regex(source: str) -> Grammar:
    return Grammar(GrammarKind.REGEX, source)


@pytest.fixture
async def compiler() -> AsyncIterator[GrammarCompiler]:
    made = GrammarCompiler(loaded(byte_level()), EOS + 1, {EOS}, CompileLimits(seconds=0.5))
    yield made
    await made.close()
    await made.close()


async def test_equal_grammars_are_compiled_once(compiler: GrammarCompiler) -> None:
    programs = await asyncio.gather(*(compiler.check(regex("[0-9]+")) for _ in range(5)))
    assert len(set(programs)) == 1 and programs[0].kind is GrammarKind.PROGRAM
    for _ in range(2):
        with pytest.raises(InvalidArgument, match=r"grammar\.regex = '\(': must be a grammar that compiles"):
            await compiler.check(regex("("))
    assert compiler.compiled == 2


async def test_a_caller_that_leaves_ends_its_own_wait_only(compiler: GrammarCompiler) -> None:
    first = asyncio.create_task(compiler.check(regex("a+")))
    second = asyncio.create_task(compiler.check(regex("a+")))
    await asyncio.sleep(0)
    first.cancel()
    assert (await second).kind is GrammarKind.PROGRAM
    assert first.cancelled() and compiler.compiled == 1


async def test_an_endless_grammar_ends_at_the_limit(compiler: GrammarCompiler) -> None:
    """The next one finds a new process."""
    with pytest.raises(
        InvalidArgument, match=r"grammar\.json_schema = .* it took more than 0\.5 s or 1024 MiB"
    ):
        await compiler.check(ENDLESS)
    assert (await compiler.check(regex("b"))).kind is GrammarKind.PROGRAM


async def test_a_process_that_does_not_start_is_started_again(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(module, "MODULE", "ep_server.no_such_module")
        with pytest.raises(Unavailable, match="did not start"):
            await compiler.check(regex("a"))
    assert (await compiler.check(regex("a"))).kind is GrammarKind.PROGRAM


async def test_too_many_waiting_grammars_are_refused(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_WAITING", 2)
    waiting = [asyncio.create_task(compiler.check(regex(f"a{{{n}}}"))) for n in (1, 2)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    with pytest.raises(QueueFull, match="2 grammars wait"):
        await compiler.check(regex("c"))
    await asyncio.gather(*waiting)
    await compiler.check(regex("c"))


async def test_what_is_kept_is_bounded(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEPT", 2)
    for source in ("a", "b", "c", "c", "b", "a"):
        await compiler.check(regex(source))
    assert compiler.compiled == 4 and repr(compiler) == "GrammarCompiler(kept=2, waiting=0)"


@pytest.mark.parametrize(
    ("tokenizer", "eos", "why"), [(None, {1}, "no tokenizer"), (1, (), "no token that ends")]
)
async def test_a_model_that_cannot_follow_grammars(tokenizer: object, eos: set[int], why: str) -> None:
    compiler = GrammarCompiler(tokenizer and loaded(byte_level()), EOS + 1, eos)
    with pytest.raises(
        InvalidArgument, match=f"grammar.choice.choices = .*: must be absent: this model has {why}"
    ):
        await compiler.check(Grammar(GrammarKind.CHOICE, json.dumps(["a"])))
