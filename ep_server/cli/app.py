"""Assembles a server from a configuration: model, rank processes, metrics, gRPC."""

from __future__ import annotations

import gc
import logging
import resource
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import uvloop
from prometheus_client import CollectorRegistry

import ep_server
from ep_server.cluster.cluster_ranks import ClusterRanks
from ep_server.cluster.discovery import NodePlace, find_place, this_host
from ep_server.cluster.follower import Follower, FollowerHooks
from ep_server.cluster.leader import Leader
from ep_server.config import Config, MetricsConfig, ModelConfig
from ep_server.errors import StartupError
from ep_server.frontend.requests import with_message_limit
from ep_server.frontend.served_model import ServedModel
from ep_server.frontend.server import Progress, Server
from ep_server.models.families import read_spec
from ep_server.models.sizes import context_limit
from ep_server.observability.metrics import ServerMetrics
from ep_server.observability.metrics_endpoint import MetricsEndpoint, Probes
from ep_server.observability.node_metrics import NodeFacts, NodeMetrics, NodePage
from ep_server.observability.server_state import ServerState, TlsFiles
from ep_server.observability.status_page import StatusPage
from ep_server.observability.vllm_metrics import for_pickers, with_vllm_names
from ep_server.ranks.launcher import RankProcesses
from ep_server.ranks.protocol import Ranks
from ep_server.ranks.restarting import RestartingRanks

log = logging.getLogger(__name__)

SWITCH_SECONDS = (
    0.0005  # that the event loop waits for a thread, such as a scrape; Python's default is ten times that
)
OPEN_FILES = 64  # of the front process and of a rank; at the start they have about 30
OPEN_FILES_PER_RANK = 8  # of the front process; a rank takes 2, and more while it starts


@dataclass(frozen=True, slots=True)
class App:
    """A server on node 0, not started yet. metrics_url: empty if metrics are off."""

    server: Server
    model: ServedModel
    metrics_url: str


@asynccontextmanager
async def assemble(
    config: Config, ranks: Ranks | None = None, place: NodePlace | None = None
) -> AsyncIterator[App]:
    """Reads the checkpoint's configuration and opens the metrics port. The caller runs the server.

    Args:
        ranks: None = rank processes from `config`.
        place: of this node, which leads several; None = the only node.
    Raises: ConfigError, CheckpointError.
    """
    model = ServedModel.load(config.model)
    config = with_message_limit(config, model.max_context, model.vocab_size)
    warn_if_made_up(config.model)
    warn_if_prompts_are_slow(config)
    registry = CollectorRegistry()
    metrics = ServerMetrics(
        registry,
        model=model.name,
        version=ep_server.__version__,
        max_queue=config.scheduler.max_queue,
        nodes=1 if place is None else place.nodes,
        ranks_per_node=config.parallel.ranks,
        summary=config.metrics.detail == "summary",
    )
    page, pickers = registry, None
    if config.metrics.vllm_names:
        page = with_vllm_names(registry, model.name)
        pickers = for_pickers(metrics.loads, model.name)
    status = StatusPage(metrics.look, model.name, ep_server.__version__)
    others = None if place is None or place.nodes == 1 else Leader(config, place)
    recover = config.resilience.on_rank_loss == "recover"
    if ranks is None and others is not None:
        ranks = ClusterRanks(config, others)
    ranks = ranks or RestartingRanks(lambda: RankProcesses(config, outlive=recover))
    server = Server(config, model, ranks, metrics, others)

    def tls() -> TlsFiles | None:
        used = server.certificates
        return None if used is None else TlsFiles(used.expiry(), used.refused)

    nodes, per_node = config.cluster.nodes, config.parallel.ranks
    registry.register(ServerState(server.engine, config.scheduler.max_running, tls, nodes, per_node))
    probes = Probes(lambda: server.health.live, lambda: server.health.serving)
    with _endpoint(config.metrics, page, status, probes, pickers) as url:
        yield App(server, model, url)


