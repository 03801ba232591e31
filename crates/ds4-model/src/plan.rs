//! The memory plan: every byte that an instance will hold, from the file's header alone.
//!
//! Pure arithmetic over the same lists that loading walks: [`crate::weights::needs`], [`Backend::plan`],
//! [`crate::forward::activation_specs`] and [`StageBuffers`]. What starts has been planned, and what has been planned is
//! allocated before anything is served.

use std::fmt;

use ds4_gguf::Gguf;

use crate::backend::{Backend, Numerics, PlanLine, Setup};
use crate::batch::Limits;
use crate::error::ModelError;
use crate::forward::activation_specs;
use crate::hyper::{HyperParams, LayerKind};
use crate::kv::{KvLayout, PAGE_TOKENS, RowFormat};
use crate::slice::LayerSlice;
use crate::weights::{Role, needs};

/// What a program of this kind needs besides its planned buffers: code, tokenizer, thread stacks, the header's tables.
/// Upper bound over the tiny and the nano model's processes, rounded up.
pub const RUNTIME_BYTES: u64 = 64 << 20;

/// Bytes per vocabulary entry: a row of logits, one with adjustments, and two lists of logits with their ids.
const SAMPLER_BYTES: u64 = 4 + 4 + 8 + 8;

/// Rows of logits that one step gives at least, so that log-probabilities of a prompt do not go one row at a time.
const OUTPUTS_MIN: usize = 8;

/// What a user decides; everything else follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    pub slice: LayerSlice,
    /// Positions of one session.
    pub context: usize,
    /// Requests that run at once.
    pub sessions: usize,
    /// Rows of one step.
    pub chunk: usize,
    /// Frontiers kept aside.
    pub checkpoints: usize,
    /// Pages beyond those that running sessions need: for the state of earlier requests.
    pub spare_pages: usize,
    pub rows: RowFormat,
    pub numerics: Numerics,
}

impl Settings {
    pub fn limits(&self) -> Limits {
        Limits {
            context: self.context,
            rows: self.chunk.max(self.sessions),
            outputs: self.sessions.max(OUTPUTS_MIN),
            slots: self.sessions,
            // One more per session: it starts by copying a page that others hold.
            pages: self.sessions * (KvLayout::pages_for(self.context) + 1) + self.spare_pages,
        }
    }

    pub fn setup(&self, hyper: &HyperParams) -> Setup {
        Setup {
            hyper: hyper.clone(),
            layout: KvLayout::new(hyper, self.slice, self.rows),
            limits: self.limits(),
            numerics: self.numerics,
        }
    }
}

/// What a stage holds on the host besides its model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StageBuffers {
    /// Frontiers kept aside, bytes.
    pub checkpoints: usize,
    /// Streams of one step's rows, f32 values.
    pub hidden: usize,
    /// One row of logits, f32 values; 0 without the output head.
    pub logits: usize,
}

impl StageBuffers {
    pub fn new(setup: &Setup, checkpoints: usize) -> Self {
        let hp = &setup.hyper;
        StageBuffers {
            checkpoints: checkpoints * setup.layout.frontier_bytes,
            hidden: setup.limits.rows * hp.streams * hp.hidden,
            logits: if setup.layout.slice.head { hp.vocab } else { 0 },
        }
    }
}

/// Which memory a line takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Memory {
    /// The device's own; on a processor the same as [`Memory::Host`].
    Device,
    Host,
    /// Pages of the file, read where they lie. They need memory to be fast, but are not allocated.
    Mapped,
}

