"""Other engines on the same checkpoint, in a process of their own: JSON in on stdin, JSON out on stdout.

In: engine, implementation, dtype, threads, prompts [[id]], new, rounds. Out: seconds of the best round and
the tokens, or {"missing": why}. llama.cpp wants `pip install llama-cpp-python gguf`, built for this machine
with CMAKE_ARGS=-DGGML_NATIVE=ON.
"""

from __future__ import annotations

import json
import sys
import tempfile
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

    def once(new: int) -> list[list[int]]:
        out = model.generate(ids, max_new_tokens=new, min_new_tokens=new, **options)
        return out[:, ids.shape[1] :].tolist()

    with torch.inference_mode():
        return best_of(work, once)


def llama(checkpoint: Path, work: dict[str, Any]) -> dict[str, Any]:
    """llama.cpp through its C API: all prompts in one batch, then one token of each sequence per call."""
    try:
        import gguf  # noqa: F401
        import llama_cpp
    except ImportError as error:
        return {"missing": f"llama.cpp: not installed ({error.name})"}
    import numpy as np

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.gguf"
        vocabulary = write_gguf(checkpoint, file)
        llama_cpp.llama_log_set(SILENT := llama_cpp.llama_log_callback(lambda *_: None), None)
        llama_cpp.llama_backend_init()
        model = llama_cpp.llama_model_load_from_file(
            str(file).encode(), llama_cpp.llama_model_default_params()
        )
        prompts = work["prompts"]
        tokens = len(prompts) * max(len(prompt) for prompt in prompts)
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = len(prompts) * (max(len(prompt) for prompt in prompts) + work["new"] + 1)
        params.n_seq_max, params.n_batch, params.n_ubatch = len(prompts), tokens, 512
        params.n_threads = params.n_threads_batch = work["threads"]
        params.kv_unified = False
        context = llama_cpp.llama_init_from_model(model, params)
        batch = llama_cpp.llama_batch_init(tokens, 0, 1)

        def decode(rows: list[tuple[int, int, int, bool]]) -> list[int]:
            """rows: (token, position, sequence, wants logits). Returns the likeliest next tokens."""
            for i, (token, position, sequence, wants) in enumerate(rows):
                batch.token[i], batch.pos[i], batch.logits[i] = token, position, wants
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
            batch.n_tokens = len(rows)
            if llama_cpp.llama_decode(context, batch) != 0:
                raise SystemExit("llama_decode failed")
            wanted = [i for i, row in enumerate(rows) if row[3]]
            logits = (llama_cpp.llama_get_logits_ith(context, i) for i in wanted)
            return [int(np.ctypeslib.as_array(row, (vocabulary,)).argmax()) for row in logits]

        def once(new: int) -> list[list[int]]:
            llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
            rows = [
                (token, at, sequence, at == len(prompt) - 1)
                for sequence, prompt in enumerate(prompts)
                for at, token in enumerate(prompt)
            ]
            out = [[token] for token in decode(rows)]
            for step in range(new - 1):
                rows = [(seq[-1], len(prompts[s]) + step, s, True) for s, seq in enumerate(out)]
                for seq, token in zip(out, decode(rows), strict=True):
                    seq.append(token)
            return out

        answer = best_of(work, once)
        llama_cpp.llama_batch_free(batch)
        llama_cpp.llama_free(context)
        llama_cpp.llama_model_free(model)
        del SILENT
        return answer


def write_gguf(checkpoint: Path, file: Path) -> int:
    """Converts a Qwen3-MoE checkpoint to GGUF, matrices in bfloat16. Returns the vocabulary's size."""
    import gguf
    import torch
    from safetensors.torch import load_file

    config = json.loads((checkpoint / "config.json").read_text())
    tensors = {k: v for part in sorted(checkpoint.glob("*.safetensors")) for k, v in load_file(part).items()}
    experts = config.get("num_local_experts") or config["num_experts"]
    rope = config.get("rope_parameters") or config
    writer = gguf.GGUFWriter(file, "qwen3moe")
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_expert_count(experts)
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_tokenizer_model("no_vocab")

    def add(name: str, tensor: torch.Tensor) -> None:
        if tensor.dim() == 1 or "ffn_gate_inp" in name:
            writer.add_tensor(name, tensor.float().numpy())
        else:
            raw = tensor.bfloat16().contiguous().view(torch.uint8).numpy()
            writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType.BF16)

    add("token_embd.weight", tensors["model.embed_tokens.weight"])
    add("output_norm.weight", tensors["model.norm.weight"])
    add("output.weight", tensors["lm_head.weight"])
    names = {
        "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm", "ffn_norm": "post_attention_layernorm", "ffn_gate_inp": "mlp.gate",
    }  # fmt: skip
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        for ours, theirs in names.items():
            add(f"blk.{layer}.{ours}.weight", tensors[f"{prefix}.{theirs}.weight"])
        for part in ("gate", "up", "down"):
            parts = [tensors[f"{prefix}.mlp.experts.{e}.{part}_proj.weight"] for e in range(experts)]
            add(f"blk.{layer}.ffn_{part}_exps.weight", torch.stack(parts))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return int(config["vocab_size"])


def best_of(work: dict[str, Any], once: Any) -> dict[str, Any]:
    """Runs once(4) as a warm-up, then the rounds."""
    once(4)
    best, tokens = float("inf"), []
    for _ in range(work["rounds"]):
        start = time.perf_counter()
        tokens = once(work["new"])
        best = min(best, time.perf_counter() - start)
    return {"seconds": best, "tokens": tokens}


def main() -> None:
    work, checkpoint = json.load(sys.stdin), Path(sys.argv[1])
    engine = transformers if work["engine"] == "transformers" else llama
    print(json.dumps(engine(checkpoint, work)))


if __name__ == "__main__":
    main()
