// Products of few tokens in integers: activations as 8-bit blocks of 32 with a scale, quantised by the block that reads
// them, four products an instruction.
#pragma once
#include "gemm.cuh"
#include "matmul.cuh"

// Activations of some tokens in shared memory, each as quantised_bytes says.
struct Quantised {
    u8* base;
    int cols;
    __device__ Quantised(u8* base, int cols) : base(base), cols(cols) {}
    __device__ __forceinline__ u8* row(int t) const { return base + t * quantised_bytes(1, cols); }
    __device__ __forceinline__ const uint4* codes(int t) const { return (const uint4*)row(t); }
    __device__ __forceinline__ const float* scales(int t) const { return (const float*)(row(t) + cols); }
    __device__ __forceinline__ const int* sums(int t) const { return (const int*)(row(t) + cols + cols / 8); }
    // Eight threads a block of 32. The whole thread block takes part.
    __device__ void load(int t, const float* x) {
        int sub = threadIdx.x % 8;
        for (int b = threadIdx.x / 8; b < cols / 32; b += blockDim.x / 8) {
            float4 v = *(const float4*)(x + b * 32 + sub * 4);
            float m = fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w)));
            u32 mask = 0xffu << (threadIdx.x % 32 & ~7);
            for (int d = 1; d < 8; d *= 2) m = fmaxf(m, __shfl_xor_sync(mask, m, d));
            float inv = m > 0.f ? 127.f / m : 0.f;
            int a = __float2int_rn(v.x * inv), c = __float2int_rn(v.y * inv), e = __float2int_rn(v.z * inv), g = __float2int_rn(v.w * inv);
            ((u32*)row(t))[b * 8 + sub] = (a & 255) | (c & 255) << 8 | (e & 255) << 16 | (g & 255) << 24;
            int sum = a + c + e + g;
            sum += __shfl_xor_sync(mask, sum, 1);
            sum += __shfl_xor_sync(mask, sum, 2);
            if (sub % 4 == 0) ((int*)sums(t))[b * 2 + sub / 4] = sum;
            if (sub == 0) ((float*)scales(t))[b] = m / 127.f;
        }
    }
    // The same from columns `first` on of a row of n values that was quantised before.
    __device__ void fetch(int t, const u8* from, int n, int first) {
        if (n == cols) return to_shared(row(t), from, quantised_bytes(1, n));
        to_shared(row(t), from + first, cols);
        to_shared(row(t) + cols, from + n + first / 8, cols / 8);
        to_shared(row(t) + cols + cols / 8, from + n + n / 8 + first / 4, cols / 4);
    }
};

// Q2_K: sixteen bytes hold four groups of sixteen values, one in each pair of bits.
struct Chunk {
    u32 q[4];
    u32 dm;
    uint2 sc;
    __device__ __forceinline__ void load(const Mat& m, u64 row, int i) {
        const u8* b = m.data + row * m.row_bytes + (u64)(i / 4) * 84;
        int half_of = i % 4 / 2, side = i % 2;
        const u32* p = (const u32*)(b + 16 + 32 * half_of + 16 * side);
#pragma unroll
        for (int j = 0; j < 4; j++) q[j] = __ldg(p + j);
        dm = __ldg((const u32*)(b + 80));
        sc = make_uint2(__ldg((const u32*)b + 2 * half_of), __ldg((const u32*)b + 2 * half_of + 1));
    }
    __device__ __forceinline__ float dot(const Quantised& x, int t, int i) const {
        int half_of = i % 4 / 2, side = i % 2;
        u32 bits = dm;
        float2 d = __half22float2(*(half2*)&bits);
        float sum = 0.f;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            int at = (i / 4) * 16 + 8 * half_of + 2 * j + side;
            u32 s = ((j < 2 ? sc.x : sc.y) >> (16 * (j & 1) + 8 * side)) & 255;
            uint4 a = x.codes(t)[at];
            int v = __dp4a((int)(q[0] >> (2 * j) & 0x03030303u), (int)a.x, __dp4a((int)(q[1] >> (2 * j) & 0x03030303u), (int)a.y,
                    __dp4a((int)(q[2] >> (2 * j) & 0x03030303u), (int)a.z, __dp4a((int)(q[3] >> (2 * j) & 0x03030303u), (int)a.w, 0))));
            sum += x.scales(t)[at / 2] * (d.x * (float)(s & 15) * (float)v - d.y * (float)(s >> 4) * (float)x.sums(t)[at]);
        }
        return sum;
    }
};

