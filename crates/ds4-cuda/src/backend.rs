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

use crate::abi::{
    self, Ahead, ExpertMats, Gemm, Grouped, Mat, Mixing, Pooling, Product, Products, Ptr, Rows, Step, Streams,
};
use crate::device::{Device, Graph, Memory, launch};
use crate::state::{self, BLOCKS, Buffers, FEW_TOKENS, INTEGER_TOKENS, Sizes};

/// Batches of at most this many rows are recorded and replayed.
const RECORD_ROWS: usize = 64;
/// Recorded shapes that are kept.
const GRAPHS: usize = 64;
/// Bytes of weights that are fetched towards the cache while a sublayer's input is computed, while attention runs, and
/// before the second half of the query's projection.
const AHEAD_OF_SUBLAYER: u32 = 30 << 20;
const AHEAD_OF_OUTPUT: u32 = 24 << 20;
const AHEAD_OF_Q: u32 = 16 << 20;
/// Shared memory that quantised activations may take: what every supported card has.
const INTEGER_SHARED: u32 = 96 << 10;
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
    /// The buffer whose f16 form is in `half_h`.
    half_h: Ptr,
    /// The layer and the input whose products are made already: the first operation on `h` makes them all.
    ahead: Option<(usize, Ptr)>,
    /// Buffers of activations, and where the kernel that wrote each left it in 8 bits (or, of key-value rows, as stored).
    coded: Vec<(Ptr, Ptr)>,
    /// By the matrix that mixes the streams: the weights that follow it, as they were seen the first time.
    follows: HashMap<Ptr, Ahead>,
    /// The last such matrix.
    mixed: Ptr,
}

impl Ready {
    /// The sublayer's input has changed, and with it all that follows.
    fn forget_input(&mut self) {
        self.half_h = 0;
        self.ahead = None;
        self.coded.clear();
    }

    /// Where `x` lies in 8 bits, or 0.
    fn codes_of(&self, x: Ptr) -> Ptr {
        self.coded.iter().find(|c| c.0 == x).map_or(0, |c| c.1)
    }

    /// `x` has changed; it lies in 8 bits at `codes`, unless that is 0.
    fn recode(&mut self, x: Ptr, codes: Ptr) {
        self.coded.retain(|c| c.0 != x);
        if codes != 0 {
            self.coded.push((x, codes));
        }
    }

    /// Whether `tokens` tokens go through the integer kernels.
    fn few(&self, tokens: usize) -> bool {
        !self.setup.numerics.exact && tokens <= INTEGER_TOKENS
    }

    /// Notes that `m` is read after the streams were mixed last.
    fn follow(&mut self, m: &Mat) {
        let ahead = self.follows.entry(self.mixed).or_default();
        if !ahead.at.contains(&m.data) {
            ahead.add(m, AHEAD_OF_SUBLAYER);
        }
    }

    /// Whether attention runs on tensor cores over packed rows.
    fn flashes(&self) -> bool {
        let r = &self.rows;
        !self.setup.numerics.exact && r.packed != 0 && r.rope == 64 && matches!(r.dim, 512 | 192)
    }
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

