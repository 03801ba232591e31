//! What a session remembers, as bytes: pages of compressed rows, and the frontier.
//!
//! *Pages.* A page holds what 128 consecutive positions add for ever, in all layers of the slice: per ratio-4 layer
//! 32 compressed rows and 32 indexer rows, per ratio-128 layer one compressed row. Rows never change once written, so
//! sessions that share a prefix share its pages.
//!
//! *Frontier.* What moves with the position: per layer a ring of the last `window` raw rows, and the accumulators of
//! the compressor's unfinished windows. A checkpoint is a copy of it plus the list of pages.
//!
//! The layout is the same on every backend, so pages and frontiers travel between devices and to disk as they are.

use half::f16;

use crate::hyper::{HyperParams, LayerKind};
use crate::rounding::{self, FP4_BLOCK, FP8_BLOCK};
use crate::slice::LayerSlice;

/// Positions that one page covers: the least common multiple of the ratios.
pub const PAGE_TOKENS: usize = 128;

/// Regions start at multiples of this, so that devices can read them with wide loads.
const ALIGN: usize = 16;

/// How rows are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RowFormat {
    /// As computed. For `plain`, and to compare programs exactly.
    F32,
    /// In the precision that qat rounds to: FP8 E4M3 with a scale per 64 channels, f16 rotary part, FP4 indexer rows.
    Packed,
}

impl RowFormat {
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Packed => "packed",
        }
    }

    /// Bytes of one raw or compressed row: `nope` codes, their scales, the rotary part, padded to 8.
    pub fn main_row_bytes(self, hp: &HyperParams) -> usize {
        match self {
            Self::F32 => hp.head_dim * 4,
            Self::Packed => (hp.nope_dim() + hp.nope_dim() / FP8_BLOCK + 2 * hp.rope_dim).next_multiple_of(8),
        }
    }

    /// Bytes of one indexer row: codes, then their scales.
    pub fn index_row_bytes(self, hp: &HyperParams) -> usize {
        match self {
            Self::F32 => hp.index_dim * 4,
            Self::Packed => (hp.index_dim / 2 + hp.index_dim / FP4_BLOCK).next_multiple_of(4),
        }
    }
}

/// Where one layer's rows lie in a page and in a frontier. Offsets in bytes.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerKv {
    pub kind: LayerKind,
    /// In a page: compressed rows.
    pub rows_at: usize,
    /// In a page: indexer rows.
    pub index_at: usize,
    /// In a frontier: ring of raw rows, row of position `p` at `p % window`.
    pub ring_at: usize,
    /// In a frontier: f32 accumulators of the main compressor, `[1 or 2][max, sum, weighted sum][d]`.
    pub acc_at: usize,
    /// In a frontier: the same for the indexer's compressor, `[2][3][index_dim]`.
    pub index_acc_at: usize,
}

/// Byte layout of pages and frontiers for one slice. Pure arithmetic: the memory plan and every backend use it.
#[derive(Clone, Debug, PartialEq)]
pub struct KvLayout {
    pub format: RowFormat,
    pub slice: LayerSlice,
    pub head_dim: usize,
    pub rope_dim: usize,
    pub index_dim: usize,
    pub window: usize,
    pub main_row_bytes: usize,
    pub index_row_bytes: usize,
    /// One entry per layer of the slice.
    pub layers: Vec<LayerKv>,
    pub page_bytes: usize,
    pub frontier_bytes: usize,
}

impl KvLayout {
    pub fn new(hp: &HyperParams, slice: LayerSlice, format: RowFormat) -> Self {
        let main_row_bytes = format.main_row_bytes(hp);
        let index_row_bytes = format.index_row_bytes(hp);
        let (mut page, mut frontier) = (0usize, 0usize);
        let take = |cursor: &mut usize, bytes: usize| {
            let at = *cursor;
            *cursor = (at + bytes).next_multiple_of(ALIGN);
            at
        };
        let layers = hp.layers[slice.layers()]
            .iter()
            .map(|&kind| {
                let rows = kind.ratio().map_or(0, |r| PAGE_TOKENS / r);
                let index_rows = if kind == LayerKind::Indexed { rows } else { 0 };
                let accs = accumulators(kind);
                let index_accs = if kind == LayerKind::Indexed { accs } else { 0 };
                LayerKv {
                    kind,
                    rows_at: take(&mut page, rows * main_row_bytes),
                    index_at: take(&mut page, index_rows * index_row_bytes),
                    ring_at: take(&mut frontier, hp.window * main_row_bytes),
                    acc_at: take(&mut frontier, accs * 3 * hp.head_dim * 4),
                    index_acc_at: take(&mut frontier, index_accs * 3 * hp.index_dim * 4),
                }
            })
            .collect();
        KvLayout {
            format,
            slice,
            head_dim: hp.head_dim,
            rope_dim: hp.rope_dim,
            index_dim: hp.index_dim,
            window: hp.window,
            main_row_bytes,
            index_row_bytes,
            layers,
            page_bytes: page,
            frontier_bytes: frontier,
        }
    }

