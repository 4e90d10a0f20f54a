"""Options shared by commands: the configuration's fields, and the address of a server.

The former are made from config.fields(), which has the help text, default and range of each.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import Field
from pathlib import Path
from typing import Annotated, Any, Optional

import typer
from typer.core import TyperCommand

from ep_server.client import Target
from ep_server.config import Config, field_type, fields
from ep_server.errors import ConfigError

SHORT = {
    "model.path": "--model",
    "model.load_format": "--load-format",
    "model.routing": "--routing",
    "parallel.ranks": "--ranks",
    "grpc.host": "--host",
    "grpc.port": "--port",
    "cluster.nodes": "--nodes",
    "cluster.node_rank": "--node-rank",
    "cluster.rendezvous": "--rendezvous",
}

SERVER = "Server"
Address = Annotated[str, typer.Option(help="host:port of the server.", rich_help_panel=SERVER)]
TlsCa = Annotated[str, typer.Option(help="PEM CA bundle. Enables TLS.", rich_help_panel=SERVER)]
TlsCert = Annotated[str, typer.Option(help="PEM client certificate.", rich_help_panel=SERVER)]
TlsKey = Annotated[str, typer.Option(help="PEM client key.", rich_help_panel=SERVER)]
TokenFile = Annotated[str, typer.Option(help="File with the bearer token.", rich_help_panel=SERVER)]
ADDRESS = "127.0.0.1:50051"
LAST_PORT = 65_535  # gRPC would take larger ones modulo 65,536


class Command(TyperCommand):
    """A command whose help has one line per paragraph: the terminal wraps them."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        paragraphs = inspect.cleandoc(self.help or "").split("\n\n")
        self.help = "\n\n".join(" ".join(each.split()) for each in paragraphs)


def target(address: str, tls_ca: str, tls_cert: str, tls_key: str, token_file: str) -> Target:
    """The server that the options name. Raises: ConfigError for a bad address or an unreadable file."""
    port = address.rpartition(":")[2]
    if ":" not in address or not port or (port.isdecimal() and not 1 <= int(port) <= LAST_PORT):
        raise ConfigError("--address", address, f"host:port, with a port from 1 to {LAST_PORT}")
    for flag, path in (("--tls-ca", tls_ca), ("--tls-cert", tls_cert), ("--tls-key", tls_key)):
        if path and not Path(path).is_file():
            raise ConfigError(flag, path, "a readable file")
    token = ""
    if token_file:
        try:
            lines = Path(token_file).read_text(encoding="utf-8").splitlines()
        except OSError as error:
            raise ConfigError("--token-file", token_file, f"a readable file ({error.strerror})") from error
        token = next((line.strip() for line in lines if line.strip() and not line.startswith("#")), "")
    return Target(address, tls_ca, tls_cert, tls_key, token)


def refuse_panels(context: typer.Context, refused: Mapping[str, str]) -> None:
    """Refuses options of some help panels, which would have no effect.

    refused: by panel, when its options are allowed, as in "with --plan". Raises: ConfigError.
    """
    for parameter in context.command.params:
        panel = getattr(parameter, "rich_help_panel", "")
        source = context.get_parameter_source(parameter.name)
        if panel in refused and source is not None and source.name == "COMMANDLINE":
            value = context.params[parameter.name]
            raise ConfigError(parameter.opts[0], value, f"given only {refused[panel]}")


def with_config(function: Callable[..., None]) -> Callable[..., None]:
    """Gives `function(config, ...)` a flag per configuration field, and --config for a TOML file."""
    own = [p for p in inspect.signature(function, eval_str=True).parameters.values() if p.name != "config"]
    parameters = [*own, _config_file(), *(_flag(*entry) for entry in fields())]

    def command(**given: Any) -> None:
        file = given.pop("config_file")
        flags = {name: given.pop(_parameter(name)) for name, _, _ in fields()}
        function(Config.load(file, flags), **given)

    command.__doc__ = function.__doc__
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    return command


def range_text(item: Field[Any]) -> str:
    """Allowed values, for people; "" if any value is allowed."""
    low, high, choices = (item.metadata[key] for key in ("low", "high", "choices"))
    if choices is not None:
        return " | ".join(choices) + ("" if low is None else f" | {low} to {high}")
    if low is not None:
        return f"{low} to {high}" if high is not None else f"at least {low}"
    return "true | false" if isinstance(item.default, bool) else ""


def default_text(item: Field[Any]) -> str:
    """The default, for people."""
    return str(item.default).lower() if isinstance(item.default, bool) else str(item.default)


def _parameter(name: str) -> str:
    return name.replace(".", "__")


def _flag(name: str, section: str, item: Field[Any]) -> inspect.Parameter:
    kind = field_type(section, item.name)
    flag = "--" + name.replace(".", "-").replace("_", "-")
    names = [*([SHORT[name]] if name in SHORT else []), flag]
    if kind is bool:
        kind = str  # --x true and --x false, not --x and --no-x
    allowed, default = range_text(item), default_text(item)
    facts = "; ".join([*([allowed] if allowed else []), *([f"default {default}"] if default else [])])
    help = item.metadata["help"] + (f" [dim]({facts})[/]" if facts else "")
    option = typer.Option(*names, help=help, show_default=False, rich_help_panel=section)
    return inspect.Parameter(
        _parameter(name),
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[Optional[kind], option],  # noqa: UP045 - built at run time
    )


def _config_file() -> inspect.Parameter:
    option = typer.Option("--config", help="TOML file with one table per section.", show_default=False)
    return inspect.Parameter(
        "config_file",
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[Optional[str], option],  # noqa: UP045
    )
