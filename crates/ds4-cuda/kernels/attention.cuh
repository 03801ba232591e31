// Section 4: norms and rotations around the projections, compressor, indexer, attention.
#pragma once
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(256) rms_rows(float* x, const float* gain, u8* codes, u32 n, float eps, const __grid_constant__ Ahead next) {
    wait_for_previous();
    fetch_ahead(next, blockIdx.x, gridDim.x);
    __shared__ float part[33];
    float* row = x + (u64)blockIdx.x * n;
    float ss = 0.f;
    for (u32 i = threadIdx.x; i < n; i += blockDim.x) ss += row[i] * row[i];
    float inv = inverse_rms(block_sum(ss, part), n, eps);
    for (u32 i = threadIdx.x; i < n; i += blockDim.x) {
        float v = row[i] * inv * gain[i];
        row[i] = v;
        if (codes) quantise32(v, codes + (u64)blockIdx.x * quantised_bytes(1, n), n, i / 32);
    }
}

// q [T, H, d]: rms of each head, rotary tail. One head a block.
extern "C" __global__ void __launch_bounds__(128) finish_q(Step s, float* q, const float* freqs, u32 dim, u32 rope, float eps) {
    wait_for_previous();
    extern __shared__ float row[];
    __shared__ float part[33];
    float* x = q + ((u64)blockIdx.y * gridDim.x + blockIdx.x) * dim;
    float ss = 0.f;
    for (u32 i = threadIdx.x; i < dim; i += blockDim.x) {
        row[i] = x[i];
        ss += row[i] * row[i];
    }
    float inv = inverse_rms(block_sum(ss, part), dim, eps);
    for (u32 i = threadIdx.x; i < dim; i += blockDim.x) row[i] *= inv;
    __syncthreads();
    rope_tail(row, dim, rope / 2, freqs, s.pos[blockIdx.y], false);
    __syncthreads();
    for (u32 i = threadIdx.x; i < dim; i += blockDim.x) x[i] = row[i];
}

// kv [T, d] from its product: rms, rotary tail, rounded as stored; and as it will be stored, where `fresh` is given.
extern "C" __global__ void __launch_bounds__(128) finish_kv(Step s, Rows r, const float* product, float* kv, u8* fresh, const float* gain,
                                                            const float* freqs, float eps) {
    wait_for_previous();
    extern __shared__ float row[];
    __shared__ float part[33];
    const float* x = product + (u64)blockIdx.x * r.dim;
    float ss = 0.f;
    for (u32 i = threadIdx.x; i < r.dim; i += blockDim.x) {
        row[i] = x[i];
        ss += row[i] * row[i];
    }
    float inv = inverse_rms(block_sum(ss, part), r.dim, eps);
    for (u32 i = threadIdx.x; i < r.dim; i += blockDim.x) row[i] = row[i] * inv * gain[i];
    __syncthreads();
    rope_tail(row, r.dim, r.rope / 2, freqs, s.pos[blockIdx.x], false);
    __syncthreads();
    round_main(row, r);
    __syncthreads();
    for (u32 i = threadIdx.x; i < r.dim; i += blockDim.x) kv[(u64)blockIdx.x * r.dim + i] = row[i];
    if (fresh) encode_main(row, fresh + (u64)blockIdx.x * r.main_bytes, r);
}

struct Pooling {
    const float* a;     // [T, channels]
    const float* z;
    const float* ape;   // [ratio, channels]
    float* state;       // [windows, 3, width]: max, sum, weighted sum
    const float* norm;
    const float* freqs;
    u64 acc_at;         // in a frontier
    u64 rows_at;        // in a page
    u32 ratio;
    u32 width;
    u32 overlap;
    u32 index;          // the indexer's rows
    u32 stride;         // of a and z
    float eps;
};

struct Running {
    float max, sum, weighted;
    __device__ void add(float a, float z) {
        if (sum == 0.f) {
            max = z;
            sum = 1.f;
            weighted = a;
            return;
        }
        float m = fmaxf(max, z);
        float o = expf(max - m), n = expf(z - m);
        max = m;
        sum = sum * o + n;
        weighted = weighted * o + a * n;
    }
};

