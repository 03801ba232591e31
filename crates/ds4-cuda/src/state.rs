//! Everything that the backend allocates besides weights and activations: one list serves the plan and the allocation.

use ds4_model::backend::{PlanLine, Result, Setup};
use ds4_model::{KvLayout, LayerKind};

use crate::abi::{self, Ptr, Rows};
use crate::device::{Device, Memory};

/// Bytes that the indexer's scores may take; longer batches are scored in parts.
const SCORE_BYTES: usize = 256 << 20;

/// Sizes that follow from a setup.
#[derive(Clone, Debug)]
pub struct Sizes {
    /// Words of the step's description: tokens, positions, segments, windows.
    pub step_words: usize,
    /// Pages of one session.
    pub table_max: usize,
    /// Windows of one step, by ratio (4, 128).
    pub windows: [usize; 2],
    /// Channels of the widest compressor.
    pub channels: usize,
    /// Compressed ratio-4 rows of one session.
    pub index_rows: usize,
    /// Rows scored at once.
    pub score_rows: usize,
    /// Width of the expert buffers: the wider of routed and shared.
    pub expert_width: usize,
    /// Rows that one token of a compressed layer can see.
    pub seen: usize,
    /// Words of the experts' sorting: counts, their total, places, tiles.
    pub sorted_words: usize,
}

/// Tokens whose projections are multiplied in 8-bit integers; more go through the tensor cores.
pub const INTEGER_TOKENS: usize = 8;
/// Tokens whose routed experts are multiplied in 8-bit integers.
pub const FEW_TOKENS: usize = 64;

/// Thread blocks that work is split into where the batch is too small to fill the card.
pub const BLOCKS: usize = 264;

/// Tiles of `bn` tokens that `rows` rows can need, grouped by expert.
pub fn tile_bound(rows: usize, used: usize, experts: usize, bn: usize) -> usize {
    (rows * used).min(experts) + rows * used / bn + rows.div_ceil(bn)
}

/// Windows that `rows` rows in `segments` segments touch, the unfinished ones included.
pub fn window_bound(rows: usize, segments: usize, ratio: usize) -> usize {
    rows / ratio + 3 * segments
}

impl Sizes {
    pub fn new(setup: &Setup) -> Sizes {
        let (hp, l) = (&setup.hyper, &setup.limits);
        let windows = [4, 128].map(|ratio| window_bound(l.rows, l.slots.min(l.rows), ratio));
        let index_rows = (l.context / 4).max(1);
        Sizes {
            step_words: 3 * l.rows + l.outputs + 4 * l.slots + 2 * (windows[0] + windows[1]),
            table_max: KvLayout::pages_for(l.context),
            windows,
            channels: 2 * hp.head_dim.max(hp.index_dim),
            index_rows,
            score_rows: (SCORE_BYTES / (4 * index_rows)).clamp(1, l.rows),
            expert_width: hp.expert_ff.max(hp.shared_ff),
            sorted_words: hp.experts
                + 2
                + l.rows * (hp.experts_used + 1)
                + 3 * tile_bound(l.rows, hp.experts_used, hp.experts, 16),
            seen: hp.window + hp.index_topk.max(l.context / 128),
        }
    }
}

