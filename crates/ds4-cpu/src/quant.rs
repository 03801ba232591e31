//! Activations in 8 bits.

/// How many values share a scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activations {
    /// For Q8_0 weights.
    Blocks32,
    /// For the K-quants and IQ2_XXS; with sums of every 16 values for their minima.
    Blocks256,
}

impl Activations {
    pub fn block(self) -> usize {
        match self {
            Self::Blocks32 => 32,
            Self::Blocks256 => 256,
        }
    }
}

/// One quantised row: `x = scale[i / block] * q[i]`.
#[derive(Clone, Copy)]
pub struct Quantised<'a> {
    pub q: &'a [i8],
    pub scales: &'a [f32],
    /// Sums of 16 values of `q` each; empty for blocks of 32.
    pub sums: &'a [i16],
}

impl Quantised<'_> {
    #[cfg(test)]
    pub fn dequantize(&self) -> Vec<f32> {
        let block = self.q.len() / self.scales.len();
        self.q.iter().enumerate().map(|(i, q)| f32::from(*q) * self.scales[i / block]).collect()
    }
}

/// Quantises one row into its parts.
pub fn quantise(block: usize, x: &[f32], q: &mut [i8], scales: &mut [f32], sums: &mut [i16]) {
    for ((x, q), scale) in x.chunks_exact(block).zip(q.chunks_exact_mut(block)).zip(scales) {
        let amax = x.iter().fold(0f32, |m, v| m.max(v.abs()));
        *scale = amax / 127.0;
        let inverse = if amax > 0.0 { 127.0 / amax } else { 0.0 };
        for (q, v) in q.iter_mut().zip(x) {
            // Adding and taking away 1.5 * 2^23 rounds to the nearest integer, ties to even.
            *q = ((v * inverse + 12_582_912.0) - 12_582_912.0) as i8;
        }
    }
    for (s, q) in sums.iter_mut().zip(q.chunks_exact(16)) {
        *s = q.iter().map(|v| i16::from(*v)).sum();
    }
}

/// Quantised rows of a batch, allocated once.
#[derive(Default)]
pub struct Buffer {
    pub q: Vec<i8>,
    pub scales: Vec<f32>,
    pub sums: Vec<i16>,
    cols: usize,
    block: usize,
}

impl Buffer {
    /// Room for `values` values in rows of any width.
    pub fn with_capacity(values: usize) -> Self {
        Buffer {
            q: vec![0; values],
            scales: vec![0.0; values.div_ceil(32)],
            sums: vec![0; values.div_ceil(16)],
            cols: 1,
            block: 1,
        }
    }

    pub fn bytes(values: usize) -> u64 {
        (values + values.div_ceil(32) * 4 + values.div_ceil(16) * 2) as u64
    }

    /// Declares what rows it holds from now on.
    pub fn shape(&mut self, kind: Activations, cols: usize) {
        (self.cols, self.block) = (cols, kind.block());
    }

    pub fn row(&self, i: usize) -> Quantised<'_> {
        let (n, s, g) = (self.cols, self.cols / self.block, self.cols / 16);
        let sums = if self.block == 256 { &self.sums[i * g..(i + 1) * g] } else { &[] };
        Quantised { q: &self.q[i * n..(i + 1) * n], scales: &self.scales[i * s..(i + 1) * s], sums }
    }

    #[cfg(test)]
    pub fn fill(
        &mut self,
        kind: Activations,
        cols: usize,
        rows: usize,
        mut x: impl FnMut(usize) -> Vec<f32>,
    ) {
        *self = Self::with_capacity(cols * rows);
        self.shape(kind, cols);
        let (s, g) = (cols / self.block, cols / 16);
        for i in 0..rows {
            quantise(
                self.block,
                &x(i),
                &mut self.q[i * cols..(i + 1) * cols],
                &mut self.scales[i * s..(i + 1) * s],
                &mut self.sums[i * g..(i + 1) * g],
            );
        }
    }
}
