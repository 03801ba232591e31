"""The DeepSeek V4 architecture in torch, for training: whole rows of packed documents at once.

Every document starts at a multiple of 128 in its row, so the windows of the compressors fall where they fall
when the document is alone; a token sees nothing of other documents. RoPE is relative (the attention output is
un-rotated), so the position inside the row serves as the position.

Shapes: B rows, T tokens a row, D hidden, n streams, H heads, d head width, W compressed rows.
"""
import math

import torch
import torch.nn.functional as F
from torch import nn

try:
    import triton
    import triton.language as tl
except ImportError:                                      # a machine without a GPU
    triton = None


# ------------------------------------------------------------------------------------------------ small pieces
def rms(x, weight=None, eps=1e-6):
    y = x.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return (y if weight is None else y * weight).to(x.dtype)


def rope_frequencies(c, compressed):
    """Inverse frequency of each pair; base 160000 with YaRN on the layers that compress."""
    r = c["qk_rope_head_dim"]
    base = c["compress_rope_theta"] if compressed else c["rope_theta"]
    f = base ** (-torch.arange(0, r, 2, dtype=torch.float64) / r)
    if compressed:
        s = c["rope_scaling"]

        def corr(turns):
            return r * math.log(s["original_max_position_embeddings"] / (turns * 2 * math.pi)) / (2 * math.log(base))

        lo = max(math.floor(corr(s["beta_fast"])), 0)
        hi = min(math.ceil(corr(s["beta_slow"])), r - 1)
        ramp = ((torch.arange(r // 2) - lo) / max(hi - lo, 0.001)).clamp(0, 1)
        f = f * (1 - ramp) + f / s["factor"] * ramp
    return f.float()


def rotate_tail(x, cos, sin):
    """Interleaved rotation of the last 2 * cos.shape[-1] channels; cos and sin broadcast over x[..., i]."""
    r = 2 * cos.shape[-1]
    a, b = x[..., -r::2].float(), x[..., -r + 1::2].float()
    tail = torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)
    return torch.cat([x[..., :-r], tail.to(x.dtype)], -1)


def power_of_two_scale(amax, largest):
    return torch.exp2(torch.ceil(torch.log2(amax / largest)))


def fp8_round(x, block=64):
    """E4M3 with a power-of-two scale per 64 channels; the gradient passes straight through."""
    v = x.detach().float().unflatten(-1, (-1, block))
    s = power_of_two_scale(v.abs().amax(-1, keepdim=True).clamp_min(1e-4), 448.0)
    u = (v / s).clamp(-448, 448)
    # spacing of E4M3 at |u|: 2^(e-3), and 2^-9 below the smallest normal 2^-6
    step = torch.exp2(torch.floor(torch.log2(u.abs().clamp_min(2.0 ** -6))) - 3)
    q = (torch.round(u / step) * step * s).flatten(-2).to(x.dtype)
    return x + (q - x).detach()


def fp4_round(x, block=32):
    """E2M1 with a power-of-two scale per 32 channels; the gradient passes straight through."""
    v = x.detach().float().unflatten(-1, (-1, block))
    s = power_of_two_scale(v.abs().amax(-1, keepdim=True).clamp_min(6 * 2.0 ** -126), 6.0)
    u = (v / s).clamp(-6, 6)
    step = torch.exp2(torch.floor(torch.log2(u.abs().clamp_min(1.0))) - 1)
    q = (torch.round(u / step) * step * s).flatten(-2).to(x.dtype)
    return x + (q - x).detach()


def hadamard_matrix(n):
    h = torch.ones(1, 1)
    while h.shape[0] < n:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)], 0)
    return h * n ** -0.5


