// Section 3: the residual streams, and the final head.
#pragma once
#include "common.cuh"

struct Mixing {
    const float* x;      // [T, n * D]
    const float* m;      // [T, (2 + n) n], the projection of the raw streams
    const float* base;
    const float* scale;
    const float* norm;
    float* h;
    float* mix;          // null in the final head
    u8* codes;           // h in 8 bits, or null
    u32 streams;
    u32 hidden;
    u32 iterations;
    float hc_eps;
    float rms_eps;
};

// Softmax of each row, then columns and rows normalised in turn, columns last.
__device__ inline void sinkhorn(float* c, int n, int iterations, float eps) {
    if (n == 4) {
        int lane = threadIdx.x % 32;
        float v = c[lane & 15];
        float mx = fmaxf(v, __shfl_xor_sync(~0u, v, 1));
        mx = fmaxf(mx, __shfl_xor_sync(~0u, mx, 2));
        v = expf(v - mx);
        for (int it = 0; it < iterations; it++) {
            float s = v + __shfl_xor_sync(~0u, v, 1);
            s += __shfl_xor_sync(~0u, s, 2);
            v = it == 0 ? __fdividef(v, s) + eps : __fdividef(v, s + eps);
            s = v + __shfl_xor_sync(~0u, v, 4);
            s += __shfl_xor_sync(~0u, s, 8);
            v = __fdividef(v, s + eps);
        }
        if (lane < 16) c[lane] = v;
        return;
    }
    if (threadIdx.x % 32) return;
    for (int it = 0; it < iterations; it++) {
        for (int i = 0; i < n; i++) {
            float* row = c + i * n;
            if (it == 0) {
                float mx = row[0];
                for (int j = 1; j < n; j++) mx = fmaxf(mx, row[j]);
                for (int j = 0; j < n; j++) row[j] = expf(row[j] - mx);
            }
            float s = 0.f;
            for (int j = 0; j < n; j++) s += row[j];
            for (int j = 0; j < n; j++) row[j] = it == 0 ? row[j] / s + eps : row[j] / (s + eps);
        }
        for (int j = 0; j < n; j++) {
            float s = 0.f;
            for (int i = 0; i < n; i++) s += c[i * n + j];
            for (int i = 0; i < n; i++) c[i * n + j] /= s + eps;
        }
    }
}

// Float4s of one stream that a thread keeps.
constexpr int HELD = 2;

// One token a block of 1024. The streams are read once.
template <int N>
__device__ __forceinline__ void mix_streams(const Mixing& a, float* part, float* pre, float* c) {
    u32 t = blockIdx.x, tid = threadIdx.x, quads = a.hidden / 4;
    const float4* x = (const float4*)(a.x + (u64)t * N * a.hidden);
    const float* m = a.m + (u64)t * (a.mix ? (2 + N) * N : N);
    float4 v[HELD][N];
    float ss = 0.f;
#pragma unroll
    for (int k = 0; k < HELD; k++)
#pragma unroll
        for (int s = 0; s < N; s++) {
            u32 i = tid + k * 1024;
            v[k][s] = i < quads ? x[s * quads + i] : make_float4(0, 0, 0, 0);
            ss += v[k][s].x * v[k][s].x + v[k][s].y * v[k][s].y + v[k][s].z * v[k][s].z + v[k][s].w * v[k][s].w;
        }
    float inv = inverse_rms(block_sum(ss, part), N * a.hidden, a.rms_eps);
    if (tid < N) pre[tid] = sigmoid(m[tid] * inv * a.scale[0] + a.base[tid]) + a.hc_eps;
    float* mix = a.mix + (u64)t * (N + N * N);
    if (a.mix && tid < N) mix[tid] = 2.f * sigmoid(m[N + tid] * inv * a.scale[1] + a.base[N + tid]);
    if (a.mix && tid < N * N) c[tid] = m[2 * N + tid] * inv * a.scale[2] + a.base[2 * N + tid];
    __syncthreads();
    // The last warp has the mixing matrix to itself: its chain of divisions is long.
    if (a.mix && tid >= 992) {
        sinkhorn(c, N, a.iterations, a.hc_eps);
        __syncwarp();
        for (u32 i = tid - 992; i < N * N; i += 32) mix[N + i] = c[i];
    }
    ss = 0.f;
#pragma unroll
    for (int k = 0; k < HELD; k++) {
        float4 h = make_float4(0, 0, 0, 0);
#pragma unroll
        for (int s = 0; s < N; s++) {
            float p = pre[s];
            h.x += p * v[k][s].x;
            h.y += p * v[k][s].y;
            h.z += p * v[k][s].z;
            h.w += p * v[k][s].w;
        }
        v[k][0] = h;
        ss += h.x * h.x + h.y * h.y + h.z * h.z + h.w * h.w;
    }
    inv = inverse_rms(block_sum(ss, part), a.hidden, a.rms_eps);
#pragma unroll
    for (int k = 0; k < HELD; k++) {
        u32 i = tid + k * 1024;
        if (i >= quads) continue;
        float4 h = v[k][0], w = ((const float4*)a.norm)[i];
        ((float4*)(a.h + (u64)t * a.hidden))[i] = make_float4(h.x * inv * w.x, h.y * inv * w.y, h.z * inv * w.z, h.w * inv * w.w);
    }
}

