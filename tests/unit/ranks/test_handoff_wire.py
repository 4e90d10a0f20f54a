"""A fetcher and a holder of rows in one process: every byte, every kind of memory, and every way to fail."""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch

from ep_server.backends.kv_rows import CpuRows, HostSlots, Kind
from ep_server.models.kv_cache import LayerProgress
from ep_server.ranks.handoff.exporter import KvExporter
from ep_server.ranks.handoff.importer import KvImporter
from ep_server.ranks.handoff.lanes import Lanes
from ep_server.ranks.handoff.wire import (
    HandoffError,
    Hello,
    Line,
    Moved,
    Rows,
    answer,
    connect,
    receive_answer,
    refusal,
)
from ep_server.records import KvSource
from ep_server.scheduler.handoffs import KvExport, KvFetch
from tests.support.fabric.fabric_ends import loopback, needs

KEY, WAIT = bytes(range(16)), 60.0
PARTS, WIDTH = 3, 40


class Cache:
    """Parts of [blocks, bytes]; a token has WIDTH bytes in each."""

    def __init__(self, blocks: int, block_size: int, fill: int | None = None) -> None:
        self.blocks, self.block_size = blocks, block_size
        self.layers, self.progress = range(PARTS), LayerProgress()
        made = torch.Generator().manual_seed(blocks)
        shape = (blocks, block_size * WIDTH)
        self.tensors = [
            torch.randint(256, shape, dtype=torch.uint8, generator=made)
            if fill is None
            else torch.full(shape, fill, dtype=torch.uint8)
            for _ in range(PARTS)
        ]

    def parts(self) -> list[torch.Tensor]:
        return self.tensors

    def rows(self, blocks: tuple[int, ...]) -> torch.Tensor:
        """[tokens of these blocks, PARTS * WIDTH]"""
        return torch.cat([part[list(blocks)].view(-1, WIDTH) for part in self.tensors], 1)


def rows_of(cache: Cache) -> CpuRows:
    return CpuRows(cache)  # type: ignore[arg-type]


def lanes(**options: Any) -> Lanes:
    """Over the loopback; skips the test where there is no libfabric."""
    needs("system")
    return Lanes(loopback(**options))


@pytest.fixture
def there() -> Iterator[tuple[Cache, KvExporter]]:
    cache = Cache(40, 5)
    exporter = KvExporter(rows_of(cache), "127.0.0.1", 0, hold_seconds=60, silence=5)
    yield cache, exporter
    exporter.close()


def fetched(importer: KvImporter, fetch: KvFetch) -> int:
    """Tokens that arrived."""
    importer.start([fetch])
    end = time.monotonic() + WAIT
    while not (ended := importer.ended()):
        assert time.monotonic() < end
        importer.wait(0.1)
    ((ticket, tokens),) = ended
    assert ticket == fetch.ticket
    return tokens


@pytest.mark.parametrize("local", [True, False], ids=["shared", "tcp"])
def test_rows_land_where_they_belong(there: tuple[Cache, KvExporter], local: bool) -> None:
    """Between blocks of 5 and of 7 tokens, from token 7 on; nothing else is written."""
    cache, exporter = there
    blocks, mine = (9, 3, 30, 17, 8, 2), (4, 0, 7)
    exporter.show([KvExport(1, KEY, 29, blocks, held=True)])
    own = Cache(9, 7, fill=0xEE)
    source = KvSource(exporter.address, exporter.local if local else "", KEY, 29)
    assert fetched(KvImporter(rows_of(own), WAIT, 5), KvFetch(-1, source, 7, mine, 21)) == 21
    assert torch.equal(own.rows(mine), cache.rows(blocks)[7:28])
    others = tuple(block for block in range(9) if block not in mine)
    assert (own.rows(others) == 0xEE).all()
    end = time.monotonic() + WAIT
    while not (finished := exporter.finished()):
        assert time.monotonic() < end
    assert finished == [1]
    assert exporter.counters() == {"handoffs/sent": 1, "handoff_bytes/sent": 21 * PARTS * WIDTH}


