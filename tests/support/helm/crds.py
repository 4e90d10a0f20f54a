"""JSON schemas of the custom resources that the chart makes, by the names and limits of their published APIs.

Closed at every level: a field that is not named here is refused. Pod templates inside are checked elsewhere.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
WHOLE: Schema = {"type": "integer"}
FLAG: Schema = {"type": "boolean"}
OPEN: Schema = {"type": "object"}
TEXTS: Schema = {"type": "object", "additionalProperties": TEXT}
NUMBER_OR_PERCENT: Schema = {"anyOf": [WHOLE, {"type": "string", "pattern": "^[0-9]+%$"}]}
PROMETHEUS_TIME: Schema = {
    "type": "string",
    "pattern": "^(0|([0-9]+y)?([0-9]+w)?([0-9]+d)?([0-9]+h)?([0-9]+m)?([0-9]+s)?([0-9]+ms)?)$",
}
GO_TIME: Schema = {"type": "string", "pattern": r"^([0-9]+(\.[0-9]+)?(ns|us|ms|s|m|h))+$"}


def closed(required: tuple[str, ...] = (), /, **properties: Schema) -> Schema:
    """An object with these fields and no others. A trailing _ of a name is dropped (for_)."""
    fields = {name.rstrip("_"): of for name, of in properties.items()}
    return {"type": "object", "additionalProperties": False, "required": list(required), "properties": fields}


def list_of(item: Schema) -> Schema:
    return {"type": "array", "items": item}


def one_of(*values: str) -> Schema:
    return {"enum": list(values)}


def resource(group: str, kind: str, spec: Schema) -> Schema:
    head = {"apiVersion": {"const": group}, "kind": {"const": kind}, "metadata": OPEN}
    return closed(("apiVersion", "kind", "metadata", "spec"), **head, spec=spec)


SELECTOR = closed(
    matchLabels=TEXTS,
    matchExpressions=list_of(closed(("key", "operator"), key=TEXT, operator=TEXT, values=list_of(TEXT))),
)
RELABELINGS = list_of(
    closed(
        sourceLabels=list_of(TEXT),
        separator=TEXT,
        targetLabel=TEXT,
        regex=TEXT,
        replacement=TEXT,
        action=TEXT,
    )
)
ENDPOINTS = list_of(
    closed(
        port=TEXT,
        path=TEXT,
        scheme=one_of("http", "https"),
        interval=PROMETHEUS_TIME,
        scrapeTimeout=PROMETHEUS_TIME,
        honorLabels=FLAG,
        relabelings=RELABELINGS,
        metricRelabelings=RELABELINGS,
    )
)


def monitor(kind: str, endpoints: str) -> Schema:
    """ServiceMonitor and PodMonitor differ in the name of their list."""
    spec = closed(
        (endpoints, "selector"),
        **{endpoints: ENDPOINTS},
        jobLabel=TEXT,
        podTargetLabels=list_of(TEXT),
        selector=SELECTOR,
        namespaceSelector=closed(any=FLAG, matchNames=list_of(TEXT)),
        sampleLimit=WHOLE,
    )
    return resource("monitoring.coreos.com/v1", kind, spec)


RULE = closed(
    ("expr",),
    record=TEXT,
    alert=TEXT,
    expr={"type": ["string", "integer"]},
    for_=PROMETHEUS_TIME,
    keep_firing_for=PROMETHEUS_TIME,
    labels=TEXTS,
    annotations=TEXTS,
) | {"oneOf": [{"required": ["record"]}, {"required": ["alert"]}]}
RULE_GROUP = closed(
    ("name",), name={"minLength": 1}, interval=PROMETHEUS_TIME, limit=WHOLE, rules=list_of(RULE)
)
PRIVATE_KEY = closed(
    algorithm=one_of("RSA", "ECDSA", "Ed25519"),
    encoding=one_of("PKCS1", "PKCS8"),
    size=WHOLE,
    rotationPolicy=one_of("Never", "Always"),
)
CERTIFICATE = closed(
    ("secretName", "issuerRef"),
    secretName=TEXT,
    duration=GO_TIME,
    renewBefore=GO_TIME,
    commonName={"type": "string", "maxLength": 64},
    dnsNames=list_of(TEXT),
    ipAddresses=list_of(TEXT),
    usages=list_of(one_of("signing", "digital signature", "key encipherment", "server auth", "client auth")),
    privateKey=PRIVATE_KEY,
    issuerRef=closed(("name",), name={"type": "string", "minLength": 1}, kind=TEXT, group=TEXT),
)
ROLLING = closed(partition=WHOLE, maxUnavailable=NUMBER_OR_PERCENT, maxSurge=NUMBER_OR_PERCENT)
LEADER_WORKER_SET = closed(
    ("leaderWorkerTemplate",),
    replicas={"type": "integer", "minimum": 0},
    startupPolicy=one_of("LeaderCreated", "LeaderReady"),
    networkConfig=closed(("subdomainPolicy",), subdomainPolicy=one_of("Shared", "UniquePerReplica")),
    rolloutStrategy=closed(("type",), type=one_of("RollingUpdate"), rollingUpdateConfiguration=ROLLING),
    leaderWorkerTemplate=closed(
        ("workerTemplate",),
        size={"type": "integer", "minimum": 1},
        restartPolicy=one_of("Default", "RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"),
        leaderTemplate=OPEN,
        workerTemplate=OPEN,
    ),
)
PORT: Schema = {"type": "integer", "minimum": 1, "maximum": 65535}
INFERENCE_POOL = closed(
    ("selector", "targetPorts", "endpointPickerRef"),
    selector=closed(("matchLabels",), matchLabels=TEXTS),
    targetPorts=list_of(closed(("number",), number=PORT)) | {"minItems": 1, "maxItems": 8},
    appProtocol=one_of("http", "kubernetes.io/h2c"),
    endpointPickerRef=closed(
        ("name",),
        group=TEXT,
        kind=TEXT,
        name={"type": "string", "minLength": 1},
        port=closed(("number",), number=PORT),
        failureMode=one_of("FailOpen", "FailClose"),
    ),
)
BACKEND = closed(("name",), group=TEXT, kind=TEXT, name=TEXT, namespace=TEXT, port=PORT, weight=WHOLE)
GRPC_ROUTE = closed(
    parentRefs=list_of(
        closed(("name",), group=TEXT, kind=TEXT, name=TEXT, namespace=TEXT, sectionName=TEXT, port=PORT)
    ),
    hostnames=list_of(TEXT),
    rules=list_of(closed(name=TEXT, matches={"type": "array"}, backendRefs=list_of(BACKEND))),
)
SCHEMAS: dict[str, Schema] = {
    "InferencePool": resource("inference.networking.k8s.io/v1", "InferencePool", INFERENCE_POOL),
    "GRPCRoute": resource("gateway.networking.k8s.io/v1", "GRPCRoute", GRPC_ROUTE),
    "ServiceMonitor": monitor("ServiceMonitor", "endpoints"),
    "PodMonitor": monitor("PodMonitor", "podMetricsEndpoints"),
    "PrometheusRule": resource(
        "monitoring.coreos.com/v1", "PrometheusRule", closed(groups=list_of(RULE_GROUP))
    ),
    "ScaledObject": resource(
        "keda.sh/v1alpha1",
        "ScaledObject",
        closed(
            ("scaleTargetRef", "triggers"),
            scaleTargetRef=closed(("name",), name=TEXT, kind=TEXT, apiVersion=TEXT),
            minReplicaCount=WHOLE,
            maxReplicaCount=WHOLE,
            cooldownPeriod=WHOLE,
            pollingInterval=WHOLE,
            triggers=list_of(closed(("type", "metadata"), type=TEXT, name=TEXT, metadata=TEXTS)),
        ),
    ),
    "Certificate": resource("cert-manager.io/v1", "Certificate", CERTIFICATE),
    "LeaderWorkerSet": resource("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet", LEADER_WORKER_SET),
}
