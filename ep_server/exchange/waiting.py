"""How long an exchange waits and what follows: the settings that every transport of csrc shares."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TypedDict

from ep_server.errors import ConfigError
from ep_server.exchange.api import ExchangeSpec

DEFAULT_SPIN_US = 50


class Timing(TypedDict):
    """Keywords of the native exchanges; durations in ns."""

    timeout_ns: int
    liveness_ns: int
    spin_ns: int
    mask_on_timeout: bool


@dataclass(frozen=True, slots=True)
class Waiting:
    """See ShmExchange, whose keywords these are. Raises ConfigError."""

    spin_us: int = -1
    liveness_seconds: float = 30.0
    on_timeout: str = "raise"

    def __post_init__(self) -> None:
        if self.on_timeout not in {"raise", "mask"}:
            raise ConfigError("on_timeout", self.on_timeout, "one of raise, mask")
        if self.spin_us < -1:
            raise ConfigError("spin_us", self.spin_us, "at least -1")
        if self.liveness_seconds <= 0:
            raise ConfigError("liveness_seconds", self.liveness_seconds, "above 0")

    def native(self, spec: ExchangeSpec, ranks_here: int) -> Timing:
        """The same for csrc. spin_us -1 is 0 where the ranks of this host outnumber usable cores, else 50."""
        spin_us = self.spin_us
        if spin_us == -1:
            spin_us = DEFAULT_SPIN_US if ranks_here <= len(os.sched_getaffinity(0)) else 0
        return {
            "timeout_ns": spec.timeout_ns,
            "liveness_ns": int(self.liveness_seconds * 1e9),
            "spin_ns": spin_us * 1000,
            "mask_on_timeout": self.on_timeout == "mask",
        }
