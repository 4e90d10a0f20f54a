"""State, capacity and certificates of a server, as a scrape shows them."""

from __future__ import annotations

import time
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest

from ep_server.config import GrpcConfig
from ep_server.frontend.port import Port
from ep_server.observability.server_state import ServerState
from ep_server.testing.fake_ranks import FakeRanks
from tests.support.certificates import make_certificates
from tests.support.frontend import failure, serving
from tests.support.observability.reports import series, value


async def test_state_and_capacity_follow_the_server() -> None:
    registry, ranks = CollectorRegistry(), FakeRanks(2)
    async with serving(ranks, scheduler__max_running=3) as served:
        registry.register(ServerState(served.server.engine, 3, lambda: None))
        found = series(generate_latest(registry).decode())
        named = [dict(labels)["state"] for (name, labels), on in found.items() if "_state" in name and on]
        assert named == ["serving"]
        assert value(found, "epserver_running_limit") == value(found, "epserver_capacity_left") == 6
        kv = served.server.engine.ready[1].kv_bytes
        assert value(found, "epserver_rank_memory_bytes", rank="1", kind="kv") == kv
        ranks.hold()
        call = served.client.generate([1])
        await served.until(lambda: bool(ranks.requests))
        assert value(series(generate_latest(registry).decode()), "epserver_capacity_left") == 5
        ranks.kill(1)
        await failure(call)
        found = series(generate_latest(registry).decode())
        assert value(found, "epserver_state", state="lost") == 1
        assert value(found, "epserver_capacity_left") == 0


async def test_certificates_say_when_they_expire(tmp_path: Path) -> None:
    files = make_certificates(tmp_path)
    given = {"tls_cert": str(files / "server.pem"), "tls_key": str(files / "server.key")}
    port = Port(GrpcConfig(port=0, tls_client_ca=str(files / "ca.pem"), **given), frozenset())
    await port.open()
    try:
        used = port.certificates
        assert used is not None and used.expiry().keys() == {given["tls_cert"], str(files / "ca.pem")}
        for seconds in used.expiry().values():
            assert time.time() + 1 * 86_400 < seconds < time.time() + 3 * 86_400
        (files / "server.key").write_text("not a key")
        assert used._renewed() is not None and used.refused == 1
    finally:
        await port.close()
