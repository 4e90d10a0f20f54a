"""What a checkpoint must share with the served one, so that its weights can replace those of the ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ep_server.errors import CheckpointError, InvalidArgument
from ep_server.models.checkpoint import Checkpoint
from ep_server.models.families import ModelSpec, is_there, read_file, read_spec

SAME_FILES = ("tokenizer.json", "chat_template.jinja")  # the server goes on with those it has read


@dataclass(frozen=True, slots=True)
class CheckpointFacts:
    """A checkpoint without its weights. tensors: dtype and shape by name. files: contents by name."""

    spec: ModelSpec
    tensors: Mapping[str, tuple[str, tuple[int, ...]]]
    files: Mapping[str, bytes]

    @staticmethod
    def read(path: str) -> CheckpointFacts:
        """Raises: CheckpointError."""
        stored = Checkpoint.open(path).tensors
        there = {name: Path(path) / name for name in SAME_FILES}
        return CheckpointFacts(
            read_spec(path),
            {name: (tensor.dtype, tensor.shape) for name, tensor in stored.items()},
            {name: read_file(file) for name, file in there.items() if is_there(file)},
        )

    def check(self, path: str) -> None:
        """Raises: InvalidArgument naming what of the checkpoint there cannot be read, or differs."""
        if not path:
            raise InvalidArgument("path", path, "a checkpoint directory on the host of every rank")
        try:
            other = CheckpointFacts.read(path)
        except CheckpointError as error:
            raise InvalidArgument("path", path, f"a checkpoint that can be read ({error})") from error
        difference = self.difference(other)
        if difference:
            raise InvalidArgument("path", path, f"a checkpoint like the served one; {difference}")

    def difference(self, other: CheckpointFacts) -> str:
        """The first thing in which another checkpoint differs; "" if only values do."""
        for entry in dataclasses.fields(self.spec):
            held, found = getattr(self.spec, entry.name), getattr(other.spec, entry.name)
            if held != found:
                return f"its {entry.name} is {found}, the served one has {held}"
        for name in sorted(self.tensors.keys() | other.tensors.keys()):
            held, found = self.tensors.get(name), other.tensors.get(name)
            if held != found:
                return f"its tensor {name} is {_form(found)}, the served one has {_form(held)}"
        for name in SAME_FILES:
            if self.files.get(name) != other.files.get(name):
                return f"its {name} is another one"
        return ""


def _form(tensor: tuple[str, tuple[int, ...]] | None) -> str:
    return "missing" if tensor is None else f"{tensor[0]} {list(tensor[1])}"
