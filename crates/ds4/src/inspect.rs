//! `ds4 --inspect`: what a model file holds.

use std::collections::BTreeMap;
use std::io::Write;

use ds4_model::HyperParams;
use serde_json::{Value, json};

use crate::CliError;
use crate::args::ModelArgs;
use crate::open::{self, OpenModel};

pub fn run(args: &ModelArgs, as_json: bool) -> Result<(), CliError> {
    let model = open::open(args)?;
    let mut out = std::io::stdout().lock();
    if as_json {
        let text = serde_json::to_string_pretty(&summary(&model)).map_err(std::io::Error::from)?;
        writeln!(out, "{text}")?;
        return Ok(());
    }
    let hp = &model.hyper;
    writeln!(out, "{}: {}", model.path.display(), hp.name)?;
    let kinds = |ratio: usize| hp.layers.iter().filter(|k| k.ratio().unwrap_or(0) == ratio).count();
    writeln!(
        out,
        "{} layers ({} sliding, {} of ratio 4, {} of ratio 128), hidden {}, {} heads of {} ({} rotary), window {}",
        hp.layers.len(),
        kinds(0),
        kinds(4),
        kinds(128),
        hp.hidden,
        hp.heads,
        hp.head_dim,
        hp.rope_dim,
        hp.window
    )?;
    writeln!(
        out,
        "{} experts, {} used, width {}, {} hash layers; indexer keeps {} rows; vocabulary {}; context {}",
        hp.experts, hp.experts_used, hp.expert_ff, hp.hash_layers, hp.index_topk, hp.vocab, hp.context
    )?;
    let (formats, layers, total) = tally(&model);
    writeln!(out, "\nformat     tensors            bytes")?;
    for (name, (count, bytes)) in &formats {
        writeln!(out, "{name:<10} {count:>7} {bytes:>16}")?;
    }
    writeln!(out, "\npart       tensors            bytes")?;
    for (part, (count, bytes)) in &layers {
        let name = part.map_or("outside".to_string(), |l| format!("layer {l}"));
        writeln!(out, "{name:<10} {count:>7} {bytes:>16}")?;
    }
    writeln!(out, "total      {:>7} {total:>16}", formats.values().map(|f| f.0).sum::<usize>())?;
    Ok(())
}

type Tally<K> = BTreeMap<K, (usize, u64)>;

/// Tensors and bytes by format and by layer (`None`: outside the layers).
fn tally(model: &OpenModel) -> (Tally<&'static str>, Tally<Option<usize>>, u64) {
    let (mut formats, mut layers, mut total) = (Tally::new(), Tally::new(), 0);
    for t in model.gguf.tensors() {
        let bytes = t.byte_len();
        let layer =
            t.name.strip_prefix("blk.").and_then(|r| r.split('.').next()).and_then(|n| n.parse().ok());
        for entry in [formats.entry(t.format.name()).or_default(), layers.entry(layer).or_default()] {
            entry.0 += 1;
            entry.1 += bytes;
        }
        total += bytes;
    }
    (formats, layers, total)
}

/// Hyper-parameters under their names in the published config, then the tensors.
fn summary(model: &OpenModel) -> Value {
    let (formats, layers, total) = tally(model);
    let row = |(count, bytes): &(usize, u64)| json!({"tensors": count, "bytes": bytes});
    json!({
        "file": model.path.display().to_string(),
        "config": config(&model.hyper),
        "formats": formats.iter().map(|(k, v)| (k.to_string(), row(v))).collect::<serde_json::Map<_, _>>(),
        "layers": layers.iter().map(|(k, v)| {
            (k.map_or("outside".to_string(), |l| l.to_string()), row(v))
        }).collect::<serde_json::Map<_, _>>(),
        "bytes": total,
    })
}

fn config(hp: &HyperParams) -> Value {
    json!({
        "vocab_size": hp.vocab,
        "hidden_size": hp.hidden,
        "num_hidden_layers": hp.layers.len(),
        "num_attention_heads": hp.heads,
        "num_key_value_heads": 1,
        "head_dim": hp.head_dim,
        "qk_rope_head_dim": hp.rope_dim,
        "q_lora_rank": hp.q_lora,
        "o_groups": hp.o_groups,
        "o_lora_rank": hp.o_lora,
        "sliding_window": hp.window,
        "compress_ratios": hp.layers.iter().map(|k| k.ratio().unwrap_or(0)).collect::<Vec<_>>(),
        "index_n_heads": hp.index_heads,
        "index_head_dim": hp.index_dim,
        "index_topk": hp.index_topk,
        "n_routed_experts": hp.experts,
        "num_experts_per_tok": hp.experts_used,
        "n_shared_experts": 1,
        "moe_intermediate_size": hp.expert_ff,
        "num_hash_layers": hp.hash_layers,
        "routed_scaling_factor": hp.route_scale,
        "scoring_func": "sqrtsoftplus",
        "norm_topk_prob": true,
        "swiglu_limit": hp.swiglu_clamp.first(),
        "hc_mult": hp.streams,
        "hc_sinkhorn_iters": hp.sinkhorn_iters,
        "hc_eps": hp.hc_eps,
        "rms_norm_eps": hp.rms_eps,
        "rope_theta": hp.rope_base,
        "compress_rope_theta": hp.compress_rope_base,
        "rope_scaling": hp.yarn.map(|y| json!({
            "type": "yarn",
            "factor": y.factor,
            "original_max_position_embeddings": y.original_context,
            "beta_fast": y.beta_fast,
            "beta_slow": y.beta_slow,
        })),
        "max_position_embeddings": hp.context,
    })
}