// One window's running softmax over the batch's tokens, one channel a thread. Windows of a segment run from the one its
// first token is in to the one after its last; those that the frontier knows start from it.
extern "C" __global__ void pool(Step s, const __grid_constant__ Pooling p) {
    wait_for_previous();
    Window job = s.windows[p.ratio == 128][blockIdx.y];
    u32 c = blockIdx.x * blockDim.x + threadIdx.x;
    if (job.segment < 0 || c >= p.width) return;
    Segment g = s.segments[job.segment];
    int first = g.pos / (int)p.ratio, end = g.pos + g.len;
    const float* acc = (const float*)(s.frontiers + g.slot * s.frontier_bytes + p.acc_at);
    Running v = {0.f, 0.f, 0.f};
    int from = job.window - first;
    if (from < (p.overlap ? 2 : 1)) {
        const float* a = acc + from * 3 * p.width + c;
        v = {a[0], a[p.width], a[2 * p.width]};
    }
    for (int half = p.overlap ? 0 : 1; half < 2; half++) {
        int w = job.window - 1 + half;
        int lo = max(w * (int)p.ratio, g.pos), hi = min((w + 1) * (int)p.ratio, end);
        for (int pos = lo; pos < hi; pos++) {
            u32 ch = c + (p.overlap && half ? p.width : 0);
            u64 at = (u64)(g.row + pos - g.pos) * p.stride + ch;
            v.add(p.a[at], p.z[at] + p.ape[(pos % p.ratio) * (p.overlap ? 2 : 1) * p.width + ch]);
        }
    }
    float* out = p.state + (u64)blockIdx.y * 3 * p.width + c;
    out[0] = v.max;
    out[p.width] = v.sum;
    out[2 * p.width] = v.weighted;
}

// Complete windows become rows in their pages, the others go back to the frontier. One window a block of 128.
extern "C" __global__ void __launch_bounds__(128) pool_finish(Step s, Rows r, const __grid_constant__ Pooling p) {
    wait_for_previous();
    extern __shared__ float row[];
    __shared__ float part[33];
    Window job = s.windows[p.ratio == 128][blockIdx.x];
    if (job.segment < 0) return;
    Segment g = s.segments[job.segment];
    int last = (g.pos + g.len) / (int)p.ratio;
    const float* state = p.state + (u64)blockIdx.x * 3 * p.width;
    if (job.window >= last) {
        int which = job.window - last;
        if (which >= (p.overlap ? 2 : 1)) return;
        float* acc = (float*)(s.frontiers + g.slot * s.frontier_bytes + p.acc_at) + which * 3 * p.width;
        for (u32 i = threadIdx.x; i < 3 * p.width; i += blockDim.x) acc[i] = state[i];
        return;
    }
    float ss = 0.f;
    for (u32 i = threadIdx.x; i < p.width; i += blockDim.x) {
        row[i] = state[2 * p.width + i] / state[p.width + i];
        ss += row[i] * row[i];
    }
    float inv = inverse_rms(block_sum(ss, part), p.width, p.eps);
    for (u32 i = threadIdx.x; i < p.width; i += blockDim.x) row[i] = row[i] * inv * p.norm[i];
    __syncthreads();
    rope_tail(row, p.width, r.rope / 2, p.freqs, job.window * p.ratio, false);
    __syncthreads();
    u8* out = page_row(s, g.slot, job.window, 128 / p.ratio, p.rows_at, p.index ? r.index_bytes : r.main_bytes);
    if (!p.index) {
        if (r.qat && !r.packed) {
            round_main(row, r);
            __syncthreads();
        }
        encode_main(row, out, r);
        return;
    }
    if (r.qat) {
        for (u32 half = 1; half < p.width; half *= 2) {
            for (u32 i = threadIdx.x; i < p.width / 2; i += blockDim.x) {
                u32 lo = i / half * 2 * half + i % half;
                float a = row[lo], b = row[lo + half];
                row[lo] = a + b;
                row[lo + half] = a - b;
            }
            __syncthreads();
        }
        float scale = powf((float)p.width, -0.5f);
        for (u32 i = threadIdx.x; i < p.width; i += blockDim.x) row[i] *= scale;
        __syncthreads();
    }
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (u32 b = warp; b < p.width / 32; b += blockDim.x / 32) {
        float v = row[b * 32 + lane];
        int e = scale_exponent(warp_max(fmaxf(fabsf(v), 6.f * 1.17549435e-38f)), 6.f);
        u8 code = e2m1_encode(v / exp2i(e));
        if (!r.packed) {
            ((float*)out)[b * 32 + lane] = r.qat ? e2m1_decode(code) * exp2i(e) : v;
        } else {
            u32 next = __shfl_down_sync(~0u, (u32)code, 1);
            if (lane % 2 == 0) out[b * 16 + lane / 2] = code | next << 4;
            if (lane == 0) out[p.width / 2 + b] = e + 127;
        }
    }
}

