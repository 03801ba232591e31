//! Inner products of weight rows with activation rows: f32 for exact mode, and weight blocks against 8-bit activations.
//!
//! # The sum, the same on every instruction set
//!
//! A weight row is cut into its blocks. A block's value is a sum of integers, exact, turned to f32 once and scaled with
//! the weight's `d` and the activation's `s`, without fused multiply-adds:
//!
//! - blocks of 32 and signed super-blocks: `(d * s) * dot`
//! - super-blocks with minima: `s * (d * scaled - dmin * minima)`
//!
//! The value of block `b` is added to lane `b % 16`; the lanes are joined in halves ([`join`]). So 8-bit logits are equal
//! bit for bit on every machine, whatever the tile. Exact mode's f32 sums have a fixed order too, but fused or not as the
//! machine has it.
//!
//! `unpack` and `portable` are the readable truth; which set runs is decided once, when the backend starts.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod portable;
mod unpack;

use ds4_gguf::BlockFormat;
use ds4_model::KvLayout;

use crate::quant::{Activations, Quantised};

/// Lanes that block values are summed in.
const LANES: usize = 16;

/// Joins the lanes of a sum: `i` with `i + 8`, then `i + 4`, `i + 2`, `i + 1`.
fn join(mut lanes: [f32; LANES]) -> f32 {
    for half in [8, 4, 2, 1] {
        for i in 0..half {
            lanes[i] += lanes[i + half];
        }
    }
    lanes[0]
}

/// Weight rows that a tile takes at once.
pub const PANEL_ROWS: usize = 8;
/// Activation rows that a tile takes at once.
pub const TILE_TOKENS: usize = 16;

/// Weight rows of one format, unpacked for many activation rows.
#[derive(Default)]
pub struct Panel {
    /// `[PANEL_ROWS, cols]` signed codes.
    codes: Vec<i8>,
    /// `[PANEL_ROWS, cols / 16]` integer scales of groups.
    scales: Vec<i32>,
    /// `[PANEL_ROWS, cols / 32]` minima of two groups each, as two i16.
    minima: Vec<i32>,
    /// `[PANEL_ROWS, cols / 32]`, per block: scales, and what the activations' offset of 128 adds.
    d: Vec<f32>,
    dmin: Vec<f32>,
    offset: Vec<i32>,
}

impl Panel {
    fn with_cols(cols: usize) -> Self {
        let n = PANEL_ROWS * cols;
        Panel {
            codes: vec![0; n],
            scales: vec![0; n / 16],
            minima: vec![0; n / 32],
            d: vec![0.0; n / 32],
            dmin: vec![0.0; n / 32],
            offset: vec![0; n / 32],
        }
    }

    fn bytes(cols: usize) -> u64 {
        (PANEL_ROWS * cols) as u64 + 12 * (PANEL_ROWS * cols / 16) as u64
    }
}

/// Activation rows side by side, [`TILE_TOKENS`] to a tile.
#[derive(Default)]
pub struct Packed {
    /// `[tile, cols / 4, token, 4]`, with 128 added.
    q: Vec<u8>,
    /// `[tile, block, token]`
    scales: Vec<f32>,
    /// `[tile, cols / 32, token]` sums of two groups each, as two i16.
    sums: Vec<i32>,
}

/// What one thread's tiles need, allocated once.
#[derive(Default)]
pub struct TileScratch {
    pub panel: Panel,
    pub packed: Packed,
    cols: usize,
}

/// Bytes of packed codes that stay in a core's second cache beside the panel.
const PACK: usize = 512 << 10;

impl TileScratch {
    fn most_tiles(cols: usize) -> usize {
        (PACK / (TILE_TOKENS * cols.max(1))).clamp(1, 8)
    }

    /// For rows of up to `cols` values.
    pub fn with_cols(cols: usize) -> Self {
        // Narrower rows come in more tiles, so the room is that of the largest product.
        let values = PACK.max(TILE_TOKENS * cols);
        TileScratch {
            panel: Panel::with_cols(cols),
            packed: Packed { q: vec![0; values], scales: vec![0.0; values / 32], sums: vec![0; values / 32] },
            cols,
        }
    }

    pub fn bytes(cols: usize) -> u64 {
        let values = PACK.max(TILE_TOKENS * cols);
        Panel::bytes(cols) + values as u64 + 8 * (values / 32) as u64
    }

    /// Tiles of rows of `cols` values that fit; 0 where such rows do not.
    pub fn tiles(&self, cols: usize) -> usize {
        if cols > self.cols { 0 } else { Self::most_tiles(cols) }
    }
}

/// The values of one tile, `[row][token]`.
pub type TileOut = [[f32; TILE_TOKENS]; PANEL_ROWS];

