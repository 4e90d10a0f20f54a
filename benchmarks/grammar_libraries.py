"""Compares grammar libraries for structured output: compile time, time of one mask, hostile input.

    pip install --target build/grammars --no-deps llguidance xgrammar apache-tvm-ffi
    PYTHONPATH=build/grammars python benchmarks/grammar_libraries.py

It trains a byte-level BPE vocabulary on the installed Python packages, or reads --tokenizer. Each hostile
case runs in a process of its own, which it may end. Times are of one thread.
"""

from __future__ import annotations

import argparse
import json
import resource
import signal
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

SECONDS, MEMORY = 20, 4 << 30  # of a hostile case
CORPUS = 60_000_000  # characters that a vocabulary is trained on


def string(**more: Any) -> dict[str, Any]:
    return {"type": "string", **more}


def record(properties: dict[str, Any], required: list[str] | None = None) -> dict[str, Any]:
    names = list(properties) if required is None else required
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


INTEGER, NUMBER = {"type": "integer"}, {"type": "number"}
ADDRESS = record(
    {"street": string(), "city": string(), "postcode": string(pattern="^[0-9]{5}$"), "country": string()}
)
POINT = {"type": "array", "items": NUMBER, "minItems": 2, "maxItems": 3}
NODE = record({"name": string(), "children": {"type": "array", "items": {"$ref": "#/$defs/node"}}})

# Schema, and a document that a model may answer with.
CASES: dict[str, tuple[dict[str, Any], Any]] = {
    "tool call": (
        record(
            {
                "name": {"const": "get_weather"},
                "arguments": record(
                    {"city": string(), "unit": {"enum": ["celsius", "fahrenheit"]}, "days": INTEGER}
                ),
            }
        ),
        {"name": "get_weather", "arguments": {"city": "San Francisco", "unit": "celsius", "days": 3}},
    ),
    "order": (
        record(
            {
                "id": string(pattern="^[A-Z]{2}-[0-9]{6}$"),
                "created": string(format="date-time"),
                "customer": record({"name": string(), "email": string(format="email"), "address": ADDRESS}),
                "items": {
                    "type": "array",
                    "minItems": 1,
                    "items": record(
                        {"sku": string(), "quantity": INTEGER, "price": NUMBER, "gift": {"type": "boolean"}}
                    ),
                },
                "status": {"enum": ["new", "paid", "sent", "returned"]},
                "note": {"anyOf": [string(maxLength=200), {"type": "null"}]},
            }
        ),
        {
            "id": "AB-123456",
            "created": "2026-11-23T10:20:30Z",
            "customer": {
                "name": "Ada Lovelace",
                "email": "ada@example.org",
                "address": {
                    "street": "12 Long Street",
                    "city": "London",
                    "postcode": "12345",
                    "country": "United Kingdom",
                },
            },
            "items": [
                {"sku": "keyboard-de", "quantity": 2, "price": 49.9, "gift": False},
                {"sku": "usb-c cable", "quantity": 10, "price": 3.25, "gift": True},
            ],
            "status": "paid",
            "note": "Leave it with the neighbour on the second floor, please.",
        },
    ),
    "geojson": (
        record(
            {
                "type": {"const": "Feature"},
                "geometry": {
                    "oneOf": [
                        record({"type": {"const": "Point"}, "coordinates": POINT}),
                        record(
                            {
                                "type": {"const": "LineString"},
                                "coordinates": {"type": "array", "items": POINT},
                            }
                        ),
                    ]
                },
                "properties": {"type": "object"},
            }
        ),
        {
            "type": "Feature",
            "geometry": {
                "type": "LineString",
                "coordinates": [[13.4, 52.52], [2.3522, 48.8566], [-0.12, 51.5]],
            },
            "properties": {
                "name": "a journey",
                "days": 4,
                "by": ["train", "ferry"],
                "booked": {"hotel": True},
            },
        },
    ),
    "tree": (
        {"$defs": {"node": NODE}, "$ref": "#/$defs/node"},
        {
            "name": "root",
            "children": [{"name": "left", "children": []}, {"name": "right leaf", "children": []}],
        },
    ),
    "any object": (
        {"type": "object"},
        {
            "title": "Release notes",
            "items": [{"text": "Faster start-up, fewer surprises.", "issue": 42}],
            "done": None,
        },
    ),
}


