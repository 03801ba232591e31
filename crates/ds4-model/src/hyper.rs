//! Hyper-parameters, read from the file's metadata alone: there is no table of known models.

use ds4_gguf::Metadata;

use crate::error::ModelError;

/// What a layer remembers besides its sliding window.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LayerKind {
    /// Ratio 0: the sliding window only.
    Window,
    /// Ratio 4: overlapping windows of 4 tokens, chosen by the indexer.
    Indexed,
    /// Ratio 128: one compressed row per 128 tokens, all of them visible.
    Pooled,
}

impl LayerKind {
    fn from_ratio(layer: usize, ratio: u64) -> Result<Self, ModelError> {
        match ratio {
            0 => Ok(Self::Window),
            4 => Ok(Self::Indexed),
            128 => Ok(Self::Pooled),
            _ => Err(ModelError::Unsupported {
                what: format!("deepseek4.attention.compress_ratios[{layer}]"),
                found: ratio.to_string(),
                supported: "0, 4 and 128".into(),
            }),
        }
    }

    /// Tokens per compressed row; `None` where there are no such rows.
    pub fn ratio(self) -> Option<usize> {
        match self {
            Self::Window => None,
            Self::Indexed => Some(4),
            Self::Pooled => Some(128),
        }
    }
}

/// YaRN scaling of the compressed layers' rotary frequencies.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Yarn {
    pub factor: f32,
    pub original_context: u64,
    pub beta_fast: f32,
    pub beta_slow: f32,
}

/// Shapes and constants of one model. Symbols as in the paper: `D` hidden, `H` heads, `d` head size, `V` vocabulary.
#[derive(Clone, Debug, PartialEq)]
pub struct HyperParams {
    /// Name from the file, for people.
    pub name: String,
    /// `V`
    pub vocab: usize,
    /// `D`
    pub hidden: usize,
    /// One kind per layer.
    pub layers: Vec<LayerKind>,
    /// `H`
    pub heads: usize,
    /// `d`; the last `rope_dim` channels of a head rotate.
    pub head_dim: usize,
    pub rope_dim: usize,
    pub q_lora: usize,
    /// The heads are split into this many consecutive groups for the output projection.
    pub o_groups: usize,
    pub o_lora: usize,
    /// Raw rows that a query sees, itself included.
    pub window: usize,
    pub index_heads: usize,
    pub index_dim: usize,
    /// Compressed rows that the indexer keeps.
    pub index_topk: usize,
    pub experts: usize,
    pub experts_used: usize,
    /// `F`, width of one routed expert.
    pub expert_ff: usize,
    /// Width of the shared expert.
    pub shared_ff: usize,
    /// Layers below this index choose experts by token id.
    pub hash_layers: usize,
    pub route_scale: f32,
    /// SwiGLU clamp per layer; 0 means none.
    pub swiglu_clamp: Vec<f32>,
    /// `n`, residual streams.
    pub streams: usize,
    pub sinkhorn_iters: usize,
    pub hc_eps: f32,
    pub rms_eps: f32,
    pub rope_base: f32,
    pub compress_rope_base: f32,
    pub yarn: Option<Yarn>,
    /// What the file says that it was trained for.
    pub context: u64,
}

const ARCH: &str = "deepseek4";

/// Bounds that no real model comes near; they keep every later product inside 64 bits.
const DIM_MAX: u64 = 1 << 24;
const LAYERS_MAX: u64 = 1 << 12;

struct Keys<'a>(&'a Metadata);

