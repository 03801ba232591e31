//! The model's weights on one page: every tensor of a layer with its shape. Names and shapes as in the GGUF files of
//! ds4 and llama.cpp (their converters' tables).

use ds4_gguf::{BlockFormat, Gguf, TensorInfo};

use crate::backend::{Backend, Handles, MatrixSource};
use crate::error::ModelError;
use crate::hyper::{HyperParams, LayerKind};
use crate::slice::LayerSlice;

/// Symbols: `D` hidden, `n` streams, `H` heads, `d` head size, `E` experts, `F` expert width, `V` vocabulary;
/// `c` = 2 in ratio-4 layers, 1 in ratio-128 layers.
pub struct Weights<B: Handles> {
    /// `[V, D]`; where the slice starts at layer 0.
    pub embedding: Option<B::Matrix>,
    pub layers: Vec<Layer<B>>,
    pub head: Option<Head<B>>,
}

pub struct Layer<B: Handles> {
    /// Index in the model.
    pub index: usize,
    pub kind: LayerKind,
    pub hc_attn: HyperConnection<B>,
    /// `[D]`
    pub attn_norm: B::Vector,
    pub attention: Attention<B>,
    pub compressor: Option<Compressor<B>>,
    pub indexer: Option<Indexer<B>>,
    pub hc_ffn: HyperConnection<B>,
    /// `[D]`
    pub ffn_norm: B::Vector,
    pub router: Router<B>,
    pub experts: Experts<B>,
}

/// Mixing of the residual streams around one sublayer.
pub struct HyperConnection<B: Handles> {
    /// `[(2+n)n, nD]`
    pub mix: B::Matrix,
    /// `[(2+n)n]`
    pub base: B::Vector,
    /// `[3]`: pre, post, C
    pub scale: B::Vector,
}

pub struct Attention<B: Handles> {
    /// `[q_lora, D]`
    pub q_a: B::Matrix,
    /// `[q_lora]`
    pub q_norm: B::Vector,
    /// `[H*d, q_lora]`
    pub q_b: B::Matrix,
    /// `[d, D]`
    pub kv: B::Matrix,
    /// `[d]`
    pub kv_norm: B::Vector,
    /// `[H]`
    pub sinks: B::Vector,
    /// `[g*o_lora, H*d/g]`
    pub output_a: B::Matrix,
    /// `[D, g*o_lora]`
    pub output_b: B::Matrix,
}

/// Makes one row of `width` channels out of every window of tokens.
pub struct Compressor<B: Handles> {
    /// `[c*width, D]`
    pub kv: B::Matrix,
    /// `[c*width, D]`
    pub gate: B::Matrix,
    /// `[ratio, c*width]`
    pub ape: B::Vector,
    /// `[width]`
    pub norm: B::Vector,
}

/// Chooses the compressed rows that a token sees; ratio 4 only. `Hi` heads of `di` channels.
pub struct Indexer<B: Handles> {
    /// `[Hi*di, q_lora]`
    pub q_b: B::Matrix,
    /// `[Hi, D]`
    pub weights: B::Matrix,
    pub compressor: Compressor<B>,
}

pub struct Router<B: Handles> {
    /// `[E, D]`
    pub gate: B::Matrix,
    pub choice: Choice<B>,
}

/// How a token's experts are chosen. Their weights come from the gate in both cases.
pub enum Choice<B: Handles> {
    /// By token id: `[V, K]`.
    Hash(B::Table),
    /// The best `K` of score plus bias `[E]`.
    TopK(B::Vector),
}

pub struct Experts<B: Handles> {
    /// `E` times `[F, D]`
    pub gate: B::Matrix,
    /// `E` times `[F, D]`
    pub up: B::Matrix,
    /// `E` times `[D, F]`
    pub down: B::Matrix,
    /// `[F, D]`
    pub shared_gate: B::Matrix,
    /// `[F, D]`
    pub shared_up: B::Matrix,
    /// `[D, F]`
    pub shared_down: B::Matrix,
    /// SwiGLU clamp; 0 means none.
    pub clamp: f32,
}

/// Streams to logits.
pub struct Head<B: Handles> {
    /// `[n, nD]`
    pub mix: B::Matrix,
    /// `[n]`
    pub base: B::Vector,
    /// `[1]`
    pub scale: B::Vector,
    /// `[D]`
    pub norm: B::Vector,
    /// `[V, D]`
    pub output: B::Matrix,
}