template <int F>
struct HasInteger {
    static constexpr bool value = F == Q8_0 || F == Q2_K || F == IQ2_XXS;
};

// A warp's share of one row against TB tokens.
template <int F, int TB>
__device__ __forceinline__ void integer_row(const Mat& m, u64 row, const Quantised& x, const uint2* grid_of, int lane, float* acc) {
    if constexpr (F == Q8_0) {
        int n = m.cols / 16;
        const uint4* w = (const uint4*)(m.data + row * m.cols);
        const half* d = (const half*)(m.data + m.heads_at) + row * (m.cols / 32);
#pragma unroll 8
        for (int i = lane; i < n; i += 32) {
            uint4 v = __ldg(w + i);
            float scale = __half2float(d[i / 2]);
#pragma unroll
            for (int t = 0; t < TB; t++) {
                uint4 a = x.codes(t)[i];
                int s = __dp4a((int)v.x, (int)a.x, __dp4a((int)v.y, (int)a.y, __dp4a((int)v.z, (int)a.z, __dp4a((int)v.w, (int)a.w, 0))));
                acc[t] += scale * x.scales(t)[i / 2] * (float)s;
            }
        }
    } else if constexpr (F == IQ2_XXS) {
        // A lane takes whole groups of 32.
        int n = m.cols / 32;
        u64 b0 = row * (m.cols / 256);
        const uint2* w = (const uint2*)(m.data + b0 * 64);
        const half* d = (const half*)(m.data + m.heads_at) + b0;
#pragma unroll 4
        for (int i = lane; i < n; i += 32) {
            uint2 q = __ldg(w + i);
            float scale = __half2float(d[i / 8]) * (0.5f + (float)(q.y >> 28)) * 0.25f;
            int s[TB] = {};
#pragma unroll
            for (int v = 0; v < 4; v++) {
                uint2 grid = grid_of[(q.x >> (8 * v)) & 255];
                u32 signs = (q.y >> (7 * v)) & 127;
                signs |= (__popc(signs) & 1) << 7;
                // Bit k of a nibble to byte k: ones where the element is negative.
                u32 n0 = ((signs & 15) * 0x00204081u) & 0x01010101u, n1 = ((signs >> 4) * 0x00204081u) & 0x01010101u;
                int w0 = (int)((grid.x ^ (n0 * 255u)) + n0), w1 = (int)((grid.y ^ (n1 * 255u)) + n1);
#pragma unroll
                for (int t = 0; t < TB; t++) {
                    uint2 a = ((const uint2*)x.codes(t))[4 * i + v];
                    s[t] = __dp4a(w0, (int)a.x, __dp4a(w1, (int)a.y, s[t]));
                }
            }
#pragma unroll
            for (int t = 0; t < TB; t++) acc[t] += scale * x.scales(t)[i] * (float)s[t];
        }
    } else if constexpr (F == Q2_K) {
        int n = m.cols / 64;
#pragma unroll 2
        for (int i = lane; i < n; i += 32) {
            Chunk c;
            c.load(m, row, i);
#pragma unroll
            for (int t = 0; t < TB; t++) acc[t] += c.dot(x, t, i);
        }
    }
}

// The first 4 KB of what a warp will walk through: they are asked for before the input is there.
struct Piece {
    uint4 v[8];
    half s[8];
    __device__ __forceinline__ void load(const uint4* w, const half* d, int first, int pieces) {
#pragma unroll
        for (int k = 0; k < 8; k++)
            if (first + k < pieces) {
                v[k] = __ldg(w + (first + k) * 32);
                if (d) s[k] = d[(first + k) * 16];
            }
    }
};

// Rows that lie one behind the other, of Q8_0 blocks or of f16, in pieces of 512 bytes: a warp walks through them 4 KB at a
// time, and the next are under way while it multiplies. A row is a whole number of pieces.
struct Walk {
    const uint4* w;
    const half* d;  // scales, or null
    int per_row, pieces;
    __device__ __forceinline__ Walk(const Mat& m, u64 first, int count, int lane) {
        if (m.format == Q8_0) {
            u64 at = first * m.cols;
            w = (const uint4*)(m.data + at) + lane;
            d = (const half*)(m.data + m.heads_at) + at / 32 + lane / 2;
            per_row = m.cols / 512;
        } else {
            w = (const uint4*)(m.data + first * m.row_bytes) + lane;
            d = nullptr;
            per_row = m.cols / 256;
        }
        pieces = count * per_row;
    }
};

