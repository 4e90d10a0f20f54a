"""Native exchange and CPU kernels. Addresses are Tensor.data_ptr(); 0 means absent.

Written by `make stubs` from the built module.
"""

from collections.abc import Sequence

BULK_UNIT: int
BULK_MAX_ROWS: int
BULK_MAX_LOCAL_EXPERTS: int
MAX_RANKS: int
MAX_TOP_K: int
MAX_BANKS: int
VOTE_BYTES: int
LINE_BYTES: int
HEAD_BYTES: int
PHASES: tuple[str, ...]
OPS: tuple[str, ...]
FABRIC: bool

class Geometry:
    """What all ranks agree on. payload and reduction are positions in exchange.Payload and .Reduction."""
    def __init__(
        self,
        *,
        num_ranks: int,
        num_experts: int,
        max_tokens: int,
        hidden: int,
        top_k: int,
        num_banks: int,
        payload: int,
        reduction: int,
        placement_hash: int,
    ) -> None: ...
    @property
    def num_ranks(self) -> int: ...
    @property
    def num_experts(self) -> int: ...
    @property
    def max_tokens(self) -> int: ...
    @property
    def hidden(self) -> int: ...
    @property
    def top_k(self) -> int: ...
    @property
    def num_banks(self) -> int: ...
    @property
    def payload(self) -> int: ...
    @property
    def reduction(self) -> int: ...
    @property
    def placement_hash(self) -> int: ...

class Layout:
    """Byte offsets in one rank's region. Indices are not checked."""
    def __init__(self, geometry: Geometry) -> None: ...
    @property
    def row_bytes(self) -> int: ...
    @property
    def scale_offset(self) -> int: ...
    @property
    def scale_bytes(self) -> int: ...
    @property
    def row_pitch(self) -> int: ...
    @property
    def combine_bytes(self) -> int: ...
    @property
    def combine_pitch(self) -> int: ...
    @property
    def choices_per_token(self) -> int: ...
    @property
    def meta(self) -> int: ...
    @property
    def rows(self) -> int: ...
    @property
    def combine(self) -> int: ...
    @property
    def total(self) -> int: ...
    @property
    def device_in(self) -> int: ...
    @property
    def device_out(self) -> int: ...
    @property
    def group_bytes(self) -> int: ...
    def region(self, rank: int) -> int:
        """Where a rank's region begins in the group's segment."""
    def ids_at(self, bank: int, source: int) -> int: ...
    def weights_at(self, bank: int, source: int) -> int: ...
    def row_at(self, bank: int, source: int, token: int) -> int: ...
    def rank_sum_at(self, bank: int, expert_rank: int, token: int) -> int: ...
    def choice_at(self, bank: int, expert_rank: int, token: int, k: int) -> int: ...
    def regions(self) -> list[tuple[str, int, int]]: ...

class Segment:
    """A mapped group segment."""
    def __init__(self, fd: int) -> None: ...
    @property
    def geometry(self) -> Geometry: ...
    @property
    def regions(self) -> list[int]: ...
    @property
    def bytes(self) -> int: ...
    def abort_without(self, lost: int, generation: int) -> None:
        """Ends every wait of the group; all ranks but `lost`, which has ended, report that it is lost."""

class RowKernels:
    """Row arithmetic for one instruction set."""
    @property
    def name(self) -> str: ...
    def weighted_sum(self, fp32: bool, rows: Sequence[int], weights: int, hidden: int, out: int) -> None: ...
    def quantise(self, x: int, hidden: int, payload: int, q: int, scales: int) -> None: ...

class RegionView:
    """Memory of one rank, as a buffer of bytes."""

class DispatchState:
    """One dispatch, between its halves and until the handle is dropped."""
    @property
    def epoch(self) -> int: ...
    @property
    def bank(self) -> int: ...
    @property
    def received(self) -> bool: ...
    @property
    def tokens(self) -> int: ...
    @property
    def has_weights(self) -> bool: ...
    @property
    def arrived(self) -> int: ...
    @property
    def num_rows(self) -> int: ...
    def wait_ns(self, num_ranks: int) -> list[int]: ...