/// Names and bytes, in the order of [`Buffers`].
fn list(setup: &Setup) -> [(&'static str, usize); 32] {
    let (hp, l, z) = (&setup.hyper, &setup.limits, Sizes::new(setup));
    let indexed = setup.layout.layers.iter().any(|k| k.kind == LayerKind::Indexed);
    let when = |yes: bool, n: usize| if yes { n } else { 0 };
    let compressed = setup.layout.layers.iter().any(|k| k.kind != LayerKind::Window);
    let fast = !setup.numerics.exact;
    let outputs = when(setup.layout.slice.head, l.outputs);
    let f = |n: usize| 4 * n;
    let few = l.rows.min(FEW_TOKENS);
    let codes = |n: usize| when(fast, abi::quantised_bytes(few as u32, n as u32) as usize);
    [
        ("key-value pages", l.pages * setup.layout.page_bytes),
        ("session frontiers", l.slots * setup.layout.frontier_bytes),
        ("page tables", f(l.slots * z.table_max)),
        ("step", f(z.step_words)),
        ("rotary frequencies", f(hp.rope_dim)),
        ("scratch: mixing", f(l.rows * hp.mix_dim())),
        ("scratch: compressor values", f(when(compressed, l.rows * z.channels))),
        ("scratch: compressor gates", f(when(compressed, l.rows * z.channels))),
        (
            "scratch: windows",
            f(when(compressed, z.windows[0].max(z.windows[1]) * 3 * hp.head_dim.max(hp.index_dim))),
        ),
        ("scratch: indexer queries", f(when(indexed, l.rows * hp.index_heads * hp.index_dim))),
        ("scratch: indexer weights", f(when(indexed, l.rows * hp.index_heads))),
        ("scratch: indexer scores", f(when(indexed, z.score_rows * z.index_rows))),
        ("scratch: low-rank output", f(l.rows * hp.o_groups * hp.o_lora)),
        ("scratch: router", f(l.rows * hp.experts)),
        ("scratch: experts inside", f(l.rows * (hp.experts_used + 1) * z.expert_width)),
        ("scratch: experts' parts", f(l.rows * (hp.experts_used + 1) * hp.hidden)),
        ("scratch: output streams", f(outputs * hp.streams * hp.hidden)),
        ("scratch: output rows", f(outputs * hp.hidden)),
        ("scratch: sublayer input in f16", when(fast, 2 * l.rows * hp.hidden)),
        ("scratch: product input in f16", when(fast, 2 * l.rows * hp.q_dim().max(hp.hidden))),
        ("scratch: sorted experts", when(fast, 4 * z.sorted_words)),
        ("scratch: stored rows", when(fast, l.rows * setup.layout.main_row_bytes)),
        ("scratch: parts of sums", when(fast, f(BLOCKS * 128 * 128.max(hp.head_dim / 4)))),
        ("scratch: split attention's sums", when(fast, 8 * BLOCKS * 32)),
        ("scratch: key-value product", f(l.rows * hp.head_dim)),
        ("scratch: indexer values", f(when(indexed, l.rows * 2 * hp.index_dim))),
        ("scratch: indexer gates", f(when(indexed, l.rows * 2 * hp.index_dim))),
        ("scratch: sublayer input in 8 bits", codes(hp.hidden)),
        ("scratch: low-rank query in 8 bits", codes(hp.q_lora)),
        ("scratch: attention output in 8 bits", codes(hp.q_dim())),
        ("scratch: low-rank output in 8 bits", codes(hp.o_groups * hp.o_lora)),
        ("scratch: shares of the streams", f(when(fast, few * hp.hidden.div_ceil(64) * abi::SHARES))),
    ]
}

pub fn plan(setup: &Setup) -> Vec<PlanLine> {
    list(setup).iter().map(|(name, bytes)| PlanLine { name: (*name).into(), bytes: *bytes as u64 }).collect()
}

/// The allocations of [`plan`].
pub struct Buffers {
    pub pages: Memory,
    pub frontiers: Memory,
    pub tables: Memory,
    pub step: Memory,
    pub freqs: Memory,
    pub mixing: Memory,
    pub values: Memory,
    pub gates: Memory,
    pub windows: Memory,
    pub index_q: Memory,
    pub index_weights: Memory,
    pub scores: Memory,
    pub low: Memory,
    pub router: Memory,
    pub mid: Memory,
    pub parts: Memory,
    pub out_streams: Memory,
    pub out_rows: Memory,
    pub half_h: Memory,
    pub half_x: Memory,
    pub sorted: Memory,
    pub fresh: Memory,
    pub split: Memory,
    pub split_sums: Memory,
    pub kv: Memory,
    pub index_values: Memory,
    pub index_gates: Memory,
    pub codes_h: Memory,
    pub codes_qr: Memory,
    pub codes_o: Memory,
    pub codes_low: Memory,
    pub shares: Memory,
}

impl Buffers {
    pub fn new(device: &Device, setup: &Setup) -> Result<Buffers> {
        let lines = list(setup);
        let mut lines = lines.iter();
        let mut next = || match lines.next() {
            Some((name, bytes)) => device.allocate(name, *bytes as u64),
            None => device.allocate("scratch", 0),
        };
        let b = Buffers {
            pages: next()?,
            frontiers: next()?,
            tables: next()?,
            step: next()?,
            freqs: next()?,
            mixing: next()?,
            values: next()?,
            gates: next()?,
            windows: next()?,
            index_q: next()?,
            index_weights: next()?,
            scores: next()?,
            low: next()?,
            router: next()?,
            mid: next()?,
            parts: next()?,
            out_streams: next()?,
            out_rows: next()?,
            half_h: next()?,
            half_x: next()?,
            sorted: next()?,
            fresh: next()?,
            split: next()?,
            split_sums: next()?,
            kv: next()?,
            index_values: next()?,
            index_gates: next()?,
            codes_h: next()?,
            codes_qr: next()?,
            codes_o: next()?,
            codes_low: next()?,
            shares: next()?,
        };
        device.zero(b.frontiers.ptr, b.frontiers.bytes as usize)?;
        device.zero(b.tables.ptr, b.tables.bytes as usize)?;
        device.zero(b.pages.ptr, b.pages.bytes as usize)?;
        let freqs: Vec<u8> = [LayerKind::Window, LayerKind::Indexed]
            .iter()
            .flat_map(|k| setup.hyper.rope_freqs(*k))
            .flat_map(f32::to_le_bytes)
            .collect();
        device.upload("rotary frequencies", b.freqs.ptr, &freqs)?;
        Ok(b)
    }

    /// Rotary frequencies of a layer's kind.
    pub fn freqs(&self, kind: LayerKind) -> Ptr {
        self.freqs.ptr + if kind == LayerKind::Window { 0 } else { self.freqs.bytes / 2 }
    }
}

pub fn rows(setup: &Setup) -> Rows {
    let l = &setup.layout;
    Rows {
        packed: u32::from(l.format == ds4_model::RowFormat::Packed),
        qat: u32::from(setup.numerics.qat),
        dim: l.head_dim as u32,
        rope: l.rope_dim as u32,
        main_bytes: l.main_row_bytes as u32,
        index_dim: l.index_dim as u32,
        index_bytes: l.index_row_bytes as u32,
        window: l.window as u32,
    }
}
