"""[2] The stubs of vllm.grpc.engine.VllmEngine, from the package smg-grpc-proto."""

from __future__ import annotations

from typing import Any, Final

from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2, vllm_engine_pb2_grpc

pb: Final[Any] = vllm_engine_pb2
common: Final[Any] = common_pb2
service_grpc: Final[Any] = vllm_engine_pb2_grpc
SERVICE: Final[Any] = pb.DESCRIPTOR.services_by_name["VllmEngine"]
GENERATE: Final[str] = f"/{SERVICE.full_name}/Generate"
