// Attention on tensor cores over packed rows: 32 heads of one token a block, which share every row; rows in tiles of 32,
// split over blocks where the batch is small.
#pragma once
#include "attention.cuh"
#include "tensor.cuh"

struct Flash {
    Attending a;
    const u8* fresh;  // the batch's rows as stored, [T, main_bytes]
    float* part;      // [T, H, splits, d], where splits > 1
    float2* stats;    // maximum and sum, [T, H, splits]
    u8* codes;        // o in 8 bits, or null; where splits > 1
    u32 splits;
    Ahead next;
};

constexpr int FLASH_HEADS = 32, FLASH_ROWS = 32;

__host__ __device__ constexpr u32 flash_shared(int d) { return 2 * 2 * 32 * (d + 8) + 4 * 32 * 36 + 2 * 32 * 40 + 4 * 32; }

// The batch's rows as stored.
extern "C" __global__ void __launch_bounds__(128) encode_rows(Rows r, const float* kv, u8* fresh) {
    wait_for_previous();
    encode_main(kv + (u64)blockIdx.x * r.dim, fresh + (u64)blockIdx.x * r.main_bytes, r);
}

// Two E4M3 codes in the low bytes of each half of x, as f16 over 256.
__device__ __forceinline__ half2 e4m3_pair(u32 x) { return as_half2((x & 0x00800080u) << 8 | (x & 0x007f007fu) << 7); }

