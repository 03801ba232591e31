// Products in f32: a warp per output row, eight values a lane a step. The order of summation depends on the matrix
// alone, so a token's result does not depend on its batch.
#pragma once
#include "formats.cuh"

// y[t, r] = W[r, :] x[t, ...]. Rows in groups of `group_rows` read x from column (r / group_rows) * cols on.
struct Product {
    Mat m;
    const float* x;
    float* y;
    u32 x_stride;
    u32 y_stride;
    u32 group_rows;
    u32 first_block;
    const u8* x_codes;  // x in 8 bits (quantise32), or null
    u8* y_codes;        // where y goes in 8 bits too, or null
};

struct Products {
    Product job[8];
    u32 count;
    u32 tokens;
};

// Groups first, first + step, ... of one row against TB tokens.
template <int F, int TB>
__device__ __forceinline__ void dot_row(const Mat& m, u64 row, const float* const* x, int first, int step, float* acc) {
    int groups = m.cols / 8;
#pragma unroll(TB <= 2 ? 4 : 2)
    for (int g = first; g < groups; g += step) {
        float w[8];
        decode8<F>(m, row, g, w);
#pragma unroll
        for (int t = 0; t < TB; t++) {
            float4 a = *(const float4*)(x[t] + 8 * g), b = *(const float4*)(x[t] + 8 * g + 4);
            acc[t] += w[0] * a.x + w[1] * a.y + w[2] * a.z + w[3] * a.w + w[4] * b.x + w[5] * b.y + w[6] * b.z + w[7] * b.w;
        }
    }
}

// Blocks of 256 threads. A matrix of few rows gives a whole block to each row, any other a warp.
__host__ __device__ inline bool row_per_block(u32 rows, u32 cols) { return rows <= 1024 && cols >= 2048; }

// Rows of a warp: two where there are few tokens, so that both use what is read of x.
__host__ __device__ constexpr int rows_per_warp(int tokens) { return tokens <= 2 ? 2 : 1; }

// The same for two rows at once.
template <int F, int TB>
__device__ __forceinline__ void dot_two(const Mat& m, u64 row, const float* const* x, int first, int step, float* acc0, float* acc1) {
    int groups = m.cols / 8;
#pragma unroll 4
    for (int g = first; g < groups; g += step) {
        float w[8], v[8];
        decode8<F>(m, row, g, w);
        decode8<F>(m, row + 1, g, v);
#pragma unroll
        for (int t = 0; t < TB; t++) {
            float4 a = *(const float4*)(x[t] + 8 * g), b = *(const float4*)(x[t] + 8 * g + 4);
            acc0[t] += w[0] * a.x + w[1] * a.y + w[2] * a.z + w[3] * a.w + w[4] * b.x + w[5] * b.y + w[6] * b.z + w[7] * b.w;
            acc1[t] += v[0] * a.x + v[1] * a.y + v[2] * a.z + v[3] * a.w + v[4] * b.x + v[5] * b.y + v[6] * b.z + v[7] * b.w;
        }
    }
}

