//! Weight blocks as integers: what every instruction set computes with, one block at a time, in plain Rust.

use ds4_gguf::{BlockFormat, iq2_xxs, k_quants, mxfp4, q8_0};
use half::f16;

/// Values of a super-block.
pub const SUPER: usize = 256;

pub fn half(b: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([b[at], b[at + 1]]).to_f32()
}

/// A block of 32: `w = d * codes`.
pub fn block32(format: BlockFormat, b: &[u8], codes: &mut [i8]) -> f32 {
    if format == BlockFormat::MXFP4 {
        for (j, q) in b[1..mxfp4::BYTES].iter().enumerate() {
            codes[j] = mxfp4::DOUBLED[usize::from(q & 15)];
            codes[j + 16] = mxfp4::DOUBLED[usize::from(q >> 4)];
        }
        return mxfp4::half_scale(b[0]);
    }
    codes.iter_mut().zip(&b[2..q8_0::BYTES]).for_each(|(c, q)| *c = *q as i8);
    half(b, 0)
}

/// A super-block. In group `g` of 16: `w = d * scales[g] * codes - dmin * minima[g]`, the last term only in formats that
/// have it.
pub struct SuperBlock {
    pub codes: [i8; SUPER],
    pub scales: [i16; 16],
    pub minima: [i16; 16],
    pub d: f32,
    pub dmin: f32,
}

impl SuperBlock {
    pub const EMPTY: Self =
        SuperBlock { codes: [0; SUPER], scales: [0; 16], minima: [0; 16], d: 0.0, dmin: 0.0 };
}

/// Formats whose groups have a minimum of their own.
pub fn has_minima(format: BlockFormat) -> bool {
    matches!(format, BlockFormat::Q2K | BlockFormat::Q4K | BlockFormat::Q5K)
}

pub fn super_block(format: BlockFormat, b: &[u8], out: &mut SuperBlock) {
    match format {
        BlockFormat::Q2K => q2_k(b, out),
        BlockFormat::Q3K => q3_k(b, out),
        BlockFormat::Q4K => q4_k(b, out),
        BlockFormat::Q5K => q5_k(b, out),
        BlockFormat::Q6K => q6_k(b, out),
        _ => iq2(b, out),
    }
}

fn q2_k(b: &[u8], out: &mut SuperBlock) {
    use k_quants::q2::*;
    (out.d, out.dmin) = (half(b, D), half(b, DMIN));
    for (g, codes) in out.codes.chunks_exact_mut(16).enumerate() {
        let (at, shift) = (QUANTS + 32 * (g / 8) + 16 * (g % 2), 2 * (g % 8 / 2));
        codes.iter_mut().zip(&b[at..at + 16]).for_each(|(c, q)| *c = (q >> shift & 3) as i8);
        out.scales[g] = i16::from(b[SCALES + g] & 15);
        out.minima[g] = i16::from(b[SCALES + g] >> 4);
    }
}

fn q3_k(b: &[u8], out: &mut SuperBlock) {
    use k_quants::q3::*;
    out.d = half(b, D);
    for (g, codes) in out.codes.chunks_exact_mut(32).enumerate() {
        let (at, shift) = (QUANTS + 32 * (g / 4), 2 * (g % 4));
        for ((c, q), h) in codes.iter_mut().zip(&b[at..at + 32]).zip(&b[HIGH..HIGH + 32]) {
            *c = (q >> shift & 3) as i8 + 4 * (h >> g & 1) as i8 - 4;
        }
    }
    out.scales = std::array::from_fn(|g| i16::from(scale(&b[SCALES..], g)));
}

/// Scales and minima of Q4_K and Q5_K.
fn scales_32(sc: &[u8], out: &mut SuperBlock) {
    for g in 0..8 {
        let (s, m) = k_quants::scale_min(sc, g);
        out.scales[2 * g..2 * g + 2].fill(i16::from(s));
        out.minima[2 * g..2 * g + 2].fill(i16::from(m));
    }
}

fn q4_k(b: &[u8], out: &mut SuperBlock) {
    use k_quants::q4::*;
    (out.d, out.dmin) = (half(b, D), half(b, DMIN));
    scales_32(&b[SCALES..], out);
    for (g, codes) in out.codes.chunks_exact_mut(32).enumerate() {
        let (at, shift) = (QUANTS + 32 * (g / 2), 4 * (g % 2));
        codes.iter_mut().zip(&b[at..at + 32]).for_each(|(c, q)| *c = (q >> shift & 15) as i8);
    }
}

fn q5_k(b: &[u8], out: &mut SuperBlock) {
    use k_quants::q5::*;
    (out.d, out.dmin) = (half(b, D), half(b, DMIN));
    scales_32(&b[SCALES..], out);
    for (g, codes) in out.codes.chunks_exact_mut(32).enumerate() {
        let (at, shift) = (QUANTS + 32 * (g / 2), 4 * (g % 2));
        for ((c, q), h) in codes.iter_mut().zip(&b[at..at + 32]).zip(&b[HIGH..HIGH + 32]) {
            *c = (q >> shift & 15) as i8 + 16 * (h >> g & 1) as i8;
        }
    }
}

fn q6_k(b: &[u8], out: &mut SuperBlock) {
    use k_quants::q6::*;
    out.d = half(b, D);
    for (g, codes) in out.codes.chunks_exact_mut(32).enumerate() {
        let (h, k) = (g / 4, g % 4);
        let (at, high) = (LOW + 64 * h + 32 * (k & 1), HIGH + 32 * h);
        for ((c, q), u) in codes.iter_mut().zip(&b[at..at + 32]).zip(&b[high..high + 32]) {
            *c = ((q >> (4 * (k / 2)) & 15) | (u >> (2 * k) & 3) << 4) as i8 - 32;
        }
    }
    out.scales = std::array::from_fn(|g| i16::from(b[SCALES + g] as i8));
}

fn iq2(b: &[u8], out: &mut SuperBlock) {
    out.d = half(b, iq2_xxs::D) * 0.125;
    for (g, group) in b[iq2_xxs::GROUPS..iq2_xxs::BYTES].chunks_exact(8).enumerate() {
        let tail = u32::from_le_bytes([group[4], group[5], group[6], group[7]]);
        for (v, index) in group[..4].iter().enumerate() {
            let grid = iq2_xxs::GRID[usize::from(*index)].to_le_bytes();
            let signs = iq2_xxs::signs(tail >> (7 * v));
            for (k, m) in grid.into_iter().enumerate() {
                out.codes[32 * g + 8 * v + k] = if signs >> k & 1 == 1 { -(m as i8) } else { m as i8 };
            }
        }
        out.scales[2 * g..2 * g + 2].fill((2 * (tail >> 28) + 1) as i16);
    }
}