template <int D>
__device__ __forceinline__ void flash(const Step& s, const Rows& r, const Flash& f) {
    constexpr int LD = D + 8, NOPE = D - 64, BLOCKS = NOPE / 64, TILES = D / 64;
    extern __shared__ __align__(16) u8 shared[];
    half* Q = (half*)shared;
    half* K = Q + 32 * LD;
    float* S = (float*)(K + 32 * LD);
    half* P = (half*)(S + 32 * 36);
    float* factor = (float*)(P + 32 * 40);
    const Attending& a = f.a;
    int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, h0 = blockIdx.x * FLASH_HEADS;
    u32 t = blockIdx.z;
    fetch_ahead(f.next, blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z), gridDim.x * gridDim.y * gridDim.z);
    int pos = s.pos[t], raw;
    Segment g = s.segments[s.segment_of[t]];
    int n = seen_rows(a, r, t, pos, raw);
    int tiles = (n + FLASH_ROWS - 1) / FLASH_ROWS;
    int tile = (int)(blockIdx.y * tiles / f.splits), last = (int)((blockIdx.y + 1) * tiles / f.splits);

    for (int i = tid; i < 32 * D / 4; i += 256) {
        int h = i / (D / 4), c = i % (D / 4) * 4;
        float4 v = h0 + h < a.heads ? *(const float4*)(a.q + ((u64)t * a.heads + h0 + h) * D + c) : make_float4(0, 0, 0, 0);
        *(uint2*)(Q + h * LD + c) = make_uint2(pack_half(v.x, v.y), pack_half(v.z, v.w));
    }

    // Eight threads fetch a row: eight codes of every block each, and eight rotary values.
    int fetched = tid / 8, sub = tid % 8;
    uint2 codes[BLOCKS], scales;
    u32 rope[5];
    constexpr int ROPE_AT = NOPE + BLOCKS;
    auto fetch = [&](int tile) {
        int i = tile * FLASH_ROWS + fetched;
        if (i >= n) i = n - 1;
        const u8* row;
        if (i < raw) {
            int p = pos + 1 - raw + i;
            row = p >= g.pos ? f.fresh + (u64)(g.row + p - g.pos) * r.main_bytes
                             : s.frontiers + g.slot * s.frontier_bytes + a.ring_at + (u64)(p % r.window) * r.main_bytes;
        } else {
            int w = a.selected ? a.selected[(u64)t * a.topk + i - raw] : i - raw;
            row = page_row(s, g.slot, w, 128 / a.ratio, a.rows_at, r.main_bytes);
        }
#pragma unroll
        for (int b = 0; b < BLOCKS; b++) codes[b] = *(const uint2*)(row + b * 64 + sub * 8);
        scales = *(const uint2*)(row + NOPE);
        const u32* words = (const u32*)(row + (ROPE_AT & ~3) + sub * 16);
#pragma unroll
        for (int i = 0; i < 5; i++) rope[i] = words[i];
    };
    auto store = [&]() {
        half* to = K + fetched * LD + sub * 8;
#pragma unroll
        for (int b = 0; b < BLOCKS; b++) {
            u32 e = (b < 4 ? scales.x >> (8 * b) : scales.y >> (8 * (b - 4))) & 255;
            half2 scale = __float2half2_rn(exp2i((int)e - 119));
            uint4 v;
            v.x = as_u32(__hmul2(e4m3_pair(__byte_perm(codes[b].x, 0, 0x4140)), scale));
            v.y = as_u32(__hmul2(e4m3_pair(__byte_perm(codes[b].x, 0, 0x4342)), scale));
            v.z = as_u32(__hmul2(e4m3_pair(__byte_perm(codes[b].y, 0, 0x4140)), scale));
            v.w = as_u32(__hmul2(e4m3_pair(__byte_perm(codes[b].y, 0, 0x4342)), scale));
            *(uint4*)(to + b * 64) = v;
        }
        constexpr int shift = (ROPE_AT & 3) * 8;
        *(uint4*)(to + NOPE) = make_uint4(__funnelshift_r(rope[0], rope[1], shift), __funnelshift_r(rope[1], rope[2], shift),
                                          __funnelshift_r(rope[2], rope[3], shift), __funnelshift_r(rope[3], rope[4], shift));
    };

    float o[2][TILES][4] = {};
    float top = -INFINITY, sum = 0.f;
    if (tile < last) fetch(tile);
    for (; tile < last; tile++) {
        __syncthreads();
        store();
        __syncthreads();
        if (tile + 1 < last) fetch(tile + 1);
        {
            int mt = warp / 4, nt = warp % 4;
            float c[4] = {};
            const half* qa = Q + (mt * 16 + lane % 16) * LD + lane / 16 * 8;
            const half* kb = K + (nt * 8 + lane % 8) * LD + lane / 8 * 8;
#pragma unroll 4
            for (int k = 0; k < D; k += 32) {
                u32 x[4], y[4], z[4];
                ldmatrix4(x, qa + k);
                ldmatrix4(y, qa + k + 16);
                ldmatrix4(z, kb + k);
                mma(c, x, z[0], z[1]);
                mma(c, y, z[2], z[3]);
            }
            int row = mt * 16 + lane / 4, col = nt * 8 + lane % 4 * 2, i = tile * FLASH_ROWS + col;
            S[row * 36 + col] = i < n ? c[0] * a.scale : -INFINITY;
            S[row * 36 + col + 1] = i + 1 < n ? c[1] * a.scale : -INFINITY;
            S[(row + 8) * 36 + col] = i < n ? c[2] * a.scale : -INFINITY;
            S[(row + 8) * 36 + col + 1] = i + 1 < n ? c[3] * a.scale : -INFINITY;
        }
        __syncthreads();
        {
            float4 v = *(const float4*)(S + fetched * 36 + sub * 4);
            float mx = fmaxf(fmaxf(v.x, v.y), fmaxf(v.z, v.w));
            for (int d = 1; d < 8; d *= 2) mx = fmaxf(mx, __shfl_xor_sync(~0u, mx, d));
            mx = fmaxf(mx, top);
            float old = expf(top - mx);
            v.x = expf(v.x - mx);
            v.y = expf(v.y - mx);
            v.z = expf(v.z - mx);
            v.w = expf(v.w - mx);
            float part = v.x + v.y + v.z + v.w;
            for (int d = 1; d < 8; d *= 2) part += __shfl_xor_sync(~0u, part, d);
            sum = sum * old + part;
            top = mx;
            *(uint2*)(P + fetched * 40 + sub * 4) = make_uint2(pack_half(v.x, v.y), pack_half(v.z, v.w));
            if (sub == 0) factor[fetched] = old;
        }
        __syncthreads();
        u32 p[2][2][4];
#pragma unroll
        for (int mt = 0; mt < 2; mt++) {
            float lo = factor[mt * 16 + lane / 4], hi = factor[mt * 16 + lane / 4 + 8];
#pragma unroll
            for (int j = 0; j < TILES; j++) {
                o[mt][j][0] *= lo;
                o[mt][j][1] *= lo;
                o[mt][j][2] *= hi;
                o[mt][j][3] *= hi;
            }
            for (int k = 0; k < 2; k++) ldmatrix4(p[mt][k], P + (mt * 16 + lane % 16) * 40 + k * 16 + lane / 16 * 8);
        }
#pragma unroll
        for (int j = 0; j < TILES; j++) {
            u32 v[4];
            ldmatrix4_trans(v, K + lane * LD + warp * (D / 8) + j * 8);
#pragma unroll
            for (int mt = 0; mt < 2; mt++) {
                mma(o[mt][j], p[mt][0], v[0], v[1]);
                mma(o[mt][j], p[mt][1], v[2], v[3]);
            }
        }
    }
    __syncthreads();
    if (f.splits > 1) {
        if (sub == 0 && h0 + fetched < a.heads) f.stats[((u64)t * a.heads + h0 + fetched) * f.splits + blockIdx.y] = make_float2(top, sum);
    } else if (sub == 0) {
        float sink = h0 + fetched < a.heads ? a.sinks[h0 + fetched] : 0.f;
        float mx = fmaxf(top, sink);
        factor[fetched] = expf(top - mx) / (sum * expf(top - mx) + expf(sink - mx));
    }
    __syncthreads();
