"""As interpreted_rank, with an FP8 KV cache: by the configuration only ranks on GPUs have one.

`python -m tests.support.ranks.interpreted_fp8_rank`, as the launcher starts ep_server.ranks.life.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

from ep_server.models.sizes import Dtype
from ep_server.ranks import life
from ep_server.ranks.parts import Built
from tests.support.ranks.interpreted_rank import Interpreted


class InterpretedFp8(Interpreted):
    def build(self, model: Any, exchange: Any, masks: Any) -> Built:
        return super().build(dataclasses.replace(model, kv_dtype=Dtype.FP8), exchange, masks)


if __name__ == "__main__":
    sys.exit(life.main(InterpretedFp8))
