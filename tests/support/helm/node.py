"""Runs the container of a rendered Pod on this machine under the Pod's own restrictions, as a node does.

The container gets namespaces of its own for mounts, processes and the network; a read-only root file system
with the image in it (this interpreter, the installed package, /usr); the Pod's volumes, user, capabilities
and environment. Its command is process 1. The network is a loopback interface; Services' names lead there.
Needs root; nothing stays behind when the process ends.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import psutil

from tests.support.helm.charts import FIELDS, Object, environment

SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc/alternatives")
DEVICES = ("null", "zero", "full", "random", "urandom")
WAIT = 120.0  # seconds; the machine may be busy with much else
# What the kubelet asks for a grpc probe.
ASK = """
import sys, grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
with grpc.insecure_channel(f"127.0.0.1:{sys.argv[1]}") as channel:
    question = health_pb2.HealthCheckRequest(service=sys.argv[2])
    answer = health_pb2_grpc.HealthStub(channel).Check(question, timeout=float(sys.argv[3]))
sys.exit(answer.status != health_pb2.HealthCheckResponse.SERVING)
"""


@cache
def missing() -> str:
    """Why Pods cannot be run here; empty where they can."""
    if os.geteuid() != 0:
        return "needs root: mounts and namespaces"
    tools = [
        tool
        for tool in ("unshare", "nsenter", "setpriv", "ip", "mount", "hostname")
        if shutil.which(tool) is None
    ]
    if tools:
        return f"needs {', '.join(tools)}"
    tried = subprocess.run(["unshare", "-m", "-n", "-p", "--fork", "true"], capture_output=True, check=False)
    return tried.stderr.decode() if tried.returncode else ""


@dataclass(frozen=True)
class Identity:
    """What a cluster gives one Pod of several.

    name: of the host, "" = this machine's. network: a network namespace, as `ip netns` names it.
    fields: what the Downward API says. added: variables that a controller adds.
    """

    name: str = ""
    network: str = ""
    fields: Mapping[str, str] = field(default_factory=lambda: FIELDS)
    added: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Node:
    """What Pods find in their cluster. workspace: an empty folder; hosts: names that lead to the loopback.

    addresses: of other names.
    """

    workspace: Path
    claims: Mapping[str, Path]
    secrets: Mapping[str, Mapping[str, bytes]] = field(default_factory=dict)
    hosts: tuple[str, ...] = ()
    addresses: Mapping[str, str] = field(default_factory=dict)

    @contextmanager
    def run(
        self, pod: Object, network_of: int | None = None, identity: Identity | None = None
    ) -> Iterator[Container]:
        """Runs the Pod's one container; it is killed at the end if it still runs.

        Args:
            network_of: process whose network the container joins; one of its own if None.
            identity: of one Pod of several.
        """
        identity = identity or Identity()
        network = f"/proc/{network_of}/ns/net" if network_of is not None else ""
        network = f"/var/run/netns/{identity.network}" if identity.network else network
        script = self.workspace / f"{len(list(self.workspace.iterdir()))}.sh"
        script.write_text(self._script(pod["spec"], identity, own_network=not network))
        line = ["unshare", "--mount", "--pid", "--uts", "--fork", "--kill-child", "bash", str(script)]
        if network:
            line[:0] = ["nsenter", f"--net={network}"]
        else:
            line.insert(1, "--net")
        with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as outside:
            try:
                running = Container(pod["spec"], outside, identity)
                running.until_inside()
                yield running
            finally:
                outside.kill()  # and with it, process 1 of the container

    def _script(self, spec: Object, identity: Identity, *, own_network: bool) -> str:
        (container,) = spec["containers"]
        root = self.workspace / "root"
        root.mkdir(exist_ok=True)
        lines = ["set -e", f"mount -t tmpfs -o mode=0755 none {root}"]
        lines += [f"mkdir -p {root}/proc {root}/dev {root}/etc", f"mount -t proc none {root}/proc"]
        lines += [
            f"touch {root}/dev/{name} && mount --bind /dev/{name} {root}/dev/{name}" for name in DEVICES
        ]
        names = " ".join(("localhost", *self.hosts))
        lines.append(f"echo '127.0.0.1 {names}' > {root}/etc/hosts")
        lines += [f"echo '{at} {name}' >> {root}/etc/hosts" for name, at in self.addresses.items()]
        volumes = {volume["name"]: volume for volume in spec.get("volumes", [])}
        for mount in sorted(container.get("volumeMounts", []), key=lambda mount: len(mount["mountPath"])):
            at = f"{root}{mount['mountPath']}"
            lines += [f"mkdir -p {at}", *self._volume(volumes[mount["name"]], at, spec["securityContext"])]
            if mount.get("readOnly"):
                lines.append(f"mount -o remount,bind,ro {at}")
        lines += image(root)
        lines.append(f"mount -o remount,bind,ro {root}")
        if own_network:
            lines.append("ip link set lo up")
        if identity.name:
            lines.append(f"hostname {identity.name}")
        command = [*container["command"], *container.get("args", [])]
        return "\n".join([*lines, f"exec chroot {root} {shlex.join([*user(spec, identity), *command])}", ""])

    def _volume(self, volume: Object, at: str, security: Object) -> list[str]:
        """Commands that put a volume there."""
        if "emptyDir" in volume:
            size = volume["emptyDir"]["sizeLimit"].removesuffix("i")
            return [f"mount -t tmpfs -o mode=0777,size={size} none {at}"]
        if "persistentVolumeClaim" in volume:
            return [f"mount --bind {self.claims[volume['persistentVolumeClaim']['claimName']]} {at}"]
        secret, lines = volume["secret"], [f"mount -t tmpfs -o mode=0755 none {at}"]
        lines.append(f"mkdir {at}/..1 && ln -s ..1 {at}/..data")  # renewed by moving the link, as a node does
        for key, value in self.secrets[secret["secretName"]].items():
            source = self.workspace / f"{secret['secretName']}-{key}"
            source.write_bytes(value)
            mode, group = f"{secret['defaultMode']:o}", security["fsGroup"]
            lines.append(f"install -m {mode} -o 0 -g {group} {source} {at}/..1/{key}")
            lines.append(f"ln -s ..data/{key} {at}/{key}")
        return lines


def image(root: Path) -> list[str]:
    """Commands that bind what an image would hold, read-only: the system, the interpreter, the package."""
    lines, bound = [], []
    here = Path(__file__).parents[3]
    for path in map(Path, (*SYSTEM, sys.base_prefix, str(here), sys.prefix)):
        if any(path.is_relative_to(other) for other in bound) or not path.exists():
            continue
        lines.append(f"mkdir -p {root}{path.parent}")
        if path.is_symlink():
            lines.append(f"cp -a {path} {root}{path}")
            continue
        bound.append(path)
        lines += [f"mkdir -p {root}{path}", f"mount --bind {path} {root}{path}"]
        lines.append(f"mount -o remount,bind,ro {root}{path}")
    return lines


def user(spec: Object, identity: Identity) -> list[str]:
    """What a command runs under: the Pod's user, no capability and none to gain, its environment."""
    security, (container,) = spec["securityContext"], spec["containers"]
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert container["securityContext"]["allowPrivilegeEscalation"] is False and security["runAsNonRoot"]
    line = ["setpriv", f"--reuid={security['runAsUser']}", f"--regid={security['runAsGroup']}"]
    line += [f"--groups={security['fsGroup']}", "--inh-caps=-all", "--bounding-set=-all", "--no-new-privs"]
    line.append("--pdeathsig=KILL")  # again: a change of user takes back what --kill-child asked for
    given = {**environment(container, identity.fields), **identity.added}
    whole = {"PATH": f"{sys.prefix}/bin:/usr/bin:/bin", "HOME": "/", **given}
    return [*line, "env", "-i", *(f"{name}={value}" for name, value in whole.items())]


