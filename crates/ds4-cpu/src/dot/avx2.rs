//! The kernels with AVX2 and FMA. Every function here is reached through [`KERNELS`] alone, which is chosen only where
//! [`present`].

use std::arch::x86_64::*;

use ds4_gguf::{BlockFormat, iq2_xxs, k_quants, q8_0};
use ds4_model::KvLayout;

use super::unpack::half;
use super::{F32_ROWS, F32_TOKENS, F32Out, Kernels, LANES, join, portable};
use crate::quant::Quantised;

pub fn present() -> bool {
    use std::arch::is_x86_feature_detected as has;
    has!("avx2") && has!("fma") && has!("f16c")
}

pub const KERNELS: Kernels = Kernels {
    name: "AVX2",
    // SAFETY: in all of them: the features were detected (see the module).
    f32: |a, b| unsafe { f32_avx2(a, b) },
    // SAFETY: as above.
    f32_tile: |w, x| unsafe { f32_tile(w, x) },
    // SAFETY: as above.
    weighted: |p, stride, v, d, o| unsafe { weighted(p, stride, v, d, o) },
    // SAFETY: as above.
    exp: |x, top| unsafe { exp(x, top) },
    // SAFETY: as above.
    swiglu: |a, b, clamp, gate| unsafe { swiglu(a, b, clamp, gate) },
    // SAFETY: as above.
    half: |bytes, out| unsafe { halves(bytes, out) },
    // SAFETY: as above.
    decode_main: |layout, bytes, row| unsafe { decode_main(layout, bytes, row) },
    // SAFETY: as above.
    decode_index: |layout, bytes, row| unsafe { decode_index(layout, bytes, row) },
    // SAFETY: as above.
    row: |format, w, x| unsafe { row(format, w, x) },
    tiles: None,
};

#[target_feature(enable = "avx2,fma")]
fn row(format: BlockFormat, w: &[u8], x: Quantised<'_>) -> f32 {
    match format {
        BlockFormat::Q8_0 => q8_0_avx2(w, x),
        BlockFormat::Q2K => q2_k_avx2(w, x),
        BlockFormat::Q4K => q4_k_avx2(w, x),
        BlockFormat::IQ2XXS => iq2_xxs_avx2(w, x),
        _ => (portable::KERNELS.row)(format, w, x),
    }
}

#[target_feature(enable = "avx2,fma")]
fn exp(x: &mut [f32], top: f32) -> f32 {
    super::exp_all(x, top)
}

#[target_feature(enable = "avx2,fma")]
fn swiglu(a: &mut [f32], b: &[f32], clamp: f32, gate: f32) {
    super::swiglu_all(a, b, clamp, gate)
}

#[target_feature(enable = "avx2,fma")]
fn decode_main(layout: &KvLayout, bytes: &[u8], row: &mut [f32]) {
    layout.decode_main(bytes, row)
}

#[target_feature(enable = "avx2,fma")]
fn decode_index(layout: &KvLayout, bytes: &[u8], row: &mut [f32]) {
    layout.decode_index(bytes, row)
}

#[target_feature(enable = "avx2,fma,f16c")]
fn halves(bytes: &[u8], out: &mut [f32]) {
    let mut chunks = out.chunks_exact_mut(8);
    let mut at = 0;
    for out in &mut chunks {
        let b: &[u8; 16] = bytes[at..at + 16].try_into().unwrap_or(&[0; 16]);
        // SAFETY: 16 readable bytes and eight writable values; neither needs alignment.
        unsafe {
            _mm256_storeu_ps(out.as_mut_ptr(), _mm256_cvtph_ps(_mm_loadu_si128(b.as_ptr().cast())));
        }
        at += 16;
    }
    for o in chunks.into_remainder() {
        *o = half(bytes, at);
        at += 2;
    }
}

#[target_feature(enable = "avx2,fma")]
fn f32_tile(w: [&[f32]; F32_ROWS], x: [&[f32]; F32_TOKENS]) -> F32Out {
    w.map(|w| x.map(|x| f32_avx2(x, w)))
}

#[target_feature(enable = "avx2,fma")]
fn weighted(p: &[f32], stride: usize, v: &[f32], d: usize, o: &mut [f32]) {
    for (p, o) in p.chunks(stride).zip(o.chunks_exact_mut(d)) {
        for (p, v) in p.iter().zip(v.chunks_exact(d)) {
            // The compiler turns this loop into the vectors of the enabled features.
            for (o, v) in o.iter_mut().zip(v) {
                *o = p.mul_add(*v, *o);
            }
        }
    }
}