impl Keys<'_> {
    fn dim(&self, key: &str) -> Result<usize, ModelError> {
        let key = format!("{ARCH}.{key}");
        let value = self.0.u64(&key)?;
        match value {
            1..=DIM_MAX => Ok(value as usize),
            _ => Err(ModelError::Unsupported {
                what: key,
                found: value.to_string(),
                supported: format!("1 to {DIM_MAX}"),
            }),
        }
    }

    fn dim_or(&self, key: &str, default: usize) -> Result<usize, ModelError> {
        if self.has(key) { self.dim(key) } else { Ok(default) }
    }

    fn has(&self, key: &str) -> bool {
        self.0.get(&format!("{ARCH}.{key}")).is_some()
    }

    fn float(&self, key: &str) -> Result<f32, ModelError> {
        let key = format!("{ARCH}.{key}");
        let value = self.0.f32(&key)?;
        if value.is_finite() {
            Ok(value)
        } else {
            Err(ModelError::Unsupported {
                what: key,
                found: value.to_string(),
                supported: "a finite number".into(),
            })
        }
    }

    fn must_be(&self, key: &str, want: u64) -> Result<(), ModelError> {
        let key = format!("{ARCH}.{key}");
        if self.0.get(&key).is_none() {
            return Ok(());
        }
        let found = self.0.u64(&key)?;
        if found == want {
            return Ok(());
        }
        Err(ModelError::Unsupported { what: key, found: found.to_string(), supported: want.to_string() })
    }
}

impl HyperParams {
    /// Reads and cross-checks everything the forward pass needs.
    pub fn from_metadata(meta: &Metadata) -> Result<Self, ModelError> {
        let arch = meta.str("general.architecture")?;
        if arch != ARCH {
            return Err(ModelError::Unsupported {
                what: "general.architecture".into(),
                found: arch.to_string(),
                supported: ARCH.into(),
            });
        }
        let k = Keys(meta);
        let n_layers = k.dim("block_count")?;
        if n_layers as u64 > LAYERS_MAX {
            return Err(ModelError::Unsupported {
                what: "deepseek4.block_count".into(),
                found: n_layers.to_string(),
                supported: format!("1 to {LAYERS_MAX}"),
            });
        }
        let per_layer = |key: &str, len: usize| {
            if len >= n_layers {
                return Ok(());
            }
            Err(ModelError::Unsupported {
                what: format!("{ARCH}.{key}"),
                found: format!("{len} entries"),
                supported: format!("at least {n_layers}, one per layer"),
            })
        };
        let ratios = meta.array_u64("deepseek4.attention.compress_ratios")?;
        per_layer("attention.compress_ratios", ratios.len())?;
        let layers = ratios[..n_layers]
            .iter()
            .enumerate()
            .map(|(i, &r)| LayerKind::from_ratio(i, r))
            .collect::<Result<Vec<_>, _>>()?;
        let clamp = meta.array_f32("deepseek4.swiglu_clamp_exp")?;
        per_layer("swiglu_clamp_exp", clamp.len())?;

        k.must_be("attention.head_count_kv", 1)?;
        k.must_be("expert_shared_count", 1)?;
        k.must_be("expert_weights_norm", 1)?;
        k.must_be("expert_group_count", 0)?;
        k.must_be("expert_group_used_count", 0)?;
        k.must_be("expert_gating_func", 4)?;

        let yarn = if k.has("rope.scaling.factor") {
            Some(Yarn {
                factor: k.float("rope.scaling.factor")?,
                original_context: meta.u64("deepseek4.rope.scaling.original_context_length")?,
                beta_fast: k.float("rope.scaling.yarn_beta_fast")?,
                beta_slow: k.float("rope.scaling.yarn_beta_slow")?,
            })
        } else {
            None
        };
        let head_dim = k.dim("attention.key_length")?;
        k.must_be("attention.value_length", head_dim as u64)?;
        let expert_ff = k.dim("expert_feed_forward_length")?;
        let hp = HyperParams {
            name: meta.str("general.name").unwrap_or("DeepSeek V4").to_string(),
            vocab: k.dim("vocab_size")?,
            hidden: k.dim("embedding_length")?,
            layers,
            heads: k.dim("attention.head_count")?,
            head_dim,
            rope_dim: k.dim("rope.dimension_count")?,
            q_lora: k.dim("attention.q_lora_rank")?,
            o_groups: k.dim("attention.output_group_count")?,
            o_lora: k.dim("attention.output_lora_rank")?,
            window: k.dim("attention.sliding_window")?,
            index_heads: k.dim_or("attention.indexer.head_count", 1)?,
            index_dim: k.dim_or("attention.indexer.key_length", 128)?,
            index_topk: k.dim_or("attention.indexer.top_k", 1)?,
            experts: k.dim("expert_count")?,
            experts_used: k.dim("expert_used_count")?,
            expert_ff,
            shared_ff: expert_ff,
            hash_layers: meta.u64("deepseek4.hash_layer_count")?.min(LAYERS_MAX) as usize,
            route_scale: k.float("expert_weights_scale")?,
            swiglu_clamp: clamp[..n_layers].to_vec(),
            streams: k.dim("hyper_connection.count")?,
            sinkhorn_iters: k.dim("hyper_connection.sinkhorn_iterations")?,
            hc_eps: k.float("hyper_connection.epsilon")?,
            rms_eps: k.float("attention.layer_norm_rms_epsilon")?,
            rope_base: k.float("rope.freq_base")?,
            compress_rope_base: k.float("attention.compress_rope_freq_base")?,
            yarn,
            context: meta.u64("deepseek4.context_length").unwrap_or(1 << 20),
        };
        hp.check()?;
        Ok(hp)
    }

