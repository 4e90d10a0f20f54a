"""Every kind, with and without GPUs, RDMA and TLS: objects that a cluster takes, and their links."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import helm_python
import jsonschema
import pytest

from tests.support.helm.charts import (
    CHART,
    MINIMAL,
    config_of,
    container,
    of_kind,
    pod_template,
    render,
    render_as,
)
from tests.support.helm.validation import check, check_links

KINDS = ("StatefulSet", "LeaderWorkerSet", "Deployment")
VERSIONS = ("1.30", "1.37")  # the oldest that Chart.yaml allows, the newest whose schemas are here
CERT_MANAGER = {"tls": {"certManager": {"enabled": True, "issuerRef": {"name": "ca"}}}}
ALL_ON: dict[str, Any] = {
    "imagePullSecrets": [{"name": "pull"}],
    "podAnnotations": {"a": "b"},
    "podLabels": {"team": "x", "app.kubernetes.io/component": "theirs"},
    "extraEnv": [{"name": "OMP_PROC_BIND", "value": "close"}],
    "nodeSelector": {"disk": "fast"},
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
    "affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}},
    "priorityClassName": "high",
    "auth": {"tokenSecret": "tokens"},
    "networkPolicy": {"enabled": True},
    "metrics": {
        "rules": True,
        "dashboards": True,
        "monitor": "ServiceMonitor",
        "labels": {"release": "prometheus"},
    },
    "service": {
        "annotations": {"c": "d"},
        "labels": {"tier": "edge"},
        "type": "LoadBalancer",
        "loadBalancerClass": "example.org/internal",
        "externalTrafficPolicy": "Local",
    },
    "extraVolumes": [{"name": "ca", "configMap": {"name": "ca"}}],
    "extraVolumeMounts": [{"name": "ca", "mountPath": "/ca", "readOnly": True}],
    "initContainers": [{"name": "first", "image": "busybox", "command": ["true"]}],
    "extraArgs": ["--log-level", "debug"],
    "envFrom": [{"secretRef": {"name": "proxy"}}],
    "podSecurityContext": {"fsGroupChangePolicy": "Always"},
    "securityContext": {"procMount": "Default"},
    "schedulerName": "volcano",
    "resourceClaims": [{"name": "gpus", "resourceClaimTemplateName": "gpus"}],
    "resources": {"claims": [{"name": "gpus"}]},
    "commonLabels": {"cost-centre": "ml"},
    "commonAnnotations": {"owner": "ml"},
    "workloadLabels": {"kueue.x-k8s.io/queue-name": "gpus"},
    "workloadAnnotations": {"leaderworkerset.sigs.k8s.io/exclusive-topology": "rack"},
    "podDisruptionBudget": {"minAvailable": "50%"},
    "topologySpread": {"matchLabelKeys": ["pod-template-hash"]},
    "serviceAccount": {"annotations": {"e": "f"}},
}


PROBES = ("startupProbe", "readinessProbe", "livenessProbe")
BY_GRPC = [{"port": 50051}, {"port": 50051, "service": "ep_server.v1.Decode"}, {"port": 50051}]
BY_HTTP = [{"path": path, "port": 9400} for path in ("/livez", "/readyz", "/livez")]


def probe_of(server: dict[str, Any], kind: str) -> dict[str, Any]:
    """What a probe asks, over gRPC or HTTP."""
    probe = server[kind]
    asked: dict[str, Any] = probe["grpc"] if "grpc" in probe else probe["httpGet"]
    return asked


@pytest.mark.parametrize(("kind", "gpu", "rdma", "tls"), [*itertools.product(KINDS, *[(False, True)] * 3)])
def test_every_kind_with_and_without_gpu_rdma_and_tls(kind: str, gpu: bool, rdma: bool, tls: bool) -> None:
    values = {"kind": kind, "gpu": {"enabled": gpu}, "rdma": {"enabled": rdma}, "tls": {"enabled": tls}}
    certificate = CERT_MANAGER if tls else {}
    for more, version in zip(({}, ALL_ON), VERSIONS, strict=True):
        objects, notes = render(values, certificate, more)
        for one in objects:
            check(one, version)
        check_links(objects)
        assert [one["kind"] for one in objects if one["kind"] in KINDS] == [kind]
        pod, server = pod_template(objects)["spec"], container(objects)
        limits, added = server["resources"]["limits"], server["securityContext"]["capabilities"].get("add")
        assert ("nvidia.com/gpu" in limits, "rdma/hca" in limits) == (gpu, rdma)
        assert added == (["IPC_LOCK"] if rdma else None)
        assert [probe_of(server, kind) for kind in PROBES] == (BY_HTTP if tls else BY_GRPC)
        assert len(of_kind(objects, "Certificate")) == tls == ("tls" in {v["name"] for v in pod["volumes"]})
        assert "hostNetwork" not in pod and server["image"].endswith("-cuda") == gpu
        assert config_of(server).parallel.device == ("cuda" if gpu else "cpu")
        assert ("needs no network" in notes) == rdma
        assert ("No TLS" in notes) == (not tls)


@pytest.mark.parametrize(("kind", "rdma", "secured"), [*itertools.product(KINDS[:2], *[(False, True)] * 2)])
def test_several_pods_as_one_server(kind: str, rdma: bool, secured: bool) -> None:
    nodes = {"nodes": 4, **({"tokenSecret": "group", "tls": True} if secured else {})}
    values = {"kind": kind, "multiNode": nodes, "rdma": {"enabled": rdma}, "tls": {"enabled": secured}}
    for more, version in zip(({}, ALL_ON), VERSIONS, strict=True):
        objects, notes = render(values, CERT_MANAGER if secured else {}, more)
        for one in objects:
            check(one, version)
        check_links(objects)
        (workload,) = (one["spec"] for one in objects if one["kind"] in KINDS)
        group = workload.get("leaderWorkerTemplate")
        assert (workload["replicas"], group and group["size"]) == ((1, 4) if group else (4, None))
        server, cluster = container(objects), config_of(container(objects)).cluster
        assert {port["name"]: port["containerPort"] for port in server["ports"]}["rendezvous"] == 50061
        (headless,) = (
            one for one in of_kind(objects, "Service") if one["metadata"]["name"].endswith("-headless")
        )
        assert "rendezvous" in {port["name"] for port in headless["spec"]["ports"]}
        assert headless["spec"]["publishNotReadyAddresses"] is True
        assert (cluster.nodes, cluster.connect_seconds) == (4, 600)
        mounted = [mount["mountPath"] for mount in server["volumeMounts"]]
        assert bool(cluster.token_file) == bool(cluster.tls_cert) == secured
        for file in filter(None, (cluster.token_file, cluster.tls_cert, cluster.tls_key, cluster.tls_ca)):
            assert str(Path(file).parent) in mounted
        assert ("anyone who reaches port 50061 can join" in notes) == (not secured)
        assert "4 Pods with 1 rank(s) each" in notes and "needs no network" not in notes


def test_lint_has_nothing_to_say() -> None:
    for kind, nodes in itertools.product(KINDS, (1, 2)):
        if (kind, nodes) == ("Deployment", 2):
            continue
        values = {**MINIMAL, "kind": kind, "multiNode": {"nodes": nodes}}
        report = helm_python.lint(CHART, values, strict=True)
        assert report["errors"] == []
        assert [m["error"] for m in report["messages"]] == ["icon is recommended"]


def test_a_field_that_kubernetes_does_not_know_is_found() -> None:
    """The validation itself: it fails on a misspelt field of every kind of object."""
    values = {
        "metrics": {"rules": True, "dashboards": True},
        "networkPolicy": {"enabled": True},
        "tls": {"enabled": True},
    }
    scaled = {"kind": "Deployment", "autoscaling": {"enabled": True}, "metrics": {"monitor": "PodMonitor"}}
    objects = [
        *render(values, CERT_MANAGER, {"metrics": {"monitor": "ServiceMonitor"}})[0],
        *render(scaled)[0],
    ]
    objects += render({"kind": "LeaderWorkerSet"})[0]
    kinds = {one["kind"]: one for one in objects}
    assert len(kinds) == 14
    for one in kinds.values():
        part = one.get("spec", one)
        part["replicaz"] = 1
        with pytest.raises(jsonschema.ValidationError, match="replicaz"):
            check(one, "1.37")


def test_names_fit_however_long_the_release_is() -> None:
    everything = {"metrics": {"rules": True, "dashboards": True}}
    for release, values in (("r" * 53, {}), ("x", {"fullnameOverride": "n" * 40}), ("ep-server", {})):
        for kind in KINDS:
            objects, _ = render_as(release, everything, {"kind": kind, **values})
            for one in objects:
                check(one, "1.37")
            check_links(objects)