impl Memory {
    pub fn name(self) -> &'static str {
        match self {
            Self::Device => "device",
            Self::Host => "host",
            Self::Mapped => "mapped",
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Line {
    pub name: String,
    pub bytes: u64,
    pub memory: Memory,
}

/// The table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryPlan {
    pub settings: Settings,
    pub lines: Vec<Line>,
}

impl MemoryPlan {
    /// Plans `settings` on backend `B` from the file's header.
    pub fn new<B: Backend>(gguf: &Gguf, hyper: &HyperParams, settings: Settings) -> Result<Self, ModelError> {
        let mut lines = weight_lines::<B>(gguf, hyper, &settings.slice)?;
        lines.extend(state_lines::<B>(hyper, &settings));
        Ok(MemoryPlan { settings, lines })
    }

    pub fn bytes(&self, memory: Memory) -> u64 {
        self.lines.iter().filter(|l| l.memory == memory).map(|l| l.bytes).sum()
    }

    pub fn total(&self) -> u64 {
        self.lines.iter().map(|l| l.bytes).sum()
    }

    /// Longest prompt: one position is the answer's.
    pub fn longest_prompt(&self) -> usize {
        self.settings.context.saturating_sub(1)
    }

    /// `None`: it fits. Else the line that is too big.
    pub fn excess(&self, budget: &Budget) -> Option<Excess> {
        let over = |has: u64, needs: u64, lines: &mut dyn Iterator<Item = &Line>| {
            if needs <= has {
                return None;
            }
            // Weights are what they are; the largest other line can be made smaller.
            let (weights, mut others): (Vec<&Line>, Vec<&Line>) =
                lines.partition(|l| l.name.starts_with(WEIGHTS));
            others.sort_by_key(|l| l.bytes);
            let weights_bytes: u64 = weights.iter().map(|l| l.bytes).sum();
            let line = match others.pop() {
                Some(l) if weights_bytes <= has => l.name.clone(),
                _ => WEIGHTS.trim_end_matches(':').to_string(),
            };
            Some(Excess { line, needs, has })
        };
        match budget.host {
            None => over(budget.device, self.total(), &mut self.lines.iter()),
            Some(host) => {
                let device = self.lines.iter().filter(|l| l.memory == Memory::Device);
                let rest = self.lines.iter().filter(|l| l.memory != Memory::Device);
                let device_bytes = self.bytes(Memory::Device);
                over(budget.device, device_bytes, &mut device.into_iter())
                    .or_else(|| over(host, self.total() - device_bytes, &mut rest.into_iter()))
            }
        }
    }
}

/// What there is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Budget {
    pub device: u64,
    /// `None`: device and host are one memory.
    pub host: Option<u64>,
}

impl Budget {
    pub fn shared(bytes: u64) -> Self {
        Budget { device: bytes, host: None }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Excess {
    /// The largest line that could be smaller; "weights" where they alone do not fit.
    pub line: String,
    pub needs: u64,
    pub has: u64,
}

impl fmt::Display for Excess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "needs {}, {} more than the {} there are; the largest line is {}",
            Size(self.needs),
            Size(self.needs - self.has),
            Size(self.has),
            self.line
        )
    }
}

const WEIGHTS: &str = "weights:";

fn part_name(hyper: &HyperParams, tensor: &str) -> String {
    let layer = tensor.strip_prefix("blk.").and_then(|r| r.split('.').next()).and_then(|n| n.parse().ok());
    match layer.and_then(|l: usize| hyper.layers.get(l)) {
        Some(LayerKind::Window) => format!("{WEIGHTS} sliding layers"),
        Some(LayerKind::Indexed) => format!("{WEIGHTS} ratio 4 layers"),
        Some(LayerKind::Pooled) => format!("{WEIGHTS} ratio 128 layers"),
        None if tensor.starts_with("token_embd") => format!("{WEIGHTS} embedding"),
        None => format!("{WEIGHTS} output head"),
    }
}

fn add(lines: &mut Vec<Line>, name: String, bytes: u64, memory: Memory) {
    match lines.iter_mut().find(|l| l.name == name && l.memory == memory) {
        Some(line) => line.bytes += bytes,
        None if bytes > 0 => lines.push(Line { name, bytes, memory }),
        None => {}
    }
}

