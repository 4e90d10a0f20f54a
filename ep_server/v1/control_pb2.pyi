from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ServerState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SERVER_STATE_UNSPECIFIED: _ClassVar[ServerState]
    SERVER_STATE_STARTING: _ClassVar[ServerState]
    SERVER_STATE_SERVING: _ClassVar[ServerState]
    SERVER_STATE_DRAINING: _ClassVar[ServerState]
    SERVER_STATE_LOST: _ClassVar[ServerState]
    SERVER_STATE_RECOVERING: _ClassVar[ServerState]
    SERVER_STATE_STOPPED: _ClassVar[ServerState]
SERVER_STATE_UNSPECIFIED: ServerState
SERVER_STATE_STARTING: ServerState
SERVER_STATE_SERVING: ServerState
SERVER_STATE_DRAINING: ServerState
SERVER_STATE_LOST: ServerState
SERVER_STATE_RECOVERING: ServerState
SERVER_STATE_STOPPED: ServerState

class GetServerInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetServerInfoResponse(_message.Message):
    __slots__ = ("version", "api_version", "instance_id", "state", "uptime_seconds", "ranks", "max_context", "max_running", "max_queue", "max_step_tokens", "kv_block_size", "kv_blocks", "rank_info", "weights_version", "weights_path", "pid_space", "nodes", "live_nodes", "live_ranks", "ranks_out", "rank_loss_lacking_bytes")
    class RanksOutEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: str
        def __init__(self, key: _Optional[int] = ..., value: _Optional[str] = ...) -> None: ...
    VERSION_FIELD_NUMBER: _ClassVar[int]
    API_VERSION_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    UPTIME_SECONDS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    MAX_RUNNING_FIELD_NUMBER: _ClassVar[int]
    MAX_QUEUE_FIELD_NUMBER: _ClassVar[int]
    MAX_STEP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    RANK_INFO_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_VERSION_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_PATH_FIELD_NUMBER: _ClassVar[int]
    PID_SPACE_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    LIVE_NODES_FIELD_NUMBER: _ClassVar[int]
    LIVE_RANKS_FIELD_NUMBER: _ClassVar[int]
    RANKS_OUT_FIELD_NUMBER: _ClassVar[int]
    RANK_LOSS_LACKING_BYTES_FIELD_NUMBER: _ClassVar[int]
    version: str
    api_version: str
    instance_id: str
    state: ServerState
    uptime_seconds: float
    ranks: int
    max_context: int
    max_running: int
    max_queue: int
    max_step_tokens: int
    kv_block_size: int
    kv_blocks: int
    rank_info: _containers.RepeatedCompositeFieldContainer[RankInfo]
    weights_version: int
    weights_path: str
    pid_space: str
    nodes: int
    live_nodes: int
    live_ranks: _containers.RepeatedScalarFieldContainer[int]
    ranks_out: _containers.ScalarMap[int, str]
    rank_loss_lacking_bytes: int
    def __init__(self, version: _Optional[str] = ..., api_version: _Optional[str] = ..., instance_id: _Optional[str] = ..., state: _Optional[_Union[ServerState, str]] = ..., uptime_seconds: _Optional[float] = ..., ranks: _Optional[int] = ..., max_context: _Optional[int] = ..., max_running: _Optional[int] = ..., max_queue: _Optional[int] = ..., max_step_tokens: _Optional[int] = ..., kv_block_size: _Optional[int] = ..., kv_blocks: _Optional[int] = ..., rank_info: _Optional[_Iterable[_Union[RankInfo, _Mapping]]] = ..., weights_version: _Optional[int] = ..., weights_path: _Optional[str] = ..., pid_space: _Optional[str] = ..., nodes: _Optional[int] = ..., live_nodes: _Optional[int] = ..., live_ranks: _Optional[_Iterable[int]] = ..., ranks_out: _Optional[_Mapping[int, str]] = ..., rank_loss_lacking_bytes: _Optional[int] = ...) -> None: ...

