"""`ep-server diagnose` against real servers: what the archive holds, and what it must never hold."""

from __future__ import annotations

import asyncio
import io
import json
import socket
import stat
import tarfile
from pathlib import Path

import pytest

from ep_server.cli.app import assemble
from ep_server.cli.demo.run import DEMO_MODEL
from ep_server.cli.diagnose import Bundle, metrics_url_of
from ep_server.cli.main import main
from ep_server.client import Target
from ep_server.config import Config
from ep_server.observability.fault_report import chrome_trace
from tests.support.certificates import make_certificates
from tests.support.frontend import WAIT, serving
from tests.support.raw_client import RawClient

TOKEN = "planted-token-5f0c2a"
ENVIRONMENT = "planted-environment-77aa10"
PROMPT = "31 + 11 ="


def members(file: Path) -> dict[str, str]:
    with tarfile.open(file) as archive:
        found = {entry.name: archive.extractfile(entry) for entry in archive}
        return {name: data.read().decode() for name, data in found.items() if data is not None}


async def run(*arguments: str) -> int:
    async with asyncio.timeout(2 * WAIT):
        return await asyncio.to_thread(main, ["diagnose", *arguments])


async def test_an_archive_of_a_server_with_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """TLS, mutual TLS, a token and secrets in the environment; two real ranks that have run steps."""
    for name in ("AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "EP_SERVER_TOKEN"):
        monkeypatch.setenv(name, ENVIRONMENT)
    files = make_certificates(tmp_path)
    (files / "tokens").write_text(f"# accepted\n{TOKEN}\nplanted-other-token\n")
    flags = {
        "model.path": str(DEMO_MODEL),
        "parallel.ranks": 2,
        "grpc.port": 0,
        "metrics.port": 0,
        "grpc.token_file": str(files / "tokens"),
        "grpc.tls_cert": str(files / "server.pem"),
        "grpc.tls_key": str(files / "server.key"),
        "grpc.tls_client_ca": str(files / "ca.pem"),
        "scheduler.kv_blocks": 64,
    }
    reach = {f"tls_{name}": str(files / f) for name, f in zip(("ca", "cert", "key"), PEMS, strict=True)}
    archive = tmp_path / "report.tar.gz"
    async with assemble(Config.load(flags=flags, environ={})) as app:
        await app.server.start(lambda *_: None)
        async with RawClient(Target(app.server.address, token=TOKEN, **reach)) as client:
            await client.complete(PROMPT, max_new_tokens=80, ignore_eos=True, timeout=WAIT)
            while not all(rank.steps >= 80 for rank in (await client.loads()).ranks):
                await asyncio.sleep(0.05)
        given = [f"--{name.replace('_', '-')}={path}" for name, path in reach.items()]
        where = (f"--address={app.server.address}", f"--token-file={files / 'tokens'}", f"-o{archive}")
        assert await run(*where, *given, f"--metrics-url={app.metrics_url}") == 0, capfd.readouterr()
        await app.server.stop()
    assert stat.S_IMODE(archive.stat().st_mode) == 0o600
    found = {name.partition("/")[2]: text for name, text in members(archive).items()}
    _has_everything(found)
    secrets = [TOKEN, "planted-other-token", ENVIRONMENT, "PRIVATE KEY", "BEGIN CERTIFICATE", PROMPT]
    secrets += [(files / f"{name}.key").read_text().splitlines()[1] for name in ("server", "client", "ca")]
    for name, text in {**found, "standard output": capfd.readouterr().out}.items():
        assert [secret for secret in secrets if secret in text] == [], name


PEMS = ("ca.pem", "client.pem", "client.key")


def _has_everything(found: dict[str, str]) -> None:
    assert "missing.txt" not in found
    read = {name: json.loads(text) for name, text in found.items() if name.endswith(".json")}
    assert read["config.json"]["parallel.ranks"] == 2 and read["config.json"]["model.path"] == str(DEMO_MODEL)
    assert read["config.json"].keys() == Config().values().keys()
    assert read["versions.json"]["server"] == read["versions.json"]["here"]
    assert read["versions.json"]["server"]["torch"].startswith("2.")
    assert (
        read["server.json"]["state"] == "SERVER_STATE_SERVING" and len(read["server.json"]["rank_info"]) == 2
    )
    ranks = [str(one["pid"]) for one in read["server.json"]["rank_info"]]
    assert {read["processes.json"][pid]["rank process"] for pid in ranks} == {True}
    assert read["processes.json"][ranks[0]]["VmRSS"].endswith(" kB")
    assert read["model.json"]["num_experts"] == 16 and len(read["loads.json"]["ranks"]) == 2
    assert {wait["rank"] for wait in read["topology.json"]["peer_waits"]} == {0, 1}
    assert "usable cores" in read["host.json"] and "/proc/meminfo" in read["host.json"]
    events = [event for event in read["trace.json"]["traceEvents"] if event["ph"] == "X"]
    assert {event["name"] for event in events} == {"plan", "vote", "run", "publish"}
    together = {rank: {e["args"]["step"] for e in events if e["tid"] == rank} for rank in (0, 1)}
    assert len(together[0] & together[1]) > 10  # the same steps, by number, on both ranks
    assert "epserver_steps_total" in found["metrics.txt"] and "demo_model" in found["status.html"]
    assert all(f"{name} " in found["README.txt"] for name in found if name != "README.txt")


async def test_what_cannot_be_had_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The server answers, its metrics do not; then nobody answers. There is an archive each time."""
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
        metrics = f"--metrics-url=http://{address}/metrics"
        async with serving() as served:
            half = tmp_path / "half.tar.gz"
            assert await run(f"--address={served.server.address}", metrics, f"-o{half}") == 1
        assert "missing: metrics.txt: " in capfd.readouterr().out
        found = members(half)
        assert json.loads(found["half/server.json"])["state"] == "SERVER_STATE_SERVING"
        assert found["half/missing.txt"].startswith("metrics.txt: ")
        none = tmp_path / "none.tar.gz"
        assert await run(f"--address={address}", metrics, f"-o{none}", "--timeout=3") == 1
    lost = members(none)["none/missing.txt"]
    of_control = ["server.json", "model.json", "loads.json", "topology.json", "config.json"]
    missing = [line.partition(":")[0] for line in lost.splitlines()]
    assert missing == [*of_control, "metrics.txt", "status.html"]
    assert "UNAVAILABLE" in lost and "none/host.json" in members(none)


async def test_an_archive_to_standard_output(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    """As `kubectl exec POD -- ep-server diagnose -o - > FILE` in the runbook, where something is missing."""
    async with serving() as served:
        reach = (f"--address={served.server.address}", "--metrics-url=http://127.0.0.1:1/metrics")
        assert await run(*reach, "-o-") == 1
    out, err = capfdbinary.readouterr()
    with tarfile.open(fileobj=io.BytesIO(out)) as archive:
        assert {"diagnose/server.json", "diagnose/missing.txt"} <= set(archive.getnames())
    assert b"missing: metrics.txt: " in err


async def test_what_answers_may_be_anything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gRPC port itself, which speaks HTTP/2, and what is no port: there is an archive, and it says so."""
    monkeypatch.chdir(tmp_path)
    async with serving() as served:
        where = f"--address={served.server.address}"
        assert await run(where, f"--metrics-url=http://{served.server.address}/metrics", "-o.tar.gz") == 1
        found = members(Path(".tar.gz"))
        assert {"diagnose/config.json", "diagnose/missing.txt"} < found.keys()  # never a path from the root
        assert "metrics.txt: " in found["diagnose/missing.txt"]
        assert await run(where, "--metrics-url=http://localhost:nine/metrics", "-oport.tar.gz") == 1
    assert "metrics.txt: nonnumeric port" in members(Path("port.tar.gz"))["port/missing.txt"]


async def test_bad_flags_are_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert await run("--metrics-url", "localhost:9400") == 1
    assert "--metrics-url = 'localhost:9400': must be a URL" in capfd.readouterr().err
    assert await run("--metrics-url", "http://user:secret@localhost:9400/metrics") == 1
    assert "names no user" in capfd.readouterr().err
    there = tmp_path / "there.tar.gz"
    there.write_text("keep me")
    async with serving() as served:
        assert await run(f"--address={served.server.address}", f"-o{there}") == 1
    assert "--output = " in capfd.readouterr().err and there.read_text() == "keep me"


@pytest.mark.parametrize(
    ("address", "host", "port", "url"),
    [
        ("127.0.0.1:50051", "127.0.0.1", 9400, "http://127.0.0.1:9400/metrics"),
        ("moe.example:50051", "0.0.0.0", 9401, "http://moe.example:9401/metrics"),
        ("[::1]:50051", "::", 9400, "http://[::1]:9400/metrics"),
        ("localhost:50051", "::1", 9400, "http://[::1]:9400/metrics"),
    ],
)
def test_metrics_are_where_the_server_says(address: str, host: str, port: int, url: str) -> None:
    assert metrics_url_of(address, {"metrics.host": host, "metrics.port": port}) == url
    assert metrics_url_of(address, {}) == "http://127.0.0.1:9400/metrics"


def test_what_should_never_come_is_struck_out() -> None:
    bundle = Bundle(TOKEN)
    key = "-----BEGIN EC PRIVATE KEY-----\nMHcCAQ\n-----END EC PRIVATE KEY-----"
    bundle.add("a", lambda: f"before {TOKEN} {key} after")
    assert bundle.files == {"a": "before [token] [private key] after"}


def test_why_something_is_missing_is_cleaned_too(tmp_path: Path) -> None:
    bundle = Bundle(TOKEN)

    def fails() -> str:
        raise OSError(f"no {TOKEN} here")

    bundle.add("a", fails)
    bundle.write(tmp_path / "b.tar.gz")
    assert members(tmp_path / "b.tar.gz") == {"b/missing.txt": "a: no [token] here\n"}


def test_a_trace_without_steps() -> None:
    assert chrome_trace([]) == {"traceEvents": []}
