//! Matrix products over the pool: weight rows are cut among threads, each unpacked once for several activation rows.

use std::ops::Range;

use ds4_model::MatrixSource;
use ds4_model::backend::Result;

use crate::dot::{Kernels, TILE};
use crate::failed;
use crate::pool::{Parts, Pool};
use crate::quant::{Activations, Buffer, quantise};

/// A matrix, or a stack of them, in its file's blocks, where the map has it.
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

    /// How its products take activations: quantised, or as they are.
    pub fn activations(&self, exact: bool) -> Option<Activations> {
        if exact { None } else { Kernels::activations(self.source.format) }
    }

    fn bytes(&self, index: usize, row: usize) -> &[u8] {
        let at = (index * self.source.rows + row) * self.row_bytes;
        &self.source.bytes[at..at + self.row_bytes]
    }

    /// Dequantises one row of the `index`-th matrix.
    pub fn row(&self, index: usize, row: usize, out: &mut [f32]) -> Result<()> {
        self.source
            .format
            .dequantize(self.bytes(index, row), out)
            .map_err(|e| failed(&self.source.name, e.to_string()))
    }

    /// Products of row `row` of the `index`-th matrix with the input rows `from(0..n)`; `put(i, value)` takes them.
    /// `weights` is scratch of `cols` values.
    #[allow(clippy::too_many_arguments)]
    pub fn dot_rows(
        &self,
        kernels: &Kernels,
        index: usize,
        row: usize,
        input: &Input<'_>,
        n: usize,
        from: impl Fn(usize) -> usize,
        weights: &mut [f32],
        mut put: impl FnMut(usize, f32),
    ) -> Result<()> {
        match input {
            Input::F32(x) => {
                let cols = self.cols();
                self.row(index, row, &mut weights[..cols])?;
                for i in 0..n {
                    let at = from(i) * cols;
                    put(i, (kernels.f32)(&x[at..at + cols], &weights[..cols]));
                }
            }
            Input::Quantised(x) => {
                let Some((one, tile)) = kernels.blocks(self.source.format) else {
                    return Err(failed(
                        &self.source.name,
                        "quantised input for a format without kernels".into(),
                    ));
                };
                let w = self.bytes(index, row);
                let tiles = n / TILE * TILE;
                for i in (0..tiles).step_by(TILE) {
                    let values = tile(w, std::array::from_fn(|k| x.row(from(i + k))));
                    values.into_iter().enumerate().for_each(|(k, v)| put(i + k, v));
                }
                for i in tiles..n {
                    put(i, one(w, [x.row(from(i))])[0]);
                }
            }
        }
        Ok(())
    }
}

