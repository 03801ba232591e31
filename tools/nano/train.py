"""Trains the nano model on one GPU against the clock.

    python train.py --out OUT --seconds 500 [--resume DIR] [--seed 1]

Phases, as fractions of the time: rows of 2,048 tokens, then rows of 16,384. The indexer keeps every row in the
first steps (dense warm-up) and selects after. The learning rate falls to zero over the last part. Activation
rounding is on throughout. Checkpoints are shards of at most 16 MB with f16 matrices; `--resume` reads them.
"""
import argparse
import json
import math
import os
import subprocess
import sys
import threading
import time

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

import model as M
import pack
from config import NANO

HERE = os.path.dirname(os.path.abspath(__file__))


# ------------------------------------------------------------------------------------------------ data
class Batches(torch.utils.data.Dataset):
    """Step index -> batch; the same for the same seed."""

    def __init__(self, seed, first, rows, length, long):
        self.args, self.first, self.shape, self.encoder = seed, first, (rows, length, long), None

    def __len__(self):
        return 1 << 30

    def __getitem__(self, i):
        if self.encoder is None:
            self.encoder = pack.Encoder(os.path.join(HERE, "tokenizer.json"))
        return tuple(map(torch.from_numpy, pack.make_batch(self.encoder, self.args, self.first + i, *self.shape)))


class InOrder(torch.utils.data.Sampler):
    def __iter__(self):
        return iter(range(1 << 30))

    def __len__(self):
        return 1 << 30


def batches(seed, first, rows, length, long, workers):
    d = Batches(seed, first, rows, length, long)
    return iter(torch.utils.data.DataLoader(d, batch_size=None, sampler=InOrder(), num_workers=workers,
                                            prefetch_factor=8 if workers else None, persistent_workers=workers > 0))


