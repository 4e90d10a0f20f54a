"""Ranks of other servers that send nothing, or nothing yet: who waits for them, and for how long."""

from __future__ import annotations

import itertools
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from ep_server.backends.kv_rows import Kind
from ep_server.config import Config
from ep_server.errors import StartupError
from ep_server.ranks.handoff import exporter as exporting
from ep_server.ranks.handoff.desk import LOOK_SECONDS, HandoffDesk
from ep_server.ranks.handoff.importer import KvImporter
from ep_server.ranks.handoff.peers import Peers
from ep_server.ranks.handoff.wire import WAITING, HandoffError, Hello, Line, connect, receive_answer, refusal
from ep_server.records import KvSource
from ep_server.scheduler.handoffs import Handoffs, HoldEnd, KvExport, KvFetch
from tests.support.handoff.wire import KEY, PARTS, WAIT, WIDTH, Cache, exporter_of, fetched, rows_of

OTHER = bytes(reversed(KEY))
ROW = PARTS * WIDTH


def until(true: Callable[[], object]) -> None:
    end = time.monotonic() + WAIT
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def fetch_of(address: str, key: bytes = KEY, ticket: int = -1) -> KvFetch:
    return KvFetch(ticket, KvSource(address, "", key, 5), 0, (1,), 5)


def count(importer: KvImporter, result: str) -> int:
    return importer.counters().get(f"handoffs/{result}", 0)


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def accepted(listener: socket.socket) -> tuple[Line, Hello]:
    listener.settimeout(WAIT)
    sock, _ = listener.accept()
    line = Line(sock, WAIT)
    return line, Hello.receive(line)


def test_a_silent_rank_is_asked_and_freed_by_one_thread() -> None:
    """Its backlog connects. It learns afterwards what nobody fetches any more."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        importer = KvImporter(rows_of(Cache(2, 5, fill=0)), WAIT, 0.3)
        assert fetched(importer, fetch_of(address)) == 0
        assert fetched(importer, fetch_of(address, OTHER, -2)) == 0
        assert (count(importer, "failed"), count(importer, "skipped")) == (1, 1)
        free, lines = set[bytes](), list[Line]()
        while not free >= {KEY, OTHER}:
            line, hello = accepted(listener)
            lines.append(line)
            if hello.first == hello.end:  # those who fetched have left
                free.add(hello.key)
                line.put(refusal("no such request"))
        importer.start([fetch_of(address, KEY, -3)])
        line, hello = accepted(listener)
        assert hello.end == 5  # it is fetched from again
        for each in (*lines, line):
            each.close()
    until(importer.ended)


def test_a_silent_rank_frees_what_nobody_asked_for() -> None:
    """The request that finds it silent needs none of its blocks. They are freed all the same."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        importer, keys = KvImporter(rows_of(Cache(2, 5, fill=0)), WAIT, 0.3), list[bytes]()
        importer.start([KvFetch(0, KvSource(address, "", KEY, 5), 0, (), 0)])
        until(lambda: fetched(importer, fetch_of(address, OTHER)) == 0 and count(importer, "skipped"))
        while keys.count(KEY) < 2:  # in vain, and once it answers
            line, hello = accepted(listener)
            keys.append(hello.key)
            with suppress(HandoffError):  # those that were in vain have left
                line.put(refusal("no such request"))
            line.close()


def test_a_connection_without_a_descriptor_fails_as_others() -> None:
    """Too many files are open: the thread that asks a silent rank must survive it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        with pytest.raises(HandoffError, match="Too many open files"):
            connect("127.0.0.1:1", "nobody", WAIT)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextmanager
def unreachable() -> Iterator[str]:
    """An address that takes no connection, as where the network swallows packets: its backlog is full."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener, ExitStack() as filling:
        address = listener.getsockname()
        for each in [filling.enter_context(socket.socket()) for _ in range(4)]:
            each.setblocking(False)
            each.connect_ex(address)
        yield f"127.0.0.1:{address[1]}"


def test_a_rank_that_takes_no_connection_is_silent() -> None:
    with unreachable() as address:
        importer = KvImporter(rows_of(Cache(2, 5, fill=0)), WAIT, 0.3)
        assert fetched(importer, fetch_of(address)) == 0
        assert fetched(importer, fetch_of(address, OTHER, -2)) == 0
        assert (count(importer, "failed"), count(importer, "skipped")) == (1, 1)


def test_a_silent_rank_that_no_thread_can_ask_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with unreachable() as address:
        peers, source = Peers(0.3, ROW), fetch_of(address).source
        monkeypatch.setattr(threading.Thread, "start", fail)
        with pytest.raises(HandoffError), peers.line(source):
            pass
        assert not peers.skips(source)