/// Activation rows in the form that a matrix takes.
pub enum Input<'a> {
    F32(&'a [f32]),
    Quantised(&'a Buffer),
}

/// Threads, kernels and buffers: what a product needs besides its operands.
pub struct Worker {
    pub pool: Pool,
    pub kernels: Kernels,
    pub exact: bool,
    buffer: Buffer,
    /// Per thread: one dequantised weight row.
    rows: Vec<Vec<f32>>,
}

impl Worker {
    pub fn new(pool: Pool, kernels: Kernels) -> Self {
        Worker { pool, kernels, exact: false, buffer: Buffer::default(), rows: Vec::new() }
    }

    /// Room for inputs of `values` values, and weight rows of `cols`.
    pub fn prepare(&mut self, exact: bool, values: usize, cols: usize) {
        self.exact = exact;
        self.buffer = Buffer::with_capacity(values);
        self.rows = vec![vec![0.0; cols]; self.pool.threads()];
    }

    /// Quantises `rows` input rows where `matrix` takes them so.
    fn quantise(&mut self, matrix: &Matrix, x: &[f32]) {
        let Some(kind) = matrix.activations(self.exact) else { return };
        let cols = matrix.cols();
        self.buffer.shape(kind, cols);
        let (block, s, g) = (kind.block(), cols / kind.block(), cols / 16);
        let Buffer { q, scales, sums, .. } = &mut self.buffer;
        let (q, scales, sums) = (Parts::new(q), Parts::new(scales), Parts::new(sums));
        self.pool.split(x.len() / cols, |_, rows| {
            for i in rows {
                // SAFETY: every row's parts are taken by one thread only.
                let (q, scales, sums) = unsafe {
                    (
                        q.slice(i * cols..(i + 1) * cols),
                        scales.slice(i * s..(i + 1) * s),
                        sums.slice(i * g..(i + 1) * g),
                    )
                };
                quantise(block, &x[i * cols..(i + 1) * cols], q, scales, sums);
            }
        });
    }

    /// `y [T, stride]`, columns `at..` = `x [T, cols] W^T` for rows `range` of the matrix.
    pub fn multiply_into(
        &mut self,
        matrix: &Matrix,
        range: Range<usize>,
        x: &[f32],
        y: &mut [f32],
        stride: usize,
        at: usize,
    ) -> Result<()> {
        self.quantise(matrix, x);
        let n = x.len() / matrix.cols();
        let input = match matrix.activations(self.exact) {
            Some(_) => Input::Quantised(&self.buffer),
            None => Input::F32(x),
        };
        let (kernels, out, scratch) = (self.kernels, Parts::new(y), Parts::new(&mut self.rows));
        let failures = Failures::default();
        self.pool.split(range.len(), |worker, part| {
            // SAFETY: one entry a thread.
            let weights = unsafe { &mut scratch.slice(worker..worker + 1)[0] };
            for j in part {
                failures.note(matrix.dot_rows(
                    &kernels,
                    0,
                    range.start + j,
                    &input,
                    n,
                    |i| i,
                    weights,
                    |i, v| {
                        let place = i * stride + at + j;
                        // SAFETY: column `at + j` is this thread's.
                        unsafe { out.slice(place..place + 1)[0] = v };
                    },
                ));
            }
        });
        failures.result()
    }

    /// `y [T, rows] = x [T, cols] W^T`
    pub fn multiply(&mut self, matrix: &Matrix, x: &[f32], y: &mut [f32]) -> Result<()> {
        self.multiply_into(matrix, 0..matrix.rows(), x, y, matrix.rows(), 0)
    }

    /// One product a pair: `y [pairs, rows]` of pair `p` is the `expert(p)`-th matrix times input row `from(p)`. `groups`
    /// lists each used matrix with its pairs. `finish(row, pair)` may turn the value into what is stored.
    pub fn multiply_grouped(
        &mut self,
        matrix: &Matrix,
        groups: &[(usize, Vec<usize>)],
        x: &[f32],
        from: impl Fn(usize) -> usize + Sync,
        y: &mut [f32],
    ) -> Result<()> {
        self.quantise(matrix, x);
        let input = match matrix.activations(self.exact) {
            Some(_) => Input::Quantised(&self.buffer),
            None => Input::F32(x),
        };
        /// Weight rows that one unit of work takes.
        const ROWS: usize = 32;
        let rows = matrix.rows();
        let tiles = rows.div_ceil(ROWS);
        let (kernels, out, scratch) = (self.kernels, Parts::new(y), Parts::new(&mut self.rows));
        let failures = Failures::default();
        self.pool.each(groups.len() * tiles, |worker, unit| {
            // SAFETY: one entry a thread.
            let weights = unsafe { &mut scratch.slice(worker..worker + 1)[0] };
            let ((index, pairs), tile) = (&groups[unit / tiles], unit % tiles);
            for row in tile * ROWS..((tile + 1) * ROWS).min(rows) {
                let put = |i: usize, v: f32| {
                    let place = pairs[i] * rows + row;
                    // SAFETY: a pair belongs to one group, and this unit alone has its rows.
                    unsafe { out.slice(place..place + 1)[0] = v };
                };
                failures.note(matrix.dot_rows(
                    &kernels,
                    *index,
                    row,
                    &input,
                    pairs.len(),
                    |i| from(pairs[i]),
                    weights,
                    put,
                ));
            }
        });
        failures.result()
    }
}

/// The first failure of several threads.
#[derive(Default)]
pub struct Failures(std::sync::Mutex<Option<ds4_model::BackendError>>);

impl Failures {
    pub fn note(&self, result: Result<()>) {
        if let Err(e) = result {
            self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner).get_or_insert(e);
        }
    }

    pub fn result(self) -> Result<()> {
        match self.0.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner) {
            Some(e) => Err(e),
            None => Ok(()),
        }
    }
}