def require_open_files(ranks: int) -> None:
    """Raises: StartupError if the limit of open files and sockets is too low."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = OPEN_FILES + OPEN_FILES_PER_RANK * ranks
    if limit != resource.RLIM_INFINITY and limit < needed:
        raise StartupError(
            f"limit of open files (ulimit -n) = {limit}: must be at least {needed} with {ranks} ranks here, "
            "and one more for each connection"
        )


def warn_if_made_up(model: ModelConfig) -> None:
    """Warns about settings that make every answer meaningless."""
    if model.load_format == "dummy":
        log.warning(
            "model.load_format = dummy: weights are random, for benchmarks only; outputs mean nothing"
        )
    if model.routing != "router":
        log.warning(
            "model.routing = %s: experts are drawn at random, for benchmarks only; outputs are wrong",
            model.routing,
        )


def warn_if_prompts_are_slow(config: Config) -> None:
    """Warns if the sizes leave no room for a captured step with a prompt."""
    sizes, parallel = config.scheduler, config.parallel
    if parallel.device == "cuda" and parallel.graphs and config.step_tokens <= sizes.max_running:
        log.warning(
            "scheduler.max_step_tokens = %d is not above scheduler.max_running = %d: steps with prompts run "
            "without CUDA graphs and take longer",
            config.step_tokens,
            sizes.max_running,
        )


@contextmanager
def _endpoint(
    config: MetricsConfig,
    page: CollectorRegistry,
    status: StatusPage | NodePage,
    probes: Probes,
    pickers: CollectorRegistry | None = None,
) -> Iterator[str]:
    """Opens the metrics port, if enabled. Yields: its URL or "". Raises: ConfigError."""
    if not config.enabled:
        yield ""
        return
    endpoint = MetricsEndpoint(config, page, status, probes, pickers)
    try:
        with status if isinstance(status, StatusPage) else nullcontext():
            yield endpoint.url
    finally:
        endpoint.close()


def run(config: Config, progress: Progress, on_serving: Callable[[str], None]) -> int:
    """Serves until a signal, or until a rank or node is lost. The process should exit afterwards.

    Args:
        on_serving: called with the URL of the metrics ("" if off) once requests are accepted.
    Returns: exit code. Raises: StartupError.
    """
    require_open_files(config.parallel.ranks)
    sys.setswitchinterval(SWITCH_SECONDS)
    place = find_place(config.cluster, this_host())
    settled = place.settled(config)

    async def lead() -> int:
        async with assemble(settled, place=place) as app:
            return await app.server.run(progress, lambda: serving(app.metrics_url), last=True)

    def serving(url: str) -> None:
        gc.collect()
        gc.freeze()  # what lives as long as the process: a scan of it takes tens of ms
        on_serving(url)

    return uvloop.run(_follow(settled, place, progress, serving) if place.node else lead())


async def _follow(
    config: Config, place: NodePlace, progress: Progress, on_serving: Callable[[str], None]
) -> int:
    """run() for a node that does not lead."""
    ranks, model = config.parallel.ranks, config.model
    spec = read_spec(Path(model.path))
    config = with_message_limit(config, context_limit(spec, model.max_context), spec.vocab_size)
    facts = NodeFacts(
        node=place.node,
        nodes=place.nodes,
        ranks=range(place.node * ranks, (place.node + 1) * ranks),
        leader=place.address,
        model=model.name or Path(model.path).resolve().name,
        version=ep_server.__version__,
    )
    registry = CollectorRegistry()
    metrics = NodeMetrics(registry, facts)
    follower = Follower(config, place, FollowerHooks(progress, lambda: on_serving(url), metrics))
    probes = Probes(lambda: follower.health.live, lambda: follower.health.serving)
    page = NodePage(facts, metrics, lambda: follower.health.serving)
    with _endpoint(config.metrics, registry, page, probes) as url:
        return await follower.run(last=True)