template <int TB>
__device__ __forceinline__ void run_products(const Products& p) {
    constexpr int R = rows_per_warp(TB);
    int j = 0;
    while (j + 1 < p.count && blockIdx.x >= p.job[j + 1].first_block) j++;
    const Product& job = p.job[j];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    bool whole = row_per_block(job.m.rows, job.m.cols);
    u32 block = blockIdx.x - job.first_block;
    u32 row = whole ? block : (block * 8 + warp) * R;
    int first_token = blockIdx.y * TB;
    bool live = row < job.m.rows, both = R == 2 && !whole && row + 1 < job.m.rows;
    float acc[TB] = {}, acc1[TB] = {};
    const float* x[TB];
#pragma unroll
    for (int t = 0; t < TB; t++)
        x[t] = job.x + (u64)min(first_token + t, (int)p.tokens - 1) * job.x_stride + (u64)(row / job.group_rows) * job.m.cols;
    if (live) {
        int first = whole ? threadIdx.x : lane, step = whole ? 256 : 32;
        if (both) {
            BY_FORMAT(job.m.format, (dot_two<F, TB>(job.m, row, x, first, step, acc, acc1));)
        } else {
            BY_FORMAT(job.m.format, (dot_row<F, TB>(job.m, row, x, first, step, acc));)
        }
    }
    __shared__ float part[TB][8];
#pragma unroll
    for (int t = 0; t < TB; t++) {
        float v = warp_sum(acc[t]);
        if (whole) {
            if (lane == 0) part[t][warp] = v;
        } else if (live && lane == 0 && first_token + t < p.tokens) {
            job.y[(u64)(first_token + t) * job.y_stride + row] = v;
        }
        if (R == 2) {
            v = warp_sum(acc1[t]);
            if (both && lane == 0 && first_token + t < p.tokens) job.y[(u64)(first_token + t) * job.y_stride + row + 1] = v;
        }
    }
    if (whole) {
        __syncthreads();
        if (threadIdx.x < TB && live && first_token + (int)threadIdx.x < p.tokens) {
            float v = 0.f;
            for (int i = 0; i < 8; i++) v += part[threadIdx.x][i];
            job.y[(u64)(first_token + threadIdx.x) * job.y_stride + row] = v;
        }
    }
}

#define PRODUCTS(TB) \
    extern "C" __global__ void __launch_bounds__(256) products_##TB(const __grid_constant__ Products p) { wait_for_previous(); run_products<TB>(p); }
PRODUCTS(1)
PRODUCTS(2)
PRODUCTS(4)
PRODUCTS(8)

struct ExpertMats {
    Mat gate, up, down, shared_gate, shared_up, shared_down;
    const float* h;
    const u8* h_codes;  // h in 8 bits, or null
    const int* experts;
    const float* gates;
    float* mid;    // [T, K + 1, width]; the integer kernels keep it in 8 bits
    float* parts;  // [T, K + 1, D]
    float* y;
    u32 k;
    u32 width;
    u32 hidden;
    float clamp;
};

// mid = gate * act(w1 h, w3 h) for one row and one (token, expert) pair a warp; the shared expert is pair K.
extern "C" __global__ void __launch_bounds__(256) expert_up(const __grid_constant__ ExpertMats e) {
    wait_for_previous();
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    u32 pair = blockIdx.y, t = pair / (e.k + 1), k = pair % (e.k + 1);
    bool shared = k == e.k;
    const Mat& w1 = shared ? e.shared_gate : e.gate;
    const Mat& w3 = shared ? e.shared_up : e.up;
    u32 r = blockIdx.x * 8 + warp;
    if (r >= w1.rows) return;
    u64 row = (shared ? 0 : (u64)e.experts[t * e.k + k] * w1.rows) + r;
    const float* x[1] = {e.h + (u64)t * e.hidden};
    float a = 0.f, b = 0.f;
    BY_FORMAT(w1.format, (dot_row<F, 1>(w1, row, x, lane, 32, &a));)
    BY_FORMAT(w3.format, (dot_row<F, 1>(w3, row, x, lane, 32, &b));)
    a = warp_sum(a);
    b = warp_sum(b);
    if (lane == 0)
        e.mid[(u64)pair * e.width + r] = swiglu(a, b, e.clamp) * (shared ? 1.f : e.gates[t * e.k + k]);
}

extern "C" __global__ void __launch_bounds__(256) expert_down(const __grid_constant__ ExpertMats e) {
    wait_for_previous();
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    u32 pair = blockIdx.y, t = pair / (e.k + 1), k = pair % (e.k + 1);
    bool shared = k == e.k;
    const Mat& w2 = shared ? e.shared_down : e.down;
    u32 r = blockIdx.x * 8 + warp;
    if (r >= w2.rows) return;
    u64 row = (shared ? 0 : (u64)e.experts[t * e.k + k] * w2.rows) + r;
    const float* x[1] = {e.mid + (u64)pair * e.width};
    float a = 0.f;
    BY_FORMAT(w2.format, (dot_row<F, 1>(w2, row, x, lane, 32, &a));)
    a = warp_sum(a);
    if (lane == 0) e.parts[(u64)pair * e.hidden + r] = a;
}