// Four streams of few tokens, in two launches. The first: the last sublayer's output goes into the streams, and every
// block of 64 channels leaves its share of the 24 products with the mixing matrix and of the streams' Gram matrix.
constexpr int SHARES = 36;  // 24 products, 4 squares, 4 products with the next stream, 2 with the one after

struct Streams {
    float* x;           // [T, 4 * D]
    const float* y;     // the sublayer's output, or null
    const float* mix;   // how it goes in, [T, 20]
    const half* w;      // [24, 4 * D]
    float* shares;      // [T, SHARES, D / 64]
    u32 hidden;
};

extern "C" __global__ void __launch_bounds__(256) streams_step(const __grid_constant__ Streams a) {
    __shared__ float old[4][64], part[8][28];
    u32 t = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32, s = threadIdx.x / 64, c = threadIdx.x % 64;
    u32 channel = blockIdx.x * 64 + c, width = 4 * a.hidden;
    const half* w = a.w + s * a.hidden + channel;
    float weights[24];
#pragma unroll
    for (int r = 0; r < 24; r++) weights[r] = __half2float(w[(u64)r * width]);
    wait_for_previous();
    float* x = a.x + (u64)t * width + s * a.hidden + channel;
    float v = *x;
    if (a.y) {
        old[s][c] = v;
        const float* mix = a.mix + t * 20;
        float y = a.y[(u64)t * a.hidden + channel] * mix[s];
        __syncthreads();
        v = 0.f;
        for (int k = 0; k < 4; k++) v += mix[4 + k * 4 + s] * old[k][c];
        v = y + v;
        *x = v;
        __syncthreads();
    }
    old[s][c] = v;
    __syncthreads();
    float sums[27];
#pragma unroll
    for (int r = 0; r < 24; r++) sums[r] = weights[r] * v;
    sums[24] = v * v;
    sums[25] = v * old[(s + 1) & 3][c];
    sums[26] = v * old[(s + 2) & 3][c];
#pragma unroll
    for (int r = 0; r < 27; r++) {
        float sum = warp_sum(sums[r]);
        if (lane == 0) part[warp][r] = sum;
    }
    __syncthreads();
    float* out = a.shares + (u64)t * SHARES * gridDim.x + blockIdx.x;
    if (threadIdx.x < 24) {
        float sum = 0.f;
        for (int i = 0; i < 8; i++) sum += part[i][threadIdx.x];
        out[threadIdx.x * gridDim.x] = sum;
    } else if (threadIdx.x < 34) {
        int i = threadIdx.x - 24, kind = i / 4, of = i % 4;
        out[threadIdx.x * gridDim.x] = part[2 * of][24 + kind] + part[2 * of + 1][24 + kind];
    }
}

