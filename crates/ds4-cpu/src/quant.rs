//! Activations in 8 bits.

/// How many values share a scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activations {
    /// For weights in blocks of 32: Q8_0, MXFP4.
    Blocks32,
    /// For weights in super-blocks: the K-quants and IQ2_XXS.
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
    /// Sums of 16 values of `q` each.
    pub sums: &'a [i16],
}

impl Quantised<'_> {
    #[cfg(test)]
    pub fn dequantize(&self) -> Vec<f32> {
        let block = self.q.len() / self.scales.len();
        self.q.iter().enumerate().map(|(i, q)| f32::from(*q) * self.scales[i / block]).collect()
    }
}

/// Quantises one row into its parts. A value that is not finite makes its block's scale NaN, so that it is seen.
pub fn quantise(block: usize, x: &[f32], q: &mut [i8], scales: &mut [f32], sums: &mut [i16]) {
    const LANES: usize = 16;
    for ((x, q), scale) in x.chunks_exact(block).zip(q.chunks_exact_mut(block)).zip(scales) {
        let (mut top, mut poison) = ([0f32; LANES], [0f32; LANES]);
        for x in x.chunks_exact(LANES) {
            for i in 0..LANES {
                let a = x[i].abs();
                top[i] = if a > top[i] { a } else { top[i] };
                poison[i] += x[i] * 0.0;
            }
        }
        let amax = top.iter().fold(0f32, |m, v| if *v > m { *v } else { m });
        let inverse = if amax > 0.0 { 127.0 / amax } else { 0.0 };
        *scale = amax / 127.0 + poison.iter().sum::<f32>();
        for (q, v) in q.iter_mut().zip(x) {
            // Adding 1.5 * 2^23 rounds to the nearest integer, ties to even; the integer is in the lowest bits.
            *q = (v * inverse + 12_582_912.0).to_bits() as i8;
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
        Quantised {
            q: &self.q[i * n..(i + 1) * n],
            scales: &self.scales[i * s..(i + 1) * s],
            sums: &self.sums[i * g..(i + 1) * g],
        }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nearest_even_and_exact_scale() {
        let mut x = [0f32; 32];
        (x[0], x[1], x[2], x[3], x[4]) = (127.0, -127.0, 2.5, -3.5, 0.4);
        let (mut q, mut s, mut sums) = ([0i8; 32], [0f32; 1], [0i16; 2]);
        quantise(32, &x, &mut q, &mut s, &mut sums);
        assert_eq!((q[0], q[1], q[2], q[3], q[4], s[0]), (127, -127, 2, -4, 0, 1.0));
        assert_eq!(sums, [-2, 0]);
    }

    #[test]
    fn what_is_not_finite_is_seen() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut x = [1f32; 32];
            x[9] = bad;
            let (mut q, mut s, mut sums) = ([0i8; 32], [0f32; 1], [0i16; 2]);
            quantise(32, &x, &mut q, &mut s, &mut sums);
            assert!(s[0].is_nan(), "{bad}");
        }
    }
}
