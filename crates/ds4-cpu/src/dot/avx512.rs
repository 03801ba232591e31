//! The kernels with AVX-512: VNNI, VBMI and GFNI beside the usual parts (Ice Lake, Zen 4 and newer). Every function here
//! is reached through [`KERNELS`] alone, which is chosen only where [`present`].
//!
//! Few activation rows: one weight row at a time, its codes unsigned against signed activations. Many: tiles with
//! activation rows in the lanes, so that nothing is summed across a vector; there the activations are the unsigned side
//! (128 is added, and what that adds is taken away again), so weights keep their signed codes.

use std::arch::x86_64::*;

use ds4_gguf::{BlockFormat, iq2_xxs, k_quants, mxfp4, q8_0};
use ds4_model::KvLayout;

use super::unpack::{self, SUPER, half};
use super::{
    F32_ROWS, F32_TOKENS, F32Out, Kernels, LANES, PANEL_ROWS, Packed, Panel, TILE_TOKENS, TileOut, Tiles,
};
use crate::quant::Quantised;

/// Wraps functions that need the instruction set; the macro keeps the list of features in one place.
macro_rules! avx512 {
    ($($(#[$attr:meta])* fn $name:ident $(<$(const $c:ident : $ct:ty),*>)? ($($arg:ident : $t:ty),* $(,)?) $(-> $ret:ty)? $body:block)*) => {
        $(
            $(#[$attr])*
            #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512vbmi,gfni,avx2,fma,f16c")]
            #[inline]
            fn $name $(<$(const $c: $ct),*>)? ($($arg: $t),*) $(-> $ret)? $body
        )*
    };
}

pub fn present() -> bool {
    use std::arch::is_x86_feature_detected as has;
    has!("avx512f")
        && has!("avx512bw")
        && has!("avx512vl")
        && has!("avx512dq")
        && has!("avx512vnni")
        && has!("avx512vbmi")
        && has!("gfni")
        && has!("avx2")
        && has!("fma")
        && has!("f16c")
}

pub const KERNELS: Kernels = Kernels {
    name: "AVX-512",
    // SAFETY: in all of them: the features were detected (see the module).
    f32: |a, b| unsafe { f32_product(a, b) },
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
    tiles: Some(Tiles {
        // SAFETY: as above.
        pack: |packed, t, rows| unsafe { pack(packed, t, rows) },
        // SAFETY: as above.
        unpack: |format, rows, cols, panel| unsafe { fill(format, rows, cols, panel) },
        // SAFETY: as above.
        multiply: |format, cols, panel, packed, t, out| unsafe {
            multiply(format, cols, panel, packed, t, out)
        },
    }),
};

// Loads and stores: every one goes through a slice of its exact length, so it cannot leave its buffer.
avx512! {
    fn load<const N: usize>(bytes: &[u8]) -> __m512i {
        const { assert!(N == 64) };
        let bytes: &[u8; N] = bytes[..N].try_into().unwrap_or(&[0; N]);
        // SAFETY: 64 readable bytes; the load needs no alignment.
        unsafe { _mm512_loadu_si512(bytes.as_ptr().cast()) }
    }

    fn load32(bytes: &[u8]) -> __m256i {
        let bytes: &[u8; 32] = bytes[..32].try_into().unwrap_or(&[0; 32]);
        // SAFETY: 32 readable bytes; the load needs no alignment.
        unsafe { _mm256_loadu_si256(bytes.as_ptr().cast()) }
    }

    fn load16(bytes: &[u8]) -> __m128i {
        let bytes: &[u8; 16] = bytes[..16].try_into().unwrap_or(&[0; 16]);
        // SAFETY: 16 readable bytes; the load needs no alignment.
        unsafe { _mm_loadu_si128(bytes.as_ptr().cast()) }
    }

    fn load_i8(q: &[i8]) -> __m512i {
        let q: &[i8; 64] = q[..64].try_into().unwrap_or(&[0; 64]);
        // SAFETY: 64 readable bytes; the load needs no alignment.
        unsafe { _mm512_loadu_si512(q.as_ptr().cast()) }
    }

    fn load_i16x32(v: &[i16]) -> __m512i {
        let v: &[i16; 32] = v[..32].try_into().unwrap_or(&[0; 32]);
        // SAFETY: 64 readable bytes; the load needs no alignment.
        unsafe { _mm512_loadu_si512(v.as_ptr().cast()) }
    }

    fn load_i16x16(v: &[i16]) -> __m256i {
        let v: &[i16; 16] = v[..16].try_into().unwrap_or(&[0; 16]);
        // SAFETY: 32 readable bytes; the load needs no alignment.
        unsafe { _mm256_loadu_si256(v.as_ptr().cast()) }
    }

    fn load_f32(x: &[f32]) -> __m512 {
        let x: &[f32; 16] = x[..16].try_into().unwrap_or(&[0.0; 16]);
        // SAFETY: 16 readable values; the load needs no alignment.
        unsafe { _mm512_loadu_ps(x.as_ptr()) }
    }

    fn load_i32(x: &[i32]) -> __m512i {
        let x: &[i32; 16] = x[..16].try_into().unwrap_or(&[0; 16]);
        // SAFETY: 16 readable values; the load needs no alignment.
        unsafe { _mm512_loadu_si512(x.as_ptr().cast()) }
    }

    fn store_f32(to: &mut [f32], v: __m512) {
        let to = &mut to[..16];
        // SAFETY: 16 writable values; the store needs no alignment.
        unsafe { _mm512_storeu_ps(to.as_mut_ptr(), v) }
    }

    fn store_i8(to: &mut [i8], v: __m512i) {
        let to = &mut to[..64];
        // SAFETY: 64 writable bytes; the store needs no alignment.
        unsafe { _mm512_storeu_si512(to.as_mut_ptr().cast(), v) }
    }

    fn store_u8(to: &mut [u8], v: __m512i) {
        let to = &mut to[..64];
        // SAFETY: 64 writable bytes; the store needs no alignment.
        unsafe { _mm512_storeu_si512(to.as_mut_ptr().cast(), v) }
    }

    fn of<const N: usize>(bytes: [u8; N]) -> __m512i {
        load::<64>(&bytes)
    }

    fn of_words(words: [u16; 32]) -> __m512i {
        // SAFETY: plain bytes of the same size.
        unsafe { std::mem::transmute::<[u16; 32], __m512i>(words) }
    }

    fn pair(low: __m256i, high: __m256i) -> __m512i {
        _mm512_inserti64x4::<1>(_mm512_castsi256_si512(low), high)
    }

    /// The same 32 bytes in both halves.
    fn twice(v: __m256i) -> __m512i {
        _mm512_broadcast_i64x4(v)
    }

    /// As `dot::join`.
    fn join(v: __m512) -> f32 {
        let v = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps::<1>(v));
        let v = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
        let v = _mm_add_ps(v, _mm_movehl_ps(v, v));
        _mm_cvtss_f32(_mm_add_ss(v, _mm_movehdup_ps(v)))
    }

    /// Sums of four vectors' quarters: in each quarter of the result, that quarter's sums of `a`, `b`, `c`, `d`.
    fn quarters(a: __m512i, b: __m512i, c: __m512i, d: __m512i) -> __m512i {
        let ab = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
        let cd = _mm512_add_epi32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
        _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd))
    }

    /// Adds neighbouring quarters: those of `a`, then those of `b`.
    fn neighbours(a: __m512i, b: __m512i) -> __m512i {
        _mm512_add_epi32(_mm512_shuffle_i64x2::<0x88>(a, b), _mm512_shuffle_i64x2::<0xdd>(a, b))
    }

    /// The sums of 16 vectors, one a lane.
    fn sums16(v: &[__m512i; 16]) -> __m512i {
        let a = neighbours(quarters(v[0], v[1], v[2], v[3]), quarters(v[4], v[5], v[6], v[7]));
        let b = neighbours(quarters(v[8], v[9], v[10], v[11]), quarters(v[12], v[13], v[14], v[15]));
        neighbours(a, b)
    }

    /// The sums of both halves of eight vectors, one a lane: half `h` of vector `i` in lane `2 i + h`.
    fn sums8x2(v: &[__m512i; 8]) -> __m512i {
        let s = neighbours(quarters(v[0], v[1], v[2], v[3]), quarters(v[4], v[5], v[6], v[7]));
        let order = _mm512_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
        _mm512_permutexvar_epi32(order, s)
    }
}