def exploding_choices() -> str:
    return "|".join(f"word{index}x{index * 7919}" for index in range(50_000))


HOSTILE: dict[str, tuple[str, Callable[[], str]]] = {
    "schema 10,000 deep": ("json", lambda: '{"type":"array","items":' * 10_000 + "{}" + "}" * 10_000),
    "schema 100 deep, optional": (
        "json",
        lambda: '{"type":"object","properties":{"a":' * 100 + "{}" + "}}" * 100,
    ),
    "regex (a|aa)...{900}{900}": ("regex", lambda: "((a|aa|b)?(c|cc){1,900}){1,900}"),
    "regex .{1,60000}x": ("regex", lambda: ".{1,60000}x"),
    "regex (x+x+)+y": ("regex", lambda: "(x+x+)+y"),
    "regex of 2^n states": ("regex", lambda: "(a|b)*a(a|b){24}"),
    "regex 10,000 deep": ("regex", lambda: "(" * 10_000 + "a" + ")" * 10_000),
    "choice of 50,000": ("regex", exploding_choices),
    "maxItems 10^9": ("json", lambda: '{"type":"array","items":{"type":"integer"},"maxItems":1000000000}'),
    "2,000 optional properties": (
        "json",
        lambda: json.dumps(
            {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(2000)}}
        ),
    ),
    "EBNF 10,000 deep": ("ebnf", lambda: "root ::= " + "(" * 10_000 + '"a"' + ")" * 10_000),
    "EBNF left recursion": ("ebnf", lambda: 'root ::= root root | "a" | ""'),
}


class Llguidance:
    """One matcher per call of compile(): the library has no compiled form to share but the matcher itself."""

    def __init__(self, tokenizer: Path) -> None:
        import llguidance

        self._lib = llguidance
        self._tokenizer = llguidance.LLTokenizer(tokenizer.read_text(), slices=None)
        self.vocab = self._tokenizer.vocab_size

    def compile(self, kind: str, source: str) -> Any:
        names = {"json": "json_schema", "regex": "regex", "ebnf": "gbnf"}
        matcher = self._lib.LLMatcher(
            self._tokenizer, self._lib.grammar_from(names[kind], source), log_level=0
        )
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        return matcher

    def matcher(self, compiled: Any) -> Any:
        return compiled.deep_copy()

    def mask(self, matcher: Any, row: np.ndarray) -> None:
        matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        if matcher.is_error():
            raise ValueError(matcher.get_error())

    def accept(self, matcher: Any, token: int) -> bool:
        return bool(matcher.consume_token(token))


class Xgrammar:
    def __init__(self, tokenizer: Path) -> None:
        import xgrammar

        self._lib = xgrammar
        inner = tokenizers.Tokenizer.from_file(str(tokenizer))
        self.vocab = inner.get_vocab_size()
        pieces = [inner.id_to_token(index) or "" for index in range(self.vocab)]
        info = xgrammar.TokenizerInfo(pieces, xgrammar.VocabType.BYTE_LEVEL, stop_token_ids=[0])
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def compile(self, kind: str, source: str) -> Any:
        if kind == "json":
            return self._compiler.compile_json_schema(source)
        return (
            self._compiler.compile_regex(source)
            if kind == "regex"
            else self._compiler.compile_grammar(source)
        )

    def matcher(self, compiled: Any) -> Any:
        return self._lib.GrammarMatcher(compiled)

    def mask(self, matcher: Any, row: np.ndarray) -> None:
        matcher.fill_next_token_bitmask(row.reshape(1, -1))

    def accept(self, matcher: Any, token: int) -> bool:
        return bool(matcher.accept_token(token))


LIBRARIES = {"llguidance": Llguidance, "xgrammar": Xgrammar}


def texts() -> Iterator[str]:
    left = CORPUS
    for name in ("stdlib", "purelib"):
        for file in sorted(Path(sysconfig.get_path(name)).rglob("*")):
            if (
                file.suffix in {".py", ".md", ".txt", ".rst", ".json", ".html"}
                and file.stat().st_size < 2_000_000
            ):
                text = file.read_text(errors="ignore")
                yield text
                left -= len(text)
                if left < 0:
                    return


def trained(size: int, path: Path) -> Path:
    """A byte-level BPE tokenizer of `size` tokens, written to `path`."""
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=24,
        show_progress=False,
    )
    inner.train_from_iterator(texts(), trainer)
    inner.save(str(path))
    return path


