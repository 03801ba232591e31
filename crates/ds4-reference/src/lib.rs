//! The clear f32 backend: MODEL.md as code, one function per block, no tricks. It is the specification that the fast
//! backends are tested against.

#![forbid(unsafe_code)]

mod attention;
pub mod compressor;
mod experts;
#[cfg(feature = "conformance")]
pub mod goldens;
pub mod hyper_connection;
mod indexer;
pub mod math;
mod matrix;
pub mod state;

use ds4_gguf::BlockFormat;
use ds4_model::backend::{Backend, Element, Handles, MatrixSource, PlanLine, Result, Setup, TensorSpec};
use ds4_model::weights::{Attention, Compressor, Experts, Head, HyperConnection, Indexer, Layer, Router};
use ds4_model::{BackendError, Batch, LayerKind, PageId, Slot};

pub use matrix::Matrix;
use state::State;

/// An activation buffer on the host.
pub struct Tensor {
    pub cols: usize,
    data: Data,
}

enum Data {
    F32(Vec<f32>),
    I32(Vec<i32>),
}

impl Tensor {
    fn new(spec: TensorSpec) -> Self {
        let len = spec.rows * spec.cols;
        let data = match spec.element {
            Element::F32 => Data::F32(vec![0.0; len]),
            Element::I32 => Data::I32(vec![0; len]),
        };
        Tensor { cols: spec.cols, data }
    }

    fn floats(&self) -> Result<&[f32]> {
        match &self.data {
            Data::F32(v) => Ok(v),
            Data::I32(_) => Err(wrong_element("f32")),
        }
    }

    fn floats_mut(&mut self) -> Result<&mut [f32]> {
        match &mut self.data {
            Data::F32(v) => Ok(v),
            Data::I32(_) => Err(wrong_element("f32")),
        }
    }

    fn ids(&self) -> Result<&[i32]> {
        match &self.data {
            Data::I32(v) => Ok(v),
            Data::F32(_) => Err(wrong_element("i32")),
        }
    }

    fn ids_mut(&mut self) -> Result<&mut [i32]> {
        match &mut self.data {
            Data::I32(v) => Ok(v),
            Data::F32(_) => Err(wrong_element("i32")),
        }
    }
}

fn wrong_element(wanted: &str) -> BackendError {
    failed("activation buffer", format!("used as {wanted}, which it is not"))
}

const DEVICE: &str = "reference (one CPU thread, f32)";

fn failed(what: &str, reason: String) -> BackendError {
    BackendError::Failed { device: DEVICE.into(), what: what.into(), reason }
}

/// An integer table `[rows, cols]`.
pub struct Table {
    cols: usize,
    values: Vec<i32>,
}

/// The backend. Build it with [`Reference::default`].
#[derive(Default)]
pub struct Reference {
    setup: Option<Setup>,
    /// Rotary frequencies of sliding and of compressed layers.
    freqs: [Vec<f32>; 2],
    state: State,
    batch: Batch,
}

impl Reference {
    fn setup(&self) -> Result<&Setup> {
        self.setup.as_ref().ok_or_else(|| failed("setup", "used before prepare".into()))
    }

    fn freqs(&self, kind: LayerKind) -> &[f32] {
        &self.freqs[usize::from(kind != LayerKind::Window)]
    }
}

impl Handles for Reference {
    type Matrix = Matrix;
    type Vector = Vec<f32>;
    type Table = Table;
}

impl Backend for Reference {
    type Tensor = Tensor;

    fn device(&self) -> String {
        DEVICE.into()
    }

    fn plan(setup: &Setup) -> Vec<PlanLine> {
        State::plan(setup)
    }

    fn matrix_bytes(_: BlockFormat, _: usize, _: usize, _: usize) -> u64 {
        0
    }

    fn prepare(&mut self, setup: &Setup) -> Result<()> {
        self.freqs = [LayerKind::Window, LayerKind::Indexed].map(|kind| setup.hyper.rope_freqs(kind));
        self.state = State::new(setup);
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
        Ok(Tensor::new(spec))
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
        Ok(())
    }

    fn embed(&mut self, table: &Matrix, x: &mut Tensor) -> Result<()> {
        let stride = x.cols;
        let out = x.floats_mut()?;
        for (streams, &token) in out.chunks_exact_mut(stride).zip(self.batch.tokens()) {
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
        self.compress_rows(layer, compressor, h.floats()?, compressor::Kind::Main)
    }

    fn select_rows(
        &mut self,
        layer: &Layer<Self>,
        indexer: &Indexer<Self>,
        h: &Tensor,
        qr: &Tensor,
        selected: &mut Tensor,
    ) -> Result<()> {
        self.compress_rows(layer, &indexer.compressor, h.floats()?, compressor::Kind::Index)?;
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
