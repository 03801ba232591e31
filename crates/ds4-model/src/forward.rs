//! The forward pass: the model's equations, once, over any [`Backend`].

use ds4_gguf::{Gguf, TensorInfo};

use crate::backend::{self, Backend, Element, PlanLine, Setup, TensorSpec};
use crate::batch::Batch;
use crate::error::ModelError;
use crate::weights::{self, Layer, Weights};

/// The activation buffers of one step. `T` rows; symbols as in [`crate::weights`].
pub struct Activations<B: Backend> {
    /// Residual streams `[T, n*D]`.
    pub x: B::Tensor,
    /// Sublayer input `[T, D]`.
    pub h: B::Tensor,
    /// `post` and `C` of the current sublayer `[T, n + n*n]`.
    pub mix: B::Tensor,
    /// `[T, q_lora]`
    pub qr: B::Tensor,
    /// `[T, H*d]`
    pub q: B::Tensor,
    /// `[T, d]`
    pub kv: B::Tensor,
    /// Chosen compressed rows, i32 `[T, index_topk]`.
    pub selected: B::Tensor,
    /// Attention output `[T, H*d]`.
    pub o: B::Tensor,
    /// Sublayer output `[T, D]`.
    pub y: B::Tensor,
    /// Chosen experts, i32 `[T, K]`.
    pub experts: B::Tensor,
    /// Their weights `[T, K]`.
    pub gates: B::Tensor,
    /// `[outputs, V]`; one unused row where the slice has no head.
    pub logits: B::Tensor,
}

/// Shapes of [`Activations`], in its order: the memory plan and the allocation read this one list.
pub fn activation_specs(setup: &Setup) -> [TensorSpec; 12] {
    let (hp, t) = (&setup.hyper, setup.limits.rows);
    let f = |name, rows, cols| TensorSpec { name, rows, cols, element: Element::F32 };
    let i = |name, rows, cols| TensorSpec { name, rows, cols, element: Element::I32 };
    let n = hp.streams;
    let (outputs, vocab) = if setup.layout.slice.head { (setup.limits.outputs, hp.vocab) } else { (1, 1) };
    [
        f("x", t, n * hp.hidden),
        f("h", t, hp.hidden),
        f("mix", t, n + n * n),
        f("qr", t, hp.q_lora),
        f("q", t, hp.q_dim()),
        f("kv", t, hp.head_dim),
        i("selected", t, hp.index_topk),
        f("o", t, hp.q_dim()),
        f("y", t, hp.hidden),
        i("experts", t, hp.experts_used),
        f("gates", t, hp.experts_used),
        f("logits", outputs, vocab),
    ]
}

impl<B: Backend> Activations<B> {
    fn new(backend: &mut B, setup: &Setup) -> Result<Self, ModelError> {
        let [x, h, mix, qr, q, kv, selected, o, y, experts, gates, logits] = activation_specs(setup);
        Ok(Activations {
            x: backend.tensor(x)?,
            h: backend.tensor(h)?,
            mix: backend.tensor(mix)?,
            qr: backend.tensor(qr)?,
            q: backend.tensor(q)?,
            kv: backend.tensor(kv)?,
            selected: backend.tensor(selected)?,
            o: backend.tensor(o)?,
            y: backend.tensor(y)?,
            experts: backend.tensor(experts)?,
            gates: backend.tensor(gates)?,
            logits: backend.tensor(logits)?,
        })
    }
}

/// A slice of a model, loaded on one backend: weights, activation buffers, and the backend with its sessions' memory.
pub struct Model<B: Backend> {
    pub backend: B,
    setup: Setup,
    weights: Weights<B>,
    act: Activations<B>,
}

impl<B: Backend> Model<B> {
    /// Allocates everything `setup` asks for and binds the slice's tensors. `progress` hears of every tensor.
    pub fn load(
        gguf: &Gguf,
        setup: Setup,
        mut backend: B,
        progress: &mut dyn FnMut(&TensorInfo),
    ) -> Result<Self, ModelError> {
        backend.prepare(&setup)?;
        let weights = weights::bind(&setup.hyper, &setup.layout.slice, gguf, &mut backend, progress)?;
        let act = Activations::new(&mut backend, &setup)?;
        Ok(Model { backend, setup, weights, act })
    }

    pub fn setup(&self) -> &Setup {
        &self.setup
    }

    /// The buffers as the last step left them, with the backend that reads them: for traces and tests.
    pub fn trace(&mut self) -> (&mut B, &Activations<B>) {
        (&mut self.backend, &self.act)
    }

