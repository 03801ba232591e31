//! Matrix products over the pool: weight rows are cut among threads, each unpacked once for several activation rows.

use std::ops::Range;

use ds4_gguf::BlockFormat;
use ds4_model::MatrixSource;
use ds4_model::backend::Result;

use crate::dot::{F32_ROWS, F32_TOKENS, Kernels, PANEL_ROWS, TILE_TOKENS, TileScratch};
use crate::failed;
use crate::pool::{Parts, Pool};
use crate::quant::{Activations, Buffer, Quantised, quantise};

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

    /// Dequantises one row of the `index`-th matrix, fast where its format is f16.
    fn values(&self, kernels: &Kernels, index: usize, row: usize, out: &mut [f32]) -> Result<()> {
        if self.source.format == BlockFormat::F16 {
            (kernels.half)(self.bytes(index, row), out);
            return Ok(());
        }
        self.row(index, row, out)
    }

    /// Products of `rows` of the `index`-th matrix with the input rows `from(0..n)`; `put(row, i, value)` takes them.
    #[allow(clippy::too_many_arguments)]
    fn block(
        &self,
        kernels: &Kernels,
        index: usize,
        rows: Range<usize>,
        input: &Input<'_>,
        n: usize,
        from: impl Fn(usize) -> usize,
        scratch: &mut Scratch,
        put: impl FnMut(usize, usize, f32),
    ) -> Result<()> {
        match input {
            Input::F32(x) => self.block_f32(kernels, index, rows, x, n, from, &mut scratch.values, put),
            Input::Quantised(x) => {
                self.block_quantised(kernels, index, rows, x, n, from, &mut scratch.tile, put);
                Ok(())
            }
        }
    }

    #[allow(clippy::too_many_arguments)]
    fn block_f32(
        &self,
        kernels: &Kernels,
        index: usize,
        rows: Range<usize>,
        x: &[f32],
        n: usize,
        from: impl Fn(usize) -> usize,
        values: &mut [f32],
        mut put: impl FnMut(usize, usize, f32),
    ) -> Result<()> {
        let cols = self.cols();
        let token = |i: usize| &x[from(i) * cols..(from(i) + 1) * cols];
        for first in rows.clone().step_by(F32_ROWS) {
            let count = F32_ROWS.min(rows.end - first);
            for r in 0..count {
                self.values(kernels, index, first + r, &mut values[r * cols..(r + 1) * cols])?;
            }
            let weights = |r: usize| &values[r * cols..(r + 1) * cols];
            let whole = if count == F32_ROWS { n / F32_TOKENS * F32_TOKENS } else { 0 };
            for i in (0..whole).step_by(F32_TOKENS) {
                let tile =
                    (kernels.f32_tile)(std::array::from_fn(weights), std::array::from_fn(|k| token(i + k)));
                for (r, tile) in tile.into_iter().enumerate() {
                    tile.into_iter().enumerate().for_each(|(k, v)| put(first + r, i + k, v));
                }
            }
            for i in whole..n {
                (0..count).for_each(|r| put(first + r, i, (kernels.f32)(token(i), weights(r))));
            }
        }
        Ok(())
    }

    #[allow(clippy::too_many_arguments)]
    fn block_quantised(
        &self,
        kernels: &Kernels,
        index: usize,
        rows: Range<usize>,
        x: &Buffer,
        n: usize,
        from: impl Fn(usize) -> usize,
        scratch: &mut TileScratch,
        mut put: impl FnMut(usize, usize, f32),
    ) {
        let (format, cols) = (self.source.format, self.cols());
        // A tile costs about as much as four rows one by one.
        const FEW: usize = 4;
        let tiled = match (kernels.tiles, n % TILE_TOKENS) {
            (None, _) => 0,
            _ if scratch.tiles(cols) == 0 => 0,
            (_, 1..FEW) => n / TILE_TOKENS * TILE_TOKENS,
            _ => n,
        };
        if let Some(tiles) = kernels.tiles {
            let at_once = scratch.tiles(cols) * TILE_TOKENS;
            let mut out = [[0f32; TILE_TOKENS]; PANEL_ROWS];
            for start in (0..tiled).step_by(at_once.max(1)) {
                let end = (start + at_once).min(tiled);
                for (t, i) in (start..end).step_by(TILE_TOKENS).enumerate() {
                    let count = TILE_TOKENS.min(end - i);
                    let tokens: [Quantised<'_>; TILE_TOKENS] =
                        std::array::from_fn(|k| x.row(from(i + k.min(count - 1))));
                    (tiles.pack)(&mut scratch.packed, t, &tokens[..count]);
                }
                for first in rows.clone().step_by(PANEL_ROWS) {
                    let count = PANEL_ROWS.min(rows.end - first);
                    let weights: [&[u8]; PANEL_ROWS] =
                        std::array::from_fn(|r| self.bytes(index, first + r.min(count - 1)));
                    (tiles.unpack)(format, &weights[..count], cols, &mut scratch.panel);
                    for (t, i) in (start..end).step_by(TILE_TOKENS).enumerate() {
                        (tiles.multiply)(format, cols, &scratch.panel, &scratch.packed, t, &mut out);
                        for (r, out) in out.iter().enumerate().take(count) {
                            for (k, v) in out.iter().enumerate().take(end - i) {
                                put(first + r, i + k, *v);
                            }
                        }
                    }
                }
            }
        }
        if tiled < n {
            for row in rows {
                let w = self.bytes(index, row);
                (tiled..n).for_each(|i| put(row, i, (kernels.row)(format, w, x.row(from(i)))));
            }
        }
    }
}

