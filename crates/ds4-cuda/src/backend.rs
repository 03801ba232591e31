//! The model's blocks as launches. Everything a step varies in lies in device buffers, so that a recorded step serves
//! every batch of its shape.

use std::collections::HashMap;

use ds4_gguf::BlockFormat;
use ds4_model::backend::{Backend, Element, Handles, MatrixSource, PlanLine, Result, Setup, TensorSpec};
use ds4_model::kv::LayerKv;
use ds4_model::weights::{
    Attention, Choice, Compressor, Experts, Head, HyperConnection, Indexer, Layer, Router,
};
use ds4_model::{BackendError, Batch, LayerKind, PageId, Slot};

use crate::abi::{self, ExpertMats, Mat, Mixing, Pooling, Product, Products, Ptr, Rows, Step};
use crate::device::{Device, Graph, Memory, launch};
use crate::state::{self, Buffers, Sizes};

/// Batches of at most this many rows are recorded and replayed.
const RECORD_ROWS: usize = 64;
/// Recorded shapes that are kept.
const GRAPHS: usize = 64;
/// Bytes of a matrix that pass through the card's repacking buffer at once.
const REPACK: usize = 32 << 20;

pub struct Matrix {
    mat: Mat,
    _memory: Memory,
}

pub struct Vector {
    memory: Memory,
}

pub struct Table {
    memory: Memory,
}

pub struct Tensor {
    memory: Memory,
    cols: usize,
    element: Element,
}

/// What `prepare` sets up.
struct Ready {
    setup: Setup,
    sizes: Sizes,
    buffers: Buffers,
    rows: Rows,
    step: Step,
    /// Pages that each slot has.
    pages: Vec<usize>,
    batch: Batch,
}

/// Segments, rows and outputs of a step.
type Shape = (usize, usize, usize);

pub struct Cuda {
    device: Device,
    ready: Option<Box<Ready>>,
    /// Recorded steps; an empty entry was run once and will be recorded the next time.
    graphs: HashMap<Shape, Option<Graph>>,
    /// Repacking buffer, for loading only.
    repack: Option<Memory>,
}

impl Cuda {
    /// Opens the `ordinal`-th card.
    pub fn open(ordinal: usize) -> Result<Cuda> {
        Ok(Cuda { device: Device::open(ordinal)?, ready: None, graphs: HashMap::new(), repack: None })
    }

    fn failed(&self, what: &str, reason: impl Into<String>) -> BackendError {
        BackendError::Failed { device: self.device.name.clone(), what: what.into(), reason: reason.into() }
    }

    fn unsupported(&self, what: &str, reason: String) -> BackendError {
        BackendError::Unsupported { device: self.device.name.clone(), what: what.into(), reason }
    }

    /// The device and what was prepared, apart.
    fn parts(&mut self) -> Result<(&mut Device, &mut Ready)> {
        match &mut self.ready {
            Some(ready) => Ok((&mut self.device, ready)),
            None => Err(BackendError::Failed {
                device: self.device.name.clone(),
                what: "setup".into(),
                reason: "used before prepare".into(),
            }),
        }
    }

    fn span(&self, t: &Tensor, element: Element, first_row: usize, len: usize) -> Result<Ptr> {
        let at = (first_row * t.cols) as u64 * 4;
        if t.element != element || at + len as u64 * 4 > t.memory.bytes {
            return Err(self.failed(
                "activation buffer",
                format!(
                    "{len} {element:?} values from row {first_row} on: it has {} bytes of {:?}",
                    t.memory.bytes, t.element
                ),
            ));
        }
        Ok(t.memory.ptr + at)
    }
}

/// Bytes of a block's head where blocks are split on the card, so that bodies are aligned.
fn split_head(format: BlockFormat) -> Option<usize> {
    match format {
        BlockFormat::Q8_0 | BlockFormat::IQ2XXS => Some(2),
        BlockFormat::MXFP4 => Some(1),
        _ => None,
    }
}

