//! The kernels in plain Rust: the readable truth.

use ds4_gguf::BlockFormat;

use super::unpack::{self, SuperBlock};
use super::{LANES, join};
use crate::quant::Quantised;

const F32_LANES: usize = 32;

fn f32(a: &[f32], b: &[f32]) -> f32 {
    let mut acc = [0f32; F32_LANES];
    let (ca, cb) = (a.chunks_exact(F32_LANES), b.chunks_exact(F32_LANES));
    let tail: f32 = ca.remainder().iter().zip(cb.remainder()).map(|(x, y)| x * y).sum();
    for (x, y) in ca.zip(cb) {
        for i in 0..F32_LANES {
            acc[i] += x[i] * y[i];
        }
    }
    acc.iter().sum::<f32>() + tail
}

fn axpy(y: &mut [f32], w: f32, x: &[f32]) {
    y.iter_mut().zip(x).for_each(|(y, x)| *y += w * x);
}

/// A weight row in blocks of 32.
pub fn blocks32(format: BlockFormat, w: &[u8], x: Quantised<'_>) -> f32 {
    let mut lanes = [0f32; LANES];
    let mut codes = [0i8; 32];
    for (b, block) in w.chunks_exact(format.block_bytes()).enumerate() {
        let d = unpack::block32(format, block, &mut codes);
        let dot: i32 = codes.iter().zip(&x.q[32 * b..]).map(|(w, q)| i32::from(*w) * i32::from(*q)).sum();
        lanes[b % LANES] += (d * x.scales[b]) * dot as f32;
    }
    join(lanes)
}

/// A weight row in super-blocks.
pub fn super_blocks(format: BlockFormat, w: &[u8], x: Quantised<'_>) -> f32 {
    let mut lanes = [0f32; LANES];
    let mut block = SuperBlock::EMPTY;
    for (b, bytes) in w.chunks_exact(format.block_bytes()).enumerate() {
        unpack::super_block(format, bytes, &mut block);
        let (mut scaled, mut minima) = (0i32, 0i32);
        for (g, codes) in block.codes.chunks_exact(16).enumerate() {
            let at = 16 * b + g;
            let dot: i32 =
                codes.iter().zip(&x.q[16 * at..]).map(|(w, q)| i32::from(*w) * i32::from(*q)).sum();
            scaled += i32::from(block.scales[g]) * dot;
            minima += i32::from(block.minima[g]) * i32::from(x.sums[at]);
        }
        lanes[b % LANES] += if unpack::has_minima(format) {
            x.scales[b] * (block.d * scaled as f32 - block.dmin * minima as f32)
        } else {
            (block.d * x.scales[b]) * scaled as f32
        };
    }
    join(lanes)
}

fn f32_tile(w: [&[f32]; super::F32_ROWS], x: [&[f32]; super::F32_TOKENS]) -> super::F32Out {
    w.map(|w| x.map(|x| f32(x, w)))
}

fn weighted(p: &[f32], stride: usize, v: &[f32], d: usize, o: &mut [f32]) {
    for (p, o) in p.chunks(stride).zip(o.chunks_exact_mut(d)) {
        for (p, v) in p.iter().zip(v.chunks_exact(d)) {
            axpy(o, *p, v);
        }
    }
}

fn half(bytes: &[u8], out: &mut [f32]) {
    out.iter_mut().enumerate().for_each(|(i, o)| *o = unpack::half(bytes, 2 * i));
}

fn row(format: BlockFormat, w: &[u8], x: Quantised<'_>) -> f32 {
    if format.block_len() == 32 { blocks32(format, w, x) } else { super_blocks(format, w, x) }
}

pub const KERNELS: super::Kernels = super::Kernels {
    name: "portable",
    f32,
    f32_tile,
    weighted,
    exp: |x, top| super::exp_all(x, top),
    swiglu: |a, b, clamp, gate| super::swiglu_all(a, b, clamp, gate),
    half,
    decode_main: |layout, bytes, row| layout.decode_main(bytes, row),
    decode_index: |layout, bytes, row| layout.decode_index(bytes, row),
    row,
    tiles: None,
};
