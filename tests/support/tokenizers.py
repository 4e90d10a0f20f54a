"""Tokenizers whose ids are known by hand: one token per byte, so every character can be cut anywhere."""

from __future__ import annotations

from pathlib import Path

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from ep_server.text.tokenizer import Tokenizer

EOS = 256  # the one special token of byte_level()
UNKNOWN = 257  # no token of byte_level(), as where a vocabulary is padded
SPACE_HELLO, WORLD, MARK, SPACE, HELLO, BOS = range(257, 263)  # of byte_fallback()
PIECES = (SPACE_HELLO, WORLD, MARK, SPACE, HELLO, BOS)


def byte_level() -> tokenizers.Tokenizer:
    """Byte-level BPE without merges: token id = byte value, 256 = <eos>."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    characters, extra = {}, 0
    for byte in range(256):
        characters[byte] = chr(byte) if byte in printable else chr(256 + extra)
        extra += byte not in printable
    vocabulary = {character: byte for byte, character in characters.items()}
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<eos>"])
    return inner


def byte_fallback() -> tokenizers.Tokenizer:
    """SentencePiece's manner: words with a leading space, unknown characters as bytes, ids 0 to 255."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocabulary |= {"<unk>": 256, "▁Hello": SPACE_HELLO, "▁world": WORLD, "!": MARK}
    vocabulary |= {"▁": SPACE, "Hello": HELLO}
    inner = tokenizers.Tokenizer(
        models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    )
    inner.add_special_tokens(["<s>"])
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return inner


PANICS = "<tool>\n x"


def panicking() -> tokenizers.Tokenizer:
    """The library panics at PANICS: two added tokens claim the same space."""
    inner = byte_level()
    inner.add_tokens([tokenizers.AddedToken("<tool>", rstrip=True, normalized=False)])
    inner.add_tokens([tokenizers.AddedToken("\n", lstrip=True, normalized=False)])
    return inner


def save(inner: tokenizers.Tokenizer, directory: Path) -> None:
    """Writes tokenizer.json."""
    inner.save(str(directory / "tokenizer.json"))


def loaded(inner: tokenizers.Tokenizer) -> Tokenizer:
    """As the server would have it."""
    return Tokenizer(inner)