    /// The layer's entry, by its index in the model.
    pub fn layer(&self, index: usize) -> &LayerKv {
        &self.layers[index - self.slice.first]
    }

    /// Pages that hold the compressed rows of the first `tokens` positions.
    pub fn pages_for(tokens: usize) -> usize {
        tokens.div_ceil(PAGE_TOKENS)
    }

    /// Page (index in the session's list) and row within the layer's region, of compressed row `w`.
    pub fn locate(kind: LayerKind, w: usize) -> (usize, usize) {
        let per_page = kind.ratio().map_or(1, |r| PAGE_TOKENS / r);
        (w / per_page, w % per_page)
    }

    /// Stores one raw or compressed row of `head_dim` values. In packed form this loses only what qat rounds away,
    /// and the rotary part's digits below f16.
    pub fn encode_main(&self, row: &[f32], out: &mut [u8]) {
        match self.format {
            RowFormat::F32 => encode_f32(row, out),
            RowFormat::Packed => {
                let nope = self.head_dim - self.rope_dim;
                let blocks = nope / FP8_BLOCK;
                let (codes, rest) = out.split_at_mut(nope);
                let (scales, rope) = rest.split_at_mut(blocks);
                for (b, scale) in scales.iter_mut().enumerate() {
                    let r = b * FP8_BLOCK..(b + 1) * FP8_BLOCK;
                    *scale = rounding::fp8_encode_block(&row[r.clone()], &mut codes[r]);
                }
                for (o, v) in rope.chunks_exact_mut(2).zip(&row[nope..]) {
                    o.copy_from_slice(&f16::from_f32(*v).to_le_bytes());
                }
            }
        }
    }

    // Always inlined, so that a backend's vector code has it with its own instruction set.
    #[inline(always)]
    pub fn decode_main(&self, bytes: &[u8], row: &mut [f32]) {
        match self.format {
            RowFormat::F32 => decode_f32(bytes, row),
            RowFormat::Packed => {
                let nope = self.head_dim - self.rope_dim;
                let blocks = nope / FP8_BLOCK;
                let (codes, rest) = bytes.split_at(nope);
                let (scales, rope) = rest.split_at(blocks);
                let (plain, rotary) = row.split_at_mut(nope);
                for ((c, v), s) in
                    codes.chunks_exact(FP8_BLOCK).zip(plain.chunks_exact_mut(FP8_BLOCK)).zip(scales)
                {
                    rounding::fp8_decode_block(c, *s, v);
                }
                for (v, b) in rotary.iter_mut().zip(rope.chunks_exact(2)) {
                    *v = f16::from_le_bytes([b[0], b[1]]).to_f32();
                }
            }
        }
    }

    /// Stores one indexer row of `index_dim` values (already rotated by Hadamard where the mode asks for it).
    pub fn encode_index(&self, row: &[f32], out: &mut [u8]) {
        match self.format {
            RowFormat::F32 => encode_f32(row, out),
            RowFormat::Packed => {
                let (codes, scales) = out.split_at_mut(self.index_dim / 2);
                for ((x, c), s) in
                    row.chunks_exact(FP4_BLOCK).zip(codes.chunks_exact_mut(FP4_BLOCK / 2)).zip(scales)
                {
                    *s = rounding::fp4_encode_block(x, c);
                }
            }
        }
    }

    // Always inlined, so that a backend's vector code has it with its own instruction set.
    #[inline(always)]
    pub fn decode_index(&self, bytes: &[u8], row: &mut [f32]) {
        match self.format {
            RowFormat::F32 => decode_f32(bytes, row),
            RowFormat::Packed => {
                let (codes, scales) = bytes.split_at(self.index_dim / 2);
                for ((x, c), s) in
                    row.chunks_exact_mut(FP4_BLOCK).zip(codes.chunks_exact(FP4_BLOCK / 2)).zip(scales)
                {
                    rounding::fp4_decode_block(c, *s, x);
                }
            }
        }
    }
}

/// Unfinished windows that a compressor holds: ratio 4 overlaps, so the next row has already begun.
pub fn accumulators(kind: LayerKind) -> usize {
    match kind {
        LayerKind::Window => 0,
        LayerKind::Indexed => 2,
        LayerKind::Pooled => 1,
    }
}

fn encode_f32(row: &[f32], out: &mut [u8]) {
    for (o, v) in out.chunks_exact_mut(4).zip(row) {
        o.copy_from_slice(&v.to_le_bytes());
    }
}

#[inline(always)]
fn decode_f32(bytes: &[u8], row: &mut [f32]) {
    for (v, b) in row.iter_mut().zip(bytes.chunks_exact(4)) {
        *v = f32::from_le_bytes([b[0], b[1], b[2], b[3]]);
    }
}