class RankInfo(_message.Message):
    __slots__ = ("rank", "pid", "kv_blocks", "weight_bytes", "kv_bytes", "exchange_bytes", "load_seconds", "pid_space")
    RANK_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    EXCHANGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    LOAD_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PID_SPACE_FIELD_NUMBER: _ClassVar[int]
    rank: int
    pid: int
    kv_blocks: int
    weight_bytes: int
    kv_bytes: int
    exchange_bytes: int
    load_seconds: float
    pid_space: str
    def __init__(self, rank: _Optional[int] = ..., pid: _Optional[int] = ..., kv_blocks: _Optional[int] = ..., weight_bytes: _Optional[int] = ..., kv_bytes: _Optional[int] = ..., exchange_bytes: _Optional[int] = ..., load_seconds: _Optional[float] = ..., pid_space: _Optional[str] = ...) -> None: ...

class GetModelInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetModelInfoResponse(_message.Message):
    __slots__ = ("name", "architecture", "vocab_size", "max_context", "eos_token_ids", "has_tokenizer", "default_temperature", "default_top_k", "default_top_p", "default_min_p", "default_repetition_penalty", "num_layers", "hidden_size", "num_experts", "experts_per_token", "has_chat_template")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    HAS_TOKENIZER_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_TOP_K_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_TOP_P_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_MIN_P_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    HAS_CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    name: str
    architecture: str
    vocab_size: int
    max_context: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    has_tokenizer: bool
    default_temperature: float
    default_top_k: int
    default_top_p: float
    default_min_p: float
    default_repetition_penalty: float
    num_layers: int
    hidden_size: int
    num_experts: int
    experts_per_token: int
    has_chat_template: bool
    def __init__(self, name: _Optional[str] = ..., architecture: _Optional[str] = ..., vocab_size: _Optional[int] = ..., max_context: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., has_tokenizer: _Optional[bool] = ..., default_temperature: _Optional[float] = ..., default_top_k: _Optional[int] = ..., default_top_p: _Optional[float] = ..., default_min_p: _Optional[float] = ..., default_repetition_penalty: _Optional[float] = ..., num_layers: _Optional[int] = ..., hidden_size: _Optional[int] = ..., num_experts: _Optional[int] = ..., experts_per_token: _Optional[int] = ..., has_chat_template: _Optional[bool] = ...) -> None: ...

class GetLoadsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetLoadsResponse(_message.Message):
    __slots__ = ("ranks", "in_flight", "waiting")
    RANKS_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    ranks: _containers.RepeatedCompositeFieldContainer[RankLoad]
    in_flight: int
    waiting: int
    def __init__(self, ranks: _Optional[_Iterable[_Union[RankLoad, _Mapping]]] = ..., in_flight: _Optional[int] = ..., waiting: _Optional[int] = ...) -> None: ...

class RankLoad(_message.Message):
    __slots__ = ("rank", "running", "waiting", "kv_blocks_used", "kv_blocks_total", "kv_blocks_cached", "steps", "prefix_queries", "prefix_hits", "preemptions", "prefix_host_hits", "kv_blocks_held")
    RANK_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_USED_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_CACHED_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_QUERIES_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HITS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HOST_HITS_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_HELD_FIELD_NUMBER: _ClassVar[int]
    rank: int
    running: int
    waiting: int
    kv_blocks_used: int
    kv_blocks_total: int
    kv_blocks_cached: int
    steps: int
    prefix_queries: int
    prefix_hits: int
    preemptions: int
    prefix_host_hits: int
    kv_blocks_held: int
    def __init__(self, rank: _Optional[int] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., kv_blocks_used: _Optional[int] = ..., kv_blocks_total: _Optional[int] = ..., kv_blocks_cached: _Optional[int] = ..., steps: _Optional[int] = ..., prefix_queries: _Optional[int] = ..., prefix_hits: _Optional[int] = ..., preemptions: _Optional[int] = ..., prefix_host_hits: _Optional[int] = ..., kv_blocks_held: _Optional[int] = ...) -> None: ...

class GetEpStateRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetEpStateResponse(_message.Message):
    __slots__ = ("ranks", "latencies", "peer_waits", "expert_balance")
    RANKS_FIELD_NUMBER: _ClassVar[int]
    LATENCIES_FIELD_NUMBER: _ClassVar[int]
    PEER_WAITS_FIELD_NUMBER: _ClassVar[int]
    EXPERT_BALANCE_FIELD_NUMBER: _ClassVar[int]
    ranks: _containers.RepeatedCompositeFieldContainer[RankState]
    latencies: _containers.RepeatedCompositeFieldContainer[Latency]
    peer_waits: _containers.RepeatedCompositeFieldContainer[PeerWait]
    expert_balance: ExpertBalance
    def __init__(self, ranks: _Optional[_Iterable[_Union[RankState, _Mapping]]] = ..., latencies: _Optional[_Iterable[_Union[Latency, _Mapping]]] = ..., peer_waits: _Optional[_Iterable[_Union[PeerWait, _Mapping]]] = ..., expert_balance: _Optional[_Union[ExpertBalance, _Mapping]] = ...) -> None: ...

class RankState(_message.Message):
    __slots__ = ("rank", "up", "steps", "idle_steps")
    RANK_FIELD_NUMBER: _ClassVar[int]
    UP_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    IDLE_STEPS_FIELD_NUMBER: _ClassVar[int]
    rank: int
    up: bool
    steps: int
    idle_steps: int
    def __init__(self, rank: _Optional[int] = ..., up: _Optional[bool] = ..., steps: _Optional[int] = ..., idle_steps: _Optional[int] = ...) -> None: ...

class Latency(_message.Message):
    __slots__ = ("op", "part", "count", "mean_seconds", "p50_seconds", "p90_seconds", "p99_seconds")
    OP_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    MEAN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    P50_SECONDS_FIELD_NUMBER: _ClassVar[int]
    P90_SECONDS_FIELD_NUMBER: _ClassVar[int]
    P99_SECONDS_FIELD_NUMBER: _ClassVar[int]
    op: str
    part: str
    count: int
    mean_seconds: float
    p50_seconds: float
    p90_seconds: float
    p99_seconds: float
    def __init__(self, op: _Optional[str] = ..., part: _Optional[str] = ..., count: _Optional[int] = ..., mean_seconds: _Optional[float] = ..., p50_seconds: _Optional[float] = ..., p90_seconds: _Optional[float] = ..., p99_seconds: _Optional[float] = ...) -> None: ...

class PeerWait(_message.Message):
    __slots__ = ("op", "rank", "peer", "wait_seconds")
    OP_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    WAIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    op: str
    rank: int
    peer: int
    wait_seconds: float
    def __init__(self, op: _Optional[str] = ..., rank: _Optional[int] = ..., peer: _Optional[int] = ..., wait_seconds: _Optional[float] = ...) -> None: ...

class ExpertBalance(_message.Message):
    __slots__ = ("rank_balance", "expert_balance", "expert_tokens")
    class ExpertTokensEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    RANK_BALANCE_FIELD_NUMBER: _ClassVar[int]
    EXPERT_BALANCE_FIELD_NUMBER: _ClassVar[int]
    EXPERT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    rank_balance: float
    expert_balance: float
    expert_tokens: _containers.ScalarMap[int, int]
    def __init__(self, rank_balance: _Optional[float] = ..., expert_balance: _Optional[float] = ..., expert_tokens: _Optional[_Mapping[int, int]] = ...) -> None: ...

class GetPlacementRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetPlacementResponse(_message.Message):
    __slots__ = ("num_experts", "slots_per_rank", "live", "layers")
    NUM_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_PER_RANK_FIELD_NUMBER: _ClassVar[int]
    LIVE_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    num_experts: int
    slots_per_rank: int
    live: _containers.RepeatedScalarFieldContainer[int]
    layers: _containers.RepeatedCompositeFieldContainer[LayerSlots]
    def __init__(self, num_experts: _Optional[int] = ..., slots_per_rank: _Optional[int] = ..., live: _Optional[_Iterable[int]] = ..., layers: _Optional[_Iterable[_Union[LayerSlots, _Mapping]]] = ...) -> None: ...