// f32.
avx512! {
    fn f32_product(a: &[f32], b: &[f32]) -> f32 {
        let mut acc = [_mm512_setzero_ps(); 2];
        let (ca, cb) = (a.chunks_exact(32), b.chunks_exact(32));
        let tail: f32 = ca.remainder().iter().zip(cb.remainder()).map(|(x, y)| x * y).sum();
        for (x, y) in ca.zip(cb) {
            acc[0] = _mm512_fmadd_ps(load_f32(x), load_f32(y), acc[0]);
            acc[1] = _mm512_fmadd_ps(load_f32(&x[16..]), load_f32(&y[16..]), acc[1]);
        }
        join_f32(acc) + tail
    }

    /// Lanes `i`, `i + 8`, `i + 16`, `i + 24` first, as AVX2 does.
    fn join_f32(acc: [__m512; 2]) -> f32 {
        let half = |v| _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps::<1>(v));
        let v = _mm256_add_ps(half(acc[0]), half(acc[1]));
        let v = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
        let v = _mm_add_ps(v, _mm_movehl_ps(v, v));
        _mm_cvtss_f32(_mm_add_ss(v, _mm_shuffle_ps::<1>(v, v)))
    }

    fn f32_tile(w: [&[f32]; F32_ROWS], x: [&[f32]; F32_TOKENS]) -> F32Out {
        let n = x.iter().chain(&w).map(|r| r.len()).min().unwrap_or(0);
        let (w, x) = (w.map(|r| &r[..n]), x.map(|r| &r[..n]));
        let mut acc = [[[_mm512_setzero_ps(); 2]; F32_TOKENS]; F32_ROWS];
        let whole = n / 32 * 32;
        for at in (0..whole).step_by(32) {
            for half in 0..2 {
                let at = at + 16 * half;
                let x = x.map(|x| load_f32(&x[at..]));
                for (acc, w) in acc.iter_mut().zip(&w) {
                    let w = load_f32(&w[at..]);
                    for (acc, x) in acc.iter_mut().zip(x) {
                        acc[half] = _mm512_fmadd_ps(x, w, acc[half]);
                    }
                }
            }
        }
        std::array::from_fn(|i| std::array::from_fn(|j| {
            let tail: f32 = x[j][whole..].iter().zip(&w[i][whole..]).map(|(x, y)| x * y).sum();
            join_f32(acc[i][j]) + tail
        }))
    }

    fn weighted(p: &[f32], stride: usize, v: &[f32], d: usize, o: &mut [f32]) {
        const HEADS: usize = 4;
        let n = v.len() / d;
        let wide = d / 64 * 64;
        let groups = o.chunks_mut(HEADS * d).zip(p.chunks(HEADS * stride));
        for (o, p) in groups {
            let heads = o.len() / d;
            if heads == HEADS {
                for at in (0..wide).step_by(64) {
                    let mut acc: [[__m512; 4]; HEADS] = std::array::from_fn(|h| {
                        std::array::from_fn(|c| load_f32(&o[h * d + at + 16 * c..]))
                    });
                    for r in 0..n {
                        let row = &v[r * d + at..r * d + at + 64];
                        let row: [__m512; 4] = std::array::from_fn(|c| load_f32(&row[16 * c..]));
                        for (h, acc) in acc.iter_mut().enumerate() {
                            let p = _mm512_set1_ps(p[h * stride + r]);
                            for (acc, v) in acc.iter_mut().zip(row) {
                                *acc = _mm512_fmadd_ps(p, v, *acc);
                            }
                        }
                    }
                    for (h, acc) in acc.iter().enumerate() {
                        for (c, v) in acc.iter().enumerate() {
                            store_f32(&mut o[h * d + at + 16 * c..], *v);
                        }
                    }
                }
            }
            let from = if heads == HEADS { wide } else { 0 };
            for h in 0..heads {
                let o = &mut o[h * d + from..(h + 1) * d];
                for r in 0..n {
                    let p = p[h * stride + r];
                    for (o, v) in o.iter_mut().zip(&v[r * d + from..(r + 1) * d]) {
                        *o = p.mul_add(*v, *o);
                    }
                }
            }
        }
    }

    fn exp(x: &mut [f32], top: f32) -> f32 {
        super::exp_all(x, top)
    }

    fn swiglu(a: &mut [f32], b: &[f32], clamp: f32, gate: f32) {
        super::swiglu_all(a, b, clamp, gate)
    }

    fn decode_main(layout: &KvLayout, bytes: &[u8], row: &mut [f32]) {
        layout.decode_main(bytes, row)
    }

    fn decode_index(layout: &KvLayout, bytes: &[u8], row: &mut [f32]) {
        layout.decode_index(bytes, row)
    }

    fn halves(bytes: &[u8], out: &mut [f32]) {
        let mut chunks = out.chunks_exact_mut(16);
        let mut at = 0;
        for out in &mut chunks {
            store_f32(out, _mm512_cvtph_ps(load32(&bytes[at..])));
            at += 32;
        }
        for o in chunks.into_remainder() {
            *o = half(bytes, at);
            at += 2;
        }
    }
}

