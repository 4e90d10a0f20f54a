"""New weights for a rank that serves: reads its part of another checkpoint, then copies it over the old one.

Tensors stay where they are, so that kernels and captured graphs that hold their addresses stay valid.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ep_server.backends.assembly import LoadParams, RankModel, load_model
from ep_server.errors import CheckpointError, InternalError, Unavailable
from ep_server.exchange.segment import available_memory
from ep_server.models.families import read_spec
from ep_server.models.layers import ModelWeights, tensors_of
from ep_server.ranks.changes import Change, Prepared
from ep_server.ranks.experts import RankExperts
from ep_server.scheduler.rank_scheduler import RankScheduler

log = logging.getLogger(__name__)

GIB = 1 << 30
SAMPLE_BYTES = 64 << 20  # copied to measure the rate, roughly


@dataclass(frozen=True, slots=True)
class WeightsInPlace:
    """The weights of a rank, for changes. params: how they were loaded. experts: where these can move."""

    model: RankModel
    params: LoadParams
    scheduler: RankScheduler
    experts: RankExperts | None = None

    def load(self, path: str) -> ModelWeights:
        """The same part of another checkpoint. Raises: CheckpointError."""
        params = self.params if self.experts is None else self.experts.params
        return load_model(dataclasses.replace(params, path=path)).weights

    def change(self, path: str, version: int) -> Change:
        """A change to the weights of another checkpoint of the same shapes."""
        return _NewWeights(self, path, version)


class _NewWeights:
    """See Change."""

    outlives_loss = True

    def __init__(self, place: WeightsInPlace, path: str, version: int) -> None:
        self._place, self._path, self._version = place, path, version
        self._old: Sequence[torch.Tensor] = tuple(tensors_of(place.model.weights))
        self._new: Sequence[torch.Tensor] = ()

    def prepare(self) -> Prepared:
        """Reads the weights into host memory and measures how fast they can be copied.

        Raises: CheckpointError naming a tensor or a field that differs; Unavailable without memory.
        """
        began, model = time.monotonic(), self._place.model
        spec = read_spec(self._path)
        for entry in dataclasses.fields(spec):
            found, held = getattr(spec, entry.name), getattr(model.spec, entry.name)
            if found != held:
                raise CheckpointError(f"{self._path}: {entry.name} = {found}, the model in force has {held}")
        needed, free = model.weights.nbytes, available_memory()
        if needed > free:
            raise Unavailable(
                f"{self._path}: reading it takes {needed / GIB:.2f} GiB of host memory, {free / GIB:.2f} GiB "
                "are free"
            )
        self._new = tuple(tensors_of(self._place.load(self._path)))
        if [_form(tensor) for tensor in self._new] != [_form(tensor) for tensor in self._old]:
            raise InternalError(f"{self._path}: was loaded in other shapes than the weights in force")
        nbytes, seconds = sum(tensor.nbytes for tensor in self._new), time.monotonic() - began
        prepared = Prepared(nbytes, _copy_rate(self._new))
        log.info(
            "read weights %d from %s: %.3f GiB in %.2f s, %.2f GB/s, in host memory until the switch",
            self._version,
            self._path,
            nbytes / GIB,
            seconds,
            nbytes / seconds / 1e9,
        )
        return prepared

    def apply(self) -> None:
        """Copies them over the old ones. Running sequences keep their KV; no cached prefix is found again."""
        for held, new in zip(self._old, self._new, strict=True):
            held.copy_(new)
        self._new = ()
        if self._place.experts is not None:
            self._place.experts.loaded_from(self._path)
        self._place.scheduler.flush_cache(self._version)


def _form(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype]:
    return tensor.shape, tensor.dtype


def _copy_rate(tensors: Sequence[torch.Tensor]) -> float:
    """Bytes per second of copies of that size, into memory that is there already; of a sample of them."""
    every = max(1, sum(tensor.nbytes for tensor in tensors) // SAMPLE_BYTES)
    sample = tensors[::every]
    into = [tensor.clone() for tensor in sample]
    began = time.perf_counter()
    for held, new in zip(into, sample, strict=True):
        held.copy_(new)
    return sum(tensor.nbytes for tensor in sample) / (time.perf_counter() - began)
