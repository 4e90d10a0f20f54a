"""The chart's escape hatches: what users add arrives where it belongs, beside what the chart says itself."""

from __future__ import annotations

import json
import re
from typing import Any

import helm_python
import pytest

from ep_server.observability.metrics import REQUEST_EDGES, TOKEN_EDGES
from tests.support.helm.charts import CHART, config_of, of_kind, of_picker, pod_template, render
from tests.support.helm.validation import check, check_links

KINDS = ("StatefulSet", "Deployment", "LeaderWorkerSet")


def named(items: list[dict[str, Any]], name: str) -> dict[str, Any]:
    (only,) = (item for item in items if item["name"] == name)
    return only


@pytest.mark.parametrize("kind", KINDS)
def test_labels_and_annotations_are_on_every_object(kind: str) -> None:
    values = {
        "kind": kind,
        "commonLabels": {"team": "ml"},
        "commonAnnotations": {"owner": "ml"},
        "workloadLabels": {"kueue.x-k8s.io/queue-name": "gpus"},
        "workloadAnnotations": {"owner": "batch"},
        "metrics": {"rules": True, "dashboards": True, "monitor": "PodMonitor"},
        "networkPolicy": {"enabled": True},
        "inferencePool": {"enabled": True, "picker": {"image": "picker:1"}},
        "grpcRoute": {"parentRefs": [{"name": "gateway"}]},
    }
    objects, _ = render(values)
    check_links(objects)
    parts = [one for one in objects if one["kind"] != "Pod"]  # those of `helm test` have their own
    assert {one["metadata"]["labels"]["team"] for one in [*parts, pod_template(objects)]} == {"ml"}
    (workload,) = (one for one in of_kind(parts, kind) if not of_picker(one))
    assert workload["metadata"]["annotations"]["owner"] == "batch"
    assert {one["metadata"]["annotations"]["owner"] for one in parts if one is not workload} == {"ml"}
    assert workload["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gpus"
    assert pod_template(objects)["metadata"]["annotations"]["owner"] == "ml"


def test_extra_parts_of_a_pod_stand_beside_its_own() -> None:
    objects, _ = render(
        {
            "extraVolumes": [{"name": "ca", "configMap": {"name": "ca"}}],
            "extraVolumeMounts": [{"name": "ca", "mountPath": "/ca"}],
            "initContainers": [{"name": "first", "image": "busybox"}],
            "extraContainers": [{"name": "beside", "image": "busybox"}],
            "extraArgs": ["--log-level", "debug"],
            "envFrom": [{"secretRef": {"name": "proxy"}}],
            "podSecurityContext": {"fsGroupChangePolicy": "Always", "supplementalGroups": [7]},
            "securityContext": {"runAsUser": 77},
            "resourceClaims": [{"name": "gpus", "resourceClaimName": "gpus"}],
            "resources": {"claims": [{"name": "gpus"}]},
            "schedulerName": "volcano",
        }
    )
    for one in objects:
        check(one, "1.37")  # 1.30 wrote resourceClaims in another way
    pod = pod_template(objects)["spec"]
    server, beside = pod["containers"]
    assert (server["name"], beside["name"], pod["initContainers"][0]["name"]) == ("server", "beside", "first")
    assert named(server["volumeMounts"], "ca")["mountPath"] == "/ca" and named(pod["volumes"], "ca")
    assert config_of(server).log.level == "debug"
    assert server["envFrom"] == [{"secretRef": {"name": "proxy"}}]
    assert (server["resources"]["claims"], pod["schedulerName"]) == ([{"name": "gpus"}], "volcano")
    assert pod["resourceClaims"] == [{"name": "gpus", "resourceClaimName": "gpus"}]
    security = pod["securityContext"]
    assert security["runAsNonRoot"] and security["supplementalGroups"] == [7]
    assert security["fsGroupChangePolicy"] == "Always"
    own = server["securityContext"]
    assert own["readOnlyRootFilesystem"] and own["runAsUser"] == 77


@pytest.mark.parametrize(
    ("values", "field", "expected"),
    [
        ({"minAvailable": 2}, "minAvailable", 2),
        ({"minAvailable": "50%"}, "minAvailable", "50%"),
        ({"maxUnavailable": "25%"}, "maxUnavailable", "25%"),
        ({}, "maxUnavailable", 1),
    ],
)
def test_a_budget_is_a_number_or_a_share(values: dict[str, Any], field: str, expected: Any) -> None:
    (budget,) = of_kind(render({"podDisruptionBudget": values})[0], "PodDisruptionBudget")
    check(budget, "1.37")
    both = {"minAvailable", "maxUnavailable"} & budget["spec"].keys()
    assert both == {field} and budget["spec"][field] == expected


@pytest.mark.parametrize(("kind", "field"), [("StatefulSet", "updateStrategy"), ("Deployment", "strategy")])
def test_a_rollout_is_as_the_values_say(kind: str, field: str) -> None:
    strategy = {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0}}
    (workload,) = of_kind(render({"kind": kind, "updateStrategy": strategy})[0], kind)
    assert workload["spec"][field] == strategy