class CombineState:
    """One combine, between its halves."""
    @property
    def epoch(self) -> int: ...
    @property
    def bank(self) -> int: ...
    @property
    def received(self) -> bool: ...
    def wait_ns(self, num_ranks: int) -> list[int]: ...

class Exchange:
    """One rank's end of a group. Calls release the GIL; one thread at a time may call."""
    def __init__(
        self,
        *,
        fd: int,
        geometry: Geometry,
        rank: int,
        placement: Sequence[int],
        timeout_ns: int,
        liveness_ns: int,
        spin_ns: int,
        mask_on_timeout: bool,
    ) -> None: ...
    def dispatch_send(
        self, x: int, ids: int, weights: int, tokens: int, once_per_host: bool = False
    ) -> DispatchState: ...
    def dispatch_wait(self, state: DispatchState) -> None: ...
    def dispatch_expand(
        self, state: DispatchState, view: int, rows: int, scales: int, row_ids: int, counts: int, offsets: int
    ) -> None: ...
    def dispatch_release(self, state: DispatchState) -> None: ...
    def combine_send(
        self, dispatch: DispatchState, expert_out: int, weights: int, reduction: int
    ) -> CombineState: ...
    def combine_recv(self, state: CombineState, out: int) -> None: ...
    def combine_release(self, state: CombineState) -> None: ...
    def open_bank(self, op: int) -> int:
        """Waits until the operation's next bank is free; its number."""
    def output_table(
        self, state: DispatchState, reduction: int, slots: int, terms: int, weights: int, width: int
    ) -> int:
        """Which rows combine_send returns; see row_tables.hpp."""
    def sum_table(self, state: CombineState, terms: int, weights: int, width: int) -> None:
        """Which rows combine_recv sums; see row_tables.hpp."""
    def all_gather(self, record: bytes, limit_ns: int = 0) -> list[bytes]:
        """Gathers a record from every rank. limit_ns: how long to wait for a peer that is alive; 0 = for ever."""
    def abort(self) -> None:
        """Ends all waits of the group with GroupAborted."""
    def reset(self, dead: int, generation: int = 0) -> None:
        """Starts a generation, 0 = the next one, without the ranks whose bits are set in `dead`."""
    @property
    def masked(self) -> int: ...
    def mask(self, ranks: int) -> None: ...
    @property
    def generation(self) -> int: ...
    @property
    def head(self) -> int: ...
    def statistics(self) -> dict[str, object]: ...
    def source_map(self, state: DispatchState, src_info: int, layout_range: int) -> None: ...
    def set_faults(self, faults: Sequence[tuple[int, int, int, int, int, int]]) -> None: ...
    def rows_region(self) -> memoryview: ...

class FabricOptions:
    def __init__(
        self,
        *,
        library: str,
        provider: str,
        domain: str,
        address: str,
        interface: str,
        traffic_class: int,
        gid_index: int,
        queue_depth: int,
        adaptive_routing: bool,
        disorder: int,
        delay_ns: int,
        strict_memory: bool,
        device_memory: bool,
        device_copies: bool,
    ) -> None: ...

class FabricPort:
    """One rank's endpoint and the exchange over it."""
    def __init__(
        self,
        *,
        geometry: Geometry,
        rank: int,
        placement: Sequence[int],
        timeout_ns: int,
        liveness_ns: int,
        spin_ns: int,
        mask_on_timeout: bool,
        options: FabricOptions,
        hosts: Sequence[int],
        segment: int,
        bells: Sequence[int],
        device: tuple[int, int, int, int, int, int] | None = None,
    ) -> None: ...
    @property
    def description(self) -> str: ...
    @property
    def address(self) -> tuple[bytes, int, int, int, int, int, int]: ...
    def connect(
        self, addresses: Sequence[tuple[bytes, int, int, int, int, int, int]], session: int, timeout_ns: int
    ) -> None: ...
    def close(self, linger_ns: int) -> None: ...
    @property
    def writes(self) -> int: ...
    @property
    def exchange(self) -> Exchange: ...

