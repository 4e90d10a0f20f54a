"""`ep-server generate`: sends one request to a running server and streams its text to the terminal."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from ep_server.cli import options
from ep_server.client import Client, Finished, Stream
from ep_server.errors import ConfigError, SwitchedOff

NAME = "generate"
PANEL = {"rich_help_panel": "Sampling", "show_default": False}
FORMAT = {"rich_help_panel": "Output format", "show_default": False}


def command(
    prompt: Annotated[str, typer.Argument(help="Text to continue. - reads standard input.")],
    ids: Annotated[bool, typer.Option("--ids", help="PROMPT is token ids, separated by spaces.")] = False,
    chat: Annotated[
        bool, typer.Option("--chat", help="PROMPT is a user's message; the model's chat template applies.")
    ] = False,
    system: Annotated[str | None, typer.Option(help="System message before it; implies --chat.")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(help="Most tokens of output.", **PANEL)] = None,
    temperature: Annotated[
        float | None, typer.Option(help="0 always takes the most likely token.", **PANEL)
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(help="Keep only this many most likely tokens.", **PANEL)
    ] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Keep the most likely tokens with this total probability.", **PANEL)
    ] = None,
    min_p: Annotated[
        float | None, typer.Option(help="Keep tokens this many times as likely as the best.", **PANEL)
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the random numbers.", **PANEL)] = None,
    count: Annotated[int | None, typer.Option("-n", help="Number of continuations.", **PANEL)] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Stop string. Repeat for several.", **PANEL)] = None,
    json_schema: Annotated[
        str | None, typer.Option(help="JSON Schema that the output follows, or @FILE.", **FORMAT)
    ] = None,
    regex: Annotated[str | None, typer.Option(help="The whole output matches it.", **FORMAT)] = None,
    choice: Annotated[
        list[str] | None, typer.Option(help="One possible output. Repeat for several.", **FORMAT)
    ] = None,
    ebnf: Annotated[
        str | None, typer.Option(help="Grammar that the output follows, or @FILE.", **FORMAT)
    ] = None,
    stats: Annotated[
        bool, typer.Option("--stats", help="Print usage and timings to standard error.")
    ] = False,
    timeout: Annotated[float | None, typer.Option(help="Seconds until DEADLINE_EXCEEDED.")] = None,
    address: options.Address = options.ADDRESS,
    tls_ca: options.TlsCa = "",
    tls_cert: options.TlsCert = "",
    tls_key: options.TlsKey = "",
    token_file: options.TokenFile = "",
) -> None:
    """Continue a prompt and stream the text to the terminal.

    Without a sampling flag the model's own default applies. With -n above 1, texts are printed at the end.
    """
    text = sys.stdin.read() if prompt == "-" else prompt
    chat = chat or system is not None
    if chat and ids:
        raise ConfigError("--ids", True, "absent beside --chat and --system")
    fields: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "seed": seed,
        "stop_strings": stop or None,
        "num_sequences": count,
        "json_schema": _content("--json-schema", json_schema),
        "regex": regex,
        "choice": choice or None,
        "ebnf": _content("--ebnf", ebnf),
    }
    with Client(options.target(address, tls_ca, tls_cert, tls_key, token_file)) as client:
        has_text = _has_text(client, ids)
        if chat:
            messages = [{"role": "system", "content": system}] if system is not None else []
            stream = client.chat([*messages, {"role": "user", "content": text}], timeout=timeout, **fields)
        else:
            stream = client.generate(_ids(text) if ids else text, timeout=timeout, **fields)
        _print(stream, has_text, several=(count or 1) > 1)
    if stats:
        for output in stream.output.sequences:
            if output.finished is not None:
                print(_stats(output.finished), file=sys.stderr)


def _print(stream: Stream, has_text: bool, *, several: bool) -> None:
    """Prints one sequence as it arrives, several of them when all are complete."""
    for tokens in stream:
        if not several:
            print(tokens.text if has_text else _spaced(tokens.token_ids), end="", flush=True)
    if not several:
        print(flush=True)
        return
    for index, output in enumerate(stream.output.sequences):
        print(f"[{index}] {output.text if has_text else _spaced(output.token_ids)}", flush=True)


def _spaced(ids: Sequence[int]) -> str:
    return "".join(f"{token} " for token in ids)


def _has_text(client: Client, ids: bool) -> bool:
    """Whether answers have text. Without the Control service, prompts of ids get ids."""
    try:
        return bool(client.model_info().has_tokenizer)
    except SwitchedOff:
        return not ids


def _content(name: str, value: str | None) -> str | None:
    """The value, or the content of the file that @FILE names. Raises: ConfigError."""
    if value is None or not value.startswith("@"):
        return value
    try:
        return Path(value[1:]).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(name, value, f"a text, or @ and a readable file ({error})") from error


def _ids(text: str) -> list[int]:
    try:
        return [int(word) for word in text.split()]
    except ValueError:
        raise ConfigError("PROMPT", text, "token ids separated by spaces") from None


def _stats(finished: Finished) -> str:
    usage, timings = finished.usage, finished.timings
    return (
        f"{usage.prompt_tokens} prompt tokens ({usage.cached_tokens} cached), {usage.output_tokens} output, "
        f"first after {timings.first_token_seconds:.3f} s ({timings.queued_seconds:.3f} s queued), "
        f"then {timings.tokens_per_second(usage):.1f} tokens/s"
    )