/// Products of many rows with many rows.
#[derive(Clone, Copy)]
pub struct Tiles {
    /// Packs up to [`TILE_TOKENS`] activation rows as tile `t`.
    pub pack: fn(&mut Packed, t: usize, &[Quantised<'_>]),
    /// Unpacks up to [`PANEL_ROWS`] weight rows.
    pub unpack: fn(BlockFormat, &[&[u8]], cols: usize, &mut Panel),
    /// The panel times tile `t`.
    pub multiply: fn(BlockFormat, cols: usize, &Panel, &Packed, t: usize, &mut TileOut),
}

/// Rows of exact mode's tile.
pub const F32_ROWS: usize = 4;
pub const F32_TOKENS: usize = 2;
/// The values of one of its tiles, `[row][token]`.
pub type F32Out = [[f32; F32_TOKENS]; F32_ROWS];

pub type F32Tile = fn([&[f32]; F32_ROWS], [&[f32]; F32_TOKENS]) -> F32Out;

/// The kernels of one instruction set.
#[derive(Clone, Copy)]
pub struct Kernels {
    pub name: &'static str,
    /// Inner product.
    pub f32: fn(&[f32], &[f32]) -> f32,
    /// Inner products of every pair, each as [`Kernels::f32`] gives it.
    pub f32_tile: F32Tile,
    /// `o [heads, d] += p [heads, n] v [n, d]`, rows of `v` in order; `p` has a stride.
    pub weighted: fn(p: &[f32], stride: usize, v: &[f32], d: usize, o: &mut [f32]),
    /// `x = e^(x - top)`, and their sum.
    pub exp: fn(x: &mut [f32], top: f32) -> f32,
    /// `a = swiglu(a, b) * gate` with a clamp.
    pub swiglu: fn(a: &mut [f32], b: &[f32], clamp: f32, gate: f32),
    /// A row of f16 values as f32.
    pub half: fn(&[u8], &mut [f32]),
    /// [`KvLayout::decode_main`].
    pub decode_main: fn(&KvLayout, &[u8], &mut [f32]),
    /// [`KvLayout::decode_index`].
    pub decode_index: fn(&KvLayout, &[u8], &mut [f32]),
    /// One weight row with one activation row.
    pub row: fn(BlockFormat, &[u8], Quantised<'_>) -> f32,
    pub tiles: Option<Tiles>,
}

impl Kernels {
    pub const PORTABLE: Kernels = portable::KERNELS;

    /// The best that this machine has.
    pub fn detect() -> Self {
        *Self::all().last().unwrap_or(&Self::PORTABLE)
    }

    /// All that this machine has, the best last.
    pub fn all() -> Vec<Self> {
        let mut all = vec![Self::PORTABLE];
        #[cfg(target_arch = "x86_64")]
        {
            if avx2::present() {
                all.push(avx2::KERNELS);
            }
            if avx512::present() {
                all.push(avx512::KERNELS);
            }
        }
        all
    }

    /// How activations have to be quantised for a format; `None`: its products take f32.
    pub fn activations(format: BlockFormat) -> Option<Activations> {
        match format {
            BlockFormat::Q8_0 | BlockFormat::MXFP4 => Some(Activations::Blocks32),
            BlockFormat::Q2K
            | BlockFormat::Q3K
            | BlockFormat::Q4K
            | BlockFormat::Q5K
            | BlockFormat::Q6K
            | BlockFormat::IQ2XXS => Some(Activations::Blocks256),
            BlockFormat::F32 | BlockFormat::F16 | BlockFormat::BF16 | BlockFormat::I32 => None,
        }
    }
}

/// `e^x` for `x <= 0`, to about 2e-7, in operations that every instruction set rounds alike.
#[inline(always)]
fn exp_negative(x: f32) -> f32 {
    // x = n ln 2 + r with |r| <= ln 2 / 2; ln 2 in two parts, so that n times the first is exact.
    const SHIFT: f32 = 12_582_912.0;
    let x = if x < -87.0 { -87.0 } else { x };
    let shifted = x * std::f32::consts::LOG2_E + SHIFT;
    let n = shifted - SHIFT;
    let r = (x - n * (355.0 / 512.0)) + n * 2.121_944_4e-4;
    // Taylor's series; the first term left out is r^8 / 40320 < 6e-9.
    let mut p = 1.0 / 5040.0;
    p = p * r + 1.0 / 720.0;
    p = p * r + 1.0 / 120.0;
    p = p * r + 1.0 / 24.0;
    p = p * r + 1.0 / 6.0;
    p = p * r + 0.5;
    p = p * r + 1.0;
    p = p * r + 1.0;
    let e = f32::from_bits((shifted.to_bits() << 23).wrapping_add(127 << 23));
    if x <= -87.0 { 0.0 } else { p * e }
}

#[inline(always)]
fn exp_all(x: &mut [f32], top: f32) -> f32 {
    let mut lanes = [0f32; LANES];
    let mut chunks = x.chunks_exact_mut(LANES);
    for x in &mut chunks {
        for i in 0..LANES {
            x[i] = exp_negative(x[i] - top);
            lanes[i] += x[i];
        }
    }
    for (x, lane) in chunks.into_remainder().iter_mut().zip(&mut lanes) {
        *x = exp_negative(*x - top);
        *lane += *x;
    }
    join(lanes)
}

/// `silu(min(a, clamp)) * clamp(b, -clamp, clamp) * gate`; a clamp of 0 clamps nothing.
#[inline(always)]
fn swiglu_all(a: &mut [f32], b: &[f32], clamp: f32, gate: f32) {
    let limit = if clamp > 0.0 { clamp } else { f32::INFINITY };
    for (a, b) in a.iter_mut().zip(b) {
        let g = if *a > limit { limit } else { *a };
        let u = if *b > limit { limit } else { *b };
        let u = if u < -limit { -limit } else { u };
        // 1 / (1 + e^-g), with an argument that is never positive.
        let e = exp_negative(-g.abs());
        let sigmoid = if g >= 0.0 { 1.0 } else { e } / (1.0 + e);
        *a = g * sigmoid * u * gate;
    }
}

#[cfg(test)]
mod tests;
