//! The kernels with AVX2 and FMA. Every function here is reached through [`KERNELS`] alone, which is chosen only where
//! the machine has both.

use std::arch::x86_64::*;

use ds4_gguf::{iq2_xxs, k_quants, q8_0};
use half::f16;

use super::{Blocks, Kernels};
use crate::quant::Quantised;

pub const KERNELS: Kernels = Kernels { name: "AVX2", f32, axpy, one: blocks(), tile: blocks() };

const fn blocks<const N: usize>() -> Blocks<N> {
    Blocks { q8_0, q2_k, q4_k, iq2_xxs }
}

fn f32(a: &[f32], b: &[f32]) -> f32 {
    // SAFETY: the features were detected (see the module).
    unsafe { f32_avx2(a, b) }
}

fn axpy(y: &mut [f32], w: f32, x: &[f32]) {
    // SAFETY: as above.
    unsafe { axpy_avx2(y, w, x) }
}

fn q8_0<const N: usize>(w: &[u8], x: [Quantised<'_>; N]) -> [f32; N] {
    // SAFETY: as above.
    unsafe { q8_0_avx2(w, x) }
}

fn q2_k<const N: usize>(w: &[u8], x: [Quantised<'_>; N]) -> [f32; N] {
    // SAFETY: as above.
    unsafe { q2_k_avx2(w, x) }
}

fn q4_k<const N: usize>(w: &[u8], x: [Quantised<'_>; N]) -> [f32; N] {
    // SAFETY: as above.
    unsafe { q4_k_avx2(w, x) }
}

fn iq2_xxs<const N: usize>(w: &[u8], x: [Quantised<'_>; N]) -> [f32; N] {
    // SAFETY: as above.
    unsafe { iq2_xxs_avx2(w, x) }
}

fn half(b: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([b[at], b[at + 1]]).to_f32()
}

#[target_feature(enable = "avx2,fma")]
fn load(bytes: &[u8]) -> __m256i {
    let bytes: &[u8; 32] = bytes[..32].try_into().unwrap_or(&[0; 32]);
    // SAFETY: 32 readable bytes; the load needs no alignment.
    unsafe { _mm256_loadu_si256(bytes.as_ptr().cast()) }
}

#[target_feature(enable = "avx2,fma")]
fn load_i8(q: &[i8]) -> __m256i {
    let q: &[i8; 32] = q[..32].try_into().unwrap_or(&[0; 32]);
    // SAFETY: 32 readable bytes; the load needs no alignment.
    unsafe { _mm256_loadu_si256(q.as_ptr().cast()) }
}

#[target_feature(enable = "avx2,fma")]
fn load_f32(x: &[f32]) -> __m256 {
    let x: &[f32; 8] = x[..8].try_into().unwrap_or(&[0.0; 8]);
    // SAFETY: eight readable values; the load needs no alignment.
    unsafe { _mm256_loadu_ps(x.as_ptr()) }
}

#[target_feature(enable = "avx2,fma")]
fn sum(v: __m256) -> f32 {
    let v = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
    let v = _mm_add_ps(v, _mm_movehl_ps(v, v));
    _mm_cvtss_f32(_mm_add_ss(v, _mm_shuffle_ps::<1>(v, v)))
}

#[target_feature(enable = "avx2,fma")]
fn f32_avx2(a: &[f32], b: &[f32]) -> f32 {
    let mut acc = [_mm256_setzero_ps(); 4];
    let (ca, cb) = (a.chunks_exact(32), b.chunks_exact(32));
    let tail: f32 = ca.remainder().iter().zip(cb.remainder()).map(|(x, y)| x * y).sum();
    for (x, y) in ca.zip(cb) {
        for i in 0..4 {
            acc[i] = _mm256_fmadd_ps(load_f32(&x[8 * i..]), load_f32(&y[8 * i..]), acc[i]);
        }
    }
    let all = _mm256_add_ps(_mm256_add_ps(acc[0], acc[1]), _mm256_add_ps(acc[2], acc[3]));
    sum(all) + tail
}

#[target_feature(enable = "avx2,fma")]
fn axpy_avx2(y: &mut [f32], w: f32, x: &[f32]) {
    // The compiler turns this loop into the vectors of the enabled features.
    for (y, x) in y.iter_mut().zip(x) {
        *y = w.mul_add(*x, *y);
    }
}

#[target_feature(enable = "avx2,fma")]
fn q8_0_avx2<const N: usize>(w: &[u8], x: [Quantised<'_>; N]) -> [f32; N] {
    let ones = _mm256_set1_epi16(1);
    let mut acc = [_mm256_setzero_ps(); N];
    for (i, b) in w.chunks_exact(q8_0::BYTES).enumerate() {
        let d = half(b, 0);
        let q = load(&b[2..]);
        let magnitude = _mm256_sign_epi8(q, q);
        for (acc, x) in acc.iter_mut().zip(&x) {
            let y = _mm256_sign_epi8(load_i8(&x.q[32 * i..]), q);
            let dot = _mm256_madd_epi16(_mm256_maddubs_epi16(magnitude, y), ones);
            let scale = _mm256_set1_ps(d * x.scales[i]);
            *acc = _mm256_fmadd_ps(scale, _mm256_cvtepi32_ps(dot), *acc);
        }
    }
    acc.map(|a| sum(a))
}

/// Two 16-bit values, one for each half of a vector of 16.
#[target_feature(enable = "avx2,fma")]
fn halves(low: i16, high: i16) -> __m256i {
    _mm256_set_m128i(_mm_set1_epi16(high), _mm_set1_epi16(low))
}

/// Sixteen group sums times their minima.
#[target_feature(enable = "avx2,fma")]
fn mins(m: &[i16; 16], sums: &[i16]) -> __m256i {
    let sums: &[i16; 16] = sums[..16].try_into().unwrap_or(&[0; 16]);
    // SAFETY: 32 readable bytes each; the loads need no alignment.
    let (m, s) = unsafe { (_mm256_loadu_si256(m.as_ptr().cast()), _mm256_loadu_si256(sums.as_ptr().cast())) };
    _mm256_madd_epi16(m, s)
}

#[target_feature(enable = "avx2,fma")]
fn q2_k_avx2<const N: usize>(w: &[u8], x: [Quantised<'_>; N]) -> [f32; N] {
    use k_quants::q2::*;
    let three = _mm256_set1_epi8(3);
    let mut acc = [_mm256_setzero_ps(); N];
    for (i, b) in w.chunks_exact(BYTES).enumerate() {
        let (d, dmin) = (half(b, D), half(b, DMIN));
        let m: [i16; 16] = std::array::from_fn(|g| i16::from(b[SCALES + g] >> 4));
        let mut total = [_mm256_setzero_si256(); N];
        for h in 0..2 {
            let bytes = load(&b[QUANTS + 32 * h..]);
            let quarters = [
                bytes,
                _mm256_srli_epi16::<2>(bytes),
                _mm256_srli_epi16::<4>(bytes),
                _mm256_srli_epi16::<6>(bytes),
            ];
            for (j, q) in quarters.into_iter().enumerate() {
                let q = _mm256_and_si256(q, three);
                let g = SCALES + 8 * h + 2 * j;
                let scale = halves(i16::from(b[g] & 15), i16::from(b[g + 1] & 15));
                for (total, x) in total.iter_mut().zip(&x) {
                    let dot = _mm256_maddubs_epi16(q, load_i8(&x.q[256 * i + 128 * h + 32 * j..]));
                    *total = _mm256_add_epi32(*total, _mm256_madd_epi16(dot, scale));
                }
            }
        }
        for ((acc, total), x) in acc.iter_mut().zip(total).zip(&x) {
            let mins = mins(&m, &x.sums[16 * i..]);
            let scaled = _mm256_mul_ps(_mm256_set1_ps(d), _mm256_cvtepi32_ps(total));
            let value = _mm256_fnmadd_ps(_mm256_set1_ps(dmin), _mm256_cvtepi32_ps(mins), scaled);
            *acc = _mm256_fmadd_ps(_mm256_set1_ps(x.scales[i]), value, *acc);
        }
    }
    acc.map(|a| sum(a))
}

#[target_feature(enable = "avx2,fma")]
fn q4_k_avx2<const N: usize>(w: &[u8], x: [Quantised<'_>; N]) -> [f32; N] {
    use k_quants::q4::*;
    let low = _mm256_set1_epi8(15);
    let mut acc = [_mm256_setzero_ps(); N];
    for (i, b) in w.chunks_exact(BYTES).enumerate() {
        let (d, dmin) = (half(b, D), half(b, DMIN));
        let scales: [(u8, u8); 8] = std::array::from_fn(|g| k_quants::scale_min(&b[SCALES..], g));
        let m: [i16; 16] = std::array::from_fn(|g| i16::from(scales[g / 2].1));
        let mut total = [_mm256_setzero_si256(); N];
        for g in 0..8 {
            let bytes = load(&b[QUANTS + 32 * (g / 2)..]);
            let q = _mm256_and_si256(if g % 2 == 0 { bytes } else { _mm256_srli_epi16::<4>(bytes) }, low);
            let scale = _mm256_set1_epi16(i16::from(scales[g].0));
            for (total, x) in total.iter_mut().zip(&x) {
                let dot = _mm256_maddubs_epi16(q, load_i8(&x.q[256 * i + 32 * g..]));
                *total = _mm256_add_epi32(*total, _mm256_madd_epi16(dot, scale));
            }
        }
        for ((acc, total), x) in acc.iter_mut().zip(total).zip(&x) {
            let mins = mins(&m, &x.sums[16 * i..]);
            let scaled = _mm256_mul_ps(_mm256_set1_ps(d), _mm256_cvtepi32_ps(total));
            let value = _mm256_fnmadd_ps(_mm256_set1_ps(dmin), _mm256_cvtepi32_ps(mins), scaled);
            *acc = _mm256_fmadd_ps(_mm256_set1_ps(x.scales[i]), value, *acc);
        }
    }
    acc.map(|a| sum(a))
}

/// For each 7-bit code eight bytes of +1 or -1.
static SIGNS: [[i8; 8]; 128] = {
    let mut table = [[1i8; 8]; 128];
    let mut code = 0;
    while code < 128 {
        let signs = iq2_xxs::signs(code as u32);
        let mut k = 0;
        while k < 8 {
            if signs >> k & 1 == 1 {
                table[code][k] = -1;
            }
            k += 1;
        }
        code += 1;
    }
    table
};

#[target_feature(enable = "avx2,fma")]
fn iq2_xxs_avx2<const N: usize>(w: &[u8], x: [Quantised<'_>; N]) -> [f32; N] {
    let mut acc = [_mm256_setzero_ps(); N];
    for (i, b) in w.chunks_exact(iq2_xxs::BYTES).enumerate() {
        let d = half(b, iq2_xxs::D) * 0.125;
        let mut total = [_mm256_setzero_si256(); N];
        for (g, group) in b[iq2_xxs::GROUPS..].chunks_exact(8).enumerate() {
            let tail = u32::from_le_bytes([group[4], group[5], group[6], group[7]]);
            let grid = |v: usize| iq2_xxs::GRID[group[v] as usize] as i64;
            let sign =
                |v: usize| i64::from_le_bytes(SIGNS[(tail >> (7 * v)) as usize & 127].map(|s| s as u8));
            let magnitudes = _mm256_set_epi64x(grid(3), grid(2), grid(1), grid(0));
            let signs = _mm256_set_epi64x(sign(3), sign(2), sign(1), sign(0));
            let scale = _mm256_set1_epi16((2 * (tail >> 28) + 1) as i16);
            for (total, x) in total.iter_mut().zip(&x) {
                let y = _mm256_sign_epi8(load_i8(&x.q[256 * i + 32 * g..]), signs);
                let dot = _mm256_maddubs_epi16(magnitudes, y);
                *total = _mm256_add_epi32(*total, _mm256_madd_epi16(dot, scale));
            }
        }
        for ((acc, total), x) in acc.iter_mut().zip(total).zip(&x) {
            *acc = _mm256_fmadd_ps(_mm256_set1_ps(d * x.scales[i]), _mm256_cvtepi32_ps(total), *acc);
        }
    }
    acc.map(|a| sum(a))
}
