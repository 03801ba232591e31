//! Section 4: projections, attention over window, compressed rows and sink, grouped output projection.

use ds4_model::backend::Result;
use ds4_model::weights::{Attention, Layer};
use ds4_model::{KvLayout, RowFormat, rounding};

use crate::{Reference, math};

impl Reference {
    pub(crate) fn project_q_rows(
        &self,
        layer: &Layer<Self>,
        h: &[f32],
        qr: &mut [f32],
        q: &mut [f32],
    ) -> Result<()> {
        let hp = &self.setup()?.hyper;
        let (rows, w) = (self.batch.len(), &layer.attention);
        let qr = &mut qr[..rows * hp.q_lora];
        let q = &mut q[..rows * hp.q_dim()];
        w.q_a.multiply(&h[..rows * hp.hidden], qr)?;
        qr.chunks_exact_mut(hp.q_lora).for_each(|row| math::rms_norm(row, &w.q_norm, hp.rms_eps));
        w.q_b.multiply(qr, q)?;
        let freqs = self.freqs(layer.kind);
        for (row, pos) in q.chunks_exact_mut(hp.q_dim()).zip(self.batch.positions()) {
            for head in row.chunks_exact_mut(hp.head_dim) {
                math::rms_norm(head, &[], hp.rms_eps);
                math::rope_tail(head, pos, freqs, false);
            }
        }
        Ok(())
    }

    pub(crate) fn project_kv_rows(&self, layer: &Layer<Self>, h: &[f32], kv: &mut [f32]) -> Result<()> {
        let setup = self.setup()?;
        let hp = &setup.hyper;
        let (rows, w) = (self.batch.len(), &layer.attention);
        let kv = &mut kv[..rows * hp.head_dim];
        w.kv.multiply(&h[..rows * hp.hidden], kv)?;
        let freqs = self.freqs(layer.kind);
        let mut stored = vec![0u8; setup.layout.main_row_bytes];
        for (row, pos) in kv.chunks_exact_mut(hp.head_dim).zip(self.batch.positions()) {
            math::rms_norm(row, &w.kv_norm, hp.rms_eps);
            math::rope_tail(row, pos, freqs, false);
            match setup.layout.format {
                RowFormat::F32 if setup.numerics.qat => rounding::fp8_round(&mut row[..hp.nope_dim()]),
                RowFormat::F32 => {}
                RowFormat::Packed => {
                    setup.layout.encode_main(row, &mut stored);
                    setup.layout.decode_main(&stored, row);
                }
            }
        }
        Ok(())
    }