# ------------------------------------------------------------------------------------------------ Sinkhorn
# logits [N, 16] -> doubly stochastic [N, 16]. The backward repeats the adjoint of a row and a column step at the
# fixed point, which is the gradient of the unrolled loop as far as the loop has converged.
if triton is not None:
    @triton.jit
    def _sinkhorn_fwd(src, dst, count, eps, iters: tl.constexpr, BLOCK: tl.constexpr):
        rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        cell = tl.arange(0, 4)
        at = rows[:, None, None] * 16 + cell[None, :, None] * 4 + cell[None, None, :]
        ok = (rows < count)[:, None, None]
        k = tl.load(src + at, mask=ok, other=0.0)
        k = tl.exp(k - tl.max(k, axis=2)[:, :, None])
        k = k / tl.sum(k, axis=2)[:, :, None] + eps
        k = k / (tl.sum(k, axis=1)[:, None, :] + eps)
        for _ in range(iters - 1):
            k = k / (tl.sum(k, axis=2)[:, :, None] + eps)
            k = k / (tl.sum(k, axis=1)[:, None, :] + eps)
        tl.store(dst + at, k, mask=ok)

    @triton.jit
    def _sinkhorn_bwd(out, grad, dst, count, iters: tl.constexpr, BLOCK: tl.constexpr):
        rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        cell = tl.arange(0, 4)
        at = rows[:, None, None] * 16 + cell[None, :, None] * 4 + cell[None, None, :]
        ok = (rows < count)[:, None, None]
        p = tl.load(out + at, mask=ok, other=0.0)
        g = tl.load(grad + at, mask=ok, other=0.0)
        for _ in range(iters):
            g = g - tl.sum(p * g, axis=1)[:, None, :]
            g = g - tl.sum(p * g, axis=2)[:, :, None]
        tl.store(dst + at, p * g, mask=ok)


@torch.library.custom_op("nano::sinkhorn", mutates_args=())
def sinkhorn(logits: torch.Tensor, iters: int, eps: float) -> torch.Tensor:
    if logits.is_cuda:
        out, n = torch.empty_like(logits), logits.shape[0]
        _sinkhorn_fwd[(triton.cdiv(n, 64),)](logits, out, n, eps, iters, BLOCK=64)
        return out
    k = logits.view(-1, 4, 4).softmax(-1) + eps
    k = k / (k.sum(-2, keepdim=True) + eps)
    for _ in range(iters - 1):
        k = k / (k.sum(-1, keepdim=True) + eps)
        k = k / (k.sum(-2, keepdim=True) + eps)
    return k.reshape(-1, 16)


@sinkhorn.register_fake
def _(logits, iters, eps):
    return torch.empty_like(logits)


@torch.library.custom_op("nano::sinkhorn_grad", mutates_args=())
def sinkhorn_grad(out: torch.Tensor, grad: torch.Tensor, iters: int) -> torch.Tensor:
    grad = grad.contiguous()
    if out.is_cuda:
        dst, n = torch.empty_like(out), out.shape[0]
        _sinkhorn_bwd[(triton.cdiv(n, 64),)](out, grad, dst, n, iters, BLOCK=64)
        return dst
    p, g = out.view(-1, 4, 4), grad.view(-1, 4, 4)
    for _ in range(iters):
        g = g - (p * g).sum(-2, keepdim=True)
        g = g - (p * g).sum(-1, keepdim=True)
    return (p * g).reshape(-1, 16)


@sinkhorn_grad.register_fake
def _(out, grad, iters):
    return torch.empty_like(out)


def _sinkhorn_setup(ctx, inputs, output):
    ctx.iters = inputs[1]
    ctx.save_for_backward(output)


def _sinkhorn_backward(ctx, grad):
    return sinkhorn_grad(ctx.saved_tensors[0], grad, ctx.iters), None, None


sinkhorn.register_autograd(_sinkhorn_backward, setup_context=_sinkhorn_setup)


# ------------------------------------------------------------------------------------------------ experts
class Dispatch(torch.autograd.Function):
    """x [N, D] -> slots [S, D] by src [S] (N = an empty slot); the gradient sums over dest [N, K]."""

    @staticmethod
    def forward(ctx, x, src, dest):
        ctx.save_for_backward(dest)
        return torch.cat([x, x.new_zeros(1, x.shape[1])])[src]

    @staticmethod
    def backward(ctx, g):
        dest, = ctx.saved_tensors
        return g[dest].sum(1), None, None


class Combine(torch.autograd.Function):
    """slots [S, D] -> y [N, D], the sum over dest [N, K]; the gradient is a gather by src [S]."""

    @staticmethod
    def forward(ctx, slots, src, dest):
        ctx.save_for_backward(src)
        return slots[dest].sum(1)

    @staticmethod
    def backward(ctx, g):
        src, = ctx.saved_tensors
        return torch.cat([g, g.new_zeros(1, g.shape[1])])[src], None, None