def test_a_rollout_waits_as_long_as_its_probes() -> None:
    startup = {"startup": {"periodSeconds": 10, "failureThreshold": 90}}
    for more, expected in (({}, 1860), ({"progressDeadlineSeconds": 7200}, 7200)):
        (workload,) = of_kind(render({"kind": "Deployment", "probes": startup}, more)[0], "Deployment")
        assert workload["spec"]["progressDeadlineSeconds"] == expected


def test_clients_that_balance_see_ready_pods_alone() -> None:
    objects, _ = render()
    services = {one["metadata"]["name"]: one["spec"] for one in of_kind(objects, "Service")}
    ready, all_pods = services["moe-ep-server-ready"], services["moe-ep-server-headless"]
    assert ready["clusterIP"] == all_pods["clusterIP"] == "None"
    assert not ready.get("publishNotReadyAddresses") and all_pods["publishNotReadyAddresses"]


def test_extra_objects_are_templates() -> None:
    extra = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "{{ .Release.Name }}-more"},
        "data": {"port": "{{ .Values.grpc.port }}"},
    }
    (made,) = of_kind(render({"extraObjects": [extra]})[0], "ConfigMap")
    assert (made["metadata"]["name"], made["data"]["port"]) == ("moe-more", "50051")


@pytest.mark.parametrize(
    "values",
    [
        {"commonLabels": {"app.kubernetes.io/name": "mine"}},
        {"extraVolumes": [{"emptyDir": {}}]},
        {"podDisruptionBudget": {"minAvailable": "half"}},
        {"extraObjects": [{"kind": "ConfigMap"}]},
        {"service": {"externalTrafficPolicy": "Near"}},
    ],
)
def test_values_that_cannot_work_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(helm_python.HelmError, match=next(iter(values))):
        render(values)


def rules_of(alerts: dict[str, Any], **metrics: Any) -> dict[str, dict[str, Any]]:
    """Rules by alert, or by record and labels."""
    objects, _ = render({"metrics": {"rules": True, "alerts": alerts, **metrics}})
    groups = [group for one in of_kind(objects, "PrometheusRule") for group in one["spec"]["groups"]]
    assert all(group["rules"] for group in groups)
    return {
        rule.get("alert") or "/".join([rule["record"], *map(str, rule.get("labels", {}).values())]): rule
        for group in groups
        for rule in group["rules"]
    }


def test_alerts_can_be_left_out_and_weigh_as_users_say() -> None:
    before = rules_of({})
    severities = {"EpServerSlowRank": "critical"}
    rules = rules_of({"disabled": ["EpServerReplicaDown"], "severities": severities})
    assert before.keys() - rules.keys() == {"EpServerReplicaDown"}
    changed = {name for name in rules if rules[name] != before[name]}
    assert changed == {"EpServerSlowRank"} and rules["EpServerSlowRank"]["labels"]["severity"] == "critical"


def test_objectives_reach_the_rules() -> None:
    objectives = {"availability": 0.9995, "ttft": 0.95, "ttftSeconds": 5, "itlSeconds": 0.05}
    rules = rules_of({"objectives": objectives})
    budget = {
        slo: rules[f"epserver:slo_budget:ratio/{slo}"]["expr"] for slo in ("availability", "ttft", "itl")
    }
    assert budget == {"availability": "vector(0.0005)", "ttft": "vector(0.05)", "itl": "vector(0.01)"}
    for slo, edge in (("ttft", "5"), ("itl", "0.05")):
        bad = rules[f"epserver:slo_bad:rate5m/{slo}"]["expr"]
        assert re.findall(r'le="(.*?)"', bad) == [edge]