#pragma unroll
    for (int j = 0; j < TILES; j++) {
        int col = warp * (D / 8) + j * 8 + lane % 4 * 2;
        float sn = 0.f, cs = 1.f;
        bool turn = f.splits == 1 && col >= NOPE;
        if (turn) sincosf((float)pos * a.freqs[(col - NOPE) / 2], &sn, &cs);
#pragma unroll
        for (int mt = 0; mt < 2; mt++)
#pragma unroll
            for (int half_of = 0; half_of < 2; half_of++) {
                int row = mt * 16 + lane / 4 + 8 * half_of;
                if (h0 + row >= a.heads) continue;
                u64 head = (u64)t * a.heads + h0 + row;
                float x = o[mt][j][2 * half_of], y = o[mt][j][2 * half_of + 1];
                if (f.splits > 1) {
                    *(float2*)(f.part + (head * f.splits + blockIdx.y) * D + col) = make_float2(x, y);
                } else {
                    x *= factor[row];
                    y *= factor[row];
                    *(float2*)(a.o + head * D + col) = make_float2(x * cs + y * sn, y * cs - x * sn);
                }
            }
    }
}

extern "C" __global__ void __launch_bounds__(256, 2) flash_512(Step s, Rows r, const __grid_constant__ Flash f) { wait_for_previous(); flash<512>(s, r, f); }
extern "C" __global__ void __launch_bounds__(256, 2) flash_192(Step s, Rows r, const __grid_constant__ Flash f) { wait_for_previous(); flash<192>(s, r, f); }

// Joins the splits of one head of one token.
extern "C" __global__ void __launch_bounds__(128) flash_join(Step s, Rows r, const __grid_constant__ Flash f) {
    wait_for_previous();
    extern __shared__ float out[];
    __shared__ float weight[32];
    u32 h = blockIdx.x, t = blockIdx.y;
    u64 head = (u64)t * f.a.heads + h;
    if (threadIdx.x < 32) {
        bool live = threadIdx.x < f.splits;
        float2 v = live ? f.stats[head * f.splits + threadIdx.x] : make_float2(-INFINITY, 0.f);
        float sink = f.a.sinks[h], mx = fmaxf(warp_max(v.x), sink), e = expf(v.x - mx);
        weight[threadIdx.x] = e / (warp_sum(v.y * e) + expf(sink - mx));
    }
    __syncthreads();
    for (u32 c = threadIdx.x; c < r.dim / 4; c += 128) {
        const float4* from = (const float4*)(f.part + head * f.splits * r.dim) + c;
        float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll 10
        for (u32 i = 0; i < f.splits; i++) {
            float4 v = from[i * (r.dim / 4)];
            float w = weight[i];
            sum.x += w * v.x;
            sum.y += w * v.y;
            sum.z += w * v.z;
            sum.w += w * v.w;
        }
        ((float4*)out)[c] = sum;
    }
    __syncthreads();
    rope_tail(out, r.dim, r.rope / 2, f.a.freqs, s.pos[t], true);
    __syncthreads();
    u32 width = f.a.heads * r.dim;
    for (u32 c = threadIdx.x; c < r.dim; c += 128) {
        f.a.o[head * r.dim + c] = out[c];
        if (f.codes) quantise32(out[c], f.codes + (u64)t * quantised_bytes(1, width), width, (h * r.dim + c) / 32);
    }
    // All blocks have read the window: it takes the batch's rows.
    Segment g = s.segments[s.segment_of[t]];
    int i = (int)t - g.row;
    if (h == 0 && i >= g.len - (int)r.window) {
        const u32* from = (const u32*)(f.fresh + (u64)t * r.main_bytes);
        u32* to = (u32*)(s.frontiers + g.slot * s.frontier_bytes + f.a.ring_at + (u64)((g.pos + i) % r.window) * r.main_bytes);
        for (u32 c = threadIdx.x; c < r.main_bytes / 4; c += 128) to[c] = from[c];
    }
}

