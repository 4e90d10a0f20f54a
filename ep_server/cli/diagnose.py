"""`ep-server diagnose`: one archive for a fault report, without secrets."""

from __future__ import annotations

import http.client
import io
import json
import os
import re
import sys
import tarfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import IO, Annotated, Any

import grpc
import typer
from google.protobuf.json_format import MessageToDict

from ep_server.cli import options
from ep_server.client import Client, Target
from ep_server.errors import ConfigError
from ep_server.observability.fault_report import chrome_trace, host_facts, processes, versions
from ep_server.v1 import control_pb2 as pb

NAME = "diagnose"
CALLS = {  # file -> (method of Control, request)
    "server.json": ("GetServerInfo", pb.GetServerInfoRequest()),
    "model.json": ("GetModelInfo", pb.GetModelInfoRequest()),
    "loads.json": ("GetLoads", pb.GetLoadsRequest()),
    "topology.json": ("GetEpState", pb.GetEpStateRequest()),
}
README = """ep_server diagnostic archive, {time} UTC

config.json     every option of the server; of certificates, keys and tokens only the paths
versions.json   what the server runs, and this command beside it
server.json     state, limits, memory and process of every rank
model.json      sizes of the model
loads.json      requests and KV blocks by rank
topology.json   ranks up, latencies by operation, who waited for whom, tokens by expert
trace.json      the last steps of every rank: open it in ui.perfetto.dev or chrome://tracing
metrics.txt     /metrics
status.html     the status page
processes.json  state, memory and threads of the processes of ep_server on this host
host.json       cores, memory, NUMA nodes, control group, GPUs of the host this command ran on
missing.txt     what could not be had, and why; absent where all is here

No prompt, no output, no environment variable, no certificate, key or token is in any of them.
"""
# A last line of defence: no collected text should contain one.
PRIVATE = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?-----END [A-Z ]*PRIVATE KEY-----", re.DOTALL)


def command(
    output: Annotated[
        str,
        typer.Option(
            "--output",
            "-o",
            help="Archive to write; - = standard output. Default: ep-server-diagnose-<time>.tar.gz.",
        ),
    ] = "",
    metrics_url: Annotated[
        str, typer.Option(help="URL of the metrics. Empty: the server's configuration has it.")
    ] = "",
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds for each call.")] = 10.0,
    address: options.Address = options.ADDRESS,
    tls_ca: options.TlsCa = "",
    tls_cert: options.TlsCert = "",
    tls_key: options.TlsKey = "",
    token_file: options.TokenFile = "",
) -> None:
    """Collect configuration, versions, topology, metrics and the last steps of a server into one archive.

    Run it on the host of the server, while the trouble lasts. The archive contains no secret and no request.
    missing.txt lists what could not be collected; the exit code is then 1.
    """
    if metrics_url and not re.match(r"https?://[^@/]+(/|$)", metrics_url):  # what is named here is printed
        raise ConfigError(
            "--metrics-url", metrics_url, "a URL that begins with http:// or https:// and names no user"
        )
    target = options.target(address, tls_ca, tls_cert, tls_key, token_file)
    file = Path(output or time.strftime("ep-server-diagnose-%Y%m%dT%H%M%SZ.tar.gz", time.gmtime()))
    bundle = Bundle(target.token)
    bundle.add("README.txt", lambda: README.format(time=time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())))
    bundle.add("host.json", lambda: _json(host_facts()))
    bundle.add("processes.json", lambda: _json(processes()))
    config = _ask(bundle, target, timeout)
    url = metrics_url or metrics_url_of(address, config)
    bundle.add("metrics.txt", lambda: _fetch(url, timeout))
    bundle.add("status.html", lambda: _fetch(url.removesuffix("metrics"), timeout))
    told = sys.stdout
    if output == "-":
        bundle.pack(sys.stdout.buffer, NAME)
        told = sys.stderr
    else:
        bundle.write(file)
    print(f"{output or file}: {', '.join(bundle.files)}", file=told)
    for name, why in bundle.missing.items():
        print(f"missing: {name}: {why}", file=told)
    raise typer.Exit(1 if bundle.missing else 0)


