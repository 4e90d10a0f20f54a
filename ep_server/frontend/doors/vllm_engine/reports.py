"""[2] What VllmEngine says of the model, the server and its load."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import ep_server
from ep_server.config import Config
from ep_server.engine.engine import Engine, EngineState
from ep_server.frontend.doors.vllm_engine.kv_transfer import CONNECTOR, ROLES
from ep_server.frontend.doors.vllm_engine.protocol import pb
from ep_server.frontend.handoffs import Handoffs
from ep_server.frontend.served_model import SAMPLING_RANGES, ServedModel
from ep_server.records import RankLoad, RankReady, RankStatistics, Sampling

HEALTH = {
    EngineState.STARTING: "the server is starting",
    EngineState.SERVING: "",
    EngineState.RECOVERING: "",  # requests wait
    EngineState.DRAINING: "the server is draining",
    EngineState.LOST: "a rank was lost",
    EngineState.STOPPED: "the server has stopped",
}


def health(engine: Engine) -> Any:
    """Whether the server takes requests."""
    message = HEALTH[engine.state]
    return pb.HealthCheckResponse(healthy=not message, message=message)


def model_info(config: Config, engine: Engine, model: ServedModel) -> Any:
    """Limits and defaults of the model. Its path is of this host; elsewhere GetTokenizer gives the files."""
    path = str(Path(config.model.path).resolve()) if config.model.path else ""
    return pb.GetModelInfoResponse(
        model_path=path,
        is_generation=True,
        max_context_length=engine.max_context,
        vocab_size=model.vocab_size,
        served_model_name=model.name,
        tokenizer_path=path if model.tokenizer is not None else "",
        model_type=model.architecture,
        eos_token_ids=sorted(model.eos_token_ids),
        max_req_input_len=engine.max_context - 1,
        default_sampling_params_json=_defaults(model.defaults),
    )


def server_info(config: Config, engine: Engine, uptime: float, handoffs: Handoffs) -> Any:
    """State and limits of the server. A grammar constrains every token from the first on.

    pairing_protocol is what a gateway compares before it pairs two servers; block sizes may differ.
    """
    hands_off = handoffs.role != "none"
    return pb.GetServerInfoResponse(
        active_requests=engine.statistics().in_flight,
        is_paused=engine.state is EngineState.DRAINING,
        uptime_seconds=uptime,
        server_type="ep-server",
        kv_connector=CONNECTOR if hands_off else "",
        kv_role=ROLES[handoffs.role],
        kv_engine_id=handoffs.engine_id if hands_off else "",
        pairing_protocol=handoffs.format if hands_off else "",
        data_parallel_size=engine.num_ranks,
        kv_cache_dtype=config.model.kv_dtype,
        block_size=config.scheduler.block_size,
        model_dtype=config.model.dtype,
        max_num_seqs=config.scheduler.max_running * engine.num_ranks,
        constrained_decoding_start="first_token",
    )


def loads(config: Config, engine: Engine, ranks: Sequence[int]) -> Any:
    """The newest report of each of these ranks."""
    return pb.GetLoadsResponse(
        timestamp=datetime.now(UTC).isoformat(),
        version=ep_server.__version__,
        dp_rank_count=engine.num_ranks,
        loads=[_load(config, engine, ready) for ready in engine.ready if ready.rank in ranks],
    )


def _load(config: Config, engine: Engine, ready: RankReady) -> Any:
    rank, empty = ready.rank, RankLoad(kv_blocks_total=ready.kv_blocks)
    load = engine.rank_statistics.get(rank, RankStatistics(rank, empty)).load
    size, most = config.scheduler.block_size, config.scheduler.max_running
    return pb.SchedulerLoad(
        dp_rank=rank,
        num_running_reqs=load.running,
        num_waiting_reqs=load.waiting,
        num_total_reqs=load.running + load.waiting,
        num_used_tokens=load.kv_blocks_used * size,
        max_total_num_tokens=load.kv_blocks_total * size,
        token_usage=load.kv_blocks_used / max(load.kv_blocks_total, 1),
        cache_hit_rate=load.prefix_hits / max(load.prefix_queries, 1),
        utilization=load.running / most,
        max_running_requests=most,
    )


def _defaults(sampling: Sampling) -> str:
    """What differs from no effect, as JSON; "" for nothing."""
    neutral = Sampling()
    values = {name: getattr(sampling, name) for name in SAMPLING_RANGES}
    given = {name: value for name, value in values.items() if value != getattr(neutral, name)}
    return json.dumps(given) if given else ""
