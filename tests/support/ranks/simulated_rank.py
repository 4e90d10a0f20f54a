"""A rank without a model: runs a scheduler's batches on a KV cache that stores what was written.

A batch runs when it is launched, as on a device that takes launches in order; its tokens are told later.
Copies between cells and host slots run as late as a copier may run them.

The next token is a fixed function of every token the batch makes visible, so a request's stream is known
beforehand (`stream_alone`) and any wrong position, table, shared or overwritten block changes it or raises.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import replace

from ep_server.records import (
    LATE_TOKEN,
    PENDING_TOKEN,
    FinishReason,
    Request,
    SampledToken,
    Sampling,
    SeqSlice,
    StepBatch,
    Stopping,
    TokenEvent,
)
from ep_server.scheduler import RankScheduler, SchedulerLimits
from ep_server.scheduler.handoffs import HoldEnd, KvExport, KvFetch
from ep_server.scheduler.kv_blocks import block_digests, private_root, root_digest
from ep_server.scheduler.kv_events import block_hash
from ep_server.scheduler.lost_blocks import LostBlock
from tests.support.ranks.late_copier import Cell, LateCopier

VOCAB = 13  # small, so that stops and equal prefixes happen


def small_rank(**changes) -> SimulatedRank:
    """32 blocks of 4 tokens, steps of 16. changes: of its SchedulerLimits."""
    values = {
        "max_running": 8,
        "max_step_tokens": 16,
        "block_size": 4,
        "kv_blocks": 32,
        "prefix_cache": False,
        "max_context": 100,
    }
    return SimulatedRank(SchedulerLimits(**{**values, **changes}))


def shape(batch: StepBatch) -> list[tuple[int, int, int, bool]]:
    """(number, start, tokens, whether it draws) of each slice."""
    return [(s.number, s.start, len(s.token_ids), s.sample) for s in batch.slices]


def make_request(number: int, prompt: Sequence[int], max_new: int = 8, **fields) -> Request:
    """A greedy request; stops=, eos=, min_new= set its stopping, scores= its prompt_logprobs, anything else
    its fields."""
    stopping = Stopping(
        max_new_tokens=max_new,
        min_new_tokens=fields.pop("min_new", 0),
        eos_token_ids=frozenset(fields.pop("eos", ())),
        stop_token_ids=frozenset(fields.pop("stops", ())),
    )
    sampling = Sampling(temperature=0.0, prompt_logprobs=fields.pop("scores", None))
    return Request(f"r{number}", number, tuple(prompt), sampling, stopping, **fields)


def next_token(tokens: Sequence[int]) -> int:
    """A fixed function of the whole sequence; does not depend on Python's hash seed."""
    value = 7
    for token in tokens:
        value = (value * 31 + token + 1) % 1_000_003
    return value % VOCAB


def stream_alone(request: Request) -> list[tuple[int, FinishReason | None]]:
    """(token, finish) of every event of a request that nothing disturbs."""
    tokens, out, stopping = list(request.prompt_ids), [], request.stopping
    while True:
        token = next_token(tokens)
        tokens.append(token)
        finish = None
        if len(out) >= stopping.min_new_tokens and token in stopping.eos_token_ids:
            finish = FinishReason.EOS
        elif len(out) >= stopping.min_new_tokens and token in stopping.stop_token_ids:
            finish = FinishReason.STOP_TOKEN
        elif len(out) + 1 == stopping.max_new_tokens:
            finish = FinishReason.LENGTH
        out.append((token, finish))
        if finish:
            return out


def late_of(sampled: Sequence[SampledToken]) -> list[int]:
    return [token.number for token in sampled if token.token_id == LATE_TOKEN]


class Names(dict[int, bytes]):
    """Of blocks, as others find them if the rank is lost."""

    def set(self, block: int, name: bytes) -> None:
        self[block] = name

    def clear(self, block: int) -> None:  # type: ignore[override]
        self.pop(block, None)

    def clear_all(self) -> None:
        super().clear()


