"""The settings of the network between hosts, for one rank. Needs no torch.

docs/reference/fabric.md says what each one does on InfiniBand, RoCE and EFA. Durations in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass

from ep_server import _C
from ep_server.errors import ConfigError, StartupError

# Where a rank's memory is: the provider's address; base, key and bytes on the host, then on a device.
EndpointAddress = tuple[bytes, int, int, int, int, int, int]

SESSION_BITS = 17  # of the number of a group: as many as a greeting of its ranks carries

MAX_TRAFFIC_CLASS = (1 << 32) - 1
MAX_QUEUE_DEPTH = 1 << 16
MAX_GID_INDEX = 255
MAX_DELAY_SECONDS = 1.0
# Writes of one operation to one peer besides a token's row each: ids, weights, and its completion record.
WRITES_BESIDE_ROWS = 3
DSCP, MAX_DSCP = 0x100, 63  # libfabric's mark of a differentiated services code point
TRAFFIC_CLASSES = {
    "best_effort": 0x200,
    "low_latency": 0x201,
    "dedicated_access": 0x202,
    "bulk_data": 0x203,
    "scavenger": 0x204,
    "network_ctrl": 0x205,
}


@dataclass(frozen=True, slots=True)
class FabricOptions:
    """Settings of the network, for one rank.

    library: path of libfabric.so.1; "" = the loader finds it.
    provider: as libfabric names it, for example "verbs;ofi_rxm", "efa", "tcp"; "" = chosen by capability.
    domain: device or interface, for example "mlx5_0", "eth0"; "" = the first of the provider.
    address: of this host on that network; "" = the provider's choice. Names the loopback in tests.
    interface: network interface to which verbs and TCP keep; "" = the provider's choice.
    traffic_class: a value of libfabric's tclass (see traffic_class()); -1 = the provider's default.
    gid_index: of the port's GID table, verbs alone; -1 = the provider's default.
    queue_depth: writes in flight of this rank, to all peers; 0 = the provider's default.
    adaptive_routing: false = request writes in order, for which networks use a single path.
    connect_seconds: until every rank must have answered. linger_seconds: until close() no longer waits for
      the other ranks' good-byes.
    disorder, strict_memory: for tests on networks that are kinder than production's (csrc/exchange/fabric/
      network_emulation.hpp): seed of the order of writes and completions, 0 = unchanged; addresses and
      keys as NICs with memory registration need them.
    delay_seconds: for tests and benchmarks: messages become visible this much after they were sent, as over
      a longer line, and at once if they arrive or are looked for later. The sender does not wait. Greetings,
      heartbeats and aborts are not delayed. Needs ranks of one machine, which share a clock; all set it.
    device_copies: for tests: accepts providers that copy GPU memory through host memory.

    libfabric reads interface, gid_index and queue_depth once in a process, when it is loaded. A setting that
    the chosen provider has no use for is refused, by name.
    Raises: ConfigError.
    """

    library: str = ""
    provider: str = ""
    domain: str = ""
    address: str = ""
    interface: str = ""
    traffic_class: int = -1
    gid_index: int = -1
    queue_depth: int = 0
    adaptive_routing: bool = True
    connect_seconds: float = 60.0
    linger_seconds: float = 2.0
    disorder: int = 0
    delay_seconds: float = 0.0
    strict_memory: bool = False
    device_copies: bool = False

    def __post_init__(self) -> None:
        for field, low, high in (
            ("traffic_class", -1, MAX_TRAFFIC_CLASS),
            ("gid_index", -1, MAX_GID_INDEX),
            ("queue_depth", 0, MAX_QUEUE_DEPTH),
        ):
            if not low <= getattr(self, field) <= high:
                raise ConfigError(field, getattr(self, field), f"{low} to {high}")
        if self.connect_seconds <= 0:
            raise ConfigError("connect_seconds", self.connect_seconds, "above 0")
        if self.linger_seconds < 0:
            raise ConfigError("linger_seconds", self.linger_seconds, "at least 0")
        if not 0 <= self.delay_seconds <= MAX_DELAY_SECONDS:
            raise ConfigError("delay_seconds", self.delay_seconds, f"0 to {MAX_DELAY_SECONDS}")

    def check_depth(self, max_tokens: int) -> None:
        """Raises ConfigError unless an operation with max_tokens tokens fits, on its way to one peer."""
        least = max_tokens + WRITES_BESIDE_ROWS
        if 0 < self.queue_depth < least:
            allowed = f"0 (the provider's own) or {least} to {MAX_QUEUE_DEPTH}: max_tokens is {max_tokens}"
            raise ConfigError("queue_depth", self.queue_depth, allowed)

    def native(self, *, device_memory: bool = False) -> _C.FabricOptions:
        """The same for csrc. Raises StartupError where this build has no libfabric.

        Args:
            device_memory: only providers that reach the memory of devices will do (FI_HMEM).
        """
        if not _C.FABRIC:
            raise StartupError(
                "this build cannot reach other hosts: it was made without the headers of libfabric"
                " (Debian: libfabric-dev); build it again with them"
            )
        return _C.FabricOptions(
            library=self.library,
            provider=self.provider,
            domain=self.domain,
            address=self.address,
            interface=self.interface,
            traffic_class=self.traffic_class,
            gid_index=self.gid_index,
            queue_depth=self.queue_depth,
            adaptive_routing=self.adaptive_routing,
            disorder=self.disorder,
            delay_ns=round(self.delay_seconds * 1e9),
            strict_memory=self.strict_memory,
            device_memory=device_memory,
            device_copies=self.device_copies,
        )


def traffic_class(field: str, text: str) -> int:
    """libfabric's number of a class: "" = -1, a DSCP, one of TRAFFIC_CLASSES. Raises ConfigError."""
    if not text:
        return -1
    if text in TRAFFIC_CLASSES:
        return TRAFFIC_CLASSES[text]
    if text.isascii() and text.isdigit() and int(text) <= MAX_DSCP:
        return DSCP | int(text)
    raise ConfigError(field, text, f"a DSCP from 0 to {MAX_DSCP}, or one of {', '.join(TRAFFIC_CLASSES)}")
