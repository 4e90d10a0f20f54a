"""The options of a server by section: type, default, help and range of each. Reads nothing.

`config.Config` is the tree of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

LOSS_SECONDS = 600.0  # in which resilience.max_losses counts


def option(
    default: Any,
    help: str,
    *,
    low: float | None = None,
    high: float | None = None,
    choices: tuple[str, ...] | None = None,
) -> Any:
    """A configuration field: its default, its help text and what it may be.

    With choices and a range, a text that is one of them or a number within it."""
    return field(default=default, metadata={"help": help, "low": low, "high": high, "choices": choices})


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The checkpoint, and its precision."""

    path: str = option("", "Hugging Face checkpoint directory.")
    name: str = option("", "Name that clients see. Empty: the name of the directory.")
    updates: str = option(
        "", "Folder on every rank's host whose checkpoints Control.UpdateWeights may load. Empty: none."
    )
    dtype: str = option(
        "auto",
        "Dtype of weights and activations. auto: dtype of config.json, else that of the tensors; "
        "float16 is served as float32.",
        choices=("auto", "float32", "bfloat16"),
    )
    kv_dtype: str = option(
        "auto",
        "Dtype of the KV cache. auto: the dtype that is served. fp8_e4m3: GPU ranks only, with the "
        "checkpoint's scales or 1.",
        choices=("auto", "fp8_e4m3"),
    )
    attention: str = option(
        "auto",
        "GPU kernel for steps of one token per sequence. auto: the Hopper kernel if it supports the "
        "model, else Triton's. flashinfer: if it is installed.",
        choices=("auto", "triton", "flashinfer"),
    )
    max_context: int = option(0, "Longest prompt plus output, in tokens. 0: the model's own limit.", low=0)
    load_format: str = option(
        "auto",
        "auto: the checkpoint's safetensors. dummy: random weights from its config.json, for benchmarks.",
        choices=("auto", "dummy"),
    )
    routing: str = option(
        "router",
        "router: the model's own. For benchmarks, experts drawn at random per token and layer: uniform, or "
        "zipf: the n-th most popular expert of a layer 1/n times as often as the first.",
        choices=("router", "uniform", "zipf"),
    )
    seed: int = option(0, "Seed of dummy weights and random routing.", low=0, high=(1 << 32) - 1)


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """The ranks of this node."""

    ranks: int = option(1, "Rank processes on this node.", low=1, high=64)
    max_ranks: int = option(
        0,
        "Rank processes that this node may grow to, if it is the only one. 0: parallel.ranks.",
        low=0,
        high=64,
    )
    device: str = option("cpu", "What ranks compute on. cuda: one GPU each.", choices=("cpu", "cuda"))
    threads_per_rank: int = option(
        0,
        "Threads per rank that compute, or read weights for a GPU. 0: cores / ranks, at least 1.",
        low=0,
        high=256,
    )
    overlap: str = option(
        "auto",
        "Split each step into two micro-batches, so that one computes while the other communicates.",
        choices=("auto", "on", "off"),
    )
    graphs: bool = option(
        True,
        "On GPUs, capture steps as CUDA graphs at start and replay them. Only where rows travel over NVLink.",
    )


