"""`ep-server generate`: sends one request to a running server and streams its text to the terminal."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import grpc
import typer

from ep_server.cli import options
from ep_server.client import Client
from ep_server.errors import ConfigError

NAME = "generate"
PANEL = {"rich_help_panel": "Sampling", "show_default": False}


def command(
    prompt: Annotated[str, typer.Argument(help="Text to continue. - reads standard input.")],
    ids: Annotated[bool, typer.Option("--ids", help="PROMPT is token ids, separated by spaces.")] = False,
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

    Without a sampling flag the model's own default applies. With -n above 1, a text is printed when complete.
    """
    text = sys.stdin.read() if prompt == "-" else prompt
    given: str | list[int] = _ids(text) if ids else text
    fields = {
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "seed": seed,
        "stop_strings": stop or None,
        "num_sequences": count,
    }
    texts: dict[int, str] = {}  # of several sequences: each is printed when it ends
    with Client(options.target(address, tls_ca, tls_cert, tls_key, token_file)) as client:
        has_text = _has_text(client, ids)
        for event in client.generate(given, timeout=timeout, **fields):
            kind = event.WhichOneof("event")
            if kind == "tokens":
                piece = event.tokens.text if has_text else "".join(f"{t} " for t in event.tokens.token_ids)
                if (count or 1) == 1:
                    print(piece, end="", flush=True)
                else:
                    texts[event.tokens.index] = texts.get(event.tokens.index, "") + piece
            elif kind == "finished":
                index = event.finished.index
                print(f"[{index}] {texts.get(index, '')}" if (count or 1) > 1 else "", flush=True)
                if stats:
                    print(_stats(event.finished), file=sys.stderr)


def _has_text(client: Client, ids: bool) -> bool:
    """Whether answers have text. Without the Control service, prompts of ids get ids."""
    try:
        return bool(client.model_info().has_tokenizer)
    except grpc.RpcError as error:
        if isinstance(error, grpc.Call) and error.code() is grpc.StatusCode.UNIMPLEMENTED:
            return not ids
        raise


def _ids(text: str) -> list[int]:
    try:
        return [int(word) for word in text.split()]
    except ValueError:
        raise ConfigError("PROMPT", text, "token ids separated by spaces") from None


def _stats(finished: Any) -> str:
    usage, timings = finished.usage, finished.timings
    decode = timings.total_seconds - timings.first_token_seconds
    rate = (usage.output_tokens - 1) / decode if decode > 0 else 0.0
    return (
        f"{usage.prompt_tokens} prompt tokens ({usage.cached_tokens} cached), {usage.output_tokens} output, "
        f"first after {timings.first_token_seconds:.3f} s ({timings.queued_seconds:.3f} s queued), "
        f"then {rate:.1f} tokens/s"
    )
