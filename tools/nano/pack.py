"""Packs documents into rows for the trainer, and grades test documents."""
import os

import numpy as np

import chat
import data
from config import NANO

BLOCK = 128
IGNORED, CONTEXT, ANSWER = 0, 1, 2       # weight class of a target


class Encoder:
    """Text to ids, with the special tokens recognised."""

    def __init__(self, path):
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        import bpe
        self.t, self.tokens, self.merges = bpe.load(path)
        data.VOCABULARY[:] = sorted({w for t in self.tokens if (w := t.lstrip("Ġ")).isascii() and w.isalpha() and len(w) > 2})
        self.assistant, self.eos, self.pad = (self.t.token_to_id(x) for x in (chat.ASSISTANT, chat.EOS, chat.PAD))

    def ids(self, text):
        return np.array(self.t.encode(text, add_special_tokens=False).ids, np.int64)

    def classes(self, ids, last_only):
        """Weight class of each token as a target: an answer runs from behind the opening to its EOS."""
        start = np.flatnonzero(ids == self.assistant) + 2
        end = np.flatnonzero(ids == self.eos)
        out = np.full(len(ids), CONTEXT, np.uint8)
        out[0] = IGNORED
        for k, s in enumerate(start):
            e = end[np.searchsorted(end, s)]
            out[s:e + 1] = IGNORED if last_only and k + 1 < len(start) else ANSWER
        return out

    def document(self, doc):
        ids = self.ids(doc.text())
        return ids, self.classes(ids, doc.last_turn_only())


class Rows:
    """Rows of `length` tokens that are filled block by block."""

    def __init__(self, count, length, pad):
        self.ids = np.full((count, length), pad, np.int16)
        self.cls = np.zeros((count, length), np.uint8)
        self.doc = np.zeros((count, length // BLOCK), np.int16)
        self.used = np.zeros(count, np.int64)           # blocks
        self.docs = np.zeros(count, np.int64)

    def room(self, row):
        return self.doc.shape[1] - self.used[row]

    def add(self, row, ids, cls):
        n, at = -(-len(ids) // BLOCK), self.used[row]
        if n > self.room(row):
            return None
        a = at * BLOCK
        self.ids[row, a:a + len(ids)], self.cls[row, a:a + len(ids)] = ids, cls
        self.docs[row] += 1
        self.doc[row, at:] = self.docs[row]
        self.used[row] += n
        return a


def make_batch(encoder, seed, step, rows, length, long):
    """A training batch, the same for the same arguments. With `long`, half of the room goes to long texts."""
    out = Rows(rows, length, encoder.pad)
    for r in range(rows):
        tries, i = 0, 0
        rng = np.random.default_rng([seed, step, r, int(long)])
        if long:
            room = length
            while room > 1500 and rng.random() < 0.75:
                tokens = int(np.exp(rng.uniform(np.log(900), np.log(max(room * 0.8, 1000)))))
                d = long_recall(f"{seed}.{step}.{r}.{i}", tokens)
                ids, cls = encoder.document(d)
                i += 1
                if out.add(r, ids, cls) is not None:
                    room = int(out.room(r)) * BLOCK
        while out.room(r) and tries < 6:
            d = data.document(f"{seed}.{step}.{r}.{i}", kind="think" if tries > 2 else None)
            i += 1
            if out.add(r, *encoder.document(d)) is None:
                tries += 1
    return out.ids, out.cls, out.doc


def long_recall(seed, tokens):
    g = data.Gen(f"{seed}:long", "train")
    it = g.p(0.25)
    turns = g.recall(tokens, g.n(10, 40), it)
    return data.Document("recall", data._messages(turns), False)


def test_rows(encoder, kind, count, length, tokens=0):
    """Test documents of one kind packed into rows: (ids, doc, [(row, start, end) of each graded answer])."""
    out, spans, row = Rows(count, length, encoder.pad), [], 0
    for i in range(count):
        want = tokens
        for _ in range(4):          # meet the wanted length: texts differ in tokens per character
            ids, cls = encoder.document(data.test_document(i, kind, want))
            if not tokens or tokens * 0.93 <= len(ids) <= tokens:
                break
            want = int(want * tokens * 0.97 / len(ids))
        at = out.add(row, ids, cls)
        if at is None:
            row += 1
            at = out.add(row, ids, cls)
            if at is None:
                raise ValueError(f"a {kind} test of {len(ids)} tokens does not fit in a row of {length}")
        first = np.flatnonzero(ids == encoder.assistant)[-1] + 2
        spans.append((row, at + first, at + len(ids)))
    return out.ids[:row + 1], out.doc[:row + 1], spans


def token_frequency(encoder, documents=2000):
    n = np.zeros(NANO["vocab_size"], np.int64)
    for i in range(documents):
        n += np.bincount(encoder.ids(data.document(f"freq{i}").text()), minlength=len(n))
    return n


def hash_table(frequency, experts, k, seed):
    """tid2eid [V, k]: every token gets k different experts, so that the experts' loads are even."""
    rng = np.random.default_rng(seed)
    load, table = np.zeros(experts), np.zeros((len(frequency), k), np.int64)
    for t in np.argsort(-frequency, kind="stable"):
        pick = np.lexsort((rng.random(experts), load))[:k]
        table[t] = pick
        load[pick] += frequency[t] + 1e-3
    return table
