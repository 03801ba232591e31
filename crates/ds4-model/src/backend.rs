//! What the model asks of a device: one operation per block of the paper, each over a ragged batch.
//!
//! A backend is not a tensor library. Every operation works on all rows of the batch announced by [`Backend::begin`];
//! every row's result depends on that row and its session's past alone, so batch composition and chunk size do not
//! change it. No operation allocates: buffers are sized once by [`Backend::prepare`], [`Backend::tensor`] and the
//! weights' binding, and the memory plan knows each of them.

use ds4_gguf::{BlockFormat, TensorBytes};

use crate::batch::{Batch, Limits, PageId, Slot};
use crate::error::BackendError;
use crate::hyper::HyperParams;
use crate::kv::KvLayout;
use crate::weights::{Attention, Compressor, Experts, Head, HyperConnection, Indexer, Layer, Router};

pub type Result<T> = std::result::Result<T, BackendError>;

/// Numeric mode of an instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Numerics {
    /// Whether activations are rounded where the model was trained with it (MODEL: "qat").
    pub qat: bool,
    /// Whether matrix inputs stay f32. Otherwise a backend may quantise them to 8 bits.
    pub exact: bool,
}

impl Numerics {
    pub const PLAIN_EXACT: Numerics = Numerics { qat: false, exact: true };
    pub const QAT: Numerics = Numerics { qat: true, exact: false };
}

/// A matrix `[rows, cols]`, or a stack of `stack` such matrices (the experts), in the file's block format.
#[derive(Clone)]
pub struct MatrixSource {
    pub name: String,
    pub format: BlockFormat,
    pub stack: usize,
    pub rows: usize,
    pub cols: usize,
    /// `stack * rows` rows of `format.row_bytes(cols)` bytes, straight from the map.
    pub bytes: TensorBytes,
}

/// Element type of an activation buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Element {
    F32,
    I32,
}

/// An activation buffer `[rows, cols]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorSpec {
    pub name: &'static str,
    pub rows: usize,
    pub cols: usize,
    pub element: Element,
}

impl TensorSpec {
    pub fn bytes(&self) -> u64 {
        self.rows as u64 * self.cols as u64 * 4
    }
}

/// One line of the memory plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlanLine {
    pub name: String,
    pub bytes: u64,
}

/// What an instance is built for; handed to the backend before anything else.
#[derive(Clone, Debug)]
pub struct Setup {
    pub hyper: HyperParams,
    pub layout: KvLayout,
    pub limits: Limits,
    pub numerics: Numerics,
}

/// Entries of a selection that hold no row.
pub const NO_ROW: i32 = -1;

/// Weights as a device holds them.
pub trait Handles {
    /// Blocks of the file's format.
    type Matrix;
    /// Small f32 weights: norms, biases, scales, sinks.
    type Vector;
    /// An integer table `[rows, cols]`.
    type Table;
}

pub trait Backend: Handles + Send + Sized {
    /// An activation buffer.
    type Tensor: Send;

    // ---- what it is -------------------------------------------------------------------------------------------
    /// The device in words, for the log and for errors.
    fn device(&self) -> String;

    /// Bytes that this backend allocates itself for `setup`: page pool, frontiers, its own scratch.
    fn plan(setup: &Setup) -> Vec<PlanLine>;

    /// Bytes that binding this matrix allocates (0 where weights stay in the map).
    fn matrix_bytes(format: BlockFormat, stack: usize, rows: usize, cols: usize) -> u64;

    // ---- loading ----------------------------------------------------------------------------------------------
    /// Allocates what [`Backend::plan`] lists. Called once, first.
    fn prepare(&mut self, setup: &Setup) -> Result<()>;
    fn matrix(&mut self, source: MatrixSource) -> Result<Self::Matrix>;
    fn vector(&mut self, name: &str, values: Vec<f32>) -> Result<Self::Vector>;
    fn table(&mut self, name: &str, cols: usize, values: Vec<i32>) -> Result<Self::Table>;
    fn tensor(&mut self, spec: TensorSpec) -> Result<Self::Tensor>;

    // ---- activations to and from the host ---------------------------------------------------------------------
    /// Copies rows `first_row..` of `t` out until `out` is full; waits for the device.
    fn read(&mut self, t: &Self::Tensor, first_row: usize, out: &mut [f32]) -> Result<()>;
    fn write(&mut self, t: &mut Self::Tensor, first_row: usize, values: &[f32]) -> Result<()>;
    /// The same for an integer buffer.
    fn read_ids(&mut self, t: &Self::Tensor, first_row: usize, out: &mut [i32]) -> Result<()>;
    fn write_ids(&mut self, t: &mut Self::Tensor, first_row: usize, values: &[i32]) -> Result<()>;

    // ---- sessions' memory -------------------------------------------------------------------------------------
    /// Empties a frontier: position 0, nothing remembered.
    fn reset(&mut self, slot: Slot) -> Result<()>;
    /// From the `first`-th on, the session in `slot` uses these pages.
    fn set_pages(&mut self, slot: Slot, first: usize, pages: &[PageId]) -> Result<()>;
    /// Copies a frontier out ([`KvLayout::frontier_bytes`] bytes).
    fn save_frontier(&mut self, slot: Slot, out: &mut [u8]) -> Result<()>;
    fn load_frontier(&mut self, slot: Slot, bytes: &[u8]) -> Result<()>;
    /// Copies a page out ([`KvLayout::page_bytes`] bytes).
    fn read_page(&mut self, page: PageId, out: &mut [u8]) -> Result<()>;
    fn write_page(&mut self, page: PageId, bytes: &[u8]) -> Result<()>;
    fn copy_page(&mut self, from: PageId, to: PageId) -> Result<()>;