def test_a_rank_that_answers_others_is_not_silent() -> None:
    """One of its threads says nothing; that fetch alone fails."""
    assert any(answers_others(seconds) for seconds in (1.0, 8.0))  # the second one: see there


def answers_others(silence: float) -> bool:
    """Returns: whether this process was held up for less than the silence; else both fetches fail."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        importer = KvImporter(rows_of(Cache(2, 5, fill=0)), WAIT, silence)
        said = [time.monotonic()]
        importer.start([fetch_of(address, KEY)])
        quiet, _ = accepted(listener)
        importer.start([fetch_of(address, OTHER, -2)])
        other, _ = accepted(listener)
        alone = False
        with suppress(HandoffError):  # after a pause of this process the other one may have ended too
            while not importer.counters():
                other.put(WAITING)
                said.append(time.monotonic())
                time.sleep(0.05)
            alone = count(importer, "failed") == 1 and not importer.ended()[1:]
            other.put(refusal("over"))
        until(lambda: count(importer, "failed") == 2)
        said.append(time.monotonic())
        quiet.close()
        other.close()
        if max(after - before for before, after in itertools.pairwise(said)) > silence / 2:
            return False
        assert alone
        importer.start([fetch_of(address, KEY, -3)])
        assert count(importer, "skipped") == 0
        return True


def test_a_rank_that_is_gone_is_not_silent() -> None:
    """It was silent and its process died: who connects is refused at once."""
    listener = socket.create_server(("127.0.0.1", 0))
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    importer = KvImporter(rows_of(Cache(2, 5, fill=0)), WAIT, 0.3)
    assert fetched(importer, fetch_of(address)) == 0
    listener.close()
    while count(importer, "failed") < 2:
        assert fetched(importer, fetch_of(address, KEY, -2)) == 0


def test_a_fetch_waits_for_a_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than a rank may be silent; also over a local socket, whose answer carries a descriptor."""
    monkeypatch.setattr(exporting, "MAX_READERS", 1)
    monkeypatch.setattr(exporting, "KEEPALIVE_SECONDS", 0.05)
    cache = Cache(4, 5)
    exporter = exporter_of(cache)
    exporter.show([KvExport(1, KEY, 5, (1,), held=True), KvExport(2, OTHER, 5, (2,), held=True)])
    first, _ = connect(exporter.address, "", WAIT)
    first.put(Hello(KEY, 0, 5, ROW, Kind.PRIVATE).pack())
    receive_answer(first)
    before = descriptors()
    for local in ("", exporter.local):
        importer = KvImporter(rows_of(Cache(2, 5, fill=0)), 1.0, 0.5)
        source = KvSource(exporter.address, local, OTHER, 5)
        assert fetched(importer, KvFetch(-1, source, 0, (1,), 5)) == 0  # after 1 s, in which it heard from it
        assert count(importer, "failed") == 1
        exporter.show([KvExport(1, KEY, 5, (1,), held=True)])
        exporter.show([KvExport(1, KEY, 5, (1,), held=True), KvExport(2, OTHER, 5, (2,), held=True)])
    until(lambda: descriptors() <= before)
    exporter.close()
    first.close()


def test_a_place_that_is_free_again_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporting, "MAX_READERS", 1)
    monkeypatch.setattr(exporting, "KEEPALIVE_SECONDS", 0.05)
    cache, own = Cache(4, 5), Cache(2, 5, fill=0)
    exporter = exporter_of(cache)
    exporter.show([KvExport(1, KEY, 5, (1,), held=True), KvExport(2, OTHER, 5, (2,), held=True)])
    first, _ = connect(exporter.address, "", WAIT)
    first.put(Hello(KEY, 0, 5, ROW, Kind.PRIVATE).pack())
    receive_answer(first)
    threading.Timer(0.5, first.close).start()
    source = KvSource(exporter.address, exporter.local, OTHER, 5)
    assert fetched(KvImporter(rows_of(own), WAIT, WAIT), KvFetch(-1, source, 0, (1,), 5)) == 5
    assert own.rows((1,)).equal(cache.rows((2,)))
    exporter.close()


def test_a_key_freed_before_its_request_is_held_for_nobody() -> None:
    """The rank was busy, its fetcher gave up."""
    exporter = exporter_of(Cache(4, 5))
    line, _ = connect(exporter.address, "", WAIT)
    line.put(Hello(KEY, 0, 0, ROW, Kind.PRIVATE).pack())
    assert receive_answer(line) is Kind.PRIVATE
    exporter.show([KvExport(1, KEY, 0, (), held=False), KvExport(2, OTHER, 0, (), held=False)])
    assert exporter.finished() == [(1, HoldEnd.UNNEEDED)]
    line.close()
    exporter.close()


