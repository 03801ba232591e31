//! Section 4: projections, attention over window, compressed rows and sink, grouped output projection.

use ds4_model::backend::Result;
use ds4_model::weights::{Attention, Layer};
use ds4_model::{KvLayout, LayerKind, RowFormat, rounding};
use ds4_reference::math;

use crate::matrix::Failures;
use crate::pool::Parts;
use crate::{Cpu, failed};

/// Heads whose products with a row are formed together.
pub const HEADS: usize = crate::dot::F32_ROWS;

/// Which of [`Cpu`]'s rotations a layer uses.
pub fn turn_kind(kind: LayerKind) -> usize {
    usize::from(kind != LayerKind::Window)
}

/// [`math::rope_tail`] with sines and cosines at hand.
pub fn turn_tail(x: &mut [f32], turns: &[(f32, f32)], inverse: bool) {
    let tail = x.len() - 2 * turns.len();
    for (pair, (sin, cos)) in x[tail..].chunks_exact_mut(2).zip(turns) {
        let sin = if inverse { -sin } else { *sin };
        (pair[0], pair[1]) = (pair[0] * cos - pair[1] * sin, pair[0] * sin + pair[1] * cos);
    }
}

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
        let turns = &self.turns[turn_kind(layer.kind)];
        let (d, heads, pairs) = (hp.head_dim, hp.heads, hp.rope_dim / 2);
        let parts = Parts::new(q);
        self.worker.pool.split(rows * heads, |_, part| {
            for i in part {
                // SAFETY: every head of every row is one thread's.
                let head = unsafe { parts.slice(i * d..(i + 1) * d) };
                math::rms_norm(head, &[], hp.rms_eps);
                turn_tail(head, &turns[i / heads * pairs..][..pairs], false);
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
        let (turns, pairs) = (&self.turns[turn_kind(layer.kind)], hp.rope_dim / 2);
        let mut stored = vec![0u8; setup.layout.main_row_bytes];
        for (row, turns) in kv.chunks_exact_mut(hp.head_dim).zip(turns.chunks_exact(pairs)) {
            math::rms_norm(row, &w.kv_norm, hp.rms_eps);
            turn_tail(row, turns, false);
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
        let (turns, pairs) = (&self.turns[turn_kind(layer.kind)], hp.rope_dim / 2);
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
            if scratch.len() < n * (d + HEADS) {
                return failures
                    .note(Err(failed("attention", format!("{n} rows are more than were planned for"))));
            }
            let (seen, scores) = scratch.split_at_mut(n * d);
            let mut rows = seen.chunks_exact_mut(d);
            for (p, row) in raw.clone().zip(&mut rows) {
                if p >= segment.pos {
                    let at = (segment.row + p - segment.pos) * d;
                    row.copy_from_slice(&kv[at..at + d]);
                } else {
                    let at = place.ring_at + p % window * layout.main_row_bytes;
                    let bytes = &state.frontier(segment.slot)[at..at + layout.main_row_bytes];
                    (kernels.decode_main)(layout, bytes, row);
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
                (kernels.decode_main)(layout, &page[at..at + layout.main_row_bytes], row);
            }
            let turns = &turns[r * pairs..(r + 1) * pairs];
            let part = heads * cut / cuts..heads * (cut + 1) / cuts;
            for first in part.clone().step_by(HEADS) {
                let count = HEADS.min(part.end - first);
                let at = r * q_dim + first * d;
                // SAFETY: this unit alone has these heads of this row.
                let out = unsafe { out.slice(at..at + count * d) };
                let q = |h: usize| &q[at + h.min(count - 1) * d..at + (h.min(count - 1) + 1) * d];
                let scores = &mut scores[..HEADS * n];
                let mut pairs = seen.chunks_exact(2 * d);
                for (i, two) in (&mut pairs).enumerate() {
                    let tile = (kernels.f32_tile)(std::array::from_fn(q), [&two[..d], &two[d..]]);
                    for (h, tile) in tile.into_iter().enumerate() {
                        (scores[h * n + 2 * i], scores[h * n + 2 * i + 1]) =
                            (tile[0] * scale, tile[1] * scale);
                    }
                }
                if n % 2 == 1 {
                    (0..count)
                        .for_each(|h| scores[h * n + n - 1] = (kernels.f32)(q(h), pairs.remainder()) * scale);
                }
                let mut totals = [0f32; HEADS];
                for (h, total) in totals.iter_mut().enumerate().take(count) {
                    let scores = &mut scores[h * n..(h + 1) * n];
                    let sink = layer.attention.sinks[first + h];
                    let max = scores.iter().fold(sink, |m, s| m.max(*s));
                    *total = (sink - max).exp() + (kernels.exp)(scores, max);
                }
                out.fill(0.0);
                (kernels.weighted)(&scores[..count * n], n, seen, d, out);
                for (out, total) in out.chunks_exact_mut(d).zip(totals) {
                    out.iter_mut().for_each(|v| *v /= total);
                    turn_tail(out, turns, true);
                }
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
