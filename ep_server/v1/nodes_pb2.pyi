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
    __slots__ = ("hello", "spawned", "rank_closed", "rank_exited", "failed", "stop_asked", "spawn", "rank_signal", "state", "end", "rank_frame")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    SPAWNED_FIELD_NUMBER: _ClassVar[int]
    RANK_CLOSED_FIELD_NUMBER: _ClassVar[int]
    RANK_EXITED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    STOP_ASKED_FIELD_NUMBER: _ClassVar[int]
    SPAWN_FIELD_NUMBER: _ClassVar[int]
    RANK_SIGNAL_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    RANK_FRAME_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    spawned: Spawned
    rank_closed: RankClosed
    rank_exited: RankExited
    failed: Failed
    stop_asked: StopAsked
    spawn: Spawn
    rank_signal: RankSignal
    state: State
    end: End
    rank_frame: RankFrame
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., spawned: _Optional[_Union[Spawned, _Mapping]] = ..., rank_closed: _Optional[_Union[RankClosed, _Mapping]] = ..., rank_exited: _Optional[_Union[RankExited, _Mapping]] = ..., failed: _Optional[_Union[Failed, _Mapping]] = ..., stop_asked: _Optional[_Union[StopAsked, _Mapping]] = ..., spawn: _Optional[_Union[Spawn, _Mapping]] = ..., rank_signal: _Optional[_Union[RankSignal, _Mapping]] = ..., state: _Optional[_Union[State, _Mapping]] = ..., end: _Optional[_Union[End, _Mapping]] = ..., rank_frame: _Optional[_Union[RankFrame, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("node", "version", "config_json", "model_json", "kv_blocks")
    NODE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CONFIG_JSON_FIELD_NUMBER: _ClassVar[int]
    MODEL_JSON_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    node: int
    version: str
    config_json: str
    model_json: str
    kv_blocks: int
    def __init__(self, node: _Optional[int] = ..., version: _Optional[str] = ..., config_json: _Optional[str] = ..., model_json: _Optional[str] = ..., kv_blocks: _Optional[int] = ...) -> None: ...

class Spawn(_message.Message):
    __slots__ = ("kv_blocks",)
    KV_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    kv_blocks: int
    def __init__(self, kv_blocks: _Optional[int] = ...) -> None: ...

class Spawned(_message.Message):
    __slots__ = ("pids",)
    PIDS_FIELD_NUMBER: _ClassVar[int]
    pids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, pids: _Optional[_Iterable[int]] = ...) -> None: ...

class RankFrame(_message.Message):
    __slots__ = ("rank", "payload")
    RANK_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    rank: int
    payload: bytes
    def __init__(self, rank: _Optional[int] = ..., payload: _Optional[bytes] = ...) -> None: ...

class RankClosed(_message.Message):
    __slots__ = ("rank", "reason")
    RANK_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    rank: int
    reason: str
    def __init__(self, rank: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class RankExited(_message.Message):
    __slots__ = ("rank", "code")
    RANK_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    rank: int
    code: int
    def __init__(self, rank: _Optional[int] = ..., code: _Optional[int] = ...) -> None: ...

class RankSignal(_message.Message):
    __slots__ = ("rank", "number")
    RANK_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    rank: int
    number: int
    def __init__(self, rank: _Optional[int] = ..., number: _Optional[int] = ...) -> None: ...

class Failed(_message.Message):
    __slots__ = ("message",)
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    message: str
    def __init__(self, message: _Optional[str] = ...) -> None: ...

class StopAsked(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class State(_message.Message):
    __slots__ = ("serving",)
    SERVING_FIELD_NUMBER: _ClassVar[int]
    serving: bool
    def __init__(self, serving: _Optional[bool] = ...) -> None: ...

class End(_message.Message):
    __slots__ = ("code", "reason")
    CODE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    code: int
    reason: str
    def __init__(self, code: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...
