"""Files of a checkpoint that are broken, elsewhere or of another kind: each is named, with what to do."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ep_server.backends.torch_compute import TorchCompute
from ep_server.config import ModelConfig
from ep_server.errors import CheckpointError, ConfigError
from ep_server.frontend.served_model import ServedModel
from ep_server.models.checkpoint import INDEX, SINGLE, Checkpoint
from ep_server.models.families import read_spec
from ep_server.models.inspect import inspect_checkpoint
from ep_server.models.layers import tensors_of
from ep_server.models.weights import load_weights
from ep_server.text.tokenizer import Tokenizer
from tests.support.compare import assert_equal
from tests.support.models.checkpoints import Tiny

Get = Callable[[str], Tiny]
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 4997\n"
UNSUPPORTED = {"BOOL": 8, "F8_E5M2": 8, "F8_E8M0": 8, "I16": 16, "U16": 16, "U32": 32, "U64": 64, "F4": 4}


def load(path: Path) -> list[torch.Tensor]:
    weights = load_weights(Checkpoint.open(path), read_spec(path), [0], torch.float32, TorchCompute())
    return list(tensors_of(weights))


def copied(source: Path, target: Path) -> Path:
    shutil.copytree(source, target)
    return target


def safetensors(header: Any, data: bytes = b"") -> bytes:
    """A file with any header, as JSON or as bytes."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def with_dtype(file: Path, name: str, dtype: str) -> None:
    """Adds a tensor of 64 elements, or replaces one of that size."""
    tensors = load_file(file)
    tensors.pop(name, None)
    save_file(tensors, file)
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    end = len(data) + UNSUPPORTED.get(dtype, 8) * 64 // 8
    header[name] = {"dtype": dtype, "shape": [64], "data_offsets": [len(data), end]}
    file.write_bytes(safetensors(header, data + bytes(end - len(data))))


@pytest.mark.parametrize("dtype", UNSUPPORTED)
def test_an_unused_tensor_may_have_any_dtype(tiny: Get, tmp_path: Path, dtype: str) -> None:
    source = tiny("qwen3_moe").path
    path = copied(source, tmp_path / "copy")
    with_dtype(path / SINGLE, "extra.buffer", dtype)
    stored = Checkpoint.open(path).tensors["extra.buffer"]
    assert (stored.dtype, stored.shape, stored.nbytes) == (dtype, (64,), UNSUPPORTED[dtype] * 8)
    for ours, theirs in zip(load(path), load(source), strict=True):
        assert_equal(ours, theirs, dtype)


def test_a_dtype_that_is_newer_than_the_server(tiny: Get, tmp_path: Path) -> None:
    source = tiny("qwen3_moe").path
    path = copied(source, tmp_path / "copy")
    with_dtype(path / SINGLE, "extra.buffer", "F99")
    assert Checkpoint.open(path).tensors["extra.buffer"].dtype == "F99"
    for ours, theirs in zip(load(path), load(source), strict=True):
        assert_equal(ours, theirs, "F99")


@pytest.mark.parametrize("dtype", UNSUPPORTED)
def test_a_used_tensor_of_such_a_dtype_is_named(tiny: Get, tmp_path: Path, dtype: str) -> None:
    path = copied(tiny("qwen3_moe").path, tmp_path / "copy")
    with_dtype(path / SINGLE, "model.norm.weight", dtype)
    expected = rf"tensor model\.norm\.weight: dtype {dtype}, expected F32, BF16, F16, F64 or F8_E4M3"
    with pytest.raises(CheckpointError, match=expected):
        load(path)


def quantised(tiny: Get, path: Path, scales: torch.dtype) -> Path:
    """A checkpoint with one FP8 projection."""
    copied(tiny("qwen3_moe").path, path)
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    (path / "config.json").write_text(json.dumps(config))
    tensors = load_file(path / SINGLE)
    name = "model.layers.0.self_attn.o_proj.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    grid = [-(-size // 16) for size in tensors[name].shape]
    tensors[f"{name}_scale_inv"] = torch.ones(grid).to(scales)
    save_file(tensors, path / SINGLE)
    return path


def test_fp8_scales_are_floats_and_e8m0_is_named(tiny: Get, tmp_path: Path) -> None:
    assert load(quantised(tiny, tmp_path / "bf16", torch.bfloat16))
    expected = r"o_proj\.weight_scale_inv: dtype {}, expected F32, BF16, F16, F64 for the scales"
    with pytest.raises(CheckpointError, match=expected.format("F8_E8M0")):
        load(quantised(tiny, tmp_path / "e8m0", torch.float8_e8m0fnu))
    with pytest.raises(CheckpointError, match=expected.format("I32")):
        load(quantised(tiny, tmp_path / "i32", torch.int32))