@dataclass(frozen=True, slots=True)
class ExchangeConfig:
    """Dispatch and combine."""

    payload: str = option(
        "auto",
        "Format of dispatched rows. auto: the dtype of the model.",
        choices=("auto", "fp32", "bf16", "fp8", "fp8_pow2", "fp8_ue8m0"),
    )
    reduction: str = option(
        "rank",
        "Where the expert outputs of a token are summed. rank: at the experts' ranks first. source: "
        "at the token's rank.",
        choices=("rank", "source"),
    )
    mode: str = option(
        "auto",
        "How steps use the exchange. normal: as for many rows at once. auto: so from the number of tokens on "
        "from which that was faster when the ranks started.",
        choices=("auto", "low_latency", "normal"),
    )
    num_banks: int = option(
        4, "Receive banks, a power of two: how many dispatches may be in flight.", low=2, high=16
    )
    between_nodes: str = option(
        "auto",
        "Rows of GPUs on several nodes. flat: all through host memory. hierarchical: NVLink inside a node. "
        "auto: hierarchical with several ranks per node, max_running >= 64, reduction rank, no float32.",
        choices=("auto", "flat", "hierarchical"),
    )
    device_memory: str = option(
        "auto",
        "Rows of GPUs on several nodes. hmem: the NIC reads and writes GPU memory. host: through pinned "
        "host memory. auto: host, as hmem was not tested on a NIC.",
        choices=("auto", "hmem", "host"),
    )
    timeout_seconds: float = option(
        10.0,
        "A rank is lost if it keeps another waiting this long, or does not answer while idle.",
        low=0.01,
        high=3600,
    )
    spin_us: int = option(
        -1,
        "Microseconds of busy waiting before a wait yields. -1: 50 if ranks x threads have cores, else 0.",
        low=-1,
        high=1_000_000,
    )


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Batching, KV cache and admission of one rank."""

    max_running: int = option(64, "Sequences that one rank decodes at once.", low=1, high=4096)
    max_step_tokens: int = option(
        0, "Tokens of one step of a rank at most. 0: 8192 on GPUs of one node, else 256.", low=0, high=8192
    )
    itl_budget_ms: float = option(
        -1.0,
        "Longest step, in ms, while sequences decode: prompts run in chunks that fit. 0: no limit. -1: twice "
        "a step without prompts; prompts that are older or more than the sequences have no limit then.",
        low=-1,
        high=60_000,
    )
    max_queue: int = option(
        256, "Requests that may wait here before new ones get RESOURCE_EXHAUSTED.", low=0, high=1_000_000
    )
    block_size: int = option(16, "Tokens in one KV block.", low=1, high=256)
    kv_blocks: int = option(
        0, "KV blocks of one rank. 0: from kv_fraction, on GPUs what fits.", low=0, high=100_000_000
    )
    kv_fraction: float = option(
        0.25, "Share of free memory for KV caches of live CPU ranks. GPUs: always 0.8.", low=0.001, high=0.95
    )
    prefix_cache: bool = option(True, "Reuse the KV blocks of equal prompt prefixes.")
    kv_host_gib: float = option(
        0.0,
        "GiB of host memory, pinned on GPUs, for one rank's copies of prefix blocks, which return after "
        "they were evicted. Of use only if it exceeds the KV cache. 0: none.",
        low=0,
        high=1 << 16,
    )


@dataclass(frozen=True, slots=True)
class GrpcConfig:
    """The public gRPC endpoint."""

    host: str = option("127.0.0.1", "Address to bind. The default is reachable from this host only.")
    port: int = option(50051, "Port to bind. 0: any free port, printed in the log.", low=0, high=65535)
    max_message_bytes: int = option(
        0, "Largest message accepted. 0: what the model's longest context needs.", low=0, high=1 << 30
    )
    max_streams: int = option(
        1024, "Generate streams at once. Finished ones count until they are read.", low=1, high=1_000_000
    )
    stream_buffer: int = option(
        4096,
        "Tokens that a slow reader may lag behind before its request is cancelled.",
        low=16,
        high=1_000_000,
    )
    unread_seconds: float = option(
        60.0,
        "A call ends with RESOURCE_EXHAUSTED if a message waits and its caller reads nothing for this long.",
        low=0.1,
        high=86400,
    )
    tls_cert: str = option("", "PEM certificate chain. Enables TLS, together with tls_key.")
    tls_key: str = option("", "PEM private key.")
    tls_client_ca: str = option("", "PEM CA bundle. Enables mutual TLS.")
    token_file: str = option("", "File with one accepted bearer token per line.")
    control: str = option(
        "on",
        "Where ep_server.v1.Control is served; its callers may abort any request and read this "
        "configuration. on: at the public port. loopback: only at control_port. off: nowhere.",
        choices=("on", "loopback", "off"),
    )
    control_port: int = option(
        50052,
        "Port on 127.0.0.1, without TLS, for control = loopback. 0: any free port, printed in the log.",
        low=0,
        high=65535,
    )
    reflection: bool = option(True, "Serve gRPC reflection, which lists services and messages.")
    channelz: bool = option(
        False, "Count calls, sockets and bytes, and serve them as grpc.channelz.v1 where Control is served."
    )
    doors: str = option(
        "all",
        "Other protocols at the public port, separated by commas: oip, vllm_engine. all: those whose "
        "packages are installed. Empty: none.",
    )
    max_connection_age_seconds: float = option(
        0.0,
        "Age at which a connection is asked to reconnect, so that callers find new servers; its open calls "
        "continue. 10 % more or less, at random. 0: never.",
        low=0,
        high=86400,
    )
    max_connection_age_grace_seconds: float = option(
        0.0, "Seconds that calls of such a connection may continue. 0: until they end.", low=0, high=86400
    )
    drain_seconds: float = option(
        30.0, "Seconds that open requests may go on after SIGTERM.", low=0, high=86400
    )


@dataclass(frozen=True, slots=True)
class MetricsConfig:
    """The Prometheus endpoint."""

    enabled: bool = option(True, "Serve /metrics and the status page.")
    host: str = option("127.0.0.1", "Address to bind.")
    port: int = option(9400, "Port to bind. 0: any free port, printed in the log.", low=0, high=65535)
    vllm_names: bool = option(
        False, "Export vllm:* names too, for vLLM's dashboards and the Gateway API inference extension."
    )
    detail: str = option(
        "full",
        "full: histograms of each rank, waits of each pair of ranks, tokens of each expert. summary: of all "
        "ranks together, for servers of many ranks.",
        choices=("full", "summary"),
    )
    device_phases: int = option(
        0, "On GPUs, time the phases of one in this many captured steps. 0: never.", low=0, high=1_000_000
    )


@dataclass(frozen=True, slots=True)
class ResilienceConfig:
    """The loss of a rank."""

    on_rank_loss: str = option(
        "recover",
        "recover: streams continue where they stopped; a new process replaces the rank. On several nodes, or "
        "GPUs in float32, all ranks start again. stop: streams end with UNAVAILABLE, the server exits.",
        choices=("recover", "stop"),
    )
    standby: int = option(
        1,
        "Processes kept started, without weights, to take the place of lost ranks sooner. Each holds about "
        "0.2 GiB. On several nodes, where all ranks start again, as many as parallel.ranks help.",
        low=0,
        high=64,
    )
    spare_slots: str = option(
        "auto",
        "Expert slots per layer and rank to spare, with which ranks of one node go on after a loss. "
        "auto: enough to lose any one rank, if they take at most half of the memory that is left; on GPUs, "
        "two thirds.",
        choices=("auto",),
        low=0,
        high=4096,
    )
    shadow: str = option(
        "off",
        "Copy of all experts in the server's host memory, from which ranks load those they lack. on: it must "
        "fit. auto: on GPUs, if it takes at most half of the free memory. off: they read the checkpoint.",
        choices=("off", "auto", "on"),
    )
    placement: str = option(
        "",
        "File with the placement of experts at the start, as ep-server placement --export writes it. "
        "Empty: in order.",
    )
    balance: str = option(
        "off",
        "auto: measure which experts get many tokens, and move and replicate experts while the ranks serve, "
        "within their spare slots. Only float32 with exchange.reduction = source keeps the outputs the same.",
        choices=("off", "auto"),
    )
    balance_seconds: float = option(10.0, "Time between two plans of the balance.", low=0.1, high=86400)
    balance_moves: int = option(
        64, "Experts of a layer that one plan may load, over all layers and ranks.", low=1, high=1 << 20
    )
    rank_losses: int = option(
        2,
        "Losses of a rank within ten minutes after which it stays out, if others can go on. 0: never.",
        low=0,
        high=10_000,
    )
    max_losses: int = option(
        5,
        "Losses within ten minutes that the server survives; the next one ends it.",
        low=1,
        high=10_000,
    )


@dataclass(frozen=True, slots=True)
class ProfileConfig:
    """Profiles of the ranks, on a caller's order."""

    directory: str = option(
        "",
        "Folder on every rank's host where callers may have profiles written. Empty: none may be taken.",
    )
    max_seconds: float = option(
        30.0, "A profile that is not stopped ends after this many seconds.", low=0.1, high=600
    )
    max_steps: int = option(
        50,
        "Steps of one profile. Ranks pause while they write it, about 20 us per kernel or operator in it; "
        "exchange.timeout_seconds must be longer.",
        low=1,
        high=1000,
    )