// y = the experts' parts in the order of choice, then the shared one.
extern "C" __global__ void expert_sum(const __grid_constant__ ExpertMats e) {
    wait_for_previous();
    u32 i = blockIdx.x * blockDim.x + threadIdx.x, t = blockIdx.y;
    if (i >= e.hidden) return;
    float v = 0.f;
    for (u32 k = 0; k <= e.k; k++) v += e.parts[((u64)t * (e.k + 1) + k) * e.hidden + i];
    e.y[(u64)t * e.hidden + i] = v;
}

// Products of few rows and many tokens: eight rows and four tokens a block, which share what they read.
extern "C" __global__ void __launch_bounds__(256, 2) few_rows(Mat m, const float* x, float* y, u32 tokens) {
    wait_for_previous();
    __shared__ float part[8][32];
    int t0 = blockIdx.x * 4, r0 = blockIdx.y * 8, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float acc[8][4] = {};
    for (int g = threadIdx.x; g < m.cols / 8; g += 256) {
        float v[4][8];
#pragma unroll
        for (int t = 0; t < 4; t++) {
            const float4* p = (const float4*)(x + (u64)min(t0 + t, (int)tokens - 1) * m.cols) + 2 * g;
            *(float4*)v[t] = p[0];
            *(float4*)(v[t] + 4) = p[1];
        }
        BY_FORMAT(m.format, ({
            _Pragma("unroll")
            for (int r = 0; r < 8; r++) {
                float w[8];
                decode8<F>(m, min(r0 + r, (int)m.rows - 1), g, w);
                _Pragma("unroll")
                for (int t = 0; t < 4; t++)
                    acc[r][t] += w[0] * v[t][0] + w[1] * v[t][1] + w[2] * v[t][2] + w[3] * v[t][3] + w[4] * v[t][4] + w[5] * v[t][5] + w[6] * v[t][6] + w[7] * v[t][7];
            }
        });)
    }
#pragma unroll
    for (int i = 0; i < 32; i++) {
        float v = warp_sum(acc[i / 4][i % 4]);
        if (lane == 0) part[warp][i] = v;
    }
    __syncthreads();
    if (threadIdx.x < 32) {
        int r = threadIdx.x / 4, t = threadIdx.x % 4;
        float v = 0.f;
        for (int w = 0; w < 8; w++) v += part[w][threadIdx.x];
        if (r0 + r < m.rows && t0 + t < tokens) y[(u64)(t0 + t) * m.rows + r0 + r] = v;
    }
}

// Splits blocks of head + body bytes into a plane of bodies and a plane of heads.
extern "C" __global__ void split_blocks(const u8* from, u8* bodies, u8* heads, u64 blocks, u32 body, u32 head) {
    wait_for_previous();
    u32 each = body + head;
    for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < blocks * each; i += (u64)gridDim.x * blockDim.x) {
        u64 b = i / each;
        u32 at = i % each;
        if (at < head) heads[b * head + at] = from[i];
        else bodies[b * body + at - head] = from[i];
    }
}

// x [T, n * D]: every stream is the token's row.
extern "C" __global__ void embed(Mat table, Step s, float* x, u32 streams) {
    wait_for_previous();
    u32 t = blockIdx.x;
    for (int g = threadIdx.x; g < table.cols / 8; g += blockDim.x) {
        float w[8];
        u64 row = s.tokens[t];
        BY_FORMAT(table.format, (decode8<F>(table, row, g, w));)
        for (u32 n = 0; n < streams; n++)
            for (int i = 0; i < 8; i++) x[((u64)t * streams + n) * table.cols + 8 * g + i] = w[i];
    }
}
