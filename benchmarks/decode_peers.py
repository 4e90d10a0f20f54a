"""Other engines on the same checkpoint, in a process of their own: JSON in on stdin, JSON out on stdout.

In: engine, implementation, dtype, threads, prompts [[id]], new, rounds. Out: seconds of the best round and
the tokens, or {"missing": why}.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any


def transformers(checkpoint: Path, work: dict[str, Any]) -> dict[str, Any]:
    """`generate`, greedy, all prompts as one batch."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.set_num_threads(work["threads"])
    model = AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=getattr(torch, work["dtype"]), experts_implementation=work["implementation"]
    ).eval()
    ids = torch.tensor(work["prompts"])
    model.generation_config.eos_token_id = None
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "pad_token_id": 0}
    best, tokens = float("inf"), []
    with torch.inference_mode():
        model.generate(ids, max_new_tokens=4, min_new_tokens=4, **options)
        for _ in range(work["rounds"]):
            start = time.perf_counter()
            out = model.generate(ids, max_new_tokens=work["new"], min_new_tokens=work["new"], **options)
            best = min(best, time.perf_counter() - start)
            tokens = out[:, ids.shape[1] :].tolist()
    return {"seconds": best, "tokens": tokens}


def main() -> None:
    work = json.load(sys.stdin)
    checkpoint = Path(sys.argv[1])
    if work["engine"] == "transformers":
        answer = transformers(checkpoint, work)
    else:
        answer = {"missing": "llama.cpp: not measured"}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
