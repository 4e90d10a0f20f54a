"""Several GPUs of one process: threads that each drive one, and one thread that drives all."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
import torch.distributed as dist

from ep_server.errors import StartupError
from ep_server.exchange.api import ExchangeSpec, Payload, Reduction, View
from ep_server.exchange.nvlink.exchange import NvlinkExchange
from tests.support.compare import assert_equal
from tests.support.exchange.conformance import PAYLOAD_SHAPES, failure_of, run_pair
from tests.support.exchange.expected import expect
from tests.support.exchange.gpu_group import a_models_spec, on_gpu, run_experts
from tests.support.exchange.local_ranks import from_local
from tests.support.exchange.on_gpu import OnGpu
from tests.support.exchange.routing import ROUTINGS, make_inputs

SECONDS = 120


def open_local(spec: ExchangeSpec) -> list[NvlinkExchange]:
    """One exchange for each of the first R GPUs; spec's rank does not matter."""
    exchanges = from_local(list(range(spec.num_ranks)), spec)
    assert [each.spec.rank for each in exchanges] == list(range(spec.num_ranks))
    return exchanges


def close_local(exchanges: list[NvlinkExchange]) -> None:
    for exchange in exchanges:
        with torch.cuda.device(exchange.device):
            exchange.synchronize()
    for exchange in exchanges:
        exchange.close()


def threads(group: dist.ProcessGroup, num_gpus: int) -> dict[str, str]:
    """Name -> failure text: the suite's routings in every view, a thread to each GPU. group: of one rank."""
    results: dict[str, str] = {}
    for payload in (Payload.BF16, Payload.FP8):
        for reduction in Reduction:
            exchanges = open_local(PAYLOAD_SHAPES[payload].spec(0, num_gpus, payload, reduction))
            with ThreadPoolExecutor(num_gpus) as pool:
                running = [pool.submit(drive, exchange) for exchange in exchanges]
                for rank, future in enumerate(running):
                    for name, text in future.result(SECONDS).items():
                        known = f"{payload.value}-{reduction.value}-{name}"
                        results[known] = results.get(known, "") + (f"rank {rank}: {text}" if text else "")
            close_local(exchanges)
    return results


def drive(exchange: NvlinkExchange) -> dict[str, str]:
    """What one thread does."""
    torch.cuda.set_device(exchange.device)
    found = {}
    for seed, routing in enumerate(ROUTINGS):
        for fused in (False, True):
            gpu = OnGpu(exchange, fused=fused)
            failed = [failure_of(partial(run_pair, gpu, routing, seed, view)) for view in View]
            found[f"{routing}-{'fused' if fused else 'apart'}"] = next(filter(None, failed), "")
    found["after_a_reset"] = failure_of(partial(meet, exchange))
    return found


def meet(exchange: NvlinkExchange) -> None:
    """What all threads call, each for its own rank; then operations go on."""
    rank, ranks = exchange.spec.rank, exchange.spec.num_ranks
    assert exchange.all_gather(bytes([rank])) == [bytes([peer]) for peer in range(ranks)]
    exchange.barrier()
    exchange.reset()
    run_pair(OnGpu(exchange), "zipf", 9, View.PADDED)


def a_gpu_that_is_not_there(group: dist.ProcessGroup, num_gpus: int) -> None:
    """One rank cannot start: the reason is raised at once, though the others wait for it."""
    spec = a_models_spec(0, num_gpus, Payload.BF16)
    with pytest.raises(StartupError, match=f"rank {num_gpus - 1}"):
        from_local([*range(num_gpus - 1), 99], spec)
    close_local(open_local(spec))


def one_thread(group: dist.ProcessGroup, num_gpus: int) -> None:
    """The halves of all GPUs in turn from one thread: nothing on the way waits for a GPU."""
    exchanges = open_local(a_models_spec(0, num_gpus, Payload.FP8))
    for step, routing in enumerate(("zipf", "uniform", "empty_rank")):
        inputs = make_inputs(exchanges[0].spec, routing, step)
        pending, received, returning = [], [], []
        for exchange, mine in zip(exchanges, inputs, strict=True):
            with torch.cuda.device(exchange.device):
                pending.append(exchange.dispatch_send(*on_gpu(mine)))
        for exchange, half in zip(exchanges, pending, strict=True):
            with torch.cuda.device(exchange.device):
                received.append(half.recv(View.PADDED))
                answers = run_experts(exchange.spec, received[-1])
                returning.append(exchange.combine_send(answers, received[-1]))
        for exchange, half in zip(exchanges, returning, strict=True):
            with torch.cuda.device(exchange.device):
                out = half.recv()
                exchange.synchronize()
            wanted = expect(exchange.spec, inputs).combined
            assert_equal(out.cpu(), wanted, f"rank {exchange.spec.rank}, {routing}")
    close_local(exchanges)
