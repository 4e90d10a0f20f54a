"""Hand-offs as a gateway makes them: VllmEngine's call at the prefill server, kv_transfer_params_json."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import grpc

from ep_server.client import AsyncClient, AsyncStream
from ep_server.frontend.doors.vllm_engine.kv_transfer import set_handoff
from ep_server.frontend.doors.vllm_engine.protocol import pb, service_grpc
from ep_server.v1 import decode_pb2

log = logging.getLogger(__name__)

PREFILL_SECONDS = 30.0


class Gateway:
    """Prompts are computed to their end at one server, and held there until the other one fetches them."""

    def __init__(self, prefill: AsyncClient, decode: AsyncClient) -> None:
        self._prefill, self._decode = prefill, decode
        self._calls = service_grpc.VllmEngineStub(prefill.channel)

    async def ask(self, prompt: Sequence[int], **fields: Any) -> AsyncStream:
        """As AsyncClient.generate() of the decode server, which computes what the other one does not give."""
        return self._decode.generate(prompt, kv_handle=await self._handle(prompt), **fields)

    async def _handle(self, prompt: Sequence[int]) -> Any:
        """None if the prefill server or its rank was lost."""
        request = pb.GenerateRequest(
            tokenized=pb.TokenizedInput(input_ids=prompt),
            sampling_params=pb.SamplingParams(temperature=0.0, max_tokens=1),
            kv_transfer_params_json='{"do_remote_decode": true}',
        )
        metadata = self._prefill.target.metadata
        call = self._calls.Generate(request, timeout=PREFILL_SECONDS, metadata=metadata)
        try:
            answers = [answer async for answer in call]
        except grpc.RpcError as error:
            log.info("no prefill through VllmEngine: %s", error)
            return None
        ours = decode_pb2.GenerateRequest()
        set_handoff(ours, answers[-1].complete.kv_transfer_params_json)
        return ours.kv_handle