    /// One step. A slice that does not start at layer 0 takes its rows' streams `[T, n*D]` from `hidden`.
    /// Afterwards [`Model::logits`] or [`Model::hidden`] reads the result.
    pub fn forward(&mut self, batch: &Batch, hidden: Option<&[f32]>) -> Result<(), ModelError> {
        let Model { backend, setup, weights, act } = self;
        batch.check(&setup.limits, setup.hyper.vocab)?;
        let want = batch.len() * setup.hyper.streams * setup.hyper.hidden;
        match (hidden, &weights.embedding) {
            (Some(h), None) if h.len() == want => {}
            (None, Some(_)) => {}
            (found, _) => {
                return Err(ModelError::Batch(format!(
                    "layers {} take {} as input, found {} values",
                    setup.layout.slice,
                    if weights.embedding.is_some() { "tokens".to_string() } else { format!("{want} values") },
                    found.map_or(0, <[f32]>::len),
                )));
            }
        }
        backend.begin(batch)?;
        if let Some(h) = hidden {
            backend.write(&mut act.x, 0, h)?;
        }
        backend.record(batch, |b| run(b, weights, act, !batch.outputs().is_empty()))?;
        Ok(())
    }

    /// Logits `[outputs, V]` of the last step, from output `first` on, until `out` is full.
    pub fn logits(&mut self, first: usize, out: &mut [f32]) -> Result<(), ModelError> {
        Ok(self.backend.read(&self.act.logits, first, out)?)
    }

    /// Streams `[T, n*D]` of the last step, from row `first` on, until `out` is full.
    pub fn hidden(&mut self, first: usize, out: &mut [f32]) -> Result<(), ModelError> {
        Ok(self.backend.read(&self.act.x, first, out)?)
    }
}

/// The whole pass of one step.
fn run<B: Backend>(
    b: &mut B,
    weights: &Weights<B>,
    act: &mut Activations<B>,
    outputs: bool,
) -> backend::Result<()> {
    if let Some(table) = &weights.embedding {
        b.embed(table, &mut act.x)?;
    }
    let Some(first) = weights.layers.first() else { return Ok(()) };
    b.hc_pre(&first.hc_attn, &first.attn_norm, &act.x, &mut act.h, &mut act.mix)?;
    for (i, layer) in weights.layers.iter().enumerate() {
        attention(b, layer, act)?;
        b.hc_post_pre(&act.y, &layer.hc_ffn, &layer.ffn_norm, &mut act.x, &mut act.h, &mut act.mix)?;
        feed_forward(b, layer, act)?;
        match weights.layers.get(i + 1) {
            Some(next) => {
                b.hc_post_pre(&act.y, &next.hc_attn, &next.attn_norm, &mut act.x, &mut act.h, &mut act.mix)?
            }
            None => b.hc_post(&act.y, &act.mix, &mut act.x)?,
        }
    }
    match &weights.head {
        Some(head) if outputs => b.head(head, &act.x, &mut act.logits),
        _ => Ok(()),
    }
}

/// `y` = attention sublayer of `h`.
fn attention<B: Backend>(b: &mut B, layer: &Layer<B>, act: &mut Activations<B>) -> backend::Result<()> {
    b.project_q(layer, &act.h, &mut act.qr, &mut act.q)?;
    b.project_kv(layer, &act.h, &mut act.kv)?;
    if let Some(compressor) = &layer.compressor {
        b.compress(layer, compressor, &act.h)?;
    }
    let selected = match &layer.indexer {
        Some(indexer) => {
            b.select_rows(layer, indexer, &act.h, &act.qr, &mut act.selected)?;
            Some(&act.selected)
        }
        None => None,
    };
    b.attend(layer, &act.q, &act.kv, selected, &mut act.o)?;
    b.project_output(&layer.attention, &act.o, &mut act.y)
}

/// `y` = mixture-of-experts sublayer of `h`.
fn feed_forward<B: Backend>(b: &mut B, layer: &Layer<B>, act: &mut Activations<B>) -> backend::Result<()> {
    b.route(&layer.router, &act.h, &mut act.experts, &mut act.gates)?;
    b.run_experts(&layer.experts, &act.h, &act.experts, &act.gates, &mut act.y)
}

/// Plan lines of the activation buffers.
pub fn activation_plan(setup: &Setup) -> Vec<PlanLine> {
    activation_specs(setup)
        .iter()
        .map(|s| PlanLine { name: format!("activations: {}", s.name), bytes: s.bytes() })
        .collect()
}
