// What every kernel shares: descriptors that the host passes by value (mirrored in src/abi.rs), reductions, the
// scalar functions of MODEL section 2, and the roundings of section 7.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;

// A matrix, or a stack of them: blocks as in the file, or split into a plane of bodies and a plane of heads (scales).
struct Mat {
    const u8* data;
    u64 heads_at;
    u32 format;
    u32 rows;
    u32 cols;
    u32 row_bytes;
};

struct Segment {
    int slot, pos, row, len;
};

// One window of one segment's compressor.
struct Window {
    int segment, window;
};

// The batch and the sessions' memory.
struct Step {
    const int* tokens;
    const int* pos;
    const int* segment_of;
    const int* outputs;
    const Segment* segments;
    const Window* windows[2];  // ratio 4, ratio 128
    const u32* tables;
    u8* pages;
    u8* frontiers;
    u64 page_bytes;
    u64 frontier_bytes;
    u32 table_max;
    u32 rows;
};

// Shape of a stored row.
struct Rows {
    u32 packed;
    u32 qat;
    u32 dim;
    u32 rope;
    u32 main_bytes;
    u32 index_dim;
    u32 index_bytes;
    u32 window;
};

// First statement of every kernel. From sm_90 on the next kernel may start while this one runs, and each waits here for
// all that the ones before it wrote.
__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ inline float warp_sum(float v) {
    for (int o = 16; o; o >>= 1) v += __shfl_xor_sync(~0u, v, o);
    return v;
}

__device__ inline float warp_max(float v) {
    for (int o = 16; o; o >>= 1) v = fmaxf(v, __shfl_xor_sync(~0u, v, o));
    return v;
}

// Sum over the block, in a fixed order; every thread gets it. `part` holds 33 floats.
__device__ inline float block_sum(float v, float* part) {
    v = warp_sum(v);
    __syncthreads();
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = v;
    __syncthreads();
    if (threadIdx.x < 32) {
        float t = threadIdx.x < (blockDim.x + 31) / 32 ? part[threadIdx.x] : 0.f;
        t = warp_sum(t);
        if (threadIdx.x == 0) part[32] = t;
    }
    __syncthreads();
    return part[32];
}

__device__ inline float sigmoid(float x) { return 1.f / (1.f + expf(-x)); }
__device__ inline float softplus(float x) { return fmaxf(x, 0.f) + log1pf(expf(-fabsf(x))); }

__device__ inline float swiglu(float gate, float up, float limit) {
    if (limit > 0.f) {
        gate = fminf(gate, limit);
        up = fminf(fmaxf(up, -limit), limit);
    }
    return gate * sigmoid(gate) * up;
}

__device__ inline float exp2i(int e) { return __uint_as_float((u32)(e + 127) << 23); }

// Smallest power of two not below amax / top, from the quotient's bits.
__device__ inline int scale_exponent(float amax, float top) {
    u32 bits = __float_as_uint(__fdiv_rn(amax, top));
    return (int)(bits >> 23) - 127 + ((bits & 0x007fffffu) != 0);
}

__device__ inline u8 e4m3_encode(float v) {
    u8 sign = (__float_as_uint(v) >> 31) << 7;
    float a = fminf(fabsf(v), 448.f);
    if (a < 0.015625f) return sign | (u8)__float2int_rn(a * 512.f);
    u32 bits = __float_as_uint(a);
    u32 code = ((bits + 0x0007ffffu + ((bits >> 20) & 1)) >> 20) - (120u << 3);
    return sign | (u8)min(code, 0x7eu);
}

__device__ inline float e4m3_decode(u8 code) {
    u32 e = (code >> 3) & 15, m = code & 7;
    float a = e == 0 ? m * 0.001953125f : __uint_as_float(((e + 120) << 23) | (m << 20));
    return code & 0x80 ? -a : a;
}

__device__ inline u8 e2m1_encode(float v) {
    float a = fabsf(v);
    u8 code = (a > 0.25f) + (a >= 0.75f) + (a > 1.25f) + (a >= 1.75f) + (a > 2.5f) + (a >= 3.5f) + (a > 5.f);
    return code | ((__float_as_uint(v) >> 31) << 3);
}

__device__ inline float e2m1_decode(u8 code) {
    int c = code & 7;
    float a = c < 2 ? 0.5f * c : (1.f + 0.5f * (c & 1)) * (float)(1 << ((c >> 1) - 1));
    return code & 8 ? -a : a;
}

// FP8: one warp codes 64 values, two a lane (channels 2 * lane and 2 * lane + 1).
__device__ inline int fp8_exponent(float a, float b) {
    return scale_exponent(warp_max(fmaxf(1e-4f, fmaxf(fabsf(a), fabsf(b)))), 448.f);
}

// Rounds a row in shared memory as it will be stored, and as qat asks.
__device__ inline void round_main(float* row, const Rows& r) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
    int nope = r.dim - r.rope;
    if (r.packed || r.qat) {
        for (int b = warp; b < nope / 64; b += warps) {
            float* x = row + b * 64 + 2 * lane;
            int e = fp8_exponent(x[0], x[1]);
            float inv = exp2i(-e), s = exp2i(e);
            x[0] = e4m3_decode(e4m3_encode(x[0] * inv)) * s;
            x[1] = e4m3_decode(e4m3_encode(x[1] * inv)) * s;
        }
    }
    if (r.packed)
        for (int i = nope + threadIdx.x; i < r.dim; i += blockDim.x)
            row[i] = __half2float(__float2half_rn(row[i]));
}

