"""Generations of a group of ranks: what follows a loss, and how ranks join and leave while the others serve.

A generation is a set of live ranks and a placement of experts. After a loss the others are regrouped at once:
they drop the steps in flight. A planned change is prepared while they serve, and they switch by vote.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress

from ep_server.errors import CheckpointError, ConfigError, EpServerError, StartupError, Unavailable
from ep_server.orders import PrepareGeneration, SwitchChange, refusals
from ep_server.ranks.arrivals import MOST_STARTS, Arrivals
from ep_server.ranks.board import Board, Timing
from ep_server.ranks.hosts import Replacing, ended
from ep_server.ranks.own_orders import OwnOrders
from ep_server.ranks.process import RankCallbacks
from ep_server.ranks.protocol import GroupState, RankListener, Restarted
from ep_server.ranks.regrouping import Regrouping
from ep_server.ranks.signs import LossCount, Sign, loss_cause, lost_ranks
from ep_server.scheduler.placement import Placement, has_copies
from ep_server.scheduler.regroup import next_placement
from ep_server.v1 import rank_pb2 as pb

log = logging.getLogger(__name__)

SWITCH_SECONDS = 60.0
LOOK_SECONDS = 0.02  # between two looks whether the ranks have recovered
AGAIN_SECONDS, MOST_AGAIN = 1.0, 30  # where ranks do not join: again after 1 s, 2 s, ... 30 s


class Generations:
    """live: ranks that serve. placement: of experts, None where they stay. out: ranks that stay out, why."""

    def __init__(
        self,
        board: Board,
        replacing: Replacing,
        callbacks: RankCallbacks,
        listener: RankListener,
        timing: Timing,
        rank_losses: int,
    ) -> None:
        """rank_losses: of one rank within ten minutes, after which it stays out; 0 = it always returns."""
        self._board, self._replacing, self._listener = board, replacing, listener
        self._timing, self._losses = timing, LossCount(rank_losses)
        self.live = frozenset(board.processes)
        self.placement = replacing.plan.placement
        self._joined = {"spread": True, "copies": has_copies(self.placement)}
        self.wanted = self.live
        self.out: dict[int, str] = {}
        self.held: frozenset[int] = frozenset()  # out, as an operator wants
        self.over = True  # no regroup after a loss runs
        self.arrivals = Arrivals(board, replacing, callbacks, timing)
        self.regrouping = Regrouping(board, replacing)
        self._counted: set[int] = set()
        self.orders = OwnOrders(board)
        self._changing = asyncio.Lock()
        self._places = asyncio.Lock()  # held by who starts or ends processes of ranks that do not serve
        self._returning: asyncio.Task[None] | None = None
        self._offered: dict[int, Placement] = {}  # by change of the engine's
        self.report()

    @property
    def generation(self) -> int:
        """The latest one."""
        return self.regrouping.generation

    def report(self) -> None:
        """Reports the live ranks and the placement to the engine."""
        spares, live = self._replacing.plan.spares, tuple(sorted(self.live))
        ready = tuple(self._board.ready[rank] for rank in live if rank in self._board.ready)
        lacking = spares.lacking_bytes(len(live))
        out = {rank: why for rank, why in self.out.items() if rank not in self.live}
        state = GroupState(self.generation, live, lacking, self.placement, ready, out)
        self._listener.on_group(state)

    def takes(self, sign: Sign) -> bool:
        """Handles the sign of a process that the others do not wait for; False for one of a live rank."""
        if sign.rank in self.arrivals.ending:
            return True
        if sign.rank not in self.arrivals.loading:
            return sign.rank not in self.live
        if self.arrivals.lost(sign):
            self.count([sign], {sign.rank})
            self.report()
        return True

    def prepares(self, change: int, placement: Placement) -> None:
        """The engine has ordered another placement on the same ranks."""
        self._offered = {change: placement}

    def switches(self, change: int) -> None:
        """The engine has decided: ranks apply it, also after a loss."""
        self.placement = self._offered.pop(change, self.placement)

    async def restart(self, awaited: Callable[[int], Collection[int]]) -> Restarted:
        """As Ranks.restart: goes on without the lost ranks, or with new processes in their place.

        Raises: StartupError; the group must end then.
        """
        self.over, board = False, self._board
        dead: set[int] = set()
        new: set[int] = set()
        failed = 0  # starts
        for _ in range(2 * len(self.live) + 2 + MOST_STARTS):
            signs = [*board.signs]
            board.signs.clear()
            fresh = lost_ranks(signs) & self.live
            self.count(signs, fresh)
            for sign in signs:
                if isinstance(sign.error, ConfigError | CheckpointError):  # no other process would do better
                    raise sign.error
            left_over = set(board.processes) - self.arrivals.loading - (self.live - dead)
            await self.arrivals.end(fresh | left_over, fresh)
            for rank in fresh:
                self._replacing.report_lost(rank, self.generation)
            dead |= fresh
            new -= fresh
            live, placement = self._without(dead)
            if dead & live:
                there = await self._replaced(dead)
                if board.signs:
                    continue
                if not dead <= self.arrivals.loading:
                    failed += 1
                    await self.arrivals.rest(failed, dead)
                    continue
                self.arrivals.loading -= there
                new |= there
                dead -= there
                live, placement = self._without(dead)
            self.regrouping.begin()
            for rank in live:
                self.regrouping.order(rank, live, placement, [] if rank in new else awaited(rank))
            await self.regrouping.until(live, self._timing.answer)
            if not board.signs:
                return self._recovered(live, placement, new)
        raise StartupError("too many ranks are lost")

    async def _replaced(self, dead: Collection[int]) -> set[int]:
        """Starts processes in the place of lost ranks, and waits for as many as the others need to go on.

        Those that are not ready by then join later. Returns: the others; incomplete if one is lost.
        """
        board, loading = self._board, set(dead)
        try:
            await self._start(loading - self.arrivals.loading, awaited=True)
        except StartupError:
            if not self.arrivals.failures(dead):
                raise

        def disturbed() -> bool:
            return bool(board.signs) or not loading <= self.arrivals.loading

        while loading & self._without(loading)[0]:
            await self.arrivals.until(lambda: not loading.isdisjoint(board.ready) or disturbed(), loading)
            if disturbed():
                break
            loading.difference_update(board.ready)
        return set(dead) - loading

    def _recovered(self, live: frozenset[int], placement: Placement | None, new: set[int]) -> Restarted:
        gone = self.live - live
        self.live, self.placement, self.over = live, placement, True
        self._counted -= live
        if gone:
            log.warning("ranks %s serve without ranks %s", sorted(live), sorted(gone))
        self.report()
        self.bring_back()
        ready = [self._board.ready[rank] for rank in sorted(live)]
        return Restarted(ready, live - new, self.regrouping.seconds)

    def _without(self, dead: Collection[int]) -> tuple[frozenset[int], Placement | None]:
        """The live ranks and placement of the next generation: as now, if no others can go on."""
        others = self.live - set(dead)
        if others and self.placement is not None and dead:
            placement = next_placement(self.placement, others)
            if placement is not None:
                return others, placement
        return self.live, self.placement

    def forget_lost(self) -> None:
        """As Ranks.forget_lost."""
        if self._replacing.kv.forget_lost():
            for rank in self.live:
                self._board.send(rank, pb.ToRank(forget_lost=pb.ForgetLost()))

    async def _start(self, ranks: Collection[int], *, awaited: bool = False) -> None:
        """Starts processes. awaited: as Replacing.replace(). Raises: StartupError."""
        await self._board.reap(self._timing.kill)
        self._counted -= set(ranks)  # a start that fails counts as a loss
        live = sorted(self.live | set(ranks))

        def loads(rank: int) -> Placement | None:
            if rank in self.live or self.placement is None:
                return self.placement
            return next_placement(self.placement, live, **self._joined) or self.placement

        await self.arrivals.start(ranks, live, loads, awaited=awaited)

    def count(self, signs: Sequence[Sign], lost: Collection[int]) -> None:
        """Reports each lost rank once."""
        for rank in sorted(set(lost) - self._counted):
            self._counted.add(rank)
            self._listener.on_rank_lost(rank, loss_cause(signs, rank))
            if often := self._losses.too_often(rank):
                self.out[rank] = often
            elif rank not in self.held:  # it was lost often once, and the others could not go on without it
                self.out.pop(rank, None)

    def bring_back(self) -> None:
        """Begins to have the ranks serve that are wanted, and no others, and to refill the standby."""
        if self._returning is None or self._returning.done():
            self._returning = asyncio.get_running_loop().create_task(self._return())

    async def _return(self) -> None:
        turn = 0  # a rank that does not join holds up no other
        while (absent := self.wanted - self.live - set(self.out)) or (
            self.live - self.wanted and self.live & self.wanted
        ):
            rank = sorted(absent)[turn % len(absent)] if absent else -1
            turn += 1
            try:
                await (self.join([rank]) if absent else self.change(leaves=self.live - self.wanted))
            except EpServerError as error:
                what = f"rank {rank} does not join" if absent else "ranks that shall leave do not"
                log.warning("%s yet: %s", what, error)
                await asyncio.sleep(AGAIN_SECONDS * min(turn, MOST_AGAIN))
        out = set(self.out) - self.live - self.held
        for rank in sorted(out):
            log.error("rank %d stays out: %s; look at the host", rank, self.out[rank])
        if self.over:  # else a recovery may wait for their processes
            async with self._places:
                with suppress(StartupError):  # one that does not end: the next loss ends it
                    await self.arrivals.end(out & self.arrivals.loading - self.live)
        self._replacing.prepare()

    async def join(self, ranks: Collection[int]) -> float:
        """Starts processes and has them take part once they are ready. Raises: StartupError, Unavailable.

        Returns: as change().
        """
        await self._until_over()
        async with self._places:  # who calls second for a rank waits for the process of the first
            there = self.arrivals.loading | self.live
            stale = [rank for rank in ranks if rank in self._board.processes and rank not in there]
            await self.arrivals.end(stale)
            await self._start([rank for rank in ranks if rank not in self._board.processes])
        asked = set(ranks)
        await self.arrivals.until(
            lambda: asked <= set(self._board.ready) or not asked <= self.arrivals.loading | self.live, ranks
        )
        if lost := sorted(asked - self.arrivals.loading - self.live):
            raise Unavailable(f"ranks {lost} were lost while they started{self.arrivals.why(lost)}")
        pause = await self.change(joins=ranks)
        await self.let_go(ranks)  # one that was not wanted any more
        return pause

    async def let_go(self, ranks: Collection[int]) -> None:
        """Ends those of these processes that load, or have loaded, and shall not take part after all."""
        async with self._places:
            await self.arrivals.end((set(ranks) & self.arrivals.loading) - self.wanted - self.live)

    async def change(self, joins: Collection[int] = (), leaves: Collection[int] = ()) -> float:
        """Has the ranks switch to others by vote, once changes before have ended.

        Args:
            joins: their processes are ready; those that are not wanted any more stay out. leaves: others.
        Returns: the longest pause of a rank.
        Raises: Unavailable if a rank refuses or is lost, or for too few slots. The ranks stay then, unless
            the error says that the change stands.
        """
        async with self._changing:
            await self._until_over()
            before = self.live
            target = (before | (self.wanted & set(joins))) - set(leaves)
            if target == before:
                return 0.0
            if not target:
                raise Unavailable("no rank that shall serve does")
            placement = self.placement and next_placement(self.placement, target, **self._joined)
            if placement is None:
                raise Unavailable(f"{len(target)} ranks have too few expert slots (resilience.spare_slots)")
            change, asked = next(self.orders.numbers), before | target
            order = PrepareGeneration(change, self.generation + 1, tuple(sorted(target)), placement)

            def disturbed() -> bool:
                return bool(self._board.signs) or not self.over

            def incomplete() -> bool:
                there = self.live | self.arrivals.loading - self.arrivals.ending
                return disturbed() or self.live != before or not asked <= there

            def present() -> frozenset[int]:
                return asked & (self.live | self.arrivals.loading)

            await self.orders.prepare(asked, order, incomplete, present, disturbed)
            return await self._switch(change, before, target, placement)

    async def _switch(
        self, change: int, before: frozenset[int], target: frozenset[int], placement: Placement
    ) -> float:
        """From here on the change stands: after a loss the ranks of `target` are regrouped. See change()."""
        began = time.monotonic()
        self.live, self.placement = target, placement
        self.arrivals.loading -= target
        self.regrouping.begin()
        self.report()
        self._board.work_number += 1
        for rank in target - before:
            self.regrouping.order(rank, target, placement)
            if self._board.watching:
                self._board.send(rank, pb.ToRank(watch_cache=pb.WatchCache(on=True)))
        leaving = [process for rank, process in self._board.processes.items() if rank in before - target]
        with self.orders.answers(before, SwitchChange(change), self._board.work_number) as answers:

            def silent() -> frozenset[int]:
                ended = (one.rank for one in leaving if one.ended.is_set())
                switched = (rank for rank, done in answers.items() if not done.error)
                return (before | target).difference(switched, self.regrouping.there, ended)

            def over() -> bool:  # a vote needs all ranks: none switches where one refuses
                return not silent() or bool(self._board.signs or refusals(answers)) or not self.over

            seconds = max(SWITCH_SECONDS, self._timing.answer)  # a rank that hangs is found sooner
            with suppress(StartupError):
                await self._board.until(over, seconds, "they switch")
            late, why = silent(), refusals(answers) or f"not within {seconds:g} s"
        within, leave = time.monotonic() - began, before - target
        stands = f"the change stands: ranks {sorted(target)} are to serve"
        if self._board.signs or not self.over:
            raise Unavailable(f"a rank was lost while the ranks switched; {stands}")
        for rank in leave:
            self._listener.on_left(rank)
        await self._leave(leave)
        if late & target:
            raise Unavailable(f"ranks {sorted(late & target)} did not switch ({why}); {stands}")
        pause = max((done.seconds for done in answers.values()), default=0.0)
        text = "generation %d: ranks %s serve; they paused %.1f ms"
        log.info(text, self.generation, sorted(target), pause * 1000)
        if late:
            log.error("ranks %s did not leave (%s) and were ended", sorted(late), why)
        else:
            log.info("generation %d: all ranks switched within %.1f ms", self.generation, within * 1000)
        return pause

    async def _leave(self, ranks: Collection[int]) -> None:
        """Ends the processes of ranks that no longer take part."""
        async with self._places:
            processes = [self._board.processes[rank] for rank in ranks if rank in self._board.processes]
            self.arrivals.ending |= set(ranks)
            for process in processes:
                self._board.send(process.rank, pb.ToRank(shutdown=pb.Shutdown()))
            await ended(processes, self._timing.grace)
            await self.arrivals.end(ranks)

    async def _until_over(self) -> None:
        """Raises: Unavailable if a recovery takes longer than a start may."""
        seconds = self._timing.start_stall
        try:
            async with asyncio.timeout(seconds):
                while not self.over or self._board.signs:
                    await asyncio.sleep(LOOK_SECONDS)
        except TimeoutError:
            raise Unavailable(f"the ranks have not recovered from a loss within {seconds:g} s") from None

    async def stop(self) -> None:
        """Begins nothing more."""
        if self._returning is not None:
            self._returning.cancel()
            await asyncio.wait((self._returning,))
