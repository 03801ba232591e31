//! Section 3: the residual streams (mHC), and the final head that joins them.

use ds4_model::backend::Result;
use ds4_model::weights::{Head, HyperConnection};

use crate::{Matrix, Reference, math};

impl Reference {
    pub(crate) fn hc_pre_rows(
        &self,
        hc: &HyperConnection<Self>,
        norm: &[f32],
        x: &[f32],
        h: &mut [f32],
        mix: &mut [f32],
    ) -> Result<()> {
        let hp = &self.setup()?.hyper;
        let (n, hidden, rows) = (hp.streams, hp.hidden, self.batch.len());
        let x = &x[..rows * n * hidden];
        let m = project(&hc.mix, x, n * hidden, hp.rms_eps)?;
        let frames = x.chunks_exact(n * hidden).zip(m.chunks_exact(hp.mix_dim()));
        let outs = h.chunks_exact_mut(hidden).zip(mix.chunks_exact_mut(n + n * n));
        for ((streams, m), (h, mix)) in frames.zip(outs) {
            let pre: Vec<f32> =
                (0..n).map(|i| math::sigmoid(m[i] * hc.scale[0] + hc.base[i]) + hp.hc_eps).collect();
            let (post, c) = mix.split_at_mut(n);
            for (i, p) in post.iter_mut().enumerate() {
                *p = 2.0 * math::sigmoid(m[n + i] * hc.scale[1] + hc.base[n + i]);
            }
            for (i, v) in c.iter_mut().enumerate() {
                *v = m[2 * n + i] * hc.scale[2] + hc.base[2 * n + i];
            }
            sinkhorn(c, n, hp.sinkhorn_iters, hp.hc_eps);
            collapse(streams, &pre, h);
            math::rms_norm(h, norm, hp.rms_eps);
        }
        Ok(())
    }

    pub(crate) fn hc_post_rows(&self, y: &[f32], mix: &[f32], x: &mut [f32]) -> Result<()> {
        let hp = &self.setup()?.hyper;
        let (n, hidden, rows) = (hp.streams, hp.hidden, self.batch.len());
        let frames = y.chunks_exact(hidden).zip(mix.chunks_exact(n + n * n));
        for (streams, (y, mix)) in x.chunks_exact_mut(n * hidden).zip(frames).take(rows) {
            let (post, c) = mix.split_at(n);
            let mut old = [0f32; 8];
            for k in 0..hidden {
                for i in 0..n {
                    old[i] = streams[i * hidden + k];
                }
                for j in 0..n {
                    let mixed: f32 = (0..n).map(|i| c[i * n + j] * old[i]).sum();
                    streams[j * hidden + k] = post[j] * y[k] + mixed;
                }
            }
        }
        Ok(())
    }

    pub(crate) fn head_rows(&self, head: &Head<Self>, x: &[f32], logits: &mut [f32]) -> Result<()> {
        let hp = &self.setup()?.hyper;
        let width = hp.streams * hp.hidden;
        let chosen: Vec<f32> = self
            .batch
            .outputs()
            .iter()
            .flat_map(|&r| &x[r as usize * width..(r as usize + 1) * width])
            .copied()
            .collect();
        let m = project(&head.mix, &chosen, width, hp.rms_eps)?;
        let outputs = self.batch.outputs().len();
        let mut h = vec![0f32; outputs * hp.hidden];
        let frames = chosen.chunks_exact(width).zip(m.chunks_exact(hp.streams));
        for ((streams, m), h) in frames.zip(h.chunks_exact_mut(hp.hidden)) {
            let pre: Vec<f32> = m
                .iter()
                .zip(&head.base)
                .map(|(m, base)| math::sigmoid(m * head.scale[0] + base) + hp.hc_eps)
                .collect();
            collapse(streams, &pre, h);
            math::rms_norm(h, &head.norm, hp.rms_eps);
        }
        head.output.multiply(&h, &mut logits[..outputs * hp.vocab])
    }
}

/// `fn · rms(flat)` for every row.
fn project(matrix: &Matrix, x: &[f32], width: usize, eps: f32) -> Result<Vec<f32>> {
    let mut flat = x.to_vec();
    flat.chunks_exact_mut(width).for_each(|row| math::rms_norm(row, &[], eps));
    let mut m = vec![0f32; x.len() / width * matrix.rows()];
    matrix.multiply(&flat, &mut m)?;
    Ok(m)
}

/// `sum_i pre_i x_i`
fn collapse(streams: &[f32], pre: &[f32], out: &mut [f32]) {
    out.fill(0.0);
    for (stream, p) in streams.chunks_exact(out.len()).zip(pre) {
        for (o, v) in out.iter_mut().zip(stream) {
            *o += p * v;
        }
    }
}

/// Softmax of each row, then columns and rows normalised in turn, columns last. `c[i * n + j]`, `i` the source stream.
pub fn sinkhorn(c: &mut [f32], n: usize, iterations: usize, eps: f32) {
    for row in c.chunks_exact_mut(n) {
        let max = row.iter().fold(f32::NEG_INFINITY, |m, v| m.max(*v));
        row.iter_mut().for_each(|v| *v = (*v - max).exp());
        let sum: f32 = row.iter().sum();
        row.iter_mut().for_each(|v| *v = *v / sum + eps);
    }
    let columns = |c: &mut [f32]| {
        for j in 0..n {
            let sum: f32 = (0..n).map(|i| c[i * n + j]).sum();
            (0..n).for_each(|i| c[i * n + j] /= sum + eps);
        }
    };
    columns(c);
    for _ in 1..iterations {
        for row in c.chunks_exact_mut(n) {
            let sum: f32 = row.iter().sum();
            row.iter_mut().for_each(|v| *v /= sum + eps);
        }
        columns(c);
    }
}