// One weight row, one activation row.
avx512! {
    fn row(format: BlockFormat, w: &[u8], x: Quantised<'_>) -> f32 {
        match format {
            BlockFormat::Q8_0 => blocks32::<false>(w, x),
            BlockFormat::MXFP4 => blocks32::<true>(w, x),
            BlockFormat::Q2K => super_blocks::<Q2>(w, x),
            BlockFormat::Q3K => super_blocks::<Q3>(w, x),
            BlockFormat::Q4K => super_blocks::<Q4>(w, x),
            BlockFormat::Q5K => super_blocks::<Q5>(w, x),
            BlockFormat::Q6K => super_blocks::<Q6>(w, x),
            _ => super_blocks::<IQ2>(w, x),
        }
    }

    /// What unsigned codes have more than signed ones.
    fn bias32<const MX: bool>() -> i16 {
        if MX { 12 } else { 128 }
    }

    fn block_bytes<const MX: bool>() -> usize {
        if MX { mxfp4::BYTES } else { q8_0::BYTES }
    }

    /// Unsigned codes of two blocks.
    fn codes32<const MX: bool>(w: &[u8]) -> __m512i {
        if MX {
            let table = twice(_mm256_broadcastsi128_si256(load16(&mxfp4::DOUBLED.map(|v| (v + 12) as u8))));
            let nibbles = |b: &[u8]| {
                let q = load16(&b[1..]);
                let high = _mm_srli_epi16::<4>(q);
                _mm256_and_si256(_mm256_set_m128i(high, q), _mm256_set1_epi8(15))
            };
            _mm512_shuffle_epi8(table, pair(nibbles(w), nibbles(&w[mxfp4::BYTES..])))
        } else {
            let q = pair(load32(&w[2..]), load32(&w[q8_0::BYTES + 2..]));
            _mm512_xor_si512(q, _mm512_set1_epi8(-128))
        }
    }

    /// The scales of 16 blocks.
    fn scales32<const MX: bool>(w: &[u8]) -> __m512 {
        if MX {
            load_f32(&std::array::from_fn::<f32, 16, _>(|i| mxfp4::half_scale(w[i * mxfp4::BYTES])))
        } else {
            // Scale i is word 17 i: from each vector of 32 words, those that lie in it.
            let mut words = _mm512_setzero_si512();
            for k in 0..8 {
                let at = of_words(SCALE_WORDS[k]);
                words = _mm512_mask_permutexvar_epi16(words, SCALE_MASKS[k], at, load::<64>(&w[64 * k..]));
            }
            _mm512_cvtph_ps(_mm512_castsi512_si256(words))
        }
    }

    /// The values of 16 blocks, one a lane.
    fn values32<const MX: bool>(w: &[u8], q: &[i8], scales: &[f32], sums: &[i16]) -> __m512 {
        let dots: [__m512i; 8] = std::array::from_fn(|i| {
            let codes = codes32::<MX>(&w[2 * i * block_bytes::<MX>()..]);
            _mm512_dpbusd_epi32(_mm512_setzero_si512(), codes, load_i8(&q[64 * i..]))
        });
        let extra = _mm512_madd_epi16(load_i16x32(sums), _mm512_set1_epi16(bias32::<MX>()));
        let dot = _mm512_sub_epi32(sums8x2(&dots), extra);
        let scale = _mm512_mul_ps(scales32::<MX>(w), load_f32(scales));
        _mm512_mul_ps(scale, _mm512_cvtepi32_ps(dot))
    }

    fn blocks32<const MX: bool>(w: &[u8], x: Quantised<'_>) -> f32 {
        let bytes = block_bytes::<MX>();
        let (n, whole) = (w.len() / bytes, w.len() / bytes / LANES * LANES);
        let mut lanes = _mm512_setzero_ps();
        for b in (0..whole).step_by(LANES) {
            let v = values32::<MX>(&w[b * bytes..], &x.q[32 * b..], &x.scales[b..], &x.sums[2 * b..]);
            lanes = _mm512_add_ps(lanes, v);
        }
        if whole < n {
            // The rest between zeros.
            let (mut tw, mut tq) = ([0u8; LANES * q8_0::BYTES], [0i8; LANES * 32]);
            let (mut ts, mut tm) = ([0f32; LANES], [0i16; 2 * LANES]);
            tw[..(n - whole) * bytes].copy_from_slice(&w[whole * bytes..n * bytes]);
            tq[..(n - whole) * 32].copy_from_slice(&x.q[32 * whole..32 * n]);
            ts[..n - whole].copy_from_slice(&x.scales[whole..n]);
            tm[..2 * (n - whole)].copy_from_slice(&x.sums[2 * whole..2 * n]);
            lanes = _mm512_add_ps(lanes, values32::<MX>(&tw, &tq, &ts, &tm));
        }
        join(lanes)
    }

    fn super_blocks<const F: u8>(w: &[u8], x: Quantised<'_>) -> f32 {
        let bytes = super_bytes::<F>();
        let n = w.len() / bytes;
        let mut lanes = _mm512_setzero_ps();
        for first in (0..n).step_by(LANES) {
            let count = LANES.min(n - first);
            let mut totals = [_mm512_setzero_si512(); LANES];
            let mut minima = [_mm512_setzero_si512(); 8];
            let (mut d, mut dmin) = ([0f32; LANES], [0f32; LANES]);
            for (i, block) in w[first * bytes..].chunks_exact(bytes).take(count).enumerate() {
                let b = first + i;
                let block = load_super::<F>(block);
                let q = &x.q[SUPER * b..SUPER * (b + 1)];
                let mut total = _mm512_setzero_si512();
                for c in 0..4 {
                    let q = load_i8(&q[64 * c..]);
                    let q = if F == IQ2 {
                        _mm512_mask_sub_epi8(q, block.negative[c], _mm512_setzero_si512(), q)
                    } else {
                        q
                    };
                    total = _mm512_dpwssd_epi32(total, _mm512_maddubs_epi16(block.codes[c], q), block.scales(c));
                }
                totals[i] = total;
                if F != IQ2 {
                    let m = _mm256_madd_epi16(block.minima, load_i16x16(&x.sums[16 * b..]));
                    minima[i / 2] = if i % 2 == 0 {
                        _mm512_zextsi256_si512(m)
                    } else {
                        _mm512_inserti64x4::<1>(minima[i / 2], m)
                    };
                }
                (d[i], dmin[i]) = (block.d, block.dmin);
            }
            let mask = (u32::MAX >> (32 - count)) as u16;
            // SAFETY: as many values as the mask has are read.
            let s = unsafe { _mm512_maskz_loadu_ps(mask, x.scales[first..first + count].as_ptr()) };
            let total = sums16(&totals);
            let value = if has_minima::<F>() {
                let scaled = _mm512_mul_ps(load_f32(&d), _mm512_cvtepi32_ps(total));
                let minima = _mm512_mul_ps(load_f32(&dmin), _mm512_cvtepi32_ps(sums8x2(&minima)));
                _mm512_mul_ps(s, _mm512_sub_ps(scaled, minima))
            } else {
                let total = if F == IQ2 { total } else { _mm512_sub_epi32(total, sums8x2(&minima)) };
                _mm512_mul_ps(_mm512_mul_ps(load_f32(&d), s), _mm512_cvtepi32_ps(total))
            };
            lanes = _mm512_add_ps(lanes, value);
        }
        join(lanes)
    }
}

