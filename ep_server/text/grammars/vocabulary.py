"""The bytes that each token of a checkpoint's tokenizer stands for."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import llguidance
import tokenizers

from ep_server.errors import CheckpointError

_BYTE_TOKEN_LENGTH = len("<0x00>")
_PLAIN_DECODERS = {"ByteLevel", "ByteFallback", "Fuse", "Replace", "Metaspace", "Strip", "Sequence"}


def library_tokenizer(inner: tokenizers.Tokenizer, size: int, eos: Collection[int]) -> llguidance.LLTokenizer:
    """The vocabulary as llguidance searches it. It takes a second for 150,000 tokens.

    Args:
        size: of the model's vocabulary, which the tokenizer may not fill.
    Raises: CheckpointError for a tokenizer whose tokens have no bytes of their own.
    """
    try:
        return llguidance.LLTokenizer(inner.to_str(), n_vocab=size, eos_token=sorted(eos), slices=None)
    except Exception:  # only byte-level tokenizers and those with byte fallback; it raises bare Exception
        vocabulary = Vocabulary.of(inner, size)
    wrapper = llguidance.TokenizerWrapper(_Tokens(vocabulary, min(eos)))
    return llguidance.LLTokenizer(wrapper, n_vocab=size, eos_token=sorted(eos))


def special_tokens(inner: tokenizers.Tokenizer, size: int) -> dict[str, int]:
    """Ids of special tokens by their text."""
    added = inner.get_added_tokens_decoder()
    return {token.content: index for index, token in added.items() if token.special and index < size}


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """tokens: bytes by id; empty where an id has no text. special: ids that are never text."""

    tokens: Sequence[bytes]
    special: Collection[int]

    @staticmethod
    def of(inner: tokenizers.Tokenizer, size: int) -> Vocabulary:
        """size: of the model's vocabulary, which the tokenizer may not fill.

        Raises: CheckpointError for a tokenizer whose tokens have no bytes of their own.
        """
        decoders = _decoders(json.loads(inner.to_str()).get("decoder"))
        unknown = {decoder["type"] for decoder in decoders} - _PLAIN_DECODERS
        if unknown:
            raise CheckpointError(f"tokenizer.json: no grammars with a decoder of type {min(unknown)}")
        byte_level = any(decoder["type"] == "ByteLevel" for decoder in decoders)
        fallback = any(decoder["type"] == "ByteFallback" for decoder in decoders)
        spaces = _spaces(decoders)
        byte_of = _bytes_of_characters()
        added = inner.get_added_tokens_decoder()
        tokens = [b""] * size
        for text, index in inner.get_vocab(with_added_tokens=False).items():
            if index >= size:
                continue
            if byte_level and all(character in byte_of for character in text):
                tokens[index] = bytes([byte_of[character] for character in text])
            elif fallback and _is_byte(text):
                tokens[index] = bytes([int(text[3:5], 16)])
            else:
                tokens[index] = reduce(lambda plain, pair: plain.replace(*pair), spaces, text).encode()
        special = {index for index, token in added.items() if token.special and index < size}
        for index, token in added.items():
            if index < size:
                tokens[index] = token.content.encode()
        return Vocabulary(tokens, special)


class _Tokens:
    """What llguidance.TokenizerWrapper reads."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary, eos: int) -> None:
        self.eos_token_id = eos
        self.tokens = list(vocabulary.tokens)
        self.special_token_ids = sorted({*vocabulary.special, eos})
        self._ids: dict[bytes, int] = {}
        for index, token in enumerate(self.tokens):
            if token and index not in self.special_token_ids:
                self._ids.setdefault(token, index)
        self._longest = max(map(len, self._ids), default=0)

    def __call__(self, text: str | bytes) -> list[int]:
        """Ids of text that a grammar leaves no choice for: the longest tokens, up to where none fits."""
        data, ids, at = text.encode() if isinstance(text, str) else text, list[int](), 0
        while at < len(data):
            sizes = range(min(self._longest, len(data) - at), 0, -1)
            size = next((size for size in sizes if data[at : at + size] in self._ids), 0)
            if not size:
                break
            ids.append(self._ids[data[at : at + size]])
            at += size
        return ids


def _decoders(decoder: Any) -> list[dict[str, Any]]:
    """A decoder, or the decoders of a sequence."""
    if decoder is None:
        return []
    return [decoder] if decoder["type"] != "Sequence" else list(decoder["decoders"])


def _spaces(decoders: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """What decoders replace in a token, and by what."""
    found = list[tuple[str, str]]()
    for decoder in decoders:
        if decoder["type"] == "Metaspace":
            found.append((decoder["replacement"], " "))
        elif decoder["type"] == "Replace" and "String" in decoder["pattern"]:
            found.append((decoder["pattern"]["String"], decoder["content"]))
    return found


def _is_byte(text: str) -> bool:
    return len(text) == _BYTE_TOKEN_LENGTH and text.startswith("<0x") and text.endswith(">")


def _bytes_of_characters() -> dict[str, int]:
    """Byte-level tokenizers write a byte as one printable character: itself, or the next one from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
