from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_EOS: _ClassVar[FinishReason]
    FINISH_REASON_STOP_TOKEN: _ClassVar[FinishReason]
    FINISH_REASON_STOP_STRING: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_EOS: FinishReason
FINISH_REASON_STOP_TOKEN: FinishReason
FINISH_REASON_STOP_STRING: FinishReason
FINISH_REASON_LENGTH: FinishReason

class ToRank(_message.Message):
    __slots__ = ("start", "add", "cancel", "doorbell", "shutdown", "connect", "watch_cache", "order", "regroup", "forget_lost")
    START_FIELD_NUMBER: _ClassVar[int]
    ADD_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    DOORBELL_FIELD_NUMBER: _ClassVar[int]
    SHUTDOWN_FIELD_NUMBER: _ClassVar[int]
    CONNECT_FIELD_NUMBER: _ClassVar[int]
    WATCH_CACHE_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    REGROUP_FIELD_NUMBER: _ClassVar[int]
    FORGET_LOST_FIELD_NUMBER: _ClassVar[int]
    start: Start
    add: Add
    cancel: Cancel
    doorbell: Doorbell
    shutdown: Shutdown
    connect: Connect
    watch_cache: WatchCache
    order: Order
    regroup: Regroup
    forget_lost: ForgetLost
    def __init__(self, start: _Optional[_Union[Start, _Mapping]] = ..., add: _Optional[_Union[Add, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ..., doorbell: _Optional[_Union[Doorbell, _Mapping]] = ..., shutdown: _Optional[_Union[Shutdown, _Mapping]] = ..., connect: _Optional[_Union[Connect, _Mapping]] = ..., watch_cache: _Optional[_Union[WatchCache, _Mapping]] = ..., order: _Optional[_Union[Order, _Mapping]] = ..., regroup: _Optional[_Union[Regroup, _Mapping]] = ..., forget_lost: _Optional[_Union[ForgetLost, _Mapping]] = ...) -> None: ...

class Start(_message.Message):
    __slots__ = ("rank", "num_ranks", "config_json", "exchange_fd", "threads", "kv_blocks", "bells", "outlives", "joins", "awaited", "placement", "live", "weights_version", "weights_files", "handover", "shadow_fd", "kv_fd", "kv_place")
    RANK_FIELD_NUMBER: _ClassVar[int]
    NUM_RANKS_FIELD_NUMBER: _ClassVar[int]
    CONFIG_JSON_FIELD_NUMBER: _ClassVar[int]
    EXCHANGE_FD_FIELD_NUMBER: _ClassVar[int]
    THREADS_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BELLS_FIELD_NUMBER: _ClassVar[int]
    OUTLIVES_FIELD_NUMBER: _ClassVar[int]
    JOINS_FIELD_NUMBER: _ClassVar[int]
    AWAITED_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    LIVE_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_VERSION_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FILES_FIELD_NUMBER: _ClassVar[int]
    HANDOVER_FIELD_NUMBER: _ClassVar[int]
    SHADOW_FD_FIELD_NUMBER: _ClassVar[int]
    KV_FD_FIELD_NUMBER: _ClassVar[int]
    KV_PLACE_FIELD_NUMBER: _ClassVar[int]
    rank: int
    num_ranks: int
    config_json: str
    exchange_fd: int
    threads: int
    kv_blocks: int
    bells: _containers.RepeatedScalarFieldContainer[int]
    outlives: bool
    joins: bool
    awaited: bool
    placement: Placement
    live: _containers.RepeatedScalarFieldContainer[int]
    weights_version: int
    weights_files: str
    handover: int
    shadow_fd: int
    kv_fd: int
    kv_place: int
    def __init__(self, rank: _Optional[int] = ..., num_ranks: _Optional[int] = ..., config_json: _Optional[str] = ..., exchange_fd: _Optional[int] = ..., threads: _Optional[int] = ..., kv_blocks: _Optional[int] = ..., bells: _Optional[_Iterable[int]] = ..., outlives: _Optional[bool] = ..., joins: _Optional[bool] = ..., awaited: _Optional[bool] = ..., placement: _Optional[_Union[Placement, _Mapping]] = ..., live: _Optional[_Iterable[int]] = ..., weights_version: _Optional[int] = ..., weights_files: _Optional[str] = ..., handover: _Optional[int] = ..., shadow_fd: _Optional[int] = ..., kv_fd: _Optional[int] = ..., kv_place: _Optional[int] = ...) -> None: ...

class Placement(_message.Message):
    __slots__ = ("num_experts", "slots_per_rank", "layers")
    NUM_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_PER_RANK_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    num_experts: int
    slots_per_rank: int
    layers: _containers.RepeatedCompositeFieldContainer[LayerPlacement]
    def __init__(self, num_experts: _Optional[int] = ..., slots_per_rank: _Optional[int] = ..., layers: _Optional[_Iterable[_Union[LayerPlacement, _Mapping]]] = ...) -> None: ...

class LayerPlacement(_message.Message):
    __slots__ = ("experts", "serves")
    EXPERTS_FIELD_NUMBER: _ClassVar[int]
    SERVES_FIELD_NUMBER: _ClassVar[int]
    experts: _containers.RepeatedScalarFieldContainer[int]
    serves: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, experts: _Optional[_Iterable[int]] = ..., serves: _Optional[_Iterable[int]] = ...) -> None: ...

class Regroup(_message.Message):
    __slots__ = ("generation", "work_number", "kept", "placement", "live", "lost_kv")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    WORK_NUMBER_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    LIVE_FIELD_NUMBER: _ClassVar[int]
    LOST_KV_FIELD_NUMBER: _ClassVar[int]
    generation: int
    work_number: int
    kept: _containers.RepeatedScalarFieldContainer[int]
    placement: Placement
    live: _containers.RepeatedScalarFieldContainer[int]
    lost_kv: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, generation: _Optional[int] = ..., work_number: _Optional[int] = ..., kept: _Optional[_Iterable[int]] = ..., placement: _Optional[_Union[Placement, _Mapping]] = ..., live: _Optional[_Iterable[int]] = ..., lost_kv: _Optional[_Iterable[int]] = ...) -> None: ...