    /// Relations between the shapes that the equations rely on.
    pub fn check(&self) -> Result<(), ModelError> {
        let rule = |ok: bool, what: &str, found: String, supported: &str| {
            if ok {
                return Ok(());
            }
            Err(ModelError::Unsupported { what: what.into(), found, supported: supported.into() })
        };
        rule(
            self.rope_dim.is_multiple_of(2)
                && self.rope_dim <= self.head_dim
                && self.rope_dim <= self.index_dim,
            "deepseek4.rope.dimension_count",
            self.rope_dim.to_string(),
            "an even number not above the head size and the indexer's key length",
        )?;
        rule(
            self.heads.is_multiple_of(self.o_groups),
            "deepseek4.attention.output_group_count",
            self.o_groups.to_string(),
            "a divisor of the head count",
        )?;
        rule(
            self.experts_used <= self.experts,
            "deepseek4.expert_used_count",
            self.experts_used.to_string(),
            "at most deepseek4.expert_count",
        )?;
        rule(
            self.streams <= 8,
            "deepseek4.hyper_connection.count",
            self.streams.to_string(),
            "at most 8 residual streams",
        )?;
        rule(
            self.window <= 4096,
            "deepseek4.attention.sliding_window",
            self.window.to_string(),
            "at most 4096",
        )
    }

    /// Channels of a head that do not rotate.
    pub fn nope_dim(&self) -> usize {
        self.head_dim - self.rope_dim
    }

    /// Query width `H * d`.
    pub fn q_dim(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Rows of a hyper-connection projection: `pre`, `post` and the stream mixing matrix.
    pub fn mix_dim(&self) -> usize {
        (2 + self.streams) * self.streams
    }

    pub fn is_hash_layer(&self, layer: usize) -> bool {
        layer < self.hash_layers
    }

    /// Rotary frequencies, one per pair: f32, as every implementation keeps them.
    pub fn rope_freqs(&self, kind: LayerKind) -> Vec<f32> {
        let r = self.rope_dim as f64;
        let base = match kind {
            LayerKind::Window => self.rope_base as f64,
            LayerKind::Indexed | LayerKind::Pooled => self.compress_rope_base as f64,
        };
        let plain = |i: usize| 1.0 / base.powf(2.0 * i as f64 / r);
        let pairs = self.rope_dim / 2;
        match (kind, &self.yarn) {
            (LayerKind::Window, _) | (_, None) => (0..pairs).map(|i| plain(i) as f32).collect(),
            (_, Some(y)) => {
                let corr = |beta: f32| {
                    r * (y.original_context as f64 / (beta as f64 * std::f64::consts::TAU)).ln()
                        / (2.0 * base.ln())
                };
                let lo = corr(y.beta_fast).floor().max(0.0);
                let hi = corr(y.beta_slow).ceil().min(r - 1.0);
                let span = if hi == lo { 0.001 } else { hi - lo };
                (0..pairs)
                    .map(|i| {
                        let ramp = ((i as f64 - lo) / span).clamp(0.0, 1.0);
                        (plain(i) * ((1.0 - ramp) + ramp / y.factor as f64)) as f32
                    })
                    .collect()
            }
        }
    }
}
