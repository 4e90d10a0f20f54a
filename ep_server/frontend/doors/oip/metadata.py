"""What the server says of itself and its one model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from tritonclient.grpc import model_config_pb2, service_pb2

import ep_server
from ep_server.frontend.doors.oip.inference import DEFAULT_PRIORITY, PRIORITY_LEVELS, VERSION
from ep_server.frontend.doors.oip.tensors import INPUTS, OUTPUTS, TensorSpec

PLATFORM: Final = "ep_server"
EXTENSIONS: Final = ("model_configuration", "statistics", "parameters")


def server_metadata() -> Any:
    """Name, version and extensions of the server."""
    return service_pb2.ServerMetadataResponse(
        name=PLATFORM, version=ep_server.__version__, extensions=EXTENSIONS
    )


def model_metadata(name: str) -> Any:
    """Inputs and outputs of the model."""
    return service_pb2.ModelMetadataResponse(
        name=name,
        versions=[VERSION],
        platform=PLATFORM,
        inputs=_tensors(INPUTS.values()),
        outputs=_tensors(OUTPUTS.values()),
    )


def model_config(name: str) -> Any:
    """The model as Triton would configure it: decoupled, no batches."""
    config = model_config_pb2.ModelConfig(
        name=name,
        platform=PLATFORM,
        backend=PLATFORM,
        max_batch_size=0,
        input=[
            model_config_pb2.ModelInput(
                name=spec.name, data_type=_type(spec), dims=[_dimension(spec)], optional=True
            )
            for spec in INPUTS.values()
        ],
        output=[
            model_config_pb2.ModelOutput(name=spec.name, data_type=_type(spec), dims=[_dimension(spec)])
            for spec in OUTPUTS.values()
        ],
    )
    config.model_transaction_policy.decoupled = True
    config.dynamic_batching.priority_levels = PRIORITY_LEVELS
    config.dynamic_batching.default_priority_level = DEFAULT_PRIORITY
    return service_pb2.ModelConfigResponse(config=config)


def repository_index(name: str, *, ready: bool, only_ready: bool) -> Any:
    """The model, unless it is not ready and `only_ready` is asked for."""
    index = service_pb2.RepositoryIndexResponse()
    if ready or not only_ready:
        index.models.add(name=name, version=VERSION, state="READY" if ready else "UNAVAILABLE")
    return index


def _tensors(specs: Iterable[TensorSpec]) -> list[Any]:
    kind = service_pb2.ModelMetadataResponse.TensorMetadata
    return [kind(name=spec.name, datatype=spec.datatypes[0], shape=[_dimension(spec)]) for spec in specs]


def _dimension(spec: TensorSpec) -> int:
    return 1 if spec.one else -1


def _type(spec: TensorSpec) -> Any:
    name = spec.datatypes[0]
    return model_config_pb2.DataType.Value("TYPE_STRING" if name == "BYTES" else f"TYPE_{name}")