class FabricProbe:
    """One of two bare endpoints, for the benchmark: connect to the other's address, then both call the same."""
    def __init__(self, options: FabricOptions, bytes: int) -> None: ...
    @property
    def description(self) -> str: ...
    @property
    def address(self) -> tuple[bytes, int, int, int, int, int, int]: ...
    def connect(self, peer: tuple[bytes, int, int, int, int, int, int]) -> None: ...
    def latency(self, bytes: int, rounds: int, first: bool, timeout_ns: int) -> list[int]: ...
    def stream(self, bytes: int, writes: int, window: int, first: bool, timeout_ns: int) -> int: ...

class FabricLane:
    """One end of memory that one process writes into another one's. Its buffer is that memory."""
    def __init__(self, options: FabricOptions, bytes: int) -> None: ...
    @property
    def description(self) -> str: ...
    @property
    def address(self) -> tuple[bytes, int, int, int, int, int, int]: ...
    def connect(self, peer: tuple[bytes, int, int, int, int, int, int]) -> None: ...
    def write(self, at: int, bytes: int, number: int, timeout_ns: int) -> None:
        """Copies some bytes to the same place at the peer. Raises: StartupError, IndexError."""
    def wait(self, number: int, timeout_ns: int) -> bool:
        """Waits for a write of the peer; whether it is here. Raises: StartupError."""

class Compute:
    """Kernels, threads and scratch memory of one rank. One caller at a time. bfloat16=False means float32."""
    def __init__(self, threads: int = 1, isa: str = "auto") -> None: ...
    @property
    def isa(self) -> str: ...
    @property
    def threads(self) -> int: ...
    def linear(
        self,
        bfloat16: bool,
        x: int,
        rows: int,
        x_stride: int,
        x_batch: int,
        weight: int,
        bias: int,
        batch: int,
        n: int,
        k: int,
        out: int,
        out_stride: int,
        out_batch: int,
        out_float: bool,
    ) -> None: ...
    def expert_ffn(
        self,
        bfloat16: bool,
        x: int,
        rows: int,
        offsets: int,
        experts: int,
        hidden: int,
        ffn: int,
        gate_up: int,
        down: int,
        out: int,
    ) -> None: ...
    def attention(
        self,
        bfloat16: bool,
        q: int,
        rows: int,
        q_stride: int,
        heads: int,
        kv_heads: int,
        k_dim: int,
        v_dim: int,
        k: int,
        v: int,
        blocks: int,
        blocks_stride: int,
        block_size: int,
        sequence: int,
        positions: int,
        window: int,
        scale: float,
        out: int,
    ) -> None: ...
    def norm(
        self,
        bfloat16: bool,
        x: int,
        rows: int,
        x_stride: int,
        groups: int,
        dim: int,
        weight: int,
        eps: float,
        out: int,
    ) -> None: ...

def device_region(geometry: Geometry, heap_bytes: int = 0) -> int:
    """Size of a rank's region on a GPU."""

def bulk_block(
    *,
    rows: int,
    row_bytes: int,
    scale_words: int = 0,
    top_k: int = 0,
    with_ids: bool = False,
    with_sources: bool = False,
) -> tuple[int, int, int, int, int]: ...
def create_segment(geometry: Geometry) -> int: ...
def row_kernels() -> list[RowKernels]: ...
def fabric_providers(options: FabricOptions) -> list[tuple[str, str, str, str]]:
    """(provider, fabric, domain, what is missing) of every provider found."""

def fabric_chosen(options: FabricOptions) -> str:
    """The provider that would be opened, in one line."""

def host_segment_bytes(geometry: Geometry, ranks: int) -> int: ...
def create_host_segment(geometry: Geometry, ranks: int) -> int: ...
def compute_isas() -> list[str]:
    """Names of the instruction sets that run here, best first."""

def packed_linear_words(bfloat16: bool, n: int, k: int) -> int: ...
def packed_gated_words(bfloat16: bool, ffn: int, k: int) -> int: ...
def pack_linear(bfloat16: bool, weight: int, n: int, k: int, out: int) -> None: ...
def pack_gated(bfloat16: bool, gate_up: int, ffn: int, k: int, out: int) -> None: ...
