//! Section 4, "Indexer": which compressed rows a token of a ratio-4 layer sees.

use ds4_model::backend::{NO_ROW, Result};
use ds4_model::weights::{Indexer, Layer};
use ds4_model::{KvLayout, rounding};

use crate::Cpu;
use crate::attention::{turn_kind, turn_tail};
use crate::matrix::Failures;
use crate::pool::Parts;

impl Cpu {
    pub(crate) fn select(
        &mut self,
        layer: &Layer<Self>,
        indexer: &Indexer<Self>,
        h: &[f32],
        qr: &[f32],
        selected: &mut [i32],
    ) -> Result<()> {
        let setup = self.setup()?;
        let hp = setup.hyper.clone();
        let (heads, dim, topk, qat) = (hp.index_heads, hp.index_dim, hp.index_topk, setup.numerics.qat);
        let layout = setup.layout.clone();
        let kv = layout.layer(layer.index).clone();
        let (turns, pairs) = (&self.turns[turn_kind(layer.kind)], hp.rope_dim / 2);
        let rows = self.batch.len();

        let q = &mut self.scratch.a[..rows * heads * dim];
        let weights = &mut self.scratch.b[..rows * heads];
        self.worker.multiply(&indexer.q_b, &qr[..rows * hp.q_lora], q)?;
        self.worker.multiply(&indexer.weights, &h[..rows * hp.hidden], weights)?;
        let scale = 1.0 / ((dim * heads) as f32).sqrt();

        let tokens: Vec<(usize, u32, usize)> = self
            .batch
            .segments()
            .iter()
            .flat_map(|s| (0..s.len).map(|t| (s.row + t, s.slot, s.pos + t)))
            .collect();
        let (q, out, scratch) = (Parts::new(q), Parts::new(selected), Parts::new(&mut self.scratch.seen));
        let (state, kernels, weights) = (&self.state, self.worker.kernels, &*weights);
        let failures = Failures::default();
        self.worker.pool.each(tokens.len(), |worker, i| {
            let (r, slot, pos) = tokens[i];
            // SAFETY: every token's row is one unit's; one scratch entry a thread.
            let (q, out, scratch) = unsafe {
                (
                    q.slice(r * heads * dim..(r + 1) * heads * dim),
                    out.slice(r * topk..(r + 1) * topk),
                    &mut scratch.slice(worker..worker + 1)[0],
                )
            };
            let visible = (pos + 1) / 4;
            out.fill(NO_ROW);
            // While all rows are kept the scores do not matter.
            if visible <= topk {
                out.iter_mut().zip(0..visible as i32).for_each(|(o, w)| *o = w);
                return;
            }
            for head in q.chunks_exact_mut(dim) {
                turn_tail(head, &turns[r * pairs..(r + 1) * pairs], false);
                if qat {
                    rounding::hadamard(head);
                    rounding::fp4_round(head);
                }
            }
            let (key, scores) = scratch.split_at_mut(dim);
            let scores = &mut scores[..visible];
            for (w, score) in scores.iter_mut().enumerate() {
                let (index, within) = KvLayout::locate(layer.kind, w);
                let page = match state.page_of(slot, index) {
                    Ok(p) => state.page(p),
                    Err(e) => return failures.note(Err(e)),
                };
                let at = kv.index_at + within * layout.index_row_bytes;
                (kernels.decode_index)(&layout, &page[at..at + layout.index_row_bytes], key);
                *score = q
                    .chunks_exact(dim)
                    .zip(&weights[r * heads..])
                    .map(|(head, wt)| wt * scale * (kernels.f32)(head, key).max(0.0))
                    .sum();
            }
            // The best `topk` without sorting all; equal scores go to the lower row.
            let mut order: Vec<u32> = (0..visible as u32).collect();
            let rank = |a: &u32, b: &u32| scores[*b as usize].total_cmp(&scores[*a as usize]).then(a.cmp(b));
            order.select_nth_unstable_by(topk - 1, rank);
            order.truncate(topk);
            order.sort_unstable();
            out.iter_mut().zip(order).for_each(|(o, w)| *o = w as i32);
        });
        failures.result()
    }
}