/// What a tensor serves as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    Matrix,
    Vector,
    Table,
}

/// One tensor that a slice needs: its name, and its shape in ggml order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorNeed {
    pub name: String,
    pub shape: Vec<u64>,
    pub role: Role,
    pub optional: bool,
}

/// Every tensor of the slice, in file order. The binder below and the memory plan read this one list.
pub fn needs(hp: &HyperParams, slice: &LayerSlice) -> Vec<TensorNeed> {
    let mut list = Recorder { needs: Vec::new() };
    // The recorder never fails.
    let _ = walk(hp, slice, &mut list);
    list.needs
}

/// Binds every tensor of the slice to the backend.
pub fn bind<B: Backend>(
    hp: &HyperParams,
    slice: &LayerSlice,
    gguf: &Gguf,
    backend: &mut B,
    progress: &mut dyn FnMut(&TensorInfo),
) -> Result<Weights<B>, ModelError> {
    walk(hp, slice, &mut Binder { gguf, backend, slice, progress })
}

/// What the walk over the tensors does with each of them.
trait Visitor {
    type B: Handles;
    fn matrix(&mut self, name: String, rows: usize, cols: usize) -> Result<M<Self>, ModelError>;
    fn stack(&mut self, name: String, stack: usize, rows: usize, cols: usize) -> Result<M<Self>, ModelError>;
    fn vector(&mut self, name: String, shape: &[usize]) -> Result<V<Self>, ModelError>;
    fn optional_vector(&mut self, name: String, len: usize) -> Result<V<Self>, ModelError>;
    fn table(&mut self, name: String, rows: usize, cols: usize) -> Result<T<Self>, ModelError>;
}

type M<X> = <<X as Visitor>::B as Handles>::Matrix;
type V<X> = <<X as Visitor>::B as Handles>::Vector;
type T<X> = <<X as Visitor>::B as Handles>::Table;

fn walk<X: Visitor>(hp: &HyperParams, slice: &LayerSlice, v: &mut X) -> Result<Weights<X::B>, ModelError> {
    let embedding = match slice.embeds() {
        true => Some(v.matrix("token_embd.weight".into(), hp.vocab, hp.hidden)?),
        false => None,
    };
    let layers = slice.layers().map(|i| walk_layer(hp, i, v)).collect::<Result<Vec<_>, _>>()?;
    let head = match slice.head {
        true => Some(Head {
            mix: v.matrix("output_hc_fn.weight".into(), hp.streams, hp.streams * hp.hidden)?,
            base: v.vector("output_hc_base.weight".into(), &[hp.streams])?,
            scale: v.vector("output_hc_scale.weight".into(), &[1])?,
            norm: v.vector("output_norm.weight".into(), &[hp.hidden])?,
            output: v.matrix("output.weight".into(), hp.vocab, hp.hidden)?,
        }),
        false => None,
    };
    Ok(Weights { embedding, layers, head })
}

