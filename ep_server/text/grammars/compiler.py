"""Checks grammars for the frontend, in a process that hostile ones may end.

A grammar must become a program and give its first mask within limits of time and memory. Equal grammars are
checked once, and what came of them is kept. Used in one event loop. Units: seconds, bytes.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass

from ep_server.errors import InvalidArgument, QueueFull, Unavailable
from ep_server.records import Grammar, GrammarKind
from ep_server.text.tokenizer import Tokenizer

MODULE = "ep_server.text.grammars.process"
BOOTSTRAP = (
    "import json, runpy, sys; sys.path[:] = json.loads(sys.argv.pop(1)); "
    "runpy.run_module(sys.argv[1], run_name='__main__')"
)
START_SECONDS = 60.0  # to read a large vocabulary on a busy machine
BUSY = 3  # so many times its limit a grammar may take on a busy machine
SLACK_SECONDS = 1.0  # the process ends itself by then; beyond this the frontend does
KEPT = 256  # grammars whose outcome is kept
KEPT_BYTES = 16 << 20  # of their programs
MOST_WAITING = 64  # grammars that wait to be checked
RETRY_MS = 1000
SHOWN = 80  # characters of a source that an error repeats
FIELDS = {GrammarKind.CHOICE: "grammar.choice.choices"}


@dataclass(frozen=True, slots=True)
class CompileLimits:
    """Of one grammar. seconds: of computing. memory: beyond what the process has anyway."""

    seconds: float = 5.0
    memory: int = 1 << 30


class GrammarCompiler:
    """See above. The process starts with the first grammar.

    Args:
        tokenizer: of the model; None where it has none. vocab: its tokens. eos: ids that end a sequence.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        vocab: int,
        eos: Collection[int],
        limits: CompileLimits | None = None,
    ) -> None:
        self._tokenizer, self._vocab, self._eos = tokenizer, vocab, sorted(eos)
        self._limits = limits or CompileLimits()
        self._outcomes: OrderedDict[bytes, asyncio.Task[str]] = OrderedDict()
        self._kept_bytes = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._turn = asyncio.Lock()
        self._waiting = 0
        self.compiled = 0  # grammars that the process was asked for

    def __repr__(self) -> str:
        return f"GrammarCompiler(kept={len(self._outcomes)}, waiting={self._waiting})"

    async def check(self, grammar: Grammar) -> Grammar:
        """The grammar as a program, which ranks get.

        Raises: InvalidArgument with the reason in one line; QueueFull if too many wait; Unavailable if the
          process does not start.
        """
        if self._tokenizer is None:
            raise _refusal(grammar, "absent: this model has no tokenizer")
        if not self._eos:
            raise _refusal(grammar, "absent: this model has no token that ends a sequence")
        key = hashlib.sha256(f"{grammar.kind}\0{grammar.source}".encode()).digest()
        task = self._outcomes.get(key)
        if task is None:
            if self._waiting >= MOST_WAITING:
                raise QueueFull(f"{self._waiting} grammars wait to be compiled", RETRY_MS)
            task = self._outcomes[key] = asyncio.create_task(self._compile(grammar, self._tokenizer))
            task.add_done_callback(lambda done: self._keep(key, done))
        self._outcomes.move_to_end(key)
        # A caller that leaves ends its own wait only: others may wait for the same grammar.
        return Grammar(GrammarKind.PROGRAM, await asyncio.shield(task))

    async def close(self) -> None:
        """Ends the process. Idempotent."""
        for task in self._outcomes.values():
            task.cancel()
        await self._end()

    async def _compile(self, grammar: Grammar, tokenizer: Tokenizer) -> str:
        self._waiting += 1
        try:
            async with self._turn:
                answer = await self._asked(grammar, tokenizer)
        finally:
            self._waiting -= 1
        if "error" in answer:
            raise _refusal(grammar, f"a grammar that compiles: {answer['error']}")
        return answer["program"]

    async def _asked(self, grammar: Grammar, tokenizer: Tokenizer) -> dict[str, str]:
        self.compiled += 1
        seconds = self._limits.seconds
        if self._process is None or self._process.poll() is not None:
            try:
                async with asyncio.timeout(START_SECONDS):
                    await self._start(tokenizer)
            except (OSError, TimeoutError, EOFError) as error:
                await self._end()
                raise Unavailable("the process that compiles grammars did not start") from error
        try:
            async with asyncio.timeout(BUSY * seconds + SLACK_SECONDS):
                return await self._told({"kind": grammar.kind, "source": grammar.source})
        except (TimeoutError, EOFError, ConnectionError):
            await self._end()
            return {"error": f"it took more than {seconds:g} s or {self._limits.memory >> 20} MiB"}
        except BaseException:
            await self._end()  # its answer would be taken for the next one's
            raise

    async def _start(self, tokenizer: Tokenizer) -> None:
        path = [entry for entry in sys.path if entry]
        command = [sys.executable, "-P", "-c", BOOTSTRAP, json.dumps(path), MODULE]
        # Not by the event loop: uvloop forks with the handlers of gRPC, which disturb calls in flight.
        self._process = await asyncio.to_thread(
            subprocess.Popen,
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            process_group=0,  # a ^C on the terminal goes to the frontend, which drains
        )
        text = await asyncio.to_thread(tokenizer.to_json)
        await self._told(
            {
                "tokenizer": text,
                "vocab": self._vocab,
                "eos": self._eos,
                "seconds": self._limits.seconds,
                "deadline": BUSY * self._limits.seconds,
                "memory": self._limits.memory,
            }
        )

    async def _told(self, message: object) -> dict[str, str]:
        """Sends a line; returns the line that answers it. Raises: EOFError, ConnectionError.

        A thread waits for the answer; the end of the process ends it too.
        """
        assert self._process is not None
        return await asyncio.to_thread(_exchange, self._process, json.dumps(message).encode() + b"\n")

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            await asyncio.to_thread(_reap, process)

    def _keep(self, key: bytes, task: asyncio.Task[str]) -> None:
        """Of what is kept the oldest goes. A task that was cancelled or got no answer goes at once."""
        if task.cancelled() or isinstance(task.exception(), Unavailable):
            self._outcomes.pop(key, None)
            return
        self._kept_bytes += _size(task)
        while len(self._outcomes) > KEPT or self._kept_bytes > KEPT_BYTES:
            oldest = next((k for k, each in self._outcomes.items() if each.done() and k != key), None)
            if oldest is None:
                return
            self._kept_bytes -= _size(self._outcomes.pop(oldest))


def _exchange(process: subprocess.Popen[bytes], line: bytes) -> dict[str, str]:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(line)
    process.stdin.flush()
    answer = process.stdout.readline()
    if not answer.endswith(b"\n"):
        raise EOFError
    decoded: dict[str, str] = json.loads(answer)
    return decoded


def _reap(process: subprocess.Popen[bytes]) -> None:
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(BrokenPipeError):  # a line that it did not read
                pipe.close()


def _size(task: asyncio.Task[str]) -> int:
    return 0 if task.exception() is not None else len(task.result())


def _refusal(grammar: Grammar, allowed: str) -> InvalidArgument:
    field = FIELDS.get(grammar.kind, f"grammar.{grammar.kind}")
    return InvalidArgument(field, grammar.source[:SHOWN], allowed)
