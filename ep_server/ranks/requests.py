"""The requests of a rank: its scheduler, runner, masks and meter know each, from its begin to its end.

Used in the thread of the rank's loop.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ep_server.ranks.messages import (
    failed_message,
    one_line,
    prompt_logprobs_message,
    request_of,
    tokens_message,
)
from ep_server.ranks.statistics import StepMeter
from ep_server.records import (
    LATE_TOKEN,
    NO_TOKEN,
    PromptLogprobs,
    Request,
    SampledToken,
    StepBatch,
    TokenEvent,
)
from ep_server.v1 import rank_pb2 as pb

if TYPE_CHECKING:  # the parts import torch
    from ep_server.ranks.build import RankParts

log = logging.getLogger(__name__)


class RankRequests:
    """send: a message to the launcher."""

    def __init__(
        self,
        parts: RankParts,
        meter: StepMeter,
        send: Callable[[pb.FromRank], None],
        clock: Callable[[], int],
    ) -> None:
        self._scheduler, self._runner, self._masks = parts.scheduler, parts.runner, parts.masks
        self._meter, self._send, self._clock = meter, send, clock
        self._held: set[int] = set()  # those whose mask was late

    def add(self, wire: pb.Request) -> None:
        """Takes a request. One that cannot be added fails alone: it is in no queue yet."""
        self._send(pb.FromRank(begun=pb.Begun(adding=wire.number)))  # before what such a request may break
        try:
            self._enqueue(request_of(wire))
        except Exception as error:
            log.exception("request %d could not be added", wire.number)
            self._send(failed_message(wire.number, one_line(error)))
        else:
            self._meter.arrived(wire.number, self._clock())
        self._send(pb.FromRank(begun=pb.Begun()))

    def publish(
        self, batch: StepBatch, sampled: Sequence[SampledToken], scores: Sequence[PromptLogprobs]
    ) -> None:
        """Sends the tokens of a step, and what it has scored of prompts.

        A request whose logits are NaN or infinite fails alone: resending one must not stop the server.
        """
        self._publish_scores(scores)
        undrawn = [t.number for t in sampled if t.token_id == NO_TOKEN and self._scheduler.is_live(t.number)]
        events = self._scheduler.commit(batch, sampled)
        late = [t.number for t in sampled if t.token_id == LATE_TOKEN]
        self._held |= {number for number in late if self._scheduler.is_live(number)}
        if len(self._masks):
            self._masks.accept({event.number: event.token_id for event in events if event.finish is None})
        self._publish(events)
        for number in undrawn:
            log.error("the logits of request %d hold NaN or infinity", number)
            self._drop(number)
            self._send(failed_message(number, "its logits hold NaN or infinity"))

    def check_masks(self) -> None:
        """Fails requests whose grammar cannot be followed, and resumes those whose mask has arrived."""
        for number, reason in self._masks.failures().items() if len(self._masks) else ():
            self._scheduler.fail(number)
            self._drop(number)
            self._send(failed_message(number, f"the grammar cannot be followed: {reason}", by_grammar=True))
        for number in [number for number in self._held if self._masks.ready(number)]:
            self._held.discard(number)
            self._scheduler.release(number)

    def await_masks(self, seconds: float) -> bool:
        """Waits for a mask that is late. Returns: False at once if none is."""
        if self._held:
            self._masks.wait(self._held, seconds)
        return bool(self._held)

    def keep(self, numbers: set[int]) -> None:
        """Drops all other requests; nobody awaits them here."""
        for number in self._scheduler.live - numbers:
            self._scheduler.cancel(number)

    def release(self) -> None:
        """Reports requests whose blocks are free."""
        for number in self._scheduler.freed():
            self._drop(number)
            self._send(pb.FromRank(freed=pb.Freed(number=number)))

    def forget_freed(self) -> None:
        """As release(), for requests that nobody awaits: those cancelled during a lost step too."""
        for number in self._scheduler.freed():
            self._drop(number)

    def _enqueue(self, request: Request) -> None:
        self._runner.add(request)
        try:
            self._scheduler.add(request)
        except Exception:
            self._runner.remove(request.number)
            raise
        self._masks.add(request, request.output_ids)

    def _publish(self, events: Sequence[TokenEvent]) -> None:
        if events:
            timed = self._meter.with_queue_times(events)
            self._send(tokens_message(timed, self._meter.steps, self._scheduler.weights))
            for event in events:
                if event.finish is not None:
                    self._drop(event.number)
        self.release()

    def _publish_scores(self, scores: Sequence[PromptLogprobs]) -> None:
        for scored in scores:
            if self._scheduler.is_live(scored.number):
                for part in scored.parts():
                    self._send(prompt_logprobs_message(part))

    def _drop(self, number: int) -> None:
        self._runner.remove(number)
        self._masks.remove(number)
        self._held.discard(number)
        self._meter.left(number)