const SCALE_WORDS: [[u16; 32]; 8] = {
    let mut at = [[0; 32]; 8];
    let mut i = 0;
    while i < 16 {
        at[17 * i / 32][i] = (17 * i % 32) as u16;
        i += 1;
    }
    at
};

const SCALE_MASKS: [u32; 8] = {
    let mut masks = [0; 8];
    let mut i = 0;
    while i < 16 {
        masks[17 * i / 32] |= 1 << i;
        i += 1;
    }
    masks
};

const Q2: u8 = 2;
const Q3: u8 = 3;
const Q4: u8 = 4;
const Q5: u8 = 5;
const Q6: u8 = 6;
const IQ2: u8 = 12;

const fn super_bytes<const F: u8>() -> usize {
    match F {
        Q2 => k_quants::q2::BYTES,
        Q3 => k_quants::q3::BYTES,
        Q4 => k_quants::q4::BYTES,
        Q5 => k_quants::q5::BYTES,
        Q6 => k_quants::q6::BYTES,
        _ => iq2_xxs::BYTES,
    }
}

const fn has_minima<const F: u8>() -> bool {
    matches!(F, Q2 | Q4 | Q5)
}

/// What unsigned codes have more than signed ones.
const fn bias<const F: u8>() -> i8 {
    match F {
        Q3 => 4,
        Q6 => 32,
        _ => 0,
    }
}

/// A super-block in vectors of 64 values.
struct Super {
    /// Unsigned codes; of IQ2_XXS the magnitudes.
    codes: [__m512i; 4],
    /// Of IQ2_XXS: which of them are negative.
    negative: [u64; 4],
    /// 16 scales of 16 bits.
    scales: __m256i,
    /// 16 minima: of formats without, the scales times the bias of the codes.
    minima: __m256i,
    d: f32,
    dmin: f32,
}

/// Word indices that spread four of 16 scales over the 32 words of a product of 64 values.
const SPREAD: [[u16; 32]; 4] = {
    let mut at = [[0; 32]; 4];
    let mut i = 0;
    while i < 128 {
        at[i / 32][i % 32] = (i / 8) as u16;
        i += 1;
    }
    at
};

/// Byte indices of the same kind: four of 16 bytes over 64.
const SPREAD_BYTES: [[u8; 64]; 4] = {
    let mut at = [[0; 64]; 4];
    let mut i = 0;
    while i < 256 {
        at[i / 64][i % 64] = (i / 16) as u8;
        i += 1;
    }
    at
};

impl Super {
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512vbmi,gfni,avx2,fma,f16c")]
    #[inline]
    fn scales(&self, c: usize) -> __m512i {
        _mm512_permutexvar_epi16(of_words(SPREAD[c]), _mm512_castsi256_si512(self.scales))
    }
}