// As finish_index_q for heads of 128 channels, 64 of them rotary: one head a warp, four channels a lane.
extern "C" __global__ void __launch_bounds__(128) finish_index_q_128(Step s, Rows r, float* q, const float* freqs, u32 heads) {
    wait_for_previous();
    u32 h = blockIdx.x * 4 + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (h >= heads) return;
    float4* x = (float4*)(q + ((u64)blockIdx.y * heads + h) * 128) + lane;
    float4 v = *x;
    if (lane >= 16) {
        float pos = (float)s.pos[blockIdx.y], sn, cs, a = v.x, b = v.y;
        sincosf(pos * freqs[2 * lane - 32], &sn, &cs);
        v.x = a * cs - b * sn;
        v.y = a * sn + b * cs;
        a = v.z, b = v.w;
        sincosf(pos * freqs[2 * lane - 31], &sn, &cs);
        v.z = a * cs - b * sn;
        v.w = a * sn + b * cs;
    }
    if (r.qat) {
        v = make_float4(v.x + v.y, v.x - v.y, v.z + v.w, v.z - v.w);
        v = make_float4(v.x + v.z, v.y + v.w, v.x - v.z, v.y - v.w);
        for (u32 d = 1; d < 32; d *= 2) {
            float4 o = make_float4(__shfl_xor_sync(~0u, v.x, d), __shfl_xor_sync(~0u, v.y, d), __shfl_xor_sync(~0u, v.z, d), __shfl_xor_sync(~0u, v.w, d));
            v = lane & d ? make_float4(o.x - v.x, o.y - v.y, o.z - v.z, o.w - v.w) : make_float4(v.x + o.x, v.y + o.y, v.z + o.z, v.w + o.w);
        }
        float scale = powf(128.f, -0.5f);
        v = make_float4(v.x * scale, v.y * scale, v.z * scale, v.w * scale);
        float m = fmaxf(fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w))), 6.f * 1.17549435e-38f);
        for (u32 d = 1; d < 8; d *= 2) m = fmaxf(m, __shfl_xor_sync(~0u, m, d));
        int e = scale_exponent(m, 6.f);
        float inv = exp2i(-e), up = exp2i(e);
        v = make_float4(e2m1_decode(e2m1_encode(v.x * inv)) * up, e2m1_decode(e2m1_encode(v.y * inv)) * up, e2m1_decode(e2m1_encode(v.z * inv)) * up,
                        e2m1_decode(e2m1_encode(v.w * inv)) * up);
    }
    *x = v;
}

// Indexer queries [T, Hi, di]: rotary tail; Hadamard and FP4 where qat asks. One head a block of di threads.
extern "C" __global__ void finish_index_q(Step s, Rows r, float* q, const float* freqs) {
    wait_for_previous();
    extern __shared__ float row[];
    u32 n = r.index_dim;
    float* x = q + ((u64)blockIdx.y * gridDim.x + blockIdx.x) * n;
    for (u32 i = threadIdx.x; i < n; i += blockDim.x) row[i] = x[i];
    __syncthreads();
    rope_tail(row, n, r.rope / 2, freqs, s.pos[blockIdx.y], false);
    __syncthreads();
    if (r.qat) {
        for (u32 half = 1; half < n; half *= 2) {
            for (u32 i = threadIdx.x; i < n / 2; i += blockDim.x) {
                u32 lo = i / half * 2 * half + i % half;
                float a = row[lo], b = row[lo + half];
                row[lo] = a + b;
                row[lo + half] = a - b;
            }
            __syncthreads();
        }
        float scale = powf((float)n, -0.5f);
        int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        for (u32 b = warp; b < n / 32; b += blockDim.x / 32) {
            float v = row[b * 32 + lane] * scale;
            int e = scale_exponent(warp_max(fmaxf(fabsf(v), 6.f * 1.17549435e-38f)), 6.f);
            row[b * 32 + lane] = e2m1_decode(e2m1_encode(v / exp2i(e))) * exp2i(e);
        }
        __syncthreads();
    }
    for (u32 i = threadIdx.x; i < n; i += blockDim.x) x[i] = row[i];
}

