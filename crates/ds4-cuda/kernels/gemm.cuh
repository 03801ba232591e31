// Products of many tokens on tensor cores: blocks are expanded to f16 in shared memory, sums are f32.
#pragma once
#include "formats.cuh"
#include "tensor.cuh"

// 32 consecutive values of a row, between their load and their expansion.
template <int F>
struct Raw {
    uint4 v[4];
    __device__ __forceinline__ void load(const Mat& m, u64 row, int block) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float w[8];
            decode8<F>(m, row, 4 * block + i, w);
            v[i] = make_uint4(pack_half(w[0], w[1]), pack_half(w[2], w[3]), pack_half(w[4], w[5]), pack_half(w[6], w[7]));
        }
    }
    __device__ __forceinline__ void store(half* to) const {
#pragma unroll
        for (int i = 0; i < 4; i++) ((uint4*)to)[i] = v[i];
    }
};

// Any format, looked up at every load: for those that no common file has where a product of many tokens wants them.
constexpr int ANY = -1;
template <>
struct Raw<ANY> {
    uint4 v[4];
    __device__ __noinline__ void load(const Mat& m, u64 row, int block) {
        Raw<F32> of;
        BY_FORMAT(m.format, ({
            for (int i = 0; i < 4; i++) {
                float w[8];
                decode8<F>(m, row, 4 * block + i, w);
                of.v[i] = make_uint4(pack_half(w[0], w[1]), pack_half(w[2], w[3]), pack_half(w[4], w[5]), pack_half(w[6], w[7]));
            }
        });)
        for (int i = 0; i < 4; i++) v[i] = of.v[i];
    }
    __device__ __forceinline__ void store(half* to) const {
#pragma unroll
        for (int i = 0; i < 4; i++) ((uint4*)to)[i] = v[i];
    }
};

template <>
struct Raw<Q8_0> {
    uint4 q[2];
    half d;
    __device__ __forceinline__ void load(const Mat& m, u64 row, int block) {
        u64 b = row * (m.cols / 32) + block;
        q[0] = __ldg((const uint4*)(m.data + b * 32));
        q[1] = __ldg((const uint4*)(m.data + b * 32) + 1);
        d = *(const half*)(m.data + m.heads_at + 2 * b);
    }
    __device__ __forceinline__ void store(half* to) const {
        half2 scale = __half2half2(d), bias = __half2half2(__ushort_as_half(0x6480));  // 1152
        const u32* w = (const u32*)q;
        u32 out[16];
#pragma unroll
        for (int i = 0; i < 8; i++) {
            // A byte below 0x64 is 1024 plus it; the sign bit flipped adds 128.
            u32 x = w[i] ^ 0x80808080u;
            out[2 * i] = as_u32(__hmul2(__hsub2(as_half2(__byte_perm(x, 0x64646464u, 0x4140)), bias), scale));
            out[2 * i + 1] = as_u32(__hmul2(__hsub2(as_half2(__byte_perm(x, 0x64646464u, 0x4342)), bias), scale));
        }
#pragma unroll
        for (int i = 0; i < 4; i++) ((uint4*)to)[i] = *(uint4*)(out + 4 * i);
    }
};

template <>
struct Raw<IQ2_XXS> {
    uint2 q;
    half d;
    __device__ __forceinline__ void load(const Mat& m, u64 row, int block) {
        u64 b = row * (m.cols / 256) + block / 8;
        q = __ldg((const uint2*)(m.data + b * 64) + block % 8);
        d = *(const half*)(m.data + m.heads_at + 2 * b);
    }
    __device__ __forceinline__ void store(half* to) const {
        half2 scale = __float2half2_rn(__half2float(d) * (0.5f + (float)(q.y >> 28)) * 0.25f), bias = __half2half2(__ushort_as_half(0x6400));
#pragma unroll
        for (int v = 0; v < 4; v++) {
            uint2 grid = __ldg(&IQ2_GRID[(q.x >> (8 * v)) & 255]);
            u32 signs = (q.y >> (7 * v)) & 127;
            signs |= (__popc(signs) & 1) << 7;
            u32 out[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                half2 x = __hmul2(__hsub2(as_half2(__byte_perm(i < 2 ? grid.x : grid.y, 0x64646464u, i & 1 ? 0x4342 : 0x4140)), bias), scale);
                u32 s = signs >> (2 * i);
                out[i] = as_u32(x) ^ ((s & 1) << 15 | (s & 2) << 30);
            }
            ((uint4*)to)[v] = *(uint4*)out;
        }
    }
};

