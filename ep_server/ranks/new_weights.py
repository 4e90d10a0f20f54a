"""New weights for a rank that serves: reads its part of another checkpoint, then copies it over the old one.

They wait in host memory, as the rank holds its weights: those of experts in the host shadow, if there is one,
in which each expert is read by one rank alone. Tensors stay where they are, so that kernels and captured
graphs that hold their addresses stay valid.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from dataclasses import dataclass

import torch

from ep_server.backends.assembly import (
    MOST_LOADERS,
    TORCH,
    LoadParams,
    RankModel,
    in_host_memory,
    load_model,
    source_of,
)
from ep_server.backends.shadow import HostExperts, HostTensors, copies_for
from ep_server.errors import CheckpointError, InternalError, Unavailable
from ep_server.exchange.segment import available_memory
from ep_server.models.experts import ExpertLoader, SlotMove, read_experts
from ep_server.models.families import read_spec
from ep_server.models.layers import ModelWeights, MoeWeights, replicated_tensors, tensors_of
from ep_server.models.shadow import ShadowLayout
from ep_server.ranks.changes import Change, Prepared
from ep_server.ranks.experts import RankExperts
from ep_server.ranks.parts import AnyRunner
from ep_server.ranks.shadow_filler import ShadowFiller
from ep_server.scheduler.rank_scheduler import RankScheduler

log = logging.getLogger(__name__)

GIB = 1 << 30
SAMPLE_BYTES = 64 << 20  # copied to measure the rate, roughly


@dataclass(frozen=True, slots=True)
class WeightsInPlace:
    """The weights of a rank, for changes. params: how they were loaded. experts: where these can move.

    shadow: the host shadow, if there is one. filler: of it, which may still copy the weights in force.
    """

    model: RankModel
    params: LoadParams
    scheduler: RankScheduler
    runner: AnyRunner
    experts: RankExperts | None = None
    shadow: HostExperts | None = None
    filler: ShadowFiller | None = None

    def change(self, path: str, version: int, files: str = "") -> Change:
        """A change to the weights of another checkpoint of the same shapes. files: see LoadParams."""
        return _NewWeights(self, path, version, files)

    def params_of(self, path: str, version: int, files: str) -> LoadParams:
        """To load the same part of another checkpoint."""
        params = self.params if self.experts is None else self.experts.params
        return dataclasses.replace(params, path=path, version=version, files=files)

    def served(self) -> list[SlotMove]:
        """Slots of the experts that this rank reads for all ranks, in layers with experts."""
        spec = self.model.spec
        if self.experts is None:
            return self.params.slots(spec)
        return [one for one in self.experts.served_slots() if spec.sparse_layers[one.layer]]


class _NewWeights:
    """See Change."""

    outlives_loss = needs_idle = True

    def __init__(self, place: WeightsInPlace, path: str, version: int, files: str) -> None:
        self._place, self._path, self._version = place, path, version
        self.what = f"new weights from {path}"
        device = place.model.compute.device
        self._copies = copies_for(device) if place.shadow is None else place.shadow.copies
        self._params = place.params_of(path, version, files)
        self._slots = self._params.slots(place.model.spec)
        self._old = replicated_tensors(place.model.weights)
        self._slot_bytes = _slot_bytes(place.model.weights)
        self._new: HostTensors | None = None
        self._experts: HostExperts | None = None  # where those of experts wait

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
        self._check_memory()
        self._new = HostTensors(self._read_replicated(), self._copies)
        if self._place.filler is not None:  # not before: what was refused until here has changed nothing
            self._place.filler.stop()
        self._experts = self._read_experts()
        self._experts.pin([(one.layer, one.expert) for one in self._entries()])
        nbytes = sum(tensor.nbytes for tensor in self._old) + len(self._slots) * self._slot_bytes
        prepared = Prepared(nbytes, self._new.copy_rate(model.compute.device, SAMPLE_BYTES))
        log.info(
            "read weights %d from %s in %.2f s; the switch copies %.3f GiB, measured at %.2f GB/s",
            self._version,
            self._path,
            time.monotonic() - began,
            nbytes / GIB,
            prepared.rate / 1e9,
        )
        return prepared

    def apply(self) -> None:
        """Copies them over the old ones. Running sequences keep their KV; no cached prefix is found again."""
        place, new, experts = self._place, self._new, self._experts
        assert new is not None and experts is not None
        self._copies.begin()
        for held, values in zip(self._old, new.tensors, strict=True):
            self._copies.upload(held, values)
        missing = experts.load(place.model.weights, self._entries(), self._version)
        self._copies.finish()
        if missing:
            raise InternalError(f"{len(missing)} experts of {self._path} have left the host memory")
        place.runner.weights_changed()
        if place.experts is not None:
            place.experts.loaded_from(self._path, self._version, self._params.files)
        place.scheduler.flush_cache(self._version)
        self._new = self._experts = None

    def _entries(self) -> list[SlotMove]:
        """From entries in host memory into the slots. In private memory the slots number the entries."""
        if self._place.shadow is not None:
            return self._slots
        return [SlotMove(one.layer, one.slot, one.slot) for one in self._slots]

    def _check_memory(self) -> None:
        """Raises: Unavailable."""
        copies = 1 if self._place.model.compute.device.type == "cpu" else 2  # read, then locked
        needed, free = copies * sum(tensor.nbytes for tensor in self._old), available_memory()
        if self._place.shadow is None:
            needed += len(self._slots) * self._slot_bytes
        if needed > free:
            raise Unavailable(
                f"{self._path}: reading it takes {needed / GIB:.2f} GiB of host memory, {free / GIB:.2f} GiB "
                "are free"
            )

    def _read_replicated(self) -> list[torch.Tensor]:
        """What every rank holds, in host memory. Raises: CheckpointError."""
        model, place = self._place.model, self._place
        nothing = ((),) * model.spec.num_layers
        compute = in_host_memory(model.compute)
        found = load_model(dataclasses.replace(self._params, held=nothing, compute=compute)).weights
        new = replicated_tensors(found)
        if [_form(tensor) for tensor in new] != [_form(tensor) for tensor in self._old]:
            raise InternalError(f"{self._path}: was loaded in other shapes than the weights in force")
        if model.compute.device.type == "cuda":  # whose routers may be held once more in their dtype
            _check_routers(self._path, found, place.model.weights)
        return new

    def _read_experts(self) -> HostExperts:
        """Those of the slots; with a host shadow, this rank's part of all. Raises: CheckpointError."""
        model, shadow, params = self._place.model, self._place.shadow, self._params
        compute = in_host_memory(model.compute)
        wanted: dict[tuple[int, int], list[int]] = {}  # (layer, expert) to entries
        if shadow is None:
            slots = max((one.slot for one in self._slots), default=-1) + 1
            layout = ShadowLayout(tuple(map(bool, model.spec.sparse_layers)), slots, self._slot_bytes)
            experts = HostExperts(layout, self._copies)
            for one in self._slots:
                wanted.setdefault((one.layer, one.expert), []).append(one.slot)
        else:
            experts = shadow
            wanted = {(one.layer, one.expert): [one.expert] for one in self._place.served()}

        def take(layer: int, expert: int, parts: list[torch.Tensor]) -> None:
            for entry in wanted[layer, expert]:
                experts.write(self._version, layer, entry, parts)

        threads = max(1, min(params.threads, MOST_LOADERS))  # decoding goes first
        with source_of(params, model.spec, compute.device) as source:
            loader = ExpertLoader(source, model.spec, TORCH[model.dtype], compute)
            read_experts(loader, list(wanted), take, threads)
        return experts


def _form(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype]:
    return tensor.shape, tensor.dtype


def _slot_bytes(weights: ModelWeights) -> int:
    """Of one slot of a layer with experts."""
    layers = (layer.ffn for layer in weights.layers)
    experts = next((ffn.experts for ffn in layers if isinstance(ffn, MoeWeights)), None)
    return 0 if experts is None else sum(t[:1].nbytes for t in tensors_of(experts))


def _check_routers(path: str, new: ModelWeights, held: ModelWeights) -> None:
    """Raises: CheckpointError where a router needs float32 that did not need it before."""
    dtype = held.embedding.dtype
    for number, (one, other) in enumerate(zip(new.layers, held.layers, strict=True)):
        if isinstance(one.ffn, MoeWeights) and isinstance(other.ffn, MoeWeights):
            routers = [next(tensors_of(ffn.router)) for ffn in (one.ffn, other.ffn)]
            if [torch.equal(w.to(dtype).float(), w) for w in routers] == [False, True]:
                raise CheckpointError(f"{path}: layer {number}: the router has values that are no {dtype}")