// The indexer's scores on tensor cores: 128 rows and eight tokens a block. Keys and queries of index_dim 128, heads in
// tiles of 16; `scores` as in index_scores.
extern "C" __global__ void __launch_bounds__(256) index_scores_128(Step s, Rows r, const float* q, const float* wt, float* scores, u32 heads,
                                                                   u32 topk, u32 first, u32 rows, u32 capacity, u64 rows_at, float scale) {
    wait_for_previous();
    extern __shared__ __align__(16) u8 space_of_scores[];
    constexpr int LD = 136;
    half* K = (half*)space_of_scores;
    half* Q = K + 128 * LD;
    int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, w0 = blockIdx.x * 128, loaded = -1;
    for (u32 i = 0; i < 8; i++) {
        u32 at = blockIdx.y * 8 + i, t = first + at;
        if (at >= rows) return;
        int visible = (s.pos[t] + 1) / 4;
        if (visible <= (int)topk || w0 >= visible) continue;
        int slot = s.segments[s.segment_of[t]].slot;
        __syncthreads();
        if (slot != loaded) {
            // Rows that only later tokens see are read too: they are written, or their page's bytes are not used.
            loaded = slot;
            int row = tid / 2, side = tid % 2;
            int last = s.segments[s.segment_of[t]].pos + s.segments[s.segment_of[t]].len;
            int w = min(w0 + row, max(last / 4 - 1, 0));
            const u8* bytes = page_row(s, slot, w, 32, rows_at, r.index_bytes);
            half* to = K + row * LD + side * 64;
            if (r.packed) {
                // An E2M1 code is an f16 times 2^14.
                const u32* codes = (const u32*)bytes + side * 8;
                u32 scales = ((const u32*)bytes)[16];
                const half2 up = __float2half2_rn(16384.f);
#pragma unroll
                for (int c = 0; c < 8; c++) {
                    u32 x = codes[c];
                    half2 scale = __float2half2_rn(exp2i((int)(scales >> (16 * side + c / 4 * 8) & 255) - 127));
                    u32 out[4];
#pragma unroll
                    for (int k = 0; k < 4; k++) {
                        u32 y = (x >> (8 * k) & 15) | (x >> (8 * k + 4) & 15) << 16;
                        out[k] = as_u32(__hmul2(__hmul2(as_half2((y & 0x00070007u) << 9 | (y & 0x00080008u) << 12), up), scale));
                    }
                    *(uint4*)(to + 8 * c) = *(uint4*)out;
                }
            } else {
                for (int c = 0; c < 64; c += 2)
                    *(half2*)(to + c) = __floats2half2_rn(((const float*)bytes)[side * 64 + c], ((const float*)bytes)[side * 64 + c + 1]);
            }
        }
        const float4* from = (const float4*)(q + (u64)t * heads * 128);
        for (u32 j = tid; j < heads * 32; j += 256) {
            float4 v = from[j];
            *(uint2*)(Q + (j / 32) * LD + j % 32 * 4) = make_uint2(pack_half(v.x, v.y), pack_half(v.z, v.w));
        }
        __syncthreads();
        float total[2][2] = {};
        for (u32 m = 0; m < heads; m += 16) {
            float c[2][4] = {};
#pragma unroll
            for (int k = 0; k < 128; k += 16) {
                u32 x[4], y[4];
                ldmatrix4(x, Q + (m + lane % 16) * LD + k + lane / 16 * 8);
                ldmatrix4(y, K + (warp * 16 + lane / 16 * 8 + lane % 8) * LD + k + lane / 8 % 2 * 8);
                mma(c[0], x, y[0], y[1]);
                mma(c[1], x, y[2], y[3]);
            }
            float lo = wt[(u64)t * heads + m + lane / 4] * scale, hi = wt[(u64)t * heads + m + lane / 4 + 8] * scale;
#pragma unroll
            for (int n = 0; n < 2; n++) {
                total[n][0] += lo * fmaxf(c[n][0], 0.f) + hi * fmaxf(c[n][2], 0.f);
                total[n][1] += lo * fmaxf(c[n][1], 0.f) + hi * fmaxf(c[n][3], 0.f);
            }
        }
#pragma unroll
        for (int n = 0; n < 2; n++)
#pragma unroll
            for (int c = 0; c < 2; c++) {
                float v = total[n][c];
                v += __shfl_xor_sync(~0u, v, 4);
                v += __shfl_xor_sync(~0u, v, 8);
                v += __shfl_xor_sync(~0u, v, 16);
                int w = w0 + warp * 16 + n * 8 + lane % 4 * 2 + c;
                if (lane < 4 && w < visible) scores[(u64)at * capacity + w] = v;
            }
    }
}
