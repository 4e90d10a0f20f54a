"""The chart's values: bad ones are refused by name; schema and README are those of server and file."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Any

import helm_python
import pytest
import yaml

from ep_server.config import Config, fields
from tests.support.helm.charts import (
    CHART,
    NAMESPACE,
    RELEASE,
    chart,
    config_of,
    container,
    nested,
    of_kind,
    render,
)
from tests.support.helm.validation import check, check_links

SCHEMA = json.loads((CHART / "values.schema.json").read_text())
REFUSED: list[tuple[str, Any, str]] = [
    ("kind", "DaemonSet", "/kind"),
    ("replicas", -1, "/replicas"),
    ("ranks", 0, "/ranks"),
    ("ranks", 65, "/ranks"),
    ("ranks", "four", "/ranks"),
    ("multiNode.nodes", 0, "/multiNode/nodes"),
    ("multiNode.nodes", 65, "/multiNode/nodes"),
    ("multiNode.port", 80, "/multiNode/port"),
    ("multiNode.connectSeconds", 0, "/multiNode/connectSeconds"),
    ("multiNode.tokenSecret", "My_Secret", "/multiNode/tokenSecret"),
    ("multiNode.tls", True, "/tls/enabled"),
    ("rdma.serviceLevel", 3, "/rdma/serviceLevel"),  # the subnet manager's, no provider has a setting for it
    ("rdma.trafficClass", "64", "/rdma/trafficClass"),
    ("rdma.trafficClass", 46, "/rdma/trafficClass"),
    ("rdma.gidIndex", -1, "/rdma/gidIndex"),
    ("rdma.gidIndex", 256, "/rdma/gidIndex"),
    ("rdma.resource", "infiniband", "/rdma/resource"),
    ("rdma.count", 0, "/rdma/count"),
    ("gpu.count", 0, "/gpu/count"),
    ("gpu.count", 1.5, "/gpu/count"),
    ("hostNetwork", "yes", "/hostNetwork"),
    ("image.digest", "sha256:12", "/image/digest"),
    ("image.pullPolicy", "Sometimes", "/image/pullPolicy"),
    ("model.pvc.claimName", "", "/model/pvc/claimName"),
    ("model.pvc.claimName", "My_Claim", "/model/pvc/claimName"),
    ("model.source", "s3", "/model/source"),
    ("model.source", "hostPath", "/model/hostPath/path"),
    ("model.source", "image", "/model/image/reference"),
    ("model.hostPath.path", "models", "/model/hostPath/path"),
    ("model.directory", "../etc", "/model/directory"),
    ("grpc.port", 80, "/grpc/port"),
    ("metrics.port", 70000, "/metrics/port"),
    ("listen", "everywhere", "/listen"),
    ("listen", "1:2:3", "/listen"),
    ("podLabels", {"team": "x" * 64}, "/podLabels/team"),
    ("nodeSelector", {"zone": "a b"}, "/nodeSelector/zone"),
    ("drain.seconds", -1, "/drain/seconds"),
    ("drain.preStopSeconds", 0.5, "/drain/preStopSeconds"),
    ("probes.startup.failureThreshold", 0, "/probes/startup/failureThreshold"),
    ("sharedMemory.size", "2 GB", "/sharedMemory/size"),
    ("resources.limits.memory", "lots", "/resources/limits/memory"),
    ("security.runAsUser", 0, "/security/runAsUser"),
    ("tls.enabled", True, "/tls/secretName"),
    ("tls.clientAuth", True, "/tls/enabled"),
    ("tls.certManager.enabled", True, "/tls/certManager/issuerRef/name"),
    ("tls.certManager.duration", "90 days", "/tls/certManager/duration"),
    ("auth.tokenKey", "a/b", "/auth/tokenKey"),
    ("networkPolicy.clients", [{"pods": {}}], "/networkPolicy/clients/0"),
    ("metrics.monitor", "VMServiceScrape", "/metrics/monitor"),
    ("metrics.interval", "often", "/metrics/interval"),
    ("metrics.interval", "0s", "/metrics/interval"),
    ("metrics.runbookBase", "wiki", "/metrics/runbookBase"),
    ("metrics.labels", {"release": 1}, "/metrics/labels/release"),
    ("autoscaling.enabled", True, "/kind"),
    ("autoscaling.kvUsePercent", 101, "/autoscaling/kvUsePercent"),
    ("podDisruptionBudget.maxUnavailable", "half", "/podDisruptionBudget/maxUnavailable"),
    ("topologySpread.whenUnsatisfiable", "Wait", "/topologySpread/whenUnsatisfiable"),
    ("service.type", "ExternalName", "/service/type"),
    ("extraEnv", [{"name": "EP_SERVER_GRPC__PORT", "value": "1"}], "/extraEnv/0/name"),
    ("config.scheduler.max_running", 0, "/config/scheduler/max_running"),
    ("config.exchange.payload", "int4", "/config/exchange/payload"),
    ("config.scheduler.prefix_cache", "off", "/config/scheduler/prefix_cache"),
    ("config.grpc.port", 50052, "'port'"),  # the chart's own: grpc.port
    ("config.engine", {}, "'engine'"),
    ("tests.promptIds", "hello", "/tests/promptIds"),
    ("nodeselector", {}, "'nodeselector'"),
]


@pytest.mark.parametrize(("name", "value", "named"), REFUSED)
def test_a_bad_value_is_refused_by_name(name: str, value: Any, named: str) -> None:
    render()  # without it, all is well
    with pytest.raises(helm_python.HelmValuesError) as refused:
        render(nested(name, value))
    places = re.findall(r"at '(/[^']*)'|additional properties ('\w+')", str(refused.value))
    assert named in {place for pair in places for place in pair}, str(refused.value)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"autoscaling": {"minReplicas": 3, "maxReplicas": 2}}, "autoscaling.maxReplicas = 2"),
        ({"metrics": {"port": 50051}}, "metrics.port = 50051"),
        ({"multiNode": {"nodes": 2, "port": 50051}}, "multiNode.port = 50051"),
        ({"multiNode": {"nodes": 2, "port": 9400}}, "multiNode.port = 9400"),
        ({"multiNode": {"nodes": 3}, "ranks": 22}, "multiNode.nodes = 3: must be at most 2 with ranks = 22"),
    ],
)
def test_one_value_against_another(values: dict[str, Any], named: str) -> None:
    with pytest.raises(helm_python.HelmRenderError, match=named):
        render(values)


@pytest.mark.parametrize("name", ["kind", "ranks", "tls", "model.source", "drain.seconds"])
def test_null_does_not_take_a_value_away(name: str) -> None:
    """Helm deletes what is set to null: without a kind there would be no workload, and no word of it."""
    with pytest.raises(helm_python.HelmValuesError, match=f"missing property '{name.rpartition('.')[2]}'"):
        render(nested(name, None))


def test_metrics_that_are_off_cannot_be_used() -> None:
    for use in (
        {"metrics": {"monitor": "PodMonitor"}},
        {"autoscaling": {"enabled": True}, "kind": "Deployment"},
    ):
        render(use)
        with pytest.raises(helm_python.HelmValuesError, match="'/metrics/enabled'"):
            render(use, {"metrics": {"enabled": False}})


def test_the_kubelet_has_no_client_certificate() -> None:
    tls = {"tls": {"enabled": True, "secretName": "s"}, "probes": {"kubeletTls": True}}
    render(tls)
    with pytest.raises(helm_python.HelmValuesError, match="'/tls/clientAuth'"):
        render(tls, {"tls": {"clientAuth": True}})


@pytest.mark.parametrize(
    ("values", "place"),
    [({"kind": "Deployment"}, "/kind"), ({"replicas": 2}, "/replicas")],  # Pods without, or of other, numbers
)
def test_pods_of_a_server_have_a_number(values: dict[str, Any], place: str) -> None:
    several = {"multiNode": {"nodes": 2}}
    render(values), render(several), render(several, {"replicas": 2, "kind": "LeaderWorkerSet"})
    with pytest.raises(helm_python.HelmValuesError, match=f"'{place}'"):
        render(several, values)


def test_autoscaling_is_for_cpu() -> None:
    with pytest.raises(helm_python.HelmValuesError, match="'/gpu/enabled'"):
        render({"autoscaling": {"enabled": True}, "kind": "Deployment", "gpu": {"enabled": True}})


def leaves(schema: dict[str, Any], prefix: str = "") -> set[str]:
    """Dotted names that the schema knows, down to what holds no further names; each level must be closed."""
    found = set()
    for name, rule in schema["properties"].items():
        target = SCHEMA["$defs"][rule["$ref"].rpartition("/")[2]] if "$ref" in rule else rule
        if "properties" not in target or name == "config":
            found.add(prefix + name)
        else:
            assert target["additionalProperties"] is False, prefix + name
            found |= leaves(target, f"{prefix}{name}.")
    return found


def named(values: dict[str, Any], known: set[str], prefix: str = "") -> set[str]:
    """Dotted names of the values, as deep as the known ones are."""
    found = set()
    for name, value in values.items():
        deeper = isinstance(value, dict) and prefix + name not in known
        found |= named(value, known, f"{prefix}{name}.") if deeper else {prefix + name}
    return found


def test_every_value_is_in_the_schema_and_the_other_way_round() -> None:
    """So a misspelt value is refused at any depth, and the README's table, made from the file, is whole."""
    known = leaves(SCHEMA) - {"global"}
    assert len(known) > 90 and named(chart().values, known) == known