avx512! {
    fn load_super<const F: u8>(b: &[u8]) -> Super {
        match F {
            Q2 => load_q2(b),
            Q3 => load_q3(b),
            Q4 => load_q4(b),
            Q5 => load_q5(b),
            Q6 => load_q6(b),
            _ => load_iq2(b),
        }
    }

    /// Two shifts: one of the lower 32 bytes, one of the upper.
    fn shift2(v: __m512i, low: i16, high: i16) -> __m512i {
        let counts = pair(_mm256_set1_epi16(low), _mm256_set1_epi16(high));
        _mm512_srlv_epi16(v, counts)
    }

    /// The four 2-bit parts of 32 bytes, twice: 256 values in order.
    fn two_bits(b: &[u8]) -> [__m512i; 4] {
        let three = _mm512_set1_epi8(3);
        let halves = [twice(load32(b)), twice(load32(&b[32..]))];
        std::array::from_fn(|c| {
            let shift = 4 * (c % 2) as i16;
            _mm512_and_si512(shift2(halves[c / 2], shift, shift + 2), three)
        })
    }

    fn load_q2(b: &[u8]) -> Super {
        use k_quants::q2::*;
        let sc = load16(&b[SCALES..]);
        let low = _mm_set1_epi8(15);
        Super {
            codes: two_bits(&b[QUANTS..]),
            negative: [0; 4],
            scales: _mm256_cvtepu8_epi16(_mm_and_si128(sc, low)),
            minima: _mm256_cvtepu8_epi16(_mm_and_si128(_mm_srli_epi16::<4>(sc), low)),
            d: half(b, D),
            dmin: half(b, DMIN),
        }
    }

    fn load_q3(b: &[u8]) -> Super {
        use k_quants::q3::*;
        let scales: [i8; 16] = std::array::from_fn(|g| scale(&b[SCALES..], g));
        let scales = _mm256_cvtepi8_epi16(load16(&scales.map(|s| s as u8)));
        let high = twice(load32(&b[HIGH..]));
        let low = two_bits(&b[QUANTS..]);
        let codes = std::array::from_fn(|c| {
            let bits = pair(_mm256_set1_epi8((1u8 << (2 * c)) as i8), _mm256_set1_epi8((2u8 << (2 * c)) as i8));
            _mm512_mask_add_epi8(low[c], _mm512_test_epi8_mask(high, bits), low[c], _mm512_set1_epi8(4))
        });
        Super {
            codes,
            negative: [0; 4],
            scales,
            minima: _mm256_slli_epi16::<2>(scales),
            d: half(b, D),
            dmin: 0.0,
        }
    }

    /// Scales and minima of Q4_K and Q5_K, each once for every 16 values.
    fn scales_32(sc: &[u8]) -> (__m256i, __m256i) {
        let word = |at: usize| u32::from_le_bytes([sc[at], sc[at + 1], sc[at + 2], sc[at + 3]]);
        let (a, b, c) = (word(0), word(4), word(8));
        let (six, four, two) = (0x3f3f_3f3f, 0x0f0f_0f0f, 0x0303_0303);
        let scales = u64::from(a & six) | u64::from(c & four | (a >> 6 & two) << 4) << 32;
        let minima = u64::from(b & six) | u64::from(c >> 4 & four | (b >> 6 & two) << 4) << 32;
        let spread = |v: u64| {
            let v = _mm_cvtsi64_si128(v as i64);
            _mm256_cvtepu8_epi16(_mm_unpacklo_epi8(v, v))
        };
        (spread(scales), spread(minima))
    }

    fn nibbles(b: &[u8]) -> [__m512i; 4] {
        let low = _mm512_set1_epi8(15);
        std::array::from_fn(|c| _mm512_and_si512(shift2(twice(load32(&b[32 * c..])), 0, 4), low))
    }

    fn load_q4(b: &[u8]) -> Super {
        use k_quants::q4::*;
        let (scales, minima) = scales_32(&b[SCALES..]);
        Super {
            codes: nibbles(&b[QUANTS..]),
            negative: [0; 4],
            scales,
            minima,
            d: half(b, D),
            dmin: half(b, DMIN),
        }
    }

    fn load_q5(b: &[u8]) -> Super {
        use k_quants::q5::*;
        let (scales, minima) = scales_32(&b[SCALES..]);
        let high = twice(load32(&b[HIGH..]));
        let low = nibbles(&b[QUANTS..]);
        let codes = std::array::from_fn(|c| {
            let bits = pair(_mm256_set1_epi8((1u8 << (2 * c)) as i8), _mm256_set1_epi8((2u8 << (2 * c)) as i8));
            _mm512_mask_add_epi8(low[c], _mm512_test_epi8_mask(high, bits), low[c], _mm512_set1_epi8(16))
        });
        Super { codes, negative: [0; 4], scales, minima, d: half(b, D), dmin: half(b, DMIN) }
    }

    fn load_q6(b: &[u8]) -> Super {
        use k_quants::q6::*;
        let (low, two) = (_mm512_set1_epi8(15), _mm512_set1_epi8(3));
        let codes = std::array::from_fn(|c| {
            let (h, upper) = (c / 2, c % 2);
            let q = load::<64>(&b[LOW + 64 * h..]);
            let q = if upper == 1 { _mm512_srli_epi16::<4>(q) } else { q };
            let u = twice(load32(&b[HIGH + 32 * h..]));
            let shift = 4 * upper as i16;
            let u = _mm512_and_si512(shift2(u, shift, shift + 2), two);
            _mm512_or_si512(_mm512_and_si512(q, low), _mm512_slli_epi16::<4>(u))
        });
        let scales = _mm256_cvtepi8_epi16(load16(&b[SCALES..]));
        Super {
            codes,
            negative: [0; 4],
            scales,
            minima: _mm256_slli_epi16::<5>(scales),
            d: half(b, D),
            dmin: 0.0,
        }
    }

    fn load_iq2(b: &[u8]) -> Super {
        let groups = load::<64>(&b[iq2_xxs::GROUPS..]);
        // 32 indices as words, looked up in 256 words: 64 at a time, the right ones by the index's top bits.
        let index = _mm512_maskz_permutexvar_epi8(0x5555_5555_5555_5555, of(IQ2_INDEX), groups);
        let table = |i: usize| of_words(IQ2_GRID[i]);
        let look = |i: usize| _mm512_permutex2var_epi16(table(i), index, table(i + 1));
        let (high, higher) =
            (_mm512_test_epi16_mask(index, _mm512_set1_epi16(64)), _mm512_test_epi16_mask(index, _mm512_set1_epi16(128)));
        let grid = _mm512_mask_blend_epi16(
            higher,
            _mm512_mask_blend_epi16(high, look(0), look(2)),
            _mm512_mask_blend_epi16(high, look(4), look(6)),
        );
        // Each word is eight 2-bit codes: to a vector of 64 bytes, then to magnitudes.
        let bits = _mm512_set1_epi64(0x0e0c_0a08_0604_0200);
        let codes = std::array::from_fn(|c| {
            let words = _mm512_permutexvar_epi8(of(IQ2_WORDS[c]), grid);
            let codes = _mm512_multishift_epi64_epi8(bits, words);
            _mm512_permutexvar_epi8(codes, of(IQ2_MAGNITUDES))
        });
        // Four 7-bit sign codes a group; the eighth sign is their parity: a product with a bit matrix.
        let signs = _mm512_multishift_epi64_epi8(_mm512_set1_epi64(0x352e_2720_352e_2720), groups);
        let signs = _mm512_gf2p8affine_epi64_epi8::<0>(signs, _mm512_set1_epi64(0x0102_0408_1020_407f));
        let signs = _mm512_castsi512_si256(_mm512_permutexvar_epi32(
            _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 0, 0, 0, 0, 0, 0, 0, 0),
            signs,
        ));
        let negative = [
            _mm256_extract_epi64::<0>(signs) as u64,
            _mm256_extract_epi64::<1>(signs) as u64,
            _mm256_extract_epi64::<2>(signs) as u64,
            _mm256_extract_epi64::<3>(signs) as u64,
        ];
        let s = _mm512_cvtepi64_epi16(_mm512_srli_epi64::<60>(groups));
        let s = _mm_add_epi16(_mm_add_epi16(s, s), _mm_set1_epi16(1));
        let scales = _mm256_permutexvar_epi16(
            _mm256_setr_epi16(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7),
            _mm256_castsi128_si256(s),
        );
        Super {
            codes,
            negative,
            scales,
            minima: _mm256_setzero_si256(),
            d: half(b, iq2_xxs::D) * 0.125,
            dmin: 0.0,
        }
    }
}