template <int TB, typename Term, typename Out>
__device__ __forceinline__ void walk(const Walk& k0, Piece now, int lane, Term term, Out out) {
    float acc[TB] = {};
    int row = 0, col = 0;
    for (int p = 0; p < k0.pieces; p += 8) {
        Piece next;
        next.load(k0.w, k0.d, p + 8, k0.pieces);
#pragma unroll
        for (int k = 0; k < 8; k++) {
            if (p + k >= k0.pieces) break;
            term(now.v[k], now.s[k], col, acc);
            if (++col == k0.per_row) {
#pragma unroll
                for (int t = 0; t < TB; t++) {
                    float total = warp_sum(acc[t]);
                    if (lane == 0) out(row, t, total);
                    acc[t] = 0.f;
                }
                col = 0;
                row++;
            }
        }
        now = next;
    }
}

// Against TB tokens in 8 bits.
template <int TB, typename Out>
__device__ __forceinline__ void q8_walk(const Walk& k, const Piece& first, const Quantised& x, int lane, Out out) {
    walk<TB>(k, first, lane, [&](const uint4& v, half s, int col, float* acc) {
        float scale = __half2float(s);
#pragma unroll
        for (int t = 0; t < TB; t++) {
            uint4 a = x.codes(t)[col * 32 + lane];
            int sum = __dp4a((int)v.x, (int)a.x, __dp4a((int)v.y, (int)a.y, __dp4a((int)v.z, (int)a.z, __dp4a((int)v.w, (int)a.w, 0))));
            acc[t] += scale * x.scales(t)[col * 16 + lane / 2] * (float)sum;
        }
    }, out);
}

template <int TB, typename Out>
__device__ __forceinline__ void q8_rows(const Mat& m, u64 first, int count, const Quantised& x, int lane, Out out) {
    Walk k(m, first, count, lane);
    Piece piece;
    piece.load(k.w, k.d, 0, k.pieces);
    q8_walk<TB>(k, piece, x, lane, out);
}

// Against TB tokens in f32, [TB, cols] in shared memory.
template <int TB, typename Out>
__device__ __forceinline__ void f16_walk(const Walk& k, const Piece& first, const float* x, int cols, int lane, Out out) {
    walk<TB>(k, first, lane, [&](const uint4& v, half, int col, float* acc) {
        const half2* h = (const half2*)&v;
        float2 w[4] = {__half22float2(h[0]), __half22float2(h[1]), __half22float2(h[2]), __half22float2(h[3])};
#pragma unroll
        for (int t = 0; t < TB; t++) {
            const float4* f = (const float4*)(x + t * cols + col * 256 + lane * 8);
            float4 a = f[0], b = f[1];
            acc[t] += w[0].x * a.x + w[0].y * a.y + w[1].x * a.z + w[1].y * a.w + w[2].x * b.x + w[2].y * b.y + w[3].x * b.z + w[3].y * b.w;
        }
    }, out);
}

constexpr int ROWS_MAX = 128;  // of a block of integer_products

