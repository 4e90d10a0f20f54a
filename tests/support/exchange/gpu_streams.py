"""What ranks on GPUs run on several streams: halves in any order, handles given up early, work beside it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

import torch
import torch.distributed as dist

from ep_server.exchange.api import Payload, PendingDispatch, Received, View
from ep_server.exchange.nvlink.banks import Banks
from ep_server.exchange.nvlink.exchange import NvlinkExchange
from tests.support.compare import assert_equal
from tests.support.exchange.expected import Expected, expect
from tests.support.exchange.gpu_group import (
    a_models_spec,
    close_exchange,
    factors_of,
    on_gpu,
    open_exchange,
    run_experts,
)
from tests.support.exchange.routing import Inputs, make_inputs

CYCLES = 20_000_000  # of a GPU's clock, about 10 ms


def few_sms() -> int:
    """Of a kernel: several may wait at once."""
    return max(1, torch.cuda.get_device_properties().multi_processor_count // 8)


@dataclass
class Flight:
    """One dispatch under way, and what must come of it."""

    pending: PendingDispatch
    expected: Expected
    received: Received | None = None
    rows: torch.Tensor | None = None
    combined: torch.Tensor | None = None


def orders_of_receives(group: dist.ProcessGroup) -> None:
    """Two in-place views in flight: received, then answered or given back, in every order on two streams.

    The sends of the next round are enqueued on a third stream that waits for none of it: their kernels find
    out when the banks are free.
    """
    spec = a_models_spec(group.rank(), group.size(), Payload.BF16, tokens=8)
    exchange = open_exchange(group, spec, num_sms=few_sms())
    streams = [torch.cuda.Stream() for _ in range(2)]
    kept = []
    for step, (received, freed, crossed, answers) in enumerate(
        product(((0, 1), (1, 0)), ((0, 1), (1, 0)), (False, True), (True, False))
    ):
        flights = [send(exchange, name, step) for name in ("max_tokens", "zipf")]
        torch.cuda.current_stream().record_event(sent := torch.cuda.Event())
        for which in received:
            stream = streams[which]
            stream.wait_event(sent)
            with torch.cuda.stream(stream):
                receive(flights[which])
        for which in freed:
            stream = streams[which ^ crossed]
            stream.wait_stream(streams[which])
            stream.wait_stream(streams[1 - (which ^ crossed)])  # sends follow one another
            with torch.cuda.stream(stream):
                free(exchange, flights[which], answers=answers)
        kept.append((f"step {step}", answers, flights))
    exchange.synchronize()
    torch.cuda.synchronize()
    for what, answers, flights in kept:
        for flight in flights:
            assert_equal(flight.rows.cpu(), flight.expected.rows, f"{what}: rows")
            if answers:
                assert_equal(flight.combined.cpu(), flight.expected.combined, f"{what}: combined")
    close_exchange(exchange)


def send(exchange: NvlinkExchange, routing: str, seed: int) -> Flight:
    inputs = make_inputs(exchange.spec, routing, seed)
    given = on_gpu(inputs[exchange.spec.rank])
    return Flight(exchange.dispatch_send(*given), expect(exchange.spec, inputs))


def receive(flight: Flight) -> None:
    """On the current stream; the host waits for the count."""
    flight.received = flight.pending.recv(View.INDEX)
    flight.rows = flight.received.rows[flight.received.row_ids]


def free(exchange: NvlinkExchange, flight: Flight, *, answers: bool) -> None:
    received, factors = flight.received, factors_of(exchange.spec).flatten()
    assert received is not None and flight.rows is not None
    if not answers:
        return exchange.release(received)
    by_row = factors.repeat_interleave(received.counts.long(), output_size=len(flight.rows))
    given = (flight.rows.float() * by_row[:, None]).to(torch.bfloat16)
    flight.combined = exchange.combine_send(given, received).recv()
    return None


def freed_handles(group: dist.ProcessGroup) -> None:
    """A dispatch is forgotten while its combine waits on another stream: its memory is not given away."""
    spec = a_models_spec(group.rank(), group.size(), Payload.BF16, tokens=8)
    exchange, side = open_exchange(group, spec, num_sms=few_sms()), torch.cuda.Stream()
    inputs = make_inputs(spec, "max_tokens", 3)
    given, wanted = on_gpu(inputs[spec.rank]), expect(spec, inputs).combined
    for apart in (False, True, False):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            received = exchange.dispatch(*given)
            size = received.handle.state.memory.numel()
            answers = run_experts(spec, received)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda._sleep(CYCLES)
        if apart:
            pending = exchange.combine_send(answers, received)
            out = pending.recv()
            del pending
        else:
            out = exchange.combine(answers, received)
        del received
        exchange._banks = Banks(spec.rank, spec.num_banks)  # it would keep handles for some operations
        with torch.cuda.stream(side):
            junk = [torch.full((size,), 0x5A, dtype=torch.uint8, device="cuda") for _ in range(8)]
        exchange.synchronize()
        assert_equal(out.cpu(), wanted, f"halves apart: {apart}")
        del junk
    close_exchange(exchange)


def beside_a_gemm(group: dist.ProcessGroup) -> None:
    """8 tokens of max_tokens = 1024, while products run on another stream: both are right."""
    spec = a_models_spec(group.rank(), group.size(), Payload.FP8, tokens=1024)
    spec = replace(spec, hidden=512)
    half = torch.cuda.get_device_properties().multi_processor_count // 2
    for num_sms in (0, half):
        exchange = open_exchange(group, spec, num_sms=num_sms)
        x = torch.randn(4096, 4096, device="cuda").to(torch.bfloat16)
        product_alone, side = x @ x, torch.cuda.Stream()
        for seed, routing in enumerate(("max_tokens", "zipf", "all_to_one")):
            inputs = [
                Inputs(each.x[:8], each.ids[:8], each.weights[:8])
                for each in make_inputs(spec, routing, seed)
            ]
            given, wanted = on_gpu(inputs[spec.rank]), expect(spec, inputs).combined
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                products = [x @ x for _ in range(8)]
            received = exchange.dispatch(*given)
            out = exchange.combine(run_experts(spec, received), received)
            apart = exchange.dispatch_send(*given).recv(View.PADDED)
            again = exchange.combine_send(run_experts(spec, apart), apart).recv()
            exchange.synchronize()
            torch.cuda.synchronize()
            for one in (out, again):
                assert_equal(one.cpu(), wanted, f"num_sms {num_sms}, {routing}")
            for found in products:
                assert_equal(found, product_alone, f"num_sms {num_sms}, {routing}: the product beside it")
        close_exchange(exchange)