    /// Forgets recorded steps: a shape's next step runs plainly, the one after it is recorded.
    pub fn forget_recorded(&mut self) -> Result<()> {
        self.device.enter()?;
        self.device.synchronize("graphs")?;
        self.graphs.clear();
        Ok(())
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
    /// Where the integer kernels leave `y` in 8 bits too; 0: nowhere.
    y_codes: Ptr,
    group_rows: u32,
}

impl<'a> Job<'a> {
    fn new(m: &'a Matrix, x: Ptr, y: Ptr) -> Job<'a> {
        Job { m, x, x_stride: m.mat.cols as usize, y, y_codes: 0, group_rows: m.mat.rows.max(1) }
    }

    fn product(&self, first_block: u32) -> Product {
        let m = self.m.mat;
        Product {
            m,
            x: self.x,
            y: self.y,
            x_stride: self.x_stride as u32,
            y_stride: m.rows,
            group_rows: self.group_rows,
            first_block,
            x_codes: 0,
            y_codes: 0,
        }
    }
}

/// Whether the integer kernels read the matrix's blocks as they are.
fn has_integer_rows(m: &Mat) -> bool {
    [BlockFormat::Q8_0, BlockFormat::Q2K, BlockFormat::IQ2XXS].iter().any(|f| f.type_number() == m.format)
}

/// Whether the tensor-core products have an expansion of their own for all of these: Q8_0, or the format `own` of their place.
fn expands(mats: &[&Mat], own: BlockFormat) -> bool {
    let formats = [BlockFormat::Q8_0.type_number(), own.type_number()];
    mats.iter().all(|m| formats.contains(&m.format))
}

/// Mirrors `row_per_block` of the kernels.
fn row_per_block(m: &Mat) -> bool {
    m.rows <= 1024 && m.cols >= 2048
}

/// Products in f32, up to [`abi::PRODUCTS`] of them in one launch.
fn products<'a, 'b: 'a>(
    device: &mut Device,
    tokens: usize,
    jobs: impl IntoIterator<Item = &'a Job<'b>>,
) -> Result<()> {
    let mut p = Products { tokens: tokens as u32, ..Products::default() };
    let mut blocks = 0;
    // Mirrors `rows_per_warp` of the kernels.
    let per_block = if tokens <= 2 { 16 } else { 8 };
    for (slot, j) in p.job.iter_mut().zip(jobs) {
        *slot = j.product(blocks);
        p.count += 1;
        blocks += if row_per_block(&slot.m) { slot.m.rows } else { slot.m.rows.div_ceil(per_block) };
    }
    let tokens = tokens as u32;
    match tokens {
        1 => launch!(device, "products_1", (blocks, 1, 1), 256, 0; p),
        2 => launch!(device, "products_2", (blocks, 1, 1), 256, 0; p),
        3..=4 => launch!(device, "products_4", (blocks, 1, 1), 256, 0; p),
        _ => launch!(device, "products_8", (blocks, tokens.div_ceil(8), 1), 256, 0; p),
    }
}

/// The `tokens` rows of `x` in f16. A sublayer's input `h` serves many products and is converted once.
fn half(device: &mut Device, r: &mut Ready, x: Ptr, stride: usize, tokens: usize) -> Result<Ptr> {
    let sublayer = stride == r.setup.hyper.hidden && x != r.buffers.low.ptr && x != r.buffers.out_rows.ptr;
    if sublayer && r.half_h == x {
        return Ok(r.buffers.half_h.ptr);
    }
    let to = if sublayer { r.buffers.half_h.ptr } else { r.buffers.half_x.ptr };
    if sublayer {
        r.half_h = x;
    }
    let quads = (tokens * stride / 4) as u64;
    let blocks = quads.div_ceil(256).min(2048) as u32;
    launch!(device, "to_half", (blocks, 1, 1), 256, 0; x, to, quads)?;
    Ok(to)
}

/// Products that share their input, by the way that suits the mode and the number of tokens.
fn project(device: &mut Device, r: &mut Ready, tokens: usize, jobs: &[Job<'_>]) -> Result<()> {
    if r.setup.numerics.exact {
        return products(device, tokens, jobs);
    }
    let mut plain: Vec<&Job<'_>> = Vec::new();
    if tokens > INTEGER_TOKENS {
        for j in jobs {
            let m = &j.m.mat;
            let whole = j.group_rows == m.rows || j.group_rows.is_multiple_of(abi::GEMM_ROWS);
            if !m.cols.is_multiple_of(abi::GEMM_COLS)
                || j.x_stride > r.setup.hyper.q_dim().max(r.setup.hyper.hidden)
                || !whole
            {
                plain.push(j);
                continue;
            }
            let x = half(device, r, j.x, j.x_stride, tokens)?;
            let t = tokens as u32;
            let rows = m.rows.div_ceil(abi::GEMM_ROWS);
            // A small product leaves few blocks: its columns are split too.
            let tile: u32 = match t {
                0..=16 => 16,
                17..=64 => 64,
                _ => 128,
            };
            let blocks = rows * t.div_ceil(tile);
            let splits = (BLOCKS as u32 / blocks).clamp(1, (m.cols / abi::GEMM_COLS).min(16));
            let parts = r.buffers.split.ptr;
            let g = Gemm {
                m: *m,
                x,
                y: if splits > 1 { parts } else { j.y },
                x_stride: j.x_stride as u32,
                y_stride: m.rows,
                group_rows: j.group_rows,
                tokens: t,
                splits,
                ..Gemm::default()
            };
            let grid = (t.div_ceil(tile), rows, splits);
            let any = !expands(&[m], BlockFormat::F16);
            let shared = abi::gemm_shared(tile);
            match (tile, any) {
                (16, false) => launch!(device, "gemm_16", grid, 256, shared; g)?,
                (64, false) => launch!(device, "gemm_64", grid, 256, shared; g)?,
                (_, false) => launch!(device, "gemm_128", grid, 256, shared; g)?,
                (16, true) => launch!(device, "gemm_any_16", grid, 256, shared; g)?,
                (64, true) => launch!(device, "gemm_any_64", grid, 256, shared; g)?,
                (_, true) => launch!(device, "gemm_any_128", grid, 256, shared; g)?,
            }
            if splits > 1 {
                let n = t * m.rows;
                launch!(device, "sum_splits", (n.div_ceil(256), 1, 1), 256, 0; parts, j.y, n, splits)?;
            }
        }
    } else {
        let group: usize = match tokens {
            1 | 2 => tokens,
            3..=4 => 4,
            _ => 8,
        };
        let total: u32 = jobs.iter().map(|j| j.m.mat.rows).sum();
        let step = if jobs.iter().any(|j| j.y_codes != 0) { 32 } else { 8 };
        let rows = total.div_ceil(BLOCKS as u32).next_multiple_of(step).min(abi::INTEGER_ROWS);
        let mut p = Products { tokens: tokens as u32, ..Products::default() };
        let (mut blocks, mut shared) = (0, 0);
        for j in jobs {
            let m = &j.m.mat;
            let floats = m.format == BlockFormat::F16.type_number();
            let bytes =
                if floats { group as u32 * m.cols * 4 } else { abi::quantised_bytes(group as u32, m.cols) };
            let fits = match floats {
                true => m.cols.is_multiple_of(256) && group <= 4 && j.group_rows == m.rows,
                false => {
                    m.format == BlockFormat::Q8_0.type_number()
                        && m.cols.is_multiple_of(128)
                        && (j.group_rows == m.rows || j.group_rows.is_multiple_of(rows))
                }
            };
            if !fits || bytes > INTEGER_SHARED {
                plain.push(j);
                continue;
            }
            let y_codes = if m.rows.is_multiple_of(128) { j.y_codes } else { 0 };
            r.recode(j.y, y_codes);
            p.job[p.count as usize] = Product { x_codes: r.codes_of(j.x), y_codes, ..j.product(blocks) };
            p.count += 1;
            blocks += m.rows.div_ceil(rows);
            shared = shared.max(bytes);
        }
        if p.count > 0 {
            let groups = tokens.div_ceil(group) as u32;
            match group {
                1 => launch!(device, "integer_1", (blocks, 1, 1), 256, shared; p, rows)?,
                2 => launch!(device, "integer_2", (blocks, 1, 1), 256, shared; p, rows)?,
                4 => launch!(device, "integer_4", (blocks, 1, 1), 256, shared; p, rows)?,
                _ => launch!(device, "integer_8", (blocks, groups, 1), 256, shared; p, rows)?,
            }
        }
    }
    if plain.is_empty() { Ok(()) } else { products(device, tokens, plain) }
}

#[derive(Clone, Copy, PartialEq)]
enum Which {
    Main,
    Index,
}

/// Takes the batch's rows into a compressor, and writes the rows that they complete.
fn compress(
    device: &mut Device,
    r: &mut Ready,
    layer: &Layer<Cuda>,
    c: &Compressor<Cuda>,
    h: Ptr,
    which: Which,
) -> Result<()> {
    let (values, gates) = match which {
        Which::Main => (r.buffers.values.ptr, r.buffers.gates.ptr),
        Which::Index => (r.buffers.index_values.ptr, r.buffers.index_gates.ptr),
    };
    let tokens = r.batch.len();
    let Some(ratio) = layer.kind.ratio() else { return Ok(()) };
    if r.ahead != Some((layer.index, h)) {
        project(device, r, tokens, &[Job::new(&c.kv, h, values), Job::new(&c.gate, h, gates)])?;
    }
    let (b, kv): (&Buffers, &LayerKv) = (&r.buffers, r.setup.layout.layer(layer.index));
    let (width, acc_at, rows_at) = match which {
        Which::Main => (r.setup.layout.head_dim, kv.acc_at, kv.rows_at),
        Which::Index => (r.setup.layout.index_dim, kv.index_acc_at, kv.index_at),
    };
    let p = Pooling {
        a: values,
        z: gates,
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
    let m = r.buffers.mixing.ptr;
    if r.setup.numerics.exact || rows <= 8 {
        products(device, rows, &[Job::new(mix, x, m)])?;
    } else {
        let grid = (rows.div_ceil(4) as u32, mix.mat.rows.div_ceil(8), 1);
        launch!(device, "few_rows", grid, 256, 0; mix.mat, x, m, rows as u32)?;
    }
    let a = Mixing {
        x,
        m,
        base: base.memory.ptr,
        scale: scale.memory.ptr,
        norm: norm.memory.ptr,
        h,
        mix: out,
        codes: 0,
        streams: hp.streams as u32,
        hidden: hp.hidden as u32,
        iterations: hp.sinkhorn_iters as u32,
        hc_eps: hp.hc_eps,
        rms_eps: hp.rms_eps,
    };
    launch!(device, "hc_mix", (rows as u32, 1, 1), 1024, 0; a)
}

/// What a sublayer leaves, into the streams (unless `y` is 0), and the next one's input from them, for few tokens.
/// Returns false, having done nothing, where the kernels do not fit the model.
fn few_streams(
    device: &mut Device,
    r: &mut Ready,
    hc: &HyperConnection<Cuda>,
    norm: &Vector,
    y: Ptr,
    [x, h, mix]: [Ptr; 3],
) -> Result<bool> {
    let (hp, tokens) = (&r.setup.hyper, r.batch.len());
    let fits = hp.streams == 4
        && hp.hidden.is_multiple_of(256)
        && hc.mix.mat.format == BlockFormat::F16.type_number()
        && !r.setup.numerics.exact
        && tokens <= FEW_TOKENS;
    if !fits {
        return Ok(false);
    }
    let (hidden, rows, shares) = (hp.hidden as u32, tokens as u32, r.buffers.shares.ptr);
    let first = Streams { x, y, mix, w: hc.mix.mat.data, shares, hidden };
    launch!(device, "streams_step", (hidden / 64, rows, 1), 256, 0; first)?;
    let second = Mixing {
        x,
        m: 0,
        base: hc.base.memory.ptr,
        scale: hc.scale.memory.ptr,
        norm: norm.memory.ptr,
        h,
        mix,
        codes: r.buffers.codes_h.ptr,
        streams: 4,
        hidden,
        iterations: hp.sinkhorn_iters as u32,
        hc_eps: hp.hc_eps,
        rms_eps: hp.rms_eps,
    };
    r.mixed = hc.mix.mat.data;
    let next = r.follows.get(&r.mixed).copied().unwrap_or_default();
    launch!(device, "streams_input", (hidden / 256 + 1, rows, 1), 256, 0; second, shares, next)?;
    r.forget_input();
    r.recode(h, r.buffers.codes_h.ptr);
    Ok(true)
}

/// The experts' parts on tensor cores, every expert over all tokens that chose it.
fn grouped_experts(device: &mut Device, r: &mut Ready, e: &ExpertMats, tokens: u32) -> Result<()> {
    let x = half(device, r, e.h, e.hidden as usize, tokens as usize)?;
    let experts = r.setup.hyper.experts as u32;
    // Tokens that an expert can expect decide the tile.
    let bn: u32 = match tokens * e.k / experts {
        0..24 => 16,
        24..84 => 64,
        _ => 128,
    };
    let most = state::tile_bound(tokens as usize, e.k as usize, experts as usize, bn as usize) as u32;
    let counts = r.buffers.sorted.ptr;
    let total = counts + u64::from(experts + 1) * 4;
    let order = total + 4;
    let tiles = order + u64::from(tokens * (e.k + 1)) * 4;
    launch!(device, "count_pairs", (experts + 1, 1, 1), 256, 0; e.experts, counts, tokens, e.k)?;
    launch!(device, "sort_pairs", (experts + 1, 1, 1), 256, 0; e.experts, counts, order, tiles, total, tokens, e.k, bn)?;
    let up = Gemm {
        m: e.gate,
        up: e.up,
        shared: e.shared_gate,
        shared_up: e.shared_up,
        x,
        y: 0,
        mid: e.mid,
        tiles,
        order,
        total,
        gates: e.gates,
        x_stride: e.hidden,
        y_stride: e.width,
        group_rows: 0,
        tokens,
        experts,
        k: e.k,
        splits: 1,
        clamp: e.clamp,
    };
    let down = Gemm {
        m: e.down,
        shared: e.shared_down,
        x: e.mid,
        y: e.parts,
        x_stride: e.width,
        y_stride: e.hidden,
        ..up
    };
    let shared = abi::gemm_shared(bn);
    let (wide, deep) = (e.width.div_ceil(abi::GEMM_ROWS / 2), e.hidden.div_ceil(abi::GEMM_ROWS));
    let (wide, deep) = ((most, wide, 1), (most, deep, 1));
    match (bn, expands(&[&e.gate, &e.up, &e.shared_gate, &e.shared_up], BlockFormat::IQ2XXS)) {
        (16, true) => launch!(device, "gemm_up_16", wide, 256, shared; up)?,
        (64, true) => launch!(device, "gemm_up_64", wide, 256, shared; up)?,
        (_, true) => launch!(device, "gemm_up_128", wide, 256, shared; up)?,
        (16, false) => launch!(device, "gemm_up_any_16", wide, 256, shared; up)?,
        (64, false) => launch!(device, "gemm_up_any_64", wide, 256, shared; up)?,
        (_, false) => launch!(device, "gemm_up_any_128", wide, 256, shared; up)?,
    }
    match (bn, expands(&[&e.down, &e.shared_down], BlockFormat::Q2K)) {
        (16, true) => launch!(device, "gemm_down_16", deep, 256, shared; down),
        (64, true) => launch!(device, "gemm_down_64", deep, 256, shared; down),
        (_, true) => launch!(device, "gemm_down_128", deep, 256, shared; down),
        (16, false) => launch!(device, "gemm_down_any_16", deep, 256, shared; down),
        (64, false) => launch!(device, "gemm_down_any_64", deep, 256, shared; down),
        (_, false) => launch!(device, "gemm_down_any_128", deep, 256, shared; down),
    }
}

/// The same for some tens of tokens, in integers: each expert's weights are read once.
fn tiled_experts(device: &mut Device, r: &mut Ready, mut e: ExpertMats, tokens: u32) -> Result<()> {
    const TILE: u32 = 16;
    if e.h_codes == 0 {
        e.h_codes = r.buffers.codes_h.ptr;
        let grid = ((e.hidden / 32).div_ceil(8), tokens, 1);
        launch!(device, "quantise_rows", grid, 256, 0; e.h, e.h_codes, e.hidden)?;
        r.recode(e.h, e.h_codes);
    }
    let experts = r.setup.hyper.experts as u32;
    let own = tokens.div_ceil(TILE);
    let most = state::tile_bound(tokens as usize, e.k as usize, experts as usize, TILE as usize) as u32;
    let counts = r.buffers.sorted.ptr;
    let total = counts + u64::from(experts + 1) * 4;
    let order = total + 4;
    let tiles = order + u64::from(tokens * (e.k + 1)) * 4;
    launch!(device, "count_pairs", (experts + 1, 1, 1), 256, 0; e.experts, counts, tokens, e.k)?;
    launch!(device, "sort_pairs", (experts + 1, 1, 1), 256, 0; e.experts, counts, order, tiles, total, tokens, e.k, TILE)?;
    let g = Grouped { e, tiles, order, total, own };
    let (own_blocks, routed) = abi::expert_blocks(e.shared_gate.rows, e.gate.rows);
    let blocks = own * own_blocks + (most - own) * routed;
    launch!(device, "expert_up_tiles", (blocks, 1, 1), 512, abi::expert_up_shared(e.hidden, abi::SHARE); g)?;
    let shared = abi::quantised_bytes(abi::SHARE, e.width);
    launch!(device, "expert_down_tiles", (e.hidden / 64, most, 1), 256, shared; g)?;
    launch!(device, "expert_sum", (e.hidden.div_ceil(256), tokens, 1), 256, 0; e)
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
            ("hidden size", hp.hidden, 8192),
            ("experts", hp.experts, 1024),
            ("experts a token", hp.experts_used, 32),
        ] {
            if found > most {
                return Err(self.unsupported(what, format!("{found}, at most {most}")));
            }
        }
        if !matches!(hp.streams, 2 | 4) || !hp.hidden.is_multiple_of(4) {
            return Err(self.unsupported(
                "residual streams",
                format!("{} of {} channels; 2 or 4 of a multiple of 4 channels", hp.streams, hp.hidden),
            ));
        }
        let sizes = Sizes::new(setup);
        let buffers = Buffers::new(&self.device, setup)?;
        let scores = (4 * sizes.seen) as u32;
        self.device.allow_shared("attend_exact", scores.max(48 << 10))?;
        for (name, bytes) in [
            ("flash_512", abi::flash_shared(512)),
            ("flash_192", abi::flash_shared(192)),
            ("gemm_any_64", abi::gemm_shared(64)),
            ("gemm_any_128", abi::gemm_shared(128)),
            ("gemm_up_any_64", abi::gemm_shared(64)),
            ("gemm_down_any_64", abi::gemm_shared(64)),
            ("gemm_up_any_128", abi::gemm_shared(128)),
            ("gemm_down_any_128", abi::gemm_shared(128)),
            ("gemm_64", abi::gemm_shared(64)),
            ("gemm_128", abi::gemm_shared(128)),
            ("gemm_up_64", abi::gemm_shared(64)),
            ("gemm_down_64", abi::gemm_shared(64)),
            ("gemm_up_128", abi::gemm_shared(128)),
            ("gemm_down_128", abi::gemm_shared(128)),
            ("index_scores_128", abi::index_shared(hp.index_heads as u32)),
            ("integer_1", INTEGER_SHARED),
            ("integer_2", INTEGER_SHARED),
            ("integer_4", INTEGER_SHARED),
            ("integer_8", INTEGER_SHARED),
            ("expert_up_tiles", INTEGER_SHARED),
            ("expert_down_tiles", INTEGER_SHARED),
            ("expert_up_integer", INTEGER_SHARED),
            ("expert_down_integer", INTEGER_SHARED),
        ] {
            self.device.allow_shared(name, bytes)?;
        }
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
            half_h: 0,
            ahead: None,
            coded: Vec::with_capacity(8),
            follows: HashMap::new(),
            mixed: 0,
        }));
        Ok(())
    }

    fn matrix(&mut self, source: MatrixSource) -> Result<Matrix> {
        let MatrixSource { name, format, rows, cols, bytes, .. } = source;
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
        if let Some(r) = &mut self.ready {
            if r.half_h == t.memory.ptr || r.ahead.is_some_and(|(_, h)| h == t.memory.ptr) {
                r.forget_input();
            }
            r.recode(t.memory.ptr, 0);
        }
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
        r.forget_input();
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
        if few_streams(device, r, hc, norm, 0, [x, h, out])? {
            return Ok(());
        }
        r.forget_input();
        mix_streams(device, r, r.batch.len(), &hc.mix, &hc.base, &hc.scale, norm, x, h, out)
    }

    fn hc_post(&mut self, y: &Tensor, mix: &Tensor, x: &mut Tensor) -> Result<()> {
        let (device, r) = self.parts()?;
        let (n, hidden) = (r.setup.hyper.streams as u32, r.setup.hyper.hidden as u32);
        let grid = (hidden.div_ceil(256), r.batch.len() as u32, 1);
        launch!(device, "hc_post", grid, 256, 0; y.memory.ptr, mix.memory.ptr, x.memory.ptr, n, hidden)
    }

    fn hc_post_pre(
        &mut self,
        y: &Tensor,
        hc: &HyperConnection<Self>,
        norm: &Vector,
        x: &mut Tensor,
        h: &mut Tensor,
        mix: &mut Tensor,
    ) -> Result<()> {
        let (device, r) = self.parts()?;
        let places = [x.memory.ptr, h.memory.ptr, mix.memory.ptr];
        if few_streams(device, r, hc, norm, y.memory.ptr, places)? {
            return Ok(());
        }
        self.hc_post(y, mix, x)?;
        self.hc_pre(hc, norm, x, h, mix)
    }

    fn project_q(&mut self, layer: &Layer<Self>, h: &Tensor, qr: &mut Tensor, q: &mut Tensor) -> Result<()> {
        let (device, r) = self.parts()?;
        let (w, tokens) = (&layer.attention, r.batch.len());
        let (h, b) = (h.memory.ptr, &r.buffers);
        let mut jobs = vec![Job::new(&w.q_a, h, qr.memory.ptr)];
        if !r.setup.numerics.exact && tokens <= INTEGER_TOKENS {
            jobs.push(Job::new(&w.kv, h, b.kv.ptr));
            if let Some(c) = &layer.compressor {
                jobs.extend([Job::new(&c.kv, h, b.values.ptr), Job::new(&c.gate, h, b.gates.ptr)]);
            }
            if let Some(i) = &layer.indexer {
                jobs.extend([
                    Job::new(&i.compressor.kv, h, b.index_values.ptr),
                    Job::new(&i.compressor.gate, h, b.index_gates.ptr),
                    Job::new(&i.weights, h, b.index_weights.ptr),
                ]);
            }
            r.ahead = Some((layer.index, h));
            for j in &jobs {
                r.follow(&j.m.mat);
            }
        }
        project(device, r, tokens, &jobs)?;
        let rows = tokens as u32;
        let (n, eps) = (r.setup.hyper.q_lora as u32, r.setup.hyper.rms_eps);
        let codes: Ptr = if r.few(tokens) && n.is_multiple_of(128) { r.buffers.codes_qr.ptr } else { 0 };
        let mut next = Ahead::default();
        if r.few(tokens) {
            next.add(&w.q_b.mat, AHEAD_OF_Q);
        }
        launch!(device, "rms_rows", (rows, 1, 1), 256, 0; qr.memory.ptr, w.q_norm.memory.ptr, codes, n, eps, next)?;
        r.recode(qr.memory.ptr, codes);
        project(device, r, tokens, &[Job::new(&w.q_b, qr.memory.ptr, q.memory.ptr)])?;
        let hp = &r.setup.hyper;
        let (dim, rope, freqs) = (hp.head_dim as u32, hp.rope_dim as u32, r.buffers.freqs(layer.kind));
        launch!(device, "finish_q", (hp.heads as u32, rows, 1), 128, 4 * dim; r.step, q.memory.ptr, freqs, dim, rope, eps)
    }

    fn project_kv(&mut self, layer: &Layer<Self>, h: &Tensor, kv: &mut Tensor) -> Result<()> {
        let (device, r) = self.parts()?;
        let (w, tokens, eps) = (&layer.attention, r.batch.len(), r.setup.hyper.rms_eps);
        let product = r.buffers.kv.ptr;
        if r.ahead != Some((layer.index, h.memory.ptr)) {
            project(device, r, tokens, &[Job::new(&w.kv, h.memory.ptr, product)])?;
        }
        let freqs = r.buffers.freqs(layer.kind);
        let fresh: Ptr = if r.flashes() { r.buffers.fresh.ptr } else { 0 };
        launch!(device, "finish_kv", (tokens as u32, 1, 1), 128, 4 * r.rows.dim; r.step, r.rows, product, kv.memory.ptr, fresh, w.kv_norm.memory.ptr, freqs, eps)?;
        r.recode(kv.memory.ptr, fresh);
        Ok(())
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
        let (tokens, q, weights) = (r.batch.len(), r.buffers.index_q.ptr, r.buffers.index_weights.ptr);
        project(device, r, tokens, &[Job::new(&indexer.q_b, qr.memory.ptr, q)])?;
        if r.ahead != Some((layer.index, h.memory.ptr)) {
            project(device, r, tokens, &[Job::new(&indexer.weights, h.memory.ptr, weights)])?;
        }
        let (hp, b) = (&r.setup.hyper, &r.buffers);
        let (heads, dim, topk) = (hp.index_heads as u32, hp.index_dim as u32, hp.index_topk as u32);
        let freqs = b.freqs(layer.kind);
        let (at, count) = (b.index_q.ptr, tokens as u32);
        if dim == 128 && hp.rope_dim == 64 {
            launch!(device, "finish_index_q_128", (heads.div_ceil(4), count, 1), 128, 0; r.step, r.rows, at, freqs, heads)?;
        } else {
            launch!(device, "finish_index_q", (heads, count, 1), 128, 4 * dim; r.step, r.rows, at, freqs)?;
        }
        let (capacity, at) = (r.sizes.index_rows as u32, r.setup.layout.layer(layer.index).index_at as u64);
        let scale = 1.0 / ((hp.index_heads * hp.index_dim) as f32).sqrt();
        let tensor = !r.setup.numerics.exact && dim == 128 && heads.is_multiple_of(16);
        for first in (0..tokens).step_by(r.sizes.score_rows) {
            let rows = r.sizes.score_rows.min(tokens - first) as u32;
            let first = first as u32;
            let (q, wt, scores) = (b.index_q.ptr, b.index_weights.ptr, b.scores.ptr);
            if capacity > topk && tensor {
                launch!(device, "index_scores_128", (capacity.div_ceil(128), rows.div_ceil(8), 1), 256, abi::index_shared(heads);
                    r.step, r.rows, q, wt, scores, heads, topk, first, rows, capacity, at, scale)?;
            } else if capacity > topk {
                launch!(device, "index_scores", (capacity.div_ceil(32), rows, 1), 128, 4 * heads * dim;
                    r.step, r.rows, q, wt, scores, heads, topk, first, capacity, at, scale)?;
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
        let dim = r.rows.dim;
        r.recode(a.o, 0);
        if r.flashes() {
            let groups = a.heads.div_ceil(32);
            let b = &r.buffers;
            let splits = (BLOCKS as u32 / (rows * groups)).clamp(1, 20);
            let coded = splits > 1 && r.few(r.batch.len()) && (a.heads * dim).is_multiple_of(128);
            let codes: Ptr = if coded { b.codes_o.ptr } else { 0 };
            let fresh = b.fresh.ptr;
            let mut next = Ahead::default();
            if r.few(r.batch.len()) {
                next.add(&layer.attention.output_a.mat, AHEAD_OF_OUTPUT);
            }
            let f = abi::Flash { a, fresh, part: b.split.ptr, stats: b.split_sums.ptr, codes, splits, next };
            if r.codes_of(kv.memory.ptr) == 0 {
                launch!(device, "encode_rows", (rows, 1, 1), 128, 0; r.rows, kv.memory.ptr, fresh)?;
            }
            let grid = (groups, splits, rows);
            match dim {
                512 => launch!(device, "flash_512", grid, 256, abi::flash_shared(512); r.step, r.rows, f)?,
                _ => launch!(device, "flash_192", grid, 256, abi::flash_shared(192); r.step, r.rows, f)?,
            }
            if splits > 1 {
                launch!(device, "flash_join", (a.heads, rows, 1), 128, 4 * dim; r.step, r.rows, f)?;
                r.recode(a.o, codes);
                return Ok(());
            }
        } else {
            launch!(device, "attend_exact", (a.heads, rows, 1), 128, 4 * a.capacity; r.step, r.rows, a)?;
        }
        launch!(device, "store_window", (rows, 1, 1), 128, 0; r.step, r.rows, kv.memory.ptr, a.ring_at)
    }

    fn project_output(&mut self, attention: &Attention<Self>, o: &Tensor, y: &mut Tensor) -> Result<()> {
        let (device, r) = self.parts()?;
        let (tokens, low) = (r.batch.len(), r.buffers.low.ptr);
        let mut first = Job::new(&attention.output_a, o.memory.ptr, low);
        first.x_stride = r.setup.hyper.q_dim();
        first.group_rows = r.setup.hyper.o_lora as u32;
        if r.few(tokens) {
            first.y_codes = r.buffers.codes_low.ptr;
        }
        r.recode(low, 0);
        project(device, r, tokens, &[first])?;
        project(device, r, tokens, &[Job::new(&attention.output_b, low, y.memory.ptr)])
    }

    fn route(
        &mut self,
        router: &Router<Self>,
        h: &Tensor,
        experts: &mut Tensor,
        gates: &mut Tensor,
    ) -> Result<()> {
        let (device, r) = self.parts()?;
        let (tokens, logits) = (r.batch.len(), r.buffers.router.ptr);
        if r.few(tokens) {
            r.follow(&router.gate.mat);
        }
        project(device, r, tokens, &[Job::new(&router.gate, h.memory.ptr, logits)])?;
        let hp = &r.setup.hyper;
        let (bias, table): (Ptr, Ptr) = match &router.choice {
            Choice::Hash(table) => (0, table.memory.ptr),
            Choice::TopK(bias) => (bias.memory.ptr, 0),
        };
        let (count, k) = (hp.experts as u32, hp.experts_used as u32);
        launch!(device, "route", (tokens as u32, 1, 1), 128, 0;
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
            h_codes: r.codes_of(h.memory.ptr),
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
        let fast = !r.setup.numerics.exact
            && [e.hidden, e.width, w.down.mat.cols, w.shared_down.mat.cols]
                .iter()
                .all(|c| c.is_multiple_of(128));
        let tiles = fast
            && (3..=FEW_TOKENS as u32).contains(&tokens)
            && [e.gate, e.up].iter().all(|m| m.format == BlockFormat::IQ2XXS.type_number())
            && e.down.format == BlockFormat::Q2K.type_number()
            && e.gate.rows.is_multiple_of(32)
            && e.hidden.is_multiple_of(64)
            && [e.shared_gate, e.shared_up, e.shared_down]
                .iter()
                .all(|m| m.format == BlockFormat::Q8_0.type_number() && m.cols.is_multiple_of(512))
            && abi::expert_up_shared(e.hidden, abi::SHARE) <= INTEGER_SHARED;
        if tiles {
            return tiled_experts(device, r, e, tokens);
        }
        if fast && tokens <= INTEGER_TOKENS as u32 {
            for m in [&w.shared_gate, &w.shared_up, &w.shared_down] {
                r.follow(&m.mat);
            }
            let (up, down) =
                (abi::expert_up_shared(e.hidden, 1), (e.k + 1) * abi::quantised_bytes(1, e.width));
            let whole = [e.down, e.shared_down].iter().all(has_integer_rows);
            if whole && up.max(down) <= INTEGER_SHARED {
                let (own, routed) = abi::expert_blocks(e.shared_gate.rows, e.gate.rows);
                launch!(device, "expert_up_integer", (own + e.k * routed, tokens, 1), 512, up; e)?;
                return launch!(device, "expert_down_integer", (e.hidden.div_ceil(16), tokens, 1), 512, down; e);
            }
        }
        if fast && tokens > 8 {
            grouped_experts(device, r, &e, tokens)?;
            return launch!(device, "expert_sum", (e.hidden.div_ceil(256), tokens, 1), 256, 0; e);
        }
        launch!(device, "expert_up", (e.width.div_ceil(8), pairs, 1), 256, 0; e)?;
        launch!(device, "expert_down", (e.hidden.div_ceil(8), pairs, 1), 256, 0; e)?;
        launch!(device, "expert_sum", (e.hidden.div_ceil(256), tokens, 1), 256, 0; e)
    }

    fn head(&mut self, head: &Head<Self>, x: &Tensor, logits: &mut Tensor) -> Result<()> {
        let (device, r) = self.parts()?;
        let outputs = r.batch.outputs().len();
        let width = (r.setup.hyper.streams * r.setup.hyper.hidden) as u32;
        let (streams, rows) = (r.buffers.out_streams.ptr, r.buffers.out_rows.ptr);
        launch!(device, "gather_outputs", (outputs as u32, 16, 1), 256, 0; r.step, x.memory.ptr, streams, width)?;
        mix_streams(device, r, outputs, &head.mix, &head.base, &head.scale, &head.norm, streams, rows, 0)?;
        project(device, r, outputs, &[Job::new(&head.output, rows, logits.memory.ptr)])
    }
}

/// Values as the card takes them; every host that has a card is little-endian.
fn bytes_of<T: bytemuck::NoUninit>(values: &[T]) -> &[u8] {
    bytemuck::cast_slice(values)
}

fn bytes_of_mut<T: bytemuck::Pod>(values: &mut [T]) -> &mut [u8] {
    bytemuck::cast_slice_mut(values)
}