// One product of Q8_0 blocks, or of f16 rows, for up to TB tokens: `rows` rows a block, all in one group.
template <int TB>
__device__ __forceinline__ void integer_products(const Products& p, u32 rows) {
    extern __shared__ __align__(16) u8 shared[];
    __shared__ float out[TB][ROWS_MAX];
    int j = 0;
    while (j + 1 < p.count && blockIdx.x >= p.job[j + 1].first_block) j++;
    const Product& job = p.job[j];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    u32 first = (blockIdx.x - job.first_block) * rows, end = min(first + rows, job.m.rows);
    int first_token = blockIdx.y * TB;
    u32 each = rows / 8, row = first + warp * each, column = first / job.group_rows * job.m.cols;
    int count = row < end ? (int)min(each, end - row) : 0;
    bool floats = job.m.format == F16, walks = floats || job.m.cols % 512 == 0;
    Walk k(job.m, row, count, lane);
    Piece piece;
    // Weights do not depend on the kernels before this one.
    if (walks) piece.load(k.w, k.d, 0, k.pieces);
    wait_for_previous();
    Quantised x(shared, job.m.cols);
    for (int t = 0; t < TB; t++) {
        u64 token = min(first_token + t, (int)p.tokens - 1);
        if (floats) to_shared(shared + t * job.m.cols * 4, (const u8*)(job.x + token * job.x_stride + column), job.m.cols * 4);
        else if (job.x_codes) x.fetch(t, job.x_codes + token * quantised_bytes(1, job.x_stride), job.x_stride, column);
        else x.load(t, job.x + token * job.x_stride + column);
    }
    __syncthreads();
    auto keep = [&](int r, int t, float v) { out[t][row - first + r] = v; };
    if (floats) {
        f16_walk<TB>(k, piece, (const float*)shared, job.m.cols, lane, keep);
    } else if (walks) {
        q8_walk<TB>(k, piece, x, lane, keep);
    } else {
        for (int r = 0; r < count; r++) {
            float acc[TB] = {};
            integer_row<Q8_0, TB>(job.m, row + r, x, nullptr, lane, acc);
#pragma unroll
            for (int t = 0; t < TB; t++) {
                float v = warp_sum(acc[t]);
                if (lane == 0) keep(r, t, v);
            }
        }
    }
    __syncthreads();
    u32 n = end - first;
    for (u32 i = threadIdx.x; i < TB * rows; i += 256) {
        u32 t = i / rows, r = i % rows;
        if (r >= n || first_token + t >= p.tokens) continue;
        job.y[(u64)(first_token + t) * job.y_stride + first + r] = out[t][r];
    }
    if (!job.y_codes) return;
    for (u32 i = warp; i < TB * (n / 32); i += 8) {
        u32 t = i / (n / 32), b = i % (n / 32);
        if (first_token + t < p.tokens)
            quantise32(out[t][32 * b + lane], job.y_codes + (u64)(first_token + t) * quantised_bytes(1, job.y_stride), job.y_stride, first / 32 + b);
    }
}

#define INTEGER(TB) \
    extern "C" __global__ void __launch_bounds__(256, 2) integer_##TB(const __grid_constant__ Products p, u32 rows) { integer_products<TB>(p, rows); }
INTEGER(1)
INTEGER(2)
INTEGER(4)
INTEGER(8)

// Row of a format with or without an integer form.
__device__ __forceinline__ float expert_row(const Mat& m, u64 row, const Quantised& q, const uint2* grid, const float* x, int lane) {
    float acc = 0.f;
    BY_FORMAT(m.format, ({
        if constexpr (HasInteger<F>::value) {
            integer_row<F, 1>(m, row, q, grid, lane, &acc);
        } else {
            const float* xs[1] = {x};
            dot_row<F, 1>(m, row, xs, lane, 32, &acc);
        }
    });)
    return warp_sum(acc);
}

// The vectors of IQ2_XXS and its 128 sign codes as masks of bytes, sixteen times over: lane i reads copy i % 16, so that
// the lanes of a half warp never meet in a bank.
struct Tables {
    uint2 grid[256][16];
    uint2 signs[128][16];
    __device__ void load() {
        for (int i = threadIdx.x; i < 256 * 16; i += blockDim.x) grid[i / 16][i % 16] = IQ2_GRID[i / 16];
        for (int i = threadIdx.x; i < 128 * 16; i += blockDim.x) {
            u32 c = i / 16, s = c | (__popc(c) & 1) << 7;
            signs[c][i % 16] = make_uint2((((s & 15) * 0x00204081u) & 0x01010101u) * 255u, (((s >> 4) * 0x00204081u) & 0x01010101u) * 255u);
        }
    }
};

// Sum of one group of 32: with n negative, v ^ -1 is -v - 1, so what is negative is added once more.
__device__ __forceinline__ int iq2_group(const Tables& tables, int copy, uint2 q, const uint4* x) {
    int s = 0, negative = 0;
#pragma unroll
    for (int v = 0; v < 4; v++) {
        uint2 g = tables.grid[(q.x >> (8 * v)) & 255][copy], m = tables.signs[(q.y >> (7 * v)) & 127][copy];
        int a = (int)(v & 1 ? x[v / 2].z : x[v / 2].x), b = (int)(v & 1 ? x[v / 2].w : x[v / 2].y);
        s = __dp4a((int)(g.x ^ m.x), a, __dp4a((int)(g.y ^ m.y), b, s));
        negative = __dp4a((int)m.x, a, __dp4a((int)m.y, b, negative));
    }
    return s - negative;
}

constexpr int GAP = 16;  // warps of a block of the experts' kernels