template <>
struct Raw<Q2_K> {
    uint4 q[2];
    u32 dm;
    u32 scales;
    __device__ __forceinline__ void load(const Mat& m, u64 row, int block) {
        const u8* b = m.data + row * m.row_bytes + (u64)(block / 8) * 84;
        int n = block % 8;
        const u32* p = (const u32*)(b + 16 + 32 * (n / 4));
        u32* w = (u32*)q;
#pragma unroll
        for (int i = 0; i < 8; i++) w[i] = __ldg(p + i) >> (2 * (n & 3)) & 0x03030303u;
        dm = __ldg((const u32*)(b + 80));
        scales = *(const u16*)(b + 2 * n);
    }
    __device__ __forceinline__ void store(half* to) const {
        half2 bias = __half2half2(__ushort_as_half(0x6400));
        float2 d = __half22float2(as_half2(dm));
        const u32* w = (const u32*)q;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            u32 s = scales >> (8 * h) & 255;
            half2 scale = __float2half2_rn(d.x * (float)(s & 15)), low = __float2half2_rn(-d.y * (float)(s >> 4));
            u32 out[8];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                u32 x = w[4 * h + i];
                out[2 * i] = as_u32(__hfma2(__hsub2(as_half2(__byte_perm(x, 0x64646464u, 0x4140)), bias), scale, low));
                out[2 * i + 1] = as_u32(__hfma2(__hsub2(as_half2(__byte_perm(x, 0x64646464u, 0x4342)), bias), scale, low));
            }
            ((uint4*)to)[2 * h] = *(uint4*)out;
            ((uint4*)to)[2 * h + 1] = *(uint4*)(out + 4);
        }
    }
};

template <>
struct Raw<F16> {
    uint4 v[4];
    __device__ __forceinline__ void load(const Mat& m, u64 row, int block) {
#pragma unroll
        for (int i = 0; i < 4; i++) v[i] = __ldg((const uint4*)(m.data + row * m.row_bytes) + 4 * block + i);
    }
    __device__ __forceinline__ void store(half* to) const {
#pragma unroll
        for (int i = 0; i < 4; i++) ((uint4*)to)[i] = v[i];
    }
};

// Tokens of one expert, in the order of `order`.
struct Tile {
    int expert, first, count;
};

struct Gemm {
    Mat m;             // [rows, cols]; for experts the stack
    Mat up;            // with `pairs` and a gate: the second matrix
    Mat shared;        // the shared expert's
    Mat shared_up;
    const half* x;     // [.., x_stride]
    float* y;          // [T, y_stride], or the experts' parts
    half* mid;         // gate and up joined, [sorted pairs, width]
    const Tile* tiles;
    const int* order;  // pair of a sorted place
    const int* total;  // tiles
    const float* gates;
    u32 x_stride;
    u32 y_stride;
    u32 group_rows;
    u32 tokens;
    u32 experts;       // the shared expert's number
    u32 k;             // routed experts of a token
    u32 splits;        // plain only: parts of the columns, each into a y of its own
    float clamp;
};

enum Mode { PLAIN, UP, DOWN };
constexpr int BM = 128, BK = 64, GLD = BK + 8;

__host__ __device__ constexpr u32 gemm_shared(int bn) { return 2 * 2 * (BM + bn) * GLD; }