def test_a_request_on_its_way_is_awaited_while_steps_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank reads requests between two steps, which may be long. One that rests has read them."""
    monkeypatch.setattr(exporting, "UNKNOWN_SECONDS", 0.1)
    monkeypatch.setattr(exporting, "KEEPALIVE_SECONDS", 0.05)
    cache, own = Cache(4, 5), Cache(2, 5, fill=0)
    exporter = exporter_of(cache, stall=WAIT)
    exporter.show([KvExport(2, OTHER, 0, (), held=False)], step=True)
    importer = KvImporter(rows_of(own), WAIT, WAIT)
    importer.start([fetch_of(exporter.address)])
    time.sleep(0.5)
    exporter.show([KvExport(1, KEY, 5, (1,), held=True)], step=True)
    until(importer.ended)
    assert count(importer, "received") == 1
    exporter.rest()
    assert fetched(importer, fetch_of(exporter.address, b"?" * 16, -2)) == 0
    exporter.close()


def test_a_parked_rank_has_read_all_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that prepares new weights meanwhile. It runs no step, which is no reason to refuse."""
    monkeypatch.setattr(exporting, "UNKNOWN_SECONDS", 0.1)
    exporter = exporter_of(Cache(4, 5), stall=0.3)
    ledger: Any = None
    desk = HandoffDesk(Handoffs(ledger), exporter)
    exporter.show([KvExport(1, KEY, 5, (1,), held=True)], step=True)
    assert (desk.rest(0.05), desk.rest()) == (0.05, LOOK_SECONDS)
    line, _ = connect(exporter.address, "", WAIT)
    line.put(Hello(OTHER, 0, 5, ROW, Kind.PRIVATE).pack())
    with pytest.raises(HandoffError, match="no such request"):
        receive_answer(line)
    line.close()
    exporter.close()


def test_a_rank_that_stands_still_refuses_at_once() -> None:
    """Once one fetch has waited in vain, later ones do not wait. When the rank goes on, they are served."""
    cache = Cache(4, 5)
    exporter = exporter_of(cache, stall=0.3)
    running = KvExport(1, KEY, 5, (1, 2), held=False, planned=10)
    exporter.show([running], step=True)
    reasons = []
    for key in (KEY, KEY, b"?" * 16):
        line, _ = connect(exporter.address, "", WAIT)
        line.put(Hello(key, 5, 10, ROW, Kind.PRIVATE).pack())
        with pytest.raises(HandoffError) as raised:
            receive_answer(line)
            while True:
                exporting.Rows.receive(line)
        reasons.append(str(raised.value))
        line.close()
    assert "no step" in reasons[-1]
    exporter.show([running._replace(tokens=10)], step=True)
    own = Cache(4, 5, fill=0)
    source = KvSource(exporter.address, "", KEY, 10)
    assert fetched(KvImporter(rows_of(own), WAIT, WAIT), KvFetch(-1, source, 0, (0, 1), 10)) == 10
    exporter.close()


def test_more_rows_than_the_prompt_has_are_refused() -> None:
    exporter = exporter_of(Cache(4, 5), stall=WAIT)
    exporter.show([KvExport(1, KEY, 5, (1,), held=True)])
    source = KvSource(exporter.address, "", KEY, 9)
    assert fetched(KvImporter(rows_of(Cache(3, 5)), WAIT, WAIT), KvFetch(-1, source, 0, (1, 2), 9)) == 5
    exporter.close()


class Untouched:
    """Rows that nobody may move."""

    row_bytes = PARTS * WIDTH
    kind = Kind.SHARED


def test_opening_the_desk_moves_no_rows() -> None:
    """A GPU compiles kernels for that, which it does before its steps are warm."""
    rows: Any = Untouched()
    config = Config.from_values({"model.path": "/", "handoff.role": "both"})
    desk = HandoffDesk.open(config, rows, 0, Handoffs(rows))
    assert all(desk.address)
    assert desk._exporter is not None
    desk._exporter.close()


def test_an_address_of_another_host_is_named() -> None:
    rows: Any = Untouched()
    values = {"model.path": "/", "handoff.role": "prefill", "handoff.host": "192.0.2.1"}
    allowed = (
        r"handoff\.host = '192\.0\.2\.1', any port: must be an address of this host, and free \([^(]+\)$"
    )
    with pytest.raises(StartupError, match=allowed):
        HandoffDesk.open(Config.from_values(values), rows, 0, Handoffs(rows))