fn weight_lines<B: Backend>(
    gguf: &Gguf,
    hyper: &HyperParams,
    slice: &LayerSlice,
) -> Result<Vec<Line>, ModelError> {
    let mut lines = Vec::new();
    for need in needs(hyper, slice) {
        let part = part_name(hyper, &need.name);
        let elements: u64 = need.shape.iter().product();
        let info = match gguf.tensor(&need.name) {
            Some(info) => info,
            // Bound as zeros.
            None if need.optional => {
                add(&mut lines, part, elements * 4, Memory::Device);
                continue;
            }
            None => {
                return Err(ModelError::MissingTensor {
                    name: need.name,
                    slice: slice.to_string(),
                    hint: "",
                });
            }
        };
        if need.role != Role::Matrix {
            add(&mut lines, part, elements * 4, Memory::Device);
            continue;
        }
        let dim = |i: usize| need.shape.get(i).map_or(1, |&d| d as usize);
        match B::matrix_bytes(info.format, dim(2), dim(1), dim(0)) {
            0 => add(&mut lines, part, info.byte_len(), Memory::Mapped),
            bytes => add(&mut lines, part, bytes, Memory::Device),
        }
    }
    Ok(lines)
}

fn state_lines<B: Backend>(hyper: &HyperParams, settings: &Settings) -> Vec<Line> {
    let setup = settings.setup(hyper);
    let mut lines = Vec::new();
    for PlanLine { name, bytes } in B::plan(&setup) {
        add(&mut lines, name, bytes, Memory::Device);
    }
    for spec in activation_specs(&setup) {
        let name = if spec.name == "logits" { "logits" } else { "activations" };
        add(&mut lines, name.into(), spec.bytes(), Memory::Device);
    }
    let buffers = StageBuffers::new(&setup, settings.checkpoints);
    add(&mut lines, "checkpoints".into(), buffers.checkpoints as u64, Memory::Host);
    add(&mut lines, "transfer buffers".into(), buffers.hidden as u64 * 4, Memory::Host);
    add(&mut lines, "sampler".into(), buffers.logits as u64 * SAMPLER_BYTES, Memory::Host);
    add(&mut lines, "runtime".into(), RUNTIME_BYTES, Memory::Host);
    lines
}

/// What a user fixed; the rest is chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Asked {
    pub context: Option<usize>,
    pub sessions: Option<usize>,
    pub chunk: Option<usize>,
    pub checkpoints: Option<usize>,
}

/// The settings that fit, or why none do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Choice {
    Fits(MemoryPlan),
    /// The smallest instance that was asked for does not fit.
    Refused {
        plan: MemoryPlan,
        excess: Excess,
        nearest: Option<Box<MemoryPlan>>,
    },
}

/// Contexts are chosen in steps of this.
const CONTEXT_STEP: usize = 1024;
/// A smaller chunk is worth a context up to this, not beyond.
const CONTEXT_GOOD: usize = 32 * 1024;
const CHUNKS: [usize; 6] = [2048, 1024, 512, 256, 128, 64];
const SESSIONS: [usize; 3] = [4, 2, 1];
const CHECKPOINTS: usize = 32;

