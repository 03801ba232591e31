//! The CPU backend: the reference's blocks on all cores, with vector kernels.
//!
//! Work is cut over weight rows, heads or batch rows, never over a sum: logits do not depend on the thread count, the
//! chunk size or the batch, bit for bit. `--exact` keeps activations in f32; otherwise they are quantised to 8 bits where a
//! format has integer kernels ([`dot`]).

mod attention;
mod compressor;
pub mod dot;
mod experts;
mod hyper_connection;
mod indexer;
mod matrix;
pub mod pool;
pub mod quant;

use ds4_gguf::BlockFormat;
use ds4_model::backend::{Backend, Element, Handles, MatrixSource, PlanLine, Result, Setup, TensorSpec};
use ds4_model::weights::{Attention, Compressor, Experts, Head, HyperConnection, Indexer, Layer, Router};
use ds4_model::{BackendError, Batch, LayerKind, PageId, Slot};
use ds4_reference::compressor::Kind;
use ds4_reference::state::State;

use dot::Kernels;
pub use matrix::Matrix;
use matrix::Worker;
use pool::Pool;

const DEVICE: &str = "CPU";

fn failed(what: &str, reason: String) -> BackendError {
    BackendError::Failed { device: DEVICE.into(), what: what.into(), reason }
}

/// An activation buffer.
pub struct Tensor {
    cols: usize,
    data: Data,
}

enum Data {
    F32(Vec<f32>),
    I32(Vec<i32>),
}

macro_rules! access {
    ($get:ident, $get_mut:ident, $variant:ident, $t:ty) => {
        fn $get(&self) -> Result<&[$t]> {
            match &self.data {
                Data::$variant(v) => Ok(v),
                _ => Err(failed("activation buffer", concat!("it does not hold ", stringify!($t)).into())),
            }
        }

        fn $get_mut(&mut self) -> Result<&mut [$t]> {
            match &mut self.data {
                Data::$variant(v) => Ok(v),
                _ => Err(failed("activation buffer", concat!("it does not hold ", stringify!($t)).into())),
            }
        }
    };
}

impl Tensor {
    access!(floats, floats_mut, F32, f32);
    access!(ids, ids_mut, I32, i32);
}

/// An integer table `[rows, cols]`.
pub struct Table {
    cols: usize,
    values: Vec<i32>,
}

/// Buffers between the steps of one block, allocated once.
#[derive(Default)]
struct Scratch {
    a: Vec<f32>,
    b: Vec<f32>,
    /// Per thread: decoded rows that a token sees, and their scores.
    seen: Vec<Vec<f32>>,
}

impl Scratch {
    /// Values of `a` and `b`, and of `seen`, per thread.
    fn sizes(setup: &Setup) -> (usize, usize) {
        let (hp, t) = (&setup.hyper, setup.limits.rows);
        let widest = [
            (hp.experts_used + 1) * hp.expert_ff.max(hp.hidden) + hp.hidden,
            2 * hp.head_dim,
            hp.index_heads * hp.index_dim,
            hp.o_groups * hp.o_lora,
            hp.mix_dim(),
            hp.experts,
            hp.streams * hp.hidden,
            hp.q_dim() / hp.o_groups,
        ];
        let rows = hp.window + hp.index_topk.max(setup.limits.context / 128) + 1;
        let scores = setup.limits.context / 4 + hp.index_dim;
        (t * widest.into_iter().max().unwrap_or(0), (rows * (hp.head_dim + attention::HEADS)).max(scores))
    }
}

/// The backend.
pub struct Cpu {
    worker: Worker,
    setup: Option<Setup>,
    /// Rotary frequencies of sliding and of compressed layers.
    freqs: [Vec<f32>; 2],
    /// Their sines and cosines at each row's position, `[rows, rope_dim / 2]`.
    turns: [Vec<(f32, f32)>; 2],
    state: State,
    batch: Batch,
    scratch: Scratch,
}

/// Cores that this process may use.
pub fn default_threads() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

impl Cpu {
    /// With `threads` threads in all.
    pub fn new(threads: usize) -> Result<Self> {
        let pool = Pool::new(threads).map_err(|e| failed("threads", e.to_string()))?;
        Ok(Cpu {
            worker: Worker::new(pool, Kernels::detect()),
            setup: None,
            freqs: Default::default(),
            turns: Default::default(),
            state: State::default(),
            batch: Batch::new(),
            scratch: Scratch::default(),
        })
    }

    fn setup(&self) -> Result<&Setup> {
        self.setup.as_ref().ok_or_else(|| failed("setup", "used before prepare".into()))
    }

    fn freqs(&self, kind: LayerKind) -> &[f32] {
        &self.freqs[usize::from(kind != LayerKind::Window)]
    }

