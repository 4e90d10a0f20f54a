"""Hypothesis strategies of protobuf messages: valid ones that were changed, as messages or as bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from google.protobuf.descriptor import FieldDescriptor as Field
from hypothesis import strategies as st

Draw = st.DrawFn

_INTEGERS = (0, 1, 2, 3, 17, 255, 256, 65_535, 2**31 - 1, 2**32 - 1, 2**63 - 1, 2**64 - 1)
_BOUNDS = {
    Field.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    Field.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    Field.CPPTYPE_UINT32: (0, 2**32 - 1),
    Field.CPPTYPE_UINT64: (0, 2**64 - 1),
    Field.CPPTYPE_ENUM: (-(2**31), 2**31 - 1),
}
_FLOATS = (0.0, -0.0, 0.5, 1.0, -1.0, 2.0, 1e-300, 1e300, float("inf"), float("-inf"), float("nan"))
_TEXTS = ("", "a", "1", "true", "ü\u0000", "\U0010ffff" * 3, "{", "[" * 2000, '{"a":', "%s{}", "x" * 5000)


def _numbers(kind: int) -> st.SearchStrategy[Any]:
    low, high = _BOUNDS[kind]
    known = [value for each in _INTEGERS for value in (each, -each) if low <= value <= high]
    return st.sampled_from(known)


_SCALARS = {
    **{kind: _numbers(kind) for kind in _BOUNDS},
    Field.CPPTYPE_FLOAT: st.sampled_from([value for value in _FLOATS if abs(value) != 1e300]),
    Field.CPPTYPE_DOUBLE: st.sampled_from(_FLOATS),
    Field.CPPTYPE_BOOL: st.booleans(),
}


def _scalar(field: Any, texts: Sequence[str]) -> st.SearchStrategy[Any]:
    if field.cpp_type != Field.CPPTYPE_STRING:
        return _SCALARS[field.cpp_type]
    chosen = st.sampled_from([*_TEXTS, *texts])
    return (
        st.one_of(chosen.map(str.encode), st.binary(max_size=40))
        if field.type == Field.TYPE_BYTES
        else chosen
    )


def change(draw: Draw, message: Any, texts: Sequence[str]) -> None:
    """Changes one field, at any depth. texts: that mean something to the server."""
    if not message.DESCRIPTOR.fields:
        return
    field = draw(st.sampled_from(list(message.DESCRIPTOR.fields)))
    act = draw(st.sampled_from(("set", "set", "set", "clear")))
    if act == "clear":
        message.ClearField(field.name)
    elif field.message_type is not None and field.message_type.GetOptions().map_entry:
        key, value = field.message_type.fields_by_name["key"], field.message_type.fields_by_name["value"]
        name = draw(_scalar(key, texts))
        if value.message_type is None:
            getattr(message, field.name)[name] = draw(_scalar(value, texts))
        else:
            change(draw, getattr(message, field.name)[name], texts)
    elif field.message_type is not None:
        below = getattr(message, field.name)
        if field.is_repeated:
            below = draw(st.sampled_from(list(below))) if below and draw(st.booleans()) else below.add()
        else:
            below.SetInParent()
        change(draw, below, texts)
    elif field.is_repeated:
        count = draw(st.sampled_from((1, 2, 5, 300)))
        getattr(message, field.name).extend([draw(_scalar(field, texts))] * count)
    else:
        setattr(message, field.name, draw(_scalar(field, texts)))


@st.composite
def changed(draw: Draw, seeds: Sequence[Any], texts: Sequence[str] = ()) -> bytes:
    """One of the messages: as it is, or with a few fields changed, and sometimes a few bytes."""
    chosen = draw(st.sampled_from(seeds))
    message = type(chosen)()
    message.CopyFrom(chosen)
    for _ in range(draw(st.sampled_from((0, 1, 1, 2, 4)))):
        change(draw, message, texts)
    data = message.SerializeToString()
    return draw(edited(data)) if draw(st.integers(0, 7)) == 7 else data


@st.composite
def edited(draw: Draw, data: bytes) -> bytes:
    """The bytes with a few of them replaced, removed, repeated or cut off."""
    found = bytearray(data)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, max(len(found) - 1, 0)))
        match draw(st.sampled_from(("replace", "remove", "insert", "repeat", "cut"))):
            case "replace":
                found[at : at + 1] = draw(st.binary(min_size=1, max_size=1))
            case "remove":
                del found[at : at + draw(st.integers(1, 8))]
            case "insert":
                found[at:at] = draw(st.binary(min_size=1, max_size=8))
            case "repeat":
                found[at:at] = found[at : at + 16] * draw(st.sampled_from((1, 3, 50)))
            case "cut":
                del found[at:]
    return bytes(found)
