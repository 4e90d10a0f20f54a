"""[2] KV hand-off as callers see it: handles, and the checks before one is used."""

from __future__ import annotations

import asyncio
import logging
import secrets
from array import array
from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b
from ipaddress import ip_address
from typing import Any

from ep_server.config import Config
from ep_server.engine.engine import Engine
from ep_server.errors import EpServerError, InvalidArgument
from ep_server.models.families import read_spec
from ep_server.models.identity import kv_format, weights_digest
from ep_server.models.sizes import cache_dtype, serving_dtype
from ep_server.records import KvSource, Request
from ep_server.v1 import decode_pb2

log = logging.getLogger(__name__)

KEY_BYTES = 16
MAX_ADDRESS = 300  # characters; a host name has at most 253
RELEASE_SECONDS = 10.0
OTHER_WEIGHTS = 2**32 - 1  # no version of ours: the rank has the other server free its blocks
SENDS, FETCHES = ("prefill", "both"), ("decode", "both")


class Handoffs:
    """Of one server. Used in one event loop."""

    def __init__(self, config: Config, engine: Engine) -> None:
        """engine_id: of this server, for gateways."""
        self.role, self.engine_id = config.handoff.role, secrets.token_hex(16)
        self._config, self._engine = config, engine
        self._format = ""  # read when it is first asked for
        self._digest = (-1, "")  # version of weights, their digest

    async def warm_up(self) -> None:
        """Reads what identifies the weights, before others can replace their files."""
        if why := unreachable(self._config):
            log.warning(why)
        if self.role != "none":
            await self._own_weights()

    async def apply(self, proto: Any, request: Request) -> Request:
        """The request with what a GenerateRequest says about hand-offs. Raises: InvalidArgument."""
        if proto.hold_kv:
            self._check_role("hold_kv", "true", SENDS)
            request = replace(request, hold=secrets.token_bytes(KEY_BYTES))
        if proto.HasField("kv_handle"):
            self._check_role("kv_handle", "given", FETCHES)
            request = replace(request, source=await self._source(proto.kv_handle, request.prompt_ids))
        return request

    async def handle(self, request: Request) -> Any:
        """The KvHandle of an admitted request with hold_kv."""
        tokens, size = len(request.prompt_ids), self._config.scheduler.block_size
        rank = request.dp_rank or 0
        ready = next((each for each in self._engine.ready if each.rank == rank), None)  # not all are live
        return decode_pb2.KvHandle(
            address="" if ready is None else ready.kv_address,
            local="" if ready is None else ready.kv_local,
            key=request.hold,
            tokens=tokens,
            prompt=prompt_digest(request.prompt_ids),
            format=self.format,
            weights=await self._own_weights(),
            block_size=size,
            blocks=-(-tokens // size),
        )

    async def release(self, key: bytes) -> int:
        """Frees what is held under a key. Returns: blocks. Raises: InvalidArgument; as Engine.release_kv."""
        if len(key) != KEY_BYTES:
            raise InvalidArgument("key", f"{len(key)} bytes", f"{KEY_BYTES} bytes")
        return await self._engine.release_kv(key, RELEASE_SECONDS)

    async def _source(self, handle: Any, prompt: Sequence[int]) -> KvSource:
        """Raises: InvalidArgument."""
        if len(handle.key) != KEY_BYTES:
            raise InvalidArgument("kv_handle.key", f"{len(handle.key)} bytes", f"{KEY_BYTES} bytes")
        for name, value in (("address", handle.address), ("local", handle.local)):
            if len(value) > MAX_ADDRESS or not value.isprintable():
                allowed = f"at most {MAX_ADDRESS} printable characters"
                raise InvalidArgument(f"kv_handle.{name}", value[:MAX_ADDRESS], allowed)
        if not 1 <= handle.tokens <= len(prompt):
            raise InvalidArgument("kv_handle.tokens", handle.tokens, f"1 to {len(prompt)}, as of the prompt")
        if handle.prompt != prompt_digest(prompt[: handle.tokens]):
            shown = handle.prompt.hex()
            raise InvalidArgument("kv_handle.prompt", shown, "the digest of this prompt's first tokens")
        if handle.format != (own := self.format):
            raise InvalidArgument("kv_handle.format", handle.format, f"{own!r}, as of this server")
        version = self._engine.weights.version
        mine = await self._own_weights()
        if handle.weights != mine or not mine:
            given = handle.weights[: 2 * KEY_BYTES]
            log.warning("kv_handle.weights = %r, this server has %r: computing the prompt here", given, mine)
            version = OTHER_WEIGHTS
        return KvSource(handle.address, handle.local, handle.key, handle.tokens, version)

    def _check_role(self, name: str, value: str, roles: Sequence[str]) -> None:
        if self.role not in roles:
            allowed = f"absent: this server has handoff.role = {self.role}, not {' or '.join(roles)}"
            raise InvalidArgument(name, value, allowed)

    @property
    def format(self) -> str:
        """What must be equal for a hand-off: architecture, sizes and precision."""
        if not self._format:
            model = self._config.model
            spec = read_spec(model.path)
            dtype = serving_dtype(spec, model.dtype)
            self._format = kv_format(spec, dtype, cache_dtype(dtype, model.kv_dtype))
        return self._format

    async def _own_weights(self) -> str:
        """Of the weights in force; empty: unknown. Files are read once, outside the event loop.

        A path may hold other weights after an update. While ranks switch, a prompt may run with either.
        """
        version, path = self._engine.weights.version, self._engine.weights.path
        model = self._config.model
        if self._engine.weights.switching:
            return ""
        if version == 0 and model.load_format == "dummy":
            return f"dummy-{model.seed}"
        if self._digest[0] == version:
            return self._digest[1]
        try:
            digest = await asyncio.to_thread(weights_digest, path)
        except EpServerError as error:
            log.warning("no hand-offs of these weights: %s", error)
            digest = ""
        if self._digest[0] < version:
            self._digest = version, digest
        return digest


def unreachable(config: Config) -> str:
    """Why decode servers that can call this server cannot fetch from it; empty if nothing is known."""
    host = config.handoff.host
    here = _is_loopback(config.grpc.host) and config.cluster.nodes == 1
    if not config.handoff.sends or here or not _is_loopback(host):
        return ""
    return (
        f"handoff.host = {host}: only decode servers of this host can fetch KV blocks; "
        "for others, set an address of this host"
    )


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def prompt_digest(token_ids: Sequence[int]) -> bytes:
    """Of the tokens whose KV blocks a handle names."""
    return blake2b(array("q", token_ids).tobytes(), digest_size=KEY_BYTES).digest()