@dataclass(frozen=True, slots=True)
class HandoffConfig:
    """KV hand-off between servers (docs/how-to/prefill-decode.md)."""

    role: str = option(
        "none",
        "prefill: other servers may fetch the KV blocks of prompts. decode: fetches them. both: either.",
        choices=("none", "prefill", "decode", "both"),
    )
    host: str = option("127.0.0.1", "Address of this host where decode servers fetch blocks. Not encrypted.")
    port: int = option(0, "Port of rank 0 for them; rank n uses port + n. 0: any.", low=0, high=65471)
    transport: str = option(
        "tcp",
        "Between hosts. libfabric: with the settings of the fabric section, if both servers have it.",
        choices=("tcp", "libfabric"),
    )
    hold_seconds: float = option(
        60.0,
        "Blocks that nobody has fetched are freed so long after their request ended.",
        low=0.1,
        high=3600,
    )
    timeout_seconds: float = option(
        120.0, "A decode server computes a prompt itself if its blocks take longer.", low=0.1, high=3600
    )
    silence_seconds: float = option(
        2.0, "The same if the other server sends nothing for so long.", low=1.0, high=600
    )
    stall_seconds: float = option(
        5.0, "A prefill server refuses hand-offs if its rank runs no layer for so long.", low=0.1, high=600
    )

    @property
    def sends(self) -> bool:
        """Other servers may fetch blocks from this one."""
        return self.role in ("prefill", "both")

    @property
    def fetches(self) -> bool:
        """This server may fetch blocks from others."""
        return self.role in ("decode", "both")


@dataclass(frozen=True, slots=True)
class LogConfig:
    """Logs on standard error."""

    level: str = option(
        "info", "Lowest level that is printed.", choices=("debug", "info", "warning", "error")
    )
    format: str = option("text", "text for people, json for machines.", choices=("text", "json"))
