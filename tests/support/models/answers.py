"""Checkpoints of every family with transformers' answers, as files: for machines that have no transformers.

    python -m tests.support.models.answers FOLDER        makes them

Beside the tokens lies what the rule for bfloat16 needs (bfloat16.py). Those with FP8 weights lie in
FOLDER/fp8; their answers are those of the same weights as values. Reading needs no transformers.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

FILE = "answers.json"
ROUNDING = "bfloat16.pt"  # see harness/bfloat16.py
ROUNDED = 64  # positions of it


@dataclass(frozen=True)
class Answers:
    """A checkpoint directory, prompts, and transformers' greedy tokens for each in float32."""

    name: str
    path: Path
    prompts: tuple[tuple[int, ...], ...]
    tokens: tuple[tuple[int, ...], ...]


def read(folder: Path) -> list[Answers]:
    """All of them, by name; none where the folder is not there."""
    return [
        Answers(file.parent.name, file.parent, *(_tuples(part) for part in json.loads(file.read_text())))
        for file in sorted(folder.glob(f"*/{FILE}"))
    ]


def write(folder: Path) -> None:
    """Makes every case of checkpoints.py, the one for GPUs too, and of fp8.py, in place of what is there."""
    import torch

    from tests.support.models import fp8
    from tests.support.models.bfloat16 import Rounding
    from tests.support.models.checkpoints import CASES, WIDE, make

    torch.set_num_threads(1)  # models this small are slower on more
    for case in (*CASES, WIDE):
        path = folder / case.name
        path.mkdir(parents=True, exist_ok=True)
        made = make(case, path)
        (path / FILE).write_text(json.dumps([made.prompts, made.tokens]))
        Rounding.of(path, [*made.prompts[1], *made.tokens[1]][:ROUNDED]).write(path / ROUNDING)
    for case in (fp8.GQA, fp8.MLA):
        path = folder / "fp8" / case.name
        with tempfile.TemporaryDirectory() as scratch:
            codes = fp8.make(case, Path(scratch))
            shutil.copytree(codes.path, path, dirs_exist_ok=True)
        (path / FILE).write_text(json.dumps([codes.prompts, codes.tokens]))


def _tuples(lists: list[list[int]]) -> tuple[tuple[int, ...], ...]:
    return tuple(map(tuple, lists))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