    // ---- one step ---------------------------------------------------------------------------------------------
    /// Announces the batch that the following operations work on. The batch has been checked.
    fn begin(&mut self, batch: &Batch) -> Result<()>;

    /// Runs `body`, which issues the same operations for every batch of the same number of segments, rows and
    /// outputs. A device that can record may replay instead.
    fn record(&mut self, batch: &Batch, body: impl FnOnce(&mut Self) -> Result<()>) -> Result<()> {
        let _ = batch;
        body(self)
    }

    // ---- the model's blocks, in the order of the forward pass --------------------------------------------------
    // T rows in the batch; shapes as [rows, columns].

    /// `x [T, n*D]`: every stream is the token's row of `table [V, D]`.
    fn embed(&mut self, table: &Self::Matrix, x: &mut Self::Tensor) -> Result<()>;

    /// Section 3. From the streams `x [T, n*D]`: `mix [T, n + n*n]` = `post`, then `C` row by row; and
    /// `h [T, D] = rms(sum_i pre_i x_i, norm)`.
    fn hc_pre(
        &mut self,
        hc: &HyperConnection<Self>,
        norm: &Self::Vector,
        x: &Self::Tensor,
        h: &mut Self::Tensor,
        mix: &mut Self::Tensor,
    ) -> Result<()>;

    /// Section 3: `x_j = post_j y + sum_i C[i, j] x_i`, in place; `y [T, D]`.
    fn hc_post(&mut self, y: &Self::Tensor, mix: &Self::Tensor, x: &mut Self::Tensor) -> Result<()>;

    /// [`Backend::hc_post`] of one sublayer and [`Backend::hc_pre`] of the next, which a backend may fuse.
    #[allow(clippy::too_many_arguments)]
    fn hc_post_pre(
        &mut self,
        y: &Self::Tensor,
        hc: &HyperConnection<Self>,
        norm: &Self::Vector,
        x: &mut Self::Tensor,
        h: &mut Self::Tensor,
        mix: &mut Self::Tensor,
    ) -> Result<()> {
        self.hc_post(y, mix, x)?;
        self.hc_pre(hc, norm, x, h, mix)
    }

    /// Section 4: `qr [T, q_lora] = rms(wq_a h, q_norm)`; `q [T, H*d]` = per-head rms of `wq_b qr`, rotary tail.
    fn project_q(
        &mut self,
        layer: &Layer<Self>,
        h: &Self::Tensor,
        qr: &mut Self::Tensor,
        q: &mut Self::Tensor,
    ) -> Result<()>;

    /// Section 4: `kv [T, d] = rms(wkv h, kv_norm)`, rotary tail, rounded as stored ([`KvLayout::encode_main`]).
    fn project_kv(&mut self, layer: &Layer<Self>, h: &Self::Tensor, kv: &mut Self::Tensor) -> Result<()>;

    /// Section 4, "Compressor": takes the batch's rows into the layer's accumulators and writes every row that a
    /// token completes into its page.
    fn compress(
        &mut self,
        layer: &Layer<Self>,
        compressor: &Compressor<Self>,
        h: &Self::Tensor,
    ) -> Result<()>;

    /// The same for the indexer's rows, then section 4, "Indexer": `selected [T, index_topk]` (i32) = the chosen
    /// compressed rows of each token in ascending order, then [`NO_ROW`]. Ties go to the lower row.
    fn select_rows(
        &mut self,
        layer: &Layer<Self>,
        indexer: &Indexer<Self>,
        h: &Self::Tensor,
        qr: &Self::Tensor,
        selected: &mut Self::Tensor,
    ) -> Result<()>;

    /// Section 4: `o [T, H*d]` = attention of `q` over the window, the visible compressed rows (`selected`, or all
    /// where the layer has no indexer) and the sink, un-rotated. Then the window takes the batch's `kv` rows.
    fn attend(
        &mut self,
        layer: &Layer<Self>,
        q: &Self::Tensor,
        kv: &Self::Tensor,
        selected: Option<&Self::Tensor>,
        o: &mut Self::Tensor,
    ) -> Result<()>;

    /// Section 4: grouped output projection, `y [T, D]`.
    fn project_output(
        &mut self,
        attention: &Attention<Self>,
        o: &Self::Tensor,
        y: &mut Self::Tensor,
    ) -> Result<()>;

    /// Section 5: `experts [T, K]` (i32) and their weights `gates [T, K]`.
    fn route(
        &mut self,
        router: &Router<Self>,
        h: &Self::Tensor,
        experts: &mut Self::Tensor,
        gates: &mut Self::Tensor,
    ) -> Result<()>;

    /// Section 5: `y [T, D]` = the gated sum of the chosen experts, in the order of `experts`, plus the shared one.
    fn run_experts(
        &mut self,
        weights: &Experts<Self>,
        h: &Self::Tensor,
        experts: &Self::Tensor,
        gates: &Self::Tensor,
        y: &mut Self::Tensor,
    ) -> Result<()>;

    /// Section 3, "Final head": `logits [outputs, V]` of the batch's output rows.
    fn head(&mut self, head: &Head<Self>, x: &Self::Tensor, logits: &mut Self::Tensor) -> Result<()>;
}
