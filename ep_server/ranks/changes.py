"""Changes that all ranks apply at the same step boundary, such as new weights.

A change is prepared in a background thread while steps run. The frontend then has every rank offer it in the
vote, and the vote switches. Until then a change can be dropped, and nothing has changed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from ep_server.errors import InternalError, WrongState
from ep_server.orders import OrderDone
from ep_server.ranks.background import yield_cores
from ep_server.ranks.messages import one_line

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.05  # between two looks at a dropped change


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a change will take. nbytes: it copies during the switch. rate: bytes per second, measured."""

    nbytes: int = 0
    rate: float = 0.0


class Change(Protocol):
    """Something of one rank that changes while it serves.

    what: it, in words, for errors.
    outlives_loss: what is offered is applied although a rank was lost before the vote switched.
    needs_idle: apply() must wait for the steps in flight. Else these keep what they were launched with.
    """

    what: str
    outlives_loss: bool
    needs_idle: bool

    def prepare(self) -> Prepared:
        """Makes ready all it needs; may take long. In another thread, while steps run.

        Raises: any error; it refuses the change, which must have changed nothing.
        """
        ...

    def apply(self) -> None:
        """Changes the rank. In the thread of its loop; no step is in flight if `needs_idle`.

        An error ends the rank: it may be half changed.
        """
        ...


@dataclass(slots=True, eq=False)
class _Making:
    """A change in the making. order: to be answered, 0 once it is. result: once it is prepared or refused.

    before: threads of dropped changes, which may hold what this one needs, such as memory. It waits for them.
    """

    number: int
    order: int
    change: Change
    before: list[threading.Thread]
    result: Prepared | Exception | None = None
    dropped: bool = False
    thread: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self.run, name=f"change-{self.number}", daemon=True)
        self.thread.start()

    def run(self) -> None:
        yield_cores()
        try:
            for thread in self.before:
                while thread.is_alive() and not self.dropped:
                    thread.join(LOOK_SECONDS)
            self.result = Prepared() if self.dropped else self.change.prepare()
        except Exception as error:
            self.result = error


class Changes:
    """At most one change in the making, of this rank. One thread calls it, that of the rank's loop."""

    def __init__(self, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        self._clock = clock
        self._making: _Making | None = None
        self._dropped: list[threading.Thread] = []  # of dropped changes that were still prepared
        self._switch: int | None = None  # the order to switch

    @property
    def preparing(self) -> bool:
        """finished() will answer."""
        return self._making is not None and self._making.order > 0

    @property
    def offered(self) -> int:
        """The number of the change that this rank can switch to now; 0 = none."""
        return self._making.number if self._making is not None and self._switch is not None else 0

    @property
    def needs_idle(self) -> bool:
        """As the change in the making does."""
        return self._making is not None and self._making.change.needs_idle

    def prepare(self, number: int, order: int, change: Change) -> None:
        """Begins to prepare a change, once what prepares a dropped one has ended.

        order: its number; finished() answers it. That of a dropped one is not answered any more.
        Raises: WrongState while another one is in the making.
        """
        made = self._making
        if made is not None and not made.dropped:
            done = "has prepared" if made.result is not None else "prepares"
            raise WrongState(
                f"it {done} {made.change.what} (change {made.number}), and switches or drops that first: "
                "nothing has changed, try again after that"
            )
        self._dropped = [thread for thread in self._dropped if thread.is_alive()]
        if made is not None and made.thread.is_alive():
            log.info("change %d begins once dropped change %d is not prepared any more", number, made.number)
            self._dropped.append(made.thread)
        self._making = _Making(number, order, change, self._dropped)

    def finished(self) -> OrderDone | None:
        """The answer to prepare(), once. A change that failed or was dropped is gone then."""
        made = self._making
        if made is None or not made.order or made.result is None:
            return None
        order, made.order = made.order, 0
        if isinstance(made.result, Prepared) and not made.dropped:
            return OrderDone(order, nbytes=made.result.nbytes, rate=made.result.rate)
        self._making = None
        if isinstance(made.result, Exception):
            log.warning("change %d is refused: %s", made.number, made.result)
            return OrderDone(order, error=one_line(made.result))
        return OrderDone(order, error=f"change {made.number} was dropped")

    def offer(self, number: int, order: int) -> None:
        """The frontend has decided: the rank offers the change from the next vote on.

        order: apply() answers it. Raises: WrongState if the change is not prepared.
        """
        made = self._making
        if made is None or made.number != number or made.dropped or not isinstance(made.result, Prepared):
            raise WrongState(f"change {number} is not prepared")
        self._switch = order

    def drop(self, number: int) -> None:
        """Forgets a change that is not offered. A thread that still prepares it runs to its end."""
        made = self._making
        if made is None or made.number != number or self._switch is not None:
            return
        if made.order:
            made.dropped = True
        else:
            self._making = None

    def settle(self) -> None:
        """After a loss that the rank outlives: applies what it offers, or drops it.

        Raises: what the change raises.
        """
        made = self._making
        if made is None:
            return
        if self._switch is not None and made.change.outlives_loss:
            self.apply(made.number, self._clock())
        else:
            self._switch = None
            self.drop(made.number)

    def apply(self, number: int, since: int) -> OrderDone:
        """The vote has switched. since: clock when this rank stopped running steps.

        Raises: what the change raises.
        """
        made, order = self._making, self._switch
        if made is None or order is None or made.number != number:
            raise InternalError(f"the vote switched to change {number}, which this rank did not offer")
        made.change.apply()
        self._making = self._switch = None
        return OrderDone(order, seconds=(self._clock() - since) / 1e9)
