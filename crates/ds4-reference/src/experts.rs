//! Section 5: router and mixture of experts.

use ds4_model::backend::Result;
use ds4_model::weights::{Choice, Experts, Router};

use crate::{Matrix, Reference, failed, math};

impl Reference {
    pub(crate) fn route_rows(
        &self,
        router: &Router<Self>,
        h: &[f32],
        experts: &mut [i32],
        gates: &mut [f32],
    ) -> Result<()> {
        let hp = &self.setup()?.hyper;
        let (k, rows) = (hp.experts_used, self.batch.len());
        let mut scores = vec![0f32; rows * hp.experts];
        router.gate.multiply(&h[..rows * hp.hidden], &mut scores)?;
        scores.iter_mut().for_each(|s| *s = math::softplus(*s).sqrt());
        for r in 0..rows {
            let scores = &scores[r * hp.experts..(r + 1) * hp.experts];
            let chosen = &mut experts[r * k..(r + 1) * k];
            match &router.choice {
                Choice::Hash(table) => {
                    let at = self.batch.tokens()[r] as usize * table.cols;
                    chosen.copy_from_slice(&table.values[at..at + k]);
                }
                Choice::TopK(bias) => {
                    let biased: Vec<f32> = scores.iter().zip(bias).map(|(s, b)| s + b).collect();
                    for (c, e) in chosen.iter_mut().zip(math::top_k(&biased, k)) {
                        *c = e as i32;
                    }
                }
            }
            let gates = &mut gates[r * k..(r + 1) * k];
            for (g, &e) in gates.iter_mut().zip(chosen.iter()) {
                *g = *scores
                    .get(e as usize)
                    .ok_or_else(|| failed("hash routing table", format!("expert {e} of {}", hp.experts)))?;
            }
            let sum: f32 = gates.iter().sum();
            gates.iter_mut().for_each(|g| *g = *g / sum * hp.route_scale);
        }
        Ok(())
    }

    pub(crate) fn run_experts_rows(
        &self,
        w: &Experts<Self>,
        h: &[f32],
        experts: &[i32],
        gates: &[f32],
        y: &mut [f32],
    ) -> Result<()> {
        let hp = &self.setup()?.hyper;
        let (k, hidden, rows) = (hp.experts_used, hp.hidden, self.batch.len());
        // Each expert runs once over the rows that chose it; a row then sums its experts in the order of its choice.
        let mut parts = vec![0f32; rows * k * hidden];
        for e in 0..hp.experts {
            let users: Vec<usize> = (0..rows * k).filter(|&i| experts[i] == e as i32).collect();
            if users.is_empty() {
                continue;
            }
            let x: Vec<f32> =
                users.iter().flat_map(|&i| &h[i / k * hidden..(i / k + 1) * hidden]).copied().collect();
            let gate: Vec<f32> = users.iter().map(|&i| gates[i]).collect();
            let out = feed_forward(&w.gate, &w.up, &w.down, e, &x, Some(&gate), w.clamp)?;
            for (&i, row) in users.iter().zip(out.chunks_exact(hidden)) {
                parts[i * hidden..(i + 1) * hidden].copy_from_slice(row);
            }
        }
        let shared = feed_forward(
            &w.shared_gate,
            &w.shared_up,
            &w.shared_down,
            0,
            &h[..rows * hidden],
            None,
            w.clamp,
        )?;
        for r in 0..rows {
            let y = &mut y[r * hidden..(r + 1) * hidden];
            y.fill(0.0);
            for part in parts[r * k * hidden..(r + 1) * k * hidden].chunks_exact(hidden) {
                y.iter_mut().zip(part).for_each(|(y, p)| *y += p);
            }
            y.iter_mut().zip(&shared[r * hidden..]).for_each(|(y, s)| *y += s);
        }
        Ok(())
    }
}

/// `w2 (gate * act(w1 x, w3 x))` with the `index`-th matrices of the stacks.
fn feed_forward(
    w1: &Matrix,
    w3: &Matrix,
    w2: &Matrix,
    index: usize,
    x: &[f32],
    gates: Option<&[f32]>,
    clamp: f32,
) -> Result<Vec<f32>> {
    let (width, hidden) = (w1.rows(), w1.cols());
    let rows = x.len() / hidden;
    let (mut a, mut b) = (vec![0f32; rows * width], vec![0f32; rows * width]);
    w1.multiply_expert(index, 0..width, x, &mut a)?;
    w3.multiply_expert(index, 0..width, x, &mut b)?;
    for (r, (a, b)) in a.chunks_exact_mut(width).zip(b.chunks_exact(width)).enumerate() {
        let gate = gates.map_or(1.0, |g| g[r]);
        a.iter_mut().zip(b).for_each(|(a, b)| *a = math::swiglu(*a, *b, clamp) * gate);
    }
    let mut y = vec![0f32; rows * w2.rows()];
    w2.multiply_expert(index, 0..w2.rows(), &a, &mut y)?;
    Ok(y)
}
