//! Scalar building blocks (MODEL section 2).

/// Lanes of [`dot`]: a fixed order of summation, whatever the batch, that compilers turn into vectors.
const LANES: usize = 16;

/// Inner product in f32.
pub fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut acc = [0f32; LANES];
    let (ca, cb) = (a.chunks_exact(LANES), b.chunks_exact(LANES));
    let tail: f32 = ca.remainder().iter().zip(cb.remainder()).map(|(x, y)| x * y).sum();
    for (x, y) in ca.zip(cb) {
        for i in 0..LANES {
            acc[i] += x[i] * y[i];
        }
    }
    acc.iter().sum::<f32>() + tail
}

/// `1 / sqrt(mean(x^2) + eps)`
pub fn inverse_rms(x: &[f32], eps: f32) -> f32 {
    1.0 / (dot(x, x) / x.len() as f32 + eps).sqrt()
}

/// `x = x / rms(x) * gain`, in place; without a gain where it is empty.
pub fn rms_norm(x: &mut [f32], gain: &[f32], eps: f32) {
    let scale = inverse_rms(x, eps);
    if gain.is_empty() {
        x.iter_mut().for_each(|v| *v *= scale);
    } else {
        x.iter_mut().zip(gain).for_each(|(v, g)| *v = *v * scale * g);
    }
}

pub fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

/// `log(1 + e^x)`, stable for large and small `x`.
pub fn softplus(x: f32) -> f32 {
    x.max(0.0) + (-x.abs()).exp().ln_1p()
}

/// `silu(min(gate, limit)) * clamp(up, -limit, limit)`; a limit of 0 clamps nothing.
pub fn swiglu(gate: f32, up: f32, limit: f32) -> f32 {
    let (g, u) = if limit > 0.0 { (gate.min(limit), up.clamp(-limit, limit)) } else { (gate, up) };
    g * sigmoid(g) * u
}

/// Rotates interleaved pairs of the last `2 * freqs.len()` channels to position `pos`; backwards for `inverse`.
pub fn rope_tail(x: &mut [f32], pos: usize, freqs: &[f32], inverse: bool) {
    let tail = x.len() - 2 * freqs.len();
    for (pair, f) in x[tail..].chunks_exact_mut(2).zip(freqs) {
        let (sin, cos) = (pos as f32 * f).sin_cos();
        let sin = if inverse { -sin } else { sin };
        (pair[0], pair[1]) = (pair[0] * cos - pair[1] * sin, pair[0] * sin + pair[1] * cos);
    }
}

/// Indices of the `k` largest scores, best first, ties to the lower index.
pub fn top_k(scores: &[f32], k: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..scores.len()).collect();
    order.sort_by(|&a, &b| scores[b].total_cmp(&scores[a]).then(a.cmp(&b)));
    order.truncate(k);
    order
}
