// Block formats: eight consecutive values at a time. Format numbers are those of the file.
#pragma once
#include "common.cuh"
#include "iq2_grid.cuh"

enum Format { F32 = 0, F16 = 1, Q8_0 = 8, Q2_K = 10, Q3_K = 11, Q4_K = 12, Q5_K = 13, Q6_K = 14, IQ2_XXS = 16, BF16 = 30, MXFP4 = 39 };

__device__ inline float half_at(const u8* p) { return __half2float(*(const half*)p); }

__device__ inline void scale_min(const u8* sc, int j, float& s, float& m) {
    if (j < 4) {
        s = sc[j] & 63;
        m = sc[j + 4] & 63;
    } else {
        s = (sc[j + 4] & 15) | (sc[j - 4] >> 6) << 4;
        m = (sc[j + 4] >> 4) | (sc[j] >> 6) << 4;
    }
}

// Values 8 * g .. 8 * g + 8 of a row, counted over the whole stack.
template <int F>
__device__ __forceinline__ void decode8(const Mat& m, u64 row, int g, float* w) {
    if constexpr (F == F32) {
        const float4* p = (const float4*)(m.data + row * m.row_bytes) + 2 * g;
        *(float4*)w = __ldg(p);
        *(float4*)(w + 4) = __ldg(p + 1);
    } else if constexpr (F == F16) {
        uint4 v = __ldg((const uint4*)(m.data + row * m.row_bytes) + g);
        const half2* h = (const half2*)&v;
#pragma unroll
        for (int i = 0; i < 4; i++) *(float2*)(w + 2 * i) = __half22float2(h[i]);
    } else if constexpr (F == BF16) {
        uint4 v = __ldg((const uint4*)(m.data + row * m.row_bytes) + g);
        const u32* h = (const u32*)&v;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            w[2 * i] = __uint_as_float(h[i] << 16);
            w[2 * i + 1] = __uint_as_float(h[i] & 0xffff0000u);
        }
    } else if constexpr (F == Q8_0) {
        u64 b = row * (m.cols / 32) + g / 4;
        uint2 q = __ldg((const uint2*)(m.data + b * 32) + (g & 3));
        float d = half_at(m.data + m.heads_at + 2 * b);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            w[i] = d * (float)(int8_t)(q.x >> (8 * i));
            w[4 + i] = d * (float)(int8_t)(q.y >> (8 * i));
        }
    } else if constexpr (F == IQ2_XXS) {
        u64 b = row * (m.cols / 256) + g / 32;
        uint2 q = __ldg((const uint2*)(m.data + b * 64) + (g % 32) / 4);
        float d = half_at(m.data + m.heads_at + 2 * b) * (0.5f + (float)(q.y >> 28)) * 0.25f;
        int v = g & 3;
        uint2 grid = __ldg(&IQ2_GRID[(q.x >> (8 * v)) & 255]);
        u32 signs = (q.y >> (7 * v)) & 127;
        signs |= (__popc(signs) & 1) << 7;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float a = d * (float)((grid.x >> (8 * i)) & 255), c = d * (float)((grid.y >> (8 * i)) & 255);
            w[i] = signs >> i & 1 ? -a : a;
            w[4 + i] = signs >> (4 + i) & 1 ? -c : c;
        }
    } else if constexpr (F == MXFP4) {
        u64 b = row * (m.cols / 32) + g / 4;
        uint2 q = __ldg((const uint2*)(m.data + b * 16) + (g & 1));
        u32 e = m.data[m.heads_at + b];
        float d = e < 2 ? __uint_as_float(0x00200000u << e) : __uint_as_float((e - 1) << 23);
        int shift = (g & 2) ? 4 : 0;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            w[i] = d * (2.f * e2m1_decode(q.x >> (8 * i + shift) & 15));
            w[4 + i] = d * (2.f * e2m1_decode(q.y >> (8 * i + shift) & 15));
        }
    } else {
        int e = (g % 32) * 8, n = e / 32;
        const u8* b = m.data + row * m.row_bytes + (u64)(g / 32) * (F == Q2_K ? 84 : F == Q3_K ? 110 : F == Q4_K ? 144 : F == Q5_K ? 176 : 210);
        if constexpr (F == Q2_K) {
            const u32* q = (const u32*)(b + 16 + 32 * (e / 128) + e % 32);
            u32 q0 = __ldg(q) >> (2 * (n & 3)), q1 = __ldg(q + 1) >> (2 * (n & 3));
            u32 dm = __ldg((const u32*)(b + 80));
            u32 s = b[e / 16];
            float2 f = __half22float2(*(half2*)&dm);
            float d = f.x * (s & 15), mn = f.y * (s >> 4);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                w[i] = d * (float)(q0 >> (8 * i) & 3) - mn;
                w[4 + i] = d * (float)(q1 >> (8 * i) & 3) - mn;
            }
        } else if constexpr (F == Q3_K) {
            const u8* q = b + 32 + 32 * (e / 128) + e % 32;
            const u8* sc = b + 96;
            int j = e / 16;
            int low = j < 8 ? sc[j] & 15 : sc[j - 8] >> 4;
            int high = sc[8 + j % 4] >> (2 * (j / 4)) & 3;
            float d = half_at(b + 108) * (float)((low | high << 4) - 32);
#pragma unroll
            for (int i = 0; i < 8; i++)
                w[i] = d * (float)((q[i] >> (2 * (n & 3)) & 3) + 4 * (b[e % 32 + i] >> n & 1) - 4);
        } else if constexpr (F == Q4_K || F == Q5_K) {
            const u8* q = b + (F == Q4_K ? 16 : 48) + 32 * (e / 64) + e % 32;
            float s, mn;
            scale_min(b + 4, n, s, mn);
            float d = half_at(b) * s, dm = half_at(b + 2) * mn;
            uint2 v = __ldg((const uint2*)q);
            uint2 h = F == Q5_K ? __ldg((const uint2*)(b + 16 + e % 32)) : make_uint2(0, 0);
            int shift = 4 * (n & 1);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                w[i] = d * (float)((v.x >> (8 * i + shift) & 15) + 16 * (h.x >> (8 * i + n) & 1)) - dm;
                w[4 + i] = d * (float)((v.y >> (8 * i + shift) & 15) + 16 * (h.y >> (8 * i + n) & 1)) - dm;
            }
        } else {
            int half_of = e / 128, k = (e % 128) / 32, l = e % 32;
            const u8* low = b + 64 * half_of + 32 * (k & 1) + l;
            const u8* high = b + 128 + 32 * half_of + l;
            float d = half_at(b + 208) * (float)(int8_t)b[192 + e / 16];
#pragma unroll
            for (int i = 0; i < 8; i++) {
                int lo = k < 2 ? low[i] & 15 : low[i] >> 4;
                w[i] = d * (float)((lo | (high[i] >> (2 * k) & 3) << 4) - 32);
            }
        }
    }
}

// Calls BODY with F as a constant.
#define BY_FORMAT(format, BODY)                         \
    switch (format) {                                   \
        case F32: { constexpr int F = F32; BODY } break;         \
        case F16: { constexpr int F = F16; BODY } break;         \
        case BF16: { constexpr int F = BF16; BODY } break;       \
        case Q8_0: { constexpr int F = Q8_0; BODY } break;       \
        case Q2_K: { constexpr int F = Q2_K; BODY } break;       \
        case Q3_K: { constexpr int F = Q3_K; BODY } break;       \
        case Q4_K: { constexpr int F = Q4_K; BODY } break;       \
        case Q5_K: { constexpr int F = Q5_K; BODY } break;       \
        case Q6_K: { constexpr int F = Q6_K; BODY } break;       \
        case IQ2_XXS: { constexpr int F = IQ2_XXS; BODY } break; \
        case MXFP4: { constexpr int F = MXFP4; BODY } break;     \
    }
