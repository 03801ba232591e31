//! Section 4, "Compressor": one row out of every window of tokens. The accumulators are the reference's; the projections
//! are ours.

use ds4_model::backend::Result;
use ds4_model::weights::{Compressor, Layer};
use ds4_model::{KvLayout, LayerKind};
use ds4_reference::compressor::{self, Kind};
use ds4_reference::math;

use crate::Cpu;

impl Cpu {
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
        let channels = weights.kv.rows();
        let ratio = weights.ape.len() / channels;
        let overlap = layer.kind == LayerKind::Indexed;
        let freqs = self.freqs(layer.kind).to_vec();

        let rows = self.batch.len();
        let (a, z) = (&mut self.scratch.a[..rows * channels], &mut self.scratch.b[..rows * channels]);
        self.worker.multiply(&weights.kv, &h[..rows * hidden], a)?;
        self.worker.multiply(&weights.gate, &h[..rows * hidden], z)?;

        let accs = ds4_model::kv::accumulators(layer.kind);
        let acc_bytes = acc_at..acc_at + accs * 3 * width * 4;
        let mut row = vec![0f32; width];
        for segment in self.batch.segments() {
            let mut acc = compressor::floats(&self.state.frontier(segment.slot)[acc_bytes.clone()]);
            for t in 0..segment.len {
                let pos = segment.pos + t;
                let at = (segment.row + t) * channels;
                let (a, z) = (&a[at..at + channels], &mut z[at..at + channels]);
                z.iter_mut().zip(&weights.ape[pos % ratio * channels..]).for_each(|(z, p)| *z += p);
                let (current, next) = acc.split_at_mut(3 * width);
                if overlap {
                    compressor::split(current, width).add(&a[width..], &z[width..]);
                    compressor::split(next, width).add(&a[..width], &z[..width]);
                } else {
                    compressor::split(current, width).add(a, z);
                }
                if !(pos + 1).is_multiple_of(ratio) {
                    continue;
                }
                let w = pos / ratio;
                compressor::split(current, width).mean(&mut row);
                if overlap {
                    current.copy_from_slice(next);
                    next.fill(0.0);
                } else {
                    current.fill(0.0);
                }
                math::rms_norm(&mut row, &weights.norm, eps);
                math::rope_tail(&mut row, w * ratio, &freqs, false);
                if qat {
                    compressor::round(&mut row, which, &layout);
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
            compressor::store(&acc, &mut self.state.frontier_mut(segment.slot)[acc_bytes.clone()]);
        }
        Ok(())
    }
}
