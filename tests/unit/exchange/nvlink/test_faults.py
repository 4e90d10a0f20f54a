"""Faults on purpose as kernels understand them; needs neither a GPU nor the CUDA part."""

from __future__ import annotations

import pytest

from ep_server.errors import InvalidArgument
from ep_server.exchange.api import ExchangeSpec
from ep_server.exchange.faults import Action, Fault, encode_device_faults

SPEC = ExchangeSpec(1, 3, (0, 1, 2), 6, 640, 2)


def test_faults_as_kernels_know_them() -> None:
    faults = [
        Fault(1, "dispatch", "send_header", Action.DELAY, epoch=3, delay_ns=5),
        Fault(0, "dispatch", "send_header", Action.DELAY),  # of another rank
        Fault(1, "combine", "send_rows", Action.DROP, epoch=2, peer=2),
        Fault(1, "combine", "send_rows", Action.DROP),
    ]
    found = encode_device_faults(faults, SPEC)
    assert [(op, drops, epoch, ns) for op, _, drops, epoch, ns in found] == [
        (0, 0, 3, 5),
        (1, 0b100, 2, 0),
        (1, 0b111, 0, 0),
    ]
    header, rows, _ = (phase for _, phase, *_ in found)
    assert header != rows


@pytest.mark.parametrize(
    ("field", "fault"),
    [
        ("op", Fault(1, "vote", "send_header", Action.DELAY)),
        ("phase", Fault(1, "dispatch", "recv_header", Action.DELAY)),
        ("action", Fault(1, "dispatch", "send_rows", Action.KILL)),
    ],
)
def test_faults_that_kernels_do_not_have(field: str, fault: Fault) -> None:
    with pytest.raises(InvalidArgument) as caught:
        encode_device_faults([fault], SPEC)
    assert caught.value.field == field
