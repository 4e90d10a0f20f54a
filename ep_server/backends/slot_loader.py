"""Reads experts into the slots of a rank: at once, or beside steps that must not notice. Units: seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from ep_server.backends.assembly import TORCH, LoadParams, RankModel, load_experts, source_of
from ep_server.backends.shadow import HostExperts, copies_for
from ep_server.models.checkpoint import Checkpoint
from ep_server.models.experts import ExpertLoader, SlotMove, slot_parts
from ep_server.models.identity import files_stamp
from ep_server.models.layers import MoeWeights

BYTES_PER_SECOND = 1e9  # read beside steps: a fiftieth of what PCIe carries, and of the time of its thread


class SlotLoader:
    """For a model that serves. One thread at a time uses it."""

    def __init__(self, model: RankModel, shadow: HostExperts | None = None) -> None:
        """shadow: where experts come from that it holds."""
        self._model, self._shadow = model, shadow
        self._copies = copies_for(model.compute.device) if shadow is None else shadow.copies
        self._opened: tuple[tuple[str, int, str], Checkpoint] | None = None  # of path, version, files_stamp()

    def warm_up(self, params: LoadParams) -> None:
        """Takes the memory for reading beside steps: allocating it then would delay them.

        Raises: CheckpointError.
        """
        wanted = params.slots(self._model.spec)[:1] if params.held is not None else []
        if self._shadow is not None or self._model.compute.device.type == "cpu":
            return
        for one in wanted:
            with self._reading(params) as loader:
                loader.load(loader.prefix(one.layer), [one.expert])

    def __call__(
        self,
        params: LoadParams,
        moves: Sequence[SlotMove],
        *,
        beside: bool,
        alive: Callable[[], None] = lambda: None,
    ) -> int:
        """See ranks.experts.Load. Raises: CheckpointError, InternalError."""
        if not beside:
            return load_experts(self._model, params, moves, self._shadow, alive)
        sparse = self._model.spec.sparse_layers
        return sum(self._beside(params, move) for move in moves if sparse[move.layer])

    def _beside(self, params: LoadParams, move: SlotMove) -> bool:
        """Returns: whether the shadow had it."""
        began, weights = time.monotonic(), self._model.weights
        shadow = self._shadow
        copied = shadow is not None and shadow.load_beside(weights, move, params.version)
        if not copied:
            with self._reading(params) as loader:
                loader.load_slots(weights, [move])
        ffn = weights.layers[move.layer].ffn
        assert isinstance(ffn, MoeWeights)
        least = sum(part.nbytes for part in slot_parts(ffn.experts, move.slot)) / BYTES_PER_SECOND
        time.sleep(max(0.0, began + least - time.monotonic()))
        return copied

    @contextmanager
    def _reading(self, params: LoadParams) -> Iterator[ExpertLoader]:
        """At its end the device has what was read."""
        model, device = self._model, self._model.compute.device
        with self._copies.beside(), source_of(params, model.spec, device, self._checkpoint(params)) as source:
            yield ExpertLoader(source, model.spec, TORCH[model.dtype], model.compute)

    def _checkpoint(self, params: LoadParams) -> Checkpoint | None:
        """Its headers are read once: that holds up all threads of the process."""
        if params.load_format == "dummy":
            return None
        if self._opened is not None:
            of, opened = self._opened
            if of == (params.path, params.version, files_stamp(opened)):
                return opened
        opened = Checkpoint.open(params.path)
        self._opened = (params.path, params.version, files_stamp(opened)), opened
        return opened