def grouped_linear(x, w, ends):
    """x [S, in] in consecutive groups that end at ends [E]; w [E, out, in] -> [S, out]."""
    if x.is_cuda and x.dtype == torch.bfloat16:
        return torch._grouped_mm(x, w.to(x.dtype).transpose(-2, -1), offs=ends)
    out, start = [], 0
    for e, end in enumerate(ends.tolist()):
        out.append(x[start:end] @ w[e].to(x.dtype).T)
        start = end
    return torch.cat(out + [x.new_zeros(x.shape[0] - start, w.shape[1])])


ALIGN = 16      # slots of an expert are padded to a multiple of this


class MoE(nn.Module):
    def __init__(self, c, hashed):
        super().__init__()
        D, E, Fh, K = c["hidden_size"], c["n_routed_experts"], c["moe_intermediate_size"], c["num_experts_per_tok"]
        self.E, self.K, self.scale, self.limit, self.hashed = E, K, c["routed_scaling_factor"], c["swiglu_limit"], hashed
        self.gate = nn.Parameter(torch.randn(E, D) / math.sqrt(D))
        if hashed:
            self.register_buffer("tid2eid", torch.zeros(c["vocab_size"], K, dtype=torch.int64))
        else:
            self.register_buffer("bias", torch.zeros(E))
        self.w13 = nn.Parameter(torch.randn(E, 2 * Fh, D) / math.sqrt(D))      # gate rows, then up rows
        self.w2 = nn.Parameter(torch.zeros(E, D, Fh))
        self.shared_w13 = nn.Parameter(torch.randn(2 * Fh, D) / math.sqrt(D))
        self.shared_w2 = nn.Parameter(torch.zeros(D, Fh))

    def act(self, h):
        a, b = h.float().chunk(2, -1)
        return F.silu(a.clamp(max=self.limit)) * b.clamp(-self.limit, self.limit)

    def forward(self, h, ids):
        """h [N, D], ids [N] -> y [N, D], load [E]: how many tokens each expert got."""
        N, E, K = h.shape[0], self.E, self.K
        with torch.autocast(h.device.type, enabled=False):
            s = F.softplus(h.float() @ self.gate.T).sqrt()
        sel = self.tid2eid[ids] if self.hashed else (s + self.bias).topk(K, dim=-1, sorted=False).indices
        w = s.gather(1, sel)
        w = w / w.sum(1, keepdim=True) * self.scale
        # slot of every (token, choice): experts one after the other, each padded to ALIGN
        flat = sel.flatten()
        e_sorted, order = flat.to(torch.int32).sort(stable=True)
        load = (flat[:, None] == torch.arange(E, device=h.device)).sum(0)
        padded = (load + ALIGN - 1) // ALIGN * ALIGN
        ends = padded.cumsum(0)
        shift = (ends - padded) - (load.cumsum(0) - load)
        slot = torch.arange(N * K, device=h.device) + shift[e_sorted]
        slots = N * K + E * ALIGN
        dest = torch.empty_like(order).scatter(0, order, slot)
        src = torch.full((slots,), N, dtype=torch.int64, device=h.device).scatter(0, slot, order // K)
        dest = dest.view(N, K)
        ends = ends.to(torch.int32)
        x = Dispatch.apply(h, src, dest)
        ws = torch.zeros(slots, dtype=w.dtype, device=h.device).index_put((dest.flatten(),), w.flatten())
        a = (self.act(grouped_linear(x, self.w13, ends)) * ws[:, None]).to(h.dtype)
        y = Combine.apply(grouped_linear(a, self.w2, ends), src, dest)
        y = y + F.linear(self.act(F.linear(h, self.shared_w13.to(h.dtype))).to(h.dtype), self.shared_w2.to(h.dtype))
        return y, load


# ------------------------------------------------------------------------------------------------ attention
class Linear(nn.Module):
    """A bias-free matrix [out, in], cast to the activations' type."""

    def __init__(self, out, inp, gain=1.0):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(out, inp) * (gain / math.sqrt(inp)))

    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype))


class Norm(nn.Module):
    def __init__(self, n, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(n)), eps

    def forward(self, x):
        return rms(x, self.weight, self.eps)