class Bundle:
    """Texts by name, and the cause of every text that is missing. secret: never written."""

    def __init__(self, secret: str) -> None:
        self.files: dict[str, str] = {}
        self.missing: dict[str, str] = {}
        self._secret = secret

    def add(self, name: str, make: Callable[[], str]) -> None:
        """Adds the text from `make`, with secrets removed."""
        try:
            text = make()
        except grpc.RpcError as error:
            call = isinstance(error, grpc.Call)
            self.missing[name] = f"{error.code().name}: {error.details()}" if call else str(error)
        except (OSError, http.client.HTTPException, ValueError) as error:  # no page, or not ours
            self.missing[name] = str(error) or type(error).__name__
        else:
            self.files[name] = self._clean(text)

    def write(self, file: Path) -> None:
        """Writes a tar.gz that only its owner can read. Raises: ConfigError (--output)."""
        try:
            handle = os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
            with os.fdopen(handle, "wb") as stream:
                self.pack(stream, file.name.partition(".")[0] or NAME)
        except OSError as error:
            allowed = f"a new file in a folder that can be written ({error.strerror})"
            raise ConfigError("--output", str(file), allowed) from error

    def pack(self, stream: IO[bytes], folder: str) -> None:
        """The tar.gz, with all files in a folder."""
        if self.missing:
            text = "".join(f"{name}: {why}\n" for name, why in self.missing.items())
            self.files["missing.txt"] = self._clean(text)
        with tarfile.open(fileobj=stream, mode="w|gz") as archive:
            for name, text in self.files.items():
                _member(archive, f"{folder}/{name}", text.encode(errors="replace"))

    def _clean(self, text: str) -> str:
        text = PRIVATE.sub("[private key]", text)
        return text.replace(self._secret, "[token]") if self._secret else text


def _ask(bundle: Bundle, target: Target, timeout: float) -> dict[str, Any]:
    """Collects everything over gRPC. Returns: the server's configuration; empty if it did not answer."""
    with Client(target) as client:

        def call(method: str, request: Any) -> Any:
            return getattr(client.control, method)(request, timeout=timeout, metadata=target.metadata)

        def add(file: str, method: str, request: Any) -> None:
            bundle.add(file, lambda: _json(_fields(call(method, request))))

        for file, (method, request) in CALLS.items():
            add(file, method, request)
        found = pb.GetDiagnosticsResponse()

        def config() -> str:
            found.CopyFrom(call("GetDiagnostics", pb.GetDiagnosticsRequest()))
            return _json({name: json.loads(value) for name, value in sorted(found.config.items())})

        bundle.add("config.json", config)
        bundle.add("versions.json", lambda: _json({"server": dict(found.versions), "here": versions()}))
        bundle.add("trace.json", lambda: json.dumps(chrome_trace(found.steps)))
        return {name: json.loads(value) for name, value in found.config.items()}


def metrics_url_of(address: str, config: dict[str, Any]) -> str:
    """URL of the metrics of a server with this configuration, as seen by its caller."""
    bound, port = config.get("metrics.host", "127.0.0.1"), config.get("metrics.port", 9400)
    host = address.rpartition(":")[0] if bound in ("0.0.0.0", "::", "") else bound
    if ":" in host and not host.startswith("["):
        host = f"[{host}]"
    return f"http://{host}:{port}/metrics"


def _fetch(url: str, timeout: float) -> str:
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with direct.open(url, timeout=timeout) as answer:
        return str(answer.read().decode())


def _fields(answer: Any) -> dict[str, Any]:
    """Every field, including those that are 0."""
    return dict(
        MessageToDict(answer, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    )


def _json(value: object) -> str:
    return json.dumps(value, indent=2) + "\n"


def _member(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mtime = len(content), int(time.time())
    archive.addfile(entry, io.BytesIO(content))
