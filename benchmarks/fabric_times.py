"""How long one dispatch or combine takes on a machine, and how that compares with what others published.

    time = fixed + max(NIC bytes / NIC rate, NIC writes x post time, NVLink bytes / NVLink rate) + tail

The NIC and NVLink work side by side: the slower one counts. `fixed` is all that does not grow with bytes.
Times in us, rates in GB/s (10^9), sizes in bytes. One parameter is calibrated: `fixed` of DeepEP's kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

from fabric_traffic import Case, Copies, Inside, both_ways, rows

LINE = 64  # rows of this exchange start at multiples of it


@dataclass(frozen=True, slots=True)
class Machine:
    """What carries the rows.

    nic_gbps: nominal, one NIC per rank. nic_efficiency: of it that NVSHMEM's put test reaches: 47 of 50 GB/s
      (DeepEP issue 155, H100 + CX7).
    nvlink_gbs: one direction, as copies by kernels reach it: 160 on H800 (DeepEP's README), 344 on H20 (its
      issue 138), 331 on H200 (measured: four GPUs, each storing 1.65 MB to its three peers at once).
    fixed_us: launch, quantisation, flags, the pass over what came; 8 = this exchange on NVLink at T = 1.
    proxy_us: added once where rows cross hosts: GPU to proxy, post, wire, completion, flag back. Assumed,
      from the 15 to 20 that the CPU costs pplx-garden.
    forward_us: added once where rows go on over NVLink: another pass like fixed_us. Assumed.
    chunks: pieces of such an operation; only the last one's forwarding follows the network. Assumed.
    post_us: CPU time of one write, spread over the proxy threads of a rank; 0 = the GPU posts. Assumed; more
      than 0.2 would contradict pplx-garden's EP64.
    """

    nic_gbps: float = 400.0
    nic_efficiency: float = 0.94
    nvlink_gbs: float = 331.0
    fixed_us: float = 8.0
    proxy_us: float = 20.0
    forward_us: float = 8.0
    chunks: int = 4
    post_us: float = 0.1

    def __post_init__(self) -> None:
        positive = {"nic_gbps": self.nic_gbps, "nvlink_gbs": self.nvlink_gbs, "chunks": self.chunks}
        for name, value in positive.items():
            if not value > 0:
                raise ValueError(f"{name} = {value}: must be above 0")
        if not 0 < self.nic_efficiency <= 1:
            raise ValueError(f"nic_efficiency = {self.nic_efficiency}: must be above 0, at most 1")
        for name in ("fixed_us", "proxy_us", "forward_us", "post_us"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} = {getattr(self, name)}: must be at least 0")

    @property
    def nic_gbs(self) -> float:
        """What the NIC of a rank carries in one direction."""
        return self.nic_gbps / 8 * self.nic_efficiency


@dataclass(frozen=True, slots=True)
class Wire:
    """Bytes of one row and of the header that every peer gets, in each operation."""

    dispatch_row: int
    combine_row: int
    dispatch_header: int
    combine_header: int


def our_wire(case: Case, *, fp8: bool = True) -> Wire:
    """This exchange: rows padded to 64 bytes; headers with ids and weights, 8 bytes a choice."""
    payload = case.hidden + 4 * -(-case.hidden // 128) if fp8 else 2 * case.hidden
    choices = 8 * case.tokens * case.top_k
    return Wire(_padded(payload), _padded(2 * case.hidden), LINE + choices, LINE)


def deepep_wire(case: Case) -> Wire:
    """DeepEP's low-latency kernels: 16 bytes before an FP8 row and its scales; a counter per local expert."""
    payload = 16 + case.hidden + 4 * (case.hidden // 128)
    counters = 8 * -(-case.physical // case.ranks)
    return Wire(payload, 2 * case.hidden, counters, counters)


def _padded(size: int) -> int:
    return -(-size // LINE) * LINE


@dataclass(frozen=True, slots=True)
class Times:
    """One operation of the average rank, or of the busiest. fixed: of it, in which no link is busy."""

    total: float
    fixed: float
    network_bytes: float
    nvlink_bytes: float


def operation(
    case: Case, machine: Machine, row_bytes: int, header_bytes: int, *, slowest: bool = True
) -> Times:
    """Args: slowest: time of the busiest rank, for which a step waits; else of the average one."""
    moved = rows(case)
    crowd = moved.busiest if slowest else 1.0
    network = moved.network * row_bytes * crowd + moved.peers * header_bytes
    nvlink = (moved.nvlink + moved.forwarded) * row_bytes * crowd
    posts = (moved.network + moved.peers) * machine.post_us  # what is sent is even, what comes is not
    tail = moved.forwarded * row_bytes * crowd / machine.nvlink_gbs / 1e3 / machine.chunks
    fixed = machine.fixed_us
    fixed += machine.proxy_us if moved.peers else 0
    fixed += machine.forward_us if moved.forwarded else 0
    busy = max(network / machine.nic_gbs / 1e3, posts, nvlink / machine.nvlink_gbs / 1e3) + tail
    return Times(fixed + busy, fixed, network, nvlink)


def pair(case: Case, machine: Machine, wire: Wire, *, slowest: bool = True) -> tuple[Times, Times]:
    """Dispatch and combine."""
    out, back = both_ways(case)
    return (
        operation(out, machine, wire.dispatch_row, wire.dispatch_header, slowest=slowest),
        operation(back, machine, wire.combine_row, wire.combine_header, slowest=slowest),
    )


# -- what others published -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Published:
    """us of dispatch and combine: 128 tokens a rank, 7168, top-8 of 256, FP8 out, BF16 back, 8 a host."""

    ranks: int
    dispatch: float
    combine: float
    nvlink_gbs: float = 160.0
    inside: Inside = Inside.NVLINK

    def case(self) -> Case:
        """Its sizes."""
        return Case(hosts=self.ranks // 8, copies=Copies.EXPERT, inside=self.inside)


# DeepEP's V1 table, H800 + CX7, averages over ranks (its issue 71). The page calls it "pure RDMA", but 6.6 MB
# at EP8 in 77 us is more than a 400 Gb/s NIC carries: rows inside a host went over NVLink (its PR 173).
DEEPEP = (Published(8, 77, 114), Published(16, 118, 195), Published(32, 155, 273), Published(64, 173, 314))
# Never calibrated on. The same page's larger groups; PR 173's H20 before (network alone) and after; another
# implementation, whose rows CPU threads post (pplx-garden's fabric-lib page, CX7; its NVLink is not stated).
DEEPEP_LARGER = (Published(128, 192, 369), Published(256, 194, 360))
H20_NETWORK = tuple(
    Published(*row, 344, Inside.NETWORK)
    for row in ((8, 172, 319), (16, 193, 335), (32, 198, 344), (64, 203, 351))
)
H20_NVLINK = tuple(
    Published(*row, 344) for row in ((8, 37, 59), (16, 119, 199), (32, 157, 280), (64, 176, 318))
)
PPLX = tuple(Published(*row, 344) for row in ((16, 110, 186), (32, 154, 266), (64, 187.5, 309)))
OTHERS = {
    "DeepEP, larger groups": DEEPEP_LARGER,
    "DeepEP on H20, network only": H20_NETWORK,
    "DeepEP on H20": H20_NVLINK,
    "pplx-garden": PPLX,
}


def deepep_machine(fixed_us: float, nvlink_gbs: float) -> Machine:
    """GPUs post their own writes, and no row is forwarded."""
    return Machine(nvlink_gbs=nvlink_gbs, fixed_us=fixed_us, proxy_us=0.0, forward_us=0.0, post_us=0.0)


def predicted(row: Published, fixed_us: float) -> tuple[float, float]:
    """us of dispatch and combine, average rank."""
    case = row.case()
    machine = deepep_machine(fixed_us, row.nvlink_gbs)
    dispatch, combine = pair(case, machine, deepep_wire(case), slowest=False)
    return dispatch.total, combine.total


def errors(row: Published, fixed_us: float) -> tuple[float, float]:
    """Predicted / published - 1, of dispatch and combine."""
    dispatch, combine = predicted(row, fixed_us)
    return dispatch / row.dispatch - 1, combine / row.combine - 1


def calibrated(known: tuple[Published, ...]) -> float:
    """The fixed time with the least squares of relative errors over these rows: one number, closed form."""
    weighted = squared = 0.0
    for row in known:
        for model, found in zip(predicted(row, 0.0), (row.dispatch, row.combine), strict=True):
            weighted += (found - model) / found**2
            squared += 1 / found**2
    return max(weighted / squared, 0.0)


def left_out(row: Published) -> tuple[float, float]:
    """Errors at a row of DEEPEP, calibrated on the others."""
    return errors(row, calibrated(tuple(other for other in DEEPEP if other != row)))
