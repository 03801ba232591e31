//! Section 4, "Compressor": one row out of every window of tokens.
//!
//! A window's softmax over its tokens is kept as a running maximum, sum and weighted sum per channel, updated token by
//! token. So an unfinished window is three numbers a channel, and the result does not depend on how tokens are chunked.

use ds4_model::backend::Result;
use ds4_model::weights::{Compressor, Layer};
use ds4_model::{KvLayout, LayerKind, RowFormat, rounding};

use crate::{Reference, math};

/// Which rows are made.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Main,
    Index,
}

/// Running softmax-weighted mean, per channel. `sum` is 0 exactly when nothing was added.
pub struct Accumulator<'a> {
    max: &'a mut [f32],
    sum: &'a mut [f32],
    weighted: &'a mut [f32],
}

impl Accumulator<'_> {
    /// Takes one token's projections `a` and scores `z` in.
    pub fn add(&mut self, a: &[f32], z: &[f32]) {
        for i in 0..a.len() {
            if self.sum[i] == 0.0 {
                (self.max[i], self.sum[i], self.weighted[i]) = (z[i], 1.0, a[i]);
                continue;
            }
            let max = self.max[i].max(z[i]);
            let (old, new) = ((self.max[i] - max).exp(), (z[i] - max).exp());
            self.max[i] = max;
            self.sum[i] = self.sum[i] * old + new;
            self.weighted[i] = self.weighted[i] * old + a[i] * new;
        }
    }

    pub fn mean(&self, out: &mut [f32]) {
        for ((o, w), s) in out.iter_mut().zip(&*self.weighted).zip(&*self.sum) {
            *o = w / s;
        }
    }
}

/// The accumulator in `[max, sum, weighted][width]`.
pub fn split(acc: &mut [f32], width: usize) -> Accumulator<'_> {
    let (max, rest) = acc.split_at_mut(width);
    let (sum, weighted) = rest.split_at_mut(width);
    Accumulator { max, sum, weighted }
}

impl Reference {
    /// Takes all rows of the batch in, and writes the rows that they complete.
    pub(crate) fn compress_rows(
        &mut self,
        layer: &Layer<Self>,
        weights: &Compressor<Self>,
        h: &[f32],
        which: Kind,
    ) -> Result<()> {
        let setup = self.setup()?;
        let (qat, eps, hidden) = (setup.numerics.qat, setup.hyper.rms_eps, setup.hyper.hidden);
        let layout = setup.layout.clone();
        let kv = layout.layer(layer.index).clone();
        let (width, acc_at, rows_at, row_bytes) = match which {
            Kind::Main => (layout.head_dim, kv.acc_at, kv.rows_at, layout.main_row_bytes),
            Kind::Index => (layout.index_dim, kv.index_acc_at, kv.index_at, layout.index_row_bytes),
        };
        let ratio = weights.ape.len() / weights.kv.rows();
        let channels = weights.kv.rows();
        let overlap = layer.kind == LayerKind::Indexed;
        let freqs = self.freqs(layer.kind).to_vec();

        let rows = self.batch.len();
        let mut a = vec![0f32; rows * channels];
        let mut z = vec![0f32; rows * channels];
        weights.kv.multiply(&h[..rows * hidden], &mut a)?;
        weights.gate.multiply(&h[..rows * hidden], &mut z)?;

        let accs = ds4_model::kv::accumulators(layer.kind);
        let acc_bytes = acc_at..acc_at + accs * 3 * width * 4;
        for segment in self.batch.segments().to_vec() {
            let mut acc = floats(&self.state.frontier(segment.slot)[acc_bytes.clone()]);
            for t in 0..segment.len {
                let pos = segment.pos + t;
                let at = (segment.row + t) * channels;
                let a = &a[at..at + channels];
                let z: Vec<f32> = z[at..at + channels]
                    .iter()
                    .zip(&weights.ape[pos % ratio * channels..])
                    .map(|(z, p)| z + p)
                    .collect();
                let (current, next) = acc.split_at_mut(3 * width);
                if overlap {
                    // This window's row takes the second half of each token; the next window's row the first.
                    split(current, width).add(&a[width..], &z[width..]);
                    split(next, width).add(&a[..width], &z[..width]);
                } else {
                    split(current, width).add(a, &z);
                }
                if (pos + 1) % ratio != 0 {
                    continue;
                }
                let w = pos / ratio;
                let mut row = vec![0f32; width];
                split(current, width).mean(&mut row);
                if overlap {
                    current.copy_from_slice(next);
                    next.fill(0.0);
                } else {
                    current.fill(0.0);
                }
                math::rms_norm(&mut row, &weights.norm, eps);
                math::rope_tail(&mut row, w * ratio, &freqs, false);
                if qat {
                    round(&mut row, which, &layout);
                }
                let (index, within) = KvLayout::locate(layer.kind, w);
                let page = self.state.page_of(segment.slot, index)?;
                let at = rows_at + within * row_bytes;
                let out = &mut self.state.page_mut(page)[at..at + row_bytes];
                match which {
                    Kind::Main => layout.encode_main(&row, out),
                    Kind::Index => layout.encode_index(&row, out),
                }
            }
            store(&acc, &mut self.state.frontier_mut(segment.slot)[acc_bytes.clone()]);
        }
        Ok(())
    }
}

/// The rounding of section 7 on a finished row. Packed storage rounds as it stores, so only the rotation is left.
pub fn round(row: &mut [f32], which: Kind, layout: &KvLayout) {
    match which {
        Kind::Main => {
            if layout.format == RowFormat::F32 {
                rounding::fp8_round(&mut row[..layout.head_dim - layout.rope_dim]);
            }
        }
        Kind::Index => {
            rounding::hadamard(row);
            if layout.format == RowFormat::F32 {
                rounding::fp4_round(row);
            }
        }
    }
}

/// Little-endian f32 values.
pub fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
}

/// The reverse of [`floats`].
pub fn store(values: &[f32], bytes: &mut [u8]) {
    for (b, v) in bytes.chunks_exact_mut(4).zip(values) {
        b.copy_from_slice(&v.to_le_bytes());
    }
}
