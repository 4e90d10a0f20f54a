"""Weights come to a GPU as they are in the files, however late its copies are."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from benchmarks.load_checkpoint import write
from ep_server.backends.assembly import files_for
from ep_server.backends.gpu.staged_files import StagedFiles, StreamCopies
from ep_server.backends.torch_compute import TorchCompute
from ep_server.models.checkpoint import Checkpoint
from ep_server.models.layers import ModelWeights, tensors_of
from ep_server.models.weights import load_weights
from tests.support.compare import assert_equal

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)
EXPERTS = 6
CONFIG = {
    "model_type": "qwen3_moe",
    "dtype": "bfloat16",
    "vocab_size": 1024,
    "hidden_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "intermediate_size": 512,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize("buffer_bytes", [1 << 10, 4 << 20])
def test_buffers_wait_for_copies_that_are_late(tmp_path: Path, buffer_bytes: int) -> None:
    """The stream is busy while the files are read; then each thread's buffers are needed again and again."""
    torch.manual_seed(5)
    expected = {f"{i}": torch.randn(64 + i, 97) for i in range(12)}
    save_file(expected, tmp_path / "model.safetensors")
    stored = Checkpoint.open(tmp_path).tensors
    with StagedFiles(StreamCopies(DEVICE), buffer_bytes) as files, ThreadPoolExecutor(3) as pool:
        files.load(stored["0"])
        torch.cuda._sleep(1_000_000_000)  # cycles: about half a second
        loads = {name: pool.submit(files.load, stored[name]) for name in expected}
        got = {name: load.result() for name, load in loads.items()}
        doubled = {name: values * 2 for name, values in got.items()}  # behind the copies
        files.finish()
    for name, values in expected.items():
        assert got[name].device == DEVICE
        assert_equal(got[name].cpu(), values, name)
        assert_equal(doubled[name].cpu(), values * 2, name)


def loaded(path: Path, device: torch.device) -> ModelWeights:
    from ep_server.models.families import read_spec

    experts = range(1, EXPERTS)
    return load_weights(
        Checkpoint.open(path),
        read_spec(str(path)),
        experts,
        torch.bfloat16,
        TorchCompute(device),
        threads=3,
        files=files_for(device),
    )


@pytest.mark.parametrize("fp8", [False, True])
def test_a_gpu_has_the_weights_that_the_cpu_has(tmp_path: Path, fp8: bool) -> None:
    """To the bit: what is fused, widened or converted on the device rounds as on the CPU."""
    quantised = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(
        json.dumps(CONFIG | ({"quantization_config": quantised} if fp8 else {}))
    )
    (folder := tmp_path / "written").mkdir()
    write(folder, str(tmp_path), layers=0, threads=3)
    assert isinstance(files_for(DEVICE), StagedFiles)
    pairs = zip(
        tensors_of(loaded(folder, DEVICE)), tensors_of(loaded(folder, torch.device("cpu"))), strict=True
    )
    for one, two in pairs:
        assert (one.device, one.dtype, one.shape) == (DEVICE, two.dtype, two.shape)
        bits = [t.contiguous().view(-1).view(torch.uint8).cpu() for t in (one, two)]
        assert torch.equal(*bits)
