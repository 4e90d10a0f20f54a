"""Time stamps in a stream by the device's own clock, summed on the device without the host.

Kernels of one thread on int64 tensors, in ns. A stamp waits for all earlier work of its stream.
"""

from __future__ import annotations

from time import perf_counter_ns

import torch
import triton
import triton.language as tl

from ep_server.backends.gpu.kernels.triton.launch import after_previous, block, early, expect

BUCKETS = 64


@triton.jit
def _now(host_ns, HOST: tl.constexpr):
    if HOST:
        now = host_ns
    else:
        now = tl.inline_asm_elementwise(
            "mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
        )
    return now


@triton.jit
def _begin_kernel(marks, step, host_ns, PHASES: tl.constexpr, BLOCK: tl.constexpr, HOST: tl.constexpr):
    now = _now(host_ns, HOST)
    tl.store(marks, now)
    tl.store(marks + 1, now)
    phase = tl.arange(0, BLOCK)
    tl.store(step + phase, tl.zeros([BLOCK], tl.int64), mask=phase < PHASES)


@triton.jit
def _lap_kernel(marks, step, host_ns, PHASE: tl.constexpr, HOST: tl.constexpr, EARLY: tl.constexpr):
    after_previous(EARLY)
    now = _now(host_ns, HOST)
    tl.store(step + PHASE, tl.load(step + PHASE) + now - tl.load(marks))
    tl.store(marks, now)


@triton.jit
def _count(counts, took, BUCKETS: tl.constexpr):
    """Adds 1 to the bucket of a duration, if it is one."""
    bits = tl.arange(0, BUCKETS).to(tl.int64)
    at = counts + tl.sum(((took >> bits) > 0).to(tl.int32), axis=0) - 1
    tl.store(at, tl.load(at, mask=took > 0, other=0) + 1, mask=took > 0)


@triton.jit
def _end_kernel(marks, busy, counts, host_ns, BUCKETS: tl.constexpr, HOST: tl.constexpr, EARLY: tl.constexpr):
    after_previous(EARLY)
    took = _now(host_ns, HOST) - tl.load(marks + 1)
    tl.store(busy, tl.load(busy) + took)
    tl.store(busy + 1, tl.load(busy + 1) + 1)
    _count(counts, took, BUCKETS)


@triton.jit
def _record_times_kernel(step, sums, counts, BUCKETS: tl.constexpr):
    phase = tl.program_id(0)
    took = tl.load(step + phase)
    tl.store(sums + phase, tl.load(sums + phase) + took)
    _count(counts + phase * BUCKETS, took, BUCKETS)


def begin(marks: torch.Tensor, step: torch.Tensor) -> None:
    """Begins a step: sets its durations to 0. marks: [2], the last stamp and the first. step: [P].

    Raises: InternalError for another shape or dtype, as the others do.
    """
    expect("marks", marks, torch.int64, (2,))
    expect("step", step, torch.int64, tuple(step.shape))
    phases, host = len(step), marks.is_cpu
    _begin_kernel[(1,)](
        marks, step, _host_ns(marks), PHASES=phases, BLOCK=block(phases), HOST=host, num_warps=1
    )


def lap(marks: torch.Tensor, step: torch.Tensor, phase: int) -> None:
    """Adds the time since the last stamp to step[phase]."""
    expect("step", step, torch.int64, tuple(step.shape))
    _lap_kernel[(1,)](
        marks, step, _host_ns(marks), PHASE=phase, HOST=marks.is_cpu, **early(marks), num_warps=1
    )


def end(marks: torch.Tensor, busy: torch.Tensor, counts: torch.Tensor) -> None:
    """Adds the time since begin() to busy[0], 1 to busy[1] and its bucket. busy: [2]. counts: [BUCKETS]."""
    expect("busy", busy, torch.int64, (2,))
    expect("counts", counts, torch.int64, (BUCKETS,))
    _end_kernel[(1,)](
        marks, busy, counts, _host_ns(marks), BUCKETS=BUCKETS, HOST=marks.is_cpu, **early(marks), num_warps=1
    )


def record_times(step: torch.Tensor, sums: torch.Tensor, counts: torch.Tensor) -> None:
    """Adds a step's durations to sums: [P] and counts: [P, BUCKETS], of log2; a phase of 0 ns is none."""
    expect("sums", sums, torch.int64, tuple(step.shape))
    expect("counts", counts, torch.int64, (len(step), BUCKETS))
    _record_times_kernel[(len(step),)](step, sums, counts, BUCKETS=BUCKETS, num_warps=1)


def _host_ns(marks: torch.Tensor) -> int:
    """The clock if kernels are interpreted: the host's."""
    return perf_counter_ns() if marks.is_cpu else 0