# ------------------------------------------------------------------------------------------------ optimisers
def newton_schulz(g, steps=5):
    """Nearest orthogonal matrices of a stack [n, out, in], roughly (Muon's quintic iteration)."""
    x = g.to(torch.bfloat16 if g.is_cuda else torch.float32)
    flip = x.shape[-2] > x.shape[-1]
    x = x.mT if flip else x
    x = x / (x.float().norm(dim=(-2, -1), keepdim=True) + 1e-7).to(x.dtype)
    for _ in range(steps):
        a = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(a, a, a, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
    return (x.mT if flip else x).float()


class Muon:
    """Momentum whose step is orthogonalised, for matrices; stacks of one shape go together."""

    def __init__(self, params, device):
        groups = {}
        for name, p in params:
            n, o, i = M_stack(name, p)
            groups.setdefault((o, i), []).append((p, n))
        self.groups = [dict(shape=s, items=items, momentum=torch.zeros(sum(n for _, n in items), *s, device=device))
                       for s, items in groups.items()]

    @torch.no_grad()
    def step(self, lr, momentum, decay):
        for g in self.groups:
            o, i = g["shape"]
            grad = torch.cat([(p.grad if p.grad is not None else torch.zeros_like(p)).reshape(n, o, i) for p, n in g["items"]])
            g["momentum"].lerp_(grad, 1 - momentum)
            update = newton_schulz(grad.lerp(g["momentum"], momentum)) * (lr * max(1.0, o / i) ** 0.5)
            at = 0
            for p, n in g["items"]:
                p.mul_(1 - lr * decay).sub_(update[at:at + n].reshape(p.shape))
                at += n


def M_stack(name, p):
    """A parameter as a stack of matrices: gate and up rows apart, output groups apart."""
    if p.dim() == 3:
        return (p.shape[0] * 2, p.shape[1] // 2, p.shape[2]) if name.endswith("w13") else tuple(p.shape)
    if name.endswith("shared_w13"):
        return 2, p.shape[0] // 2, p.shape[1]
    if name.endswith("wo_a.weight"):
        return NANO["o_groups"], p.shape[0] // NANO["o_groups"], p.shape[1]
    return (1,) + tuple(p.shape)


def is_matrix(name, p):
    return p.dim() >= 2 and not any(s in name for s in ("embed", "head", "hc_", "ape", "gate", "weights_proj")) or "wgate" in name


def optimisers(model, device):
    named = list(model.named_parameters())
    muon = Muon([(n, p) for n, p in named if is_matrix(n, p)], device)
    rates = lambda n: 0.01 if n == "embed" else 0.003 if n.endswith((".fn", "gate", "weights_proj.weight")) or n == "head" else 0.01
    adam = torch.optim.AdamW([dict(params=[p], base=rates(n)) for n, p in named if not is_matrix(n, p)],
                             lr=0.0, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0, fused=device == "cuda")
    return muon, adam


# ------------------------------------------------------------------------------------------------ checkpoints
def save(model, folder, meta):
    """Matrices in f16, the rest in f32, as shards below 16 MB."""
    os.makedirs(folder, exist_ok=True)
    shards, size = [{}], 0
    for n, x in model.state_dict().items():
        x = x.detach()
        x = x.to(torch.int16) if n.endswith("tid2eid") else x.half() if x.dim() > 1 and "gate" != n.split(".")[-1] else x.float()
        b = x.numel() * x.element_size()
        if size + b > 15_500_000:
            shards.append({})
            size = 0
        shards[-1][n] = x.contiguous().cpu()
        size += b
    for i, s in enumerate(shards):
        path = os.path.join(folder, f"nano-{i + 1}.safetensors")
        save_file(s, "/tmp/nano-part")
        os.system(f"mv /tmp/nano-part {path}")
    json.dump(meta, open(os.path.join(folder, "nano.json"), "w"))


def load(model, folder):
    s = {}
    for f in sorted(os.listdir(folder)):
        if f.startswith("nano-") and f.endswith(".safetensors"):
            s.update(load_file(os.path.join(folder, f)))
    own = model.state_dict()
    model.load_state_dict({k: v.to(own[k].dtype) for k, v in s.items()})
    return json.load(open(os.path.join(folder, "nano.json")))


# ------------------------------------------------------------------------------------------------ tests
SUITE = [("arithmetic", 400, 2048, 0), ("arithmetic_chat", 200, 2048, 0), ("tool", 200, 2048, 0), ("json", 300, 2048, 0),
         ("lists", 200, 2048, 0), ("instruction", 200, 2048, 0), ("italian", 200, 2048, 0), ("recall", 200, 2048, 256),
         ("recall", 200, 2048, 1024), ("recall", 100, 16384, 4096), ("recall", 60, 16384, 16384)]


def suite_rows(small, path="/tmp/nano-tests.pickle"):
    """The test rows; kept in a file, since the long ones take a minute to write."""
    import pickle
    if not small and os.path.exists(path):
        return pickle.load(open(path, "rb"))
    e = pack.Encoder(os.path.join(HERE, "tokenizer.json"))
    out = []
    for kind, count, length, tokens in SUITE:
        if small and length > 2048:
            continue
        out.append((kind + (f"_{tokens}" if tokens else ""), length, pack.test_rows(e, kind, count if not small else 16, length, tokens)))
    if not small:
        pickle.dump(out, open(path, "wb"))
    return out


@torch.no_grad()
def grade(model, rows, dtype, device, pick="best", tokens_at_once=65536):
    """Share of answers that greedy decoding would give exactly: every token of the answer is the most likely one."""
    scores = {}
    for name, length, (ids, doc, spans) in rows:
        right, per = np.zeros(len(spans), bool), max(1, tokens_at_once // length)
        for a in range(0, len(ids), per):
            x = torch.from_numpy(ids[a:a + per].astype(np.int64)).to(device)
            d = torch.from_numpy(doc[a:a + per].astype(np.int64)).to(device)
            h, _, _ = model.hidden(x, d, torch.tensor(False, device=device), True, dtype, pick)
            for i, (r, s, e) in enumerate(spans):
                if a <= r < a + per:
                    best = model.logits(h[r - a, s - 1:e - 1]).argmax(-1)
                    right[i] = bool((best == x[r - a, s:e]).all())
        scores[name] = round(float(right.mean()), 4)
    return scores


# ------------------------------------------------------------------------------------------------ training
def head_loss(h, head, targets, weights):
    logits = F.linear(h, head.to(h.dtype)).float()
    ce = F.cross_entropy(logits, targets, reduction="none")
    return (ce * weights).sum() / weights.sum(), ce


def compiled(model, device):
    """The forward pass and the loss, compiled per layer on a GPU."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    runs, head, tail = list(model.layers), head_loss, model.tail
    if device == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = True
        torch._dynamo.config.cache_size_limit = 64
        runs = [torch.compile(layer, dynamic=False) for layer in model.layers]
        head, tail = torch.compile(head_loss, dynamic=False), torch.compile(model.tail, dynamic=False)

    def forward(ids, doc, dense):
        x = F.embedding(ids, model.embed, padding_idx=2).to(dtype)[:, :, None].expand(-1, -1, NANO["hc_mult"], -1).contiguous()
        extra, loads = 0, []
        for i, run in enumerate(runs):
            rope = model.rope_comp if NANO["compress_ratios"][i] else model.rope_main
            x, loss, load_ = run(x, ids, doc, rope, dense, True)
            extra = extra + loss
            loads.append(load_)
        return tail(x), extra, loads

    return forward, head


def warm(shape):
    """One forward and backward pass at a shape, so that the compiler's cache on disk holds it."""
    torch.cuda.set_per_process_memory_fraction(0.55)
    model = M.Model(NANO).to("cuda")
    forward, head = compiled(model, "cuda")
    ids = torch.randint(3, 4000, shape, device="cuda")
    doc = torch.ones(shape[0], shape[1] // pack.BLOCK, dtype=torch.int64, device="cuda")
    h, extra, _ = forward(ids, doc, torch.tensor(False, device="cuda"))
    loss, _ = head(h.flatten(0, 1), model.head, ids.flatten(), torch.ones(ids.numel(), device="cuda"))
    (loss + extra / ids.numel()).backward()
    torch.cuda.synchronize()
    print(f"the step for {shape} is compiled; peak memory {torch.cuda.max_memory_allocated() / 2 ** 30:.0f} GiB", flush=True)
    os._exit(0)


STEPS = [0]


def watchdog(limit, say):
    time.sleep(limit)
    if STEPS[0] < 3:
        say(f"no step after {limit} s: stopped")
        os._exit(3)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--out", required=True)
    ap.add_argument("--seconds", type=float, required=True, help="from the start of the program to its end, tests included")
    ap.add_argument("--resume")
    ap.add_argument("--seed", type=int, default=1)
    ap.add_argument("--first-step", type=int, default=0)
    ap.add_argument("--rows", type=int, default=32, help="rows of 2,048 tokens in a step")
    ap.add_argument("--long-share", type=float, default=0.3, help="share of the time spent on rows of 16,384")
    ap.add_argument("--decay-share", type=float, default=0.5)
    ap.add_argument("--dense-steps", type=int, default=300)
    ap.add_argument("--lr", type=float, default=0.02)
    ap.add_argument("--peak", type=float, default=1.0, help="factor on every learning rate")
    ap.add_argument("--context-weight", type=float, default=0.05)
    ap.add_argument("--workers", type=int, default=12)
    ap.add_argument("--reserve", type=float, default=40, help="seconds kept for the last tests and the checkpoint")
    ap.add_argument("--test-every", type=float, default=60)
    ap.add_argument("--save-every", type=float, default=100)
    ap.add_argument("--max-steps", type=int, default=1 << 30)
    ap.add_argument("--tests", default="/tmp/nano-tests.pickle", help="file of the test rows, written if missing")
    ap.add_argument("--profile", action="store_true", help="print the slowest kernels of one step of each phase")
    ap.add_argument("--start-limit", type=float, default=150, help="give up when the first steps are not done by then")
    ap.add_argument("--must-reach", default="", help="SECONDS:LOSS,..., give up when the answers' loss is above LOSS then")
    ap.add_argument("--warm-long", action="store_true",
                    help="only compile the step for rows of 16,384 into the cache; training starts this beside itself")
    ap.add_argument("--smoke", action="store_true", help="tiny shapes, for a machine without a GPU")
    a = ap.parse_args()
    t0 = time.time()
    clock = lambda: time.time() - t0
    os.makedirs(a.out, exist_ok=True)
    logf = open(os.path.join(a.out, "train.log"), "w")

    def say(*x):
        line = " ".join(str(y) for y in x)
        print(line, flush=True)
        logf.write(line + "\n")
        logf.flush()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    short_shape = (a.rows, 2048) if not a.smoke else (2, 1024)
    long_shape = (a.rows * 2048 // 16384, 16384) if not a.smoke else (1, 2048)
    first = a.first_step
    if a.warm_long:
        return warm(long_shape)
    if device == "cuda" and a.long_share:
        subprocess.Popen([sys.executable, os.path.abspath(__file__), "--warm-long", "--out", "/tmp/nano-warm", "--seconds", "0",
                          "--rows", str(a.rows)])
    if device == "cuda":
        threading.Thread(target=watchdog, args=(a.start_limit, say), daemon=True).start()
    short = batches(a.seed, first, *short_shape, False, a.workers // 2 if a.long_share else a.workers)
    long = batches(a.seed, first, *long_shape, True, a.workers - a.workers // 2) if a.long_share else None
    ahead_short, ahead_long = next(short), None          # workers start before CUDA does
    if long is not None:
        ahead_long = next(long)

    torch.manual_seed(a.seed)
    model = M.Model(NANO)
    if a.resume:
        say("resumed from", load(model, a.resume))
    else:
        e = pack.Encoder(os.path.join(HERE, "tokenizer.json"))
        freq = pack.token_frequency(e, 1000 if not a.smoke else 50)
        for i, layer in enumerate(model.layers):
            if layer.ffn.hashed:
                layer.ffn.tid2eid.copy_(torch.from_numpy(pack.hash_table(freq, NANO["n_routed_experts"], NANO["num_experts_per_tok"], i)))
    model.to(device)
    forward, head = compiled(model, device)
    muon, adam = optimisers(model, device)
    routed = [l.ffn for l in model.layers if not l.ffn.hashed]
    tests = suite_rows(a.smoke, a.tests)
    say(f"{clock():.1f}s ready; parameters {sum(p.numel() for p in model.parameters()) / 1e6:.2f} M, device {device}")

    weight_of = torch.tensor([0.0, a.context_weight, 1.0], device=device)
    end = a.seconds - a.reserve
    step, tokens, bad = 0, 0, 0
    next_test, next_save, next_say = a.test_every, a.save_every, 0
    mark, history = None, []
    start = None
    goals = [tuple(map(float, g.split(":"))) for g in a.must_reach.split(",") if g]
    switched, profile_at, profiler = False, 30, None
    while step < a.max_steps:
        now = clock()
        if now > end:
            break
        begin = start if start is not None else now
        progress = min((now - begin) / max(end - begin, 1e-6), 1.0)
        in_long = long is not None and progress >= 1 - a.long_share
        if in_long and not switched:
            switched, mark, profile_at = True, None, step + 8
            say(f"{now:.1f}s step {step}: rows of 16,384 from here")
        if in_long:
            ids, cls, doc = ahead_long if ahead_long is not None else next(long)
            ahead_long = None
        else:
            ids, cls, doc = ahead_short if ahead_short is not None else next(short)
            ahead_short = None
        if a.profile and step == profile_at:
            torch.cuda.synchronize()
            profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU])
            profiler.start()
            profile_clock = clock()
        ids = ids.to(device, non_blocking=True).long()
        doc = doc.to(device, non_blocking=True).long()
        w = weight_of[cls.to(device, non_blocking=True).long()]
        targets, w = F.pad(ids[:, 1:], (0, 1)), F.pad(w[:, 1:], (0, 1))
        dense = torch.tensor(step + first < a.dense_steps, device=device)
        scale = min((step + 1) / 60, 1.0) * min(1.0, (1 - progress) / a.decay_share) * a.peak
        for g in adam.param_groups:
            g["lr"] = g["base"] * scale
        try:
            h, extra, loads = forward(ids, doc, dense)
            loss, ce = head(h.flatten(0, 1), model.head, targets.flatten(), w.flatten())
            (loss + extra / ids.numel()).backward()
        except RuntimeError as e:
            if not in_long:
                raise
            say("rows of 16,384 failed, back to short ones:", str(e)[:300])
            long = h = extra = loads = loss = ce = None
            model.zero_grad(set_to_none=True)
            torch.cuda.empty_cache()
            continue
        muon.step(a.lr * scale, 0.85 + 0.1 * min(step / 200, 1), 0.1)
        adam.step()
        for p in model.parameters():
            p.grad = None
        with torch.no_grad():
            for moe, ld in zip(routed, [x for x, l in zip(loads, model.layers) if not l.ffn.hashed]):
                ld = ld.float()
                moe.bias += (0.002 * scale) * torch.sign(ld.mean() - ld)
        step += 1
        STEPS[0] = step
        tokens += ids.numel()
        if profiler is not None:
            torch.cuda.synchronize()
            wall = clock() - profile_clock
            profiler.stop()
            kernels = sorted((k for k in profiler.key_averages() if k.self_device_time_total), key=lambda k: -k.self_device_time_total)
            say(f"one step: {wall * 1e3:.0f} ms wall, {sum(k.self_device_time_total for k in kernels) / 1e3:.1f} ms on the device")
            for k in kernels[:45]:
                say(f"  {k.self_device_time_total / 1e3:8.2f} ms {k.count:5d} x {k.key[:110]}")
            profiler, mark = None, None
        if start is None and step == 3:
            if device == "cuda":
                torch.cuda.synchronize()
            start = clock()
            say(f"{start:.1f}s compiled, the clock of the schedule starts")
        if clock() >= next_say:
            next_say = clock() + (10 if clock() > 40 else 3)
            value = [loss.item(), extra.item() / ids.numel()]
            ans = ((ce * (w.flatten() == 1)).sum() / (w == 1).sum()).item()
            rate = 0 if mark is None else (tokens - mark[1]) / (clock() - mark[0])
            mark = (clock(), tokens)
            spread = max(float(x.float().max() / x.float().mean()) for x in loads)
            mem = torch.cuda.max_memory_allocated() / 2 ** 30 if device == "cuda" else 0
            history.append((round(clock(), 1), step, tokens, value[0], ans, value[1], round(rate)))
            say(f"{clock():.1f}s step {step} tokens {tokens / 1e6:.1f}M loss {value[0]:.4f} answer {ans:.4f} indexer {value[1]:.4f} "
                f"load {spread:.2f} {rate / 1e3:.0f}k tok/s mem {mem:.0f}G lr {scale:.2f}")
            if goals and clock() > goals[0][0] and start is not None:
                if ans > goals.pop(0)[1]:
                    say("the answers' loss is too high: stopped")
                    break
            if not math.isfinite(value[0]):
                bad += 1
                if bad > 2:
                    say("the loss is not finite: stopped")
                    break
        if clock() > next_test and start is not None:
            next_test = clock() + a.test_every
            say(f"{clock():.1f}s tests", grade(model, [t for t in tests if t[1] <= 2048], dtype, device))
            mark = None
        if clock() > next_save and bad == 0 and start is not None:
            next_save = clock() + a.save_every
            save(model, a.out, dict(step=step + first, tokens=tokens, seconds=clock()))
    meta = dict(step=step + first, tokens=tokens, seconds=clock(), history=history)
    save(model, a.out, meta)
    say(f"{clock():.1f}s trained: {step} steps, {tokens / 1e6:.1f}M tokens; saved")
    results = {}
    for pick in ("best", "oldest"):
        rows = tests if pick == "best" else [t for t in tests if t[0].startswith("recall")]
        for t in rows:
            if clock() > a.seconds - 2:
                break
            results.setdefault(pick, {}).update(grade(model, [t], dtype, device, pick))
        say(f"{clock():.1f}s {pick} rows: {results.get(pick)}")
    meta["results"] = results
    json.dump(meta, open(os.path.join(a.out, "nano.json"), "w"))
    logf.close()
    sys.stdout.flush()
    os._exit(0)         # the data workers hold nothing worth waiting for


if __name__ == "__main__":
    main()
