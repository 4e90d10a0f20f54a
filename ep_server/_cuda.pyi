"""NVLink exchange, Hopper kernels and loader of files. Addresses are Tensor.data_ptr(); 0 means absent.

Written by `make stubs` from the built module.
"""

from collections.abc import Sequence

MAX_RANKS: int
BAD_IDS: int
CAPACITY: int
REQUESTED: int

class BulkPlanArgs:
    def __init__(
        self,
        *,
        in_rank: int,
        expert_tokens: int,
        places: int,
        prefix: int,
        ticket: int,
        tokens: int,
        local_experts: int,
        alignment: int,
    ) -> None: ...

class BulkDispatchArgs:
    def __init__(
        self,
        *,
        x: int,
        scales: int = 0,
        ids: int = 0,
        weights: int = 0,
        places: int,
        prefix: int,
        offset: int,
        capacity: int,
        tokens: int,
        row_bytes: int,
        scale_words: int = 0,
        top_k: int = 0,
        local_experts: int = 0,
        scale_row: int = 0,
        scale_column: int = 0,
        sources: bool = False,
        fill: bool = False,
    ) -> None: ...

class BulkCombineArgs:
    def __init__(
        self,
        *,
        x: int,
        weights: int = 0,
        first_bias: int = 0,
        second_bias: int = 0,
        places: int,
        prefix: int,
        out: int,
        out_weights: int = 0,
        offset: int,
        capacity: int,
        tokens: int,
        row_bytes: int,
        top_k: int = 0,
    ) -> None: ...

class ManyRouteArgs:
    def __init__(
        self,
        *,
        x: int,
        ids: int,
        in_rank: int,
        placed: int,
        codes: int,
        scales: int,
        tokens: int,
        stride: int,
    ) -> None: ...

class ManyOrderArgs:
    def __init__(
        self,
        *,
        ids: int,
        prefix: int,
        sums: int,
        counts: int,
        offsets: int,
        row_ids: int,
        places: int,
        expert_stats: int,
        rows: int,
        top_k: int,
        capacity: int,
    ) -> None: ...

class ManySumArgs:
    def __init__(
        self,
        *,
        expert_out: int,
        ids: int,
        weights: int,
        places: int,
        prefix: int,
        out: int,
        rows: int,
        top_k: int,
        capacity: int,
    ) -> None: ...

class DispatchSendArgs:
    def __init__(
        self, *, x: int = 0, ids: int = 0, weights: int = 0, tokens_on_device: int = 0, tokens: int = 0
    ) -> None: ...

class DispatchRecvArgs:
    def __init__(
        self,
        *,
        view: int = 0,
        capacity: int = 0,
        scale_pitch: int = 0,
        rows: int = 0,
        scales: int = 0,
        row_ids: int = 0,
        counts: int = 0,
        offsets: int = 0,
        src_info: int = 0,
        layout_range: int = 0,
        expert_stats: int = 0,
        wait_stats: int = 0,
        next_reads_ahead: bool = False,
    ) -> None: ...

class CombineSendArgs:
    def __init__(
        self,
        *,
        expert_out: int = 0,
        weights: int = 0,
        reduction: int = 0,
        wire: int = 0,
        pushes_weights: bool = False,
        frees_dispatch: bool = False,
    ) -> None: ...

class AddNorm:
    def __init__(self, *, residual: int = 0, shared: int = 0, weight: int = 0, eps: float = 0.0) -> None: ...

class CombineRecvArgs:
    def __init__(
        self,
        *,
        out: int = 0,
        weights: int = 0,
        reduction: int = 0,
        wire: int = 0,
        wait_stats: int = 0,
        next_reads_ahead: bool = False,
        norm: AddNorm = ...,
    ) -> None: ...

class PeerMemory:
    """Zeroed GPU memory that other processes of this host can map."""
    def __init__(self, device: int, bytes: int, seconds: float) -> None:
        """seconds: for the GPU to zero it."""
    @staticmethod
    def attach(device: int, bytes: int, fd: int) -> PeerMemory: ...
    def export_fd(self) -> int: ...
    @property
    def address(self) -> int: ...

