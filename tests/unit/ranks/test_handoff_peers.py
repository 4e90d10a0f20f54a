"""Peers of a hand-off that are late, gone, broken or hostile: each is left in time and harms nothing else."""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from contextlib import suppress

import pytest
import torch

from ep_server.backends.kv_rows import Kind
from ep_server.ranks.handoff.exporter import KvExporter
from ep_server.ranks.handoff.importer import KvImporter
from ep_server.ranks.handoff.wire import (
    HandoffError,
    Hello,
    Line,
    Rows,
    answer,
    connect,
    receive_answer,
    refusal,
)
from ep_server.records import KvSource
from ep_server.scheduler.handoffs import HoldEnd, KvExport, KvFetch
from tests.support.handoff.wire import KEY, PARTS, WAIT, WIDTH, Cache, exporter_of, fetched, lanes, rows_of
from tests.support.ports import free_port


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


def test_expired_and_unknown_keys_are_refused() -> None:
    exporter = exporter_of(Cache(4, 5), hold=0.01)
    exporter.show([KvExport(1, KEY, 5, (1,), held=True)])
    time.sleep(0.05)
    assert exporter.finished() == [(1, HoldEnd.EXPIRED)]
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
    exporter = exporter_of(Cache(4, 5), stall=0.3)
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
    with pytest.raises(HandoffError, match="not host:port"):
        connect(f"127.0.0.1:{port}", "", 1)


@pytest.mark.parametrize("address", ["", ":0", ":50100", "127.0.0.1", "nowhere"])
def test_an_address_without_host_or_port_is_named(address: str) -> None:
    with pytest.raises(HandoffError, match=f"its address is '{address}', not host:port"):
        connect(address, "", 1)


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
    port = free_port()
    before = exporter_of(Cache(4, 5), port=port)
    with pytest.raises(OSError, match="in use"):
        exporter_of(Cache(4, 5), port=port)
    cache, own = Cache(4, 5), Cache(2, 5, fill=0)
    after = exporter_of(cache, port=port, beside=True)
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
