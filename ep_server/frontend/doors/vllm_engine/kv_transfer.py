"""[2] KV hand-offs in the words of vLLM's connectors: kv_transfer_params as a gateway passes them on.

The prefill server gets do_remote_decode and answers with remote_*; the decode server gets that answer as it
is, with do_remote_prefill. What only our servers need is in `remote_handle`.
"""

from __future__ import annotations

import binascii
import json
from typing import Any

from google.protobuf.message import DecodeError

from ep_server.errors import InvalidArgument
from ep_server.frontend.requests import SHOWN
from ep_server.v1 import decode_pb2

FIELD = "kv_transfer_params_json"
MAX_PORT = 65535
# handoff.role -> kv_role of a vLLM server. The connector is the one whose params gateways pass on.
CONNECTOR = "NixlConnector"
ROLES = {"none": "", "prefill": "kv_producer", "decode": "kv_consumer", "both": "kv_both"}


def set_handoff(ours: Any, text: str) -> None:
    """Fills hold_kv or kv_handle of a GenerateRequest. Raises: InvalidArgument."""
    try:
        params = json.loads(text)
    except (ValueError, RecursionError):
        params = None
    if not isinstance(params, dict):
        raise InvalidArgument(FIELD, text[:SHOWN], "a JSON object")
    if _flag(params, "do_remote_decode"):
        ours.hold_kv = True
    if _flag(params, "do_remote_prefill"):
        ours.kv_handle.CopyFrom(_handle(params))


def params_of(handle: Any, engine_id: str, finished: str) -> str:
    """What the decode server needs, as JSON. finished: id of the request whose blocks are held."""
    host, _, port = handle.address.rpartition(":")
    params = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": engine_id,
        "remote_request_id": finished,
        "remote_block_ids": list(range(handle.blocks)),  # how many; the ranks name blocks by the handle
        "remote_host": host.strip("[]"),
        "remote_port": int(port or 0),
        "remote_handle": binascii.b2a_base64(handle.SerializeToString(), newline=False).decode(),
    }
    return json.dumps(params)


def _handle(params: dict[str, Any]) -> Any:
    """Raises: InvalidArgument."""
    name, given = f"{FIELD}.remote_handle", params.get("remote_handle")
    if not isinstance(given, str):
        raise InvalidArgument(name, str(given)[:SHOWN], "as another ep-server gave it")
    try:
        handle = decode_pb2.KvHandle.FromString(binascii.a2b_base64(given, strict_mode=True))
    except (ValueError, DecodeError) as error:
        raise InvalidArgument(name, given[:SHOWN], "as another ep-server gave it") from error
    host, port = params.get("remote_host"), params.get("remote_port")
    if host is not None and not (isinstance(host, str) and host.isprintable()):
        # half a surrogate pair, say, which no message can carry
        raise InvalidArgument(f"{FIELD}.remote_host", str(host)[:SHOWN], "printable text")
    if port is not None and (type(port) is not int or not 0 <= port <= MAX_PORT):
        raise InvalidArgument(f"{FIELD}.remote_port", str(port)[:SHOWN], f"0 to {MAX_PORT}")
    if host is not None and port is not None:  # a gateway may know another way
        handle.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return handle


def _flag(params: dict[str, Any], name: str) -> bool:
    value = params.get(name)
    if value is not None and not isinstance(value, bool):
        raise InvalidArgument(f"{FIELD}.{name}", str(value)[:SHOWN], "true or false")
    return bool(value)
