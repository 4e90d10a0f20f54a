"""Pods of the chart as the tests run them."""

from __future__ import annotations

import subprocess
from pathlib import Path

import ep_server
from tests.support.helm.charts import Object, of_kind
from tests.support.helm.node import Container, Node

ASSETS = Path(ep_server.__file__).parent / "assets"
MODEL = {"model": {"directory": "demo_model"}}


def run_tests(here: Node, objects: list[Object], server: Container) -> dict[str, tuple[int, str]]:
    """`helm test`: {"health": (exit code, output)} of each test Pod, with the server's network."""
    results = {}
    pods = [(one["metadata"]["annotations"], one) for one in of_kind(objects, "Pod")]
    assert all(notes["helm.sh/hook"] == "test" for notes, _ in pods)
    for _, pod in sorted(pods, key=lambda of: int(of[0]["helm.sh/hook-weight"])):
        with here.run(pod, server.pid) as running:
            results[pod["metadata"]["name"].rpartition("-")[2]] = running.wait()
    return results


def signed(workspace: Path, certificate: Object) -> dict[str, bytes]:
    """What cert-manager puts into the Secret of a Certificate: a CA of its own signs the names and usages."""
    spec = certificate["spec"]
    usages = {"server auth": "serverAuth", "client auth": "clientAuth"}
    names = ",".join(f"DNS:{name}" for name in spec["dnsNames"])
    wanted = ",".join(usages[usage] for usage in spec["usages"])
    (workspace / "extensions").write_text(f"subjectAltName={names}\nextendedKeyUsage={wanted}\n")

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=workspace, check=True, capture_output=True)

    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    openssl(
        "req", "-x509", *curve, "-keyout", "ca.key", "-out", "ca.crt", "-days", "1", "-subj", "/CN=test CA"
    )
    openssl("req", *curve, "-keyout", "tls.key", "-out", "tls.csr", "-subj", "/CN=ep-server")
    sign = ("-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "extensions")
    openssl("x509", "-req", "-in", "tls.csr", *sign, "-days", "1", "-out", "tls.crt")
    return {name: (workspace / name).read_bytes() for name in ("tls.crt", "tls.key", "ca.crt")}