/// One product of a launch.
struct Job<'a> {
    m: &'a Matrix,
    x: Ptr,
    x_stride: usize,
    y: Ptr,
    group_rows: u32,
}

impl<'a> Job<'a> {
    fn new(m: &'a Matrix, x: Ptr, y: Ptr) -> Job<'a> {
        Job { m, x, x_stride: m.mat.cols as usize, y, group_rows: m.mat.rows.max(1) }
    }
}

/// Mirrors `row_per_block` of the kernels.
fn row_per_block(m: &Mat) -> bool {
    m.rows <= 64 && m.cols >= 2048
}

fn products(device: &mut Device, tokens: usize, jobs: &[Job<'_>]) -> Result<()> {
    let mut p = Products { count: jobs.len() as u32, tokens: tokens as u32, ..Products::default() };
    let mut blocks = 0;
    for (slot, j) in p.job.iter_mut().zip(jobs) {
        let m = j.m.mat;
        *slot = Product {
            m,
            x: j.x,
            y: j.y,
            x_stride: j.x_stride as u32,
            y_stride: m.rows,
            group_rows: j.group_rows,
            first_block: blocks,
        };
        blocks += if row_per_block(&m) { m.rows } else { m.rows.div_ceil(8) };
    }
    let tokens = tokens as u32;
    match tokens {
        1 => launch!(device, "products_1", (blocks, 1, 1), 256, 0; p),
        2 => launch!(device, "products_2", (blocks, 1, 1), 256, 0; p),
        3..=4 => launch!(device, "products_4", (blocks, 1, 1), 256, 0; p),
        _ => launch!(device, "products_8", (blocks, tokens.div_ceil(8), 1), 256, 0; p),
    }
}

#[derive(Clone, Copy, PartialEq)]
enum Which {
    Main,
    Index,
}

/// Takes the batch's rows into a compressor, and writes the rows that they complete.
fn compress(
    device: &mut Device,
    r: &Ready,
    layer: &Layer<Cuda>,
    c: &Compressor<Cuda>,
    h: Ptr,
    which: Which,
) -> Result<()> {
    let (tokens, b) = (r.batch.len(), &r.buffers);
    let kv: &LayerKv = r.setup.layout.layer(layer.index);
    let Some(ratio) = layer.kind.ratio() else { return Ok(()) };
    products(device, tokens, &[Job::new(&c.kv, h, b.values.ptr), Job::new(&c.gate, h, b.gates.ptr)])?;
    let (width, acc_at, rows_at) = match which {
        Which::Main => (r.setup.layout.head_dim, kv.acc_at, kv.rows_at),
        Which::Index => (r.setup.layout.index_dim, kv.index_acc_at, kv.index_at),
    };
    let p = Pooling {
        a: b.values.ptr,
        z: b.gates.ptr,
        ape: c.ape.memory.ptr,
        state: b.windows.ptr,
        norm: c.norm.memory.ptr,
        freqs: b.freqs(layer.kind),
        acc_at: acc_at as u64,
        rows_at: rows_at as u64,
        ratio: ratio as u32,
        width: width as u32,
        overlap: u32::from(layer.kind == LayerKind::Indexed),
        index: u32::from(which == Which::Index),
        stride: c.kv.mat.rows,
        eps: r.setup.hyper.rms_eps,
    };
    let windows = state::window_bound(tokens, r.batch.segments().len(), ratio) as u32;
    launch!(device, "pool", (p.width.div_ceil(128), windows, 1), 128, 0; r.step, p)?;
    launch!(device, "pool_finish", (windows, 1, 1), 128, 4 * p.width; r.step, r.rows, p)
}

/// Streams to a sublayer's or the head's input.
#[allow(clippy::too_many_arguments)]
fn mix_streams(
    device: &mut Device,
    r: &Ready,
    rows: usize,
    mix: &Matrix,
    base: &Vector,
    scale: &Vector,
    norm: &Vector,
    x: Ptr,
    h: Ptr,
    out: Ptr,
) -> Result<()> {
    let hp = &r.setup.hyper;
    products(device, rows, &[Job::new(mix, x, r.buffers.mixing.ptr)])?;
    let a = Mixing {
        x,
        m: r.buffers.mixing.ptr,
        base: base.memory.ptr,
        scale: scale.memory.ptr,
        norm: norm.memory.ptr,
        h,
        mix: out,
        streams: hp.streams as u32,
        hidden: hp.hidden as u32,
        iterations: hp.sinkhorn_iters as u32,
        hc_eps: hp.hc_eps,
        rms_eps: hp.rms_eps,
    };
    launch!(device, "hc_mix", (rows as u32, 1, 1), 512, 0; a)
}

impl Handles for Cuda {
    type Matrix = Matrix;
    type Vector = Vector;
    type Table = Table;
}

impl Backend for Cuda {
    type Tensor = Tensor;

    fn device(&self) -> String {
        self.device.name.clone()
    }

    fn plan(setup: &Setup) -> Vec<PlanLine> {
        state::plan(setup)
    }

    fn matrix_bytes(format: BlockFormat, stack: usize, rows: usize, cols: usize) -> u64 {
        (stack * rows) as u64 * format.row_bytes(cols as u64)
    }

    fn prepare(&mut self, setup: &Setup) -> Result<()> {
        let hp = &setup.hyper;
        for (what, found, most) in [
            ("head size", hp.head_dim, 1024),
            ("residual streams", hp.streams, 8),
            ("experts", hp.experts, 1024),
            ("experts a token", hp.experts_used, 32),
        ] {
            if found > most {
                return Err(self.unsupported(what, format!("{found}, at most {most}")));
            }
        }
        let sizes = Sizes::new(setup);
        let buffers = Buffers::new(&self.device, setup)?;
        let scores = (4 * sizes.seen) as u32;
        self.device.allow_shared("attend_exact", scores.max(48 << 10))?;
        self.device
            .allow_shared("index_scores", ((4 * hp.index_heads * hp.index_dim) as u32).max(48 << 10))?;
        let (t, limits) = (setup.limits.rows as u64 * 4, &setup.limits);
        let at = buffers.step.ptr;
        let segments = at + 3 * t + limits.outputs as u64 * 4;
        let windows = segments + limits.slots as u64 * 16;
        let step = Step {
            tokens: at,
            pos: at + t,
            segment_of: at + 2 * t,
            outputs: at + 3 * t,
            segments,
            windows: [windows, windows + sizes.windows[0] as u64 * 8],
            tables: buffers.tables.ptr,
            pages: buffers.pages.ptr,
            frontiers: buffers.frontiers.ptr,
            page_bytes: setup.layout.page_bytes as u64,
            frontier_bytes: setup.layout.frontier_bytes as u64,
            table_max: sizes.table_max as u32,
            rows: 0,
        };
        self.graphs.clear();
        self.ready = Some(Box::new(Ready {
            rows: state::rows(setup),
            pages: vec![0; setup.limits.slots],
            setup: setup.clone(),
            sizes,
            buffers,
            step,
            batch: Batch::new(),
        }));
        Ok(())
    }

    fn matrix(&mut self, source: MatrixSource) -> Result<Matrix> {
        let MatrixSource { name, format, stack, rows, cols, bytes } = source;
        if cols % 8 != 0 {
            return Err(self.unsupported(&name, format!("{cols} columns, a multiple of 8 is needed")));
        }
        let memory = self.device.allocate(&name, bytes.len() as u64)?;
        let block = format.block_bytes();
        let blocks = bytes.len() / block;
        let heads_at = match split_head(format) {
            None => {
                self.device.upload(&name, memory.ptr, &bytes)?;
                0
            }
            Some(head) => {
                let body = block - head;
                let heads_at = (blocks * body) as u64;
                if self.repack.is_none() {
                    self.repack = Some(self.device.allocate("repacking while loading", REPACK as u64)?);
                }
                let staging = self.repack.as_ref().map_or(0, |m| m.ptr);
                let each = REPACK / block;
                for (i, part) in bytes.chunks(each * block).enumerate() {
                    self.device.upload(&name, staging, part)?;
                    let (n, first) = ((part.len() / block) as u64, (i * each) as u64);
                    let bodies: Ptr = memory.ptr + first * body as u64;
                    let heads: Ptr = memory.ptr + heads_at + first * head as u64;
                    launch!(self.device, "split_blocks", (1024, 1, 1), 256, 0; staging, bodies, heads, n, body as u32, head as u32)?;
                }
                self.device.synchronize(&name)?;
                heads_at
            }
        };
        let mat = Mat {
            data: memory.ptr,
            heads_at,
            format: format.type_number(),
            rows: rows as u32,
            cols: cols as u32,
            row_bytes: format.row_bytes(cols as u64) as u32,
        };
        let _ = stack;
        Ok(Matrix { mat, _memory: memory })
    }

    fn vector(&mut self, name: &str, values: Vec<f32>) -> Result<Vector> {
        let memory = self.device.allocate(name, values.len() as u64 * 4)?;
        self.device.upload(name, memory.ptr, bytes_of(&values))?;
        Ok(Vector { memory })
    }

    fn table(&mut self, name: &str, _cols: usize, values: Vec<i32>) -> Result<Table> {
        let experts = self.parts()?.1.setup.hyper.experts;
        if let Some(e) = values.iter().find(|e| **e < 0 || **e as usize >= experts) {
            return Err(self.failed(name, format!("expert {e} of {experts}")));
        }
        let memory = self.device.allocate(name, values.len() as u64 * 4)?;
        self.device.upload(name, memory.ptr, bytes_of(&values))?;
        Ok(Table { memory })
    }

    fn tensor(&mut self, spec: TensorSpec) -> Result<Tensor> {
        // Buffers come last: nothing is repacked from here on.
        self.repack = None;
        let memory = self.device.allocate(spec.name, spec.bytes())?;
        self.device.zero(memory.ptr, memory.bytes as usize)?;
        Ok(Tensor { memory, cols: spec.cols, element: spec.element })
    }

    fn read(&mut self, t: &Tensor, first_row: usize, out: &mut [f32]) -> Result<()> {
        let at = self.span(t, Element::F32, first_row, out.len())?;
        self.device.download("read", at, bytes_of_mut(out))
    }

    fn write(&mut self, t: &mut Tensor, first_row: usize, values: &[f32]) -> Result<()> {
        let at = self.span(t, Element::F32, first_row, values.len())?;
        self.device.upload("write", at, bytes_of(values))
    }

    fn read_ids(&mut self, t: &Tensor, first_row: usize, out: &mut [i32]) -> Result<()> {
        let at = self.span(t, Element::I32, first_row, out.len())?;
        self.device.download("read", at, bytes_of_mut(out))
    }

    fn write_ids(&mut self, t: &mut Tensor, first_row: usize, values: &[i32]) -> Result<()> {
        let at = self.span(t, Element::I32, first_row, values.len())?;
        self.device.upload("write", at, bytes_of(values))
    }

    fn reset(&mut self, slot: Slot) -> Result<()> {
        let (device, r) = self.parts()?;
        let bytes = r.setup.layout.frontier_bytes;
        r.pages[slot as usize] = 0;
        device.zero(r.buffers.frontiers.ptr + (slot as usize * bytes) as u64, bytes)
    }

    fn set_pages(&mut self, slot: Slot, first: usize, pages: &[PageId]) -> Result<()> {
        let (device, r) = self.parts()?;
        let (have, most) = (r.pages[slot as usize], r.sizes.table_max);
        let reason = if first > have || first + pages.len() > most {
            Some(format!("pages {first}..{}: the table has {have}, at most {most}", first + pages.len()))
        } else {
            pages
                .iter()
                .find(|p| **p as usize >= r.setup.limits.pages)
                .map(|p| format!("page {p} is outside the pool"))
        };
        if let Some(reason) = reason {
            return Err(self.failed("set_pages", reason));
        }
        r.pages[slot as usize] = first + pages.len();
        let at = r.buffers.tables.ptr + ((slot as usize * most + first) * 4) as u64;
        device.upload("page table", at, bytes_of(pages))
    }

    fn save_frontier(&mut self, slot: Slot, out: &mut [u8]) -> Result<()> {
        let (device, r) = self.parts()?;
        let at = slot as usize * r.setup.layout.frontier_bytes;
        device.download("frontier", r.buffers.frontiers.ptr + at as u64, out)
    }

    fn load_frontier(&mut self, slot: Slot, bytes: &[u8]) -> Result<()> {
        let (device, r) = self.parts()?;
        let at = slot as usize * r.setup.layout.frontier_bytes;
        device.upload("frontier", r.buffers.frontiers.ptr + at as u64, bytes)
    }

    fn read_page(&mut self, page: PageId, out: &mut [u8]) -> Result<()> {
        let (device, r) = self.parts()?;
        let at = page as usize * r.setup.layout.page_bytes;
        device.download("page", r.buffers.pages.ptr + at as u64, out)
    }

    fn write_page(&mut self, page: PageId, bytes: &[u8]) -> Result<()> {
        let (device, r) = self.parts()?;
        let at = page as usize * r.setup.layout.page_bytes;
        device.upload("page", r.buffers.pages.ptr + at as u64, bytes)
    }

    fn copy_page(&mut self, from: PageId, to: PageId) -> Result<()> {
        let (device, r) = self.parts()?;
        let (base, bytes) = (r.buffers.pages.ptr, r.setup.layout.page_bytes);
        let at = |page: PageId| base + (page as usize * bytes) as u64;
        device.copy(at(from), at(to), bytes)
    }

    fn begin(&mut self, batch: &Batch) -> Result<()> {
        let name = self.device.name.clone();
        let (device, r) = self.parts()?;
        let l = r.setup.limits;
        let compressed = r.setup.layout.layers.iter().any(|k| k.kind != LayerKind::Window);
        for s in batch.segments() {
            let (have, need) = (
                r.pages[s.slot as usize],
                (s.pos + s.len) / 4 * 4 / 128 + usize::from((s.pos + s.len) / 4 % 32 != 0),
            );
            if compressed && have < need {
                return Err(BackendError::Failed {
                    device: name,
                    what: "page table".into(),
                    reason: format!("slot {} has {have} pages, {need} are used", s.slot),
                });
            }
        }
        let mut words = vec![0i32; r.sizes.step_words];
        let (tokens, rest) = words.split_at_mut(l.rows);
        let (pos, rest) = rest.split_at_mut(l.rows);
        let (segment_of, rest) = rest.split_at_mut(l.rows);
        let (outputs, rest) = rest.split_at_mut(l.outputs);
        let (segments, rest) = rest.split_at_mut(4 * l.slots);
        let (windows4, windows128) = rest.split_at_mut(2 * r.sizes.windows[0]);
        for (o, t) in tokens.iter_mut().zip(batch.tokens()) {
            *o = *t as i32;
        }
        for (o, p) in pos.iter_mut().zip(batch.positions()) {
            *o = p as i32;
        }
        for (o, p) in outputs.iter_mut().zip(batch.outputs()) {
            *o = *p as i32;
        }
        for (i, s) in batch.segments().iter().enumerate() {
            segment_of[s.row..s.row + s.len].fill(i as i32);
            segments[4 * i..4 * i + 4].copy_from_slice(&[
                s.slot as i32,
                s.pos as i32,
                s.row as i32,
                s.len as i32,
            ]);
        }
        for (list, ratio, ahead) in [(windows4, 4, 1), (windows128, 128, 0)] {
            list.fill(-1);
            let all = batch.segments().iter().enumerate().flat_map(|(i, s)| {
                (s.pos / ratio..=(s.pos + s.len) / ratio + ahead).map(move |w| [i as i32, w as i32])
            });
            for (o, w) in list.chunks_exact_mut(2).zip(all) {
                o.copy_from_slice(&w);
            }
        }
        r.batch.clone_from(batch);
        r.step.rows = batch.len() as u32;
        device.upload("step", r.buffers.step.ptr, bytes_of(&words))
    }

    fn record(&mut self, batch: &Batch, body: impl FnOnce(&mut Self) -> Result<()>) -> Result<()> {
        self.device.enter()?;
        if batch.len() > RECORD_ROWS {
            return body(self);
        }
        let shape = (batch.segments().len(), batch.len(), batch.outputs().len());
        match self.graphs.get(&shape) {
            // The first time runs plainly: it loads the kernels.
            None => {
                if self.graphs.len() >= GRAPHS {
                    self.device.synchronize("graphs")?;
                    self.graphs.clear();
                }
                body(self)?;
                self.graphs.insert(shape, None);
                Ok(())
            }
            Some(Some(graph)) => self.device.replay(graph),
            Some(None) => {
                self.device.begin_capture()?;
                let issued = body(self);
                let graph = self.device.end_capture();
                issued?;
                let graph = graph?;
                self.device.replay(&graph)?;
                self.graphs.insert(shape, Some(graph));
                Ok(())
            }
        }
    }

    fn embed(&mut self, table: &Matrix, x: &mut Tensor) -> Result<()> {
        let (device, r) = self.parts()?;
        let streams = r.setup.hyper.streams as u32;
        launch!(device, "embed", (r.batch.len() as u32, 1, 1), 128, 0; table.mat, r.step, x.memory.ptr, streams)
    }

    fn hc_pre(
        &mut self,
        hc: &HyperConnection<Self>,
        norm: &Vector,
        x: &Tensor,
        h: &mut Tensor,
        mix: &mut Tensor,
    ) -> Result<()> {
        let (device, r) = self.parts()?;
        let (x, h, out) = (x.memory.ptr, h.memory.ptr, mix.memory.ptr);
        mix_streams(device, r, r.batch.len(), &hc.mix, &hc.base, &hc.scale, norm, x, h, out)
    }

    fn hc_post(&mut self, y: &Tensor, mix: &Tensor, x: &mut Tensor) -> Result<()> {
        let (device, r) = self.parts()?;
        let (n, hidden) = (r.setup.hyper.streams as u32, r.setup.hyper.hidden as u32);
        let grid = (hidden.div_ceil(256), r.batch.len() as u32, 1);
        launch!(device, "hc_post", grid, 256, 0; y.memory.ptr, mix.memory.ptr, x.memory.ptr, n, hidden)
    }

    fn project_q(&mut self, layer: &Layer<Self>, h: &Tensor, qr: &mut Tensor, q: &mut Tensor) -> Result<()> {
        let (device, r) = self.parts()?;
        let (hp, w, tokens) = (&r.setup.hyper, &layer.attention, r.batch.len());
        products(device, tokens, &[Job::new(&w.q_a, h.memory.ptr, qr.memory.ptr)])?;
        let rows = tokens as u32;
        let (n, eps) = (hp.q_lora as u32, hp.rms_eps);
        launch!(device, "rms_rows", (rows, 1, 1), 256, 0; qr.memory.ptr, w.q_norm.memory.ptr, n, eps)?;
        products(device, tokens, &[Job::new(&w.q_b, qr.memory.ptr, q.memory.ptr)])?;
        let (dim, rope, freqs) = (hp.head_dim as u32, hp.rope_dim as u32, r.buffers.freqs(layer.kind));
        launch!(device, "finish_q", (hp.heads as u32, rows, 1), 128, 4 * dim; r.step, q.memory.ptr, freqs, dim, rope, eps)
    }

    fn project_kv(&mut self, layer: &Layer<Self>, h: &Tensor, kv: &mut Tensor) -> Result<()> {
        let (device, r) = self.parts()?;
        let (w, tokens, eps) = (&layer.attention, r.batch.len(), r.setup.hyper.rms_eps);
        products(device, tokens, &[Job::new(&w.kv, h.memory.ptr, kv.memory.ptr)])?;
        let freqs = r.buffers.freqs(layer.kind);
        launch!(device, "finish_kv", (tokens as u32, 1, 1), 128, 4 * r.rows.dim; r.step, r.rows, kv.memory.ptr, w.kv_norm.memory.ptr, freqs, eps)
    }

    fn compress(&mut self, layer: &Layer<Self>, c: &Compressor<Self>, h: &Tensor) -> Result<()> {
        let (device, r) = self.parts()?;
        compress(device, r, layer, c, h.memory.ptr, Which::Main)
    }

    fn select_rows(
        &mut self,
        layer: &Layer<Self>,
        indexer: &Indexer<Self>,
        h: &Tensor,
        qr: &Tensor,
        selected: &mut Tensor,
    ) -> Result<()> {
        let (device, r) = self.parts()?;
        compress(device, r, layer, &indexer.compressor, h.memory.ptr, Which::Index)?;
        let (hp, b, tokens) = (&r.setup.hyper, &r.buffers, r.batch.len());
        products(
            device,
            tokens,
            &[
                Job::new(&indexer.q_b, qr.memory.ptr, b.index_q.ptr),
                Job::new(&indexer.weights, h.memory.ptr, b.index_weights.ptr),
            ],
        )?;
        let (heads, dim, topk) = (hp.index_heads as u32, hp.index_dim as u32, hp.index_topk as u32);
        let freqs = b.freqs(layer.kind);
        launch!(device, "finish_index_q", (heads, tokens as u32, 1), 128, 4 * dim; r.step, r.rows, b.index_q.ptr, freqs)?;
        let (capacity, at) = (r.sizes.index_rows as u32, r.setup.layout.layer(layer.index).index_at as u64);
        let scale = 1.0 / ((hp.index_heads * hp.index_dim) as f32).sqrt();
        for first in (0..tokens).step_by(r.sizes.score_rows) {
            let rows = r.sizes.score_rows.min(tokens - first) as u32;
            let first = first as u32;
            if capacity > topk {
                launch!(device, "index_scores", (capacity.div_ceil(128), rows, 1), 128, 4 * heads * dim;
                    r.step, r.rows, b.index_q.ptr, b.index_weights.ptr, b.scores.ptr, heads, topk, first, capacity, at, scale)?;
            }
            launch!(device, "select_rows", (rows, 1, 1), 1024, 0; r.step, b.scores.ptr, selected.memory.ptr, topk, first, capacity)?;
        }
        Ok(())
    }

    fn attend(
        &mut self,
        layer: &Layer<Self>,
        q: &Tensor,
        kv: &Tensor,
        selected: Option<&Tensor>,
        o: &mut Tensor,
    ) -> Result<()> {
        let (device, r) = self.parts()?;
        let (hp, place) = (&r.setup.hyper, r.setup.layout.layer(layer.index));
        let a = abi::Attending {
            q: q.memory.ptr,
            kv: kv.memory.ptr,
            selected: selected.map_or(0, |s| s.memory.ptr),
            sinks: layer.attention.sinks.memory.ptr,
            freqs: r.buffers.freqs(layer.kind),
            o: o.memory.ptr,
            ring_at: place.ring_at as u64,
            rows_at: place.rows_at as u64,
            ratio: layer.kind.ratio().unwrap_or(0) as u32,
            topk: hp.index_topk as u32,
            heads: hp.heads as u32,
            capacity: r.sizes.seen as u32,
            scale: 1.0 / (hp.head_dim as f32).sqrt(),
        };
        let rows = r.batch.len() as u32;
        launch!(device, "attend_exact", (a.heads, rows, 1), 128, 4 * a.capacity; r.step, r.rows, a)?;
        launch!(device, "store_window", (rows, 1, 1), 128, 0; r.step, r.rows, kv.memory.ptr, a.ring_at)
    }

    fn project_output(&mut self, attention: &Attention<Self>, o: &Tensor, y: &mut Tensor) -> Result<()> {
        let (device, r) = self.parts()?;
        let (hp, tokens, low) = (&r.setup.hyper, r.batch.len(), r.buffers.low.ptr);
        let mut first = Job::new(&attention.output_a, o.memory.ptr, low);
        first.x_stride = hp.q_dim();
        first.group_rows = hp.o_lora as u32;
        products(device, tokens, &[first])?;
        products(device, tokens, &[Job::new(&attention.output_b, low, y.memory.ptr)])
    }

    fn route(
        &mut self,
        router: &Router<Self>,
        h: &Tensor,
        experts: &mut Tensor,
        gates: &mut Tensor,
    ) -> Result<()> {
        let (device, r) = self.parts()?;
        let (hp, tokens, logits) = (&r.setup.hyper, r.batch.len(), r.buffers.router.ptr);
        products(device, tokens, &[Job::new(&router.gate, h.memory.ptr, logits)])?;
        let (bias, table): (Ptr, Ptr) = match &router.choice {
            Choice::Hash(table) => (0, table.memory.ptr),
            Choice::TopK(bias) => (bias.memory.ptr, 0),
        };
        let (count, k) = (hp.experts as u32, hp.experts_used as u32);
        launch!(device, "route", (tokens as u32, 1, 1), 256, 0;
            r.step, logits, bias, table, experts.memory.ptr, gates.memory.ptr, count, k, hp.route_scale)
    }

    fn run_experts(
        &mut self,
        w: &Experts<Self>,
        h: &Tensor,
        experts: &Tensor,
        gates: &Tensor,
        y: &mut Tensor,
    ) -> Result<()> {
        let (device, r) = self.parts()?;
        let hp = &r.setup.hyper;
        let e = ExpertMats {
            gate: w.gate.mat,
            up: w.up.mat,
            down: w.down.mat,
            shared_gate: w.shared_gate.mat,
            shared_up: w.shared_up.mat,
            shared_down: w.shared_down.mat,
            h: h.memory.ptr,
            experts: experts.memory.ptr,
            gates: gates.memory.ptr,
            mid: r.buffers.mid.ptr,
            parts: r.buffers.parts.ptr,
            y: y.memory.ptr,
            k: hp.experts_used as u32,
            width: r.sizes.expert_width as u32,
            hidden: hp.hidden as u32,
            clamp: w.clamp,
        };
        let tokens = r.batch.len() as u32;
        let pairs = tokens * (e.k + 1);
        launch!(device, "expert_up", (e.width.div_ceil(8), pairs, 1), 256, 0; e)?;
        launch!(device, "expert_down", (e.hidden.div_ceil(8), pairs, 1), 256, 0; e)?;
        launch!(device, "expert_sum", (e.hidden.div_ceil(256), tokens, 1), 256, 0; e)
    }

    fn head(&mut self, head: &Head<Self>, x: &Tensor, logits: &mut Tensor) -> Result<()> {
        let (device, r) = self.parts()?;
        let (hp, b, outputs) = (&r.setup.hyper, &r.buffers, r.batch.outputs().len());
        let width = (hp.streams * hp.hidden) as u32;
        launch!(device, "gather_outputs", (outputs as u32, 1, 1), 256, 0; r.step, x.memory.ptr, b.out_streams.ptr, width)?;
        let (streams, rows) = (b.out_streams.ptr, b.out_rows.ptr);
        mix_streams(device, r, outputs, &head.mix, &head.base, &head.scale, &head.norm, streams, rows, 0)?;
        products(device, outputs, &[Job::new(&head.output, rows, logits.memory.ptr)])
    }
}

/// Values as the card takes them; every host that has a card is little-endian.
fn bytes_of<T: bytemuck::NoUninit>(values: &[T]) -> &[u8] {
    bytemuck::cast_slice(values)
}

fn bytes_of_mut<T: bytemuck::Pod>(values: &mut [T]) -> &mut [u8] {
    bytemuck::cast_slice_mut(values)
}
