//! The kernels in plain Rust.

use ds4_gguf::{iq2_xxs, k_quants, q8_0};
use half::f16;

use super::Blocks;
use crate::quant::Quantised;

const LANES: usize = 32;

pub fn f32(a: &[f32], b: &[f32]) -> f32 {
    let mut acc = [0f32; LANES];
    let (ca, cb) = (a.chunks_exact(LANES), b.chunks_exact(LANES));
    let tail: f32 = ca.remainder().iter().zip(cb.remainder()).map(|(x, y)| x * y).sum();
    for (x, y) in ca.zip(cb) {
        for i in 0..LANES {
            acc[i] += x[i] * y[i];
        }
    }
    acc.iter().sum::<f32>() + tail
}

pub fn axpy(y: &mut [f32], w: f32, x: &[f32]) {
    y.iter_mut().zip(x).for_each(|(y, x)| *y += w * x);
}

pub const fn blocks<const N: usize>() -> Blocks<N> {
    Blocks { q8_0, q2_k, q4_k, iq2_xxs: iq2_xxs_dot }
}

fn half(b: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([b[at], b[at + 1]]).to_f32()
}

fn q8_0<const N: usize>(w: &[u8], x: [Quantised<'_>; N]) -> [f32; N] {
    let mut sum = [0f32; N];
    for (i, b) in w.chunks_exact(q8_0::BYTES).enumerate() {
        let d = half(b, 0);
        for (sum, x) in sum.iter_mut().zip(&x) {
            let q = &x.q[32 * i..32 * (i + 1)];
            let dot: i32 = b[2..].iter().zip(q).map(|(w, q)| i32::from(*w as i8) * i32::from(*q)).sum();
            *sum += d * x.scales[i] * dot as f32;
        }
    }
    sum
}

fn q2_k<const N: usize>(w: &[u8], x: [Quantised<'_>; N]) -> [f32; N] {
    use k_quants::q2::*;
    let mut sum = [0f32; N];
    for (i, b) in w.chunks_exact(BYTES).enumerate() {
        let (d, dmin) = (half(b, D), half(b, DMIN));
        for (sum, x) in sum.iter_mut().zip(&x) {
            let (q, sums) = (&x.q[256 * i..256 * (i + 1)], &x.sums[16 * i..16 * (i + 1)]);
            let (mut scaled, mut mins) = (0, 0);
            for g in 0..16 {
                let (at, shift) = (QUANTS + 32 * (g / 8) + 16 * (g % 2), 2 * (g % 8 / 2));
                let s = b[SCALES + g];
                let dot: i32 = b[at..at + 16]
                    .iter()
                    .zip(&q[16 * g..])
                    .map(|(w, q)| i32::from(w >> shift & 3) * i32::from(*q))
                    .sum();
                scaled += i32::from(s & 15) * dot;
                mins += i32::from(s >> 4) * i32::from(sums[g]);
            }
            *sum += x.scales[i] * (d * scaled as f32 - dmin * mins as f32);
        }
    }
    sum
}

fn q4_k<const N: usize>(w: &[u8], x: [Quantised<'_>; N]) -> [f32; N] {
    use k_quants::q4::*;
    let mut sum = [0f32; N];
    for (i, b) in w.chunks_exact(BYTES).enumerate() {
        let (d, dmin) = (half(b, D), half(b, DMIN));
        for (sum, x) in sum.iter_mut().zip(&x) {
            let (q, sums) = (&x.q[256 * i..256 * (i + 1)], &x.sums[16 * i..16 * (i + 1)]);
            let (mut scaled, mut mins) = (0, 0);
            for g in 0..8 {
                let (at, shift) = (QUANTS + 32 * (g / 2), 4 * (g % 2));
                let (s, m) = k_quants::scale_min(&b[SCALES..], g);
                let dot: i32 = b[at..at + 32]
                    .iter()
                    .zip(&q[32 * g..])
                    .map(|(w, q)| i32::from(w >> shift & 15) * i32::from(*q))
                    .sum();
                scaled += i32::from(s) * dot;
                mins += i32::from(m) * (i32::from(sums[2 * g]) + i32::from(sums[2 * g + 1]));
            }
            *sum += x.scales[i] * (d * scaled as f32 - dmin * mins as f32);
        }
    }
    sum
}

fn iq2_xxs_dot<const N: usize>(w: &[u8], x: [Quantised<'_>; N]) -> [f32; N] {
    let mut sum = [0f32; N];
    for (i, b) in w.chunks_exact(iq2_xxs::BYTES).enumerate() {
        let d = half(b, iq2_xxs::D) * 0.125;
        for (sum, x) in sum.iter_mut().zip(&x) {
            let q = &x.q[256 * i..256 * (i + 1)];
            let mut total = 0;
            for (g, q) in b[iq2_xxs::GROUPS..].chunks_exact(8).zip(q.chunks_exact(32)) {
                let tail = u32::from_le_bytes([g[4], g[5], g[6], g[7]]);
                let mut dot = 0;
                for (v, q) in q.chunks_exact(8).enumerate() {
                    let grid = iq2_xxs::GRID[g[v] as usize].to_le_bytes();
                    let signs = iq2_xxs::signs(tail >> (7 * v));
                    for k in 0..8 {
                        let p = i32::from(grid[k]) * i32::from(q[k]);
                        dot += if signs >> k & 1 == 1 { -p } else { p };
                    }
                }
                total += (2 * (tail >> 28) + 1) as i32 * dot;
            }
            *sum += d * x.scales[i] * total as f32;
        }
    }
    sum
}