/// Chooses chunk, sessions and context for a budget, keeping what is asked. Prefers the whole context of the model,
/// then [`CONTEXT_GOOD`], then larger chunks, then more sessions. `base`: slice, row format and numerics.
pub fn choose<B: Backend>(
    gguf: &Gguf,
    hyper: &HyperParams,
    base: Settings,
    asked: Asked,
    budget: &Budget,
) -> Result<Choice, ModelError> {
    let weights = weight_lines::<B>(gguf, hyper, &base.slice)?;
    let plan = |s: Settings| {
        let mut lines = weights.clone();
        lines.extend(state_lines::<B>(hyper, &s));
        MemoryPlan { settings: s, lines }
    };
    let checkpoints = asked.checkpoints.unwrap_or(CHECKPOINTS);
    let model_context = usize::try_from(hyper.context).unwrap_or(usize::MAX).max(2);
    let settings = |context, sessions, chunk| {
        // As much again as one session may hold, for the state of earlier requests.
        let spare_pages = KvLayout::pages_for(context).min(4096);
        Settings { context, sessions, chunk, checkpoints, spare_pages, ..base }
    };
    let fits = |s: Settings| {
        let p = plan(s);
        p.excess(budget).is_none().then_some(p)
    };
    let sessions: Vec<usize> = asked.sessions.map_or(SESSIONS.to_vec(), |s| vec![s]);
    let chunks: Vec<usize> = asked.chunk.map_or(CHUNKS.to_vec(), |c| vec![c]);
    let mut best: Option<MemoryPlan> = None;
    for &sessions in &sessions {
        for &chunk in &chunks {
            let found = match asked.context {
                Some(context) => fits(settings(context, sessions, chunk)),
                None => {
                    let steps = model_context.div_ceil(CONTEXT_STEP);
                    let context = |n: usize| (n * CONTEXT_STEP).min(model_context);
                    let n = largest(steps, |n| fits(settings(context(n), sessions, chunk)).is_some());
                    (n > 0).then(|| plan(settings(context(n), sessions, chunk)))
                }
            };
            let Some(found) = found else { continue };
            let goal = asked.context.unwrap_or(model_context.min(CONTEXT_GOOD));
            if found.settings.context >= goal {
                return Ok(Choice::Fits(found));
            }
            if best.as_ref().is_none_or(|b| found.settings.context > b.settings.context) {
                best = Some(found);
            }
        }
    }
    if let Some(best) = best {
        return Ok(Choice::Fits(best));
    }
    // The least of what was asked, and what the budget allows instead.
    let least = plan(settings(
        asked.context.unwrap_or(CONTEXT_STEP.min(model_context)),
        sessions.last().copied().unwrap_or(1),
        chunks.last().copied().unwrap_or(64),
    ));
    let Some(excess) = least.excess(budget) else { return Ok(Choice::Fits(least)) };
    let free = Asked { checkpoints: asked.checkpoints, ..Asked::default() };
    let nearest = match asked == free {
        true => None,
        false => match choose::<B>(gguf, hyper, base, free, budget)? {
            Choice::Fits(p) => Some(Box::new(p)),
            Choice::Refused { .. } => None,
        },
    };
    Ok(Choice::Refused { plan: least, excess, nearest })
}