class ForgetLost(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Connect(_message.Message):
    __slots__ = ("ranks", "session")
    RANKS_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    ranks: _containers.RepeatedCompositeFieldContainer[Introduction]
    session: int
    def __init__(self, ranks: _Optional[_Iterable[_Union[Introduction, _Mapping]]] = ..., session: _Optional[int] = ...) -> None: ...

class Add(_message.Message):
    __slots__ = ("work_number", "request")
    WORK_NUMBER_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    work_number: int
    request: Request
    def __init__(self, work_number: _Optional[int] = ..., request: _Optional[_Union[Request, _Mapping]] = ...) -> None: ...

class Request(_message.Message):
    __slots__ = ("request_id", "number", "prompt_ids", "sampling", "stopping", "priority", "cache_salt", "bypass_prefix_cache", "dp_rank", "group", "grammar", "output_ids", "hold", "source")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOPPING_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    BYPASS_PREFIX_CACHE_FIELD_NUMBER: _ClassVar[int]
    DP_RANK_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_IDS_FIELD_NUMBER: _ClassVar[int]
    HOLD_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    number: int
    prompt_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: Sampling
    stopping: Stopping
    priority: int
    cache_salt: str
    bypass_prefix_cache: bool
    dp_rank: int
    group: int
    grammar: Grammar
    output_ids: _containers.RepeatedScalarFieldContainer[int]
    hold: bytes
    source: KvSource
    def __init__(self, request_id: _Optional[str] = ..., number: _Optional[int] = ..., prompt_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., stopping: _Optional[_Union[Stopping, _Mapping]] = ..., priority: _Optional[int] = ..., cache_salt: _Optional[str] = ..., bypass_prefix_cache: _Optional[bool] = ..., dp_rank: _Optional[int] = ..., group: _Optional[int] = ..., grammar: _Optional[_Union[Grammar, _Mapping]] = ..., output_ids: _Optional[_Iterable[int]] = ..., hold: _Optional[bytes] = ..., source: _Optional[_Union[KvSource, _Mapping]] = ...) -> None: ...

class KvSource(_message.Message):
    __slots__ = ("address", "local", "key", "tokens", "weights")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    LOCAL_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    address: str
    local: str
    key: bytes
    tokens: int
    weights: int
    def __init__(self, address: _Optional[str] = ..., local: _Optional[str] = ..., key: _Optional[bytes] = ..., tokens: _Optional[int] = ..., weights: _Optional[int] = ...) -> None: ...

class Grammar(_message.Message):
    __slots__ = ("kind", "source")
    KIND_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    kind: str
    source: str
    def __init__(self, kind: _Optional[str] = ..., source: _Optional[str] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "seed", "repetition_penalty", "presence_penalty", "frequency_penalty", "bias_token_ids", "bias_values", "logprobs", "allowed_token_ids", "prompt_logprobs")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    BIAS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BIAS_VALUES_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    bias_token_ids: _containers.RepeatedScalarFieldContainer[int]
    bias_values: _containers.RepeatedScalarFieldContainer[float]
    logprobs: int
    allowed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    prompt_logprobs: int
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., seed: _Optional[int] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., bias_token_ids: _Optional[_Iterable[int]] = ..., bias_values: _Optional[_Iterable[float]] = ..., logprobs: _Optional[int] = ..., allowed_token_ids: _Optional[_Iterable[int]] = ..., prompt_logprobs: _Optional[int] = ...) -> None: ...