// Rows row and row + GAP of two IQ2_XXS matrices of one shape against one token: w1 of both, then w3 of both.
__device__ __forceinline__ float4 iq2_four(const Mat& m1, const Mat& m3, u64 row, const Quantised& x, const Tables& tables, int lane) {
    int n = m1.cols / 32, blocks = m1.cols / 256, copy = lane % 16;
    u64 b = row * blocks;
    const uint2 *w1 = (const uint2*)(m1.data + b * 64), *w3 = (const uint2*)(m3.data + b * 64);
    const half *d1 = (const half*)(m1.data + m1.heads_at) + b, *d3 = (const half*)(m3.data + m3.heads_at) + b;
    float acc[4] = {};
    uint2 next[4] = {};
    half dnext[4] = {};
    auto load = [&](int i) {
        next[0] = __ldg(w1 + i);
        next[1] = __ldg(w1 + GAP * n + i);
        next[2] = __ldg(w3 + i);
        next[3] = __ldg(w3 + GAP * n + i);
        dnext[0] = d1[i / 8];
        dnext[1] = d1[GAP * blocks + i / 8];
        dnext[2] = d3[i / 8];
        dnext[3] = d3[GAP * blocks + i / 8];
    };
    if (lane < n) load(lane);
    for (int i = lane; i < n; i += 32) {
        uint2 q[4] = {next[0], next[1], next[2], next[3]};
        half d[4] = {dnext[0], dnext[1], dnext[2], dnext[3]};
        if (i + 32 < n) load(i + 32);
        uint4 a[2] = {x.codes(0)[2 * i], x.codes(0)[2 * i + 1]};
        float xs = x.scales(0)[i] * 0.25f;
#pragma unroll
        for (int j = 0; j < 4; j++)
            acc[j] += __half2float(d[j]) * (0.5f + (float)(q[j].y >> 28)) * xs * (float)iq2_group(tables, copy, q[j], a);
    }
    return make_float4(warp_sum(acc[0]), warp_sum(acc[1]), warp_sum(acc[2]), warp_sum(acc[3]));
}

constexpr int SHARE = 4;  // tokens that use what a row was expanded to

// The same against SHARE tokens.
__device__ __forceinline__ void iq2_shared(const Mat& m1, const Mat& m3, u64 row, const Quantised& x, const Tables& tables, int lane, float (*acc)[SHARE]) {
    int n = m1.cols / 32, blocks = m1.cols / 256, copy = lane % 16;
    u64 b = row * blocks;
    const uint2 *w1 = (const uint2*)(m1.data + b * 64), *w3 = (const uint2*)(m3.data + b * 64);
    const half *d1 = (const half*)(m1.data + m1.heads_at) + b, *d3 = (const half*)(m3.data + m3.heads_at) + b;
    for (int i = lane; i < n; i += 32) {
        uint2 q[4] = {__ldg(w1 + i), __ldg(w1 + GAP * n + i), __ldg(w3 + i), __ldg(w3 + GAP * n + i)};
        half d[4] = {d1[i / 8], d1[GAP * blocks + i / 8], d3[i / 8], d3[GAP * blocks + i / 8]};
        int s[4][SHARE] = {};
#pragma unroll
        for (int v = 0; v < 4; v++) {
            uint2 a[SHARE];
#pragma unroll
            for (int t = 0; t < SHARE; t++) a[t] = ((const uint2*)x.codes(t))[4 * i + v];
#pragma unroll
            for (int j = 0; j < 4; j++) {
                uint2 g = tables.grid[(q[j].x >> (8 * v)) & 255][copy], m = tables.signs[(q[j].y >> (7 * v)) & 127][copy];
                int lo = (int)((g.x ^ m.x) + (m.x & 0x01010101u)), hi = (int)((g.y ^ m.y) + (m.y & 0x01010101u));
#pragma unroll
                for (int t = 0; t < SHARE; t++) s[j][t] = __dp4a(lo, (int)a[t].x, __dp4a(hi, (int)a[t].y, s[j][t]));
            }
        }
#pragma unroll
        for (int j = 0; j < 4; j++) {
            float scale = __half2float(d[j]) * (0.5f + (float)(q[j].y >> 28)) * 0.25f;
#pragma unroll
            for (int t = 0; t < SHARE; t++) acc[j][t] += scale * x.scales(t)[i] * (float)s[j][t];
        }
    }
}

// Bytes of dynamic shared memory that the kernels of gate and up take for `tokens` tokens.
__host__ __device__ constexpr u32 expert_up_shared(int hidden, int tokens) { return 384 * 16 * 8 + quantised_bytes(tokens, hidden); }

