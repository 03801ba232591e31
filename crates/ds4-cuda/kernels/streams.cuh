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
            v = it == 0 ? v / s + eps : v / (s + eps);
            s = v + __shfl_xor_sync(~0u, v, 4);
            s += __shfl_xor_sync(~0u, s, 8);
            v = v / (s + eps);
        }
        if (lane < 16) c[lane] = v;
        return;
    }
    if (threadIdx.x) return;
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

extern "C" __global__ void __launch_bounds__(512) hc_mix(const __grid_constant__ Mixing a) {
    __shared__ float part[33];
    __shared__ float pre[8], c[64];
    u32 t = blockIdx.x, n = a.streams;
    const float* x = a.x + (u64)t * n * a.hidden;
    const float* m = a.m + (u64)t * (a.mix ? (2 + n) * n : n);
    float ss = 0.f;
    for (u32 i = threadIdx.x; i < n * a.hidden; i += blockDim.x) ss += x[i] * x[i];
    float inv = inverse_rms(block_sum(ss, part), n * a.hidden, a.rms_eps);
    if (threadIdx.x < n) pre[threadIdx.x] = sigmoid(m[threadIdx.x] * inv * a.scale[0] + a.base[threadIdx.x]) + a.hc_eps;
    if (a.mix && threadIdx.x < n * n) c[threadIdx.x] = m[2 * n + threadIdx.x] * inv * a.scale[2] + a.base[2 * n + threadIdx.x];
    __syncthreads();
    float* h = a.h + (u64)t * a.hidden;
    ss = 0.f;
    for (u32 i = threadIdx.x; i < a.hidden; i += blockDim.x) {
        float v = 0.f;
        for (u32 s = 0; s < n; s++) v += pre[s] * x[s * a.hidden + i];
        h[i] = v;
        ss += v * v;
    }
    float hidden_inv = inverse_rms(block_sum(ss, part), a.hidden, a.rms_eps);
    for (u32 i = threadIdx.x; i < a.hidden; i += blockDim.x) h[i] = h[i] * hidden_inv * a.norm[i];
    if (!a.mix) return;
    float* mix = a.mix + (u64)t * (n + n * n);
    if (threadIdx.x < n) mix[threadIdx.x] = 2.f * sigmoid(m[n + threadIdx.x] * inv * a.scale[1] + a.base[n + threadIdx.x]);
    if (threadIdx.x < 32) {
        sinkhorn(c, n, a.iterations, a.hc_eps);
        __syncwarp();
        for (u32 i = threadIdx.x; i < n * n; i += 32) mix[n + i] = c[i];
    }
}

extern "C" __global__ void hc_post(const float* y, const float* mix, float* x, u32 n, u32 hidden) {
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

// Output rows' streams, one below the other.
extern "C" __global__ void gather_outputs(Step s, const float* x, float* out, u32 width) {
    const float* from = x + (u64)s.outputs[blockIdx.x] * width;
    for (u32 i = threadIdx.x; i < width; i += blockDim.x) out[(u64)blockIdx.x * width + i] = from[i];
}
