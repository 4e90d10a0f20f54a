"""Limits of one rank and of one step, and the check whether a request fits them.

Units: tokens, blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from ep_server.errors import ConfigError, ContextLengthExceeded, InvalidArgument
from ep_server.records import Request, StepBatch

IDLE = StepBatch(slices=(), num_tokens=0)
AUTO_BUDGET = -1  # ns: from the measured time of a step without prompts


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """What one rank may hold and run.

    max_running: sequences that hold KV blocks at once.
    max_step_tokens: tokens of one step, prefill chunks included; at most this many sequences run.
    max_context: longest prompt + output. kv_blocks: of block_size tokens each.
    max_overtakes: later requests that may be admitted before the oldest waiting one.
    ahead: steps planned before the tokens of the one in flight are known.
    host_blocks: slots of the host tier; 0 = there is none.
    itl_budget_ns: of a step in which sequences decode; 0 = none, AUTO_BUDGET = from measured times.
    step_sizes: rows that steps with prompts are padded to, ascending; empty = they are not padded.

    Raises: ConfigError if `ahead` or `host_blocks` is negative or another size below 1.
    """

    max_running: int
    max_step_tokens: int
    block_size: int
    kv_blocks: int
    prefix_cache: bool
    max_context: int
    max_overtakes: int = 256
    ahead: int = 0
    host_blocks: int = 0
    itl_budget_ns: int = 0
    step_sizes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for item in fields(self):
            if item.name in ("prefix_cache", "itl_budget_ns", "step_sizes"):
                continue
            least = int(item.name not in ("ahead", "host_blocks"))
            if getattr(self, item.name) < least:
                raise ConfigError(f"scheduler.{item.name}", getattr(self, item.name), f"at least {least}")

    def size_of(self, request: Request) -> int:
        """Class of a prompt's length, in powers of two of a step; 0 fits into one."""
        return (len(request.prompt_ids) // self.max_step_tokens).bit_length()

    def check(self, request: Request) -> None:
        """Whether a request can run at all.

        Raises:
            InvalidArgument: empty prompt, max_new_tokens < 1 or min_new_tokens > max_new_tokens.
            ContextLengthExceeded: it can never fit the context or the KV blocks.
        """
        prompt, stopping = len(request.prompt_ids), request.stopping
        if prompt < 1:
            raise InvalidArgument("prompt_ids", (), "at least one token")
        if stopping.max_new_tokens < 1:
            raise InvalidArgument("max_new_tokens", stopping.max_new_tokens, "at least 1")
        if not 0 <= stopping.min_new_tokens <= stopping.max_new_tokens:
            allowed = f"0 to max_new_tokens ({stopping.max_new_tokens})"
            raise InvalidArgument("min_new_tokens", stopping.min_new_tokens, allowed)
        total = prompt + stopping.max_new_tokens
        wants = f"prompt of {prompt} + max_new_tokens {stopping.max_new_tokens} tokens"
        if total > self.max_context:
            raise ContextLengthExceeded(f"{wants} exceed the context of {self.max_context}")
        needed = -(-(total - 1) // self.block_size)  # the last token drawn is never run: it needs no place
        if needed > self.kv_blocks:
            raise ContextLengthExceeded(
                f"{wants} need {needed} KV blocks of {self.block_size} tokens; a rank has {self.kv_blocks}"
            )