/// Largest `n` in `0..=max` for which `ok`, which holds up to some number and not beyond.
fn largest(max: usize, ok: impl Fn(usize) -> bool) -> usize {
    let (mut low, mut high) = (0, max);
    while low < high {
        let middle = low + (high - low).div_ceil(2);
        if ok(middle) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    low
}

/// A machine of a cluster.
#[derive(Clone, Debug, PartialEq)]
pub struct Node {
    pub name: String,
    pub budget: Budget,
    /// Relative; 1 for all where unknown.
    pub speed: f64,
}

/// Slices for `nodes` in their order: every part fits, and the slowest part is as fast as can be. The time of a part is
/// taken as its layers over the node's speed. `Err`: what is missing where the memory of all does not do.
pub fn split<B: Backend>(
    gguf: &Gguf,
    hyper: &HyperParams,
    base: Settings,
    nodes: &[Node],
) -> Result<Result<Vec<MemoryPlan>, Excess>, ModelError> {
    let total = hyper.layers.len();
    let slice = |first, end| LayerSlice { first, end, total, head: end == total };
    // fits[node][first]: the largest end; more layers never need less.
    let plan = |first: usize, end: usize| {
        MemoryPlan::new::<B>(gguf, hyper, Settings { slice: slice(first, end), ..base })
    };
    let mut cache: Vec<Vec<Option<MemoryPlan>>> = vec![vec![None; total + 1]; total + 1];
    for (first, row) in cache.iter_mut().enumerate() {
        for (end, entry) in row.iter_mut().enumerate().skip(first + 1) {
            *entry = Some(plan(first, end)?);
        }
    }
    let fits = |n: &Node, first: usize, end: usize| {
        cache[first][end].as_ref().is_some_and(|p| p.excess(&n.budget).is_none())
    };
    // best[end]: the slowest part's time of the nodes so far over layers 0..end, and where the last part begins.
    let mut best: Vec<Vec<Option<(f64, usize)>>> = vec![vec![None; total + 1]; nodes.len() + 1];
    best[0][0] = Some((0.0, 0));
    for (i, node) in nodes.iter().enumerate() {
        for end in 1..=total {
            for first in 0..end {
                let Some((before, _)) = best[i][first] else { continue };
                if !fits(node, first, end) {
                    continue;
                }
                let time = before.max((end - first) as f64 / node.speed);
                if best[i + 1][end].is_none_or(|(t, _)| time < t) {
                    best[i + 1][end] = Some((time, first));
                }
            }
        }
    }
    if best[nodes.len()][total].is_none() {
        let whole = plan(0, total)?;
        let has = nodes.iter().map(|n| n.budget.device + n.budget.host.unwrap_or(0)).sum();
        // Each node has its own runtime; and a layer does not split.
        let needs = whole.total() + RUNTIME_BYTES * nodes.len().saturating_sub(1) as u64;
        let line = "weights and sessions of all layers, which split at whole layers".to_string();
        return Ok(Err(Excess { line, needs: needs.max(has), has }));
    }
    let (mut end, mut parts) = (total, Vec::new());
    for i in (0..nodes.len()).rev() {
        let Some((_, first)) = best[i + 1][end] else { break };
        parts.extend(cache[first][end].take());
        end = first;
    }
    parts.reverse();
    Ok(Ok(parts))
}

/// Bytes for people: the largest unit that leaves a number of at least one.
pub struct Size(pub u64);

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let units = ["bytes", "KiB", "MiB", "GiB", "TiB"];
        let mut value = self.0 as f64;
        let mut unit = 0;
        while value >= 1024.0 && unit + 1 < units.len() {
            value /= 1024.0;
            unit += 1;
        }
        if unit == 0 { write!(f, "{} bytes", self.0) } else { write!(f, "{value:.2} {}", units[unit]) }
    }
}

impl fmt::Display for MemoryPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let s = &self.settings;
        for line in &self.lines {
            writeln!(f, "{:<28} {:>12}  {}", line.name, Size(line.bytes).to_string(), line.memory.name())?;
        }
        writeln!(f, "{:<28} {:>12}", "total", Size(self.total()).to_string())?;
        write!(
            f,
            "layers {}, context {}, {} sessions, {} rows a step, {} checkpoints; pages of {PAGE_TOKENS} tokens: {}; longest prompt {} tokens",
            s.slice,
            s.context,
            s.sessions,
            s.limits().rows,
            s.checkpoints,
            s.limits().pages,
            self.longest_prompt()
        )
    }
}

/// `51.3GiB`, `800M`, `1024`: a number with an optional unit; K, M, G, T are powers of 1024.
pub fn parse_size(text: &str) -> Option<u64> {
    let text = text.trim();
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let number: f64 = number.parse().ok()?;
    let unit = unit.trim().to_ascii_lowercase();
    let power = match unit.strip_suffix("ib").or(unit.strip_suffix('b')).unwrap_or(&unit) {
        "" => 0,
        "k" => 1,
        "m" => 2,
        "g" => 3,
        "t" => 4,
        _ => return None,
    };
    let bytes = number * 1024f64.powi(power);
    (bytes.is_finite() && bytes < u64::MAX as f64).then_some(bytes as u64)
}
