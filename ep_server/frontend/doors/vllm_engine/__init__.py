"""[2] vllm.grpc.engine.VllmEngine, the protocol of the SMG gateway and of llm-d.

The gateway speaks OpenAI's API to its callers. It applies the chat template, encodes and decodes text, and
parses tool calls; this server gets token ids and returns token ids. Stubs: smg-grpc-proto.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from grpc import aio

from ep_server.config import Config
from ep_server.engine.engine import Engine
from ep_server.frontend.doors.vllm_engine.protocol import GENERATE, SERVICE, service_grpc
from ep_server.frontend.doors.vllm_engine.requests import check_long_message
from ep_server.frontend.doors.vllm_engine.service import VllmEngineService
from ep_server.frontend.generation import Generator, limits_of
from ep_server.frontend.messages import Method
from ep_server.frontend.served_model import ServedModel


class VllmEngineDoor:
    """vllm.grpc.engine.VllmEngine on every port of a server."""

    service: Any = SERVICE

    def __init__(self, config: Config, engine: Engine, model: ServedModel) -> None:
        self._config = config
        self._engine = engine
        self._model = model

    def methods(self) -> Mapping[str, Method]:
        """Limits of Generate, the call that carries a prompt."""

        def check(data: bytes) -> None:
            check_long_message(data, self._model, limits_of(self._engine))

        return {GENERATE: Method(self._config.grpc.max_message_bytes, self._engine.check_room, check)}

    def add_to(self, server: aio.Server, generator: Generator) -> None:
        """Adds the service to a port. generator: of that port."""
        service_grpc.add_VllmEngineServicer_to_server(VllmEngineService(generator, self._config), server)


def open_door(config: Config, engine: Engine, model: ServedModel) -> VllmEngineDoor:
    """The door of one server."""
    return VllmEngineDoor(config, engine, model)