class LayerSlots(_message.Message):
    __slots__ = ("experts", "serves", "rows")
    EXPERTS_FIELD_NUMBER: _ClassVar[int]
    SERVES_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    experts: _containers.RepeatedScalarFieldContainer[int]
    serves: _containers.RepeatedScalarFieldContainer[int]
    rows: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, experts: _Optional[_Iterable[int]] = ..., serves: _Optional[_Iterable[int]] = ..., rows: _Optional[_Iterable[float]] = ...) -> None: ...

class GetDiagnosticsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetDiagnosticsResponse(_message.Message):
    __slots__ = ("config", "versions", "steps")
    class ConfigEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class VersionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    CONFIG_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    config: _containers.ScalarMap[str, str]
    versions: _containers.ScalarMap[str, str]
    steps: _containers.RepeatedCompositeFieldContainer[StepTrace]
    def __init__(self, config: _Optional[_Mapping[str, str]] = ..., versions: _Optional[_Mapping[str, str]] = ..., steps: _Optional[_Iterable[_Union[StepTrace, _Mapping]]] = ...) -> None: ...

class StepTrace(_message.Message):
    __slots__ = ("rank", "step", "start_ns", "tokens", "sequences", "micro_batches", "plan_ns", "vote_ns", "run_ns", "publish_ns")
    RANK_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    START_NS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    MICRO_BATCHES_FIELD_NUMBER: _ClassVar[int]
    PLAN_NS_FIELD_NUMBER: _ClassVar[int]
    VOTE_NS_FIELD_NUMBER: _ClassVar[int]
    RUN_NS_FIELD_NUMBER: _ClassVar[int]
    PUBLISH_NS_FIELD_NUMBER: _ClassVar[int]
    rank: int
    step: int
    start_ns: int
    tokens: int
    sequences: int
    micro_batches: int
    plan_ns: int
    vote_ns: int
    run_ns: int
    publish_ns: int
    def __init__(self, rank: _Optional[int] = ..., step: _Optional[int] = ..., start_ns: _Optional[int] = ..., tokens: _Optional[int] = ..., sequences: _Optional[int] = ..., micro_batches: _Optional[int] = ..., plan_ns: _Optional[int] = ..., vote_ns: _Optional[int] = ..., run_ns: _Optional[int] = ..., publish_ns: _Optional[int] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("request_ids",)
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    request_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, request_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class AbortResponse(_message.Message):
    __slots__ = ("aborted", "unknown")
    ABORTED_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_FIELD_NUMBER: _ClassVar[int]
    aborted: _containers.RepeatedScalarFieldContainer[str]
    unknown: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, aborted: _Optional[_Iterable[str]] = ..., unknown: _Optional[_Iterable[str]] = ...) -> None: ...

class UpdateWeightsRequest(_message.Message):
    __slots__ = ("path",)
    PATH_FIELD_NUMBER: _ClassVar[int]
    path: str
    def __init__(self, path: _Optional[str] = ...) -> None: ...

class ScaleRequest(_message.Message):
    __slots__ = ("ranks", "hold_out")
    RANKS_FIELD_NUMBER: _ClassVar[int]
    HOLD_OUT_FIELD_NUMBER: _ClassVar[int]
    ranks: int
    hold_out: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ranks: _Optional[int] = ..., hold_out: _Optional[_Iterable[int]] = ...) -> None: ...

class ScaleResponse(_message.Message):
    __slots__ = ("live", "pause_seconds")
    LIVE_FIELD_NUMBER: _ClassVar[int]
    PAUSE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    live: _containers.RepeatedScalarFieldContainer[int]
    pause_seconds: float
    def __init__(self, live: _Optional[_Iterable[int]] = ..., pause_seconds: _Optional[float] = ...) -> None: ...

class UpdateWeightsResponse(_message.Message):
    __slots__ = ("version", "pause_seconds", "pause_bound_seconds", "bytes")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PAUSE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PAUSE_BOUND_SECONDS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    version: int
    pause_seconds: float
    pause_bound_seconds: float
    bytes: int
    def __init__(self, version: _Optional[int] = ..., pause_seconds: _Optional[float] = ..., pause_bound_seconds: _Optional[float] = ..., bytes: _Optional[int] = ...) -> None: ...
