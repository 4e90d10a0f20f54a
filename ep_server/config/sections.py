"""The options of a server by section: type, default, help and range of each. Reads nothing.

`config.Config` is the tree of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

RENDEZVOUS_PORT = 50061  # where cluster.rendezvous has a host from elsewhere and no port


def option(
    default: Any,
    help: str,
    *,
    low: float | None = None,
    high: float | None = None,
    choices: tuple[str, ...] | None = None,
) -> Any:
    """A configuration field: its default, its help text and what it may be."""
    return field(default=default, metadata={"help": help, "low": low, "high": high, "choices": choices})


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Which checkpoint is served and in what precision."""

    path: str = option("", "Hugging Face checkpoint directory")
    name: str = option("", "name that clients see; the directory's name if empty")
    dtype: str = option(
        "auto",
        "weights and activations; auto = dtype in config.json, else that of the tensors; float32 for float16",
        choices=("auto", "float32", "bfloat16"),
    )
    kv_dtype: str = option(
        "auto",
        "KV cache; auto = the dtype that is served; fp8_e4m3: GPU ranks only, scales of the checkpoint or 1",
        choices=("auto", "fp8_e4m3"),
    )
    attention: str = option(
        "auto",
        "GPU kernels of attention with one token per sequence; auto = our own: for Hopper where it is for "
        "the model, else Triton's; flashinfer: if installed",
        choices=("auto", "triton", "flashinfer"),
    )
    max_context: int = option(0, "longest prompt + output, tokens; 0 = the model's own limit", low=0)
    load_format: str = option(
        "auto",
        "auto = safetensors of the checkpoint; dummy = random weights from its config.json, for benchmarks",
        choices=("auto", "dummy"),
    )
    routing: str = option(
        "router",
        "router = the model's own; uniform = experts drawn at random per token and layer, for benchmarks",
        choices=("router", "uniform"),
    )
    seed: int = option(0, "of dummy weights and uniform routing", low=0, high=(1 << 32) - 1)


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """Ranks of this node."""

    ranks: int = option(1, "rank processes on this node", low=1, high=64)
    device: str = option("cpu", "what ranks compute on; cuda = one GPU each", choices=("cpu", "cuda"))
    threads_per_rank: int = option(
        0,
        "threads of a rank that compute, or read weights for a GPU; 0 = cores / ranks, at least 1",
        low=0,
        high=256,
    )
    overlap: str = option("auto", "two micro-batches per step", choices=("auto", "on", "off"))
    graphs: bool = option(
        True, "GPUs: steps are captured by size at start and replayed, where rows travel by NVLink"
    )