// Stores a row from shared or global memory (kv.rs, `encode_main`).
__device__ inline void encode_main(const float* row, u8* out, const Rows& r) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
    if (!r.packed) {
        for (int i = threadIdx.x; i < r.dim; i += blockDim.x) ((float*)out)[i] = row[i];
        return;
    }
    int nope = r.dim - r.rope, blocks = nope / 64;
    for (int b = warp; b < blocks; b += warps) {
        const float* x = row + b * 64 + 2 * lane;
        int e = fp8_exponent(x[0], x[1]);
        float inv = exp2i(-e);
        out[b * 64 + 2 * lane] = e4m3_encode(x[0] * inv);
        out[b * 64 + 2 * lane + 1] = e4m3_encode(x[1] * inv);
        if (lane == 0) out[nope + b] = e + 127;
    }
    for (int i = threadIdx.x; i < r.rope; i += blockDim.x) {
        u32 h = __half_as_ushort(__float2half_rn(row[nope + i]));
        // Opaque to the compiler: nvcc 13.0 takes the store of the low byte for a conversion of the value to an integer.
        asm volatile("" : "+r"(h));
        out[nope + blocks + 2 * i] = (u8)h;
        out[nope + blocks + 2 * i + 1] = (u8)(h >> 8);
    }
}

__device__ inline float decode_main(const u8* b, int i, const Rows& r) {
    if (!r.packed) return ((const float*)b)[i];
    int nope = r.dim - r.rope;
    if (i < nope) return e4m3_decode(b[i]) * exp2i((int)b[nope + i / 64] - 127);
    const u8* h = b + nope + nope / 64 + 2 * (i - nope);
    return __half2float(__ushort_as_half(h[0] | h[1] << 8));
}

__device__ inline float decode_index(const u8* b, int i, const Rows& r) {
    if (!r.packed) return ((const float*)b)[i];
    u8 code = b[i / 2] >> (4 * (i & 1));
    return e2m1_decode(code & 15) * exp2i((int)b[r.index_dim / 2 + i / 32] - 127);
}

__device__ inline float inverse_rms(float sum_of_squares, int n, float eps) {
    return 1.f / sqrtf(sum_of_squares / n + eps);
}

// Rotates the last 2 * pairs channels of a row in shared memory to position `pos`.
__device__ inline void rope_tail(float* row, int dim, int pairs, const float* freqs, int pos, bool inverse) {
    float* tail = row + dim - 2 * pairs;
    for (int i = threadIdx.x; i < pairs; i += blockDim.x) {
        float s, c;
        sincosf((float)pos * freqs[i], &s, &c);
        if (inverse) s = -s;
        float a = tail[2 * i], b = tail[2 * i + 1];
        tail[2 * i] = a * c - b * s;
        tail[2 * i + 1] = a * s + b * c;
    }
}

// Activations in 8 bits: a row of n values is n codes, then a scale for every 32, then a sum of the codes of every 16.
__host__ __device__ constexpr u32 quantised_bytes(int tokens, int cols) { return tokens * (cols + cols / 8 + cols / 4); }

// Block b of such a row, a value a lane.
__device__ __forceinline__ void quantise32(float v, u8* row, int n, int b) {
    int lane = threadIdx.x % 32;
    float m = warp_max(fabsf(v));
    int code = __float2int_rn(v * (m > 0.f ? 127.f / m : 0.f)), sum = code;
    for (int d = 1; d < 16; d *= 2) sum += __shfl_xor_sync(~0u, sum, d);
    ((int8_t*)row)[b * 32 + lane] = (int8_t)code;
    if (lane % 16 == 0) ((int*)(row + n + n / 8))[2 * b + lane / 16] = sum;
    if (lane == 0) ((float*)(row + n))[b] = m / 127.f;
}

// Ranges of memory that the next kernels will read, fetched towards the L2 cache while this one leaves the bus idle.
struct Ahead {
    const u8* at[8];
    u32 bytes[8];
    u32 count;
};

// One thread of every block asks for its share.
__device__ __forceinline__ void fetch_ahead(const Ahead& a, u32 block, u32 blocks) {
#if __CUDA_ARCH__ >= 900
    if (threadIdx.x != 0) return;
    for (u32 i = 0; i < a.count; i++) {
        u32 each = (a.bytes[i] / blocks + 15) & ~15u, first = each * block;
        if (first >= a.bytes[i]) continue;
        u32 n = min(each, a.bytes[i] - first) & ~15u;
        if (n) asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(a.at[i] + first), "r"(n));
    }
#endif
}

// Bytes, a multiple of 16, to shared memory: all loads of a thread before its first store.
__device__ __forceinline__ void to_shared(u8* to, const u8* from, u32 bytes) {
    u32 n = bytes / 16;
    for (u32 i = threadIdx.x; i < n; i += 4 * blockDim.x) {
        uint4 v[4];
#pragma unroll
        for (int j = 0; j < 4; j++)
            if (i + j * blockDim.x < n) v[j] = ((const uint4*)from)[i + j * blockDim.x];
#pragma unroll
        for (int j = 0; j < 4; j++)
            if (i + j * blockDim.x < n) ((uint4*)to)[i + j * blockDim.x] = v[j];
    }
}

// Page bytes of compressed row w of the session in `slot`: the layer's region starts at `at`.
__device__ inline u8* page_row(const Step& s, int slot, int w, int per_page, u64 at, u32 row_bytes) {
    u64 page = s.tables[(u64)slot * s.table_max + w / per_page];
    return s.pages + page * s.page_bytes + at + (u64)(w % per_page) * row_bytes;
}
