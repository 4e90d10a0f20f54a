"""[2] Turns the messages of a chat prompt into token ids, with the model's chat template."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from ep_server.errors import ContextLengthExceeded, InvalidArgument
from ep_server.frontend.requests import SHOWN, Limits, longest_text
from ep_server.frontend.served_model import ServedModel
from ep_server.text.chat_template import RESERVED

OWN_FIELDS = ("role", "content")  # of a message, which ChatMessage.fields may not set


def encode(chat: Any, model: ServedModel, limits: Limits) -> list[int]:
    """The prompt's token ids. Raises: InvalidArgument, ContextLengthExceeded."""
    template, tokenizer = model.chat_template, model.tokenizer
    if template is None or tokenizer is None:
        missing = "tokenizer" if tokenizer is None else "chat template"
        raise InvalidArgument(
            "chat", f"{len(chat.messages)} messages", f"absent: this model has no {missing}"
        )
    longest, size = longest_text(limits), chat.ByteSize()
    if size > longest:
        raise ContextLengthExceeded(f"chat of {size} bytes: at most {longest}")
    if not chat.messages:
        raise InvalidArgument("chat.messages", [], "at least one message")
    text = template.render(
        [_message(index, message) for index, message in enumerate(chat.messages)],
        tools=_json("chat.tools", chat.tools, list, "array") if chat.tools else None,
        variables=_object("chat.variables", chat.variables, RESERVED),
        add_generation_prompt=not chat.HasField("add_generation_prompt") or chat.add_generation_prompt,
        max_bytes=longest,
    )
    return tokenizer.encode(text, special=False)


def _message(index: int, message: Any) -> dict[str, Any]:
    name = f"chat.messages[{index}]"
    if not message.role:
        raise InvalidArgument(f"{name}.role", "", "who speaks, for example user")
    content = message.content if message.HasField("content") else None
    fields = _object(f"{name}.fields", message.fields, OWN_FIELDS)
    return {"role": message.role, "content": content, **fields}


def _object(name: str, text: str, reserved: tuple[str, ...]) -> dict[str, Any]:
    value: dict[str, Any] = _json(name, text, dict, "object") if text else {}
    taken = sorted(value.keys() & set(reserved))
    if taken:
        raise InvalidArgument(name, text[:SHOWN], f"a JSON object without {' and '.join(taken)}")
    return value


def _json(name: str, text: str, kind: type[Any], called: str) -> Any:
    try:
        value = json.loads(text, parse_constant=_not_json)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, kind):
        raise InvalidArgument(name, text[:SHOWN], f"a JSON {called}")
    return value


def _not_json(constant: str) -> NoReturn:
    raise ValueError(constant)
