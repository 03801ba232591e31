//! Section 4: projections, attention over window, compressed rows and sink, grouped output projection.

use ds4_model::backend::Result;
use ds4_model::weights::{Attention, Layer};
use ds4_model::{KvLayout, RowFormat, rounding};
use ds4_reference::math;

use crate::matrix::Failures;
use crate::pool::Parts;
use crate::{Cpu, failed};

impl Cpu {
    pub(crate) fn project_q_rows(
        &mut self,
        layer: &Layer<Self>,
        h: &[f32],
        qr: &mut [f32],
        q: &mut [f32],
    ) -> Result<()> {
        let hp = self.setup()?.hyper.clone();
        let (rows, w) = (self.batch.len(), &layer.attention);
        let qr = &mut qr[..rows * hp.q_lora];
        let q = &mut q[..rows * hp.q_dim()];
        self.worker.multiply(&w.q_a, &h[..rows * hp.hidden], qr)?;
        qr.chunks_exact_mut(hp.q_lora).for_each(|row| math::rms_norm(row, &w.q_norm, hp.rms_eps));
        self.worker.multiply(&w.q_b, qr, q)?;
        let freqs = self.freqs(layer.kind).to_vec();
        let positions: Vec<usize> = self.batch.positions().collect();
        let (d, heads) = (hp.head_dim, hp.heads);
        let parts = Parts::new(q);
        self.worker.pool.split(rows * heads, |_, part| {
            for i in part {
                // SAFETY: every head of every row is one thread's.
                let head = unsafe { parts.slice(i * d..(i + 1) * d) };
                math::rms_norm(head, &[], hp.rms_eps);
                math::rope_tail(head, positions[i / heads], &freqs, false);
            }
        });
        Ok(())
    }

    pub(crate) fn project_kv_rows(&mut self, layer: &Layer<Self>, h: &[f32], kv: &mut [f32]) -> Result<()> {
        let setup = self.setup()?.clone();
        let hp = &setup.hyper;
        let (rows, w) = (self.batch.len(), &layer.attention);
        let kv = &mut kv[..rows * hp.head_dim];
        self.worker.multiply(&w.kv, &h[..rows * hp.hidden], kv)?;
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
        let setup = self.setup()?.clone();
        let (hp, layout) = (&setup.hyper, &setup.layout);
        let place = layout.layer(layer.index).clone();
        let (d, window, heads) = (hp.head_dim, hp.window, hp.heads);
        let (q_dim, topk) = (hp.q_dim(), hp.index_topk);
        let scale = 1.0 / (d as f32).sqrt();
        let freqs = self.freqs(layer.kind).to_vec();
        let tokens: Vec<(ds4_model::Segment, usize)> =
            self.batch.segments().iter().flat_map(|s| (0..s.len).map(|t| (*s, t))).collect();

        // With fewer tokens than threads, the heads of a token are cut among threads; each decodes the rows it needs.
        let threads = self.worker.pool.threads();
        let cuts = threads.div_ceil(tokens.len()).min(heads);
        let (out, scratch) = (Parts::new(o), Parts::new(&mut self.scratch.seen));
        let (state, kernels) = (&self.state, self.worker.kernels);
        let failures = Failures::default();
        self.worker.pool.each(tokens.len() * cuts, |worker, unit| {
            let ((segment, t), cut) = (tokens[unit / cuts], unit % cuts);
            let (r, pos) = (segment.row + t, segment.pos + t);
            // SAFETY: one scratch entry a thread.
            let scratch = unsafe { &mut scratch.slice(worker..worker + 1)[0] };
            let raw = (pos + 1).saturating_sub(window)..pos + 1;
            let chosen = selected.map(|s| &s[r * topk..(r + 1) * topk]);
            let compressed = match (layer.kind.ratio(), chosen) {
                (None, _) => 0,
                (Some(_), Some(s)) => s.iter().take_while(|w| **w >= 0).count(),
                (Some(ratio), None) => (pos + 1) / ratio,
            };
            let n = raw.len() + compressed;
            if scratch.len() < n * (d + 1) {
                return failures
                    .note(Err(failed("attention", format!("{n} rows are more than were planned for"))));
            }
            let (seen, scores) = scratch.split_at_mut(n * d);
            let scores = &mut scores[..n];
            let mut rows = seen.chunks_exact_mut(d);
            for (p, row) in raw.clone().zip(&mut rows) {
                if p >= segment.pos {
                    let at = (segment.row + p - segment.pos) * d;
                    row.copy_from_slice(&kv[at..at + d]);
                } else {
                    let at = place.ring_at + p % window * layout.main_row_bytes;
                    layout.decode_main(&state.frontier(segment.slot)[at..at + layout.main_row_bytes], row);
                }
            }
            for (i, row) in rows.enumerate() {
                let w = chosen.map_or(i, |s| s[i] as usize);
                let (index, within) = KvLayout::locate(layer.kind, w);
                let page = match state.page_of(segment.slot, index) {
                    Ok(p) => state.page(p),
                    Err(e) => return failures.note(Err(e)),
                };
                let at = place.rows_at + within * layout.main_row_bytes;
                layout.decode_main(&page[at..at + layout.main_row_bytes], row);
            }
            for head in heads * cut / cuts..heads * (cut + 1) / cuts {
                let at = r * q_dim + head * d;
                // SAFETY: this unit alone has this head of this row.
                let out = unsafe { out.slice(at..at + d) };
                let q = &q[at..at + d];
                let sink = layer.attention.sinks[head];
                let mut max = sink;
                for (s, row) in scores.iter_mut().zip(seen.chunks_exact(d)) {
                    *s = (kernels.f32)(q, row) * scale;
                    max = max.max(*s);
                }
                let mut total = (sink - max).exp();
                out.fill(0.0);
                for (s, row) in scores.iter().zip(seen.chunks_exact(d)) {
                    let e = (s - max).exp();
                    total += e;
                    (kernels.axpy)(out, e, row);
                }
                out.iter_mut().for_each(|v| *v /= total);
                math::rope_tail(out, pos, &freqs, true);
            }
        });
        failures.result()?;
        // The window takes the new rows.
        for segment in self.batch.segments().to_vec() {
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

    pub(crate) fn project_output_rows(
        &mut self,
        w: &Attention<Self>,
        o: &[f32],
        y: &mut [f32],
    ) -> Result<()> {
        let hp = &self.setup()?.hyper;
        let rows = self.batch.len();
        let (groups, rank, q_dim, hidden) = (hp.o_groups, hp.o_lora, hp.q_dim(), hp.hidden);
        let width = q_dim / groups;
        let low = &mut self.scratch.b[..rows * groups * rank];
        for g in 0..groups {
            let gather = &mut self.scratch.a[..rows * width];
            for (to, from) in gather.chunks_exact_mut(width).zip(o.chunks_exact(q_dim)) {
                to.copy_from_slice(&from[g * width..(g + 1) * width]);
            }
            self.worker.multiply_into(
                &w.output_a,
                g * rank..(g + 1) * rank,
                gather,
                low,
                groups * rank,
                g * rank,
            )?;
        }
        self.worker.multiply(&w.output_b, low, &mut y[..rows * hidden])
    }
}
