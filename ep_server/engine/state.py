"""What an engine is set to, and what state it is in."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from ep_server.engine.balancer import BalanceSettings
from ep_server.engine.profiles import ProfileLimits
from ep_server.records import RankReady


class EngineState(StrEnum):
    """State of the server; names as in control.proto."""

    STARTING = "starting"
    SERVING = "serving"
    RECOVERING = "recovering"
    DRAINING = "draining"
    LOST = "lost"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """max_context: the model's, tokens. stream_buffer: tokens that may wait for one reader.

    ranks_per_node: None where there is one node.
    recover: start the ranks again after one is lost, and continue the requests; at most max_losses times
      within LOSS_SECONDS.
    checkpoint: path of the weights at the start. max_pause: longest switch to others, seconds.
    balance: None: experts stay where they are.
    """

    max_context: int
    max_running: int = 64
    max_queue: int = 256
    max_streams: int = 1024
    stream_buffer: int = 4096
    profiles: ProfileLimits = field(default_factory=ProfileLimits)
    ranks_per_node: int | None = None
    recover: bool = False
    max_losses: int = 5
    checkpoint: str = ""
    max_pause: float = 10.0
    balance: BalanceSettings | None = None


@dataclass(frozen=True, slots=True)
class EngineStatistics:
    """Current counts. releasing: ended, KV blocks not yet free; included in in_flight."""

    state: EngineState
    in_flight: int
    running: int
    waiting: int
    releasing: int
    open_streams: int
    submitted: int


def live_nodes(ready: Iterable[RankReady], ranks_per_node: int) -> int:
    """Nodes whose ranks serve; 0 until they are warm."""
    return len({rank.rank // ranks_per_node for rank in ready})