def test_an_fp8_vector_is_named(tiny: Get, tmp_path: Path) -> None:
    path = quantised(tiny, tmp_path / "copy", torch.float32)
    tensors = load_file(path / SINGLE)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.float8_e4m3fn)
    save_file(tensors, path / SINGLE)
    with pytest.raises(
        CheckpointError, match=r"model\.norm\.weight: dtype F8_E4M3, expected .* not a matrix"
    ):
        load(path)


def moved(path: Path, where: Callable[[str], str]) -> Path:
    """A checkpoint whose index names the shards otherwise."""
    index = json.loads((path / INDEX).read_text())
    index["weight_map"] = {name: where(file) for name, file in index["weight_map"].items()}
    (path / INDEX).write_text(json.dumps(index))
    return path


def test_shards_may_lie_in_sub_folders(tiny: Get, tmp_path: Path) -> None:
    source = tiny("qwen3_moe-dense-layer-bias-shards").path
    path = copied(source, tmp_path / "copy")
    for number, shard in enumerate(sorted(path.glob("*.safetensors"))):
        folder = path / ("even" if number % 2 else "odd/deep")
        folder.mkdir(parents=True, exist_ok=True)
        shard.rename(folder / "same-name.safetensors" if number < 2 else folder / shard.name)
        was = shard.name
        now = (folder / ("same-name.safetensors" if number < 2 else was)).relative_to(path)
        moved(path, lambda file, was=was, now=now: str(now) if file == was else file)
    assert len(inspect_checkpoint(path).shards) == len(list(source.glob("*.safetensors")))
    for ours, theirs in zip(load(path), load(source), strict=True):
        assert_equal(ours, theirs, "moved")


def test_tensors_that_the_index_leaves_out_count(tiny: Get, tmp_path: Path) -> None:
    """As in transformers, all of a shard is read. Where several hold a tensor, the index decides."""
    source = tiny("qwen3_moe-dense-layer-bias-shards").path
    path = copied(source, tmp_path / "copy")
    index = json.loads((path / INDEX).read_text())
    placed = index["weight_map"]
    del placed["model.norm.weight"]
    first, last = min(placed.values()), max(placed.values())
    twice = next(name for name, file in placed.items() if file == first)
    save_file(load_file(path / last) | {twice: torch.zeros(3), "extra": torch.zeros(3)}, path / last)
    (path / INDEX).write_text(json.dumps(index))
    assert inspect_checkpoint(path).unused.tensors == ("extra",)
    for ours, theirs in zip(load(path), load(source), strict=True):
        assert_equal(ours, theirs, "left out")


@pytest.mark.parametrize(
    "entry",
    [3, None, ["a.safetensors"], {}, True, "", ".", "/etc/passwd", "../a.safetensors", "a/../../b"],
)
def test_index_entries_must_be_files_below(tmp_path: Path, entry: Any) -> None:
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "m.safetensors", "b": entry}}))
    with pytest.raises(CheckpointError, match=r"index\.json: weight_map: b = .*: must be the path of a file"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize(
    "index",
    [
        b"",
        b"\xff\xfe",
        b"null",
        b"[]",
        b"{",
        b"[" * 100_000,
        b'{"weight_map": ' + b"[" * 100_000,
        b'{"weight_map": 1' + b"0" * 5000 + b"}",
        b'{"weight_map": null}',
        b'{"weight_map": []}',
        b'{"weight_map": "a.safetensors"}',
        b'{"weight_map": {"a": "\\u0000"}}',
        b'{"weight_map": {"a": "\\ud800"}}',
        b'{"weight_map": {"a": "absent.safetensors"}}',
        b'{"weight_map": {"a": "folder"}}',
        b'{"weight_map": {"a": "' + b"x" * 5000 + b'"}}',
        POINTER,
    ],
)
def test_every_broken_index_is_named(tmp_path: Path, index: bytes) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / INDEX).write_bytes(index)
    with pytest.raises(CheckpointError, match=r"safetensors|folder|xxx|weight_map"):
        Checkpoint.open(tmp_path)


def entry(**changes: Any) -> dict[str, Any]:
    return {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} | changes}


def shown(content: bytes) -> str:
    """Of a test's name."""
    return ascii(content[:80])


