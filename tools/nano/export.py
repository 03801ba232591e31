"""Checkpoint of the trainer -> files that others read.

    python export.py CHECKPOINT --hf DIR        official names: model.safetensors (F32), config.json, tokenizer.json
    python export.py CHECKPOINT --gguf FILE     matrices F16, the rest F32, in ds4's layout

Both hold the same numbers: the checkpoint's f16 matrices, exactly.
"""
import argparse
import json
import os

import numpy as np
import torch

import bpe
import chat
import model as M
import train
from config import NANO

HERE = os.path.dirname(os.path.abspath(__file__))

GGUF_LAYER = {
    "attn.attn_sink": "attn_sinks", "attn.wq_a": "attn_q_a", "attn.q_norm": "attn_q_a_norm", "attn.wq_b": "attn_q_b",
    "attn.wkv": "attn_kv", "attn.kv_norm": "attn_kv_a_norm", "attn.wo_a": "attn_output_a", "attn.wo_b": "attn_output_b",
    "attn.indexer.wq_b": "indexer.attn_q_b", "attn.indexer.weights_proj": "indexer.proj",
    "ffn.gate": "ffn_gate_inp", "ffn.gate.tid2eid": "ffn_gate_tid2eid",
    "ffn.experts.w1": "ffn_gate_exps", "ffn.experts.w3": "ffn_up_exps", "ffn.experts.w2": "ffn_down_exps",
    "ffn.shared_experts.w1": "ffn_gate_shexp", "ffn.shared_experts.w3": "ffn_up_shexp", "ffn.shared_experts.w2": "ffn_down_shexp",
}
for _p, _q in (("attn.compressor.", "attn_compressor_"), ("attn.indexer.compressor.", "indexer_compressor_")):
    GGUF_LAYER.update({_p + "ape": _q + "ape", _p + "wkv": _q + "kv", _p + "wgate": _q + "gate", _p + "norm": _q + "norm"})
GGUF_TOP = {"embed": "token_embd", "head": "output", "norm": "output_norm", "hc_head_fn": "output_hc_fn",
            "hc_head_base": "output_hc_base", "hc_head_scale": "output_hc_scale"}


def gguf_name(name):
    stem = name.removesuffix(".weight")
    if stem in GGUF_TOP:
        return GGUF_TOP[stem] + ".weight"
    _, i, rest = stem.split(".", 2)
    if rest == "ffn.gate.bias":
        return f"blk.{i}.exp_probs_b.bias"
    return f"blk.{i}.{GGUF_LAYER.get(rest, rest)}.weight"


def weights(folder):
    """Official names -> f32 or integer arrays; experts as stacks [E, out, in]."""
    m = M.Model(NANO)
    train.load(m, folder)
    out = {}
    for n, x in M.to_official(m).items():
        x = x.numpy()
        if x.dtype != np.int64 and x.ndim > 1:
            x = x.astype(np.float16).astype(np.float32)
        out[n] = x
    return out


def write_hf(folder, w, c):
    from safetensors.numpy import save_file
    os.makedirs(folder, exist_ok=True)
    flat = {}
    for n, x in w.items():
        if ".ffn.experts." in n:
            stem, part = n.rsplit(".", 1)
            flat.update({f"{stem}.{e}.{part}.weight": np.ascontiguousarray(x[e]) for e in range(len(x))})
        else:
            flat[n] = np.ascontiguousarray(x)
    save_file(flat, os.path.join(folder, "model.safetensors"), metadata={"format": "pt"})
    config = dict(c, architectures=["DeepseekV4ForCausalLM"], model_type="deepseek_v4", torch_dtype="float32")
    with open(os.path.join(folder, "config.json"), "w") as f:
        json.dump(config, f, indent=1)
    with open(os.path.join(HERE, "tokenizer.json"), encoding="utf-8") as src, \
            open(os.path.join(folder, "tokenizer.json"), "w", encoding="utf-8") as f:
        f.write(src.read())