def test_the_readme_and_the_schema_are_up_to_date() -> None:
    line = [sys.executable, str(CHART.parents[1] / "scripts" / "chart.py"), "--check"]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    table = (CHART / "README.md").read_text()
    for name in ("ranks", "model.pvc.claimName", "tls.certManager.issuerRef.name", "rdma.gidIndex"):
        assert f"\n| `{name}` | " in table


def test_config_takes_what_the_server_takes() -> None:
    schema = SCHEMA["properties"]["config"]["properties"]
    names = {f"{section}.{name}" for section, of in schema.items() for name in of["properties"]}
    every = {name for name, _, _ in fields()}
    assert names < every and {"scheduler.kv_blocks", "exchange.num_banks", "log.level"} <= names
    flags = (CHART / "templates" / "_container.tpl").read_text()
    shown = set(re.findall(r"^- --([a-z-]+)$", flags, re.MULTILINE))
    short = {"model": "model.path", "ranks": "parallel.ranks", "host": "grpc.host", "port": "grpc.port"}
    short |= {"nodes": "cluster.nodes", "rendezvous": "cluster.rendezvous"}
    of_pods = {
        "cluster.node_rank",
        "cluster.hostfile",
        "handoff.host",
    }  # of a Pod: its name or LeaderWorkerSet
    long = {name.replace(".", "-").replace("_", "-"): name for name in every}
    clients = {"tls-ca", "tls-cert", "tls-key"}
    assert {short.get(flag) or long[flag] for flag in shown - clients} == every - names - of_pods
    defaults: dict[str, Any] = {}
    for name, section, item in fields():
        if name in names:
            defaults.setdefault(section, {})[item.name] = item.default
    read = config_of(container(render({"config": defaults})[0])).values()  # through YAML, text and back
    assert {name: read[name] for name in names} == {name: Config().values()[name] for name in names}