class Compressor(nn.Module):
    def __init__(self, c, ratio, width):
        super().__init__()
        self.ratio, self.width = ratio, width
        rows = (2 if ratio == 4 else 1) * width
        self.wkv = Linear(rows, c["hidden_size"])
        self.wgate = Linear(rows, c["hidden_size"], gain=0.1)
        self.ape = nn.Parameter(torch.zeros(ratio, rows))
        self.norm = Norm(width, c["rms_norm_eps"])

    def forward(self, h, first, cos, sin):
        """h [B, T, D], first [B, W]: windows that open a document -> rows [B, W, width], rotated."""
        r, d = self.ratio, self.width
        a = self.wkv(h).unflatten(1, (-1, r))                                 # [B, W, r, rows]
        z = self.wgate(h).float().unflatten(1, (-1, r)) + self.ape
        if r == 4:      # the previous window's first halves, this window's second halves
            pa = F.pad(a[:, :-1, :, :d], (0, 0, 0, 0, 1, 0))
            pz = F.pad(z[:, :-1, :, :d], (0, 0, 0, 0, 1, 0)).masked_fill(first[:, :, None, None], float("-inf"))
            a, z = torch.cat([pa, a[..., d:]], 2), torch.cat([pz, z[..., d:]], 2)
        row = (z.softmax(2) * a.float()).sum(2).to(h.dtype)
        return rotate_tail(self.norm(row), cos[::r], sin[::r])


class Indexer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.H, self.d = c["index_n_heads"], c["index_head_dim"]
        self.wq_b = Linear(self.H * self.d, c["q_lora_rank"])
        self.weights_proj = Linear(self.H, c["hidden_size"])
        self.compressor = Compressor(c, 4, self.d)
        self.register_buffer("hadamard", hadamard_matrix(self.d), persistent=False)

    def forward(self, h, qr, first, cos, sin, qat):
        """Scores [B, T, W] of every row for every query; masked by the caller."""
        k = self.compressor(h, first, cos, sin)
        q = rotate_tail(self.wq_b(qr).unflatten(-1, (self.H, self.d)), cos[:, None], sin[:, None])
        if qat:
            had = self.hadamard.to(h.dtype)
            q, k = fp4_round(q @ had), fp4_round(k @ had)
        w = self.weights_proj(h).float() * (self.d ** -0.5 * self.H ** -0.5)       # [B, T, Hi]
        B, T = h.shape[:2]
        s = (q.reshape(B, T * self.H, self.d) @ k.mT).view(B, T, self.H, -1)
        return (s.float().relu() * w[..., None]).sum(2)