@dataclass
class Container:
    """A running container. outside: the process around it, whose output and exit code are the container's."""

    spec: Object
    outside: subprocess.Popen[str]
    identity: Identity

    @property
    def pid(self) -> int:
        """Process 1 of the container, as numbered here. Raises: AssertionError where it has ended."""
        children = psutil.Process(self.outside.pid).children()
        assert children, self.wait()
        return int(children[0].pid)

    def until_inside(self) -> None:
        """Until the container is in its own root, or has ended. Raises: AssertionError."""
        until = time.monotonic() + WAIT
        while self.outside.poll() is None:
            children = psutil.Process(self.outside.pid).children()
            with suppress(FileNotFoundError):  # it has just ended
                if children and Path(f"/proc/{children[0].pid}/root").readlink() != Path("/"):
                    return
            assert time.monotonic() < until, "the container's root is not ready"
            time.sleep(0.01)

    def processes(self) -> list[psutil.Process]:
        """All of its processes."""
        first = psutil.Process(self.pid)
        return [first, *first.children(recursive=True)]

    def wait(self, seconds: float = WAIT) -> tuple[int, str]:
        """(exit code, output). Raises: subprocess.TimeoutExpired."""
        output, _ = self.outside.communicate(timeout=seconds)
        return self.outside.returncode, output

    def beside(self, *command: str) -> subprocess.Popen[str]:
        """A process of this machine in the container's network."""
        line = ["nsenter", f"--net=/proc/{self.pid}/ns/net", sys.executable, *command]
        return subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def inside(self, *command: str) -> subprocess.Popen[str]:
        """A process in the container, as `kubectl exec` starts one."""
        enter = ["nsenter", f"--target={self.pid}", "--mount", "--net", "--pid", "--root", "--wd=/"]
        line = [*enter, *user(self.spec, self.identity), *command]
        return subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def probe(self, kind: str) -> bool:
        """One try of startupProbe, readinessProbe or livenessProbe."""
        probe = self.spec["containers"][0][kind]
        if "exec" in probe:
            asked = self.inside(*probe["exec"]["command"])
        elif "httpGet" in probe:
            url = f"http://127.0.0.1:{probe['httpGet']['port']}{probe['httpGet']['path']}"
            timeout = probe["timeoutSeconds"]
            asked = self.beside("-c", f"import urllib.request as u; u.urlopen({url!r}, timeout={timeout})")
        else:
            grpc = probe["grpc"]
            asked = self.beside(
                "-c", ASK, str(grpc["port"]), grpc.get("service", ""), str(probe["timeoutSeconds"])
            )
        asked.communicate(timeout=WAIT)
        return asked.returncode == 0

    def until_ready(self) -> None:
        """Tries the startup probe, then readiness, more often than a node does. Raises: AssertionError."""
        until = time.monotonic() + WAIT
        for kind in ("startupProbe", "readinessProbe"):
            while not self.probe(kind):
                assert self.outside.poll() is None, self.wait()
                assert time.monotonic() < until, f"{kind} never succeeded"
                time.sleep(0.5)
