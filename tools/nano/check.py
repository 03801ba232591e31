"""Compares this folder's model with independent programs, in f32.

    python check.py tiny MODEL.gguf LOGITS.npy IDS.npy   a random model with golden logits (testdata/tiny-q2q4.gguf, ...)
    python check.py hf HF_DIR CHECKPOINT [TOKENS]        transformers' eager DeepseekV4 on the trained weights
"""
import json
import sys

import numpy as np
import torch

import data
import export
import model as M
import pack
import train
from config import NANO


def ours(m, ids, qat=False):
    """ids [T] -> logits [T, V]."""
    length = -(-len(ids) // pack.BLOCK) * pack.BLOCK
    x = torch.zeros(1, length, dtype=torch.int64)
    x[0, :len(ids)] = torch.from_numpy(ids)
    h, _, _ = m.hidden(x, torch.ones(1, length // pack.BLOCK, dtype=torch.int64), torch.tensor(False), qat, torch.float32)
    return m.logits(h)[0, :len(ids)].numpy()


def compare(a, b, limit=1e-3):
    worst, top = np.abs(a - b).max(), (a.argmax(-1) == b.argmax(-1)).mean()
    print(f"{len(a)} positions: max abs {worst:.2e}, top-1 {top:.4f}, logits std {b.std():.2f}")
    if worst > limit or top < 1:
        raise SystemExit(f"differs by more than {limit}")


def tiny(path, logits, ids):
    import gguf
    r = gguf.GGUFReader(path)
    field = lambda k: r.fields["deepseek4." + k].contents()
    c = dict(NANO, **{k: field(v) for k, v in dict(
        vocab_size="vocab_size", hidden_size="embedding_length", num_hidden_layers="block_count",
        num_attention_heads="attention.head_count", head_dim="attention.key_length", q_lora_rank="attention.q_lora_rank",
        o_groups="attention.output_group_count", o_lora_rank="attention.output_lora_rank", n_routed_experts="expert_count",
        num_experts_per_tok="expert_used_count", moe_intermediate_size="expert_feed_forward_length",
        index_n_heads="attention.indexer.head_count", index_topk="attention.indexer.top_k",
        compress_ratios="attention.compress_ratios").items()}, swiglu_limit=field("swiglu_clamp_exp")[0])
    m = M.Model(c, 1024)
    back, w = {export.gguf_name(n): n for n in M.to_official(m)}, {}
    for t in r.tensors:
        x = np.array(t.data) if t.tensor_type.name in ("F32", "F16", "I32") else gguf.quants.dequantize(t.data, t.tensor_type)
        w[back[t.name]] = torch.from_numpy(x.astype(np.int64 if t.tensor_type.name == "I32" else np.float32)
                                           .reshape([int(d) for d in reversed(t.shape)]))
    M.from_official(m, w)
    compare(ours(m, np.load(ids).astype(np.int64)), np.load(logits))


def hf(folder, checkpoint, tokens=2000):
    from transformers import AutoModelForCausalLM
    m = M.Model(NANO)
    train.load(m, checkpoint)
    M.from_official(m, {k: torch.from_numpy(v) for k, v in export.weights(checkpoint).items()})
    other, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True)
    print("missing", info["missing_keys"], "unexpected", info["unexpected_keys"])
    e = pack.Encoder(train.HERE + "/tokenizer.json")
    text = "".join(data.document(f"check{i}").text() for i in range(100))
    ids = e.ids(text)[:int(tokens)]
    compare(ours(m, ids), other.eval()(torch.from_numpy(ids)[None], use_cache=False).logits[0].numpy())


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    dict(tiny=tiny, hf=hf)[sys.argv[1]](*sys.argv[2:])