fn walk_layer<X: Visitor>(hp: &HyperParams, index: usize, v: &mut X) -> Result<Layer<X::B>, ModelError> {
    let kind = hp.layers[index];
    let t = |rest: &str| format!("blk.{index}.{rest}");
    let (d, hidden, low) = (hp.head_dim, hp.hidden, hp.o_groups * hp.o_lora);
    let hc = |v: &mut X, which: &str| -> Result<HyperConnection<X::B>, ModelError> {
        Ok(HyperConnection {
            mix: v.matrix(t(&format!("hc_{which}_fn.weight")), hp.mix_dim(), hp.streams * hidden)?,
            base: v.vector(t(&format!("hc_{which}_base.weight")), &[hp.mix_dim()])?,
            scale: v.vector(t(&format!("hc_{which}_scale.weight")), &[3])?,
        })
    };
    let compressor = |v: &mut X, prefix: &str, width: usize, ratio: usize| {
        let c = if ratio == 4 { 2 } else { 1 };
        Ok::<_, ModelError>(Compressor {
            kv: v.matrix(t(&format!("{prefix}_compressor_kv.weight")), c * width, hidden)?,
            gate: v.matrix(t(&format!("{prefix}_compressor_gate.weight")), c * width, hidden)?,
            ape: v.vector(t(&format!("{prefix}_compressor_ape.weight")), &[ratio, c * width])?,
            norm: v.vector(t(&format!("{prefix}_compressor_norm.weight")), &[width])?,
        })
    };
    Ok(Layer {
        index,
        kind,
        hc_attn: hc(v, "attn")?,
        attn_norm: v.vector(t("attn_norm.weight"), &[hidden])?,
        attention: Attention {
            q_a: v.matrix(t("attn_q_a.weight"), hp.q_lora, hidden)?,
            q_norm: v.vector(t("attn_q_a_norm.weight"), &[hp.q_lora])?,
            q_b: v.matrix(t("attn_q_b.weight"), hp.q_dim(), hp.q_lora)?,
            kv: v.matrix(t("attn_kv.weight"), d, hidden)?,
            kv_norm: v.vector(t("attn_kv_a_norm.weight"), &[d])?,
            sinks: v.vector(t("attn_sinks.weight"), &[hp.heads])?,
            output_a: v.matrix(t("attn_output_a.weight"), low, hp.q_dim() / hp.o_groups)?,
            output_b: v.matrix(t("attn_output_b.weight"), hidden, low)?,
        },
        compressor: kind.ratio().map(|ratio| compressor(v, "attn", d, ratio)).transpose()?,
        indexer: match kind {
            LayerKind::Indexed => Some(Indexer {
                q_b: v.matrix(t("indexer.attn_q_b.weight"), hp.index_heads * hp.index_dim, hp.q_lora)?,
                weights: v.matrix(t("indexer.proj.weight"), hp.index_heads, hidden)?,
                compressor: compressor(v, "indexer", hp.index_dim, 4)?,
            }),
            _ => None,
        },
        hc_ffn: hc(v, "ffn")?,
        ffn_norm: v.vector(t("ffn_norm.weight"), &[hidden])?,
        router: Router {
            gate: v.matrix(t("ffn_gate_inp.weight"), hp.experts, hidden)?,
            choice: if hp.is_hash_layer(index) {
                Choice::Hash(v.table(t("ffn_gate_tid2eid.weight"), hp.vocab, hp.experts_used)?)
            } else {
                Choice::TopK(v.optional_vector(t("exp_probs_b.bias"), hp.experts)?)
            },
        },
        experts: Experts {
            gate: v.stack(t("ffn_gate_exps.weight"), hp.experts, hp.expert_ff, hidden)?,
            up: v.stack(t("ffn_up_exps.weight"), hp.experts, hp.expert_ff, hidden)?,
            down: v.stack(t("ffn_down_exps.weight"), hp.experts, hidden, hp.expert_ff)?,
            shared_gate: v.matrix(t("ffn_gate_shexp.weight"), hp.shared_ff, hidden)?,
            shared_up: v.matrix(t("ffn_up_shexp.weight"), hp.shared_ff, hidden)?,
            shared_down: v.matrix(t("ffn_down_shexp.weight"), hidden, hp.shared_ff)?,
            clamp: hp.swiglu_clamp[index],
        },
    })
}

struct Recorder {
    needs: Vec<TensorNeed>,
}

/// Handles of nothing: the walk without a device.
impl Handles for Recorder {
    type Matrix = ();
    type Vector = ();
    type Table = ();
}

impl Recorder {
    fn note(
        &mut self,
        name: String,
        shape: Vec<usize>,
        role: Role,
        optional: bool,
    ) -> Result<(), ModelError> {
        let shape = shape.into_iter().map(|d| d as u64).collect();
        self.needs.push(TensorNeed { name, shape, role, optional });
        Ok(())
    }
}

impl Visitor for Recorder {
    type B = Recorder;

    fn matrix(&mut self, name: String, rows: usize, cols: usize) -> Result<(), ModelError> {
        self.note(name, vec![cols, rows], Role::Matrix, false)
    }

    fn stack(&mut self, name: String, stack: usize, rows: usize, cols: usize) -> Result<(), ModelError> {
        self.note(name, vec![cols, rows, stack], Role::Matrix, false)
    }

    fn vector(&mut self, name: String, shape: &[usize]) -> Result<(), ModelError> {
        self.note(name, shape.iter().rev().copied().collect(), Role::Vector, false)
    }

    fn optional_vector(&mut self, name: String, len: usize) -> Result<(), ModelError> {
        self.note(name, vec![len], Role::Vector, true)
    }

    fn table(&mut self, name: String, rows: usize, cols: usize) -> Result<(), ModelError> {
        self.note(name, vec![cols, rows], Role::Table, false)
    }
}