class Stopping(_message.Message):
    __slots__ = ("max_new_tokens", "min_new_tokens", "eos_token_ids", "stop_token_ids", "stop_strings", "include_stop")
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    STOP_STRINGS_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_STOP_FIELD_NUMBER: _ClassVar[int]
    max_new_tokens: int
    min_new_tokens: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    stop_strings: _containers.RepeatedScalarFieldContainer[str]
    include_stop: bool
    def __init__(self, max_new_tokens: _Optional[int] = ..., min_new_tokens: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., stop_strings: _Optional[_Iterable[str]] = ..., include_stop: _Optional[bool] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ("number",)
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    number: int
    def __init__(self, number: _Optional[int] = ...) -> None: ...

class Doorbell(_message.Message):
    __slots__ = ("work_number",)
    WORK_NUMBER_FIELD_NUMBER: _ClassVar[int]
    work_number: int
    def __init__(self, work_number: _Optional[int] = ...) -> None: ...

class WatchCache(_message.Message):
    __slots__ = ("on",)
    ON_FIELD_NUMBER: _ClassVar[int]
    on: bool
    def __init__(self, on: _Optional[bool] = ...) -> None: ...

class Order(_message.Message):
    __slots__ = ("number", "flush_cache", "start_profile", "stop_profile", "prepare_weights", "switch_change", "drop_change", "release_kv", "prepare_placement", "count_experts", "prepare_generation", "work_number")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    FLUSH_CACHE_FIELD_NUMBER: _ClassVar[int]
    START_PROFILE_FIELD_NUMBER: _ClassVar[int]
    STOP_PROFILE_FIELD_NUMBER: _ClassVar[int]
    PREPARE_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    SWITCH_CHANGE_FIELD_NUMBER: _ClassVar[int]
    DROP_CHANGE_FIELD_NUMBER: _ClassVar[int]
    RELEASE_KV_FIELD_NUMBER: _ClassVar[int]
    PREPARE_PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    COUNT_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    PREPARE_GENERATION_FIELD_NUMBER: _ClassVar[int]
    WORK_NUMBER_FIELD_NUMBER: _ClassVar[int]
    number: int
    flush_cache: FlushCache
    start_profile: StartProfile
    stop_profile: StopProfile
    prepare_weights: PrepareWeights
    switch_change: int
    drop_change: int
    release_kv: bytes
    prepare_placement: PreparePlacement
    count_experts: CountExperts
    prepare_generation: PrepareGeneration
    work_number: int
    def __init__(self, number: _Optional[int] = ..., flush_cache: _Optional[_Union[FlushCache, _Mapping]] = ..., start_profile: _Optional[_Union[StartProfile, _Mapping]] = ..., stop_profile: _Optional[_Union[StopProfile, _Mapping]] = ..., prepare_weights: _Optional[_Union[PrepareWeights, _Mapping]] = ..., switch_change: _Optional[int] = ..., drop_change: _Optional[int] = ..., release_kv: _Optional[bytes] = ..., prepare_placement: _Optional[_Union[PreparePlacement, _Mapping]] = ..., count_experts: _Optional[_Union[CountExperts, _Mapping]] = ..., prepare_generation: _Optional[_Union[PrepareGeneration, _Mapping]] = ..., work_number: _Optional[int] = ...) -> None: ...

class PrepareWeights(_message.Message):
    __slots__ = ("change", "version", "path", "files")
    CHANGE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    change: int
    version: int
    path: str
    files: str
    def __init__(self, change: _Optional[int] = ..., version: _Optional[int] = ..., path: _Optional[str] = ..., files: _Optional[str] = ...) -> None: ...

class PreparePlacement(_message.Message):
    __slots__ = ("change", "placement")
    CHANGE_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    change: int
    placement: Placement
    def __init__(self, change: _Optional[int] = ..., placement: _Optional[_Union[Placement, _Mapping]] = ...) -> None: ...

class PrepareGeneration(_message.Message):
    __slots__ = ("change", "generation", "live", "placement")
    CHANGE_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    LIVE_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    change: int
    generation: int
    live: _containers.RepeatedScalarFieldContainer[int]
    placement: Placement
    def __init__(self, change: _Optional[int] = ..., generation: _Optional[int] = ..., live: _Optional[_Iterable[int]] = ..., placement: _Optional[_Union[Placement, _Mapping]] = ...) -> None: ...

class CountExperts(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FlushCache(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StartProfile(_message.Message):
    __slots__ = ("name", "steps")
    NAME_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    name: str
    steps: int
    def __init__(self, name: _Optional[str] = ..., steps: _Optional[int] = ...) -> None: ...

class StopProfile(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Shutdown(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FromRank(_message.Message):
    __slots__ = ("progress", "ready", "tokens", "freed", "request_failed", "statistics", "fatal", "introduction", "prompt_logprobs", "kv_events", "order_done", "running", "interrupted", "regrouped", "begun")
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FREED_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FAILED_FIELD_NUMBER: _ClassVar[int]
    STATISTICS_FIELD_NUMBER: _ClassVar[int]
    FATAL_FIELD_NUMBER: _ClassVar[int]
    INTRODUCTION_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    KV_EVENTS_FIELD_NUMBER: _ClassVar[int]
    ORDER_DONE_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    INTERRUPTED_FIELD_NUMBER: _ClassVar[int]
    REGROUPED_FIELD_NUMBER: _ClassVar[int]
    BEGUN_FIELD_NUMBER: _ClassVar[int]
    progress: Progress
    ready: Ready
    tokens: StepTokens
    freed: Freed
    request_failed: RequestFailed
    statistics: Statistics
    fatal: Fatal
    introduction: Introduction
    prompt_logprobs: PromptLogprobs
    kv_events: KvEventBatch
    order_done: OrderDone
    running: int
    interrupted: Fatal
    regrouped: Regrouped
    begun: Begun
    def __init__(self, progress: _Optional[_Union[Progress, _Mapping]] = ..., ready: _Optional[_Union[Ready, _Mapping]] = ..., tokens: _Optional[_Union[StepTokens, _Mapping]] = ..., freed: _Optional[_Union[Freed, _Mapping]] = ..., request_failed: _Optional[_Union[RequestFailed, _Mapping]] = ..., statistics: _Optional[_Union[Statistics, _Mapping]] = ..., fatal: _Optional[_Union[Fatal, _Mapping]] = ..., introduction: _Optional[_Union[Introduction, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[PromptLogprobs, _Mapping]] = ..., kv_events: _Optional[_Union[KvEventBatch, _Mapping]] = ..., order_done: _Optional[_Union[OrderDone, _Mapping]] = ..., running: _Optional[int] = ..., interrupted: _Optional[_Union[Fatal, _Mapping]] = ..., regrouped: _Optional[_Union[Regrouped, _Mapping]] = ..., begun: _Optional[_Union[Begun, _Mapping]] = ...) -> None: ...

class Begun(_message.Message):
    __slots__ = ("numbers", "adding", "copied")
    NUMBERS_FIELD_NUMBER: _ClassVar[int]
    ADDING_FIELD_NUMBER: _ClassVar[int]
    COPIED_FIELD_NUMBER: _ClassVar[int]
    numbers: _containers.RepeatedScalarFieldContainer[int]
    adding: int
    copied: int
    def __init__(self, numbers: _Optional[_Iterable[int]] = ..., adding: _Optional[int] = ..., copied: _Optional[int] = ...) -> None: ...

class Regrouped(_message.Message):
    __slots__ = ("generation", "load_seconds")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    LOAD_SECONDS_FIELD_NUMBER: _ClassVar[int]
    generation: int
    load_seconds: float
    def __init__(self, generation: _Optional[int] = ..., load_seconds: _Optional[float] = ...) -> None: ...

class OrderDone(_message.Message):
    __slots__ = ("number", "error", "blocks", "files", "nbytes", "rate", "seconds", "rows")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    RATE_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    number: int
    error: str
    blocks: int
    files: _containers.RepeatedScalarFieldContainer[str]
    nbytes: int
    rate: float
    seconds: float
    rows: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, number: _Optional[int] = ..., error: _Optional[str] = ..., blocks: _Optional[int] = ..., files: _Optional[_Iterable[str]] = ..., nbytes: _Optional[int] = ..., rate: _Optional[float] = ..., seconds: _Optional[float] = ..., rows: _Optional[_Iterable[int]] = ...) -> None: ...

class KvEventBatch(_message.Message):
    __slots__ = ("sequence_number", "timestamp", "block_size", "events", "snapshot")
    SEQUENCE_NUMBER_FIELD_NUMBER: _ClassVar[int]
    TIMESTAMP_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    sequence_number: int
    timestamp: float
    block_size: int
    events: _containers.RepeatedCompositeFieldContainer[KvEvent]
    snapshot: KvSnapshot
    def __init__(self, sequence_number: _Optional[int] = ..., timestamp: _Optional[float] = ..., block_size: _Optional[int] = ..., events: _Optional[_Iterable[_Union[KvEvent, _Mapping]]] = ..., snapshot: _Optional[_Union[KvSnapshot, _Mapping]] = ...) -> None: ...

class KvEvent(_message.Message):
    __slots__ = ("stored", "removed", "cleared")
    STORED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    CLEARED_FIELD_NUMBER: _ClassVar[int]
    stored: KvBlocksStored
    removed: KvBlocksRemoved
    cleared: KvCacheCleared
    def __init__(self, stored: _Optional[_Union[KvBlocksStored, _Mapping]] = ..., removed: _Optional[_Union[KvBlocksRemoved, _Mapping]] = ..., cleared: _Optional[_Union[KvCacheCleared, _Mapping]] = ...) -> None: ...

class KvBlocksStored(_message.Message):
    __slots__ = ("block_hashes", "parent_hash", "token_ids", "cache_salt")
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    PARENT_HASH_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    block_hashes: _containers.RepeatedScalarFieldContainer[int]
    parent_hash: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    cache_salt: str
    def __init__(self, block_hashes: _Optional[_Iterable[int]] = ..., parent_hash: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., cache_salt: _Optional[str] = ...) -> None: ...

class KvBlocksRemoved(_message.Message):
    __slots__ = ("block_hashes",)
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    block_hashes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, block_hashes: _Optional[_Iterable[int]] = ...) -> None: ...

class KvCacheCleared(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class KvSnapshot(_message.Message):
    __slots__ = ("index", "count", "blocks")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    index: int
    count: int
    blocks: int
    def __init__(self, index: _Optional[int] = ..., count: _Optional[int] = ..., blocks: _Optional[int] = ...) -> None: ...

class Introduction(_message.Message):
    __slots__ = ("address", "base", "key", "size", "device_base", "device_key", "device_size")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_BASE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_KEY_FIELD_NUMBER: _ClassVar[int]
    DEVICE_SIZE_FIELD_NUMBER: _ClassVar[int]
    address: bytes
    base: int
    key: int
    size: int
    device_base: int
    device_key: int
    device_size: int
    def __init__(self, address: _Optional[bytes] = ..., base: _Optional[int] = ..., key: _Optional[int] = ..., size: _Optional[int] = ..., device_base: _Optional[int] = ..., device_key: _Optional[int] = ..., device_size: _Optional[int] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("stage", "done", "total")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    stage: str
    done: int
    total: int
    def __init__(self, stage: _Optional[str] = ..., done: _Optional[int] = ..., total: _Optional[int] = ...) -> None: ...

class Ready(_message.Message):
    __slots__ = ("rank", "pid", "kv_blocks", "block_size", "weight_bytes", "kv_bytes", "exchange_bytes", "load_seconds", "attention", "kv_host_bytes", "kv_address", "kv_local", "gpus", "pid_space")
    RANK_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    EXCHANGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    LOAD_SECONDS_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_FIELD_NUMBER: _ClassVar[int]
    KV_HOST_BYTES_FIELD_NUMBER: _ClassVar[int]
    KV_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    KV_LOCAL_FIELD_NUMBER: _ClassVar[int]
    GPUS_FIELD_NUMBER: _ClassVar[int]
    PID_SPACE_FIELD_NUMBER: _ClassVar[int]
    rank: int
    pid: int
    kv_blocks: int
    block_size: int
    weight_bytes: int
    kv_bytes: int
    exchange_bytes: int
    load_seconds: float
    attention: str
    kv_host_bytes: int
    kv_address: str
    kv_local: str
    gpus: int
    pid_space: str
    def __init__(self, rank: _Optional[int] = ..., pid: _Optional[int] = ..., kv_blocks: _Optional[int] = ..., block_size: _Optional[int] = ..., weight_bytes: _Optional[int] = ..., kv_bytes: _Optional[int] = ..., exchange_bytes: _Optional[int] = ..., load_seconds: _Optional[float] = ..., attention: _Optional[str] = ..., kv_host_bytes: _Optional[int] = ..., kv_address: _Optional[str] = ..., kv_local: _Optional[str] = ..., gpus: _Optional[int] = ..., pid_space: _Optional[str] = ...) -> None: ...

class StepTokens(_message.Message):
    __slots__ = ("numbers", "token_ids", "finish", "cached_tokens", "logprobs", "top_counts", "top_token_ids", "top_logprobs", "queued_ns", "step", "weights")
    NUMBERS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOP_COUNTS_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_NS_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    numbers: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    finish: _containers.RepeatedScalarFieldContainer[FinishReason]
    cached_tokens: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    top_counts: _containers.RepeatedScalarFieldContainer[int]
    top_token_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    queued_ns: _containers.RepeatedScalarFieldContainer[int]
    step: int
    weights: int
    def __init__(self, numbers: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ..., finish: _Optional[_Iterable[_Union[FinishReason, str]]] = ..., cached_tokens: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[float]] = ..., top_counts: _Optional[_Iterable[int]] = ..., top_token_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ..., queued_ns: _Optional[_Iterable[int]] = ..., step: _Optional[int] = ..., weights: _Optional[int] = ...) -> None: ...

class PromptLogprobs(_message.Message):
    __slots__ = ("number", "start", "logprobs", "top_token_ids", "top_logprobs")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    number: int
    start: int
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    top_token_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, number: _Optional[int] = ..., start: _Optional[int] = ..., logprobs: _Optional[_Iterable[float]] = ..., top_token_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class Freed(_message.Message):
    __slots__ = ("number",)
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    number: int
    def __init__(self, number: _Optional[int] = ...) -> None: ...

class RequestFailed(_message.Message):
    __slots__ = ("number", "message", "by_grammar")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    BY_GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    number: int
    message: str
    by_grammar: bool
    def __init__(self, number: _Optional[int] = ..., message: _Optional[str] = ..., by_grammar: _Optional[bool] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("running", "waiting", "kv_blocks_used", "kv_blocks_total", "kv_blocks_cached", "steps", "prefix_queries", "prefix_hits", "preemptions", "prefix_host_hits", "host_blocks_total", "host_blocks_used", "kv_blocks_held")
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
    HOST_BLOCKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    HOST_BLOCKS_USED_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_HELD_FIELD_NUMBER: _ClassVar[int]
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
    host_blocks_total: int
    host_blocks_used: int
    kv_blocks_held: int
    def __init__(self, running: _Optional[int] = ..., waiting: _Optional[int] = ..., kv_blocks_used: _Optional[int] = ..., kv_blocks_total: _Optional[int] = ..., kv_blocks_cached: _Optional[int] = ..., steps: _Optional[int] = ..., prefix_queries: _Optional[int] = ..., prefix_hits: _Optional[int] = ..., preemptions: _Optional[int] = ..., prefix_host_hits: _Optional[int] = ..., host_blocks_total: _Optional[int] = ..., host_blocks_used: _Optional[int] = ..., kv_blocks_held: _Optional[int] = ...) -> None: ...

class Statistics(_message.Message):
    __slots__ = ("rank", "load", "histograms", "sums", "counters", "peer_waits", "expert_tokens", "last_steps")
    class HistogramsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: Histogram
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[Histogram, _Mapping]] = ...) -> None: ...
    class SumsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class ExpertTokensEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    RANK_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    HISTOGRAMS_FIELD_NUMBER: _ClassVar[int]
    SUMS_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    PEER_WAITS_FIELD_NUMBER: _ClassVar[int]
    EXPERT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LAST_STEPS_FIELD_NUMBER: _ClassVar[int]
    rank: int
    load: Load
    histograms: _containers.MessageMap[str, Histogram]
    sums: _containers.ScalarMap[str, int]
    counters: _containers.ScalarMap[str, int]
    peer_waits: _containers.RepeatedCompositeFieldContainer[PeerWait]
    expert_tokens: _containers.ScalarMap[int, int]
    last_steps: _containers.RepeatedCompositeFieldContainer[StepTrace]
    def __init__(self, rank: _Optional[int] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., histograms: _Optional[_Mapping[str, Histogram]] = ..., sums: _Optional[_Mapping[str, int]] = ..., counters: _Optional[_Mapping[str, int]] = ..., peer_waits: _Optional[_Iterable[_Union[PeerWait, _Mapping]]] = ..., expert_tokens: _Optional[_Mapping[int, int]] = ..., last_steps: _Optional[_Iterable[_Union[StepTrace, _Mapping]]] = ...) -> None: ...

class StepTrace(_message.Message):
    __slots__ = ("step", "start_ns", "tokens", "sequences", "micro_batches", "plan_ns", "vote_ns", "run_ns", "publish_ns")
    STEP_FIELD_NUMBER: _ClassVar[int]
    START_NS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    MICRO_BATCHES_FIELD_NUMBER: _ClassVar[int]
    PLAN_NS_FIELD_NUMBER: _ClassVar[int]
    VOTE_NS_FIELD_NUMBER: _ClassVar[int]
    RUN_NS_FIELD_NUMBER: _ClassVar[int]
    PUBLISH_NS_FIELD_NUMBER: _ClassVar[int]
    step: int
    start_ns: int
    tokens: int
    sequences: int
    micro_batches: int
    plan_ns: int
    vote_ns: int
    run_ns: int
    publish_ns: int
    def __init__(self, step: _Optional[int] = ..., start_ns: _Optional[int] = ..., tokens: _Optional[int] = ..., sequences: _Optional[int] = ..., micro_batches: _Optional[int] = ..., plan_ns: _Optional[int] = ..., vote_ns: _Optional[int] = ..., run_ns: _Optional[int] = ..., publish_ns: _Optional[int] = ...) -> None: ...

class Histogram(_message.Message):
    __slots__ = ("counts",)
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    counts: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, counts: _Optional[_Iterable[int]] = ...) -> None: ...

class PeerWait(_message.Message):
    __slots__ = ("op", "peer", "wait_ns")
    OP_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    WAIT_NS_FIELD_NUMBER: _ClassVar[int]
    op: str
    peer: int
    wait_ns: int
    def __init__(self, op: _Optional[str] = ..., peer: _Optional[int] = ..., wait_ns: _Optional[int] = ...) -> None: ...

class Fatal(_message.Message):
    __slots__ = ("error_class", "message", "field", "value_json", "allowed", "peer")
    ERROR_CLASS_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    VALUE_JSON_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    error_class: str
    message: str
    field: str
    value_json: str
    allowed: str
    peer: int
    def __init__(self, error_class: _Optional[str] = ..., message: _Optional[str] = ..., field: _Optional[str] = ..., value_json: _Optional[str] = ..., allowed: _Optional[str] = ..., peer: _Optional[int] = ...) -> None: ...
