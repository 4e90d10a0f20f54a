"""Steps of a GPU with every kind of request, and what sees a host that waits for the device in them.

On a GPU that is torch's own check. On the CPU, where the device's memory is the host's, it is every way to
read a value of a tensor, or to make a shape of values; not inside interpreted kernels, which do nothing else.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import InterpretedFunction

from ep_server.backends.assembly import LoadParams, load_model
from ep_server.backends.gpu.graphs import GraphKey
from ep_server.backends.gpu.moe.rows import LocalRows, RowsOfSteps
from ep_server.backends.gpu.runner import GpuOptions, GpuRunner
from ep_server.backends.gpu.step_input import InputShape
from ep_server.backends.torch_compute import TorchCompute
from ep_server.models.decoder import DecoderParams
from ep_server.models.families import read_spec
from ep_server.models.kv_cache import KvCache
from ep_server.records import Request, Sampling, StepBatch, Stopping
from ep_server.scheduler import RankScheduler, SchedulerLimits
from ep_server.testing.reference_exchange import ReferenceExchange
from tests.support.models.driver import BLOCK, BLOCKS, exchange_spec

TOKENS, CONTEXT = 64, 128
CONFIG = {
    "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 3000,
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "intermediate_size": 96, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "max_position_embeddings": CONTEXT, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "attention_bias": False,
    "tie_word_embeddings": False, "hidden_act": "silu",
}  # fmt: skip
SAMPLING = (
    {"temperature": 0.0},
    {"temperature": 0.8, "seed": 1},
    {"temperature": 0.7, "seed": 2, "top_k": 9, "top_p": 0.8, "min_p": 0.01, "logprobs": 3},
    {"temperature": 0.0, "prompt_logprobs": 4},
    {
        "temperature": 0.0, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2,
        "logit_bias": ((5, 1.0),), "allowed_token_ids": tuple(range(0, 3000, 3)), "logprobs": 0,
    },
)  # fmt: skip
FORBIDDEN = (
    "_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "_unique", "unique_", "equal",
)  # fmt: skip
READS = ("item", "tolist", "cpu", "__bool__", "__int__", "__float__", "__index__", "nonzero")


class HostRead(AssertionError):
    """The host has asked the device for something."""


def made_runner(
    folder: Path,
    device: torch.device,
    keys: tuple[GraphKey, ...],
    config: dict[str, Any] = CONFIG,
    dtype: torch.dtype | None = None,
) -> GpuRunner:
    """One rank with random weights, which needs no other. dtype: bfloat16 on a GPU if None."""
    (folder / "config.json").write_text(json.dumps(config))
    dtype = dtype or (torch.float32 if device.type == "cpu" else torch.bfloat16)
    experts = read_spec(folder).router.num_experts
    name, placement = str(dtype).removeprefix("torch."), (0,) * experts
    params = LoadParams(str(folder), 0, placement, name, compute=TorchCompute(device), load_format="dummy")
    model = load_model(params)
    exchange = ReferenceExchange(exchange_spec(model, 0, 1, placement, TOKENS))
    cache = KvCache(model.spec, BLOCKS, BLOCK, dtype, device)
    decoder = DecoderParams(model.spec, model.weights, exchange, cache, CONTEXT, model.compute)
    shape = InputShape(TOKENS, 8, CONTEXT // BLOCK, BLOCK)
    runner = GpuRunner(decoder, GpuOptions(shape, RowsOfSteps(LocalRows(), LocalRows()), keys))
    with torch.inference_mode():
        runner.graphs.capture()
    return runner


def decode(
    runner: GpuRunner, first: int, watch: Callable[[], AbstractContextManager[object]]
) -> tuple[int, int]:
    """Runs a request of each kind, the last ones joining later, a step ahead, with launches watched.

    first: number of the first request. Returns: launches; how many of them were of a bucket.
    """
    limits = SchedulerLimits(
        max_running=8, max_step_tokens=TOKENS, block_size=BLOCK, kv_blocks=BLOCKS,
        prefix_cache=False, max_context=CONTEXT, ahead=1,
    )  # fmt: skip
    scheduler, launches, padded = RankScheduler(limits), 0, 0
    waiting = [request(first + at, **settings) for at, settings in enumerate(SAMPLING)]
    flying: deque[tuple[StepBatch, Any]] = deque()
    with torch.inference_mode():
        while scheduler.has_work or waiting:
            for one in waiting[:2] if launches >= 3 or not scheduler.has_work else ():
                runner.add(one)
                scheduler.add(one)
                waiting.remove(one)
            while len(flying) <= 1 and (batch := scheduler.plan()).slices:
                bucket = runner.bucket_of(batch)
                with watch():
                    flying.append((batch, runner.launch(batch, 1, bucket)))
                launches, padded = launches + 1, padded + (bucket > 0)
            batch, launched = flying.popleft()
            drawn = runner.collect(launched)
            runner.prompt_logprobs(launched)
            for event in scheduler.commit(batch, drawn):
                if event.finish is not None:
                    runner.remove(event.number)
    return launches, padded


def request(number: int, **settings: Any) -> Request:
    stopping = Stopping(6, min_new_tokens=3, eos_token_ids=frozenset({7}))
    return Request(f"r{number}", number, tuple(range(3, 12)), Sampling(**settings), stopping)


@contextmanager
def gpu_watch() -> Iterator[None]:
    """Whatever waits for the GPU raises RuntimeError."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@contextmanager
def cpu_watch() -> Iterator[None]:
    """Whatever would wait for a GPU raises HostRead."""
    with pytest.MonkeyPatch.context() as patch:
        guard = _Guard()
        for name in READS:
            patch.setattr(torch.Tensor, name, guard.refusing(name, getattr(torch.Tensor, name)))
        run = InterpretedFunction.run

        def trusted(kernel: Any, *args: Any, **kwargs: Any) -> Any:
            guard.on = False
            try:
                return run(kernel, *args, **kwargs)
            finally:
                guard.on = True

        patch.setattr(InterpretedFunction, "run", trusted)
        with guard:
            yield


class _Guard(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.on = True

    def refusing(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self.on:
                raise HostRead(f"Tensor.{name}")
            return method(*args, **kwargs)

        return call

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).removeprefix("aten.")
        masked = name.startswith("index") and any(_is_mask(arg) for arg in args)
        if self.on and (name.startswith(FORBIDDEN) or masked):
            raise HostRead(name)
        return func(*args, **(kwargs or {}))


def _is_mask(argument: Any) -> bool:
    """An index of booleans: as many rows as are true."""
    if isinstance(argument, (list, tuple)):
        return any(isinstance(one, torch.Tensor) and one.dtype is torch.bool for one in argument)
    return False
