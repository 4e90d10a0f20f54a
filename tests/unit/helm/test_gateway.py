"""InferencePool, endpoint picker and GRPCRoute of the chart: who leads to whom, and what is refused."""

from __future__ import annotations

import re
from typing import Any

import helm_python
import pytest
import yaml

from tests.support.helm.charts import config_of, container, of_kind, of_picker, render
from tests.support.helm.validation import check, check_links

POOL = {"enabled": True, "picker": {"service": "theirs", "port": 9009}}


def test_a_pool_leads_through_the_picker_to_leaders() -> None:
    route = {"parentRefs": [{"name": "gateway"}], "hostnames": ["moe.example.org"]}
    objects, _ = render({"inferencePool": POOL, "grpcRoute": route, "grpc": {"port": 6000}})
    check_links(objects)
    (pool,), (made,) = of_kind(objects, "InferencePool"), of_kind(objects, "GRPCRoute")
    assert pool["spec"]["endpointPickerRef"]["name"] == "theirs"
    assert pool["spec"]["endpointPickerRef"]["port"] == {"number": 9009}
    assert pool["spec"]["targetPorts"] == [{"number": 6000}]
    assert made["spec"]["rules"][0]["backendRefs"][0]["kind"] == "InferencePool"
    assert made["spec"]["hostnames"] == ["moe.example.org"]
    assert config_of(container(objects)).metrics.vllm_names
    for kind, label in (("StatefulSet", "apps.kubernetes.io"), ("LeaderWorkerSet", "leaderworkerset")):
        several, _ = render({"inferencePool": POOL, "kind": kind, "multiNode": {"nodes": 2}})
        (pool,) = of_kind(several, "InferencePool")
        (first,) = (name for name in pool["spec"]["selector"]["matchLabels"] if name.startswith(label))
        assert pool["spec"]["selector"]["matchLabels"][first] == "0"


def test_a_route_without_a_pool_leads_to_the_service() -> None:
    objects, _ = render({"grpcRoute": {"parentRefs": [{"name": "gateway"}]}, "service": {"port": 80}})
    check_links(objects)
    (route,) = of_kind(objects, "GRPCRoute")
    assert route["spec"]["rules"][0]["backendRefs"] == [{"name": "moe-ep-server", "port": 80}]
    assert not of_kind(objects, "InferencePool")


def test_the_chart_runs_a_picker_of_its_own() -> None:
    picker = {"image": "picker:1", "args": ["--v=4"]}
    objects, _ = render({"inferencePool": {"enabled": True, "picker": picker}, "commonLabels": {"a": "b"}})
    for one in objects:
        check(one, "1.37")
    check_links(objects)
    (deployment,) = of_kind(objects, "Deployment")
    args = deployment["spec"]["template"]["spec"]["containers"][0]["args"]
    assert {"--pool-name=moe-ep-server", "--model-server-metrics-port=9400", "--v=4"} <= set(args)
    (files,) = (one for one in of_kind(objects, "ConfigMap") if of_picker(one))
    config = yaml.safe_load(files["data"]["config.yaml"])
    named = {plugin["type"] for plugin in config["plugins"]}
    used = [*config["schedulingProfiles"][0]["plugins"], *config["requestHandler"]["parsers"]]
    assert {plugin["pluginRef"] for plugin in used} == named


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"inferencePool": {"enabled": True}}, "inferencePool.picker.image"),
        ({"inferencePool": POOL, "metrics": {"enabled": False}}, "metrics.enabled = false"),
        ({"inferencePool": POOL, "tls": {"enabled": True, "secretName": "s"}}, "tls.enabled = true"),
        (
            {"inferencePool": {"enabled": True, "picker": {"image": "i", "service": "s"}}},
            "inferencePool.picker.service",
        ),
    ],
)
def test_pools_that_cannot_work_are_refused(values: dict[str, Any], why: str) -> None:
    with pytest.raises(helm_python.HelmError, match=re.escape(why)):
        render(values)
