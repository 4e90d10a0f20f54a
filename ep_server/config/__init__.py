"""One frozen configuration tree, read once and validated once. The only reader of os.environ.

Every field has a type, a default and a range; `Config.validate()` raises ConfigError with the field's
dotted name, its value and what is allowed. Sources, later wins: defaults, what LeaderWorkerSet tells its Pods
(LWS_GROUP_SIZE, LWS_WORKER_INDEX, LWS_LEADER_ADDRESS: cluster.nodes, node_rank and the host of rendezvous),
file (TOML), environment (EP_SERVER_<SECTION>__<FIELD>), command-line flags.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ep_server.config.network import RENDEZVOUS_PORT, ClusterConfig, FabricConfig
from ep_server.config.sections import (
    LOSS_SECONDS,
    ExchangeConfig,
    GrpcConfig,
    HandoffConfig,
    LogConfig,
    MetricsConfig,
    ModelConfig,
    ParallelConfig,
    ProfileConfig,
    ResilienceConfig,
    SchedulerConfig,
)
from ep_server.errors import ConfigError

__all__ = [
    "LOSS_SECONDS",
    "RENDEZVOUS_PORT",
    "ClusterConfig",
    "Config",
    "ExchangeConfig",
    "FabricConfig",
    "GrpcConfig",
    "HandoffConfig",
    "LogConfig",
    "MetricsConfig",
    "ModelConfig",
    "ParallelConfig",
    "ProfileConfig",
    "ResilienceConfig",
    "SchedulerConfig",
    "field_type",
    "fields",
    "read_sources",
]

ENV_PREFIX = "EP_SERVER_"
STEP_TOKENS, STEP_TOKENS_OF_GPUS = 256, 8192  # scheduler.max_step_tokens = 0


@dataclass(frozen=True, slots=True)
class Config:
    """The whole tree. `Config.load` builds and validates it."""

    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    exchange: ExchangeConfig = field(default_factory=ExchangeConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    grpc: GrpcConfig = field(default_factory=GrpcConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    resilience: ResilienceConfig = field(default_factory=ResilienceConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    fabric: FabricConfig = field(default_factory=FabricConfig)
    handoff: HandoffConfig = field(default_factory=HandoffConfig)
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
        given = read_sources(file, flags, environ)
        return Config.from_values({name: one.value for name, one in given.items()})

    @staticmethod
    def from_values(values: Mapping[str, Any]) -> Config:
        """Builds the tree from dotted names; texts are converted to the field's type."""
        sections: dict[str, dict[str, Any]] = {section: {} for section in _sections()}
        known = {name: (section, item) for name, section, item in fields()}
        for name, value in values.items():
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {near[0]}?" if near else "`ep-server config` lists them"
                raise ConfigError(name, value, f"a known field; {hint}")
            section, item = known[name]
            sections[section][item.name] = _convert(name, item, value)
        config = Config(**{name: cls(**sections[name]) for name, cls in _sections().items()})
        config.validate()
        return config

    @property
    def step_tokens(self) -> int:
        """scheduler.max_step_tokens, or what 0 stands for.

        Nodes hold the rows that GPUs exchange in host memory too: with 8192 tokens that would be tens of GiB.
        """
        gpus = self.parallel.device == "cuda" and self.cluster.nodes == 1
        return self.scheduler.max_step_tokens or (STEP_TOKENS_OF_GPUS if gpus else STEP_TOKENS)

    def validate(self) -> None:
        """Raises ConfigError for the first field that is out of range."""
        for name, section, item in fields():
            _check_range(name, item, getattr(getattr(self, section), item.name))
        parallel = self.parallel
        if 0 < parallel.max_ranks < parallel.ranks:
            allowed = f"0, or at least parallel.ranks = {parallel.ranks}"
            raise ConfigError("parallel.max_ranks", parallel.max_ranks, allowed)
        if parallel.max_ranks > parallel.ranks and self.cluster.nodes > 1:
            allowed = "0 or parallel.ranks, unless cluster.nodes = 1"
            raise ConfigError("parallel.max_ranks", parallel.max_ranks, allowed)
        if self.exchange.num_banks & (self.exchange.num_banks - 1):
            raise ConfigError("exchange.num_banks", self.exchange.num_banks, "a power of two, 2 to 16")
        if -1 < (budget := self.scheduler.itl_budget_ms) < 0:
            raise ConfigError("scheduler.itl_budget_ms", budget, "-1, or 0 to 60000")
        if bool(self.grpc.tls_cert) != bool(self.grpc.tls_key):
            raise ConfigError("grpc.tls_key", self.grpc.tls_key, "given together with grpc.tls_cert")
        if self.handoff.sends and not self.handoff.host:
            raise ConfigError("handoff.host", "", "an address of this host")
        if self.grpc.tls_client_ca and not self.grpc.tls_cert:
            raise ConfigError("grpc.tls_client_ca", self.grpc.tls_client_ca, "given only with grpc.tls_cert")
        tls = {name: getattr(self.cluster, name) for name in ("tls_cert", "tls_key", "tls_ca")}
        missing = [name for name, file in tls.items() if not file]
        if missing and len(missing) < len(tls):
            raise ConfigError(
                f"cluster.{missing[0]}", "", "given, as TLS between nodes needs all three files"
            )

    def values(self) -> dict[str, Any]:
        """Every field by its dotted name; from_values(c.values()) == c."""
        return {name: getattr(getattr(self, section), item.name) for name, section, item in fields()}

    def changed(self) -> dict[str, Any]:
        """Fields that differ from their defaults, by their dotted names."""
        defaults = Config().values()
        return {name: value for name, value in self.values().items() if value != defaults[name]}


