"""Converts orders and their answers to and from the messages of rank.proto, for both ends of a channel."""

from __future__ import annotations

from collections.abc import Callable

from ep_server.orders import (
    CountExperts,
    DropChange,
    FlushCache,
    OrderDone,
    PrepareGeneration,
    PreparePlacement,
    PrepareWeights,
    RankOrder,
    ReleaseKv,
    StartProfile,
    StopProfile,
    SwitchChange,
)
from ep_server.ranks.messages import placement_message, placement_of
from ep_server.v1 import rank_pb2 as pb

_PLAIN: dict[str, Callable[[], RankOrder]] = {
    "stop_profile": StopProfile,
    "count_experts": CountExperts,
    "flush_cache": FlushCache,
}
_DONE_FIELDS = tuple(OrderDone.__dataclass_fields__)


def order_message(order: RankOrder, number: int, work_number: int = 0) -> pb.ToRank:
    """An order; the rank answers it by the number. work_number: if it wakes parked ranks."""
    wire = pb.Order(number=number, work_number=work_number)
    if isinstance(order, StartProfile):
        wire.start_profile.CopyFrom(pb.StartProfile(name=order.name, steps=order.steps))
    elif isinstance(order, StopProfile):
        wire.stop_profile.SetInParent()
    elif isinstance(order, PrepareWeights):
        wire.prepare_weights.CopyFrom(
            pb.PrepareWeights(change=order.change, version=order.version, path=order.path, files=order.files)
        )
    elif isinstance(order, PreparePlacement):
        wire.prepare_placement.change = order.change
        wire.prepare_placement.placement.CopyFrom(placement_message(order.placement))
    elif isinstance(order, PrepareGeneration):
        wire.prepare_generation.CopyFrom(
            pb.PrepareGeneration(
                change=order.change,
                generation=order.generation,
                live=order.live,
                placement=placement_message(order.placement),
            )
        )
    elif isinstance(order, CountExperts):
        wire.count_experts.SetInParent()
    elif isinstance(order, SwitchChange):
        wire.switch_change = order.change
    elif isinstance(order, DropChange):
        wire.drop_change = order.change
    elif isinstance(order, ReleaseKv):
        wire.release_kv = order.key
    else:
        wire.flush_cache.SetInParent()
    return pb.ToRank(order=wire)


def order_of(wire: pb.Order) -> RankOrder:
    """The order that order_message was given."""
    kind = wire.WhichOneof("kind") or "flush_cache"
    if kind == "start_profile":
        return StartProfile(wire.start_profile.name, wire.start_profile.steps)
    if kind == "prepare_weights":
        prepare = wire.prepare_weights
        return PrepareWeights(prepare.change, prepare.version, prepare.path, prepare.files)
    if kind == "prepare_placement":
        given = wire.prepare_placement
        return PreparePlacement(given.change, placement_of(given.placement))
    if kind == "prepare_generation":
        asked = wire.prepare_generation
        return PrepareGeneration(
            asked.change, asked.generation, tuple(asked.live), placement_of(asked.placement)
        )
    return _numbered(kind, wire) or _PLAIN[kind]()


def _numbered(kind: str, wire: pb.Order) -> RankOrder | None:
    """Orders that are one value."""
    if kind == "switch_change":
        return SwitchChange(wire.switch_change)
    if kind == "drop_change":
        return DropChange(wire.drop_change)
    return ReleaseKv(wire.release_kv) if kind == "release_kv" else None


def order_done_message(done: OrderDone) -> pb.FromRank:
    """The answer to an order."""
    return pb.FromRank(
        order_done=pb.OrderDone(**{name: getattr(done, name) for name in _DONE_FIELDS}),
    )


def order_done_of(wire: pb.OrderDone) -> OrderDone:
    """The record that order_done_message was given."""
    fields = {name: getattr(wire, name) for name in _DONE_FIELDS}
    return OrderDone(**(fields | {"files": tuple(wire.files), "rows": tuple(wire.rows)}))