// Blocks of the shared expert's rows, 32 each; a routed expert's blocks have 64.
__host__ __device__ constexpr u32 own_blocks(u32 rows) { return (rows + 31) / 32; }
__host__ __device__ constexpr u32 routed_blocks(u32 rows) { return (rows + 63) / 64; }

// Gate and up of one expert's rows from `first` on, for n tokens whose x is in shared memory, into mid [2][SHARE][64].
// GENERAL: of any format, one token alone.
template <bool GENERAL>
__device__ __forceinline__ void expert_rows(const Mat& w1, const Mat& w3, u64 base, u32 first, u32 rows, int n, const Quantised& x, const Tables& tables,
                                            const float* h, float (*mid)[SHARE][64]) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    bool whole = first + rows <= w1.rows;
    if (whole && w1.format == IQ2_XXS && w3.format == IQ2_XXS && rows == 64) {
#pragma unroll 1
        for (u32 r = warp; r < 64; r += 2 * GAP) {
            if (GENERAL || n == 1) {
                float4 v = iq2_four(w1, w3, base + first + r, x, tables, lane);
                if (lane == 0) {
                    mid[0][0][r] = v.x;
                    mid[0][0][r + GAP] = v.y;
                    mid[1][0][r] = v.z;
                    mid[1][0][r + GAP] = v.w;
                }
            } else {
                float acc[4][SHARE] = {};
                iq2_shared(w1, w3, base + first + r, x, tables, lane, acc);
#pragma unroll
                for (int j = 0; j < 4; j++)
#pragma unroll
                    for (int t = 0; t < SHARE; t++) {
                        float v = warp_sum(acc[j][t]);
                        if (lane == 0) mid[j / 2][t][r + GAP * (j % 2)] = v;
                    }
            }
        }
    } else if (whole && w1.format == Q8_0 && w3.format == Q8_0 && w1.cols % 512 == 0) {
        int each = rows / 16, r0 = warp * each;
#pragma unroll 1
        for (int which = 0; which < 2; which++) {
            const Mat& w = which ? w3 : w1;
            if (GENERAL || n == 1) q8_rows<1>(w, base + first + r0, each, x, lane, [&](int r, int, float v) { mid[which][0][r0 + r] = v; });
            else q8_rows<SHARE>(w, base + first + r0, each, x, lane, [&](int r, int t, float v) { mid[which][t][r0 + r] = v; });
        }
    } else if constexpr (GENERAL) {
        for (u32 r = first + warp; r < min(first + rows, w1.rows); r += 16) {
            float a = expert_row(w1, base + r, x, IQ2_GRID, h, lane), b = expert_row(w3, base + r, x, IQ2_GRID, h, lane);
            if (lane == 0) {
                mid[0][0][r - first] = a;
                mid[1][0][r - first] = b;
            }
        }
    }
}

// As expert_up for one token; mid in 8 bits. A pair's row of mid starts every 4 * width bytes. The shared expert's rows are
// the longest: its blocks come first.
extern "C" __global__ void __launch_bounds__(512, 2) expert_up_integer(const __grid_constant__ ExpertMats e) {
    extern __shared__ __align__(16) u8 space[];
    __shared__ float mid[2][SHARE][64];
    Tables& tables = *(Tables*)space;
    u32 shared_blocks = own_blocks(e.shared_gate.rows), t = blockIdx.y, k = e.k, first = blockIdx.x * 32, rows = 32;
    bool own = blockIdx.x < shared_blocks;
    if (!own) {
        u32 per = routed_blocks(e.gate.rows), i = blockIdx.x - shared_blocks;
        k = i / per;
        first = i % per * 64;
        rows = 64;
        tables.load();
    }
    wait_for_previous();
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    u32 pair = t * (e.k + 1) + k;
    const Mat& w1 = own ? e.shared_gate : e.gate;
    const Mat& w3 = own ? e.shared_up : e.up;
    const float* h = e.h + (u64)t * e.hidden;
    Quantised x(space + sizeof(Tables), e.hidden);
    if (e.h_codes) x.fetch(0, e.h_codes + (u64)t * quantised_bytes(1, e.hidden), e.hidden, 0);
    else x.load(0, h);
    u64 base = own ? 0 : (u64)e.experts[t * e.k + k] * w1.rows;
    float gate = own ? 1.f : e.gates[t * e.k + k];
    if (threadIdx.x < 128) mid[threadIdx.x / 64][0][threadIdx.x % 64] = 0.f;
    __syncthreads();
    expert_rows<true>(w1, w3, base, first, rows, 1, x, tables, h, mid);
    __syncthreads();
    if (warp < rows / 32 && first + 32 * warp < w1.rows) {
        int at = 32 * warp + lane;
        quantise32(swiglu(mid[0][0][at], mid[1][0][at], e.clamp) * gate, (u8*)(e.mid + (u64)pair * e.width), w1.rows, first / 32 + warp);
    }
}