class Group:
    """One rank's end of a group of GPUs."""
    def __init__(
        self,
        *,
        num_ranks: int,
        max_tokens: int,
        hidden: int,
        top_k: int,
        num_banks: int,
        payload: int,
        reduction: int,
        rank: int,
        placement: Sequence[int],
        device: int,
        timeout_ns: int,
        mask_on_timeout: bool,
        heap_bytes: int,
        idle_seconds: float,
    ) -> None: ...
    def export_fd(self) -> int: ...
    def attach(self, rank: int, fd: int) -> None: ...
    def abort(self) -> None: ...
    def watch(self, head: int, owner: object) -> None:
        """head: see AbortWatch. owner: of its memory, kept alive."""
    def dispatch(
        self,
        stream: int,
        halves: int,
        num_sms: int,
        tokens: int,
        narrow: bool,
        send: DispatchSendArgs,
        recv: DispatchRecvArgs,
        handle: int,
    ) -> None: ...
    def combine(
        self,
        stream: int,
        halves: int,
        num_sms: int,
        tokens: int,
        narrow: bool,
        send: CombineSendArgs,
        recv: CombineRecvArgs,
        handle: int,
    ) -> None: ...
    def release(self, stream: int, handle: int) -> None: ...
    def publish(self, stream: int) -> None: ...
    def bulk_plan(self, stream: int, args: BulkPlanArgs) -> None: ...
    def bulk_report(self, ticket: int, local_experts: int, limit_ns: int) -> tuple[int, list[int]] | None: ...
    def bulk_dispatch(self, stream: int, num_sms: int, args: BulkDispatchArgs) -> None: ...
    def bulk_combine(self, stream: int, num_sms: int, args: BulkCombineArgs) -> None: ...
    def many_route(self, stream: int, num_sms: int, args: ManyRouteArgs) -> None: ...
    def many_order(self, stream: int, num_sms: int, args: ManyOrderArgs) -> None: ...
    def many_sum(self, stream: int, num_sms: int, args: ManySumArgs) -> None: ...
    def bulk_stores(self, stream: int, num_sms: int, peer: int, bytes: int) -> None: ...
    def bulk_operations(self) -> int: ...
    def heap(self) -> int: ...
    def delay(self, stream: int, op: int, halves: int, next_reads_ahead: bool, handle: int) -> None: ...
    def set_delay(self, ns: int) -> None: ...
    def empty_clock_cells(self) -> None: ...
    def compare_clocks(self, stream: int) -> None: ...
    def clocks_ahead(self) -> list[int]: ...
    def set_faults(self, faults: Sequence[tuple[int, int, int, int, int]]) -> None: ...
    def status(self) -> tuple[int, str, str, int, int, int, int] | None: ...
    def statistics(self) -> dict[str, dict[object, object]]: ...
    def epochs(self) -> tuple[int, int, int]: ...
    def reset(self, base: int, masked: int) -> None: ...
    def mask(self, ranks: int) -> None: ...
    def rows_at(self, bank: int) -> int: ...
    @property
    def row_pitch(self) -> int: ...
    @property
    def scale_offset(self) -> int: ...
    @property
    def handle_bytes(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    @property
    def num_sms(self) -> int: ...

class ExpertsWork:
    def __init__(
        self,
        *,
        rows: int = 0,
        pitch: int = 0,
        row_scales: int = 0,
        scale_row: int = 0,
        scale_group: int = 0,
        row_ids: int = 0,
        counts: int = 0,
        offsets: int = 0,
        scratch: int = 0,
        out: int = 0,
        most: int = 0,
        held: int = 0,
    ) -> None: ...

class Experts:
    def __init__(
        self,
        *,
        device: int,
        gate_up: int,
        down: int,
        gate_up_scale: int = 0,
        down_scale: int = 0,
        experts: int,
        width: int,
        ffn: int,
    ) -> None: ...
    def wide(self) -> bool: ...
    def scratch_bytes(self, most: int) -> int: ...
    def run(
        self, stream: int, work: ExpertsWork, *, rows_of_tile: int, wide: bool, reads_ahead: bool
    ) -> None: ...

class Shares:
    def __init__(self, *, at: int, most: int, total: int, finished: int) -> None: ...
    def cut(
        self,
        *,
        stream: int,
        device: int,
        lengths: int,
        slots: int,
        sequences: int,
        heads: int,
        teams: int,
        tile: int,
        least: int,
    ) -> None: ...

class AttentionWork:
    def __init__(
        self, *, count: int, shares: Shares, blocks: int, blocks_pitch: int, sums: int, stats: int
    ) -> None: ...

class AttentionLaunchConfig:
    def __init__(self, *, team: int, blocks: int) -> None: ...

class Attention:
    def __init__(
        self,
        *,
        device: int,
        k: int,
        v: int,
        positions: int,
        kv_heads: int,
        group: int,
        block_size: int,
        norm: int,
        turns: int,
        eps: float,
        scale: float,
    ) -> None: ...
    def run(
        self,
        *,
        stream: int,
        step: AttentionWork,
        config: AttentionLaunchConfig,
        qkv: int,
        pitch: int,
        part: int,
        parts: int,
        out: int,
    ) -> None: ...

class MlaWork:
    def __init__(
        self, *, count: int, lengths: int, blocks: int, blocks_pitch: int, sums: int, stats: int
    ) -> None: ...

class MlaLaunchConfig:
    def __init__(self, *, team: int, blocks: int, splits: int) -> None: ...

class Mla:
    def __init__(
        self, *, device: int, cache: int, positions: int, heads: int, block_size: int, scale: float
    ) -> None: ...
    def run(self, *, stream: int, step: MlaWork, config: MlaLaunchConfig, q: int, out: int) -> None: ...

class Prefill:
    def __init__(
        self,
        *,
        device: int,
        k: int,
        v: int,
        rotary: int,
        positions: int,
        kv_heads: int,
        group: int,
        block_size: int,
        scale: float,
        scratch: int,
    ) -> None: ...
    @staticmethod
    def scratch_bytes(*, device: int) -> int: ...
    def run(
        self,
        *,
        stream: int,
        q: int,
        q_pitch: int,
        out: int,
        row_heads: int,
        query_start: int,
        lengths: int,
        blocks: int,
        blocks_pitch: int,
        tokens: int,
        sequences: int,
        k_scale: int,
        v_scale: int,
    ) -> None: ...

class Linear:
    def __init__(self, *, device: int, weight: int, n: int, k: int, tile: int, splits: int) -> None: ...
    def run(
        self,
        *,
        stream: int,
        rows: int,
        pitch: int,
        count: int,
        sums: int,
        rows_of_tile: int,
        lets_next_start: bool,
    ) -> None: ...

class StagedReader:
    def __init__(self, *, device: int, buffers: Sequence[int], buffer_bytes: int, seconds: float) -> None: ...
    def read(self, *, stream: int, pieces: Sequence[tuple[int, int, int, int]]) -> tuple[int, str] | None: ...

def order_blocks(rows: int) -> int: ...
