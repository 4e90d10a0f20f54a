"""The Control service: reports server, model, loads and the expert-parallel group.

It reads the engine's records. Only Abort and UpdateWeights change anything.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import grpc
from grpc import aio

import ep_server
from ep_server.config import Config, GrpcConfig
from ep_server.engine.engine import Engine, EngineState, live_nodes
from ep_server.errors import (
    CheckpointError,
    ConfigError,
    InvalidArgument,
    SwitchedOff,
    Unavailable,
    WrongState,
)
from ep_server.frontend.checkpoint_facts import CheckpointFacts
from ep_server.frontend.handoffs import Handoffs
from ep_server.frontend.introspection import add_channelz, add_reflection, channelz_names
from ep_server.frontend.port import Port
from ep_server.frontend.served_model import ServedModel
from ep_server.models.identity import files_identity
from ep_server.observability.fault_report import versions
from ep_server.observability.quantiles import NANO, balance, summarise_ranks
from ep_server.ranks.protocol import pid_space
from ep_server.records import RankLoad, RankStatistics
from ep_server.v1 import control_pb2, control_pb2_grpc, decode_pb2

log = logging.getLogger(__name__)

SERVICE_NAME: str = control_pb2.DESCRIPTOR.services_by_name["Control"].full_name
LOOPBACK = "127.0.0.1"
MAX_ABORT = 1024


def public_names(config: GrpcConfig) -> tuple[str, ...]:
    """Full names of the services of callers at the public port."""
    decode: str = decode_pb2.DESCRIPTOR.services_by_name["Decode"].full_name
    return (decode, SERVICE_NAME) if config.control == "on" else (decode,)


def refuse_control(server: aio.Server, config: GrpcConfig) -> None:
    """Answers Control calls with the reason why it is not served here."""
    why = f"{SERVICE_NAME} is switched off at this server (grpc.control = off)"
    if config.control == "loopback":
        where = f"{LOOPBACK}:{config.control_port}" if config.control_port else "a port that its log names"
        why = f"{SERVICE_NAME} is on the server's own host alone, at {where} (grpc.control = loopback)"

    async def refuse(_request: Any, _context: Any) -> NoReturn:
        raise SwitchedOff(why)

    handler = grpc.unary_unary_rpc_method_handler(refuse, request_deserializer=bytes)
    methods = control_pb2.DESCRIPTOR.services_by_name["Control"].methods_by_name
    refusing = grpc.method_handlers_generic_handler(SERVICE_NAME, dict.fromkeys(methods, handler))
    server.add_generic_rpc_handlers((refusing,))


async def open_control_port(config: GrpcConfig, add_control: Callable[[aio.Server], None]) -> Port | None:
    """Opens the port where Control is alone, if it has one. Raises: ConfigError (grpc.control_port)."""
    if config.control != "loopback":
        return None
    own = dataclasses.replace(
        config, host=LOOPBACK, port=config.control_port, tls_cert="", tls_key="", tls_client_ca=""
    )
    port = Port(own, frozenset())
    add_control(port.server)
    add_channelz(port.server, own)
    add_reflection(port.server, own, (SERVICE_NAME, *channelz_names(own)))
    try:
        log.info("%s on %s", SERVICE_NAME, await port.open())
    except ConfigError as error:
        raise ConfigError("grpc.control_port", error.value, error.allowed) from error
    return port


class ControlService(control_pb2_grpc.ControlServicer):  # type: ignore[misc, unused-ignore]
    """ep_server.v1.Control."""

    def __init__(
        self,
        engine: Engine,
        model: ServedModel,
        config: Config,
        handoffs: Handoffs,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._model = model
        self._config = config
        self._handoffs = handoffs
        self._clock = clock
        self._started = clock()
        self._instance = uuid.uuid4().hex
        self._facts: CheckpointFacts | None = None

    async def GetServerInfo(self, request: Any, context: Any) -> Any:
        """Version, state and limits."""
        engine, scheduler = self._engine, self._config.scheduler
        group = engine.group
        return control_pb2.GetServerInfoResponse(
            version=ep_server.__version__,
            api_version=control_pb2.DESCRIPTOR.package,
            instance_id=self._instance,
            state=_state(engine.state),
            uptime_seconds=self._clock() - self._started,
            ranks=engine.num_ranks,
            max_context=engine.max_context,
            max_running=scheduler.max_running * (len(engine.ready) or engine.num_ranks),
            max_queue=scheduler.max_queue,
            max_step_tokens=self._config.step_tokens,
            kv_block_size=scheduler.block_size,
            kv_blocks=sum(ready.kv_blocks for ready in engine.ready),
            weights_version=engine.weights.version,
            weights_path=engine.weights.path,
            pid_space=pid_space(),
            nodes=self._config.cluster.nodes,
            live_nodes=live_nodes(engine.ready, self._config.parallel.ranks),
            live_ranks=[] if group is None else group.live,
            ranks_out={} if group is None else group.out,
            rank_loss_lacking_bytes=0 if group is None else group.lacking_bytes,
            rank_info=[
                control_pb2.RankInfo(
                    rank=ready.rank,
                    pid=ready.pid,
                    pid_space=ready.pid_space,
                    kv_blocks=ready.kv_blocks,
                    weight_bytes=ready.weight_bytes,
                    kv_bytes=ready.kv_bytes,
                    exchange_bytes=ready.exchange_bytes,
                    load_seconds=ready.load_seconds,
                )
                for ready in engine.ready
            ],
        )

    async def GetModelInfo(self, request: Any, context: Any) -> Any:
        """Name, sizes and defaults of the model."""
        model = self._model
        return control_pb2.GetModelInfoResponse(
            name=model.name,
            architecture=model.architecture,
            vocab_size=model.vocab_size,
            max_context=model.max_context,
            eos_token_ids=sorted(model.eos_token_ids),
            has_tokenizer=model.tokenizer is not None,
            default_temperature=model.defaults.temperature,
            default_top_k=model.defaults.top_k,
            default_top_p=model.defaults.top_p,
            default_min_p=model.defaults.min_p,
            default_repetition_penalty=model.defaults.repetition_penalty,
            num_layers=model.num_layers,
            hidden_size=model.hidden_size,
            num_experts=model.num_experts,
            experts_per_token=model.experts_per_token,
            has_chat_template=model.chat_template is not None,
        )

    async def GetLoads(self, request: Any, context: Any) -> Any:
        """Load by rank."""
        counts = self._engine.statistics()
        reported = self._engine.rank_statistics
        empty = {ready.rank: RankLoad(kv_blocks_total=ready.kv_blocks) for ready in self._engine.ready}
        loads = empty | {rank: statistics.load for rank, statistics in reported.items()}
        return control_pb2.GetLoadsResponse(
            in_flight=counts.in_flight,
            waiting=counts.waiting,
            ranks=[_load(rank, load) for rank, load in sorted(loads.items())],
        )

    async def GetEpState(self, request: Any, context: Any) -> Any:
        """The group as measured. Raises: Unavailable before warm-up ends."""
        engine = self._engine
        if engine.state is EngineState.STARTING:
            raise Unavailable("the server is starting: its ranks are loading weights")
        statistics = [engine.rank_statistics[rank] for rank in sorted(engine.rank_statistics)]
        up = engine.state not in (EngineState.RECOVERING, EngineState.LOST)
        return control_pb2.GetEpStateResponse(
            ranks=[_rank_state(engine, ready.rank, up=up) for ready in engine.ready],
            latencies=_latencies(statistics),
            peer_waits=[
                control_pb2.PeerWait(op=op, rank=s.rank, peer=peer, wait_seconds=wait * NANO)
                for s in statistics
                for (op, peer), wait in sorted(s.peer_wait_ns.items())
            ],
            expert_balance=_balance(statistics),
        )

    async def GetPlacement(self, request: Any, context: Any) -> Any:
        """Where experts are. Raises: Unavailable before warm-up ends."""
        if self._engine.state is EngineState.STARTING:
            raise Unavailable("the server is starting: its ranks are loading weights")
        balancer = self._engine.balancer
        placement, rows = balancer.placement, balancer.rows
        if placement is None:
            return control_pb2.GetPlacementResponse(num_experts=self._model.num_experts)
        layers = [
            control_pb2.LayerSlots(experts=experts, serves=map(int, serves), rows=rows[n] if rows else ())
            for n, (experts, serves) in enumerate(zip(placement.experts, placement.serves, strict=True))
        ]
        return control_pb2.GetPlacementResponse(
            num_experts=placement.num_experts,
            slots_per_rank=placement.slots_per_rank,
            live=balancer.live,
            layers=layers,
        )

    async def GetDiagnostics(self, request: Any, context: Any) -> Any:
        """Configuration, versions and the last steps of every rank."""
        reported = self._engine.rank_statistics
        return control_pb2.GetDiagnosticsResponse(
            config={name: json.dumps(value) for name, value in self._config.values().items()},
            versions=versions(),
            steps=[
                control_pb2.StepTrace(rank=rank, **dataclasses.asdict(step))
                for rank, statistics in sorted(reported.items())
                for step in statistics.last_steps
            ],
        )

    async def Abort(self, request: Any, context: Any) -> Any:
        """Ends requests with CANCELLED. Raises: InvalidArgument for too many ids."""
        given = len(request.request_ids)
        if given > MAX_ABORT:
            raise InvalidArgument("request_ids", f"{given} ids", f"at most {MAX_ABORT}")
        ids = list(dict.fromkeys(request.request_ids))
        aborted = {request_id for request_id in ids if self._engine.abort(request_id)}
        return control_pb2.AbortResponse(
            aborted=[request_id for request_id in ids if request_id in aborted],
            unknown=[request_id for request_id in ids if request_id not in aborted],
        )

    async def UpdateWeights(self, request: Any, context: Any) -> Any:
        """Replaces the weights. Raises: InvalidArgument for another kind of checkpoint; as the engine."""
        folder = self._config.model.updates
        if not folder:
            raise SwitchedOff("the server takes no new weights: model.updates names no folder")
        if self._config.model.load_format == "dummy":
            raise WrongState("model.load_format = dummy: random weights cannot be replaced")
        if not _is_inside(request.path, folder):
            raise InvalidArgument("path", request.path, f"a checkpoint in {folder} (model.updates)")
        done = await self._engine.update_weights(request.path, self._check_weights)
        await self._handoffs.warm_up()
        return control_pb2.UpdateWeightsResponse(
            version=done.version,
            pause_seconds=done.pause,
            pause_bound_seconds=done.bound,
            bytes=done.nbytes,
        )

    async def Scale(self, request: Any, context: Any) -> Any:
        """Changes which ranks serve. Raises: as the engine."""
        pause = await self._engine.scale(request.ranks, request.hold_out)
        group = self._engine.group
        return control_pb2.ScaleResponse(live=[] if group is None else group.live, pause_seconds=pause)

    def _check_weights(self, path: str) -> str:
        """In another thread. Returns: what identifies its files."""
        if self._facts is None:
            try:
                self._facts = CheckpointFacts.read(self._config.model.path)
            except CheckpointError as error:
                raise Unavailable(f"the served checkpoint cannot be read any more: {error}") from error
        self._facts.check(path)
        return files_identity(path)


def _is_inside(path: str, folder: str) -> bool:
    """Whether a path leads into a folder, links followed."""
    try:
        return Path(path).resolve().is_relative_to(Path(folder).resolve())
    except (OSError, ValueError, RuntimeError):  # a NUL character, a loop of links
        return False


def _state(state: EngineState) -> Any:
    return control_pb2.ServerState.Value(f"SERVER_STATE_{state.name}")


def _load(rank: int, load: RankLoad) -> Any:
    return control_pb2.RankLoad(
        rank=rank,
        running=load.running,
        waiting=load.waiting,
        kv_blocks_used=load.kv_blocks_used,
        kv_blocks_total=load.kv_blocks_total,
        kv_blocks_cached=load.kv_blocks_cached,
        steps=load.steps,
        prefix_queries=load.prefix_queries,
        prefix_hits=load.prefix_hits,
        preemptions=load.preemptions,
        prefix_host_hits=load.prefix_host_hits,
        kv_blocks_held=load.kv_blocks_held,
    )


def _rank_state(engine: Engine, rank: int, *, up: bool) -> Any:
    statistics = engine.rank_statistics.get(rank, RankStatistics(rank))
    idle = statistics.counters.get("idle_steps", 0)
    return control_pb2.RankState(rank=rank, up=up, steps=statistics.load.steps, idle_steps=idle)


def _latencies(statistics: list[RankStatistics]) -> list[Any]:
    return [
        control_pb2.Latency(
            op=name.partition("/")[0],
            part=name.partition("/")[2],
            count=summary.count,
            mean_seconds=summary.mean,
            p50_seconds=summary.p50,
            p90_seconds=summary.p90,
            p99_seconds=summary.p99,
        )
        for name, summary in summarise_ranks(statistics).items()
    ]


def _balance(statistics: list[RankStatistics]) -> Any:
    tokens: dict[int, int] = {}
    for rank in statistics:
        for expert, count in rank.expert_tokens.items():
            tokens[expert] = tokens.get(expert, 0) + count
    return control_pb2.ExpertBalance(
        rank_balance=balance(sum(rank.expert_tokens.values()) for rank in statistics),
        expert_balance=balance(tokens.values()),
        expert_tokens=tokens,
    )