class SimulatedRank:
    """A RankScheduler, a KV cache of (salt, token, position) cells, and all events so far by request."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self.limits = limits
        self.scheduler = RankScheduler(limits)
        self.cells: list[Cell] = [None] * (limits.kv_blocks * limits.block_size)
        self.copier = LateCopier(self.cells, limits.block_size, limits.host_blocks)
        self.names = self.scheduler.lost.names = Names()
        self.lost_cells: list[Cell] = []  # of a lost rank
        self.lost_right = limits.kv_blocks  # leading blocks of a copy that are still there
        self.fetching: list[KvFetch] = []  # from another server, which has the number of a request as key
        self.fetch_right = limits.max_context  # leading tokens of a fetch that arrive
        self.requests: dict[int, Request] = {}
        self.events: dict[int, list[TokenEvent]] = {}
        self.freed: list[int] = []
        self.elsewhere = 0  # streams of other ranks that no prompt should hold up
        self.batches: list[StepBatch] = []
        self.in_flight: deque[tuple[StepBatch, list[SampledToken]]] = deque()
        self.unsettled: deque[dict[int, Cell]] = deque()  # what the steps in flight write
        self.scored: dict[int, list[int]] = {}  # prompt tokens that were scored, by request
        self._drawn: dict[int, int] = {}  # what the device drew last

    def add(self, request: Request) -> None:
        """Queues a request."""
        self.scheduler.add(request)
        self.requests[request.number] = request
        self.events.setdefault(request.number, [])

    def take_over(self, lost: SimulatedRank, without: Collection[int] = ()) -> None:
        """That rank is no more: its streams continue here, with what its named blocks hold."""
        self.events |= lost.events
        self.freed, self.lost_cells = lost.freed, lost.cells
        sources = {name: LostBlock(0, block, name) for block, name in lost.names.items()}
        self.scheduler.lost.offer(sources)
        for number, request in lost.requests.items():
            self.requests[number] = request
            if lost.scheduler.is_live(number) and number not in without:
                output = tuple(event.token_id for event in self.events[number])
                sampling = replace(request.sampling, prompt_logprobs=None) if output else request.sampling
                again = replace(request, sampling=sampling, output_ids=output, group=0)
                self.scheduler.add(again)

    def named_wrongly(self) -> dict[int, bytes]:
        """Blocks whose cells are not what their names say."""
        size, right = self.limits.block_size, dict[bytes, list[Cell]]()
        for request in self.requests.values():
            tokens = [*request.prompt_ids, *(token for token, _ in stream_alone(request))]
            full = len(tokens) // size
            caches = self.limits.prefix_cache and not request.bypass_prefix_cache
            given = request.cache_salt if caches else request.request_id
            root = (root_digest if caches else private_root)(given, self.scheduler.weights)
            for index, name in enumerate(block_digests(root, tokens[: full * size], size)):
                places = range(index * size, (index + 1) * size)
                right[name] = [(request.cache_salt, tokens[at], at) for at in places]
        return {
            block: name
            for block, name in self.names.items()
            if self.cells[block * size : (block + 1) * size] != right.get(name)
        }

    def shown_wrongly(self) -> list[KvExport]:
        """What other servers may read, though it is not there or a step in flight is to write it."""
        size, shown = self.limits.block_size, self.scheduler.handoffs.exports()
        unsettled = {cell: value for step in self.unsettled for cell, value in step.items()}
        wrong = []
        for export in shown:
            request = self.requests[export.number]
            cells = [export.blocks[at // size] * size + at % size for at in range(export.tokens)]
            right = [(request.cache_salt, request.prompt_ids[at], at) for at in range(export.tokens)]
            early = any(cell in unsettled and self.cells[cell] is unsettled[cell] for cell in cells)
            if early or [self.cells[cell] for cell in cells] != right:
                wrong.append(export)
        return wrong

    def _fetched(self) -> list[int]:
        """Ends all fetches. Returns: their tickets."""
        ended, self.fetching = self.fetching, []
        for fetch in ended:
            request = self.requests[int.from_bytes(fetch.source.key, "big")]
            tokens, size = min(fetch.tokens, self.fetch_right), self.limits.block_size
            for at in range(tokens):
                place = fetch.first + at
                cell = fetch.blocks[at // size] * size + at % size
                self.cells[cell] = (request.cache_salt, request.prompt_ids[place], place)
            self.scheduler.handoffs.arrived(fetch.ticket, tokens)
        return [fetch.ticket for fetch in ended]

    def _loaded(self) -> list[int]:
        """Ends all copies and fetches. Returns: the tickets of those that ended."""
        ended, size, lost = list[int](), self.limits.block_size, self.scheduler.lost
        while (copy := lost.next) is not None:
            pairs = list(zip(copy.blocks, copy.sources, strict=True))[: self.lost_right]
            for block, source in pairs:
                at = source.block * size
                self.cells[block * size : (block + 1) * size] = self.lost_cells[at : at + size]
            lost.arrived(copy.ticket, len(pairs))
            ended.append(copy.ticket)
        return self.copier.loaded() + ended + self._fetched()

    def run(self, batch: StepBatch, late: Collection[int] = ()) -> list[SampledToken]:
        """Writes the cells of every slice, then reads each sequence back and draws. late: draw nothing."""
        touched: dict[int, int] = {}  # the request that writes a cell
        count = 0
        for piece in batch.slices:
            for offset, token in enumerate(self._known(piece)):
                cell = self._cell(piece, piece.start + offset)
                assert cell // self.limits.block_size not in self.names, "a named block is written"
                touched[cell] = piece.number
                count += 1
                self.cells[cell] = (self.requests[piece.number].cache_salt, token, piece.start + offset)
            if piece.scored is not None:
                self._score(piece)
        assert len(touched) == count, "two slices write one cell"
        visible = [self._visible(piece, touched) for piece in batch.slices]
        drawn = [
            SampledToken(piece.number, LATE_TOKEN if piece.number in late else next_token(tokens))
            for piece, tokens in zip(batch.slices, visible, strict=True)
            if piece.sample
        ]
        self._drawn |= {token.number: token.token_id for token in drawn}
        return drawn

    def launch(self, late: Collection[int] = ()) -> StepBatch:
        """Plans a step and runs it; its tokens are not known to the scheduler yet. An empty one is left.

        late: requests whose masks are late.
        """
        self.scheduler.loaded(self._loaded())
        batch = self._plan()
        if not batch.slices and (tickets := self._loaded()):  # they are all that there is to do
            self.scheduler.loaded(tickets)
            batch = self._plan()
        if batch.slices:
            drawn = self.run(batch, late)
            self.in_flight.append((batch, drawn))
            places = ((piece, offset) for piece in batch.slices for offset in range(len(piece.token_ids)))
            cells = [self._cell(piece, piece.start + offset) for piece, offset in places]
            self.unsettled.append({cell: self.cells[cell] for cell in cells})
            for number in late_of(drawn):
                self.scheduler.hold(number)
        return batch

    def _plan(self) -> StepBatch:
        batch, size = self.scheduler.plan(self.elsewhere), self.limits.block_size
        dropped, fetches = self.scheduler.handoffs.take()
        self.fetching = [fetch for fetch in self.fetching if fetch.ticket not in dropped]
        for fetch in (fetch for fetch in fetches if fetch.blocks):
            self.fetching.append(fetch)
            for block in fetch.blocks:
                self.cells[block * size : (block + 1) * size] = [None] * size
        if (moves := self.scheduler.moves()) is not None:
            self.copier.start(moves)
        return batch

    def settle(self) -> None:
        """Commits the oldest step in flight."""
        self.unsettled.popleft()
        self.finish(*self.in_flight.popleft())

    def lose_steps(self, *, written: bool = True) -> None:
        """The steps in flight are lost, with what they scored. written: they have written their cells."""
        for step in () if written else self.unsettled:
            for cell, value in step.items():
                if self.cells[cell] is value:  # else a copy has filled it since
                    self.cells[cell] = None
        self.unsettled.clear()
        for batch, drawn in reversed(self.in_flight):
            for piece in batch.slices:
                if piece.scored is not None:
                    del self.scored[piece.number][piece.scored.start :]
            for number in late_of(drawn):
                self.scheduler.release(number)
        self.in_flight.clear()
        self.scheduler.drop_steps()
        self.freed += self.scheduler.freed()
        self.scheduler.check_integrity()

    def step(self) -> StepBatch:
        """Launches as many steps as may be in flight, then settles the oldest."""
        batch = None
        while len(self.in_flight) <= self.limits.ahead and (batch is None or batch.slices):
            batch = self.launch()
        if not self.in_flight:
            assert batch is not None
            self.finish(batch, [])
            return batch
        oldest = self.in_flight[0][0]
        self.settle()
        return oldest

    def finish(self, batch: StepBatch, sampled: Sequence[SampledToken]) -> None:
        """Commits a batch and keeps its events."""
        sizes = [len(piece.token_ids) for piece in batch.slices]
        assert batch.num_tokens == sum(sizes) <= self.limits.max_step_tokens
        assert len({piece.number for piece in batch.slices}) == len(sizes) <= self.limits.max_running
        assert all(size > 0 for size in sizes)
        for event in self.scheduler.commit(batch, sampled):
            self.events[event.number].append(event)
        for number in late_of(sampled):
            self.scheduler.release(number)
        self.freed += self.scheduler.freed()
        self.batches.append(batch)
        self.scheduler.check_integrity()

    def finish_all(self, at_most: int = 10_000) -> None:
        """Steps until nothing is left; everything that ended must have given its blocks back."""
        for _ in range(at_most):
            if not self.scheduler.has_work:
                break
            assert self.step().slices, "work, but an empty step"
        while self.in_flight:
            self.settle()
        assert not self.scheduler.has_work
        for export in self.scheduler.handoffs.exports():
            assert export.held
            self.scheduler.handoffs.end(export.number, HoldEnd.FETCHED)
        load = self.scheduler.load()
        assert (load.running, load.waiting, load.kv_blocks_used) == (0, 0, 0)

    def cached_blocks(self) -> dict[int, tuple[int | None, tuple[int, ...], str]]:
        """As CacheMirror.blocks: read from the cells of every block that the prefix index names."""
        ledger, size = self.scheduler._ledger, self.limits.block_size
        found = {}
        for digest, block in ledger._block_of.items():
            prefix = ledger._prefix_of[block]
            assert prefix is not None
            if not prefix.token_ids:  # of one request alone
                continue
            cells = [self.cells[block * size + offset] for offset in range(size)]
            salts, tokens, positions = zip(*(cell or ("never written", 0, 0) for cell in cells), strict=True)
            parent = prefix.parent or root_digest(salts[0])
            assert len(set(salts)) == 1 and [digest] == block_digests(parent, tokens, len(tokens))
            assert positions == tuple(range(positions[0], positions[0] + size))
            assert (positions[0] == 0) == (prefix.parent is None)
            outside = prefix.parent and block_hash(prefix.parent)
            found[block_hash(digest)] = (outside, tokens, salts[0])
        return found

    def stream(self, number: int) -> list[tuple[int, FinishReason | None]]:
        """(token, finish) of every event of a request so far."""
        return [(event.token_id, event.finish) for event in self.events[number]]

    def _score(self, piece: SeqSlice) -> None:
        """Rows of the slice, in order, each of them once."""
        assert piece.scored is not None
        first, found = piece.scored.start, self.scored.setdefault(piece.number, [])
        end = first + len(piece.scored.targets)
        assert piece.start <= first == len(found) < end <= piece.start + len(piece.token_ids)
        found += piece.scored.targets

    def _known(self, piece: SeqSlice) -> Sequence[int]:
        """The ids of a slice, as the device has them."""
        if PENDING_TOKEN not in piece.token_ids:
            return piece.token_ids
        assert len(piece.token_ids) == 1 and self.limits.ahead
        return [self._drawn[piece.number]]

    def _cell(self, piece: SeqSlice, position: int) -> int:
        block = piece.blocks[position // self.limits.block_size]
        return block * self.limits.block_size + position % self.limits.block_size

    def _visible(self, piece: SeqSlice, touched: dict[int, int]) -> list[int]:
        """The tokens attention would see: every cell up to the end of the slice.

        None that another request writes in this step: with two micro-batches it may be too early.
        """
        salt, tokens = self.requests[piece.number].cache_salt, []
        for position in range(piece.start + len(piece.token_ids)):
            at = self._cell(piece, position)
            cell = self.cells[at]
            assert touched.get(at, piece.number) == piece.number, f"{piece.number} reads what is written now"
            assert cell is not None, f"{piece.number} reads position {position}, never written"
            assert (cell[0], cell[2]) == (salt, position), f"{piece.number} reads {cell} at {position}"
            tokens.append(cell[1])
        prompt = self.requests[piece.number].prompt_ids[: len(tokens)]
        assert tuple(tokens[: len(prompt)]) == prompt, f"{piece.number} sees another prompt"
        return tokens
