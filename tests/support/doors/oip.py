"""Requests of tritonclient, and of a caller that builds its messages itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
from tritonclient.grpc import InferInput, InferRequestedOutput, aio, service_pb2

DTYPES = {"text_input": "BYTES", "sampling_parameters": "BYTES", "input_ids": "INT64"}


def tensor(name: str, value: Any) -> InferInput:
    """From text, a dictionary of sampling_parameters, a list of input_ids, or a boolean."""
    kind = DTYPES.get(name, "BOOL")
    if name == "sampling_parameters" and not isinstance(value, str):
        value = json.dumps(value)
    if kind == "BYTES":
        array = np.array([value.encode() if isinstance(value, str) else value], dtype=object)
    else:
        array = np.array(
            value if isinstance(value, list) else [value], dtype=np.int64 if value is list else None
        )
        array = array.astype(np.int64) if kind == "INT64" else array
    made = InferInput(name, list(array.shape), kind)
    made.set_data_from_numpy(array)
    return made


def tensors(**inputs: Any) -> list[InferInput]:
    return [tensor(name, value) for name, value in inputs.items()]


def wanted(*names: str) -> list[InferRequestedOutput] | None:
    return [InferRequestedOutput(name) for name in names] or None


def outputs(result: Any) -> dict[str, list[Any]]:
    """The outputs of a response; strings as text."""
    found = {}
    for output in result.get_response().outputs:
        values = result.as_numpy(output.name).tolist()
        found[output.name] = [each.decode() if isinstance(each, bytes) else each for each in values]
    return found


def message(model: str = "fake", **inputs: Any) -> Any:
    """A ModelInferRequest with raw contents, for a caller that changes it."""
    request = service_pb2.ModelInferRequest(model_name=model)
    for each in tensors(**inputs):
        request.inputs.append(each._get_tensor())
        request.raw_input_contents.append(each._get_content())
    return request


def typed(request: Any) -> Any:
    """The same request with its data in the typed contents."""
    moved = service_pb2.ModelInferRequest()
    moved.CopyFrom(request)
    del moved.raw_input_contents[:]
    for each, raw in zip(moved.inputs, request.raw_input_contents, strict=True):
        if each.datatype == "BYTES":
            each.contents.bytes_contents.append(raw[4:])
        elif each.datatype == "BOOL":
            each.contents.bool_contents.append(raw != b"\0")
        else:
            each.contents.int64_contents.extend(np.frombuffer(raw, np.int64).tolist())
    return moved


Change = Callable[[Any], None]


async def streamed(
    client: aio.InferenceServerClient, *requests: dict[str, Any], model: str = "fake", **options: Any
) -> list[Any]:
    """All (result, error) pairs of one stream of requests."""

    async def given() -> Any:
        for request in requests:
            yield {"model_name": model, **request}

    return [pair async for pair in client.stream_infer(given(), **options)]