@pytest.mark.parametrize(
    "name",
    [
        "cpu-autoscaled",
        "secured",
        "gpu-rdma",
        "several-nodes",
        "keda",
        "inference-gateway",
        "prefill",
        "decode",
    ],
)
def test_an_example_renders(name: str) -> None:
    given = yaml.safe_load((CHART / "examples" / f"{name}.yaml").read_text())
    files = chart().render(given, name=RELEASE, namespace=NAMESPACE)  # without MINIMAL: it says all it needs
    objects = [one for path, text in files.items() if "NOTES" not in path for one in yaml.safe_load_all(text)]
    for one in filter(None, objects):
        check(one, "1.37")
    check_links([one for one in objects if one])


def test_every_example_is_tested() -> None:
    values = {path.stem for path in (CHART / "examples").glob("*.yaml")} - {"prometheus-adapter"}
    (mark,) = (mark for mark in test_an_example_renders.pytestmark if mark.name == "parametrize")
    assert set(mark.args[1]) == values


def test_example_adapter_answers_the_autoscaler() -> None:
    scaled = render({"kind": "Deployment", "autoscaling": {"enabled": True}})[0]
    (scaler,) = of_kind(scaled, "HorizontalPodAutoscaler")
    asked = {metric["pods"]["metric"]["name"] for metric in scaler["spec"]["metrics"]}
    rules = yaml.safe_load((CHART / "examples" / "prometheus-adapter.yaml").read_text())["rules"]["custom"]
    assert {rule["seriesQuery"].partition("{")[0] for rule in rules} == asked
