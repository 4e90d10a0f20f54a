"""A client of the gRPC services, blocking and asynchronous.

    with Client("127.0.0.1:50051") as client:
        print(client.complete("2 + 3 =", max_new_tokens=8).text)

Fields of a request are flat keywords with the names of decode.proto. Errors are those of ep_server.errors.
"""

from ep_server.client.asynchronous import AsyncClient, AsyncStream
from ep_server.client.blocking import Client, Stream
from ep_server.client.failures import NO_RETRIES, Retries
from ep_server.client.handoff import PrefillDecode
from ep_server.client.requests import chat_prompt, generate_request
from ep_server.client.results import Finished, Output, PromptInfo, Timings, TokenLogprob, Tokens, Usage
from ep_server.client.target import SERVICE, Target
from ep_server.records import FinishReason

__all__ = [
    "NO_RETRIES",
    "SERVICE",
    "AsyncClient",
    "AsyncStream",
    "Client",
    "FinishReason",
    "Finished",
    "Output",
    "PrefillDecode",
    "PromptInfo",
    "Retries",
    "Stream",
    "Target",
    "Timings",
    "TokenLogprob",
    "Tokens",
    "Usage",
    "chat_prompt",
    "generate_request",
]