template <int F, int BN, int MODE>
__device__ __forceinline__ void gemm_tile(const Gemm& g, const Mat& m, const Mat& up, u64 base, int row0, const Tile& tile) {
    constexpr int NT = BN / 16;  // tiles of 8 tokens a warp
    extern __shared__ __align__(16) u8 shared[];
    half* W = (half*)shared;            // two stages [BM, GLD]
    half* X = W + 2 * BM * GLD;         // two stages [BN, GLD]
    int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, wm = warp / 2, wn = warp % 2;
    int steps = m.cols / BK, begin = 0;
    float* y = g.y;
    if (MODE == PLAIN && g.splits > 1) {
        int all = steps;
        begin = (int)(blockIdx.z * all / g.splits);
        steps = (int)((blockIdx.z + 1) * all / g.splits);
        y += (u64)blockIdx.z * g.tokens * g.y_stride;
    }

    int sr = tid / 2;
    const Mat& mine = MODE == UP && sr % 32 >= 16 ? up : m;
    int wrow = MODE == UP ? row0 + sr / 32 * 16 + sr % 16 : row0 + sr;
    if (wrow >= m.rows) wrow = m.rows - 1;
    u64 row = base + wrow;
    half* wto = W + sr * GLD + (tid % 2) * 32;
    u64 column = MODE == PLAIN ? (u64)(row0 / g.group_rows) * m.cols : 0;

    auto fetch_x = [&](int step, int stage) {
        for (int i = tid; i < BN * 8; i += 256) {
            int t = i / 8, c = i % 8;
            bool live = t < tile.count;
            int place = tile.first + (live ? t : 0);
            u64 from = MODE == UP ? (u64)(g.order[place] / (int)(g.k + 1)) : (u64)place;
            copy_async(X + (stage * BN + t) * GLD + c * 8, g.x + from * g.x_stride + column + step * BK + c * 8, live ? 16 : 0);
        }
        copy_commit();
    };
    Raw<F> raw;
    float acc[2][NT][4] = {};
    fetch_x(begin, begin & 1);
    raw.load(mine, row, 2 * begin + tid % 2);
    raw.store(wto + (begin & 1) * BM * GLD);
    for (int step = begin; step < steps; step++) {
        int stage = step & 1;
        copy_wait();
        __syncthreads();
        if (step + 1 < steps) {
            fetch_x(step + 1, stage ^ 1);
            raw.load(mine, row, 2 * (step + 1) + tid % 2);
        }
        const half* wa = W + (stage * BM + wm * 32 + lane % 16) * GLD + lane / 16 * 8;
        const half* xb = X + (stage * BN + wn * (BN / 2) + (NT > 1 ? lane / 16 * 8 : 0) + lane % 8) * GLD + lane / 8 % 2 * 8;
#pragma unroll
        for (int k = 0; k < BK; k += 16) {
            u32 a[2][4];
            ldmatrix4(a[0], wa + k);
            ldmatrix4(a[1], wa + 16 * GLD + k);
            if constexpr (NT == 1) {
                u32 b[2];
                ldmatrix2(b, xb + k);
                mma(acc[0][0], a[0], b[0], b[1]);
                mma(acc[1][0], a[1], b[0], b[1]);
            } else {
#pragma unroll
                for (int j = 0; j < NT; j += 2) {
                    u32 b[4];
                    ldmatrix4(b, xb + j * 8 * GLD + k);
                    mma(acc[0][j], a[0], b[0], b[1]);
                    mma(acc[1][j], a[1], b[0], b[1]);
                    mma(acc[0][j + 1], a[0], b[2], b[3]);
                    mma(acc[1][j + 1], a[1], b[2], b[3]);
                }
            }
        }
        if (step + 1 < steps) raw.store(wto + (stage ^ 1) * BM * GLD);
    }
#pragma unroll
    for (int j = 0; j < NT; j++)
#pragma unroll
        for (int c = 0; c < 4; c++) {
            int t = wn * (BN / 2) + j * 8 + lane % 4 * 2 + (c & 1);
            if (t >= tile.count) continue;
            int place = tile.first + t;
            if (MODE == UP) {
                int r = row0 + wm * 16 + lane / 4 + 8 * (c / 2);
                if (r >= m.rows) continue;
                int pair = g.order[place];
                int token = pair / (int)(g.k + 1), k = pair % (int)(g.k + 1);
                float gate = k == (int)g.k ? 1.f : g.gates[token * g.k + k];
                g.mid[(u64)place * g.y_stride + r] = to_half_value(swiglu(acc[0][j][c], acc[1][j][c], g.clamp) * gate);
            } else {
                u64 out = MODE == DOWN ? (u64)g.order[place] : (u64)place;
#pragma unroll
                for (int mt = 0; mt < 2; mt++) {
                    int r = row0 + wm * 32 + mt * 16 + lane / 4 + 8 * (c / 2);
                    if (r < m.rows) y[out * g.y_stride + r] = acc[mt][j][c];
                }
            }
        }
}

// blockIdx.x: tokens, y: rows of the matrix. Q8_0 and the format that files have in this place (projections F16, routed gate
// and up IQ2_XXS, routed down Q2_K) have an expansion of their own; OTHER takes every format.
template <int BN, int MODE, bool OTHER>
__device__ __forceinline__ void gemm(const Gemm& g) {
    Tile tile;
    if (MODE == PLAIN) {
        int first = blockIdx.x * BN;
        tile = {0, first, min(BN, (int)g.tokens - first)};
    } else {
        if ((int)blockIdx.x >= *g.total) return;
        tile = g.tiles[blockIdx.x];
    }
    bool shared = MODE != PLAIN && tile.expert == (int)g.experts;
    const Mat& m = shared ? g.shared : g.m;
    const Mat& up = shared ? g.shared_up : g.up;
    int row0 = blockIdx.y * (MODE == UP ? BM / 2 : BM);
    if (row0 >= m.rows) return;
    u64 base = shared || MODE == PLAIN ? 0 : (u64)tile.expert * m.rows;
    if constexpr (OTHER) {
        gemm_tile<ANY, BN, MODE>(g, m, up, base, row0, tile);
    } else {
        constexpr int OWN = MODE == PLAIN ? F16 : MODE == UP ? IQ2_XXS : Q2_K;
        if (m.format == OWN) gemm_tile<OWN, BN, MODE>(g, m, up, base, row0, tile);
        else gemm_tile<Q8_0, BN, MODE>(g, m, up, base, row0, tile);
    }
}

