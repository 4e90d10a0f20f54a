"""The Pods of the chart, run here: exact command line, environment, user, volumes, probes, helm's tests."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.helm.charts import Object, container, of_kind, pod_template, render
from tests.support.helm.node import WAIT, Container, Node, missing
from tests.support.helm.pods import ASSETS, MODEL, run_tests, signed

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())

TLS_FILES = {"ca": "ca.crt", "cert": "tls.crt", "key": "tls.key"}
# Prints a line at the first token, and the number of tokens at the end.
STREAM = """
import sys
from ep_server.client import Client
with Client(sys.argv[1]) as client:
    count = 0
    for tokens in client.generate([1, 2, 3], max_new_tokens=int(sys.argv[2]), ignore_eos=True):
        print("streaming", flush=True) if count == 0 else None
        count += len(tokens.token_ids)
    print(count)
"""


def node(workspace: Path, objects: list[Object], secrets: dict[str, Any] | None = None) -> Node:
    services = tuple(one["metadata"]["name"] for one in of_kind(objects, "Service"))
    return Node(workspace, {"checkpoints": ASSETS}, secrets or {}, services)


def check_confined(server: Container, user: int) -> None:
    """Every process has the Pod's user and no privilege; only the Pod's own volumes can be written."""
    processes = server.processes()
    assert len(processes) >= 3  # the front and two ranks
    for process in processes:
        status = Path(f"/proc/{process.pid}/status").read_text()
        lines = dict(re.findall(r"^(\w+):\t(.*)$", status, re.MULTILINE))
        assert lines["Uid"] == lines["Gid"] == "\t".join([str(user)] * 4) and lines["NoNewPrivs"] == "1"
        assert all(int(lines[f"Cap{of}"], 16) == 0 for of in ("Inh", "Prm", "Eff", "Bnd", "Amb"))
    mounts = Path(f"/proc/{server.pid}/mountinfo").read_text().splitlines()
    writable = {line.split()[4] for line in mounts if "rw" in line.split()[5].split(",")}
    assert {path for path in writable if not path.startswith(("/proc", "/dev/"))} == {"/tmp"}
    assert "/dev/shm" in writable and "/" in {line.split()[4] for line in mounts} - writable


def test_a_pod_serves_passes_helms_tests_and_drains(tmp_path: Path) -> None:
    given = {"config": {"scheduler": {"max_running": 8}}, "drain": {"seconds": 60, "preStopSeconds": 1}}
    objects, _ = render(MODEL, {"ranks": 2}, given)
    here, template = node(tmp_path, objects), pod_template(objects)
    with here.run(template) as server:
        server.until_ready()
        assert server.probe("readinessProbe") and server.probe("livenessProbe")
        check_confined(server, template["spec"]["securityContext"]["runAsUser"])
        assert server.processes()[0].environ()["EP_SERVER_SCHEDULER__MAX_RUNNING"] == "8"
        results = run_tests(here, objects, server)
        assert {name: code for name, (code, _) in results.items()} == dict.fromkeys(
            ("health", "decode", "metrics"), 0
        ), results
        assert "SERVING" in results["health"][1] and "3 prompt tokens" in results["decode"][1]

        # Stopped as a node does it: preStop, SIGTERM, the grace period. A stream goes on to its end.
        spec = template["spec"]
        assert container(objects)["lifecycle"]["preStop"]["sleep"]["seconds"] == 1
        stream = server.beside(
            "-c", STREAM, f"127.0.0.1:{container(objects)['ports'][0]['containerPort']}", "1500"
        )
        assert stream.stdout is not None and stream.stdout.readline() == "streaming\n"
        processes = server.processes()
        processes[0].send_signal(signal.SIGTERM)
        out, err = stream.communicate(timeout=WAIT)
        assert (out, err, stream.returncode) == ("1500\n", "", 0)
        code, log = server.wait(spec["terminationGracePeriodSeconds"])
        assert code == 0 and '"message": "draining, at most 60 s' in log and "ERROR" not in log
        assert not any(process.is_running() for process in processes)


def test_a_pod_with_mutual_tls_and_tokens(tmp_path: Path) -> None:
    secured = {
        "kind": "LeaderWorkerSet",
        "tls": {
            "enabled": True,
            "clientAuth": True,
            "certManager": {"enabled": True, "issuerRef": {"name": "ca"}},
        },
        "auth": {"tokenSecret": "tokens"},
    }
    objects, _ = render(MODEL, secured)
    (certificate,) = of_kind(objects, "Certificate")
    (tmp_path / "ca").mkdir()
    secrets = {
        certificate["spec"]["secretName"]: signed(tmp_path / "ca", certificate),
        "tokens": {"tokens": b"one\n"},
    }
    here = node(tmp_path, objects, secrets)
    with here.run(pod_template(objects)) as server:
        server.until_ready()
        assert server.probe("readinessProbe") and server.probe("livenessProbe")
        results = run_tests(here, objects, server)
        assert {name: code for name, (code, _) in results.items()} == dict.fromkeys(
            ("health", "decode", "metrics"), 0
        ), results
        # What the runbook says for a Pod with TLS and tokens: an archive that lacks nothing.
        mounted = "/etc/ep-server"
        flags = [f"--tls-{what}={mounted}/tls/{name}" for what, name in TLS_FILES.items()]
        diagnose = ("ep-server", "diagnose", "-o", "/tmp/d.tar.gz", "--address", "localhost:50051")
        asked = server.inside(*diagnose, *flags, f"--token-file={mounted}/auth/tokens")
        out, err = asked.communicate(timeout=WAIT)
        assert (asked.returncode, err) == (0, "") and "metrics.txt, status.html" in out, out
        # A process that shows its stacks goes on: the server answers below.
        asked = server.inside("sh", "-c", "kill -USR1 1")
        assert asked.communicate(timeout=WAIT)[0] == "" and asked.returncode == 0
        # The tests can fail: a token that is not accepted, no certificate, a CA that did not sign, no server.
        strangers = {**secrets, "tokens": {"tokens": b"two\n"}}
        results = run_tests(node(tmp_path, objects, strangers), objects, server)
        assert results["health"][0] == 0 and results["decode"][0] == 1
        assert "UNAUTHENTICATED" in results["decode"][1]
        plain, _ = render(MODEL)
        assert {name: code for name, (code, _) in run_tests(here, plain, server).items()} == {
            "health": 1,
            "decode": 1,
            "metrics": 0,
        }
        processes = server.processes()
    # Nothing stays behind, also where it was killed: no process, no mount.
    assert psutil.wait_procs(processes, timeout=WAIT)[1] == []
    assert list((tmp_path / "root").iterdir()) == []


def test_a_pod_that_cannot_start_says_why(tmp_path: Path) -> None:
    objects, _ = render({"model": {"directory": "no_model"}, "config": {"log": {"format": "text"}}})
    with node(tmp_path, objects).run(pod_template(objects)) as server:
        code, log = server.wait()
        assert code == 1 and "/models/no_model" in log
