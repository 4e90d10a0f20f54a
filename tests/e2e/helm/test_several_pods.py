"""Two Pods of the chart as one server, run here: each with a network, a name and an address of its own."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from ep_server import _C
from ep_server.testing import namespaces
from ep_server.testing.namespaces import Hosts
from tests.support.helm.charts import NAMESPACE, Object, of_kind, pod_template, render
from tests.support.helm.node import WAIT, Container, Identity, Node, missing
from tests.support.helm.pods import ASSETS, MODEL, run_tests, signed

why = missing() or namespaces.missing() or ("" if _C.FABRIC else "needs the headers of libfabric")
pytestmark = pytest.mark.skipif(bool(why), reason=why)

NODES = {"multiNode": {"nodes": 2, "tokenSecret": "group"}}
GROUP = "moe-ep-server-group"
NAMES = {
    "StatefulSet": [f"moe-ep-server-{i}.moe-ep-server-headless.{NAMESPACE}" for i in (0, 1)],
    "LeaderWorkerSet": [f"{GROUP}-0.{GROUP}.{NAMESPACE}", f"{GROUP}-0-1.{GROUP}.{NAMESPACE}"],
}
# Prints what each rank makes of a prompt, and the rank of a request that wishes none.
ASK = """
import json, sys
from ep_server.client import Client, Target
with Client(Target("localhost:50051", tls_ca=sys.argv[1])) as client:
    same = {"max_new_tokens": 8, "temperature": 0.0}
    print(json.dumps([list(client.complete([1, 2, 3], dp_rank=rank, **same).token_ids) for rank in (0, 1)]))
    print(client.complete([1, 2, 3], max_new_tokens=1).info.rank)
"""
# Prints the sum of the samples of each series.
SCRAPE = """
import collections, json, urllib.request
sums = collections.Counter()
for line in urllib.request.urlopen("http://127.0.0.1:9400/metrics", timeout=30).read().decode().splitlines():
    if not line.startswith("#"):
        sums[line.partition("{")[0].partition(" ")[0]] += float(line.rpartition(" ")[2])
print(json.dumps(sums))
"""


@contextmanager
def two_pods(
    workspace: Path, objects: list[Object], secrets: dict[str, Any], hosts: Hosts
) -> Iterator[list[Container]]:
    """Both Pods of the one workload, the second started when the first waits for it."""
    (kind,) = (one["kind"] for one in objects if one["kind"] in NAMES)
    names, services = NAMES[kind], tuple(one["metadata"]["name"] for one in of_kind(objects, "Service"))
    with ExitStack() as running:
        addresses = {name: hosts.address(i) for i, name in enumerate(names)}
        addresses |= {f"{name}.svc": address for name, address in addresses.items()}
        here = Node(workspace, {"checkpoints": ASSETS}, secrets, services, addresses)
        pods: list[Container] = []
        for i, name in enumerate(names):
            told = {"LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": str(i), "LWS_LEADER_ADDRESS": names[0]}
            identity = Identity(
                name=name.partition(".")[0],
                network=hosts.names[i],
                fields={"status.podIP": hosts.address(i)},
                added=told if kind == "LeaderWorkerSet" else {},
            )
            pods.append(running.enter_context(here.run(pod_template(objects), identity=identity)))
            assert i or not pods[0].probe("readinessProbe")
        for pod in pods:
            pod.until_ready()
            assert pod.probe("readinessProbe") and pod.probe("livenessProbe")
        results = run_tests(here, objects, pods[1])
        assert {test: code for test, (code, _) in results.items()} == dict.fromkeys(
            ("health", "decode", "metrics"), 0
        ), results
        yield pods


def check_answers(pods: list[Container], authority: str) -> None:
    """Both Pods give the same tokens from either rank; a request goes to the rank of the Pod it came to."""
    told = []
    for i, pod in enumerate(pods):
        asked = pod.beside("-c", ASK, authority)
        out, err = asked.communicate(timeout=WAIT)
        assert (err, asked.returncode) == ("", 0)
        tokens, rank = out.splitlines()
        assert int(rank) == i
        told += json.loads(tokens)
    assert len(told) == 4 and len(told[0]) > 0 and all(tokens == told[0] for tokens in told)


def check_counts(pods: list[Container]) -> None:
    """The calls of check_answers and of one of helm's tests at the second Pod: each counted once."""
    pages = []
    for pod in pods:
        out, err = pod.beside("-c", SCRAPE).communicate(timeout=WAIT)
        assert err == ""
        pages.append(json.loads(out))
    assert pages[0]["epserver_requests_admitted_total"] == 7 and pages[0]["epserver_ep_rank_up"] == 2
    assert pages[1]["epserver_relayed_requests_total"] == 4 and pages[1]["epserver_relayed_streams"] == 0
    both = {name for name in pages[0].keys() & pages[1].keys() if name.startswith("epserver_")}
    assert both == {"epserver_node_info"}


def test_pods_of_a_stateful_set_serve_as_one_and_drain_as_one(tmp_path: Path) -> None:
    objects, _ = render(MODEL, NODES)
    secrets = {"group": {"tokens": b"secret\n"}}
    with Hosts(2) as hosts, two_pods(tmp_path, objects, secrets, hosts) as pods:
        check_answers(pods, "")
        check_counts(pods)
        pods[0].processes()[0].send_signal(signal.SIGTERM)  # node 0 drains them all
        for pod in pods:
            code, log = pod.wait()
            assert code == 0 and '"level": "error"' not in log and '"message": "stopped"' in log, log


@pytest.mark.slow
def test_leader_worker_set_with_mutual_tls_restarts_as_one(tmp_path: Path) -> None:
    issuer = {"enabled": True, "issuerRef": {"name": "ca"}}
    tls = {"tls": {"enabled": True, "certManager": issuer}, "multiNode": {"nodes": 2, "tls": True}}
    objects, _ = render(MODEL, {"kind": "LeaderWorkerSet"}, tls)
    (certificate,) = of_kind(objects, "Certificate")
    (tmp_path / "ca").mkdir()
    secrets = {certificate["spec"]["secretName"]: signed(tmp_path / "ca", certificate)}
    with Hosts(2) as hosts:
        with two_pods(tmp_path, objects, secrets, hosts) as pods:
            check_answers(pods, str(tmp_path / "ca" / "ca.crt"))
            pods[1].processes()[0].kill()  # its ranks are gone: the server ends, to be started again
            code, log = pods[0].wait()
            assert code == 1 and "node 1" in log, log
        with two_pods(tmp_path, objects, secrets, hosts) as pods:  # at the same addresses
            check_answers(pods, str(tmp_path / "ca" / "ca.crt"))