    /// Widest input row of any product.
    fn widest_input(setup: &Setup) -> usize {
        let hp = &setup.hyper;
        [hp.streams * hp.hidden, hp.q_dim() / hp.o_groups, hp.o_groups * hp.o_lora, hp.expert_ff, hp.q_lora]
            .into_iter()
            .max()
            .unwrap_or(0)
    }

    /// Quantised input values of one product: a row of each pair of a token and its expert, or the widest input.
    fn input_values(setup: &Setup) -> usize {
        let hp = &setup.hyper;
        setup.limits.rows * Self::widest_input(setup).max((hp.experts_used + 1) * hp.expert_ff)
    }
}

impl Handles for Cpu {
    type Matrix = Matrix;
    type Vector = Vec<f32>;
    type Table = Table;
}

impl Backend for Cpu {
    type Tensor = Tensor;

    fn device(&self) -> String {
        format!("{DEVICE} ({} threads, {})", self.worker.pool.threads(), self.worker.kernels.name)
    }

    fn plan(setup: &Setup) -> Vec<PlanLine> {
        let (a, seen) = Scratch::sizes(setup);
        let threads = default_threads() as u64;
        let mut lines = State::plan(setup);
        lines.push(PlanLine {
            name: "scratch".into(),
            bytes: 8 * (a + setup.limits.rows * setup.hyper.rope_dim) as u64
                + threads
                    * (4 * seen as u64
                        + Worker::scratch_bytes(setup.numerics.exact, Self::widest_input(setup))),
        });
        if !setup.numerics.exact {
            let bytes = quant::Buffer::bytes(Self::input_values(setup));
            lines.push(PlanLine { name: "8-bit activations".into(), bytes });
        }
        lines
    }

    fn matrix_bytes(_: BlockFormat, _: usize, _: usize, _: usize) -> u64 {
        0
    }

    fn prepare(&mut self, setup: &Setup) -> Result<()> {
        self.freqs = [LayerKind::Window, LayerKind::Indexed].map(|kind| setup.hyper.rope_freqs(kind));
        self.turns = [(); 2].map(|()| Vec::with_capacity(setup.limits.rows * setup.hyper.rope_dim / 2));
        self.state = State::new(setup);
        let (a, seen) = Scratch::sizes(setup);
        let seen = vec![vec![0.0; seen]; self.worker.pool.threads()];
        self.scratch = Scratch { a: vec![0.0; a], b: vec![0.0; a], seen };
        let exact = setup.numerics.exact;
        let values = if exact { 0 } else { Self::input_values(setup) };
        self.worker.prepare(exact, values, Self::widest_input(setup));
        self.setup = Some(setup.clone());
        Ok(())
    }

    fn matrix(&mut self, source: MatrixSource) -> Result<Matrix> {
        Ok(Matrix::new(source))
    }

    fn vector(&mut self, _: &str, values: Vec<f32>) -> Result<Vec<f32>> {
        Ok(values)
    }

    fn table(&mut self, _: &str, cols: usize, values: Vec<i32>) -> Result<Table> {
        Ok(Table { cols, values })
    }

    fn tensor(&mut self, spec: TensorSpec) -> Result<Tensor> {
        let len = spec.rows * spec.cols;
        let data = match spec.element {
            Element::F32 => Data::F32(vec![0.0; len]),
            Element::I32 => Data::I32(vec![0; len]),
        };
        Ok(Tensor { cols: spec.cols, data })
    }

    fn read(&mut self, t: &Tensor, first_row: usize, out: &mut [f32]) -> Result<()> {
        let at = first_row * t.cols;
        out.copy_from_slice(&t.floats()?[at..at + out.len()]);
        Ok(())
    }

    fn write(&mut self, t: &mut Tensor, first_row: usize, values: &[f32]) -> Result<()> {
        let at = first_row * t.cols;
        t.floats_mut()?[at..at + values.len()].copy_from_slice(values);
        Ok(())
    }

    fn read_ids(&mut self, t: &Tensor, first_row: usize, out: &mut [i32]) -> Result<()> {
        let at = first_row * t.cols;
        out.copy_from_slice(&t.ids()?[at..at + out.len()]);
        Ok(())
    }

    fn write_ids(&mut self, t: &mut Tensor, first_row: usize, values: &[i32]) -> Result<()> {
        let at = first_row * t.cols;
        t.ids_mut()?[at..at + values.len()].copy_from_slice(values);
        Ok(())
    }

    fn reset(&mut self, slot: Slot) -> Result<()> {
        self.state.reset(slot);
        Ok(())
    }

    fn set_pages(&mut self, slot: Slot, first: usize, pages: &[PageId]) -> Result<()> {
        self.state.set_pages(slot, first, pages)
    }