#define GEMM(NAME, BN, MODE) \
    extern "C" __global__ void __launch_bounds__(256, 2) NAME##_##BN(const __grid_constant__ Gemm g) { wait_for_previous(); gemm<BN, MODE, false>(g); } \
    extern "C" __global__ void __launch_bounds__(256, 2) NAME##_any_##BN(const __grid_constant__ Gemm g) { wait_for_previous(); gemm<BN, MODE, true>(g); }
GEMM(gemm, 16, PLAIN)
GEMM(gemm, 64, PLAIN)
GEMM(gemm, 128, PLAIN)
GEMM(gemm_up, 16, UP)
GEMM(gemm_up, 64, UP)
GEMM(gemm_up, 128, UP)
GEMM(gemm_down, 16, DOWN)
GEMM(gemm_down, 64, DOWN)
GEMM(gemm_down, 128, DOWN)

// y = the sum of its parts, in order.
extern "C" __global__ void sum_splits(const float* parts, float* y, u32 n, u32 splits) {
    wait_for_previous();
    u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float v = 0.f;
    for (u32 k = 0; k < splits; k++) v += parts[(u64)k * n + i];
    y[i] = v;
}

extern "C" __global__ void to_half(const float4* x, uint2* out, u64 n) {
    wait_for_previous();
    for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < n; i += (u64)gridDim.x * blockDim.x) {
        float4 v = x[i];
        out[i] = make_uint2(pack_half(v.x, v.y), pack_half(v.z, v.w));
    }
}

// Pairs of every expert. One expert a block of 256; the shared one is the last.
extern "C" __global__ void __launch_bounds__(256) count_pairs(const int* experts, int* counts, u32 tokens, u32 k) {
    wait_for_previous();
    int n = 0, e = blockIdx.x;
    if (e == (int)gridDim.x - 1) {
        if (threadIdx.x == 0) counts[e] = tokens;
        return;
    }
    for (u32 i = threadIdx.x; i < tokens * k; i += 256) n += experts[i] == e;
    n = __reduce_add_sync(~0u, n);
    __shared__ int part[8];
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = n;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int w = 1; w < 8; w++) n += part[w];
        counts[e] = n;
    }
}

// Sorts pairs by expert, in order of tokens within one, and lists the tiles of BN tokens; the shared expert's come first.
extern "C" __global__ void __launch_bounds__(256) sort_pairs(const int* experts, const int* counts, int* order, Tile* tiles, int* total, u32 tokens, u32 k, u32 bn) {
    wait_for_previous();
    __shared__ int warps[8], base[2];
    int e = blockIdx.x, last = gridDim.x - 1, tid = threadIdx.x;
    int before = 0, tiles_before = 0;
    for (int i = tid; i < (e == last ? 0 : e); i += 256) {
        before += counts[i];
        tiles_before += (counts[i] + bn - 1) / bn;
    }
    if (tid < 2) base[tid] = 0;
    __syncthreads();
    atomicAdd(&base[0], before);
    atomicAdd(&base[1], tiles_before);
    __syncthreads();
    before = base[0] + (e == last ? 0 : (int)tokens);
    tiles_before = base[1] + (e == last ? 0 : (int)((tokens + bn - 1) / bn));
    int count = counts[e], mine = (count + bn - 1) / bn;
    for (int i = tid; i < mine; i += 256) tiles[tiles_before + i] = {e, before + i * (int)bn, min((int)bn, count - i * (int)bn)};
    if (e == last - 1 && tid == 0) *total = tiles_before + mine;
    if (e == last) {
        for (int t = tid; t < tokens; t += 256) order[t] = t * (k + 1) + k;
        return;
    }
    int n = tokens * k;
    for (int start = 0; start < n; start += 256) {
        int i = start + tid;
        bool hit = i < n && experts[i] == e;
        u32 votes = __ballot_sync(~0u, hit);
        if (tid % 32 == 0) warps[tid / 32] = __popc(votes);
        __syncthreads();
        int place = before;
        for (int w = 0; w < 8; w++) {
            if (w < tid / 32) place += warps[w];
            before += warps[w];
        }
        if (hit) order[place + __popc(votes & ((1u << (tid % 32)) - 1))] = i / k * (k + 1) + i % k;
        __syncthreads();
    }
}