def test_runbook_links_are_absolute_or_absent() -> None:
    base = "https://git.example.org/blob/v1/"
    for given, links in (("", False), (base, True)):
        rules = rules_of({}, runbookBase=given)
        for rule in (rule for rule in rules.values() if "alert" in rule):
            file = f"docs/how-to/alerts.md#{rule['alert'].lower()}"
            wanted = {"runbook_url": base + file} if links else {"runbook": file}
            assert {key: text for key, text in rule["annotations"].items() if "runbook" in key} == wanted


def test_dashboards_link_to_the_runbook_where_it_is_served() -> None:
    base = "https://git.example.org/blob/v1/"
    for given, titles in (("", ["Dashboards"]), (base, ["Runbook", "Dashboards"])):
        objects, _ = render({"metrics": {"dashboards": True, "runbookBase": given}})
        boards = [text for one in of_kind(objects, "ConfigMap") for text in one["data"].values()]
        links = [json.loads(text)["links"] for text in boards]
        assert len(links) == 5 and all([link["title"] for link in each] == titles for each in links)
        assert not given or {each[0]["url"] for each in links} == {f"{base}docs/how-to/alerts.md"}


def test_the_schema_knows_the_alerts_and_the_edges() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    alerts = schema["properties"]["metrics"]["properties"]["alerts"]["properties"]
    names = {name for name, rule in rules_of({}).items() if "alert" in rule}
    assert set(alerts["disabled"]["items"]["enum"]) == names
    assert set(alerts["severities"]["propertyNames"]["enum"]) == names
    objectives = alerts["objectives"]["properties"]
    assert objectives["ttftSeconds"]["enum"] == list(REQUEST_EDGES)
    assert objectives["itlSeconds"]["enum"] == list(TOKEN_EDGES)


def test_each_rank_has_a_gpu_of_its_own() -> None:
    objects, _ = render({"gpu": {"enabled": True}, "ranks": 8})
    server = next(one for one in pod_template(objects)["spec"]["containers"] if one["name"] == "server")
    assert server["resources"]["limits"]["nvidia.com/gpu"] == 8
    assert config_of(server).parallel.device == "cuda"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"gpu": {"enabled": True, "count": 4}, "ranks": 8},
            "gpu.count = 4: must be null or equal to ranks = 8",
        ),
        ({"gpu": {"enabled": True}, "config": {"parallel": {"device": "cpu"}}}, "must be cuda or absent"),
        ({"config": {"parallel": {"device": "cuda"}}}, "gpu.enabled = false: must be true"),
    ],
)
def test_gpus_and_ranks_must_agree(values: dict[str, Any], message: str) -> None:
    with pytest.raises(helm_python.HelmError, match=message):
        render(values)


def test_more_egress_comes_with_names() -> None:
    more = {"to": [{"ipBlock": {"cidr": "10.0.0.0/8"}}], "ports": [{"port": 443}]}
    (policy,) = of_kind(
        render({"networkPolicy": {"enabled": True, "extraEgress": [more]}})[0], "NetworkPolicy"
    )
    check(policy, "1.37")
    dns, given = policy["spec"]["egress"]
    assert {port["port"] for port in dns["ports"]} == {53} and given == more


@pytest.mark.parametrize("kind", ["ServiceMonitor", "PodMonitor"])
def test_scrapes_are_as_the_values_say(kind: str) -> None:
    scrape = {
        "scrapeTimeout": "10s",
        "relabelings": [{"sourceLabels": ["__meta_kubernetes_pod_node_name"], "targetLabel": "node"}],
        "metricRelabelings": [{"sourceLabels": ["expert"], "regex": ".+", "action": "drop"}],
    }
    (made,) = of_kind(render({"metrics": {"monitor": kind, **scrape}})[0], kind)
    check(made, "1.37")
    (endpoint,) = made["spec"]["endpoints" if kind == "ServiceMonitor" else "podMetricsEndpoints"]
    assert endpoint.items() >= scrape.items()


def test_something_else_may_set_the_replicas() -> None:
    (made,) = of_kind(render({"kind": "Deployment", "autoscaling": {"external": True}})[0], "Deployment")
    assert "replicas" not in made["spec"]


@pytest.mark.parametrize(
    ("values", "name", "meant"),
    [
        ({"replica": 2}, "replica", "replicas"),
        ({"service": {"prt": 1}}, "prt", "port"),
        ({"config": {"log": {"levl": "info"}}}, "levl", "level"),
    ],
)
def test_an_unknown_name_lists_the_known_ones(values: dict[str, Any], name: str, meant: str) -> None:
    with pytest.raises(helm_python.HelmError, match=f"invalid propertyName '{name}'(?s:.*)'{meant}'"):
        render(values)