def times(library: Any, encoder: tokenizers.Tokenizer, repeat: int) -> None:
    row = np.zeros(-(-library.vocab // 32), dtype=np.int32)
    everything: list[float] = []
    for name, (schema, document) in CASES.items():
        compiles, masks, firsts = [], [], []
        for _ in range(repeat):
            begin = time.perf_counter()
            compiled = library.compile("json", json.dumps(schema))
            compiles.append(time.perf_counter() - begin)
            matcher = library.matcher(compiled)
            for place, token in enumerate(encoder.encode(json.dumps(document)).ids):
                begin = time.perf_counter()
                library.mask(matcher, row)
                (masks if place else firsts).append(time.perf_counter() - begin)
                assert row[token // 32] >> token % 32 & 1, f"{name}: token {token} at {place} is not allowed"
                assert library.accept(matcher, token)
        everything += masks
        shown = [statistics.median(compiles) * 1e3, max(compiles) * 1e3, statistics.median(firsts) * 1e6]
        shown += [float(np.percentile(masks, p)) * 1e6 for p in (50, 99, 100)]
        columns = (
            "compile {:7.2f} ms, worst {:7.2f}; first {:6.0f} us; p50 {:6.1f} p99 {:7.1f} worst {:7.1f} us"
        )
        print(f"{name:12}", columns.format(*shown), flush=True)
    mean = statistics.mean(everything) * 1e6
    print(f"{'all':12} mean mask {mean:.1f} us, p99 {np.percentile(everything, 99) * 1e6:.1f} us")


def hostile(library: Any, name: str) -> None:
    """Compiles, then draws 64 tokens at random."""
    kind, make = HOSTILE[name]
    begin = time.perf_counter()
    compiled = library.compile(kind, make())
    compiled_in = time.perf_counter() - begin
    matcher, row = library.matcher(compiled), np.zeros(-(-library.vocab // 32), dtype=np.int32)
    draws, slowest = np.random.default_rng(0), 0.0
    for _ in range(64):
        begin = time.perf_counter()
        library.mask(matcher, row)
        slowest = max(slowest, time.perf_counter() - begin)
        allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
        allowed = allowed[(allowed > 2) & (allowed < library.vocab)]
        if len(allowed) == 0:
            break
        assert library.accept(matcher, int(draws.choice(allowed)))
    print(f"compiled in {compiled_in:.3f} s, slowest mask {slowest * 1e3:.2f} ms", end="")


def last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1][:110]


def run_hostile(options: argparse.Namespace, name: str) -> None:
    """One case in a process of its own, with limits of time and memory."""
    command = [sys.executable, __file__, "--library", options.library, "--tokenizer", str(options.tokenizer)]
    begin = time.perf_counter()
    try:
        done = subprocess.run(
            [*command, "--case", name], capture_output=True, text=True, timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        print(f"  {name:26} no end in {SECONDS} s")
        return
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss >> 10
    ended = done.stdout if done.returncode == 0 else f"refused: {last_line(done.stderr)}"
    if done.returncode < 0:
        ended = f"KILLED by {signal.Signals(-done.returncode).name}"
    print(f"  {name:26} {time.perf_counter() - begin:5.1f} s, peak {peak} MB  {ended}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Compares grammar libraries.")
    parser.add_argument("--library", choices=LIBRARIES)
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.json; default: one is trained")
    parser.add_argument("--vocab", type=int, default=151_643, help="size of a vocabulary that is trained")
    parser.add_argument("--repeat", type=int, default=10)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        hostile(LIBRARIES[options.library](options.tokenizer), options.case)
        return
    with tempfile.TemporaryDirectory() as folder:
        if options.tokenizer is None:
            options.tokenizer = trained(options.vocab, Path(folder) / "tokenizer.json")
        for name in [options.library] if options.library else LIBRARIES:
            options.library = name
            begin = time.perf_counter()
            library = LIBRARIES[name](options.tokenizer)
            print(f"\n{name}: {library.vocab} tokens, ready in {time.perf_counter() - begin:.2f} s")
            times(library, tokenizers.Tokenizer.from_file(str(options.tokenizer)), options.repeat)
            for case in HOSTILE:
                run_hostile(options, case)


if __name__ == "__main__":
    main()
