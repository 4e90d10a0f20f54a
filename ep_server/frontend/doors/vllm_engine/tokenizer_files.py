"""[2] The tokenizer's files as one ZIP archive, for gateways that encode prompts themselves."""

from __future__ import annotations

import asyncio
import hashlib
import io
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ep_server.errors import NotFound
from ep_server.frontend.doors.vllm_engine.protocol import common

CHUNK_BYTES = 64 << 10
MOST_BYTES = 256 << 20  # of the files together
_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "config.json",
    "generation_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "chat_template.json",
)
_PATTERNS = ("*.jinja", "*.model", "*.tiktoken")
_EPOCH = (1980, 1, 1, 0, 0, 0)  # equal files give an equal archive


async def tokenizer_archive(path: str) -> bytes:
    """The archive of a checkpoint directory, read outside the event loop. Raises: NotFound."""
    return await asyncio.to_thread(_archive, path)


def chunks(archive: bytes) -> Iterator[Any]:
    """Its messages; the last one has the archive's SHA-256."""
    digest = hashlib.sha256(archive).hexdigest()
    for start in range(0, len(archive), CHUNK_BYTES):
        last = start + CHUNK_BYTES >= len(archive)
        data = archive[start : start + CHUNK_BYTES]
        yield common.GetTokenizerChunk(data=data, sha256=digest if last else "")


def _archive(path: str) -> bytes:
    directory = Path(path)
    named = [directory / name for name in _FILES]
    found = [file for pattern in _PATTERNS for file in sorted(directory.glob(pattern))] if path else []
    files = [file for file in (*named, *found) if path and file.is_file()]
    if not any(file.name in ("tokenizer.json", "tokenizer.model") for file in files):
        raise NotFound("this model has no tokenizer")
    if sum(file.stat().st_size for file in files) > MOST_BYTES:
        raise NotFound(f"the tokenizer's files have more than {MOST_BYTES} bytes together")
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in files:
            archive.writestr(zipfile.ZipInfo(file.name, _EPOCH), file.read_bytes(), zipfile.ZIP_DEFLATED)
    return packed.getvalue()