@dataclass(frozen=True, slots=True)
class ExchangeConfig:
    """Dispatch and combine."""

    payload: str = option(
        "auto",
        "dispatched rows; auto = the model's dtype",
        choices=("auto", "fp32", "bf16", "fp8", "fp8_pow2", "fp8_ue8m0"),
    )
    reduction: str = option("rank", "where expert outputs of a token are summed", choices=("rank", "source"))
    num_banks: int = option(4, "receive banks, a power of two", low=2, high=16)
    between_nodes: str = option(
        "auto",
        "rows of GPUs on several nodes: bounce = all through host memory, hybrid = NVLink inside a node; "
        "auto = hybrid with several ranks a node, max_running >= 64 and reduction rank, unless rows are "
        "float32",
        choices=("auto", "bounce", "hybrid"),
    )
    device_memory: str = option(
        "auto",
        "rows of GPUs on several nodes: hmem = the card reads and writes GPU memory (FI_HMEM), host = "
        "through pinned host memory; auto = host: hmem has not run on a network card yet",
        choices=("auto", "hmem", "host"),
    )
    timeout_seconds: float = option(
        10.0,
        "a rank that keeps another waiting for so long, or answers nothing while idle, is lost",
        low=0.01,
        high=3600,
    )
    spin_us: int = option(
        -1,
        "busy wait before yielding, microseconds; -1 = 50 if ranks x threads have cores, else 0",
        low=-1,
        high=1_000_000,
    )


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Batching, KV cache and admission of one rank."""

    max_running: int = option(64, "sequences decoding at once on a rank", low=1, high=4096)
    max_step_tokens: int = option(
        256, "tokens a rank runs in one step, prefill chunks included", low=1, high=8192
    )
    max_queue: int = option(
        256, "requests waiting on this server before RESOURCE_EXHAUSTED", low=0, high=1_000_000
    )
    block_size: int = option(16, "tokens of one KV block", low=1, high=256)
    kv_blocks: int = option(
        0, "KV blocks of a rank; 0 = from kv_fraction, on GPUs what fits", low=0, high=100_000_000
    )
    kv_fraction: float = option(
        0.25,
        "share of free memory, over CPU ranks, for KV caches; GPUs give 0.8",
        low=0.001,
        high=0.95,
    )
    prefix_cache: bool = option(True, "reuse KV blocks of equal prefixes")


@dataclass(frozen=True, slots=True)
class GrpcConfig:
    """The public gRPC endpoint."""

    host: str = option("127.0.0.1", "address to bind; loopback unless told otherwise")
    port: int = option(50051, "port to bind; 0 = any free port, printed in the log", low=0, high=65535)
    max_message_bytes: int = option(
        0, "largest message taken; 0 = what the longest context of the model needs", low=0, high=1 << 30
    )
    max_streams: int = option(
        1024, "concurrent Generate streams; finished ones count until read", low=1, high=1_000_000
    )
    stream_buffer: int = option(
        4096, "tokens buffered for one slow reader before its request is cancelled", low=16, high=1_000_000
    )
    unread_seconds: float = option(
        60.0,
        "a call whose caller reads nothing for so long while a message waits ends with RESOURCE_EXHAUSTED",
        low=0.1,
        high=86400,
    )
    tls_cert: str = option("", "PEM certificate chain; switches TLS on together with tls_key")
    tls_key: str = option("", "PEM private key")
    tls_client_ca: str = option("", "PEM CA bundle; switches mutual TLS on")
    token_file: str = option("", "file with one accepted bearer token per line")
    control: str = option(
        "on",
        "ep_server.v1.Control, with which any caller may abort requests and read this configuration: on = at "
        "the public port, loopback = at control_port alone, off = nowhere",
        choices=("on", "loopback", "off"),
    )
    control_port: int = option(
        50052,
        "port on 127.0.0.1, without TLS, for control = loopback; 0 = any free port, printed in the log",
        low=0,
        high=65535,
    )
    reflection: bool = option(True, "serve gRPC reflection, which lists services and messages")
    drain_seconds: float = option(30.0, "time for requests in flight after SIGTERM", low=0, high=86400)


@dataclass(frozen=True, slots=True)
class MetricsConfig:
    """The Prometheus endpoint."""

    enabled: bool = option(True, "serve /metrics")
    host: str = option("127.0.0.1", "address to bind")
    port: int = option(9400, "port to bind; 0 = any free port, printed in the log", low=0, high=65535)
    vllm_names: bool = option(
        False, "export vllm:* names too, for vLLM's dashboards and the Gateway API inference extension"
    )
    device_phases: int = option(
        0,
        "on GPUs, time the phases of one in so many captured steps of single tokens; 0 = none are timed",
        low=0,
        high=1_000_000,
    )


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """Several nodes as one server (docs/how-to/several-nodes.md)."""

    nodes: int = option(1, "nodes of this server; each runs parallel.ranks rank processes", low=1, high=64)
    node_rank: int = option(
        -1,
        "this node's number, 0 leads; -1 = from LeaderWorkerSet, the Pod's ordinal or the hostfile",
        low=-1,
        high=63,
    )
    rendezvous: str = option(
        "",
        "host:port where node 0 listens for the others; :port, or nothing for port "
        f"{RENDEZVOUS_PORT}, where LeaderWorkerSet or the hostfile gives the host",
    )
    hostfile: str = option("", "file with one host per line, in the order of node ranks")
    token_file: str = option("", "file with the token that nodes show one another")
    tls_cert: str = option("", "PEM certificate chain of this node, for mutual TLS between nodes")
    tls_key: str = option("", "PEM private key")
    tls_ca: str = option("", "PEM CA bundle that signed the certificates of all nodes")
    connect_seconds: float = option(120.0, "until every node must have come", low=1, high=86400)
    silent_seconds: float = option(5.0, "a node that answers no ping for so long is lost", low=0.5, high=3600)


@dataclass(frozen=True, slots=True)
class FabricConfig:
    """The network between nodes, through libfabric (docs/reference/fabric.md)."""

    library: str = option("", "path of libfabric.so.1; empty = the loader finds it")
    provider: str = option("", "provider as libfabric names it; empty = chosen by capability")
    domain: str = option(
        "",
        "device or interface; several with commas = one per rank of this node; empty = the provider's first",
    )
    address: str = option("", "address of this host on that network; empty = the provider's choice")
    interface: str = option(
        "",
        "network interface that verbs and TCP keep to; several with commas = one per rank of this node",
    )
    traffic_class: str = option(
        "",
        "DSCP from 0 to 63, or libfabric's class as low_latency, bulk_data; empty = the provider's default",
    )
    gid_index: int = option(
        -1, "index in the GID table of verbs; -1 = the provider's default", low=-1, high=255
    )
    queue_depth: int = option(
        0,
        "writes in flight of a rank, at least the tokens of a step + 3; 0 = the provider's default",
        low=0,
        high=1 << 16,
    )
    adaptive_routing: bool = option(
        True, "writes may overtake one another on the network; false = they are asked for in order"
    )


@dataclass(frozen=True, slots=True)
class LogConfig:
    """Logs on standard error."""

    level: str = option("info", "lowest level printed", choices=("debug", "info", "warning", "error"))
    format: str = option("text", "text for people, json for machines", choices=("text", "json"))
