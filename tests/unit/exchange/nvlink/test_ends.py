"""How exchanges between GPUs begin and end where a GPU, or another rank, does not do its part."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch

from ep_server.errors import ConfigError, InternalError, InvalidArgument, StartupError
from ep_server.exchange import device_wait
from ep_server.exchange.api import ExchangeSpec, Payload
from ep_server.exchange.host import HostGroup, open_group
from ep_server.exchange.segment import create_segment
from ep_server.exchange.spec import control_spec

pytest.importorskip("ep_server._cuda", reason="built without nvcc")

from ep_server.exchange.nvlink import ends, launch
from ep_server.exchange.nvlink.bulk import NvlinkBulk
from ep_server.exchange.nvlink.exchange import NvlinkExchange

GPU = torch.device("cuda", 1)
SPEC = ExchangeSpec(0, 1, (0,), 4, 640, 1, Payload.BF16, timeout_ns=1_000_000)


class Group:
    """In place of csrc's, whose memory a GPU uses."""

    def publish(self) -> None: ...

    def status(self) -> None: ...

    def bulk_report(self, ticket: int, experts: int, limit_ns: int) -> None: ...


class Launcher(Group):
    def __init__(self) -> None:
        self.group = Group()


class Hung:
    """A GPU that does not end its work until released."""

    def __init__(self) -> None:
        self.released = threading.Event()
        self.waiting: threading.Thread | None = None

    def synchronize(self, device: torch.device) -> None:
        self.waiting = threading.current_thread()
        self.released.wait(20)

    def record_event(self) -> Hung:
        return self

    def query(self) -> bool:
        return self.released.is_set()


@pytest.fixture
def control() -> Iterator[HostGroup]:
    fd = create_segment(control_spec(SPEC))
    made = open_group(control_spec(SPEC), fd)
    os.close(fd)
    yield made
    made.close()


@pytest.fixture
def hung(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hung]:
    gpu = Hung()
    monkeypatch.setattr(torch.cuda, "synchronize", gpu.synchronize)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: gpu)
    monkeypatch.setattr(device_wait, "IDLE_SECONDS", 0.05)
    yield gpu
    gpu.released.set()


def few(control: HostGroup) -> tuple[NvlinkExchange, weakref.ref[Group]]:
    made, launcher = object.__new__(NvlinkExchange), Launcher()
    made.spec, made.device, made._control, made._launcher = SPEC, GPU, control, launcher  # type: ignore[assignment]
    return made, weakref.ref(launcher.group)


def many(control: HostGroup) -> tuple[NvlinkBulk, weakref.ref[Group]]:
    made, group = object.__new__(NvlinkBulk), Group()
    made.spec, made.device, made._control, made._group = SPEC, GPU, control, group  # type: ignore[assignment]
    return made, weakref.ref(group)


@pytest.mark.parametrize("make", [few, many])
def test_an_exchange_closes_beside_a_gpu_that_hangs(
    make: Callable[[HostGroup], tuple[NvlinkExchange | NvlinkBulk, weakref.ref[Group]]],
    control: HostGroup,
    hung: Hung,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its memory is freed once the GPU has ended its work: csrc would wait for that, too."""
    exchange, group = make(control)
    exchange.close()
    assert "cuda:1 has not ended its work in 0.051 s" in caplog.text
    with pytest.raises(InvalidArgument):
        control.native  # noqa: B018
    exchange.close()
    assert group() is not None and hung.waiting is not None
    hung.released.set()
    hung.waiting.join(20)
    assert group() is None


def test_the_others_do_not_wait_for_a_rank_that_closed(
    control: HostGroup, hung: Hung, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its group, which a hanging GPU keeps, keeps its heartbeat."""
    aborted: list[str] = []
    monkeypatch.setattr(HostGroup, "abort", lambda _: aborted.append("aborted"))
    few(control)[0].close()
    assert aborted


def test_synchronize_does_not_wait_forever(control: HostGroup, hung: Hung) -> None:
    with pytest.raises(InternalError, match="has not ended operations of the exchange"):
        few(control)[0].synchronize()


def test_counting_received_rows_does_not_wait_forever(hung: Hung) -> None:
    launcher = object.__new__(launch.Launcher)
    launcher.spec, launcher.device = SPEC, GPU
    with pytest.raises(InternalError, match=r"the receive of a dispatch in 0\.051 s"):
        launcher.count_rows(torch.tensor([0, 4]))


def test_a_plan_does_not_wait_forever(control: HostGroup, hung: Hung) -> None:
    exchange, _ = many(control)
    exchange._tickets = 1
    with pytest.raises(InternalError, match=r"the plan of a dispatch in 0\.051 s"):
        exchange._report(4)


@pytest.mark.parametrize(
    ("error", "raised", "aborts"),
    [
        (RuntimeError("out of memory"), StartupError, True),
        (ConfigError("hidden", 100, "a multiple of 128"), ConfigError, False),
        (KeyboardInterrupt(), KeyboardInterrupt, True),
    ],
)
def test_a_failed_start_tells_the_others(
    error: BaseException,
    raised: type[BaseException],
    aborts: bool,
    control: HostGroup,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    aborted: list[str] = []
    monkeypatch.setattr(HostGroup, "abort", lambda _: aborted.append("aborted"))
    with pytest.raises(raised), ends.begins(SPEC, control):
        raise error
    assert bool(aborted) == aborts
    with pytest.raises(InvalidArgument):
        control.native  # noqa: B018
