"""Is an object one that a cluster takes? Kubernetes' own schemas; for custom resources those of crds.py.

No registry package has the custom resources' schemas in strict form, so crds.py states the fields, types and
enumerations of their published APIs; a field that is not in them is refused. Names that point from one object
to another, which no schema knows, are followed here.
"""

from __future__ import annotations

import json
import re
from functools import cache

import jsonschema
import kubernetes_validate

from tests.support.helm.charts import Object, of_kind, of_picker, pod_template
from tests.support.helm.crds import SCHEMAS

LABEL = re.compile(r"([A-Za-z0-9]([-_.A-Za-z0-9]{0,61}[A-Za-z0-9])?)?")
KEY = re.compile(r"([a-z0-9]([-.a-z0-9]*[a-z0-9])?/)?[A-Za-z0-9]([-_.A-Za-z0-9]{0,61}[A-Za-z0-9])?")
NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
LONG = ("ConfigMap", "PrometheusRule")  # others become host names or labels


def check(one: Object, version: str) -> None:
    """Raises: jsonschema.ValidationError, AssertionError."""
    metadata = one["metadata"]
    name = metadata["name"]
    assert NAME.fullmatch(name) and len(name) <= (253 if one["kind"] in LONG else 63), name
    for key, value in (metadata.get("labels") or {}).items():
        assert KEY.fullmatch(key) and LABEL.fullmatch(value), (key, value)
    if one["kind"] not in SCHEMAS:
        _validate(json.dumps(one), version)
        return
    jsonschema.Draft202012Validator(SCHEMAS[one["kind"]]).validate(one)
    if one["kind"] == "LeaderWorkerSet":  # its template is a Pod's
        template = one["spec"]["leaderWorkerTemplate"]["workerTemplate"]
        wrapped = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": metadata, "template": template}
        _validate(json.dumps(wrapped), version)


@cache
def _validate(one: str, version: str) -> None:
    """Each text once: most objects are the same in most renderings."""
    kubernetes_validate.validate(json.loads(one), version, strict=True)


def check_links(objects: list[Object]) -> None:
    """Every name in one object that must exist in another does. Raises: AssertionError."""
    names = [(one["kind"], one["metadata"]["name"]) for one in objects]
    assert len(names) == len(set(names))
    _check_picker([one for one in objects if of_picker(one)])
    objects = [one for one in objects if not of_picker(one)]
    template = pod_template(objects)
    labels, (container,) = template["metadata"]["labels"], template["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    services = {one["metadata"]["name"]: one for one in of_kind(objects, "Service")}
    for one in objects:
        spec = one.get("spec") or {}
        if one["kind"] in ("StatefulSet", "Deployment", "PodDisruptionBudget", "PodMonitor"):
            assert _selects(spec["selector"]["matchLabels"], labels)
        if one["kind"] == "StatefulSet":
            assert services[spec["serviceName"]]["spec"]["clusterIP"] == "None"
        if one["kind"] == "Service":
            assert _selects(spec["selector"], labels)
            assert {port["targetPort"] for port in spec["ports"]} <= set(ports)
        if one["kind"] == "ServiceMonitor":
            chosen = [
                s
                for s in services.values()
                if _selects(spec["selector"]["matchLabels"], s["metadata"]["labels"])
            ]
            (service,) = chosen
            assert spec["endpoints"][0]["port"] in {port["name"] for port in service["spec"]["ports"]}
        if one["kind"] == "PodMonitor":
            assert spec["podMetricsEndpoints"][0]["port"] in ports
        if one["kind"] == "NetworkPolicy":
            assert _selects(spec["podSelector"]["matchLabels"], labels)
            opened = {port["port"] for rule in spec["ingress"] for port in rule.get("ports", ())}
            named = {port for port in opened if isinstance(port, str)}  # those of a hand-off are a range
            assert named == set(ports) - {"rendezvous"}
            among = [rule["from"] for rule in spec["ingress"] if "ports" not in rule]  # all ports
            assert among == ([[{"podSelector": spec["podSelector"]}]] if "rendezvous" in ports else [])
        if one["kind"] == "InferencePool":
            assert {port["number"] for port in spec["targetPorts"]} == {ports["grpc"]}
        if one["kind"] == "GRPCRoute":
            for backend in (backend for rule in spec["rules"] for backend in rule["backendRefs"]):
                assert (backend.get("kind", "Service"), backend["name"]) in names
        if one["kind"] == "HorizontalPodAutoscaler":
            target = spec["scaleTargetRef"]
            assert (target["kind"], target["name"]) in names
    for pod in [template, *of_kind(objects, "Pod")]:
        _check_pod(pod, objects)


def _check_picker(objects: list[Object]) -> None:
    """A picker's Service leads to it, and it has the rights and files that it names."""
    for deployment in of_kind(objects, "Deployment"):
        pod, (service,) = deployment["spec"]["template"], of_kind(objects, "Service")
        labels = pod["metadata"]["labels"]
        assert _selects(deployment["spec"]["selector"]["matchLabels"], labels)
        assert _selects(service["spec"]["selector"], labels)
        (binding,), (account,) = of_kind(objects, "RoleBinding"), of_kind(objects, "ServiceAccount")
        assert binding["subjects"][0]["name"] == account["metadata"]["name"]
        assert pod["spec"]["serviceAccountName"] == account["metadata"]["name"]
        assert binding["roleRef"]["name"] == of_kind(objects, "Role")[0]["metadata"]["name"]
        (volume,), (files,) = pod["spec"]["volumes"], of_kind(objects, "ConfigMap")
        assert volume["configMap"]["name"] == files["metadata"]["name"] and "config.yaml" in files["data"]


def _check_pod(pod: Object, objects: list[Object]) -> None:
    """Volumes, accounts, and the restrictions that every Pod of the chart has."""
    spec = pod["spec"]
    (container,) = spec["containers"]
    volumes = [volume["name"] for volume in spec.get("volumes") or []]
    mounts = [mount["name"] for mount in container.get("volumeMounts") or []]
    assert sorted(volumes) == sorted(mounts)
    accounts = {one["metadata"]["name"] for one in of_kind(objects, "ServiceAccount")}
    assert spec["serviceAccountName"] in accounts | {"default"} and not spec["automountServiceAccountToken"]
    assert spec["securityContext"]["runAsNonRoot"] and spec["securityContext"]["runAsUser"] > 0
    security = container["securityContext"]
    assert security["readOnlyRootFilesystem"] and not security["allowPrivilegeEscalation"]
    assert security["capabilities"]["drop"] == ["ALL"]


def _selects(selector: dict[str, str], labels: dict[str, str]) -> bool:
    return bool(selector) and selector.items() <= labels.items()
