"""[2] The KServe Open Inference Protocol v2 as Triton serves it: inference.GRPCInferenceService.

Its stubs are those of tritonclient, so that a server and a client of it fit into one process. The tensors are
those of Triton's vLLM backend: text_input and sampling_parameters in, text_output out; or input_ids and
output_ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from grpc import aio
from tritonclient.grpc import service_pb2, service_pb2_grpc

from ep_server.config import Config
from ep_server.engine.engine import Engine
from ep_server.errors import InvalidArgument
from ep_server.frontend.doors.oip.service import SERVICE, InferenceService
from ep_server.frontend.doors.oip.statistics import Statistics
from ep_server.frontend.doors.oip.tensors import INPUTS, OUTPUTS
from ep_server.frontend.generation import Generator, limits_of
from ep_server.frontend.messages import Method, field_counts
from ep_server.frontend.served_model import ServedModel

MAX_PARAMETERS = 64


class InferenceDoor:
    """inference.GRPCInferenceService on every port of a server."""

    service: Any = SERVICE

    def __init__(self, config: Config, engine: Engine, model: ServedModel) -> None:
        self._config = config
        self._engine = engine
        self._statistics = Statistics(model.name)

    def methods(self) -> Mapping[str, Method]:
        """Limits of the calls that carry a prompt. Requests of a stream are admitted one by one."""
        most = self._config.grpc.max_message_bytes
        return {
            f"/{SERVICE.full_name}/ModelInfer": Method(most, self._engine.check_room, self._check),
            f"/{SERVICE.full_name}/ModelStreamInfer": Method(most, lambda: None, self._check),
        }

    def add_to(self, server: aio.Server, generator: Generator) -> None:
        """Adds the service to a port. generator: of that port."""
        grpc = self._config.grpc
        service = InferenceService(generator, self._statistics, grpc.unread_seconds, grpc.max_streams)
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(service, server)

    def _check(self, data: bytes) -> None:
        """Counts the elements of a long message. Raises: InvalidArgument."""
        elements = limits_of(self._engine).max_context
        most = {
            "inputs": len(INPUTS),
            "raw_input_contents": len(INPUTS),
            "outputs": len(OUTPUTS),
            "parameters": MAX_PARAMETERS,
            "inputs.shape": 2 * len(INPUTS),
            "inputs.parameters": 1,
            "outputs.parameters": 1,
            "inputs.contents.bool_contents": len(INPUTS),
            "inputs.contents.int_contents": elements,
            "inputs.contents.int64_contents": elements,
            "inputs.contents.bytes_contents": len(INPUTS),
            "inputs.contents.uint_contents": 0,
            "inputs.contents.uint64_contents": 0,
        }
        found = field_counts(data, service_pb2.ModelInferRequest.DESCRIPTOR, most)
        for name, limit in most.items():
            if found[name] > limit:
                raise InvalidArgument(name, f"{found[name]} elements", f"at most {limit}")


def open_door(config: Config, engine: Engine, model: ServedModel) -> InferenceDoor:
    """The door of one server."""
    return InferenceDoor(config, engine, model)
