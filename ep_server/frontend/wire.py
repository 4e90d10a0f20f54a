"""How often each field of a protobuf message occurs, read from its bytes. Decodes no value.

Decoding two bytes per element costs up to a hundred times their size, and holds the interpreter meanwhile.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from ep_server.errors import InvalidArgument

MAX_FIELDS = 1 << 14  # written one by one; a packed list is one
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_CONTINUED = bytes(range(128, 256))  # bytes of a varint that are not its last


def counts(data: bytes, descriptor: Any, most: Mapping[str, int]) -> Counter[str]:
    """Elements of each repeated field, by its dotted name, up to the first that has too many.

    Args:
        descriptor: of the message. Its repeated numbers must be varints.
        most: elements that a field may have, by its dotted name; absent = any number.
    Raises: InvalidArgument for bytes that are no message, or of more than MAX_FIELDS fields.
    """
    walk = _Walk(data, most)
    with suppress(_Enough):
        walk.message(0, len(data), descriptor, "")
    return walk.found


class _Enough(Exception):
    """A field has too many elements: the rest of the message does not matter."""


class _Walk:
    def __init__(self, data: bytes, most: Mapping[str, int]) -> None:
        self.found: Counter[str] = Counter()
        self._data = data
        self._most = most
        self._fields = 0

    def message(self, at: int, end: int, descriptor: Any, prefix: str) -> None:
        """Counts the fields in a part of the data. Raises: _Enough once there are too many."""
        while at < end:
            self._fields += 1
            if self._fields > MAX_FIELDS:
                allowed = f"at most {MAX_FIELDS}, with repeated numbers packed"
                raise InvalidArgument("request", f"more than {MAX_FIELDS} fields", allowed)
            tag, at = self._varint(at, end)
            start, at = self._value(tag & 7, at, end)
            field = descriptor.fields_by_number.get(tag >> 3)
            if field is not None:
                self._count(field, tag & 7, start, at, prefix)

    def _count(self, field: Any, kind: int, start: int, end: int, prefix: str) -> None:
        name = prefix + field.name
        packed = kind == _BYTES and field.is_packed
        if field.is_repeated:
            self.found[name] += len(self._data[start:end].translate(None, _CONTINUED)) if packed else 1
            if self.found[name] > self._most.get(name, len(self._data)):
                raise _Enough
        if kind == _BYTES and field.message_type is not None:
            self.message(start, end, field.message_type, f"{name}.")

    def _value(self, kind: int, at: int, end: int) -> tuple[int, int]:
        """Where the value of a field begins and ends."""
        if kind == _VARINT:
            _, after = self._varint(at, end)
        elif kind == _BYTES:
            size, at = self._varint(at, end)
            after = at + size
        elif kind in (_FIXED32, _FIXED64):
            after = at + (4 if kind == _FIXED32 else 8)
        else:
            raise self._broken()
        if after > end:
            raise self._broken()
        return at, after

    def _varint(self, at: int, end: int) -> tuple[int, int]:
        """A number and where it ends."""
        value = 0
        for shift in range(0, 70, 7):
            if at >= end:
                break
            byte = self._data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value, at
        raise self._broken()

    def _broken(self) -> InvalidArgument:
        return InvalidArgument("request", f"{len(self._data)} bytes", "a message of the method's type")