// y of one token, 16 rows a block: the sum over its experts in the order of choice, then the shared one.
extern "C" __global__ void __launch_bounds__(512, 2) expert_down_integer(const __grid_constant__ ExpertMats e) {
    wait_for_previous();
    extern __shared__ __align__(16) u8 space[];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    u32 t = blockIdx.y, r = blockIdx.x * 16 + warp;
    u32 each = quantised_bytes(1, e.width), quads = each / 16;
    // A pair's row is `each` bytes every 4 * width; a shorter one leaves the rest unused.
    const u8* from = (const u8*)(e.mid + (u64)t * (e.k + 1) * e.width);
    for (u32 i = threadIdx.x; i < (e.k + 1) * quads; i += 4 * 512) {
        uint4 v[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            u32 at = i + j * 512;
            if (at < (e.k + 1) * quads) v[j] = ((const uint4*)(from + (u64)(at / quads) * 4 * e.width))[at % quads];
        }
#pragma unroll
        for (int j = 0; j < 4; j++)
            if (i + j * 512 < (e.k + 1) * quads) ((uint4*)space)[i + j * 512] = v[j];
    }
    __syncthreads();
    if (r >= e.hidden) return;
    float sum = 0.f;
    u32 begin = 0;
    if (e.down.format == Q2_K && e.k % 3 == 0) {
        // Each expert's row is short: fetch three before the first is used.
        begin = e.k;
        int n = e.down.cols / 64;
        float part = 0.f;
        for (u32 k0 = 0; k0 < e.k; k0 += 3)
            for (int i = lane; i < n; i += 32) {
                Chunk c[3];
#pragma unroll
                for (int k = 0; k < 3; k++) c[k].load(e.down, (u64)e.experts[t * e.k + k0 + k] * e.down.rows + r, i);
#pragma unroll
                for (int k = 0; k < 3; k++) part += c[k].dot(Quantised(space + (k0 + k) * each, e.down.cols), 0, i);
            }
        sum = warp_sum(part);
    }
    for (u32 k = begin; k <= e.k; k++) {
        const Mat& w2 = k == e.k ? e.shared_down : e.down;
        Quantised x(space + k * each, w2.cols);
        u64 row = (k == e.k ? 0 : (u64)e.experts[t * e.k + k] * w2.rows) + r;
        if (w2.format == Q8_0 && w2.cols % 512 == 0) q8_rows<1>(w2, row, 1, x, lane, [&](int, int, float v) { sum += v; });
        else sum += expert_row(w2, row, x, IQ2_GRID, nullptr, lane);
    }
    if (lane == 0) e.y[(u64)t * e.hidden + r] = sum;
}

// Rows of x, [T, n], in 8 bits: a warp a block of 32.
extern "C" __global__ void __launch_bounds__(256) quantise_rows(const float* x, u8* codes, u32 n) {
    wait_for_previous();
    u32 t = blockIdx.y, b = blockIdx.x * 8 + threadIdx.x / 32;
    if (b < n / 32) quantise32(x[(u64)t * n + b * 32 + threadIdx.x % 32], codes + (u64)t * quantised_bytes(1, n), n, b);
}

// The experts of some tens of tokens: a tile is up to 16 tokens of one expert, and its weights are expanded once for every
// four of them. The shared expert's tiles come first.
struct Grouped {
    ExpertMats e;
    const Tile* tiles;
    const int* order;
    const int* total;
    u32 own;  // the shared expert's tiles
};