    pub(crate) fn attend_rows(
        &mut self,
        layer: &Layer<Self>,
        q: &[f32],
        kv: &[f32],
        selected: Option<&[i32]>,
        o: &mut [f32],
    ) -> Result<()> {
        let setup = self.setup()?;
        let (hp, layout) = (&setup.hyper, setup.layout.clone());
        let place = layout.layer(layer.index).clone();
        let (d, window) = (hp.head_dim, hp.window);
        let (q_dim, topk) = (hp.q_dim(), hp.index_topk);
        let scale = 1.0 / (d as f32).sqrt();
        let freqs = self.freqs(layer.kind).to_vec();
        let segments = self.batch.segments().to_vec();

        for segment in &segments {
            for t in 0..segment.len {
                let (r, pos) = (segment.row + t, segment.pos + t);
                // The rows that this token sees: raw ones, oldest first, then compressed ones.
                let mut seen: Vec<f32> = Vec::new();
                for p in (pos + 1).saturating_sub(window)..=pos {
                    if p >= segment.pos {
                        let row = segment.row + p - segment.pos;
                        seen.extend_from_slice(&kv[row * d..(row + 1) * d]);
                    } else {
                        let at = place.ring_at + p % window * layout.main_row_bytes;
                        let bytes = &self.state.frontier(segment.slot)[at..at + layout.main_row_bytes];
                        decode_into(&layout, bytes, &mut seen);
                    }
                }
                if let Some(ratio) = layer.kind.ratio() {
                    let all: Vec<usize>;
                    let rows: Vec<usize> = match selected {
                        Some(s) => s[r * topk..(r + 1) * topk]
                            .iter()
                            .take_while(|w| **w >= 0)
                            .map(|w| *w as usize)
                            .collect(),
                        None => {
                            all = (0..(pos + 1) / ratio).collect();
                            all
                        }
                    };
                    for w in rows {
                        let (index, within) = KvLayout::locate(layer.kind, w);
                        let page = self.state.page(self.state.page_of(segment.slot, index)?);
                        let at = place.rows_at + within * layout.main_row_bytes;
                        decode_into(&layout, &page[at..at + layout.main_row_bytes], &mut seen);
                    }
                }
                let heads = q[r * q_dim..(r + 1) * q_dim].chunks_exact(d);
                let outs = o[r * q_dim..(r + 1) * q_dim].chunks_exact_mut(d);
                for ((head, out), sink) in heads.zip(outs).zip(&layer.attention.sinks) {
                    attend_one(head, &seen, *sink, scale, out);
                    math::rope_tail(out, pos, &freqs, true);
                }
            }
        }
        // The window takes the new rows.
        for segment in &segments {
            for t in segment.len.saturating_sub(window)..segment.len {
                let row = &kv[(segment.row + t) * d..(segment.row + t + 1) * d];
                let at = place.ring_at + (segment.pos + t) % window * layout.main_row_bytes;
                layout.encode_main(
                    row,
                    &mut self.state.frontier_mut(segment.slot)[at..at + layout.main_row_bytes],
                );
            }
        }
        Ok(())
    }

    pub(crate) fn project_output_rows(&self, w: &Attention<Self>, o: &[f32], y: &mut [f32]) -> Result<()> {
        let hp = &self.setup()?.hyper;
        let rows = self.batch.len();
        let (groups, rank) = (hp.o_groups, hp.o_lora);
        let group_dim = hp.q_dim() / groups;
        let mut low = vec![0f32; rows * groups * rank];
        for g in 0..groups {
            let gather: Vec<f32> = o[..rows * hp.q_dim()]
                .chunks_exact(hp.q_dim())
                .flat_map(|row| &row[g * group_dim..(g + 1) * group_dim])
                .copied()
                .collect();
            let mut part = vec![0f32; rows * rank];
            w.output_a.multiply_rows(g * rank..(g + 1) * rank, &gather, &mut part)?;
            for (all, one) in low.chunks_exact_mut(groups * rank).zip(part.chunks_exact(rank)) {
                all[g * rank..(g + 1) * rank].copy_from_slice(one);
            }
        }
        w.output_b.multiply(&low, &mut y[..rows * hp.hidden])
    }
}

fn decode_into(layout: &KvLayout, bytes: &[u8], seen: &mut Vec<f32>) {
    let at = seen.len();
    seen.resize(at + layout.head_dim, 0.0);
    layout.decode_main(bytes, &mut seen[at..]);
}

/// One head: softmax over the rows and the sink; rows are keys and values alike.
fn attend_one(q: &[f32], rows: &[f32], sink: f32, scale: f32, out: &mut [f32]) {
    let d = q.len();
    let mut scores: Vec<f32> = rows.chunks_exact(d).map(|row| math::dot(q, row) * scale).collect();
    let max = scores.iter().fold(sink, |m, s| m.max(*s));
    scores.iter_mut().for_each(|s| *s = (*s - max).exp());
    let total = scores.iter().sum::<f32>() + (sink - max).exp();
    out.fill(0.0);
    for (row, e) in rows.chunks_exact(d).zip(&scores) {
        for (o, v) in out.iter_mut().zip(row) {
            *o += e * v;
        }
    }
    out.iter_mut().for_each(|o| *o /= total);
}
