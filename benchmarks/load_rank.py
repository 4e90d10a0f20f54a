"""One rank of gpu_load.py: its ways to load what it owns, each timed beside the other ranks and checked."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file

from benchmarks.load_checkpoint import Pattern
from ep_server.backends.assembly import files_for
from ep_server.backends.torch_compute import TorchCompute, TorchGatedFfn, TorchLinear
from ep_server.models.checkpoint import Checkpoint, StoredTensor
from ep_server.models.experts import SlotMove, load_slots
from ep_server.models.families import read_spec
from ep_server.models.layers import ModelWeights, MoeWeights, tensors_of
from ep_server.models.loading import PlainFiles, TensorFiles, TensorReader
from ep_server.models.weights import weights_from

Check = Callable[[Any], None]
CHUNK_BYTES, COPIED_BYTES = 8 << 20, 256 << 20
ROUND_SECONDS = 300.0  # until all ranks must have ended a round


@dataclass(frozen=True, slots=True)
class Case:
    """What every rank loads, and how. threads: of each rank. device: cuda or cpu."""

    folder: Path
    ranks: int
    threads: int
    device: str
    rounds: int
    cold: bool


@dataclass(frozen=True, slots=True)
class Row:
    """Seconds of one rank's rounds and the bytes that it read or copied in each."""

    name: str
    nbytes: int
    seconds: tuple[float, ...]