BROKEN_HEADERS = [
    b"",
    b"\x05",
    (1 << 40).to_bytes(8, "little"),
    (2**64 - 1).to_bytes(8, "little") + b"{}",
    (100).to_bytes(8, "little") + b"{}",
    b"<!DOCTYPE html><html></html>" * 10,
    POINTER,
    safetensors(b"\xff\xff"),
    safetensors(b"[" * 100_000),
    safetensors(b'{"a": ' + b"1" * 5000 + b"}"),
    *map(safetensors, (None, [], 3, "a", {"a": None}, {"a": []}, {"a": {}}, {"a": 3})),
    *(
        safetensors(entry(**change), bytes(8))
        for change in (
            {"dtype": None},
            {"dtype": ["F32"]},
            {"dtype": "BF16"},
            {"shape": None},
            {"shape": ""},
            {"shape": "1"},
            {"shape": {"1": 1}},
            {"shape": [1.0]},
            {"shape": [True]},
            {"shape": [-1]},
            {"shape": [-1, -1]},
            {"shape": [[1]]},
            {"shape": [1 << 70]},
            {"data_offsets": None},
            {"data_offsets": []},
            {"data_offsets": [0]},
            {"data_offsets": [0, 4, 8]},
            {"data_offsets": [0.0, 4.0]},
            {"data_offsets": ["0", "4"]},
            {"data_offsets": [4, 0]},
            {"data_offsets": [-4, 0]},
            {"data_offsets": [8, 12]},
            {"data_offsets": {"0": 0, "4": 4}},
            {"dtype": "F99", "data_offsets": [8, 12]},
        )
    ),
]


@pytest.mark.parametrize("content", BROKEN_HEADERS, ids=shown)
def test_every_broken_shard_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / SINGLE).write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: (not a|tensor a: |is a git-lfs)"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json", SINGLE, INDEX])
def test_what_is_not_a_file_is_not_taken_for_absent(tiny: Get, tmp_path: Path, name: str) -> None:
    case = "qwen3_moe-dense-layer-bias-shards" if name == INDEX else "qwen3_moe"
    path = copied(tiny(case).path, tmp_path / "copy")
    file = path / name

    def fails(message: str) -> None:
        with pytest.raises(CheckpointError, match=rf"{name}: {message}"):
            ServedModel.load(ModelConfig(path=str(path)))
            inspect_checkpoint(path)

    file.unlink(missing_ok=True)
    file.mkdir()
    fails("is a directory, expected a file")
    file.rmdir()
    file.symlink_to("../../blobs/absent")
    fails("is a link to a file that does not exist")
    file.unlink()
    file.symlink_to(name)
    fails("cannot be read")
    file.unlink()
    os.mkfifo(file)  # an open of it would wait for ever
    fails("is not a regular file")
    file.unlink()
    file.write_bytes(POINTER)
    fails(r"is a git-lfs pointer, not the file itself: run `git lfs pull`")


def test_a_single_file_counts_beside_an_index(tiny: Get, tmp_path: Path) -> None:
    """As in transformers, which is asked here."""
    import transformers

    path = copied(tiny("qwen3_moe").path, tmp_path / "copy")
    stale = {name: values * 2 for name, values in load_file(path / SINGLE).items()}
    save_file(stale, path / "stale.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(stale, "stale.safetensors")}
    (path / INDEX).write_text(json.dumps(index))
    model = transformers.AutoModelForCausalLM.from_pretrained(path)
    weights = load_weights(Checkpoint.open(path), read_spec(path), [0], torch.float32, TorchCompute())
    assert_equal(weights.embedding, model.model.embed_tokens.weight.data, "embedding")


def test_links_to_files_are_followed(tiny: Get, tmp_path: Path) -> None:
    for file in tiny("qwen3_moe").path.iterdir():
        (tmp_path / file.name).symlink_to(file)
    assert load(tmp_path)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ((), "neither model.safetensors nor model.safetensors.index.json is there$"),
        (("pytorch_model.bin",), r"pytorch_model\.bin is not read, .* To convert .*save_pretrained"),
        (
            ("pytorch_model-00001-of-00002.bin", "pytorch_model.bin.index.json"),
            "pytorch_model-00001-of-00002.bin is not read, only safetensors files are",
        ),
        (("model-q4.gguf",), r"model-q4\.gguf is not read, only safetensors files are"),
        (
            ("model-00001-of-00002.safetensors", "pytorch_model.bin"),
            r"model-00001-of-00002\.safetensors is only read if model\.safetensors\.index\.json names it",
        ),
    ],
)
def test_weights_in_other_files(tmp_path: Path, files: tuple[str, ...], message: str) -> None:
    for name in files:
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("content", [b"", b"[]", b"null", b"\xff", b"{}", b"[" * 100_000, b'{"model": 3}'])
def test_every_broken_tokenizer_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: not a tokenizer"):
        Tokenizer.load(tmp_path)


def test_a_path_that_no_directory_has_is_named() -> None:
    path = "x" * 5000
    with pytest.raises(ConfigError, match=r"model\.path = .*a checkpoint directory"):
        ServedModel.load(ModelConfig(path=path))
    with pytest.raises(CheckpointError, match="not a directory"):
        read_spec(path)