/// Byte `8 g + v` for word `4 g + v`.
const IQ2_INDEX: [u8; 64] = {
    let mut at = [0; 64];
    let mut n = 0;
    while n < 32 {
        at[2 * n] = (8 * (n / 4) + n % 4) as u8;
        n += 1;
    }
    at
};

/// Words `8 c ..` as the low words of eight quadwords.
const IQ2_WORDS: [[u8; 64]; 4] = {
    let mut at = [[0; 64]; 4];
    let mut n = 0;
    while n < 32 {
        at[n / 8][8 * (n % 8)] = 2 * n as u8;
        at[n / 8][8 * (n % 8) + 1] = 2 * n as u8 + 1;
        n += 1;
    }
    at
};

/// Magnitudes by the two lowest bits of an index.
const IQ2_MAGNITUDES: [u8; 64] = {
    let mut t = [0; 64];
    let mut i = 0;
    while i < 64 {
        if i % 4 < 3 {
            t[i] = iq2_xxs::MAGNITUDES[i % 4];
        }
        i += 1;
    }
    t
};

/// The grid with two bits a value, element 0 lowest.
const IQ2_GRID: [[u16; 32]; 8] = {
    let mut t = [[0; 32]; 8];
    let mut i = 0;
    while i < 256 {
        let mut k = 0;
        while k < 8 {
            let m = (iq2_xxs::GRID[i] >> (8 * k)) as u8;
            let mut code = 0;
            while iq2_xxs::MAGNITUDES[code] != m {
                code += 1;
            }
            t[i / 32][i % 32] |= (code as u16) << (2 * k);
            k += 1;
        }
        i += 1;
    }
    t
};