class Rank:
    """One rank's ways to the same weights."""

    def __init__(self, case: Case, rank: int) -> None:
        self.case, self.rank = case, rank
        self.device = torch.device("cpu")
        if case.device == "cuda":
            self.device = torch.device("cuda", rank % torch.cuda.device_count())
            torch.cuda.set_device(self.device)
        self.spec, self.checkpoint = read_spec(str(case.folder)), Checkpoint.open(case.folder)
        count = self.spec.router.num_experts
        self.experts = range(rank * count // case.ranks, (rank + 1) * count // case.ranks)
        self.own = [one for one in self.checkpoint.tensors.values() if self._owns(one)]
        self.nbytes = sum(one.nbytes for one in self.own)
        self.expert_bytes = sum(one.nbytes for one in self.own if ".experts." in one.name)

    def _owns(self, tensor: StoredTensor) -> bool:
        _, is_expert, rest = tensor.name.partition(".experts.")
        return not is_expert or int(rest.partition(".")[0]) in self.experts

    def reading(self) -> None:
        """Pieces of what it owns, into one buffer for each thread."""
        local = threading.local()

        def read(piece: tuple[FileIO, int, int]) -> None:
            if not hasattr(local, "buffer"):
                local.buffer = memoryview(bytearray(CHUNK_BYTES))
            read_piece(local.buffer, *piece)

        with ExitStack() as closing:
            shards = self.checkpoint.shards
            opened = {shard: closing.enter_context(shard.open("rb", buffering=0)) for shard in shards}
            pieces = [
                (opened[one.file], one.begin + at, one.begin + min(at + CHUNK_BYTES, one.nbytes))
                for one in self.own
                for at in range(0, one.nbytes, CHUNK_BYTES)
            ]
            with ThreadPoolExecutor(self.case.threads) as pool:
                for _ in pool.map(read, pieces, chunksize=8):
                    pass

    def copying(self) -> Callable[[], None]:
        """The host's buffer is pinned before the time begins."""
        on_gpu = self.device.type == "cuda"
        host = torch.ones(COPIED_BYTES, dtype=torch.uint8, pin_memory=on_gpu)
        target = torch.empty(COPIED_BYTES, dtype=torch.uint8, device=self.device)

        def copy() -> None:
            for at in range(0, self.nbytes, COPIED_BYTES):
                size = min(COPIED_BYTES, self.nbytes - at)
                target[:size].copy_(host[:size], non_blocking=True)
            self._wait()

        return copy

    def safetensors(self) -> dict[str, torch.Tensor]:
        """What the library does by itself."""
        held: dict[str, torch.Tensor] = {}
        for shard in self.checkpoint.shards:
            if self.case.ranks == 1:
                held |= load_file(shard, device=str(self.device))
                continue
            with safe_open(shard, framework="pt", device=str(self.device)) as opened:
                names = [one.name for one in self.own if one.file == shard]
                held |= {name: opened.get_tensor(name) for name in names}
        self._wait()
        return held

    def plain(self, threads: int) -> ModelWeights:
        """Through host memory."""
        with PlainFiles(self.device) as files:
            return self._weights(files, threads)

    def engine(self) -> ModelWeights:
        """As load_weights."""
        with files_for(self.device) as files:
            return self._weights(files, self.case.threads)

    def slots(self) -> Callable[[], ModelWeights]:
        """Experts into slots that are there, as after a loss."""
        weights, compute = self.engine(), TorchCompute(self.device)
        layers = [number for number, layer in enumerate(weights.layers) if isinstance(layer.ffn, MoeWeights)]
        for tensor in (t for number in layers for t in tensors_of(weights.layers[number].ffn.experts)):
            tensor.view(torch.uint8).fill_(0xFF)  # NaN
        moves = [SlotMove(layer, *place) for layer in layers for place in enumerate(self.experts)]

        def load() -> ModelWeights:
            with files_for(self.device, beside=True) as files:
                reader = TensorReader(self.checkpoint, self.spec.quant_block, files)
                load_slots(reader, self.spec, torch.bfloat16, compute, weights, moves, self.case.threads)
                files.finish()
            self._wait()
            return weights

        return load

    def sample(self, weights: ModelWeights) -> Iterator[tuple[str, torch.Tensor]]:
        """Tensors of the checkpoint as they lie in weights that are not converted."""
        yield "model.embed_tokens.weight", weights.embedding
        yield "model.norm.weight", weights.norm
        if isinstance(weights.head, TorchLinear) and not self.spec.tied_head:
            yield "lm_head.weight", weights.head.weight
        for index in sorted({0, self.spec.num_layers // 2, self.spec.num_layers - 1}):
            layer, prefix = weights.layers[index], f"model.layers.{index}"
            yield f"{prefix}.input_layernorm.weight", layer.attention_norm
            out = layer.attention.out
            if isinstance(out, TorchLinear) and self.spec.quant_block is None:
                yield f"{prefix}.self_attn.o_proj.weight", out.weight
            if isinstance(layer.ffn, MoeWeights) and isinstance(layer.ffn.experts, TorchGatedFfn):
                yield from self._experts(f"{prefix}.{self.spec.names.blocks[0]}.experts", layer.ffn.experts)

    def _experts(self, prefix: str, ffn: TorchGatedFfn) -> Iterator[tuple[str, torch.Tensor]]:
        names, rows, last = self.spec.names, self.spec.expert_ffn, len(self.experts) - 1
        for row in sorted({0, last // 2, last}):
            one = f"{prefix}.{self.experts[row]}"
            yield f"{one}.{names.gate}.weight", ffn.gate_up[row, :rows]
            yield f"{one}.{names.up}.weight", ffn.gate_up[row, rows:]
            yield f"{one}.{names.down}.weight", ffn.down[row]

    def _weights(self, files: TensorFiles, threads: int) -> ModelWeights:
        reader = TensorReader(self.checkpoint, self.spec.quant_block, files)
        compute = TorchCompute(self.device)
        weights = weights_from(reader, self.spec, self.experts, torch.bfloat16, compute, threads=threads)
        files.finish()
        self._wait()
        return weights

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def drop(self) -> None:
        """The files from the page cache, where the file system has one."""
        for shard in self.checkpoint.shards:
            file = os.open(shard, os.O_RDONLY)
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)


def read_piece(buffer: memoryview, file: FileIO, begin: int, end: int) -> None:
    """Bytes from `begin` up to `end`, each read to the buffer's front. Raises: OSError if the file ends."""
    at = begin
    while at < end:
        count = os.preadv(file.fileno(), [buffer[: end - at]], at)
        if not count:
            held = os.fstat(file.fileno()).st_size
            raise OSError(f"{file.name}: bytes {begin} to {end} are wanted, it ends at byte {held}")
        at += count


def timed(
    rank: Rank,
    barrier: Any,
    name: str,
    run: Callable[[], Any],
    check: Check | None = None,
    nbytes: int | None = None,
) -> Row:
    """Rounds together with the other ranks; device memory is given back between them, as a start finds it."""
    seconds = []
    for _ in range(rank.case.rounds):
        gc.collect()
        if rank.device.type == "cuda":
            torch.cuda.empty_cache()
        barrier.wait(ROUND_SECONDS)
        if rank.case.cold and rank.rank == 0:
            rank.drop()
        barrier.wait(ROUND_SECONDS)
        began = time.perf_counter()
        made = run()
        seconds.append(time.perf_counter() - began)
        if len(seconds) == 1 and check is not None:
            check(made)
        del made
    return Row(name, nbytes or rank.nbytes, tuple(seconds))


def measure(case: Case, number: int, barrier: Any) -> list[Row]:
    """All rows of one rank, in a process of its own."""
    torch.set_num_threads(1)  # as in a rank
    rank, pattern = Rank(case, number), Pattern()
    torch.zeros(1, device=rank.device).item()  # the device's context

    def check_tensors(held: dict[str, torch.Tensor]) -> None:
        names = sorted(held)
        _compare(pattern, ((name, held[name]) for name in names[:: len(names) // 50 + 1]))

    def check_weights(weights: ModelWeights) -> None:
        _compare(pattern, rank.sample(weights))

    return [
        timed(rank, barrier, "reading", rank.reading),
        timed(rank, barrier, "copying", rank.copying()),
        timed(rank, barrier, "safetensors", rank.safetensors, check_tensors),
        timed(rank, barrier, "plain x1", lambda: rank.plain(1), check_weights),
        timed(rank, barrier, "plain", lambda: rank.plain(case.threads), check_weights),
        timed(rank, barrier, "engine", rank.engine, check_weights),
        timed(rank, barrier, "slots", rank.slots(), check_weights, rank.expert_bytes),
    ]


def _compare(pattern: Pattern, sample: Iterator[tuple[str, torch.Tensor]] | Any) -> None:
    for name, values in sample:
        if not pattern.expected(name, values):
            raise SystemExit(f"{name}: loaded bits are not those that were written")