class Attention(nn.Module):
    def __init__(self, c, ratio):
        super().__init__()
        D, H, d, g, ol, ql = (c[k] for k in ("hidden_size", "num_attention_heads", "head_dim", "o_groups",
                                             "o_lora_rank", "q_lora_rank"))
        eps = c["rms_norm_eps"]
        self.H, self.d, self.g, self.ol, self.ratio = H, d, g, ol, ratio
        self.nope, self.window, self.topk, self.eps = d - c["qk_rope_head_dim"], c["sliding_window"], c["index_topk"], eps
        self.wq_a, self.q_norm, self.wq_b = Linear(ql, D), Norm(ql, eps), Linear(H * d, ql)
        self.wkv, self.kv_norm = Linear(d, D), Norm(d, eps)
        self.attn_sink = nn.Parameter(torch.zeros(H))
        self.wo_a, self.wo_b = Linear(g * ol, H * d // g), Linear(D, g * ol, gain=0.0)
        if ratio:
            self.compressor = Compressor(c, ratio, d)
        if ratio == 4:
            self.indexer = Indexer(c)

    def forward(self, h, doc, rope, dense, qat, pick="best"):
        """h [B, T, D], doc [B, T / 128] the document of each block, dense: bool tensor, keep every row.

        Returns [B, T, D] and the indexer's loss summed over tokens. `pick` replaces the indexer's choice for
        experiments: "oldest" keeps the oldest rows."""
        B, T, D = h.shape
        H, d, Wn = self.H, self.d, self.window
        cos, sin = rope[:T].cos(), rope[:T].sin()
        qr = self.q_norm(self.wq_a(h))
        q = rms(self.wq_b(qr).unflatten(-1, (H, d)), None, self.eps)
        q = rotate_tail(q, cos[:, None], sin[:, None])
        kv = rotate_tail(self.kv_norm(self.wkv(h)), cos, sin)
        if qat:
            kv = torch.cat([fp8_round(kv[..., :self.nope]), kv[..., self.nope:]], -1)

        # window: each block of 128 queries against its own and the previous block
        nb = T // Wn
        blocks = kv.view(B, nb, Wn, d)
        both = torch.cat([F.pad(blocks[:, :-1], (0, 0, 0, 0, 1, 0)), blocks], 2)          # [B, nb, 256, d]
        i, j = torch.arange(Wn, device=h.device)[:, None], torch.arange(2 * Wn, device=h.device)[None]
        near = (j <= i + Wn) & (j > i)                                                    # [128, 256]
        prev = F.pad(doc[:, 1:] == doc[:, :-1], (1, 0))                                   # [B, nb]
        near = near & (prev[:, :, None, None] | (j >= Wn))                                # [B, nb, 128, 256]
        sw = (q.view(B, nb, Wn * H, d) @ both.mT).view(B, nb, Wn, H, 2 * Wn).float() * d ** -0.5
        sw = sw.masked_fill(~near[:, :, :, None], float("-inf"))
        sink = self.attn_sink.float()
        m = torch.maximum(sw.detach().amax(-1), sink.detach())                            # [B, nb, 128, H]
        loss = h.new_zeros((), dtype=torch.float32)

        if self.ratio == 0:
            e = (sw - m[..., None]).exp()
            den = e.sum(-1) + (sink - m).exp()
            o = (e.to(h.dtype).view(B, nb, Wn * H, 2 * Wn) @ both).view(B, T, H, d)
        else:
            r = self.ratio
            W = T // r
            rows_doc = doc.repeat_interleave(Wn // r, 1)                                  # [B, W]
            first = F.pad(rows_doc[:, 1:] != rows_doc[:, :-1], (1, 0), value=True)
            comp = self.compressor(h, first, cos, sin)
            if qat:
                comp = torch.cat([fp8_round(comp[..., :self.nope]), comp[..., self.nope:]], -1)
            t = torch.arange(T, device=h.device)
            seen = (torch.arange(W, device=h.device)[None] < ((t + 1) // r)[:, None])[None] & \
                   (rows_doc[:, None, :] == doc.repeat_interleave(Wn, 1)[:, :, None])     # [B, T, W]
            sc = (q.view(B, T * H, d) @ comp.mT).view(B, T, H, W).float() * d ** -0.5
            sc = sc.masked_fill(~seen[:, :, None], float("-inf"))
            m = torch.maximum(m.view(B, T, H), sc.detach().amax(-1))
            e = (sw - m.view(B, nb, Wn, H)[..., None]).exp()
            ec = (sc - m[..., None]).exp()
            base = e.sum(-1).view(B, T, H) + (sink - m).exp()
            if r == 4:
                scores = self.indexer(h.detach(), qr.detach(), first, cos, sin, qat)
                full = (base + ec.sum(-1)).detach()
                # the indexer learns to give each row the share of attention that it gets, summed over heads
                share = (ec.detach() / full[..., None]).sum(2)                            # [B, T, W]
                masked = scores.masked_fill(~seen, -1e30)
                logp = masked - masked.logsumexp(-1, keepdim=True)
                loss = -(share * logp.masked_fill(~seen, 0)).sum() / H
                if W > self.topk:
                    with torch.no_grad():
                        rank = masked
                        if pick == "oldest":
                            rank = (-torch.arange(W, device=h.device, dtype=torch.float32)).expand(B, T, W).masked_fill(~seen, -1e30)
                        cut = rank.topk(self.topk, -1, sorted=False).values.amin(-1, keepdim=True)
                        keep = (rank >= cut) | dense
                    ec = ec * keep[:, :, None]
            den = base + ec.sum(-1)
            o = (e.to(h.dtype).view(B, nb, Wn * H, 2 * Wn) @ both).view(B, T, H, d)
            o = o + (ec.to(h.dtype).view(B, T * H, W) @ comp).view(B, T, H, d)
            den = den.view(B, nb, Wn, H)
        o = (o.float() / den.view(B, T, H)[..., None]).to(h.dtype)
        o = rotate_tail(o, cos[:, None], -sin[:, None])
        wa = self.wo_a.weight.to(h.dtype).view(self.g, self.ol, -1)
        low = torch.einsum("btgi,goi->btgo", o.reshape(B, T, self.g, -1), wa).reshape(B, T, -1)
        return self.wo_b(low), loss


# ------------------------------------------------------------------------------------------------ the model
class Hyper(nn.Module):
    """One set of hyper-connection parameters; `mixes` = (2 + n) n for a sublayer, n for the head."""

    def __init__(self, c, mixes, base):
        super().__init__()
        n, D = c["hc_mult"], c["hidden_size"]
        self.fn = nn.Parameter(torch.randn(mixes, n * D) * (n * D) ** -0.5)
        self.base = nn.Parameter(base.clone())
        self.scale = nn.Parameter(torch.full((3 if mixes > n else 1,), 0.1))
        self.n, self.eps, self.rms_eps, self.iters = n, c["hc_eps"], c["rms_norm_eps"], c["hc_sinkhorn_iters"]

    def mixes(self, x):
        """x [B, T, n, D] -> fn . rms(flat) [B, T, mixes], f32."""
        flat = x.flatten(2)
        inv = torch.rsqrt(flat.float().square().mean(-1, keepdim=True) + self.rms_eps)
        return F.linear(flat, self.fn.to(x.dtype)).float() * inv

    def collapse(self, m, x):
        pre = torch.sigmoid(m * self.scale[0] + self.base[:self.n]) + self.eps
        return (pre[..., None] * x.float()).sum(2).to(x.dtype)

    def forward(self, x):
        """-> the sublayer's input [B, T, D], post [B, T, n], comb [B, T, n, n]."""
        n = self.n
        m = self.mixes(x)
        post = 2 * torch.sigmoid(m[..., n:2 * n] * self.scale[1] + self.base[n:2 * n])
        c = sinkhorn((m[..., 2 * n:] * self.scale[2] + self.base[2 * n:]).reshape(-1, n * n), self.iters, self.eps)
        return self.collapse(m[..., :n], x), post, c.view(*m.shape[:-1], n, n)


def mix(y, x, post, comb):
    """out[j] = post[j] y + sum_i comb[i, j] x[i]."""
    return (post[..., None] * y.float()[..., None, :] +
            (comb[..., None] * x.float()[..., :, None, :]).sum(-3)).to(x.dtype)


def sublayer_base(n, index):
    """Start near a plain residual: the input mixes the streams with weights that add up to 1 and favour one
    stream, the output goes to all streams alike, and the streams hardly mix."""
    pre = torch.full((n,), 0.125)
    pre[index % n] = 1 - 0.125 * (n - 1)
    comb = torch.eye(n) * 4
    return torch.cat([torch.logit(pre), torch.zeros(n), comb.flatten()])


class Block(nn.Module):
    def __init__(self, c, i):
        super().__init__()
        n, D = c["hc_mult"], c["hidden_size"]
        self.hc_attn = Hyper(c, (2 + n) * n, sublayer_base(n, 2 * i))
        self.hc_ffn = Hyper(c, (2 + n) * n, sublayer_base(n, 2 * i + 1))
        self.attn_norm, self.ffn_norm = Norm(D, c["rms_norm_eps"]), Norm(D, c["rms_norm_eps"])
        self.attn = Attention(c, c["compress_ratios"][i])
        self.ffn = MoE(c, i < c["num_hash_layers"])

    def forward(self, x, ids, doc, rope, dense, qat, pick="best"):
        h, post, comb = self.hc_attn(x)
        y, loss = self.attn(self.attn_norm(h), doc, rope, dense, qat, pick)
        x = mix(y, x, post, comb)
        h, post, comb = self.hc_ffn(x)
        y, load = self.ffn(self.ffn_norm(h).flatten(0, 1), ids.flatten())
        return mix(y.view_as(h), x, post, comb), loss, load


class Model(nn.Module):
    def __init__(self, c, max_len=16384):
        super().__init__()
        n, D, V = c["hc_mult"], c["hidden_size"], c["vocab_size"]
        self.c = c
        self.embed = nn.Parameter(torch.randn(V, D))
        self.head = nn.Parameter(torch.randn(V, D) * 0.02)
        self.norm = Norm(D, c["rms_norm_eps"])
        self.hc_head = Hyper(c, n, torch.full((n,), math.log(1 / 3)))
        self.layers = nn.ModuleList(Block(c, i) for i in range(c["num_hidden_layers"]))
        pos = torch.arange(max_len, dtype=torch.float32)[:, None]
        for name, kind in (("rope_main", False), ("rope_comp", True)):
            self.register_buffer(name, pos * rope_frequencies(c, kind), persistent=False)

    def hidden(self, ids, doc, dense, qat, dtype, pick="best"):
        """ids [B, T], doc [B, T / 128] -> normed output [B, T, D], indexer loss, load [L, E]."""
        x = F.embedding(ids, self.embed).to(dtype)[:, :, None].expand(-1, -1, self.c["hc_mult"], -1)
        total, loads = 0, []
        for i, layer in enumerate(self.layers):
            rope = self.rope_comp if self.c["compress_ratios"][i] else self.rope_main
            x, loss, load = layer(x, ids, doc, rope, dense, qat, pick)
            total = total + loss
            loads.append(load)
        return self.tail(x), total, torch.stack(loads)

    def tail(self, x):
        return self.norm(self.hc_head.collapse(self.hc_head.mixes(x), x))

    def logits(self, h):
        return F.linear(h, self.head.to(h.dtype)).float()


# ------------------------------------------------------------------------------------------------ official names
def official_names(c):
    """(our name, official name, how) for every tensor; how: "", "w13" (two stacks) or "experts"."""
    out = [("embed", "embed.weight"), ("head", "head.weight"), ("norm.weight", "norm.weight")]
    out += [(f"hc_head.{k}", f"hc_head_{k}") for k in ("fn", "base", "scale")]
    for i, ratio in enumerate(c["compress_ratios"][:c["num_hidden_layers"]]):
        p = f"layers.{i}."
        out += [(f"{p}hc_{s}.{k}", f"{p}hc_{s}_{k}") for s in ("attn", "ffn") for k in ("fn", "base", "scale")]
        names = ["attn_norm.weight", "ffn_norm.weight", "attn.attn_sink"]
        names += [f"attn.{m}.weight" for m in ("wq_a", "q_norm", "wq_b", "wkv", "kv_norm", "wo_a", "wo_b")]
        comps = ["attn.compressor."] if ratio else []
        if ratio == 4:
            comps.append("attn.indexer.compressor.")
            names += ["attn.indexer.wq_b.weight", "attn.indexer.weights_proj.weight"]
        for q in comps:
            names += [q + k for k in ("wkv.weight", "wgate.weight", "ape", "norm.weight")]
        out += [(p + k, p + k) for k in names]
        out.append((p + "ffn.gate", p + "ffn.gate.weight"))
        out.append((p + "ffn.tid2eid", p + "ffn.gate.tid2eid") if i < c["num_hash_layers"]
                   else (p + "ffn.bias", p + "ffn.gate.bias"))
    return out


def to_official(model):
    """State as official names -> tensors; experts as stacks `layers.i.ffn.experts.w1` [E, F, D]."""
    s, c = model.state_dict(), model.c
    out = {b: s[a] for a, b in official_names(c)}
    for i in range(c["num_hidden_layers"]):
        p = f"layers.{i}.ffn."
        for stem, dst, suffix in (("", "experts.", ""), ("shared_", "shared_experts.", ".weight")):
            w1, w3 = s[p + stem + "w13"].chunk(2, -2)
            out[p + dst + "w1" + suffix], out[p + dst + "w3" + suffix] = w1, w3
            out[p + dst + "w2" + suffix] = s[p + stem + "w2"]
    return out


def from_official(model, w):
    """Loads tensors under official names (experts as stacks)."""
    c, s = model.c, {}
    for a, b in official_names(c):
        s[a] = w[b]
    for i in range(c["num_hidden_layers"]):
        p = f"layers.{i}.ffn."
        for stem, src, suffix in (("", "experts.", ""), ("shared_", "shared_experts.", ".weight")):
            s[p + stem + "w13"] = torch.cat([w[p + src + "w1" + suffix], w[p + src + "w3" + suffix]], -2)
            s[p + stem + "w2"] = w[p + src + "w2" + suffix]
    model.load_state_dict({k: v.reshape(model.state_dict()[k].shape) for k, v in s.items()})