// The second: the shares summed, and the sublayer's input from the streams, 256 channels a block; the last block has the
// mixing matrix, whose chain of divisions is long.
extern "C" __global__ void __launch_bounds__(256) streams_input(const __grid_constant__ Mixing a, const float* shares, const __grid_constant__ Ahead next) {
    __shared__ float all[SHARES], c[16];
    u32 t = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32, blocks = a.hidden / 64;
    u32 channel = blockIdx.x * 256 + threadIdx.x;
    bool last = blockIdx.x == gridDim.x - 1;
    float norm = last ? 0.f : a.norm[channel];
    wait_for_previous();
    if (t == 0) fetch_ahead(next, blockIdx.x, gridDim.x);
    const float* from = shares + (u64)t * blocks * SHARES;
    float sums[5] = {};
#pragma unroll
    for (int j = 0; j < 5; j++)
        if (warp + 8 * j < 34)
            for (u32 b = lane; b < blocks; b += 32) sums[j] += from[(warp + 8 * j) * blocks + b];
#pragma unroll
    for (int j = 0; j < 5; j++) {
        float sum = warp_sum(sums[j]);
        if (lane == 0 && warp + 8 * j < 34) all[warp + 8 * j] = sum;
    }
    __syncthreads();
    float squares[4] = {all[24], all[25], all[26], all[27]};
    float inv = inverse_rms(squares[0] + squares[1] + squares[2] + squares[3], 4 * a.hidden, a.rms_eps);
    if (last) {
        float* mix = a.mix + (u64)t * 20;
        if (threadIdx.x < 4) mix[threadIdx.x] = 2.f * sigmoid(all[4 + threadIdx.x] * inv * a.scale[1] + a.base[4 + threadIdx.x]);
        if (threadIdx.x < 16) c[threadIdx.x] = all[8 + threadIdx.x] * inv * a.scale[2] + a.base[8 + threadIdx.x];
        __syncthreads();
        if (warp == 0) {
            sinkhorn(c, 4, a.iterations, a.hc_eps);
            __syncwarp();
            if (lane < 16) mix[4 + lane] = c[lane];
        }
        return;
    }
    float pre[4], h = 0.f, ss = 0.f;
    const float* x = a.x + (u64)t * 4 * a.hidden + channel;
#pragma unroll
    for (int s = 0; s < 4; s++) {
        pre[s] = sigmoid(all[s] * inv * a.scale[0] + a.base[s]) + a.hc_eps;
        h += pre[s] * x[(u64)s * a.hidden];
    }
#pragma unroll
    for (int s = 0; s < 4; s++) ss += pre[s] * pre[s] * squares[s] + 2.f * pre[s] * pre[(s + 1) & 3] * all[28 + s];
    ss += 2.f * (pre[0] * pre[2] * all[32] + pre[1] * pre[3] * all[33]);
    h = h * inverse_rms(fmaxf(ss, 0.f), a.hidden, a.rms_eps) * norm;
    a.h[(u64)t * a.hidden + channel] = h;
    if (a.codes) quantise32(h, a.codes + (u64)t * quantised_bytes(1, a.hidden), a.hidden, channel / 32);
}

extern "C" __global__ void __launch_bounds__(1024) hc_mix(const __grid_constant__ Mixing a) {
    wait_for_previous();
    __shared__ float part[33], pre[8], c[64];
    if (a.streams == 4) mix_streams<4>(a, part, pre, c);
    else mix_streams<2>(a, part, pre, c);
}

extern "C" __global__ void hc_post(const float* y, const float* mix, float* x, u32 n, u32 hidden) {
    wait_for_previous();
    u32 i = blockIdx.x * blockDim.x + threadIdx.x, t = blockIdx.y;
    if (i >= hidden) return;
    const float* post = mix + (u64)t * (n + n * n);
    const float* c = post + n;
    float* s = x + (u64)t * n * hidden + i;
    float v = y[(u64)t * hidden + i];
    float old[8];
    for (u32 j = 0; j < n; j++) old[j] = s[(u64)j * hidden];
    for (u32 j = 0; j < n; j++) {
        float mixed = 0.f;
        for (u32 k = 0; k < n; k++) mixed += c[k * n + j] * old[k];
        s[(u64)j * hidden] = post[j] * v + mixed;
    }
}

// Output rows' streams, one below the other; blockIdx.y shares a row's quads out.
extern "C" __global__ void gather_outputs(Step s, const float* x, float* out, u32 width) {
    wait_for_previous();
    const float4* from = (const float4*)(x + (u64)s.outputs[blockIdx.x] * width);
    float4* to = (float4*)(out + (u64)blockIdx.x * width);
    for (u32 i = blockIdx.y * blockDim.x + threadIdx.x; i < width / 4; i += gridDim.y * blockDim.x) to[i] = from[i];
}