struct Binder<'a, B: Backend> {
    gguf: &'a Gguf,
    backend: &'a mut B,
    slice: &'a LayerSlice,
    progress: &'a mut dyn FnMut(&TensorInfo),
}

const MATRIX_FORMATS: &str = "F32, F16, BF16, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ2_XXS, MXFP4";

impl<'a, B: Backend> Binder<'a, B> {
    fn find(&mut self, name: &str, shape: &[usize]) -> Result<&'a TensorInfo, ModelError> {
        let info = self.gguf.tensor(name).ok_or_else(|| ModelError::MissingTensor {
            name: name.to_string(),
            slice: self.slice.to_string(),
            hint: if self.slice.head && name.starts_with("output") {
                "; a file of some layers only may lack the output head: own them with --layers A:B"
            } else {
                ""
            },
        })?;
        let expected: Vec<u64> = shape.iter().map(|&d| d as u64).collect();
        // Trailing dimensions of 1 say nothing.
        let trim = |s: &[u64]| s.iter().rposition(|&d| d != 1).map_or(0, |i| i + 1);
        if info.shape[..trim(&info.shape)] != expected[..trim(&expected)] {
            return Err(ModelError::Shape { name: name.to_string(), found: info.shape.clone(), expected });
        }
        (self.progress)(info);
        Ok(info)
    }

    fn floats(&mut self, name: &str, shape: &[usize]) -> Result<Vec<f32>, ModelError> {
        let info = self.find(name, shape)?;
        if !matches!(info.format, BlockFormat::F32 | BlockFormat::F16 | BlockFormat::BF16) {
            return Err(ModelError::Format {
                name: name.to_string(),
                found: info.format.name(),
                role: "a vector",
                supported: "F32, F16, BF16",
            });
        }
        let mut values = vec![0f32; shape.iter().product()];
        info.format.dequantize(self.gguf.data(info), &mut values)?;
        Ok(values)
    }
}

impl<B: Backend> Visitor for Binder<'_, B> {
    type B = B;

    fn matrix(&mut self, name: String, rows: usize, cols: usize) -> Result<B::Matrix, ModelError> {
        self.bind_matrix(name, 1, rows, cols, &[cols, rows])
    }

    fn stack(
        &mut self,
        name: String,
        stack: usize,
        rows: usize,
        cols: usize,
    ) -> Result<B::Matrix, ModelError> {
        self.bind_matrix(name, stack, rows, cols, &[cols, rows, stack])
    }

    fn vector(&mut self, name: String, shape: &[usize]) -> Result<B::Vector, ModelError> {
        let ggml: Vec<usize> = shape.iter().rev().copied().collect();
        let values = self.floats(&name, &ggml)?;
        Ok(self.backend.vector(&name, values)?)
    }

    fn optional_vector(&mut self, name: String, len: usize) -> Result<B::Vector, ModelError> {
        if self.gguf.tensor(&name).is_none() {
            return Ok(self.backend.vector(&name, vec![0.0; len])?);
        }
        self.vector(name, &[len])
    }

    fn table(&mut self, name: String, rows: usize, cols: usize) -> Result<B::Table, ModelError> {
        let info = self.find(&name, &[cols, rows])?;
        if info.format != BlockFormat::I32 {
            return Err(ModelError::Format {
                name,
                found: info.format.name(),
                role: "a table of expert ids",
                supported: "I32",
            });
        }
        let values: Vec<i32> = self
            .gguf
            .data(info)
            .chunks_exact(4)
            .map(|b| i32::from_le_bytes([b[0], b[1], b[2], b[3]]))
            .collect();
        Ok(self.backend.table(&name, cols, values)?)
    }
}

impl<B: Backend> Binder<'_, B> {
    fn bind_matrix(
        &mut self,
        name: String,
        stack: usize,
        rows: usize,
        cols: usize,
        shape: &[usize],
    ) -> Result<B::Matrix, ModelError> {
        let info = self.find(&name, shape)?;
        let format = info.format;
        if format == BlockFormat::I32 {
            return Err(ModelError::Format {
                name,
                found: format.name(),
                role: "a matrix",
                supported: MATRIX_FORMATS,
            });
        }
        let bytes = self.gguf.bytes(info);
        Ok(self.backend.matrix(MatrixSource { name, format, stack, rows, cols, bytes })?)
    }
}
