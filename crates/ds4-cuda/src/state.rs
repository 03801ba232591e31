//! Everything that the backend allocates besides weights and activations: one list serves the plan and the allocation.

use ds4_model::backend::{PlanLine, Result, Setup};
use ds4_model::{KvLayout, LayerKind};

use crate::abi::{Ptr, Rows};
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
            seen: hp.window + hp.index_topk.max(l.context / 128),
        }
    }
}

/// Names and bytes, in the order of [`Buffers`].
fn list(setup: &Setup) -> [(&'static str, usize); 18] {
    let (hp, l, z) = (&setup.hyper, &setup.limits, Sizes::new(setup));
    let indexed = setup.layout.layers.iter().any(|k| k.kind == LayerKind::Indexed);
    let when = |yes: bool, n: usize| if yes { n } else { 0 };
    let compressed = setup.layout.layers.iter().any(|k| k.kind != LayerKind::Window);
    let outputs = when(setup.layout.slice.head, l.outputs);
    let f = |n: usize| 4 * n;
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