// scores[t, w] = sum over heads of wt * relu(q . row): 32 rows of one token a block, each by four threads that share its
// heads.
extern "C" __global__ void __launch_bounds__(128) index_scores(Step s, Rows r, const float* q, const float* wt, float* scores, u32 heads,
                                                               u32 topk, u32 first, u32 capacity, u64 rows_at, float scale) {
    wait_for_previous();
    extern __shared__ float4 qs[];
    u32 t = first + blockIdx.y, n = r.index_dim;
    int visible = (s.pos[t] + 1) / 4;
    if (visible <= (int)topk || (int)(blockIdx.x * 32) >= visible) return;
    const float4* from = (const float4*)(q + (u64)t * heads * n);
    for (u32 i = threadIdx.x; i < heads * n / 4; i += 128) qs[i] = from[i];
    __syncthreads();
    int w = min((int)blockIdx.x * 32 + (int)threadIdx.x / 4, visible - 1);
    const u8* bytes = page_row(s, s.segments[s.segment_of[t]].slot, w, 32, rows_at, r.index_bytes);
    float total = 0.f;
    if (n == 128) {
        float key[128];
#pragma unroll
        for (int i = 0; i < 128; i++) key[i] = decode_index(bytes, i, r);
        for (u32 h = threadIdx.x % 4; h < heads; h += 4) {
            float a = 0.f;
#pragma unroll
            for (int i = 0; i < 32; i++) {
                float4 v = qs[h * 32 + i];
                a += v.x * key[4 * i] + v.y * key[4 * i + 1] + v.z * key[4 * i + 2] + v.w * key[4 * i + 3];
            }
            total += wt[(u64)t * heads + h] * scale * fmaxf(a, 0.f);
        }
    } else {
        const float* f = (const float*)qs;
        for (u32 h = threadIdx.x % 4; h < heads; h += 4) {
            float a = 0.f;
            for (u32 i = 0; i < n; i++) a += f[h * n + i] * decode_index(bytes, i, r);
            total += wt[(u64)t * heads + h] * scale * fmaxf(a, 0.f);
        }
    }
    total += __shfl_xor_sync(~0u, total, 1);
    total += __shfl_xor_sync(~0u, total, 2);
    if (threadIdx.x % 4 == 0 && (int)blockIdx.x * 32 + (int)threadIdx.x / 4 < visible) scores[(u64)blockIdx.y * capacity + w] = total;
}

// A key that orders as the float does, larger first when compared as unsigned.
__device__ inline u32 order_key(float v) {
    u32 b = __float_as_uint(v);
    return b & 0x80000000u ? ~b : b | 0x80000000u;
}