// As expert_up_integer, a block's rows of one tile. Routed gate and up of IQ2_XXS, the shared expert's of Q8_0.
extern "C" __global__ void __launch_bounds__(512) expert_up_tiles(const __grid_constant__ Grouped g) {
    extern __shared__ __align__(16) u8 space[];
    __shared__ float mid[2][SHARE][64];
    Tables& tables = *(Tables*)space;
    const ExpertMats& e = g.e;
    u32 per_own = own_blocks(e.shared_gate.rows), per = routed_blocks(e.gate.rows), at = blockIdx.x / per_own, rows = 32, first = blockIdx.x % per_own * 32;
    bool own = at < g.own;
    if (!own) {
        u32 i = blockIdx.x - g.own * per_own;
        at = g.own + i / per;
        first = i % per * 64;
        rows = 64;
    }
    wait_for_previous();
    if ((int)at >= *g.total) return;
    Tile tile = g.tiles[at];
    if (!own) tables.load();
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const Mat& w1 = own ? e.shared_gate : e.gate;
    const Mat& w3 = own ? e.shared_up : e.up;
    Quantised x(space + sizeof(Tables), e.hidden);
    u32 quads = quantised_bytes(1, e.hidden) / 16;
    for (int done = 0; done < tile.count; done += SHARE) {
        int n = min(SHARE, tile.count - done);
        __syncthreads();
        for (u32 i = threadIdx.x; i < n * quads; i += 512) {
            u32 token = g.order[tile.first + done + i / quads] / (e.k + 1);
            ((uint4*)x.base)[i] = ((const uint4*)(e.h_codes + (u64)token * quantised_bytes(1, e.hidden)))[i % quads];
        }
        __syncthreads();
        expert_rows<false>(w1, w3, own ? 0 : (u64)tile.expert * w1.rows, first, rows, n, x, tables, nullptr, mid);
        __syncthreads();
        // A warp a block of 32 values of one token.
        int b = warp % 2, i = warp / 2;
        if (i < n && 32 * b < rows) {
            u32 pair = g.order[tile.first + done + i], t = pair / (e.k + 1), k = pair % (e.k + 1);
            float gate = own ? 1.f : e.gates[t * e.k + k];
            int c = 32 * b + lane;
            quantise32(swiglu(mid[0][i][c], mid[1][i][c], e.clamp) * gate, (u8*)(e.mid + (u64)pair * e.width), w1.rows, first / 32 + b);
        }
    }
}

// The tile's part of y, 64 rows a block.
extern "C" __global__ void __launch_bounds__(256) expert_down_tiles(const __grid_constant__ Grouped g) {
    wait_for_previous();
    extern __shared__ __align__(16) u8 space[];
    const ExpertMats& e = g.e;
    if ((int)blockIdx.y >= *g.total) return;
    Tile tile = g.tiles[blockIdx.y];
    bool own = blockIdx.y < g.own;
    const Mat& w2 = own ? e.shared_down : e.down;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, chunks = w2.cols / 64;
    u32 r0 = blockIdx.x * 64 + warp * 8, quads = quantised_bytes(1, w2.cols) / 16;
    Quantised x(space, w2.cols);
    for (int done = 0; done < tile.count; done += SHARE) {
        int n = min(SHARE, tile.count - done);
        __syncthreads();
        for (u32 i = threadIdx.x; i < n * quads; i += 256) {
            u32 pair = g.order[tile.first + done + i / quads];
            ((uint4*)x.base)[i] = ((const uint4*)(e.mid + (u64)pair * e.width))[i % quads];
        }
        __syncthreads();
        auto keep = [&](int r, int t, float v) {
            if (t < n) e.parts[(u64)g.order[tile.first + done + t] * e.hidden + r0 + r] = v;
        };
        if (own) {
            if (n == 1) q8_rows<1>(w2, r0, 8, x, lane, keep);
            else q8_rows<SHARE>(w2, r0, 8, x, lane, keep);
            continue;
        }
        for (int r = 0; r < 8; r += 4) {
            float acc[4][SHARE] = {};
            for (int i = lane; i < chunks; i += 32) {
                Chunk c[4];
#pragma unroll
                for (int j = 0; j < 4; j++) c[j].load(w2, (u64)tile.expert * w2.rows + r0 + r + j, i);
#pragma unroll
                for (int t = 0; t < SHARE; t++) {
                    if (t >= n) break;
#pragma unroll
                    for (int j = 0; j < 4; j++) acc[j][t] += c[j].dot(x, t, i);
                }
            }
#pragma unroll
            for (int j = 0; j < 4; j++)
#pragma unroll
                for (int t = 0; t < SHARE; t++) {
                    float v = warp_sum(acc[j][t]);
                    if (lane == 0) keep(r + j, t, v);
                }
        }
    }
}
