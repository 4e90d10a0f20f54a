"""Renders chat messages with a checkpoint's own Jinja template, in a sandbox, as transformers does.

Templates come with the checkpoint; messages come from callers and are plain JSON values to a template.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Environment, Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ep_server.errors import CheckpointError, ContextLengthExceeded, InvalidArgument
from ep_server.models.families import is_there, read_file, read_json

RENDER_SECONDS = 5.0
RESERVED = (
    "messages",
    "tools",
    "documents",
    "add_generation_prompt",
)  # a caller's variables may not set them
SHOWN = 200  # characters of a template's own error that a message repeats
TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class ChatTemplate:
    """A checkpoint's chat template. Calls are independent of each other."""

    def __init__(self, templates: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        """templates: Jinja sources; "default", and maybe "tool_use" for requests with tools.

        Raises: CheckpointError for a source that does not compile.
        """
        environment = _environment()
        try:
            self._templates = {name: environment.from_string(text) for name, text in templates.items()}
        except Exception as error:  # a TemplateError, or what Python raises for its code
            raise CheckpointError(f"the chat template does not compile: {_shown(error)}") from error
        self._special_tokens = dict(special_tokens)

    @staticmethod
    def load(directory: Path) -> ChatTemplate | None:
        """Reads chat_template.jinja, else tokenizer_config.json; None where neither has a template.

        Raises: CheckpointError for a broken file.
        """
        file, own = directory / "tokenizer_config.json", directory / "chat_template.jinja"
        config = read_json(file) if is_there(file) else {}
        given = _text(own) if is_there(own) else config.get("chat_template")
        if not given:
            return None
        if isinstance(given, str):
            given = [{"name": "default", "template": given}]
        try:
            templates = {str(each["name"]): str(each["template"]) for each in given}
        except (TypeError, KeyError):
            raise CheckpointError(f"{file}: chat_template is neither a text nor named templates") from None
        if "default" not in templates:
            raise CheckpointError(f"{file}: chat_template has no template named default")
        return ChatTemplate(templates, dict(_special_tokens(config)))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Any] | None = None,
        variables: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        max_bytes: int,
        seconds: float = RENDER_SECONDS,
    ) -> str:
        """The prompt's text.

        Args:
            messages, tools, variables: plain JSON values.
            max_bytes: of the text. seconds: that rendering may take.
        Raises: InvalidArgument if the template refuses or fails, ContextLengthExceeded for a longer text.
        """
        given = {**self._special_tokens, **(variables or {})}
        given |= {"messages": messages, "tools": tools, "documents": None}
        given["add_generation_prompt"] = add_generation_prompt
        try:
            return _joined(self._template(tools).generate(given), max_bytes, time.monotonic() + seconds)
        except (InvalidArgument, ContextLengthExceeded):
            raise
        except Exception as error:  # whatever the template's expressions raise for these messages
            allowed = f"what the model's chat template accepts ({_shown(error)})"
            raise InvalidArgument("chat.messages", _count(messages), allowed) from error

    def _template(self, tools: Sequence[Any] | None) -> Template:
        if tools is not None and "tool_use" in self._templates:
            return self._templates["tool_use"]
        return self._templates["default"]


class _Generation(Extension):
    """Renders the body of `{% generation %}`, which marks an assistant's words for training."""

    tags = {"generation"}  # noqa: RUF012 - as the base class declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Returns the body."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> Environment:
    """What transformers gives a chat template, in the same sandbox."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {"raise_exception": _raise, "strftime_now": _strftime_now}
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is; Jinja's own filter escapes it for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _joined(pieces: Iterator[str], max_bytes: int, end: float) -> str:
    text, size = [], 0
    for piece in pieces:
        size += len(piece.encode())
        if size > max_bytes:
            raise ContextLengthExceeded(f"chat of more than {max_bytes} bytes of text: at most {max_bytes}")
        if time.monotonic() > end:
            raise InvalidArgument("chat", f"{size} bytes so far", "rendered in time: send a shorter chat")
        text.append(piece)
    return "".join(text)


def _special_tokens(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """They are texts, or objects with the text as `content`."""
    for name in TOKENS:
        token = config.get(name)
        content = token.get("content") if isinstance(token, dict) else token
        if isinstance(content, str):
            yield name, content


def _text(file: Path) -> str:
    try:
        return read_file(file).decode()
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{file}: not UTF-8 text ({error})") from error


def _count(messages: Sequence[Any]) -> str:
    return "1 message" if len(messages) == 1 else f"{len(messages)} messages"


def _shown(error: BaseException) -> str:
    text = str(error) or type(error).__name__
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
