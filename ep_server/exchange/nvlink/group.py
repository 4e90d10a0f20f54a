"""One rank's end of a group of GPUs on one host: memory, membership, what kernels found, measurements.

Knows no operation: cuda.py has them. What must meet in host memory goes over an exchange of the same ranks
there. Nothing waits for the GPU but close(), synchronize() and reset(). Durations in ns.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ep_server.errors import ConfigError, ExchangeError, InvalidArgument, StartupError
from ep_server.exchange.api import Capabilities, ExchangeSpec, ExchangeStatistics, Membership, Payload, View
from ep_server.exchange.faults import Fault, encode_device_faults
from ep_server.exchange.nvlink.launch import Launcher, make_group
from ep_server.exchange.nvlink.memory import share_regions
from ep_server.exchange.nvlink.pending import Flights
from ep_server.exchange.nvlink.shapes import Shapes, bits_of, check_device_spec, check_num_sms
from ep_server.exchange.shm import ShmExchange


class NvlinkGroup:
    """What NvlinkExchange is without its operations; arguments and errors as there."""

    def __init__(
        self,
        spec: ExchangeSpec,
        *,
        control: ShmExchange,
        device: int | None,
        on_timeout: str,
        num_sms: int,
    ) -> None:
        self.spec = spec
        self._control: ShmExchange | None = control
        try:
            self._launcher: Launcher | None = self._start(control, device, on_timeout, num_sms)
        except BaseException as error:
            if not isinstance(error, ConfigError):  # which all ranks find alike
                control.abort()  # else they would wait for this one
            control.close()
            if isinstance(error, RuntimeError | ExchangeError):
                raise StartupError(f"rank {spec.rank}: {error}") from error
            raise
        self._flights = Flights(spec.rank, spec.num_banks)

    def _start(self, control: ShmExchange, device: int | None, on_timeout: str, num_sms: int) -> Launcher:
        check_device_spec(self.spec, on_timeout)
        if not torch.cuda.is_available():
            raise StartupError("the exchange over NVLink needs a CUDA device, none is available")
        self.device = torch.device("cuda", torch.cuda.current_device() if device is None else device)
        self._shapes = Shapes(self.spec, self.device)
        with torch.cuda.device(self.device):
            group = make_group(self.spec, self.device, on_timeout)
            launcher = Launcher(group, self.spec, self._shapes, check_num_sms(num_sms, group.num_sms))
            share_regions(control, self.spec, group)
        return launcher

    # -- what meets in host memory ----------------------------------------------------------------------

    def all_gather(self, record: bytes) -> list[bytes]:
        """As the Protocol says; over host memory."""
        return self._open_control().all_gather(record)

    def barrier(self) -> None:
        """As the Protocol says: of the processes, not of their streams."""
        self._open().publish()
        self._open_control().barrier()

    def close(self) -> None:
        """As the Protocol says. Waits for the GPU."""
        if self._control is None:
            return
        torch.cuda.synchronize(self.device)
        self._launcher = None
        self._control.close()
        self._control = None

    # -- failure, membership, measurements ------------------------------------------------------------

    def check(self) -> None:
        """Raises what a kernel has found since; never waits.

        Raises: PeerTimeout, HookNotCalled, GroupAborted, ProtocolViolation, InvalidArgument.
        """
        self._open().check()

    def synchronize(self) -> None:
        """Waits for the current stream, then check()."""
        self._open().publish()
        torch.cuda.current_stream(self.device).synchronize()
        self.check()

    @property
    def membership(self) -> Membership:
        """As the Protocol says."""
        return self

    @property
    def masked(self) -> frozenset[int]:
        """Ranks that this one neither writes to nor waits for."""
        bits = self._open().group.epochs()[2]
        return frozenset(r for r in range(self.spec.num_ranks) if bits >> r & 1)

    def mask(self, ranks: Iterable[int]) -> None:
        """Stops talking to these ranks, also in a kernel that waits for them. Local to this rank."""
        self._open().group.mask(bits_of(self.spec, set(ranks) - {self.spec.rank}))

    def reset(self, dead: Iterable[int] = ()) -> None:
        """Starts a new generation: no abort, no operation in flight, no mask but `dead`. Collective."""
        control, gone = self._open_control(), frozenset(dead)
        torch.cuda.synchronize(self.device)
        control.reset(gone)
        dispatches, combines, _ = self._open().group.epochs()
        theirs = control.all_gather(max(dispatches, combines).to_bytes(8, "little"))
        last = max(int.from_bytes(record, "little") for record in theirs)
        banks = self.spec.num_banks
        base = (last + 3 * banks) // banks * banks  # beyond every epoch of the old generation
        self._open().group.reset(base, bits_of(self.spec, gone))
        self._open().new_generation()
        self._flights = Flights(self.spec.rank, banks)
        control.barrier()

    def set_faults(self, faults: Iterable[Fault]) -> None:
        """Replaces the fault plan: delays and drops where a send writes. No kernel may be running."""
        self._open().group.set_faults(encode_device_faults(faults, self.spec))

    def statistics(self) -> ExchangeStatistics:
        """As the Protocol says. Kept on the GPU, and copied on a stream of their own."""
        found: dict[str, Any] = self._open().group.statistics()
        local = found["local_expert_tokens"]
        return {
            "histograms": found["histograms"],
            "sums": found["sums"],
            "counters": found["counters"],
            "peer_wait_ns": found["peer_wait_ns"],
            "peer_wait_max_ns": found["peer_wait_max_ns"],
            "expert_tokens": {e: local[i] for i, e in enumerate(self.spec.local_experts)},
        }

    @property
    def capabilities(self) -> Capabilities:
        """As the Protocol says."""
        return Capabilities(
            payloads=frozenset(Payload) - {Payload.FP32},
            views=frozenset(View),
            cheapest_view=View.INDEX,
            graph_safe=True,
            micro_batches=self.spec.num_banks,
            memory_bytes=self.memory_bytes,
        )

    @property
    def memory_bytes(self) -> int:
        """Device memory of this rank's end, without tensors that callers hold."""
        return int(self._open().group.bytes)

    # -- inside ---------------------------------------------------------------------------------------

    def _open(self) -> Launcher:
        if self._launcher is None:
            raise InvalidArgument("exchange", "closed", "open")
        return self._launcher

    def _open_control(self) -> ShmExchange:
        if self._control is None:
            raise InvalidArgument("exchange", "closed", "open")
        return self._control
