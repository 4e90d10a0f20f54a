"""What each part of the values switches on, and the command line that the server gets."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import helm_python
import pytest
import yaml

import ep_server
from ep_server.cluster.discovery import NodePlace, Surroundings, find_place
from ep_server.config import Config
from ep_server.ranks.exchanges import fabric_options
from tests.support.helm.charts import (
    CHART,
    FIELDS,
    MINIMAL,
    Object,
    chart,
    config_of,
    container,
    environment,
    nested,
    of_kind,
    pod_template,
    render,
    render_as,
)
from tests.support.helm.validation import check, check_links

VERSIONS = ("1.30", "1.37")  # the oldest that Chart.yaml allows, the newest whose schemas are here


def test_the_command_line_is_one_that_the_server_takes() -> None:
    values = {
        "ranks": 4,
        "model": {"directory": "qwen/30b", "name": "q"},
        "listen": "::",
        "grpc": {"port": 6000},
        "metrics": {"port": 6001},
        "drain": {"seconds": 7.5, "preStopSeconds": 3},
        "tls": {"enabled": True, "secretName": "s", "clientAuth": True},
        "auth": {"tokenSecret": "t", "tokenKey": "k"},
        "config": {
            "scheduler": {"max_queue": 1_000_000, "kv_fraction": 0.5, "prefix_cache": False},
            "exchange": {"timeout_seconds": 20, "spin_us": -1},
        },
        "extraEnv": [{"name": "OMP_PROC_BIND", "value": "close"}],
    }
    objects, _ = render(values)
    server = container(objects)
    read = config_of(server).values()
    assert {name: value for name, value in read.items() if value != Config().values()[name]} == {
        "parallel.ranks": 4,
        "parallel.threads_per_rank": 1,  # the 2 CPUs reserved by default, over 4 ranks
        "model.path": "/models/qwen/30b",
        "model.name": "q",
        "grpc.host": "::",
        "grpc.port": 6000,
        "metrics.host": "::",
        "metrics.port": 6001,
        "grpc.drain_seconds": 7.5,
        "grpc.tls_cert": "/etc/ep-server/tls/tls.crt",
        "grpc.tls_key": "/etc/ep-server/tls/tls.key",
        "grpc.tls_client_ca": "/etc/ep-server/tls/ca.crt",
        "grpc.token_file": "/etc/ep-server/auth/k",
        "scheduler.max_queue": 1_000_000,
        "scheduler.kv_fraction": 0.5,
        "scheduler.prefix_cache": False,
        "exchange.timeout_seconds": 20.0,
        "log.format": "json",
    }
    mounted = {mount["mountPath"]: mount for mount in server["volumeMounts"]}
    assert {"/models", "/dev/shm", "/tmp", "/etc/ep-server/tls", "/etc/ep-server/auth"} == set(mounted)
    assert all(mounted[path].get("readOnly") for path in mounted if path not in ("/dev/shm", "/tmp"))
    assert pod_template(objects)["spec"]["terminationGracePeriodSeconds"] == 26  # 3 + 7.5 + 15
    assert server["lifecycle"]["preStop"] == {"sleep": {"seconds": 3}}
    assert "lifecycle" not in container(render({"drain": {"preStopSeconds": 0}})[0])


@pytest.mark.parametrize(
    ("cpu", "ranks", "threads"), [("16", 4, 4), ("2500m", 1, 2), ("500m", 2, 1), (7, 2, 3), ("1024", 1, 256)]
)
def test_a_rank_computes_on_what_is_reserved_for_it(cpu: Any, ranks: int, threads: int) -> None:
    reserved = {"ranks": ranks, "resources": {"requests": {"cpu": cpu}}}
    assert config_of(container(render(reserved)[0])).parallel.threads_per_rank == threads
    for said in (0, 3):  # 0: all cores, as the server has it
        given = {"config": {"parallel": {"threads_per_rank": said}}}
        assert config_of(container(render(reserved, given)[0])).parallel.threads_per_rank == said
    without = config_of(container(render({"resources": {"requests": {"cpu": None}}})[0]))
    assert without.parallel.threads_per_rank == 0


def test_with_its_defaults_it_serves_the_top_of_the_claim() -> None:
    objects, notes = render()
    read = config_of(container(objects))
    assert (read.model.path, read.grpc.host, read.metrics.host) == ("/models", "0.0.0.0", "0.0.0.0")
    assert "StatefulSet moe-ep-server: 1 server(s) of 1 rank(s), namespace inference." in notes
    assert {one["kind"] for one in objects} == {
        "StatefulSet", "Service", "ServiceAccount", "PodDisruptionBudget", "Pod",
    }  # fmt: skip


def test_a_kubelet_that_speaks_tls_asks_itself() -> None:
    for tls in (False, True):
        values = {"tls": {"enabled": tls, "secretName": "s"}, "probes": {"kubeletTls": True}}
        (workload,) = of_kind(render(values)[0], "StatefulSet")
        check(workload, "1.37")
        server = container([workload])
        mode = {"mode": "TLS"} if tls else {}
        assert server["readinessProbe"]["grpc"] == {"port": 50051, "service": "ep_server.v1.Decode", **mode}
        for probe in ("startupProbe", "livenessProbe"):
            assert server[probe]["grpc"] == {"port": 50051, **mode}


def test_models_come_from_a_claim_a_node_or_an_image() -> None:
    def volume(**model: Any) -> Object:
        pod = pod_template(render({"model": model})[0])["spec"]
        return next(one for one in pod["volumes"] if one["name"] == "model")

    claim = {"claimName": "checkpoints", "readOnly": True}
    assert volume() == {"name": "model", "persistentVolumeClaim": claim}
    node = {"path": "/data", "type": "Directory"}
    assert volume(source="hostPath", hostPath={"path": "/data"}) == {"name": "model", "hostPath": node}
    image = {"reference": "models/q:1", "pullPolicy": "IfNotPresent"}
    assert volume(source="image", image={"reference": "models/q:1"}) == {"name": "model", "image": image}
    for one in render({"model": {"source": "image", "image": {"reference": "models/q:1"}}})[0]:
        check(one, "1.33")


def test_servers_live_and_die_one_by_one() -> None:
    (set_,) = of_kind(render({"kind": "LeaderWorkerSet", "replicas": 3})[0], "LeaderWorkerSet")
    assert set_["spec"]["replicas"] == 3 and set_["spec"]["leaderWorkerTemplate"]["size"] == 1
    assert set_["spec"]["leaderWorkerTemplate"]["restartPolicy"] == "None"
    objects, _ = render({"replicas": 3})
    (set_,) = of_kind(objects, "StatefulSet")
    assert set_["spec"]["replicas"] == 3 and set_["spec"]["podManagementPolicy"] == "Parallel"
    headless = {s["metadata"]["name"]: s["spec"] for s in of_kind(objects, "Service")}[
        set_["spec"]["serviceName"]
    ]
    assert headless["publishNotReadyAddresses"] is True
    (budget,) = of_kind(objects, "PodDisruptionBudget")
    assert budget["spec"]["maxUnavailable"] == 1
    spread = {
        "topologySpread": {"topologyKey": "topology.kubernetes.io/zone", "whenUnsatisfiable": "DoNotSchedule"}
    }
    pod = pod_template(render(spread)[0])
    (spread_over,) = pod["spec"]["topologySpreadConstraints"]
    assert spread_over["topologyKey"] == "topology.kubernetes.io/zone"
    assert spread_over["labelSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()


def place_of(objects: list[Object], name: str, added: dict[str, str] | None = None) -> NodePlace:
    """What a Pod of this name makes of its command line, its environment and its name."""
    found = config_of(container(objects), added).cluster
    return find_place(found, Surroundings(name, lambda _: False))


def test_pods_of_a_stateful_set_are_nodes_by_their_ordinals() -> None:
    objects, notes = render({"multiNode": {"nodes": 3, "port": 6003}})
    (set_,) = of_kind(objects, "StatefulSet")
    name, headless = set_["metadata"]["name"], set_["spec"]["serviceName"]
    leader = f"{name}-0.{headless}.inference.svc"
    for ordinal in range(3):
        assert place_of(objects, f"{name}-{ordinal}") == NodePlace(ordinal, 3, leader, 6003)
    # Pods of two versions form no server: a rollout one by one would never go on.
    assert set_["spec"]["updateStrategy"] == {"type": "OnDelete"} and "delete pods" in notes
    (budget,) = of_kind(objects, "PodDisruptionBudget")
    assert budget["spec"]["maxUnavailable"] == 1
    assert (
        of_kind(render({"multiNode": {"nodes": 3}, "replicas": 0})[0], "StatefulSet")[0]["spec"]["replicas"]
        == 0
    )
    (alone,) = of_kind(render()[0], "StatefulSet")
    assert "updateStrategy" not in alone["spec"] and "delete pods" not in render()[1]


def test_pods_that_have_the_nodes_name_are_told_their_ordinal() -> None:
    nodes = {"multiNode": {"nodes": 2}}
    objects, _ = render(nodes, {"hostNetwork": True})
    told = environment(container(objects), FIELDS | {"metadata.labels['apps.kubernetes.io/pod-index']": "1"})
    assert told["EP_SERVER_CLUSTER__NODE_RANK"] == "1"
    assert "EP_SERVER_CLUSTER__NODE_RANK" not in environment(
        container(render({"multiNode": {"nodes": 2}})[0])
    )


def test_leader_worker_set_pods_match_their_controller() -> None:
    objects, notes = render({"kind": "LeaderWorkerSet", "replicas": 5, "multiNode": {"nodes": 2}})
    (set_,) = of_kind(objects, "LeaderWorkerSet")
    name = set_["metadata"]["name"]
    assert set_["spec"]["replicas"] == 5 and set_["spec"]["leaderWorkerTemplate"]["size"] == 2
    assert set_["spec"]["leaderWorkerTemplate"]["restartPolicy"] == "None" and "delete pods" not in notes
    for group, worker in itertools.product((0, 4), (0, 1)):
        leader = f"{name}-{group}.{name}.inference"
        told = {"LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": str(worker), "LWS_LEADER_ADDRESS": leader}
        pod = f"{name}-{group}" + (f"-{worker}" if worker else "")
        assert place_of(objects, pod, told) == NodePlace(worker, 2, leader, 50061)
    one = render({"kind": "LeaderWorkerSet"})[0]
    told = {"LWS_GROUP_SIZE": "1", "LWS_WORKER_INDEX": "0", "LWS_LEADER_ADDRESS": "x"}
    assert place_of(one, f"{name}-0", told) == NodePlace(0, 1)


@pytest.mark.parametrize("kind", ["StatefulSet", "LeaderWorkerSet"])
def test_a_certificate_is_valid_for_the_rendezvous(kind: str) -> None:
    certificates = {"enabled": True, "certManager": {"enabled": True, "issuerRef": {"name": "ca"}}}
    objects, _ = render({"kind": kind, "multiNode": {"nodes": 2, "tls": True}, "tls": certificates})
    (certificate,) = of_kind(objects, "Certificate")
    told = {"LWS_LEADER_ADDRESS": "moe-ep-server-group-0.moe-ep-server-group.inference"}
    told = {} if kind == "StatefulSet" else {**told, "LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1"}
    first, _, rest = place_of(objects, "moe-ep-server-1", told).rendezvous_host.partition(".")
    assert first and f"*.{rest}" in certificate["spec"]["dnsNames"]
    assert set(certificate["spec"]["usages"]) == {"server auth", "client auth"}


def test_the_exchange_between_pods_uses_the_pods_address() -> None:
    nodes = {"multiNode": {"nodes": 2}}
    assert config_of(container(render(nodes)[0])).fabric.address == FIELDS["status.podIP"]
    said = {"config": {"fabric": {"address": "10.1.2.3"}}}
    assert config_of(container(render(nodes, said)[0])).fabric.address == "10.1.2.3"
    for other in ({}, {**nodes, "rdma": {"enabled": True}}):  # no exchange; a card that has its own
        assert config_of(container(render(other)[0])).fabric.address == ""


@pytest.mark.parametrize("traffic", ["0", "46", "low_latency"])
def test_traffic_settings_reach_the_server(traffic: str) -> None:
    given = {"rdma": {"enabled": True, "trafficClass": traffic, "gidIndex": 0}, "multiNode": {"nodes": 2}}
    fabric = config_of(container(render(given)[0])).fabric
    assert (fabric.traffic_class, fabric.gid_index) == (traffic, 0)
    assert fabric_options(fabric, 0, 1).gid_index == 0
    fabric = config_of(container(render()[0])).fabric
    assert (fabric.traffic_class, fabric.gid_index) == ("", -1)


def test_pods_of_a_server_may_reach_one_another_and_dns() -> None:
    objects, _ = render({"networkPolicy": {"enabled": True}, "multiNode": {"nodes": 2}})
    (policy,) = of_kind(objects, "NetworkPolicy")
    check(policy, "1.37")
    own, dns = policy["spec"]["egress"]
    assert own == {"to": [{"podSelector": policy["spec"]["podSelector"]}]}
    assert {port["port"] for port in dns["ports"]} == {53} and "to" not in dns


def test_load_scales_a_deployment() -> None:
    scaling = {"enabled": True, "minReplicas": 2, "maxReplicas": 9, "waitingRequests": 5, "kvUsePercent": 60}
    objects, notes = render({"kind": "Deployment", "autoscaling": scaling})
    for one, version in itertools.product(objects, VERSIONS):
        check(one, version)
    check_links(objects)
    (deployment,), (scaler,) = of_kind(objects, "Deployment"), of_kind(objects, "HorizontalPodAutoscaler")
    assert "replicas" not in deployment["spec"] and "2 to 9 server(s)" in notes
    assert (scaler["spec"]["minReplicas"], scaler["spec"]["maxReplicas"]) == (2, 9)
    aims = {one["pods"]["metric"]["name"]: one["pods"]["target"] for one in scaler["spec"]["metrics"]}
    assert aims == {
        "epserver_requests_waiting": {"type": "AverageValue", "averageValue": "5"},
        "epserver_kv_cache_usage_ratio": {"type": "AverageValue", "averageValue": "600m"},
    }


def test_rules_and_dashboards_are_the_files() -> None:
    base = "https://git.example.org/ep-server/blob/main/"
    objects, _ = render({"metrics": {"rules": True, "dashboards": True, "runbookBase": base}})
    made = {one["metadata"]["name"]: one["spec"] for one in of_kind(objects, "PrometheusRule")}
    files = {f"moe-ep-server-{path.stem}": path for path in (CHART / "files/rules").glob("*.yaml")}
    assert made.keys() == files.keys() and made
    links = re.compile(r"(runbook_url: )(?=docs/)")
    assert made == {
        name: yaml.safe_load(links.sub(rf"\1{base}", path.read_text())) for name, path in files.items()
    }
    alerts = [
        rule
        for spec in made.values()
        for group in spec["groups"]
        for rule in group["rules"]
        if "alert" in rule
    ]
    assert alerts and all(rule["annotations"]["runbook_url"].startswith(base) for rule in alerts)
    maps = {one["metadata"]["name"]: one for one in of_kind(objects, "ConfigMap")}
    boards = {
        path.name: json.loads(path.read_text().replace('"docs/how-to', f'"{base}docs/how-to'))
        for path in (CHART / "files/dashboards").glob("*.json")
    }
    assert {name: json.loads(text) for one in maps.values() for name, text in one["data"].items()} == boards
    assert all(one["metadata"]["labels"]["grafana_dashboard"] == "1" for one in maps.values())


@pytest.mark.parametrize("kind", ["ServiceMonitor", "PodMonitor"])
def test_one_monitor_finds_each_pod_once(kind: str) -> None:
    objects, notes = render({"metrics": {"monitor": kind, "interval": "5s", "labels": {"release": "p"}}})
    check_links(objects)
    (monitor,) = (one for one in objects if one["kind"].endswith("Monitor"))
    check(monitor, "1.37")
    assert monitor["kind"] == kind and monitor["metadata"]["labels"]["release"] == "p"
    (endpoint,) = monitor["spec"].get("endpoints") or monitor["spec"]["podMetricsEndpoints"]
    assert endpoint == {"port": "metrics", "path": "/metrics", "interval": "5s"}
    assert "Nothing scrapes" not in notes


def test_who_may_call_is_a_list() -> None:
    monitoring = [{"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}]
    objects, _ = render({"networkPolicy": {"enabled": True, "monitoring": monitoring}})
    (policy,) = of_kind(objects, "NetworkPolicy")
    check(policy, "1.37")
    assert policy["spec"]["egress"] == [] and policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
    rules = {rule["ports"][0]["port"]: rule["from"] for rule in policy["spec"]["ingress"]}
    assert rules["grpc"][0] == {"podSelector": {}} and rules["metrics"][0] == monitoring[0]
    for peers in rules.values():  # helm test gets through whoever else does
        labels = peers[-1]["podSelector"]["matchLabels"]
        assert all(labels.items() <= pod["metadata"]["labels"].items() for pod in of_kind(objects, "Pod"))


def test_parts_can_be_left_out() -> None:
    off = [
        nested(f"{name}.enabled", False)
        for name in ("metrics", "tests", "podDisruptionBudget", "topologySpread")
    ]
    objects, _ = render(*off, {"serviceAccount": {"create": False}, "hostNetwork": True})
    check_links(objects)
    assert sorted(one["kind"] for one in objects) == [*["Service"] * 3, "StatefulSet"]
    pod, server = pod_template(objects)["spec"], container(objects)
    assert [port["name"] for port in server["ports"]] == ["grpc"]
    assert not config_of(server).metrics.enabled and "topologySpreadConstraints" not in pod
    assert (pod["hostNetwork"], pod["dnsPolicy"]) == (True, "ClusterFirstWithHostNet")


def test_the_archive_renders_the_same(tmp_path: Path) -> None:
    archive = Path(helm_python.package(CHART, destination=tmp_path))
    assert archive.name == f"ep-server-{ep_server.__version__}.tgz"
    assert archive.stat().st_size < 500_000  # Helm keeps each release in a Secret, at most 1 MiB
    everything = {**MINIMAL, "metrics": {"rules": True, "dashboards": True}}
    with helm_python.Chart.load(archive) as packed:
        assert packed.render(everything, name="x", namespace="y") == chart().render(
            everything, name="x", namespace="y"
        )


def test_images_are_named_by_tag_or_digest() -> None:
    def image(**values: Any) -> str:
        return str(container(render({"image": values})[0])["image"])

    assert image() == f"ep-server:{ep_server.__version__}"
    assert image(repository="registry.example.org:5000/moe/ep-server", tag="x") == (
        "registry.example.org:5000/moe/ep-server:x"
    )
    digest = "sha256:" + "0" * 64
    assert image(tag="x", digest=digest) == f"ep-server@{digest}"


@pytest.mark.parametrize("release", ["true", "no", "null", "my.moe", "a" * 53, "ep-server", "a--b"])
def test_a_release_may_have_any_name_that_helm_takes(release: str) -> None:
    """Unquoted, some of them would be a truth value or nothing; Services' names have no dots."""
    secured = {"tls": {"enabled": True, "certManager": {"enabled": True, "issuerRef": {"name": "ca"}}}}
    rest = {"metrics": {"monitor": "ServiceMonitor"}, "networkPolicy": {"enabled": True}}
    objects, _ = render_as(release, secured, rest)
    for one in objects:
        check(one, "1.37")
    check_links(objects)


@pytest.mark.parametrize("release", ["123", "1e3", "0x1f"])
def test_a_release_that_no_service_can_be_named_after(release: str) -> None:
    with pytest.raises(helm_python.HelmRenderError, match=f'name of the release = "{release}"'):
        render_as(release)
    for one in render_as(release, {"fullnameOverride": "moe"})[0]:
        check(one, "1.37")


def test_names_that_look_like_something_else_stay_text() -> None:
    values = {
        "model": {"pvc": {"claimName": "123"}},
        "tls": {"enabled": True, "secretName": "1e3"},
        "auth": {"tokenSecret": "true"},
        "serviceAccount": {"create": False, "name": "0"},
        "priorityClassName": "null",
        "gpu": {"enabled": True, "runtimeClassName": "12"},
    }
    for one in render(values)[0]:
        check(one, "1.37")
    path = "/mnt/a: b # c"
    (model, *_) = pod_template(render({"model": {"source": "hostPath", "hostPath": {"path": path}}})[0])[
        "spec"
    ]["volumes"]
    assert model["hostPath"]["path"] == path