def add_metadata(w, c):
    a, layers = "deepseek4.", c["num_hidden_layers"]
    w.add_string("general.name", "ds4-nano")
    w.add_string("general.license", "mit")
    w.add_uint32("general.quantization_version", 2)
    for key, value in {
            "block_count": layers, "context_length": c["max_position_embeddings"], "embedding_length": c["hidden_size"],
            "vocab_size": c["vocab_size"], "feed_forward_length": c["moe_intermediate_size"],
            "attention.head_count": c["num_attention_heads"], "attention.head_count_kv": 1,
            "attention.key_length": c["head_dim"], "attention.value_length": c["head_dim"],
            "attention.q_lora_rank": c["q_lora_rank"], "attention.output_lora_rank": c["o_lora_rank"],
            "attention.output_group_count": c["o_groups"], "attention.sliding_window": c["sliding_window"],
            "attention.indexer.head_count": c["index_n_heads"], "attention.indexer.key_length": c["index_head_dim"],
            "attention.indexer.top_k": c["index_topk"], "rope.dimension_count": c["qk_rope_head_dim"],
            "rope.scaling.original_context_length": c["rope_scaling"]["original_max_position_embeddings"],
            "expert_count": c["n_routed_experts"], "expert_used_count": c["num_experts_per_tok"],
            "expert_shared_count": c["n_shared_experts"], "expert_feed_forward_length": c["moe_intermediate_size"],
            "expert_gating_func": 4, "hash_layer_count": c["num_hash_layers"], "hyper_connection.count": c["hc_mult"],
            "hyper_connection.sinkhorn_iterations": c["hc_sinkhorn_iters"]}.items():
        w.add_uint32(a + key, value)
    for key, value in {
            "attention.layer_norm_rms_epsilon": c["rms_norm_eps"], "attention.compress_rope_freq_base": c["compress_rope_theta"],
            "rope.freq_base": c["rope_theta"], "rope.scaling.factor": float(c["rope_scaling"]["factor"]),
            "rope.scaling.yarn_beta_fast": float(c["rope_scaling"]["beta_fast"]),
            "rope.scaling.yarn_beta_slow": float(c["rope_scaling"]["beta_slow"]),
            "expert_weights_scale": c["routed_scaling_factor"], "hyper_connection.epsilon": c["hc_eps"]}.items():
        w.add_float32(a + key, value)
    w.add_string(a + "rope.scaling.type", "yarn")
    w.add_bool(a + "expert_weights_norm", True)
    w.add_array(a + "attention.compress_ratios", [int(r) for r in c["compress_ratios"]])
    w.add_array(a + "swiglu_clamp_exp", [float(c["swiglu_limit"])] * layers)
    w.add_array(a + "swiglu_clamp_shexp", [float(c["swiglu_limit"])] * layers)
    _, tokens, merges = bpe.load(os.path.join(HERE, "tokenizer.json"))
    kinds = [1] * len(tokens)
    for i in range(len(chat.CONTROL)):
        kinds[i] = 3
    for i in range(len(tokens) - len(chat.USER_DEFINED), len(tokens)):
        kinds[i] = 4
    t = "tokenizer.ggml."
    w.add_string(t + "model", "gpt2")
    w.add_string(t + "pre", "joyai-llm")
    w.add_array(t + "tokens", tokens)
    w.add_array(t + "token_type", kinds)
    w.add_array(t + "merges", [f"{x} {y}" for x, y in merges])
    for k, v in (("bos", 0), ("eos", 1), ("padding", 2)):
        w.add_uint32(f"{t}{k}_token_id", v)
    w.add_bool(t + "add_bos_token", False)
    w.add_bool(t + "add_eos_token", False)


def write_gguf(path, w, c):
    import gguf
    out = gguf.GGUFWriter(path, "deepseek4")
    add_metadata(out, c)
    for n, x in w.items():
        if x.dtype == np.int64:
            x = x.astype(np.int32)
        elif x.ndim > 1:
            x = x.astype(np.float16)
        out.add_tensor(gguf_name(n), np.ascontiguousarray(x))
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("checkpoint")
    ap.add_argument("--hf")
    ap.add_argument("--gguf")
    a = ap.parse_args()
    w = weights(a.checkpoint)
    if a.hf:
        write_hf(a.hf, w, NANO)
    if a.gguf:
        write_gguf(a.gguf, w, NANO)
