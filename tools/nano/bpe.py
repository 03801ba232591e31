"""The tokenizer: byte-level BPE with V4's pre-tokenizer and special tokens, trained on the generator's own text.

    python bpe.py --out tokenizer.json

Ids: 0..2 control tokens, then the 256 bytes, the merged tokens, and V4's other special tokens at the end.
The training text has no digits, so every digit stays a token of its own.
"""
import argparse
import json
import re

import chat
import data
from config import NANO

PRE_TOKENIZER = [        # joyai-llm: three splits, one after the other
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
]


def byte_alphabet():
    """The printable stand-in of each byte, in byte order."""
    keep = set(range(33, 127)) | set(range(161, 173)) | set(range(174, 256))
    out, extra = [], 0
    for b in range(256):
        out.append(chr(b) if b in keep else chr(256 + extra))
        extra += b not in keep
    return out


def pre_tokenizer_json():
    split = [{"type": "Split", "pattern": {"Regex": r}, "behavior": "Isolated", "invert": False} for r in PRE_TOKENIZER]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {"type": "Sequence", "pretokenizers": split + [level]}


def tokenizer_json(tokens, merges):
    tail = len(chat.USER_DEFINED)
    added = [(i, t, True) for i, t in enumerate(chat.CONTROL)]
    added += [(len(tokens) - tail + i, t, False) for i, t in enumerate(chat.USER_DEFINED)]
    return {
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [dict(id=i, content=t, single_word=False, lstrip=False, rstrip=False, normalized=not s, special=s)
                         for i, t, s in added],
        "normalizer": {"type": "Sequence", "normalizers": []},
        "pre_tokenizer": pre_tokenizer_json(),
        "post_processor": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
                  "vocab": {t: i for i, t in enumerate(tokens[:len(tokens) - tail])},
                  "merges": [f"{a} {b}" for a, b in merges]},
    }


def corpus(documents):
    special = re.compile("|".join(map(re.escape, chat.CONTROL + chat.USER_DEFINED)) + r"|[0-9]+")
    for i in range(documents):
        yield from (x for x in special.split(data.document(f"bpe{i}").text()) if x)


def train(vocab_size, documents):
    from tokenizers import Tokenizer, models, trainers
    t = Tokenizer(models.BPE())
    blank = tokenizer_json(byte_alphabet() + chat.USER_DEFINED, [])
    t.pre_tokenizer = Tokenizer.from_str(json.dumps(blank)).pre_tokenizer
    room = vocab_size - len(chat.CONTROL) - len(chat.USER_DEFINED)
    t.train_from_iterator(corpus(documents), trainers.BpeTrainer(
        vocab_size=room, initial_alphabet=byte_alphabet(), min_frequency=2, show_progress=False))
    merges = [tuple(m) for m in json.loads(t.to_str())["model"]["merges"]]
    tokens = chat.CONTROL + byte_alphabet()
    known = set(tokens)
    for a, b in merges:
        if a + b not in known:
            known.add(a + b)
            tokens.append(a + b)
    tokens += chat.USER_DEFINED
    if len(tokens) != vocab_size:
        raise SystemExit(f"the text gives {len(tokens)} tokens, the model wants {vocab_size}")
    return tokens, merges


def load(path):
    """(tokenizers.Tokenizer, tokens, merges) of a saved tokenizer."""
    from tokenizers import Tokenizer
    j = json.load(open(path, encoding="utf-8"))
    vocab = {**j["model"]["vocab"], **{a["content"]: a["id"] for a in j["added_tokens"]}}
    tokens = [t for t, _ in sorted(vocab.items(), key=lambda kv: kv[1])]
    return Tokenizer.from_file(path), tokens, [tuple(m.split(" ")) if isinstance(m, str) else tuple(m) for m in j["model"]["merges"]]


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--out", default="tokenizer.json")
    ap.add_argument("--documents", type=int, default=20000)
    a = ap.parse_args()
    tokens, merges = train(NANO["vocab_size"], a.documents)
    json.dump(tokenizer_json(tokens, merges), open(a.out, "w", encoding="utf-8"), ensure_ascii=False)
    print(len(tokens), "tokens,", len(merges), "merges")
