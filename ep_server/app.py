"""Puts a server together from a configuration: model, rank processes, metrics, gRPC. Decides nothing else."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import uvloop
from prometheus_client import CollectorRegistry

import ep_server
from ep_server.config import Config
from ep_server.metrics import MetricsEndpoint, ServerMetrics
from ep_server.ranks.launcher import RankProcesses
from ep_server.ranks.protocol import Ranks
from ep_server.served_model import ServedModel
from ep_server.server import Progress, Server
from ep_server.vllm_metrics import with_vllm_names


@dataclass(frozen=True, slots=True)
class App:
    """A server that is not started yet. metrics_url is empty where metrics are off."""

    server: Server
    model: ServedModel
    metrics_url: str


@asynccontextmanager
async def assemble(config: Config, ranks: Ranks | None = None) -> AsyncIterator[App]:
    """Reads the checkpoint's description and opens the metrics port; the caller runs or starts the server.

    Args:
        ranks: rank processes of `config` if None.
    Raises: ConfigError, CheckpointError.
    """
    model = ServedModel.load(config.model)
    registry = CollectorRegistry()
    metrics = ServerMetrics(
        registry, model=model.name, version=ep_server.__version__, max_queue=config.scheduler.max_queue
    )
    page = with_vllm_names(registry, model.name) if config.metrics.vllm_names else registry
    endpoint = MetricsEndpoint(config.metrics, page) if config.metrics.enabled else None
    try:
        server = Server(config, model, ranks or RankProcesses(config), metrics)
        yield App(server, model, endpoint.url if endpoint is not None else "")
    finally:
        if endpoint is not None:
            endpoint.close()


def run(config: Config, progress: Progress, on_serving: Callable[[App], None]) -> int:
    """Serves until a signal or the loss of a rank. Returns: exit code. Raises: StartupError."""

    async def serve() -> int:
        async with assemble(config) as app:
            return await app.server.run(progress, lambda: on_serving(app))

    return uvloop.run(serve())
