//! Section 4, "Indexer": which compressed rows a token of a ratio-4 layer sees.

use ds4_model::backend::{NO_ROW, Result};
use ds4_model::weights::{Indexer, Layer};
use ds4_model::{KvLayout, rounding};

use crate::{Reference, math};

impl Reference {
    pub(crate) fn select(
        &mut self,
        layer: &Layer<Self>,
        indexer: &Indexer<Self>,
        h: &[f32],
        qr: &[f32],
        selected: &mut [i32],
    ) -> Result<()> {
        let setup = self.setup()?;
        let hp = &setup.hyper;
        let (heads, dim, topk, qat) = (hp.index_heads, hp.index_dim, hp.index_topk, setup.numerics.qat);
        let layout = &setup.layout;
        let kv = layout.layer(layer.index);
        let freqs = self.freqs(layer.kind);
        let rows = self.batch.len();

        let mut q = vec![0f32; rows * heads * dim];
        let mut weights = vec![0f32; rows * heads];
        indexer.q_b.multiply(&qr[..rows * hp.q_lora], &mut q)?;
        indexer.weights.multiply(&h[..rows * hp.hidden], &mut weights)?;
        let scale = 1.0 / ((dim * heads) as f32).sqrt();

        let mut key = vec![0f32; dim];
        for segment in self.batch.segments() {
            for t in 0..segment.len {
                let (r, pos) = (segment.row + t, segment.pos + t);
                let q = &mut q[r * heads * dim..(r + 1) * heads * dim];
                for head in q.chunks_exact_mut(dim) {
                    math::rope_tail(head, pos, freqs, false);
                    if qat {
                        rounding::hadamard(head);
                        rounding::fp4_round(head);
                    }
                }
                let visible = (pos + 1) / 4;
                let mut scores = vec![0f32; visible];
                // While all rows are kept the scores do not matter.
                if visible > topk {
                    for (w, score) in scores.iter_mut().enumerate() {
                        let (index, within) = KvLayout::locate(layer.kind, w);
                        let page = self.state.page(self.state.page_of(segment.slot, index)?);
                        let at = kv.index_at + within * layout.index_row_bytes;
                        layout.decode_index(&page[at..at + layout.index_row_bytes], &mut key);
                        *score = q
                            .chunks_exact(dim)
                            .zip(&weights[r * heads..])
                            .map(|(head, wt)| wt * scale * math::dot(head, &key).max(0.0))
                            .sum();
                    }
                }
                let mut chosen = math::top_k(&scores, topk);
                chosen.sort_unstable();
                let out = &mut selected[r * topk..(r + 1) * topk];
                out.fill(NO_ROW);
                for (o, w) in out.iter_mut().zip(chosen) {
                    *o = w as i32;
                }
            }
        }
        Ok(())
    }
}
