"""The two roles of a KV hand-off: options, ports and who may fetch from whom."""

from __future__ import annotations

import helm_python
import pytest

from tests.support.helm.charts import config_of, container, of_kind, render
from tests.support.helm.validation import check, check_links

ON = {"networkPolicy": {"enabled": True}}


@pytest.mark.parametrize("role", ["prefill", "decode", "both"])
def test_a_role_reaches_the_server_with_its_address(role: str) -> None:
    objects, _ = render({"handoff": {"role": role, "port": 6000}, **ON})
    for one in objects:
        check(one, "1.37")
    check_links(objects)
    server = container(objects)
    assert (config_of(server).handoff.role, config_of(server).handoff.port) == (role, 6000)
    (host,) = (one for one in server["env"] if one["name"] == "EP_SERVER_HANDOFF__HOST")
    assert host["valueFrom"]["fieldRef"]["fieldPath"] == "status.podIP"


def test_without_a_role_nothing_is_opened() -> None:
    objects, _ = render(ON)
    assert config_of(container(objects)).handoff.role == "none"
    (policy,) = of_kind(objects, "NetworkPolicy")
    assert policy["spec"]["egress"] == [] and "endPort" not in str(policy)


def test_servers_of_other_releases_fetch_from_every_rank() -> None:
    pods = {"ranks": 4, "kind": "StatefulSet", "multiNode": {"nodes": 2}}
    objects, _ = render({"handoff": {"role": "prefill", "port": 6000}, **pods, **ON})
    (policy,) = of_kind(objects, "NetworkPolicy")
    (rule,) = (one for one in policy["spec"]["ingress"] if "endPort" in one.get("ports", [{}])[0])
    assert rule["ports"] == [{"port": 6000, "endPort": 6007, "protocol": "TCP"}]
    (peer,) = rule["from"]
    labels = peer["podSelector"]["matchLabels"]
    assert labels["app.kubernetes.io/component"] == "server" and "app.kubernetes.io/instance" not in labels
    objects, _ = render({"handoff": {"role": "decode"}, **ON})
    (policy,) = of_kind(objects, "NetworkPolicy")
    assert {"podSelector": {"matchLabels": labels}} in policy["spec"]["egress"][0]["to"]


def test_ports_of_ranks_meet_no_other_port() -> None:
    with pytest.raises(helm_python.HelmError, match=r"handoff\.port = 50049"):
        render({"handoff": {"role": "prefill", "port": 50049}, "ranks": 4})