// selected [T, topk]: the best rows, ascending; exact radix select, ties to the lower row. One token a block of 1024.
extern "C" __global__ void __launch_bounds__(1024) select_rows(Step s, const float* scores, int* selected, u32 topk, u32 first, u32 capacity) {
    wait_for_previous();
    __shared__ u32 histogram[2048], found[2], warps[32], base[2];
    u32 t = first + blockIdx.x, tid = threadIdx.x;
    int* out = selected + (u64)t * topk;
    u32 visible = (s.pos[t] + 1) / 4;
    if (visible <= topk) {
        for (u32 i = tid; i < topk; i += 1024) out[i] = i < visible ? (int)i : -1;
        return;
    }
    const float* x = scores + (u64)blockIdx.x * capacity;
    u32 prefix = 0, need = topk;
    // Eleven, eleven and ten bits from the top.
    for (int pass = 0; pass < 3; pass++) {
        int shift = pass == 0 ? 21 : pass == 1 ? 10 : 0;
        u32 bins = pass == 2 ? 1024 : 2048, mask = pass == 0 ? 0 : ~0u << (pass == 1 ? 21 : 10);
        histogram[tid] = 0;
        histogram[tid + 1024] = 0;
        __syncthreads();
        for (u32 i = tid; i < visible; i += 1024) {
            u32 k = order_key(x[i]);
            if ((k & mask) == prefix) atomicAdd(&histogram[k >> shift & (bins - 1)], 1);
        }
        __syncthreads();
        // Thread i takes bins 2i' and 2i' + 1 from the top, and finds how many keys lie above them.
        u32 hi = 2047 - 2 * tid, n1 = histogram[hi], n0 = histogram[hi - 1], sum = n0 + n1;
        u32 above = sum;
        for (int d = 1; d < 32; d *= 2) {
            u32 o = __shfl_up_sync(~0u, above, d);
            if (tid % 32 >= d) above += o;
        }
        if (tid % 32 == 31) warps[tid / 32] = above;
        __syncthreads();
        for (u32 w = 0; w < tid / 32; w++) above += warps[w];
        above -= sum;
        if (above < need && above + n1 >= need) {
            found[0] = prefix | hi << shift;
            found[1] = need - above;
        } else if (above + n1 < need && above + sum >= need) {
            found[0] = prefix | (hi - 1) << shift;
            found[1] = need - above - n1;
        }
        __syncthreads();
        prefix = found[0];
        need = found[1];
    }
    // Rows above the threshold, and the first `need` of those that equal it, in order.
    if (tid < 2) base[tid] = 0;
    __syncthreads();
    for (u32 start = 0; start < visible; start += 1024) {
        u32 i = start + tid;
        u32 k = i < visible ? order_key(x[i]) : 0;
        bool equal = i < visible && k == prefix;
        u32 votes = __ballot_sync(~0u, equal);
        if (tid % 32 == 0) warps[tid / 32] = __popc(votes);
        __syncthreads();
        u32 before = base[0];
        for (u32 w = 0; w < tid / 32; w++) before += warps[w];
        before += __popc(votes & ((1u << (tid % 32)) - 1));
        u32 all = 0;
        for (u32 w = 0; w < 32; w++) all += warps[w];
        bool take = i < visible && (k > prefix || (equal && before < need));
        __syncthreads();
        votes = __ballot_sync(~0u, take);
        if (tid % 32 == 0) warps[tid / 32] = __popc(votes);
        __syncthreads();
        u32 place = base[1], taken = 0;
        for (u32 w = 0; w < 32; w++) {
            if (w < tid / 32) place += warps[w];
            taken += warps[w];
        }
        if (take) out[place + __popc(votes & ((1u << (tid % 32)) - 1))] = i;
        __syncthreads();
        if (tid == 0) {
            base[0] += all;
            base[1] += taken;
        }
        __syncthreads();
    }
}

struct Attending {
    const float* q;        // [T, H, d]
    const float* kv;       // [T, d], the batch's rows
    const int* selected;   // [T, topk], or null: all compressed rows
    const float* sinks;
    const float* freqs;
    float* o;
    u64 ring_at;
    u64 rows_at;
    u32 ratio;             // 0: the window only
    u32 topk;
    u32 heads;
    u32 capacity;          // scores that the shared memory holds
    float scale;
};

// Raw rows seen by position pos, then compressed ones.
__device__ inline int seen_rows(const Attending& a, const Rows& r, u32 t, int pos, int& raw) {
    raw = min(pos + 1, (int)r.window);
    if (!a.ratio) return raw;
    int visible = (pos + 1) / (int)a.ratio;
    return raw + (a.selected ? min(visible, (int)a.topk) : visible);
}

// Where seen row i lies: `row` among the batch's f32 rows, or stored bytes.
__device__ inline const u8* locate(const Step& s, const Rows& r, const Attending& a, u32 t, const Segment& g, int pos, int raw, int i, const float** row) {
    *row = nullptr;
    if (i < raw) {
        int p = pos + 1 - raw + i;
        if (p >= g.pos) {
            *row = a.kv + (u64)(g.row + p - g.pos) * r.dim;
            return nullptr;
        }
        return s.frontiers + g.slot * s.frontier_bytes + a.ring_at + (u64)(p % r.window) * r.main_bytes;
    }
    int w = a.selected ? a.selected[(u64)t * a.topk + i - raw] : i - raw;
    return page_row(s, g.slot, w, 128 / a.ratio, a.rows_at, r.main_bytes);
}