// Tiles.
avx512! {
    fn fill(format: BlockFormat, rows: &[&[u8]], cols: usize, panel: &mut Panel) {
        for (r, w) in rows.iter().enumerate() {
            match format {
                BlockFormat::Q8_0 => fill32::<false>(w, cols, panel, r),
                BlockFormat::MXFP4 => fill32::<true>(w, cols, panel, r),
                BlockFormat::Q2K => fill_super::<Q2>(w, cols, panel, r),
                BlockFormat::Q3K => fill_super::<Q3>(w, cols, panel, r),
                BlockFormat::Q4K => fill_super::<Q4>(w, cols, panel, r),
                BlockFormat::Q5K => fill_super::<Q5>(w, cols, panel, r),
                BlockFormat::Q6K => fill_super::<Q6>(w, cols, panel, r),
                _ => fill_super::<IQ2>(w, cols, panel, r),
            }
        }
    }

    fn fill32<const MX: bool>(w: &[u8], cols: usize, panel: &mut Panel, r: usize) {
        let (n, bytes) = (cols / 32, block_bytes::<MX>());
        let codes = &mut panel.codes[r * cols..(r + 1) * cols];
        let (d, offset) = (&mut panel.d[r * n..(r + 1) * n], &mut panel.offset[r * n..(r + 1) * n]);
        let ones = _mm256_set1_epi8(1);
        let blocks = w.chunks_exact(bytes).zip(codes.chunks_exact_mut(32)).zip(d).zip(offset);
        for (((b, codes), d), offset) in blocks {
            let format = if MX { BlockFormat::MXFP4 } else { BlockFormat::Q8_0 };
            *d = unpack::block32(format, b, codes);
            let mut bytes = [0u8; 32];
            bytes.iter_mut().zip(&*codes).for_each(|(b, c)| *b = *c as u8);
            let sum = _mm256_dpbusd_epi32(_mm256_setzero_si256(), ones, load32(&bytes));
            let sum = _mm_add_epi32(_mm256_castsi256_si128(sum), _mm256_extracti128_si256::<1>(sum));
            let sum = _mm_add_epi32(sum, _mm_unpackhi_epi64(sum, sum));
            *offset = -128 * (_mm_cvtsi128_si32(sum) + _mm_extract_epi32::<1>(sum));
        }
    }

    fn fill_super<const F: u8>(w: &[u8], cols: usize, panel: &mut Panel, r: usize) {
        let (n, bytes) = (cols / SUPER, super_bytes::<F>());
        for (b, block) in w.chunks_exact(bytes).take(n).enumerate() {
            let block = load_super::<F>(block);
            let at = r * n + b;
            let codes = &mut panel.codes[at * SUPER..(at + 1) * SUPER];
            let mut sum = _mm512_setzero_si512();
            let ones = _mm512_set1_epi8(1);
            for c in 0..4 {
                let mut q = _mm512_sub_epi8(block.codes[c], _mm512_set1_epi8(bias::<F>()));
                if F == IQ2 {
                    q = _mm512_mask_sub_epi8(q, block.negative[c], _mm512_setzero_si512(), q);
                }
                if F == Q2 {
                    // At most 3 * 15: the scale goes into the code.
                    let s = _mm256_cvtepi16_epi8(block.scales);
                    let s = _mm512_permutexvar_epi8(of(SPREAD_BYTES[c]), _mm512_castsi128_si512(s));
                    let one = _mm512_test_epi8_mask(q, _mm512_set1_epi8(1));
                    let two = _mm512_test_epi8_mask(q, _mm512_set1_epi8(2));
                    let low = _mm512_maskz_mov_epi8(one, s);
                    q = _mm512_mask_add_epi8(low, two, low, _mm512_add_epi8(s, s));
                    sum = _mm512_dpbusd_epi32(sum, ones, q);
                } else {
                    sum = _mm512_dpwssd_epi32(sum, _mm512_maddubs_epi16(ones, q), block.scales(c));
                }
                store_i8(&mut codes[64 * c..], q);
            }
            panel.offset[at] = -128 * _mm512_reduce_add_epi32(sum);
            let groups = &mut panel.scales[16 * at..16 * (at + 1)];
            // SAFETY: 16 writable values; the store needs no alignment.
            unsafe { _mm512_storeu_si512(groups.as_mut_ptr().cast(), _mm512_cvtepi16_epi32(block.scales)) };
            if has_minima::<F>() {
                let pairs = &mut panel.minima[8 * at..8 * (at + 1)];
                // SAFETY: 32 writable bytes; the store needs no alignment.
                unsafe { _mm256_storeu_si256(pairs.as_mut_ptr().cast(), block.minima) };
            }
            (panel.d[at], panel.dmin[at]) = (block.d, block.dmin);
        }
    }

    /// 16 rows of 16 dwords, turned.
    fn transpose(v: [__m512i; 16]) -> [__m512i; 16] {
        let mut a = v;
        for i in 0..8 {
            a[2 * i] = _mm512_unpacklo_epi32(v[2 * i], v[2 * i + 1]);
            a[2 * i + 1] = _mm512_unpackhi_epi32(v[2 * i], v[2 * i + 1]);
        }
        let mut b = a;
        for i in 0..4 {
            b[4 * i] = _mm512_unpacklo_epi64(a[4 * i], a[4 * i + 2]);
            b[4 * i + 1] = _mm512_unpackhi_epi64(a[4 * i], a[4 * i + 2]);
            b[4 * i + 2] = _mm512_unpacklo_epi64(a[4 * i + 1], a[4 * i + 3]);
            b[4 * i + 3] = _mm512_unpackhi_epi64(a[4 * i + 1], a[4 * i + 3]);
        }
        // b[4 i + j], quarter k: rows 4 i .. 4 i + 4 of column 4 k + j.
        let mut out = b;
        for j in 0..4 {
            let low = _mm512_shuffle_i32x4::<0x88>(b[j], b[4 + j]);
            let high = _mm512_shuffle_i32x4::<0xdd>(b[j], b[4 + j]);
            let low2 = _mm512_shuffle_i32x4::<0x88>(b[8 + j], b[12 + j]);
            let high2 = _mm512_shuffle_i32x4::<0xdd>(b[8 + j], b[12 + j]);
            out[j] = _mm512_shuffle_i32x4::<0x88>(low, low2);
            out[8 + j] = _mm512_shuffle_i32x4::<0xdd>(low, low2);
            out[4 + j] = _mm512_shuffle_i32x4::<0x88>(high, high2);
            out[12 + j] = _mm512_shuffle_i32x4::<0xdd>(high, high2);
        }
        out
    }

    fn pack(packed: &mut Packed, t: usize, rows: &[Quantised<'_>]) {
        let Some(first) = rows.first() else { return };
        let (cols, blocks) = (first.q.len(), first.scales.len());
        let zero = [0i8; 64];
        let q = &mut packed.q[t * TILE_TOKENS * cols..(t + 1) * TILE_TOKENS * cols];
        let offset = _mm512_set1_epi8(-128);
        let mut chunks = q.chunks_exact_mut(64 * TILE_TOKENS);
        let mut at = 0;
        for out in &mut chunks {
            let v: [__m512i; TILE_TOKENS] = std::array::from_fn(|i| {
                let q = rows.get(i).map_or(&zero[..], |r| &r.q[at..at + 64]);
                _mm512_xor_si512(load_i8(q), offset)
            });
            for (out, v) in out.chunks_exact_mut(64).zip(transpose(v)) {
                store_u8(out, v);
            }
            at += 64;
        }
        // Rows are whole blocks of 32: there may be one left.
        for (k, out) in chunks.into_remainder().chunks_exact_mut(64).enumerate() {
            for (i, out) in out.chunks_exact_mut(4).enumerate() {
                for (j, out) in out.iter_mut().enumerate() {
                    *out = rows.get(i).map_or(0, |r| r.q[at + 4 * k + j]) as u8 ^ 128;
                }
            }
        }
        let scales = &mut packed.scales[t * TILE_TOKENS * blocks..(t + 1) * TILE_TOKENS * blocks];
        let pairs = cols / 32;
        let sums = &mut packed.sums[t * TILE_TOKENS * pairs..(t + 1) * TILE_TOKENS * pairs];
        for i in 0..TILE_TOKENS {
            let Some(row) = rows.get(i) else {
                scales.iter_mut().skip(i).step_by(TILE_TOKENS).for_each(|s| *s = 0.0);
                sums.iter_mut().skip(i).step_by(TILE_TOKENS).for_each(|s| *s = 0);
                continue;
            };
            for (to, s) in scales.iter_mut().skip(i).step_by(TILE_TOKENS).zip(row.scales) {
                *to = *s;
            }
            for (to, s) in sums.iter_mut().skip(i).step_by(TILE_TOKENS).zip(row.sums.chunks_exact(2)) {
                *to = i32::from(s[0] as u16) | i32::from(s[1]) << 16;
            }
        }
    }

    fn multiply(format: BlockFormat, cols: usize, panel: &Panel, packed: &Packed, t: usize, out: &mut TileOut) {
        match format {
            BlockFormat::Q8_0 | BlockFormat::MXFP4 => tile32(cols, panel, packed, t, out),
            BlockFormat::Q2K => tile_super::<8, true, true>(cols, panel, packed, t, out),
            BlockFormat::Q4K | BlockFormat::Q5K => tile_super::<8, false, true>(cols, panel, packed, t, out),
            BlockFormat::IQ2XXS => tile_super::<8, false, false>(cols, panel, packed, t, out),
            _ => tile_super::<4, false, false>(cols, panel, packed, t, out),
        }
    }

    /// Adds to `acc[r]` the products of `QUADS` quads of codes of each panel row with a tile's activations.
    ///
    /// The caller has checked that the panel holds `(PANEL_ROWS - 1) * cols + 4 * QUADS` codes from `codes` on and the tile
    /// `64 * QUADS` bytes from `x` on; these loads are the whole work of a prefill, and have no room for checks.
    fn quads<const QUADS: usize>(
        acc: [__m512i; PANEL_ROWS],
        x: *const u8,
        codes: *const i8,
        cols: usize,
    ) -> [__m512i; PANEL_ROWS] {
        let mut acc = acc;
        // SAFETY: see above.
        let rows: [*const i8; PANEL_ROWS] = std::array::from_fn(|r| unsafe { codes.add(r * cols) });
        for k in 0..QUADS {
            // SAFETY: see above.
            let x = unsafe { _mm512_loadu_si512(x.add(64 * k).cast()) };
            for (acc, row) in acc.iter_mut().zip(rows) {
                // SAFETY: see above.
                let codes = unsafe { row.add(4 * k).cast::<i32>().read_unaligned() };
                *acc = _mm512_dpbusd_epi32(*acc, x, _mm512_set1_epi32(codes));
            }
        }
        acc
    }

    fn finish(lanes: &[[__m512; LANES]; PANEL_ROWS], out: &mut TileOut) {
        for (lanes, out) in lanes.iter().zip(out) {
            let mut v = *lanes;
            for half in [8, 4, 2, 1] {
                for i in 0..half {
                    v[i] = _mm512_add_ps(v[i], v[i + half]);
                }
            }
            store_f32(out, v[0]);
        }
    }

    fn tile32(cols: usize, panel: &Panel, packed: &Packed, t: usize, out: &mut TileOut) {
        let n = cols / 32;
        let q = &packed.q[t * TILE_TOKENS * cols..(t + 1) * TILE_TOKENS * cols];
        let scales = &packed.scales[t * TILE_TOKENS * n..(t + 1) * TILE_TOKENS * n];
        let codes = &panel.codes[..PANEL_ROWS * cols];
        let (d, offset) = (&panel.d[..PANEL_ROWS * n], &panel.offset[..PANEL_ROWS * n]);
        let mut lanes = [[_mm512_setzero_ps(); LANES]; PANEL_ROWS];
        for b in 0..n {
            let acc = std::array::from_fn(|r| _mm512_set1_epi32(offset[r * n + b]));
            // In bounds: 32 (b + 1) <= cols, and the slices hold `PANEL_ROWS` and `TILE_TOKENS` rows of `cols`.
            let acc = quads::<8>(acc, q[TILE_TOKENS * 32 * b..].as_ptr(), codes[32 * b..].as_ptr(), cols);
            let s = load_f32(&scales[TILE_TOKENS * b..]);
            for (r, acc) in acc.into_iter().enumerate() {
                let scale = _mm512_mul_ps(_mm512_set1_ps(d[r * n + b]), s);
                let lane = &mut lanes[r][b % LANES];
                *lane = _mm512_add_ps(*lane, _mm512_mul_ps(scale, _mm512_cvtepi32_ps(acc)));
            }
        }
        finish(&lanes, out)
    }

    /// `4 * QUADS` values share an integer scale, unless it is folded into the codes.
    fn tile_super<const QUADS: usize, const FOLDED: bool, const MINIMA: bool>(
        cols: usize,
        panel: &Panel,
        packed: &Packed,
        t: usize,
        out: &mut TileOut,
    ) {
        let (n, group) = (cols / SUPER, 4 * QUADS);
        let q = &packed.q[t * TILE_TOKENS * cols..(t + 1) * TILE_TOKENS * cols];
        let scales = &packed.scales[t * TILE_TOKENS * n..(t + 1) * TILE_TOKENS * n];
        let sums = &packed.sums[t * TILE_TOKENS * 8 * n..(t + 1) * TILE_TOKENS * 8 * n];
        let codes = &panel.codes[..PANEL_ROWS * cols];
        let mut lanes = [[_mm512_setzero_ps(); LANES]; PANEL_ROWS];
        for b in 0..n {
            let mut total: [__m512i; PANEL_ROWS] =
                std::array::from_fn(|r| _mm512_set1_epi32(panel.offset[r * n + b]));
            for g in 0..SUPER / group {
                let at = SUPER * b + group * g;
                // In bounds: at + group <= cols, and the slices hold `PANEL_ROWS` and `TILE_TOKENS` rows of `cols`.
                let (x, codes) = (q[TILE_TOKENS * at..].as_ptr(), codes[at..].as_ptr());
                if FOLDED {
                    total = quads::<QUADS>(total, x, codes, cols);
                } else {
                    let acc = quads::<QUADS>([_mm512_setzero_si512(); PANEL_ROWS], x, codes, cols);
                    for (r, (total, acc)) in total.iter_mut().zip(acc).enumerate() {
                        let s = panel.scales[16 * (r * n + b) + group / 16 * g];
                        *total = _mm512_add_epi32(*total, _mm512_mullo_epi32(acc, _mm512_set1_epi32(s)));
                    }
                }
            }
            let s = load_f32(&scales[TILE_TOKENS * b..]);
            let mut minima = [_mm512_setzero_si512(); PANEL_ROWS];
            if MINIMA {
                for p in 0..8 {
                    let x = load_i32(&sums[TILE_TOKENS * (8 * b + p)..]);
                    for (r, minima) in minima.iter_mut().enumerate() {
                        let m = _mm512_set1_epi32(panel.minima[8 * (r * n + b) + p]);
                        *minima = _mm512_dpwssd_epi32(*minima, x, m);
                    }
                }
            }
            for r in 0..PANEL_ROWS {
                let d = _mm512_set1_ps(panel.d[r * n + b]);
                let total = _mm512_cvtepi32_ps(total[r]);
                let value = if MINIMA {
                    let dmin = _mm512_set1_ps(panel.dmin[r * n + b]);
                    let minima = _mm512_mul_ps(dmin, _mm512_cvtepi32_ps(minima[r]));
                    _mm512_mul_ps(s, _mm512_sub_ps(_mm512_mul_ps(d, total), minima))
                } else {
                    _mm512_mul_ps(_mm512_mul_ps(d, s), total)
                };
                let lane = &mut lanes[r][b % LANES];
                *lane = _mm512_add_ps(*lane, value);
            }
        }
        finish(&lanes, out)
    }
}
