"""One admitted request and its responses."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from ep_server.engine.stream import Completion
from ep_server.errors import EpServerError
from ep_server.frontend.doors.oip.inference import Inference
from ep_server.frontend.doors.oip.responses import Responses
from ep_server.frontend.doors.oip.statistics import Statistics
from ep_server.frontend.generation import Generation
from ep_server.text.tokenizer import Tokenizer


class ActiveInference:
    """A request on its rank. Whoever holds it calls close()."""

    def __init__(
        self,
        inference: Inference,
        generation: Generation,
        tokenizer: Tokenizer | None,
        statistics: Statistics,
        started: float,
    ) -> None:
        """started: time.monotonic() when the request arrived."""
        first = generation.requests[0]
        self.form = inference.form
        self._streams = inference.streams
        self._generation = generation
        self._statistics: Statistics | None = statistics
        self._started = started
        self._responses = Responses(
            inference.form, tokenizer, len(generation.requests), len(first.prompt_ids)
        )

    @property
    def complete(self) -> bool:
        """The last response was made."""
        return self._responses.complete

    async def responses(self) -> AsyncIterator[Any]:
        """Several for a request that streams, else one. Raises: the error that the request ended with."""
        completions: list[Completion] = []
        async for index, chunk in self._generation.chunks():
            self._responses.add(index, chunk)
            if chunk.completion is not None:
                completions.append(chunk.completion)
            if self.complete:
                self._count(completions)
            if self._streams or self.complete:
                yield self._responses.take()

    def close(self, error: EpServerError | None = None) -> None:
        """Cancels what still runs. error: why the server ends the call. Idempotent."""
        self._generation.close(error)
        self._count(None)

    def _count(self, completions: list[Completion] | None) -> None:
        """Once: completions, or None for a request that did not end well."""
        statistics, self._statistics = self._statistics, None
        if statistics is None:
            return
        if completions is None:
            statistics.failed(self._started)
        else:
            statistics.succeeded(self._started, completions)