@dataclass(frozen=True, slots=True)
class Given:
    """A value as a source gives it, not converted yet. source: for people."""

    value: Any
    source: str


def read_sources(
    file: str | None = None,
    flags: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
) -> dict[str, Given]:
    """What the sources give, by dotted name; of several the last one. Arguments and errors: Config.load."""
    environ = os.environ if environ is None else environ
    found: dict[str, Given] = {}
    if file is not None:
        found.update({name: Given(value, file) for name, value in _flatten(_read_toml(file)).items()})
    for key, text in sorted(environ.items()):
        section, separator, name = key.removeprefix(ENV_PREFIX).lower().partition("__")
        if key.startswith(ENV_PREFIX) and separator:
            found[f"{section}.{name}"] = Given(text, key)
    found.update({name: Given(value, "flag") for name, value in (flags or {}).items() if value is not None})
    values = {name: one.value for name, one in found.items()}
    lws = _from_leader_worker_set(values, environ)
    return found | {name: Given(value, "LeaderWorkerSet") for name, value in lws.items()}


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


def _from_leader_worker_set(values: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, Any]:
    """Fields of [cluster] that LeaderWorkerSet gives and no other source does."""
    told = {
        "cluster.nodes": environ.get("LWS_GROUP_SIZE"),
        "cluster.node_rank": environ.get("LWS_WORKER_INDEX"),
        "cluster.rendezvous": environ.get("LWS_LEADER_ADDRESS"),
    }
    found: dict[str, Any] = {name: text for name, text in told.items() if text and name not in values}
    if told["cluster.node_rank"] and str(values.get("cluster.node_rank")) == "-1":
        found["cluster.node_rank"] = told["cluster.node_rank"]
    leader, given = told["cluster.rendezvous"], str(values.get("cluster.rendezvous", ""))
    if leader and (not given or given.startswith(":")):
        found["cluster.rendezvous"] = leader + (given or f":{RENDEZVOUS_PORT}")
    return found


def _read_toml(file: str) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError("--config", file, f"a readable file ({error.strerror})") from error
    except ValueError as error:  # of the syntax, of the encoding, or a number of thousands of digits
        raise ConfigError("--config", file, f"valid TOML ({error})") from error
    except RecursionError:
        raise ConfigError("--config", file, "valid TOML that is less deeply nested") from None


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
    if kind is str and type(value) is int and item.metadata.get("low") is not None:
        return str(value)
    if type(value) is not kind:
        raise ConfigError(name, value, f"of type {kind.__name__}")
    return value


def _check_range(name: str, item: dataclasses.Field[Any], value: Any) -> None:
    low, high, choices = (item.metadata.get(key) for key in ("low", "high", "choices"))
    if choices is not None:
        within = low is not None and value.isdecimal() and low <= int(value) <= (high or low)
        if value not in choices and not within:
            numbers = "" if low is None else f", or {low} to {high}"
            raise ConfigError(name, value, "one of " + ", ".join(choices) + numbers)
        return
    if low is not None and not (low <= value and (high is None or value <= high)):
        raise ConfigError(name, value, f"{low} to {high}" if high is not None else f"at least {low}")