/// One thread's buffers, allocated once.
#[derive(Default)]
struct Scratch {
    /// Dequantised weight rows.
    values: Vec<f32>,
    tile: TileScratch,
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
    /// Per thread.
    scratch: Vec<Scratch>,
}

impl Worker {
    pub fn new(pool: Pool, kernels: Kernels) -> Self {
        Worker { pool, kernels, exact: false, buffer: Buffer::default(), scratch: Vec::new() }
    }

    /// Bytes of the buffers of one thread, for products of up to `cols` input values.
    pub fn scratch_bytes(exact: bool, cols: usize) -> u64 {
        let tile = if exact { 0 } else { TileScratch::bytes(cols) };
        (F32_ROWS * cols * 4) as u64 + tile
    }

    /// Room for inputs of `values` values, in rows of up to `cols`.
    pub fn prepare(&mut self, exact: bool, values: usize, cols: usize) {
        self.exact = exact;
        self.buffer = Buffer::with_capacity(values);
        self.scratch = (0..self.pool.threads())
            .map(|_| Scratch {
                values: vec![0.0; F32_ROWS * cols],
                tile: if exact { TileScratch::default() } else { TileScratch::with_cols(cols) },
            })
            .collect();
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
        let (kernels, out, scratch) = (self.kernels, Parts::new(y), Parts::new(&mut self.scratch));
        let failures = Failures::default();
        self.pool.split(range.len().div_ceil(PANEL_ROWS), |worker, part| {
            // SAFETY: one entry a thread.
            let scratch = unsafe { &mut scratch.slice(worker..worker + 1)[0] };
            let rows =
                range.start + PANEL_ROWS * part.start..(range.start + PANEL_ROWS * part.end).min(range.end);
            failures.note(matrix.block(
                &kernels,
                0,
                rows,
                &input,
                n,
                |i| i,
                scratch,
                |row, i, v| {
                    let place = i * stride + at + row - range.start;
                    // SAFETY: this row's column is this thread's.
                    unsafe { out.slice(place..place + 1)[0] = v };
                },
            ));
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
        // Small units for a decode token, so that threads end together; large ones where a unit packs many tokens.
        let most = groups.iter().map(|(_, pairs)| pairs.len()).max().unwrap_or(0);
        let unit_rows = if most < TILE_TOKENS / 2 { 64 } else { 512 };
        let rows = matrix.rows();
        let tiles = rows.div_ceil(unit_rows);
        let (kernels, out, scratch) = (self.kernels, Parts::new(y), Parts::new(&mut self.scratch));
        let failures = Failures::default();
        self.pool.each(groups.len() * tiles, |worker, unit| {
            // SAFETY: one entry a thread.
            let scratch = unsafe { &mut scratch.slice(worker..worker + 1)[0] };
            let ((index, pairs), tile) = (&groups[unit / tiles], unit % tiles);
            failures.note(matrix.block(
                &kernels,
                *index,
                tile * unit_rows..((tile + 1) * unit_rows).min(rows),
                &input,
                pairs.len(),
                |i| from(pairs[i]),
                scratch,
                |row, i, v| {
                    let place = pairs[i] * rows + row;
                    // SAFETY: a pair belongs to one group, and this unit alone has its rows.
                    unsafe { out.slice(place..place + 1)[0] = v };
                },
            ));
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
