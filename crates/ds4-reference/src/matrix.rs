use ds4_model::MatrixSource;
use ds4_model::backend::Result;

use crate::failed;
use crate::math::dot;

/// A matrix, or a stack of them, in its file's blocks.
pub struct Matrix {
    source: MatrixSource,
    row_bytes: usize,
}

impl Matrix {
    pub fn new(source: MatrixSource) -> Self {
        let row_bytes = source.format.row_bytes(source.cols as u64) as usize;
        Matrix { source, row_bytes }
    }

    pub fn rows(&self) -> usize {
        self.source.rows
    }

    pub fn cols(&self) -> usize {
        self.source.cols
    }

    /// Dequantises one row of the `index`-th matrix of the stack.
    pub fn row(&self, index: usize, row: usize, out: &mut [f32]) -> Result<()> {
        let at = (index * self.source.rows + row) * self.row_bytes;
        self.source
            .format
            .dequantize(&self.source.bytes[at..at + self.row_bytes], out)
            .map_err(|e| failed(&self.source.name, e.to_string()))
    }

    /// `y [T, rows] = x [T, cols] W^T` for rows `range` of the matrix; `y` has `range.len()` columns.
    pub fn multiply_rows(&self, range: std::ops::Range<usize>, x: &[f32], y: &mut [f32]) -> Result<()> {
        self.multiply_expert(0, range, x, y)
    }

    /// `y [T, rows] = x [T, cols] W^T`
    pub fn multiply(&self, x: &[f32], y: &mut [f32]) -> Result<()> {
        self.multiply_rows(0..self.rows(), x, y)
    }

    /// The same with the `index`-th matrix of the stack.
    pub fn multiply_expert(
        &self,
        index: usize,
        range: std::ops::Range<usize>,
        x: &[f32],
        y: &mut [f32],
    ) -> Result<()> {
        let (cols, out) = (self.cols(), range.len());
        let mut weights = vec![0f32; cols];
        for (j, r) in range.enumerate() {
            self.row(index, r, &mut weights)?;
            for (xt, yt) in x.chunks_exact(cols).zip(y.chunks_exact_mut(out)) {
                yt[j] = dot(xt, &weights);
            }
        }
        Ok(())
    }
}
