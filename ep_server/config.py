"""One frozen configuration tree, read once and validated once. The only reader of os.environ.

Every field has a type, a default and a range; `Config.validate()` raises ConfigError with the field's
dotted name, its value and what is allowed. Sources, later wins: defaults, file (TOML), environment
(EP_SERVER_<SECTION>__<FIELD>), command-line flags.
"""

from __future__ import annotations

import dataclasses
import os
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ep_server.errors import ConfigError

ENV_PREFIX = "EP_SERVER_"


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
        "weights and activations; auto = the checkpoint's own, float32 on CPU for float16",
        choices=("auto", "float32", "bfloat16"),
    )
    max_context: int = option(0, "longest prompt + output, tokens; 0 = the model's own limit", low=0)


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """Ranks of this node."""

    ranks: int = option(1, "rank processes on this node", low=1, high=64)
    threads_per_rank: int = option(
        0, "compute threads of a rank; 0 = cores / ranks, at least 1", low=0, high=256
    )
    overlap: str = option("auto", "two micro-batches per step", choices=("auto", "on", "off"))


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
    timeout_seconds: float = option(10.0, "deadline of every wait for a peer", low=0.01, high=3600)
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
    kv_blocks: int = option(0, "KV blocks of a rank; 0 = from kv_fraction", low=0, high=100_000_000)
    kv_fraction: float = option(
        0.25, "share of free memory, over all ranks, for KV caches", low=0.001, high=0.95
    )
    prefix_cache: bool = option(True, "reuse KV blocks of equal prefixes")


@dataclass(frozen=True, slots=True)
class GrpcConfig:
    """The public gRPC endpoint."""

    host: str = option("127.0.0.1", "address to bind; loopback unless told otherwise")
    port: int = option(50051, "port to bind; 0 = any free port, printed in the log", low=0, high=65535)
    max_message_bytes: int = option(16 << 20, "largest message taken", low=1024, high=1 << 30)
    max_streams: int = option(1024, "concurrent Generate streams", low=1, high=1_000_000)
    stream_buffer: int = option(
        4096, "tokens buffered for one slow reader before its request is cancelled", low=16, high=1_000_000
    )
    tls_cert: str = option("", "PEM certificate chain; switches TLS on together with tls_key")
    tls_key: str = option("", "PEM private key")
    tls_client_ca: str = option("", "PEM CA bundle; switches mutual TLS on")
    token_file: str = option("", "file with one accepted bearer token per line")
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


@dataclass(frozen=True, slots=True)
class LogConfig:
    """Logs on standard error."""

    level: str = option("info", "lowest level printed", choices=("debug", "info", "warning", "error"))
    format: str = option("text", "text for people, json for machines", choices=("text", "json"))


@dataclass(frozen=True, slots=True)
class Config:
    """The whole tree. `Config.load` builds and validates it."""

    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    exchange: ExchangeConfig = field(default_factory=ExchangeConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    grpc: GrpcConfig = field(default_factory=GrpcConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    log: LogConfig = field(default_factory=LogConfig)

    @staticmethod
    def load(
        file: str | None = None,
        flags: Mapping[str, Any] | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> Config:
        """Reads all sources.

        Args:
            file: TOML with one table per section.
            flags: dotted field name -> value; None values are "not given".
            environ: for tests; os.environ if None.
        Raises: ConfigError for an unknown field, a value of the wrong type or out of range.
        """
        values: dict[str, Any] = {}
        if file is not None:
            values.update(_flatten(_read_toml(file)))
        for key, text in sorted((os.environ if environ is None else environ).items()):
            section, separator, name = key.removeprefix(ENV_PREFIX).lower().partition("__")
            if key.startswith(ENV_PREFIX) and separator:
                values[f"{section}.{name}"] = text
        values.update({key: value for key, value in (flags or {}).items() if value is not None})
        return Config.from_values(values)

    @staticmethod
    def from_values(values: Mapping[str, Any]) -> Config:
        """Builds the tree from dotted names; texts are converted to the field's type."""
        sections: dict[str, dict[str, Any]] = {section: {} for section in _sections()}
        known = {name: (section, item) for name, section, item in fields()}
        for name, value in values.items():
            if name not in known:
                raise ConfigError(name, value, "a known field; `ep-server config` lists them")
            section, item = known[name]
            sections[section][item.name] = _convert(name, item, value)
        config = Config(**{name: cls(**sections[name]) for name, cls in _sections().items()})
        config.validate()
        return config

    def validate(self) -> None:
        """Raises ConfigError for the first field that is out of range."""
        for name, section, item in fields():
            _check_range(name, item, getattr(getattr(self, section), item.name))
        if self.exchange.num_banks & (self.exchange.num_banks - 1):
            raise ConfigError("exchange.num_banks", self.exchange.num_banks, "a power of two, 2 to 16")
        if bool(self.grpc.tls_cert) != bool(self.grpc.tls_key):
            raise ConfigError("grpc.tls_key", self.grpc.tls_key, "given together with grpc.tls_cert")
        if self.grpc.tls_client_ca and not self.grpc.tls_cert:
            raise ConfigError("grpc.tls_client_ca", self.grpc.tls_client_ca, "given only with grpc.tls_cert")

    def values(self) -> dict[str, Any]:
        """Every field by its dotted name; from_values(c.values()) == c."""
        return {name: getattr(getattr(self, section), item.name) for name, section, item in fields()}


def fields() -> Iterator[tuple[str, str, dataclasses.Field[Any]]]:
    """Yields (dotted name, section, dataclass field) of every option, in order."""
    for section, cls in _sections().items():
        for item in dataclasses.fields(cls):
            yield f"{section}.{item.name}", section, item


def field_type(section: str, name: str) -> type:
    """The Python type of an option: str, int, float or bool."""
    hint = typing.get_type_hints(_sections()[section])[name]
    assert isinstance(hint, type) and not isinstance(hint, types.UnionType)
    return hint


def _sections() -> dict[str, Any]:
    return dict(typing.get_type_hints(Config).items())


def _read_toml(file: str) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError("--config", file, f"a readable file ({error.strerror})") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError("--config", file, f"valid TOML ({error})") from error


def _flatten(tree: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for section, table in tree.items():
        if not isinstance(table, Mapping):
            raise ConfigError(section, table, "a table, for example [model]")
        flat.update({f"{section}.{name}": value for name, value in table.items()})
    return flat


def _convert(name: str, item: dataclasses.Field[Any], value: Any) -> Any:
    section, _, attribute = name.partition(".")
    kind = field_type(section, attribute)
    if isinstance(value, str) and kind is bool:
        if value.lower() not in ("true", "false", "1", "0", "on", "off", "yes", "no"):
            raise ConfigError(name, value, "true or false")
        return value.lower() in ("true", "1", "on", "yes")
    if isinstance(value, str) and kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            raise ConfigError(name, value, f"a number ({kind.__name__})") from None
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not kind:
        raise ConfigError(name, value, f"of type {kind.__name__}")
    return value


def _check_range(name: str, item: dataclasses.Field[Any], value: Any) -> None:
    low, high, choices = (item.metadata.get(key) for key in ("low", "high", "choices"))
    if choices is not None and value not in choices:
        raise ConfigError(name, value, "one of " + ", ".join(choices))
    if low is not None and not (low <= value and (high is None or value <= high)):
        raise ConfigError(name, value, f"{low} to {high}" if high is not None else f"at least {low}")