@pytest.mark.parametrize(
    "options", [{}, {"disorder": 7}, {"strict_memory": True}], ids=["", "disorder", "nic"]
)
def test_rows_are_written_over_libfabric(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """In more slots than there are, between blocks of 5 and of 7 tokens; also as strict networks do it."""
    monkeypatch.setattr("ep_server.ranks.handoff.lanes.HOST_SLOT_BYTES", 4 * PARTS * WIDTH)
    far, cache = lanes(**options), Cache(40, 5)
    exporter = KvExporter(rows_of(cache), "127.0.0.1", 0, 60, 5, far)
    blocks, mine = (9, 3, 30, 17, 8, 2), (4, 0, 7)
    exporter.show([KvExport(1, KEY, 29, blocks, held=True)])
    own = Cache(9, 7, fill=0xEE)
    importer, source = KvImporter(rows_of(own), WAIT, 5, far), KvSource(exporter.address, "", KEY, 29)
    assert fetched(importer, KvFetch(-1, source, 7, mine, 21)) == 21
    assert torch.equal(own.rows(mine), cache.rows(blocks)[7:28])
    others = tuple(block for block in range(9) if block not in mine)
    assert (own.rows(others) == 0xEE).all()
    assert importer.counters()["handoff_fetches/libfabric"] == 1
    exporter.close()


@pytest.mark.parametrize("holder", [True, False], ids=["holder", "fetcher"])
def test_tcp_where_one_side_has_no_libfabric(there: tuple[Cache, KvExporter], holder: bool) -> None:
    cache, exporter = there
    far = lanes()
    if holder:
        exporter = KvExporter(rows_of(cache), "127.0.0.1", 0, 60, 5, far)
    exporter.show([KvExport(1, KEY, 5, (1,), held=True)])
    own = Cache(2, 5, fill=0)
    importer = KvImporter(rows_of(own), WAIT, 5, None if holder else far)
    assert fetched(importer, KvFetch(-1, KvSource(exporter.address, "", KEY, 5), 0, (1,), 5)) == 5
    assert torch.equal(own.rows((1,)), cache.rows((1,)))
    assert importer.counters()["handoff_fetches/tcp"] == 1
    exporter.close()


class Unreachable(CpuRows):
    """Those of a GPU that cannot map the other one's memory."""

    def attach(self, kind: Kind, rows: int, count: int, descriptor: int) -> HostSlots:
        if kind is not Kind.PRIVATE:
            self.kind = Kind.PRIVATE
            raise RuntimeError("no peer access")
        return super().attach(kind, rows, count, descriptor)


def test_memory_out_of_reach_is_not_tried_again(there: tuple[Cache, KvExporter]) -> None:
    """The same fetch goes on with memory of another kind."""
    cache, exporter = there
    exporter.show([KvExport(1, KEY, 5, (1,), held=True)])
    own = Cache(2, 5, fill=0)
    rows = Unreachable(own)  # type: ignore[arg-type]
    source = KvSource(exporter.address, exporter.local, KEY, 5)
    importer = KvImporter(rows, WAIT, 5)
    assert fetched(importer, KvFetch(-1, source, 0, (1,), 5)) == 5
    assert torch.equal(own.rows((1,)), cache.rows((1,)))
    counts = importer.counters()
    assert counts["handoff_fetches/tcp"] == counts["handoffs/received"] == 1


def test_a_holder_that_announces_and_goes_is_noticed() -> None:
    """Rows were announced over the connection, which closes before they are written."""
    far = lanes()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        own = Cache(2, 5, fill=0)
        importer = KvImporter(rows_of(own), WAIT, WAIT, far)
        importer.start([KvFetch(-1, KvSource(address, "", KEY, 5), 0, (1,), 5)])
        sock, _ = listener.accept()
        line = Line(sock, WAIT)
        assert Hello.receive(line).kind is Kind.FABRIC
        line.put(answer(Kind.FABRIC))
        far.open(5, PARTS * WIDTH).meet(line)
        line.put(Rows(0, 5, 0, 0, PARTS).pack())
        line.close()
        end = time.monotonic() + WAIT / 2
        while not (ended := importer.ended()):
            assert time.monotonic() < end
        assert ended == [(-1, 0)] and own.rows((1,)).eq(0).all()


def test_rows_follow_the_computation(there: tuple[Cache, KvExporter]) -> None:
    cache, exporter = there
    own, blocks = Cache(4, 5, fill=0), (1, 2, 3, 4)
    exporter.show([KvExport(1, KEY, 3, blocks[:1], held=False)])
    importer = KvImporter(rows_of(own), WAIT, 5)
    importer.start([KvFetch(-1, KvSource(exporter.address, exporter.local, KEY, 20), 0, (0, 1, 2), 15)])
    for tokens in (5, 12, 20):
        time.sleep(0.05)
        assert not importer.ended()
        exporter.show([KvExport(1, KEY, tokens, blocks, held=tokens == 20)])
    end = time.monotonic() + WAIT
    while not (ended := importer.ended()):
        assert time.monotonic() < end
    assert ended == [(-1, 15)] and torch.equal(own.rows((0, 1, 2)), cache.rows(blocks)[:15])


def test_layers_move_while_their_step_runs(there: tuple[Cache, KvExporter]) -> None:
    """Each part as soon as it is written; the rest, once tokens are computed."""
    cache, exporter = there
    own, blocks = Cache(4, 5, fill=0), (1, 2, 3)
    expected = [part.view(-1, WIDTH)[5:20] for part in cache.tensors]
    importer = KvImporter(rows_of(own), WAIT, 5)
    importer.start([KvFetch(-1, KvSource(exporter.address, exporter.local, KEY, 15), 0, (0, 1, 2), 15)])
    exporter.show([KvExport(1, KEY, 0, blocks, held=False, planned=12)], step=True)
    end = time.monotonic() + WAIT
    for layer in range(PARTS - 1):
        cache.progress.written(layer)
        while not torch.equal(own.tensors[layer].view(-1, WIDTH)[:12], expected[layer][:12]):
            assert time.monotonic() < end
        assert own.tensors[layer].view(-1, WIDTH)[12:].eq(0).all() and own.tensors[-1].eq(0).all()
    exporter.show([KvExport(1, KEY, 12, blocks, held=False, planned=15)], step=True)
    cache.progress.written(0)
    exporter.show([KvExport(1, KEY, 15, blocks, held=True, planned=15)])
    while not (ended := importer.ended()):
        assert time.monotonic() < end
    assert ended == [(-1, 15)] and torch.equal(own.rows((0, 1, 2)), cache.rows(blocks))


def test_runs_of_rows_are_kept_in_order() -> None:
    """Compared with a count of parts for every row, over many pieces of many sizes."""
    for most in (1, 2, 5, 50):
        moved, counts = Moved(3, 40, 6), [0] * 37
        for tokens, planned, written in (
            (0, 9, 2),
            (0, 9, 4),
            (7, 30, 1),
            (20, 30, 5),
            (29, 40, 3),
            (40, 40, 0),
        ):
            while (rows := moved.next(tokens, planned, written, most, 1)) is not None:
                assert moved.fits(rows, most) and rows.count * rows.parts <= most * 6
                assert not moved.fits(replace(rows, part=rows.part + 1), most)
                for at in range(rows.first - 3, rows.first - 3 + rows.count):
                    assert counts[at] == rows.part
                    counts[at] += rows.parts
                moved.add(rows)
                whole = next((n for n, count in enumerate(counts) if count < 6), 37)
                assert moved.whole == whole
            for at, count in enumerate(counts, 3):
                assert count >= (6 if at < tokens else written if at < planned else 0)
        assert moved.complete and counts == [6] * 37


def test_what_arrived_before_the_end_counts(there: tuple[Cache, KvExporter]) -> None:
    cache, exporter = there
    own, blocks = Cache(4, 5, fill=0), (1, 2, 3)
    exporter.show([KvExport(1, KEY, 10, blocks, held=False)])
    importer = KvImporter(rows_of(own), WAIT, 5)
    importer.start([KvFetch(-1, KvSource(exporter.address, "", KEY, 15), 0, (0, 1, 2), 15)])
    end = time.monotonic() + WAIT
    while own.rows((1,))[-1].eq(0).all():
        assert time.monotonic() < end
    exporter.show([])  # cancelled
    while not (ended := importer.ended()):
        assert time.monotonic() < end
    assert ended == [(-1, 10)] and torch.equal(own.rows((0, 1)), cache.rows(blocks)[:10])
    assert importer.counters()["handoffs/failed"] == 1


def test_a_rank_that_runs_no_step_is_not_awaited() -> None:
    """It waits for others to be replaced. One that has everything need not run any."""
    cache = Cache(4, 5)
    exporter = KvExporter(rows_of(cache), "127.0.0.1", 0, hold_seconds=60, silence=0.3)
    other = bytes(reversed(KEY))
    running = [KvExport(n, key, 5, (1, 2), held=False, planned=10) for n, key in ((1, KEY), (2, other))]
    exporter.show(running, step=True)
    source, own = KvSource(exporter.address, exporter.local, KEY, 10), Cache(2, 5, fill=0)
    importer = KvImporter(rows_of(own), WAIT, 30)
    assert fetched(importer, KvFetch(-1, source._replace(key=other), 0, (1,), 5)) == 5
    assert fetched(importer, KvFetch(-2, source, 0, (0, 1), 10)) == 5
    over = set[int]()
    end = time.monotonic() + WAIT
    while 1 not in over and time.monotonic() < end:  # the fetcher says that it does not come again
        over |= set(exporter.finished())
        time.sleep(0.01)
    assert over == {1, 2}
    exporter.close()


def test_a_dropped_fetch_writes_nothing_more(there: tuple[Cache, KvExporter]) -> None:
    _, exporter = there
    own = Cache(4, 5, fill=0xEE)
    exporter.show([KvExport(1, KEY, 0, (), held=False)])
    importer = KvImporter(rows_of(own), WAIT, 5)
    importer.start([KvFetch(-1, KvSource(exporter.address, exporter.local, KEY, 15), 0, (0, 1, 2), 15)])
    importer.drop([-1])
    exporter.show([KvExport(1, KEY, 15, (1, 2, 3), held=True)])
    time.sleep(0.3)
    assert (own.rows((0, 1, 2, 3)) == 0xEE).all() and importer.ended() == []


def test_expired_and_unknown_keys_are_refused() -> None:
    exporter = KvExporter(rows_of(Cache(4, 5)), "127.0.0.1", 0, hold_seconds=0.01, silence=5)
    exporter.show([KvExport(1, KEY, 5, (1,), held=True)])
    time.sleep(0.05)
    assert exporter.finished() == [1]
    for key, why in ((KEY, "expired"), (b"?" * 16, "no such request")):
        line, _ = connect(exporter.address, "", 10)
        line.put(Hello(key, 0, 5, PARTS * WIDTH, Kind.PRIVATE).pack())
        with pytest.raises(HandoffError, match=why):
            receive_answer(line)
        line.close()
    exporter.close()


def test_another_row_size_is_named(there: tuple[Cache, KvExporter]) -> None:
    _, exporter = there
    line, _ = connect(exporter.address, "", 10)
    line.put(Hello(KEY, 0, 5, 7, Kind.PRIVATE).pack())
    with pytest.raises(HandoffError, match=f"row_bytes = 7: must be {PARTS * WIDTH}"):
        receive_answer(line)
    line.close()


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\n\r\n" * 3, bytes(33)])
def test_garbage_ends_its_connection_alone(there: tuple[Cache, KvExporter], sent: bytes) -> None:
    cache, exporter = there
    address = exporter.address.rpartition(":")
    with socket.create_connection((address[0], int(address[2])), 10) as garbage, suppress(OSError):
        garbage.sendall(sent)
        garbage.shutdown(socket.SHUT_WR)
        while garbage.recv(1 << 10):
            pass
    exporter.show([KvExport(1, KEY, 5, (1,), held=True)])
    own = Cache(2, 5, fill=0)
    source = KvSource(exporter.address, exporter.local, KEY, 5)
    assert fetched(KvImporter(rows_of(own), WAIT, 5), KvFetch(-1, source, 0, (1,), 5)) == 5
    assert torch.equal(own.rows((1,)), cache.rows((1,)))


@pytest.mark.parametrize(
    "rows",
    [
        Rows(1, 6, 0, 0, PARTS),
        Rows(0, 1, 9, 0, PARTS),
        Rows(0, 1 << 31, 0, 0, PARTS),
        Rows(0, 5, 0, 1, PARTS - 1),
        Rows(0, 5, 0, 0, PARTS + 1),
        Rows(0, 5, 0, 0, 0),
    ],
    ids=["too many", "slot", "huge", "not in order", "parts", "none"],
)
def test_unexpected_rows_are_not_written(rows: Rows) -> None:
    own, silent = Cache(2, 5, fill=0xEE), socket.create_server(("127.0.0.1", 0))
    importer = KvImporter(rows_of(own), WAIT, 5)
    address = f"127.0.0.1:{silent.getsockname()[1]}"
    importer.start([KvFetch(-1, KvSource(address, "", KEY, 5), 0, (1,), 5)])
    sock, _ = silent.accept()
    line = Line(sock, 10)
    Hello.receive(line)
    line.put(b"\x00\x00\x00" + rows.pack() + bytes(PARTS * WIDTH))
    end = time.monotonic() + WAIT
    while not (ended := importer.ended()):
        assert time.monotonic() < end
    assert ended == [(-1, 0)] and (own.rows((0, 1)) == 0xEE).all()
    line.close()
    silent.close()


def _greeted(importer: KvImporter) -> tuple[Line, socket.socket]:
    """A peer whose next words are up to the test, with the listener to close. Fetches block 1."""
    listener = socket.create_server(("127.0.0.1", 0))
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    importer.start([KvFetch(-1, KvSource(address, "", KEY, 5), 0, (1,), 5)])
    sock, _ = listener.accept()
    line = Line(sock, 10)
    Hello.receive(line)
    return line, listener


def _ended(importer: KvImporter) -> list[tuple[int, int]]:
    end = time.monotonic() + WAIT
    while not (ended := importer.ended()):
        assert time.monotonic() < end
        importer.wait(0.1)
    return ended


def test_a_peer_that_drips_bytes_is_left_in_time() -> None:
    """One byte now and then, never silent, within the bytes of one slot."""
    importer = KvImporter(rows_of(Cache(2, 5, fill=0)), timeout=0.5, silence=WAIT)
    line, listener = _greeted(importer)
    line.put(answer(Kind.PRIVATE) + Rows(0, 5, 0, 0, PARTS).pack())
    with suppress(HandoffError):
        for _ in range(5 * PARTS * WIDTH - 1):
            line.put(b"x")
            if importer.ended():
                break
            time.sleep(0.05)
        else:
            pytest.fail("the fetch never ended")
    line.close()
    listener.close()


def test_a_greeting_that_drips_holds_no_place() -> None:
    exporter = KvExporter(rows_of(Cache(4, 5)), "127.0.0.1", 0, hold_seconds=60, silence=0.3)
    line, _ = connect(exporter.address, "", WAIT)
    greeting = Hello(KEY, 0, 5, PARTS * WIDTH, Kind.PRIVATE).pack()
    for at in range(len(greeting) - 1):
        line.put(greeting[at : at + 1])
        if select.select([line.sock], [], [], 0.1)[0]:
            break
    else:
        pytest.fail("it was awaited to its end")
    with pytest.raises(HandoffError, match=r"took too long|reset"):
        Rows.receive(line)
    line.close()
    exporter.close()


@pytest.mark.parametrize("port", ["65536", "99999999999", "-1", "x", "\0"])
def test_no_port_is_no_answer(port: str) -> None:
    with pytest.raises(HandoffError, match="does not answer"):
        connect(f"127.0.0.1:{port}", "", 1)


def test_a_reason_of_a_peer_is_one_line() -> None:
    """It goes to the log."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(refusal("no\n12:00 ERROR \x1b[2J"))
        with pytest.raises(HandoffError, match=r"^no\?12:00 ERROR \?\[2J$"):
            receive_answer(Line(ours, 10))


def test_shared_memory_needs_a_local_socket() -> None:
    """Else rows that nobody wrote would be used."""
    own = Cache(2, 5, fill=0xEE)
    importer = KvImporter(rows_of(own), WAIT, 5)
    line, listener = _greeted(importer)
    line.put(answer(Kind.SHARED) + Rows(0, 5, 0, 0, PARTS).pack())
    assert _ended(importer) == [(-1, 0)] and (own.rows((0, 1)) == 0xEE).all()
    line.close()
    listener.close()


def test_memory_that_may_shrink_is_not_read() -> None:
    """Reading past the end of a file ends a process. The holder's own cannot be cut by its reader either."""
    rows = rows_of(Cache(2, 5))
    loose = os.memfd_create("loose", os.MFD_ALLOW_SEALING)
    os.ftruncate(loose, 1 << 20)
    with pytest.raises(OSError, match="may shrink"):
        rows.attach(Kind.SHARED, 5, 2, loose)
    os.close(loose)
    offered = rows.offer(Kind.SHARED, 5, 2)
    assert rows.attach(Kind.SHARED, 5, 2, os.dup(offered.descriptor)).rows == 5
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(offered.descriptor, 0)
    offered.close()


def test_a_port_is_taken_over_from_the_group_before() -> None:
    """Ranks of the next group start while the last one's still listen."""
    before = KvExporter(rows_of(Cache(4, 5)), "127.0.0.1", 0, hold_seconds=60, silence=5)
    port = int(before.address.rpartition(":")[2])
    with pytest.raises(OSError, match="in use"):
        KvExporter(rows_of(Cache(4, 5)), "127.0.0.1", port, hold_seconds=60, silence=5)
    cache, own = Cache(4, 5), Cache(2, 5, fill=0)
    after = KvExporter(rows_of(cache), "127.0.0.1", port, hold_seconds=60, silence=5, beside=True)
    assert after.address == before.address and after.local != before.local
    after.show([KvExport(1, KEY, 5, (1,), held=True)])
    before.close()
    end, listens = time.monotonic() + WAIT, False
    while not listens:  # nobody does for a moment
        assert time.monotonic() < end
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), 5):
            listens = True
    source = KvSource(after.address, "", KEY, 5)
    arrived = fetched(KvImporter(rows_of(own), WAIT, 5), KvFetch(-1, source, 0, (1,), 5))
    after.close()
    assert arrived == 5 and torch.equal(own.rows((1,)), cache.rows((1,)))


def test_a_failed_accept_does_not_end_listening(
    there: tuple[Cache, KvExporter], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too many threads for one connection: the next one is served."""
    cache, exporter = there
    start, failed = threading.Thread.start, list[str]()

    def refuse_once(thread: threading.Thread) -> None:
        if thread.name == "kv-serve" and not failed:
            failed.append(thread.name)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse_once)
    line, _ = connect(exporter.address, "", 10)
    with pytest.raises(HandoffError):
        line.take(1)
    line.close()
    exporter.show([KvExport(1, KEY, 5, (1,), held=True)])
    own = Cache(2, 5, fill=0)
    assert (
        fetched(
            KvImporter(rows_of(own), WAIT, 5), KvFetch(-1, KvSource(exporter.address, "", KEY, 5), 0, (1,), 5)
        )
        == 5
    )
    assert failed and torch.equal(own.rows((1,)), cache.rows((1,)))
