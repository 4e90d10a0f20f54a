from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Bundle(_message.Message):
    __slots__ = ("messages",)
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[NodeMessage]
    def __init__(self, messages: _Optional[_Iterable[_Union[NodeMessage, _Mapping]]] = ...) -> None: ...

class NodeMessage(_message.Message):
    __slots__ = ("hello", "spawned", "rank_closed", "rank_exited", "failed", "stop_asked", "planned", "spawn", "rank_signal", "state", "end", "plan", "end_ranks", "released", "rank_frame")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    SPAWNED_FIELD_NUMBER: _ClassVar[int]
    RANK_CLOSED_FIELD_NUMBER: _ClassVar[int]
    RANK_EXITED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    STOP_ASKED_FIELD_NUMBER: _ClassVar[int]
    PLANNED_FIELD_NUMBER: _ClassVar[int]
    SPAWN_FIELD_NUMBER: _ClassVar[int]
    RANK_SIGNAL_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    END_RANKS_FIELD_NUMBER: _ClassVar[int]
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    RANK_FRAME_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    spawned: Spawned
    rank_closed: RankClosed
    rank_exited: RankExited
    failed: Failed
    stop_asked: StopAsked
    planned: Planned
    spawn: Spawn
    rank_signal: RankSignal
    state: State
    end: End
    plan: Plan
    end_ranks: EndRanks
    released: Released
    rank_frame: RankFrame
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., spawned: _Optional[_Union[Spawned, _Mapping]] = ..., rank_closed: _Optional[_Union[RankClosed, _Mapping]] = ..., rank_exited: _Optional[_Union[RankExited, _Mapping]] = ..., failed: _Optional[_Union[Failed, _Mapping]] = ..., stop_asked: _Optional[_Union[StopAsked, _Mapping]] = ..., planned: _Optional[_Union[Planned, _Mapping]] = ..., spawn: _Optional[_Union[Spawn, _Mapping]] = ..., rank_signal: _Optional[_Union[RankSignal, _Mapping]] = ..., state: _Optional[_Union[State, _Mapping]] = ..., end: _Optional[_Union[End, _Mapping]] = ..., plan: _Optional[_Union[Plan, _Mapping]] = ..., end_ranks: _Optional[_Union[EndRanks, _Mapping]] = ..., released: _Optional[_Union[Released, _Mapping]] = ..., rank_frame: _Optional[_Union[RankFrame, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("node", "version", "config_json", "model_json")
    NODE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CONFIG_JSON_FIELD_NUMBER: _ClassVar[int]
    MODEL_JSON_FIELD_NUMBER: _ClassVar[int]
    node: int
    version: str
    config_json: str
    model_json: str
    def __init__(self, node: _Optional[int] = ..., version: _Optional[str] = ..., config_json: _Optional[str] = ..., model_json: _Optional[str] = ...) -> None: ...

class Plan(_message.Message):
    __slots__ = ("group", "nodes", "weights_version", "weights_path", "weights_files")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_VERSION_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_PATH_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FILES_FIELD_NUMBER: _ClassVar[int]
    group: int
    nodes: _containers.RepeatedScalarFieldContainer[int]
    weights_version: int
    weights_path: str
    weights_files: str
    def __init__(self, group: _Optional[int] = ..., nodes: _Optional[_Iterable[int]] = ..., weights_version: _Optional[int] = ..., weights_path: _Optional[str] = ..., weights_files: _Optional[str] = ...) -> None: ...

class Planned(_message.Message):
    __slots__ = ("group", "kv_blocks")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    group: int
    kv_blocks: int
    def __init__(self, group: _Optional[int] = ..., kv_blocks: _Optional[int] = ...) -> None: ...

class EndRanks(_message.Message):
    __slots__ = ("group",)
    GROUP_FIELD_NUMBER: _ClassVar[int]
    group: int
    def __init__(self, group: _Optional[int] = ...) -> None: ...

class Released(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Spawn(_message.Message):
    __slots__ = ("kv_blocks", "group", "urgent")
    KV_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    URGENT_FIELD_NUMBER: _ClassVar[int]
    kv_blocks: int
    group: int
    urgent: bool
    def __init__(self, kv_blocks: _Optional[int] = ..., group: _Optional[int] = ..., urgent: _Optional[bool] = ...) -> None: ...

class Spawned(_message.Message):
    __slots__ = ("pids", "group")
    PIDS_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    pids: _containers.RepeatedScalarFieldContainer[int]
    group: int
    def __init__(self, pids: _Optional[_Iterable[int]] = ..., group: _Optional[int] = ...) -> None: ...

class RankFrame(_message.Message):
    __slots__ = ("rank", "payload", "group")
    RANK_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    rank: int
    payload: bytes
    group: int
    def __init__(self, rank: _Optional[int] = ..., payload: _Optional[bytes] = ..., group: _Optional[int] = ...) -> None: ...

class RankClosed(_message.Message):
    __slots__ = ("rank", "reason", "group")
    RANK_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    rank: int
    reason: str
    group: int
    def __init__(self, rank: _Optional[int] = ..., reason: _Optional[str] = ..., group: _Optional[int] = ...) -> None: ...

class RankExited(_message.Message):
    __slots__ = ("rank", "code", "group")
    RANK_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    rank: int
    code: int
    group: int
    def __init__(self, rank: _Optional[int] = ..., code: _Optional[int] = ..., group: _Optional[int] = ...) -> None: ...

class RankSignal(_message.Message):
    __slots__ = ("rank", "number", "group")
    RANK_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    rank: int
    number: int
    group: int
    def __init__(self, rank: _Optional[int] = ..., number: _Optional[int] = ..., group: _Optional[int] = ...) -> None: ...

class Failed(_message.Message):
    __slots__ = ("message", "group", "unfit")
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    UNFIT_FIELD_NUMBER: _ClassVar[int]
    message: str
    group: int
    unfit: bool
    def __init__(self, message: _Optional[str] = ..., group: _Optional[int] = ..., unfit: _Optional[bool] = ...) -> None: ...

class StopAsked(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class State(_message.Message):
    __slots__ = ("serving",)
    SERVING_FIELD_NUMBER: _ClassVar[int]
    serving: bool
    def __init__(self, serving: _Optional[bool] = ...) -> None: ...

class End(_message.Message):
    __slots__ = ("code", "reason", "refused")
    CODE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    code: int
    reason: str
    refused: bool
    def __init__(self, code: _Optional[int] = ..., reason: _Optional[str] = ..., refused: _Optional[bool] = ...) -> None: ...
