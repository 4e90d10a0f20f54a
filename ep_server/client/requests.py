"""Builds a GenerateRequest from a prompt and flat fields."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from ep_server.errors import InvalidArgument
from ep_server.v1 import decode_pb2

_PARTS: dict[str, str] = {
    name: part
    for part, message in (
        ("sampling", decode_pb2.Sampling),
        ("stopping", decode_pb2.Stopping),
        ("response", decode_pb2.ResponseOptions),
        ("grammar", decode_pb2.Grammar),
    )
    for name in message.DESCRIPTOR.fields_by_name
}
_AS_JSON = ("json_schema", "structural_tag")
# What a field can carry at all, by its type on the wire.
_CARRIED: dict[int, str] = {
    FieldDescriptor.CPPTYPE_UINT32: f"whole numbers, 0 to {2**32 - 1}",
    FieldDescriptor.CPPTYPE_UINT64: f"whole numbers, 0 to {2**64 - 1}",
    FieldDescriptor.CPPTYPE_INT32: f"whole numbers, {-(2**31)} to {2**31 - 1}",
    FieldDescriptor.CPPTYPE_DOUBLE: "a number",
    FieldDescriptor.CPPTYPE_STRING: "valid UTF-8 text",
    FieldDescriptor.CPPTYPE_BOOL: "true or false",
}
SHOWN = 80  # characters of a value that an error message repeats


def chat_prompt(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Any] | None = None,
    variables: Mapping[str, Any] | None = None,
    *,
    add_generation_prompt: bool = True,
) -> Any:
    """A Chat, as a prompt of generate_request(). messages: as in OpenAI's API: role, content and other keys.

    Raises: InvalidArgument.
    """
    chat = decode_pb2.Chat(add_generation_prompt=add_generation_prompt)
    if tools is not None:
        chat.tools = _json("chat.tools", list(tools))
    if variables:
        chat.variables = _json("chat.variables", dict(variables))
    for index, message in enumerate(messages):
        wire, name = chat.messages.add(), f"chat.messages[{index}]"
        given = dict(message)
        for key in ("role", "content"):
            value = given.pop(key, None)
            if value is not None and not isinstance(value, str):
                raise InvalidArgument(f"{name}.{key}", _shown(value), "text")
            if value is not None:
                _set(wire, key, value)
        if given:
            wire.fields = _json(f"{name}.fields", given)
    return chat


def generate_request(prompt: str | Sequence[int] | Any, **fields: Any) -> Any:
    """A GenerateRequest.

    Args:
        prompt: text, token ids, or a chat_prompt().
        fields: flat names of decode.proto; None means "not given". json_schema and structural_tag may be
            Python values.
    Raises: TypeError for a name that the contract does not have, InvalidArgument for a value that the field
        cannot carry; other bad values are the server's to refuse.
    """
    request: Any = decode_pb2.GenerateRequest()
    if isinstance(prompt, str):
        _set(request, "text", prompt)
    elif isinstance(prompt, Message):
        request.chat.CopyFrom(prompt)
    else:
        request.token_ids.SetInParent()
        _set(request.token_ids, "ids", list(prompt))
    for name, value in fields.items():
        if value is None:
            continue
        message = getattr(request, _PARTS[name]) if name in _PARTS else request
        if name not in message.DESCRIPTOR.fields_by_name:
            raise TypeError(f"{name!r} is not a field of a request")
        _check_one_grammar(request, name)
        if name in _AS_JSON and not isinstance(value, str):
            _set(message, name, _json(name, value))
        elif name == "choice" and not isinstance(value, Message):
            message.choice.SetInParent()
            _set(message.choice, "choices", value)
        else:
            _set(message, name, value)
    return request


def _check_one_grammar(request: Any, name: str) -> None:
    """The last of several would win silently. Raises: InvalidArgument."""
    given = request.grammar.WhichOneof("source")
    if _PARTS.get(name) == "grammar" and given not in (None, name):
        raise InvalidArgument(name, "given", f"absent beside {given}: a request has one grammar")


def _json(name: str, value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        raise InvalidArgument(name, _shown(value), "JSON values") from None


def _shown(value: Any) -> Any:
    text = repr(value)
    return value if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def _set(message: Any, name: str, value: Any) -> None:
    try:
        if isinstance(value, Message):
            getattr(message, name).CopyFrom(value)
        elif isinstance(value, dict):
            getattr(message, name).update(value)
        elif isinstance(value, (list, tuple)):
            getattr(message, name).extend(value)
        else:
            setattr(message, name, value)
    except (TypeError, ValueError, AttributeError):
        field = message.DESCRIPTOR.fields_by_name[name]
        raise InvalidArgument(
            name, _shown(value), _CARRIED.get(field.cpp_type, "as in decode.proto")
        ) from None