    fn save_frontier(&mut self, slot: Slot, out: &mut [u8]) -> Result<()> {
        out.copy_from_slice(self.state.frontier(slot));
        Ok(())
    }

    fn load_frontier(&mut self, slot: Slot, bytes: &[u8]) -> Result<()> {
        self.state.frontier_mut(slot).copy_from_slice(bytes);
        Ok(())
    }

    fn read_page(&mut self, page: PageId, out: &mut [u8]) -> Result<()> {
        out.copy_from_slice(self.state.page(page));
        Ok(())
    }

    fn write_page(&mut self, page: PageId, bytes: &[u8]) -> Result<()> {
        self.state.page_mut(page).copy_from_slice(bytes);
        Ok(())
    }

    fn copy_page(&mut self, from: PageId, to: PageId) -> Result<()> {
        let bytes = self.state.page(from).to_vec();
        self.write_page(to, &bytes)
    }

    fn begin(&mut self, batch: &Batch) -> Result<()> {
        self.batch = batch.clone();
        for (turns, freqs) in self.turns.iter_mut().zip(&self.freqs) {
            turns.clear();
            for pos in batch.positions() {
                turns.extend(freqs.iter().map(|f| (pos as f32 * f).sin_cos()));
            }
        }
        Ok(())
    }

    fn embed(&mut self, table: &Matrix, x: &mut Tensor) -> Result<()> {
        let stride = x.cols;
        for (streams, &token) in x.floats_mut()?.chunks_exact_mut(stride).zip(self.batch.tokens()) {
            for stream in streams.chunks_exact_mut(table.cols()) {
                table.row(0, token as usize, stream)?;
            }
        }
        Ok(())
    }

    fn hc_pre(
        &mut self,
        hc: &HyperConnection<Self>,
        norm: &Vec<f32>,
        x: &Tensor,
        h: &mut Tensor,
        mix: &mut Tensor,
    ) -> Result<()> {
        self.hc_pre_rows(hc, norm, x.floats()?, h.floats_mut()?, mix.floats_mut()?)
    }

    fn hc_post(&mut self, y: &Tensor, mix: &Tensor, x: &mut Tensor) -> Result<()> {
        self.hc_post_rows(y.floats()?, mix.floats()?, x.floats_mut()?)
    }

    fn project_q(&mut self, layer: &Layer<Self>, h: &Tensor, qr: &mut Tensor, q: &mut Tensor) -> Result<()> {
        self.project_q_rows(layer, h.floats()?, qr.floats_mut()?, q.floats_mut()?)
    }

    fn project_kv(&mut self, layer: &Layer<Self>, h: &Tensor, kv: &mut Tensor) -> Result<()> {
        self.project_kv_rows(layer, h.floats()?, kv.floats_mut()?)
    }

    fn compress(&mut self, layer: &Layer<Self>, compressor: &Compressor<Self>, h: &Tensor) -> Result<()> {
        self.compress_rows(layer, compressor, h.floats()?, Kind::Main)
    }

    fn select_rows(
        &mut self,
        layer: &Layer<Self>,
        indexer: &Indexer<Self>,
        h: &Tensor,
        qr: &Tensor,
        selected: &mut Tensor,
    ) -> Result<()> {
        self.compress_rows(layer, &indexer.compressor, h.floats()?, Kind::Index)?;
        self.select(layer, indexer, h.floats()?, qr.floats()?, selected.ids_mut()?)
    }

    fn attend(
        &mut self,
        layer: &Layer<Self>,
        q: &Tensor,
        kv: &Tensor,
        selected: Option<&Tensor>,
        o: &mut Tensor,
    ) -> Result<()> {
        let selected = selected.map(Tensor::ids).transpose()?;
        self.attend_rows(layer, q.floats()?, kv.floats()?, selected, o.floats_mut()?)
    }

    fn project_output(&mut self, attention: &Attention<Self>, o: &Tensor, y: &mut Tensor) -> Result<()> {
        self.project_output_rows(attention, o.floats()?, y.floats_mut()?)
    }

    fn route(
        &mut self,
        router: &Router<Self>,
        h: &Tensor,
        experts: &mut Tensor,
        gates: &mut Tensor,
    ) -> Result<()> {
        self.route_rows(router, h.floats()?, experts.ids_mut()?, gates.floats_mut()?)
    }

    fn run_experts(
        &mut self,
        weights: &Experts<Self>,
        h: &Tensor,
        experts: &Tensor,
        gates: &Tensor,
        y: &mut Tensor,
    ) -> Result<()> {
        self.run_experts_rows(weights, h.floats()?, experts.ids()?, gates.floats()?, y.floats_mut()?)
    }

    fn head(&mut self, head: &Head<Self>, x: &Tensor, logits: &mut Tensor) -> Result<()> {
        self.head_rows(head, x.floats()?, logits.floats_mut()?)
    }
}