/// The sum of eight integers.
#[target_feature(enable = "avx2,fma")]
fn total(v: __m256i) -> i32 {
    let v = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256::<1>(v));
    let v = _mm_add_epi32(v, _mm_unpackhi_epi64(v, v));
    _mm_cvtsi128_si32(v) + _mm_extract_epi32::<1>(v)
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
fn q8_0_avx2(w: &[u8], x: Quantised<'_>) -> f32 {
    let ones = _mm256_set1_epi16(1);
    let mut lanes = [0f32; LANES];
    for (b, block) in w.chunks_exact(q8_0::BYTES).enumerate() {
        let q = load(&block[2..]);
        let y = _mm256_sign_epi8(load_i8(&x.q[32 * b..]), q);
        let dot = _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_sign_epi8(q, q), y), ones);
        lanes[b % LANES] += (half(block, 0) * x.scales[b]) * total(dot) as f32;
    }
    join(lanes)
}

/// Two 16-bit values, one for each half of a vector of 16.
#[target_feature(enable = "avx2,fma")]
fn two_words(low: i16, high: i16) -> __m256i {
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
fn q2_k_avx2(w: &[u8], x: Quantised<'_>) -> f32 {
    use k_quants::q2::*;
    let three = _mm256_set1_epi8(3);
    let mut lanes = [0f32; LANES];
    for (i, b) in w.chunks_exact(BYTES).enumerate() {
        let (d, dmin) = (half(b, D), half(b, DMIN));
        let m: [i16; 16] = std::array::from_fn(|g| i16::from(b[SCALES + g] >> 4));
        let mut sum = _mm256_setzero_si256();
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
                let scale = two_words(i16::from(b[g] & 15), i16::from(b[g + 1] & 15));
                let dot = _mm256_maddubs_epi16(q, load_i8(&x.q[256 * i + 128 * h + 32 * j..]));
                sum = _mm256_add_epi32(sum, _mm256_madd_epi16(dot, scale));
            }
        }
        let minima = total(mins(&m, &x.sums[16 * i..]));
        lanes[i % LANES] += x.scales[i] * (d * total(sum) as f32 - dmin * minima as f32);
    }
    join(lanes)
}

#[target_feature(enable = "avx2,fma")]
fn q4_k_avx2(w: &[u8], x: Quantised<'_>) -> f32 {
    use k_quants::q4::*;
    let low = _mm256_set1_epi8(15);
    let mut lanes = [0f32; LANES];
    for (i, b) in w.chunks_exact(BYTES).enumerate() {
        let (d, dmin) = (half(b, D), half(b, DMIN));
        let scales: [(u8, u8); 8] = std::array::from_fn(|g| k_quants::scale_min(&b[SCALES..], g));
        let m: [i16; 16] = std::array::from_fn(|g| i16::from(scales[g / 2].1));
        let mut sum = _mm256_setzero_si256();
        for g in 0..8 {
            let bytes = load(&b[QUANTS + 32 * (g / 2)..]);
            let q = _mm256_and_si256(if g % 2 == 0 { bytes } else { _mm256_srli_epi16::<4>(bytes) }, low);
            let scale = _mm256_set1_epi16(i16::from(scales[g].0));
            let dot = _mm256_maddubs_epi16(q, load_i8(&x.q[256 * i + 32 * g..]));
            sum = _mm256_add_epi32(sum, _mm256_madd_epi16(dot, scale));
        }
        let minima = total(mins(&m, &x.sums[16 * i..]));
        lanes[i % LANES] += x.scales[i] * (d * total(sum) as f32 - dmin * minima as f32);
    }
    join(lanes)
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
fn iq2_xxs_avx2(w: &[u8], x: Quantised<'_>) -> f32 {
    let mut lanes = [0f32; LANES];
    for (i, b) in w.chunks_exact(iq2_xxs::BYTES).enumerate() {
        let d = half(b, iq2_xxs::D) * 0.125;
        let mut sum = _mm256_setzero_si256();
        for (g, group) in b[iq2_xxs::GROUPS..].chunks_exact(8).enumerate() {
            let tail = u32::from_le_bytes([group[4], group[5], group[6], group[7]]);
            let grid = |v: usize| iq2_xxs::GRID[group[v] as usize] as i64;
            let sign =
                |v: usize| i64::from_le_bytes(SIGNS[(tail >> (7 * v)) as usize & 127].map(|s| s as u8));
            let magnitudes = _mm256_set_epi64x(grid(3), grid(2), grid(1), grid(0));
            let signs = _mm256_set_epi64x(sign(3), sign(2), sign(1), sign(0));
            let scale = _mm256_set1_epi16((2 * (tail >> 28) + 1) as i16);
            let y = _mm256_sign_epi8(load_i8(&x.q[256 * i + 32 * g..]), signs);
            let dot = _mm256_maddubs_epi16(magnitudes, y);
            sum = _mm256_add_epi32(sum, _mm256_madd_epi16(dot, scale));
        }
        lanes[i % LANES] += (d * x.scales[i]) * total(sum) as f32;
    }
    join(lanes)
}