// In f32, one head of one token a block of 128: scores, softmax with the sink, weighted sum, un-rotated.
extern "C" __global__ void __launch_bounds__(128) attend_exact(Step s, Rows r, const __grid_constant__ Attending a) {
    wait_for_previous();
    extern __shared__ float scores[];
    __shared__ float part[33], head[1024];
    u32 h = blockIdx.x, t = blockIdx.y;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, pos = s.pos[t], raw;
    Segment g = s.segments[s.segment_of[t]];
    int n = seen_rows(a, r, t, pos, raw);
    const float* q = a.q + ((u64)t * a.heads + h) * r.dim;
    for (u32 i = threadIdx.x; i < r.dim; i += 128) head[i] = q[i];
    __syncthreads();
    float mx = a.sinks[h];
    for (int i = warp; i < n; i += 4) {
        const float* row;
        const u8* bytes = locate(s, r, a, t, g, pos, raw, i, &row);
        float v = 0.f;
        for (u32 c = lane; c < r.dim; c += 32) v += head[c] * (row ? row[c] : decode_main(bytes, c, r));
        v = warp_sum(v) * a.scale;
        if (lane == 0) scores[i] = v;
        mx = fmaxf(mx, v);
    }
    __syncthreads();
    if (lane == 0) part[warp] = mx;
    __syncthreads();
    mx = fmaxf(fmaxf(part[0], part[1]), fmaxf(part[2], part[3]));
    float sum = 0.f;
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += 128) {
        scores[i] = expf(scores[i] - mx);
        sum += scores[i];
    }
    float total = block_sum(sum, part) + expf(a.sinks[h] - mx);
    float acc[8] = {};
    for (int i = 0; i < n; i++) {
        const float* row;
        const u8* bytes = locate(s, r, a, t, g, pos, raw, i, &row);
        float e = scores[i];
#pragma unroll
        for (int k = 0; k < 8; k++) {
            u32 c = threadIdx.x + 128 * k;
            if (c < r.dim) acc[k] += e * (row ? row[c] : decode_main(bytes, c, r));
        }
    }
#pragma unroll
    for (int k = 0; k < 8; k++) {
        u32 c = threadIdx.x + 128 * k;
        if (c < r.dim) head[c] = acc[k] / total;
    }
    __syncthreads();
    rope_tail(head, r.dim, r.rope / 2, a.freqs, pos, true);
    __syncthreads();
    float* o = a.o + ((u64)t * a.heads + h) * r.dim;
    for (u32 i = threadIdx.x; i < r.dim; i += 128) o[i] = head[i];
}

// The window takes the batch's rows: those that are among a segment's last `window`.
extern "C" __global__ void __launch_bounds__(128) store_window(Step s, Rows r, const float* kv, u64 ring_at) {
    wait_for_previous();
    u32 t = blockIdx.x;
    Segment g = s.segments[s.segment_of[t]];
    int i = (int)t - g.row;
    if (i < g.len - (int)r.window) return;
    encode_main(kv + (u64)t * r.dim, s.frontiers + g.slot * s.frontier_bytes + ring_at + (u64)((g.pos + i) % r.window) * r.main_bytes, r);
}

// Experts [T, K] and gates from the scores [T, E]. One token a block of 128; E at most 1024.
extern "C" __global__ void __launch_bounds__(128) route(Step s, const float* logits, const float* bias, const int* table, int* experts,
                                                        float* gates, u32 count, u32 k, float route_scale) {
    wait_for_previous();
    __shared__ float score[1024], biased[1024];
    u32 t = blockIdx.x, lane = threadIdx.x;
    for (u32 e = threadIdx.x; e < count; e += 128) {
        score[e] = sqrtf(softplus(logits[(u64)t * count + e]));
        biased[e] = bias ? score[e] + bias[e] : 0.f;
    }
    __syncthreads();
    if (threadIdx.x >= 32) return;
    int mine = 0;
    for (u32 j = 0; j < k; j++) {
        int at = 1 << 30;
        if (table) {
            at = table[(u64)s.tokens[t] * k + j];
        } else {
            float v = -INFINITY;
            for (u32 e = lane; e < count; e += 32)
                if (biased[e] > v || at == 1 << 30) {
                    v = biased[e];
                    at = e;
                }
            for (int o = 16; o; o >>= 1) {
                float ov = __shfl_xor_sync(~0u, v, o);
                int oi = __shfl_xor_sync(~0u, at, o);
                if (ov > v || (ov == v && oi < at)) {
                    v = ov;
                    at = oi;
                }
            }
            __syncwarp();
            if (lane == 0) biased[at] = -INFINITY;
            __syncwarp();
        }
        if (lane == j) mine = at;
    }
    float gate = lane < k ? score[mine] : 0.f, sum = 0.f;
    for (u32 j = 0; j < k; j++) sum += __shfl_sync(~0u, gate, j);
    if (lane < k) {
        experts[t * k + lane] = mine;
        gates[t * k + lane] = gate / sum * route_scale;
    }
}
