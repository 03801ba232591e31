//! Section 3: the residual streams (mHC), and the final head that joins them.

use ds4_model::backend::Result;
use ds4_model::weights::{Head, HyperConnection};
use ds4_reference::hyper_connection::sinkhorn;
use ds4_reference::math;

use crate::matrix::Worker;
use crate::pool::Parts;
use crate::{Cpu, Matrix};

impl Cpu {
    pub(crate) fn hc_pre_rows(
        &mut self,
        hc: &HyperConnection<Self>,
        norm: &[f32],
        x: &[f32],
        h: &mut [f32],
        mix: &mut [f32],
    ) -> Result<()> {
        let hp = &self.setup()?.hyper.clone();
        let (n, hidden, rows) = (hp.streams, hp.hidden, self.batch.len());
        let width = n * hidden;
        let x = &x[..rows * width];
        let m = project(
            &mut self.worker,
            &hc.mix,
            x,
            width,
            hp.rms_eps,
            &mut self.scratch.a,
            &mut self.scratch.b,
        )?;
        let (h, mix) = (Parts::new(h), Parts::new(mix));
        self.worker.pool.split(rows, |_, part| {
            for t in part {
                // SAFETY: every row is one thread's.
                let (h, mix) = unsafe {
                    (h.slice(t * hidden..(t + 1) * hidden), mix.slice(t * (n + n * n)..(t + 1) * (n + n * n)))
                };
                let m = &m[t * hp.mix_dim()..(t + 1) * hp.mix_dim()];
                let mut pre = [0f32; 8];
                for (i, p) in pre[..n].iter_mut().enumerate() {
                    *p = math::sigmoid(m[i] * hc.scale[0] + hc.base[i]) + hp.hc_eps;
                }
                let (post, c) = mix.split_at_mut(n);
                for (i, p) in post.iter_mut().enumerate() {
                    *p = 2.0 * math::sigmoid(m[n + i] * hc.scale[1] + hc.base[n + i]);
                }
                for (i, v) in c.iter_mut().enumerate() {
                    *v = m[2 * n + i] * hc.scale[2] + hc.base[2 * n + i];
                }
                sinkhorn(c, n, hp.sinkhorn_iters, hp.hc_eps);
                collapse(&x[t * width..(t + 1) * width], &pre[..n], h);
                math::rms_norm(h, norm, hp.rms_eps);
            }
        });
        Ok(())
    }

    pub(crate) fn hc_post_rows(&mut self, y: &[f32], mix: &[f32], x: &mut [f32]) -> Result<()> {
        let hp = &self.setup()?.hyper;
        let (n, hidden, rows) = (hp.streams, hp.hidden, self.batch.len());
        let x = Parts::new(x);
        self.worker.pool.split(rows, |_, part| {
            for t in part {
                // SAFETY: every row is one thread's.
                let streams = unsafe { x.slice(t * n * hidden..(t + 1) * n * hidden) };
                let (post, c) = mix[t * (n + n * n)..(t + 1) * (n + n * n)].split_at(n);
                let y = &y[t * hidden..(t + 1) * hidden];
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
        });
        Ok(())
    }

    pub(crate) fn head_rows(&mut self, head: &Head<Self>, x: &[f32], logits: &mut [f32]) -> Result<()> {
        let hp = &self.setup()?.hyper.clone();
        let width = hp.streams * hp.hidden;
        // Output by output: the head's own work is far larger than what a batch of it would save.
        for (i, &r) in self.batch.outputs().to_vec().iter().enumerate() {
            let x = &x[r as usize * width..(r as usize + 1) * width];
            let m = project(
                &mut self.worker,
                &head.mix,
                x,
                width,
                hp.rms_eps,
                &mut self.scratch.a,
                &mut self.scratch.b,
            )?;
            let mut pre = [0f32; 8];
            for (j, p) in pre[..hp.streams].iter_mut().enumerate() {
                *p = math::sigmoid(m[j] * head.scale[0] + head.base[j]) + hp.hc_eps;
            }
            let h = &mut self.scratch.a[..hp.hidden];
            collapse(x, &pre[..hp.streams], h);
            math::rms_norm(h, &head.norm, hp.rms_eps);
            self.worker.multiply(&head.output, h, &mut logits[i * hp.vocab..(i + 1) * hp.vocab])?;
        }
        Ok(())
    }
}

/// `fn · rms(flat)` for every row, in `m`.
fn project<'m>(
    worker: &mut Worker,
    matrix: &Matrix,
    x: &[f32],
    width: usize,
    eps: f32,
    flat: &mut [f32],
    m: &'m mut [f32],
) -> Result<&'m [f32]> {
    let rows = x.len() / width;
    let parts = Parts::new(flat);
    worker.pool.split(rows, |_, part| {
        for t in part {
            // SAFETY: every row is one thread's.
            let out = unsafe { parts.slice(t * width..(t + 1) * width) };
            out.copy_from_slice(&x[t * width..(t + 1) * width]);
            math::rms_norm(out, &[], eps);
        }
    });
    let m = &mut m[..rows * matrix.rows()];
    worker.multiply(matrix, &flat[..rows * width], m)?;
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
