//! Section 5: router and mixture of experts.

use ds4_model::backend::Result;
use ds4_model::weights::{Choice, Experts, Router};
use ds4_reference::math;

use crate::matrix::Worker;
use crate::pool::Parts;
use crate::{Cpu, failed};

impl Cpu {
    pub(crate) fn route_rows(
        &mut self,
        router: &Router<Self>,
        h: &[f32],
        experts: &mut [i32],
        gates: &mut [f32],
    ) -> Result<()> {
        let hp = &self.setup()?.hyper;
        let (e, k, hidden, scale) = (hp.experts, hp.experts_used, hp.hidden, hp.route_scale);
        let rows = self.batch.len();
        let scores = &mut self.scratch.a[..rows * e];
        self.worker.multiply(&router.gate, &h[..rows * hidden], scores)?;
        for r in 0..rows {
            let scores = &mut scores[r * e..(r + 1) * e];
            scores.iter_mut().for_each(|s| *s = math::softplus(*s).sqrt());
            let chosen = &mut experts[r * k..(r + 1) * k];
            match &router.choice {
                Choice::Hash(table) => {
                    let at = self.batch.tokens()[r] as usize * table.cols;
                    chosen.copy_from_slice(&table.values[at..at + k]);
                }
                Choice::TopK(bias) => best(scores, bias, chosen),
            }
            let gates = &mut gates[r * k..(r + 1) * k];
            for (g, &c) in gates.iter_mut().zip(chosen.iter()) {
                *g = *scores
                    .get(c as usize)
                    .ok_or_else(|| failed("hash routing table", format!("expert {c} of {e}")))?;
            }
            let sum: f32 = gates.iter().sum();
            gates.iter_mut().for_each(|g| *g = *g / sum * scale);
        }
        Ok(())
    }

    pub(crate) fn run_experts_rows(
        &mut self,
        w: &Experts<Self>,
        h: &[f32],
        experts: &[i32],
        gates: &[f32],
        y: &mut [f32],
    ) -> Result<()> {
        let hp = &self.setup()?.hyper;
        let (k, hidden, width, rows) = (hp.experts_used, hp.hidden, hp.expert_ff, self.batch.len());
        let h = &h[..rows * hidden];
        // The pairs of a token and its expert, by expert; and the tokens of the shared one.
        let mut groups: Vec<(usize, Vec<usize>)> = Vec::new();
        let mut order: Vec<usize> = (0..rows * k).collect();
        order.sort_by_key(|p| experts[*p]);
        for p in order {
            match groups.last_mut() {
                Some((e, pairs)) if *e == experts[p] as usize => pairs.push(p),
                _ => groups.push((experts[p] as usize, vec![p])),
            }
        }
        let shared = [(0, (0..rows).collect::<Vec<_>>())];
        let pairs = rows * k;
        let (a, a_shared) = self.scratch.a.split_at_mut(pairs * width.max(hidden));
        let (b, b_shared) = self.scratch.b.split_at_mut(pairs * width.max(hidden));
        let (a_shared, b_shared) =
            (&mut a_shared[..rows * width.max(hidden)], &mut b_shared[..rows * width.max(hidden)]);

        self.worker.multiply_grouped(&w.gate, &groups, h, |p| p / k, a)?;
        self.worker.multiply_grouped(&w.up, &groups, h, |p| p / k, b)?;
        self.worker.multiply_grouped(&w.shared_gate, &shared, h, |r| r, a_shared)?;
        self.worker.multiply_grouped(&w.shared_up, &shared, h, |r| r, b_shared)?;
        activate(&mut self.worker, &mut a[..pairs * width], &b[..pairs * width], width, Some(gates), w.clamp);
        activate(
            &mut self.worker,
            &mut a_shared[..rows * width],
            &b_shared[..rows * width],
            width,
            None,
            w.clamp,
        );
        self.worker.multiply_grouped(&w.down, &groups, &a[..pairs * width], |p| p, b)?;
        self.worker.multiply_grouped(&w.shared_down, &shared, &a_shared[..rows * width], |r| r, b_shared)?;

        let y = Parts::new(y);
        self.worker.pool.split(rows, |_, part| {
            for r in part {
                // SAFETY: every row is one thread's.
                let y = unsafe { y.slice(r * hidden..(r + 1) * hidden) };
                y.fill(0.0);
                for part in b[r * k * hidden..(r + 1) * k * hidden].chunks_exact(hidden) {
                    y.iter_mut().zip(part).for_each(|(y, p)| *y += p);
                }
                y.iter_mut().zip(&b_shared[r * hidden..]).for_each(|(y, s)| *y += s);
            }
        });
        Ok(())
    }
}

/// `a = gate * act(a, b)`, row by row.
fn activate(worker: &mut Worker, a: &mut [f32], b: &[f32], width: usize, gates: Option<&[f32]>, clamp: f32) {
    let rows = a.len() / width;
    let (a, kernels) = (Parts::new(a), worker.kernels);
    worker.pool.split(rows, |_, part| {
        for r in part {
            // SAFETY: every row is one thread's.
            let a = unsafe { a.slice(r * width..(r + 1) * width) };
            let gate = gates.map_or(1.0, |g| g[r]);
            (kernels.swiglu)(a, &b[r * width..(r + 1) * width], clamp, gate);
        }
    });
}

/// The best experts by score plus bias, best first, ties to the lower one.
fn best(scores: &[f32], bias: &[f32], chosen: &mut [i32]) {
    for n in 0..chosen.len() {
        let mut top: Option<(f32, usize)> = None;
        for (i, (s, b)) in scores.iter().zip(bias).enumerate() {
            let v = s + b;
            if top.is_none_or(|t| v > t.0) && !chosen[..n].contains(&(i as i32)) {
                top = Some((v, i));
            }
        }
        chosen[n] = top.map_or(0, |t| t.1 as i32);
    }
}
