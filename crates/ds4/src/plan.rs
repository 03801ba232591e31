//! `ds4 plan`: what memory a model needs, from its header alone.

use std::io::Write;

use ds4_cpu::Cpu;
use ds4_cuda::Cuda;
use ds4_model::plan::{self, Asked, Budget, Choice, MemoryPlan, Node, Settings, Size};
use ds4_model::{Backend, KvLayout, LayerSlice};
use ds4_reference::Reference;
use serde_json::{Value, json};

use crate::CliError;
use crate::args::{BackendChoice, PlanArgs};
use crate::open::{self, OpenModel};

pub fn run(args: PlanArgs) -> Result<(), CliError> {
    let model = open::open(&args.model)?;
    let total = model.hyper.layers.len();
    let (numerics, rows) = open::numeric_mode(&args.numerics);
    let slice = match &args.layers {
        Some(text) => LayerSlice::parse(text, total)?,
        None => LayerSlice::whole(total),
    };
    let context = model.context(&args.model);
    // The header alone decides: `auto` plans for the processor, whatever this machine has.
    let choice = args.model.choice();
    let cuda = choice == BackendChoice::Cuda;
    let base = Settings {
        slice,
        context,
        sessions: args.sessions as usize,
        chunk: args.model.prefill_chunk.map_or(if cuda { 2048 } else { 512 }, |n| n as usize),
        checkpoints: crate::session::CHECKPOINTS,
        spare_pages: KvLayout::pages_for(context).min(4096),
        rows,
        numerics,
    };
    let plans = match choice {
        BackendChoice::Cuda => plans::<Cuda>(&model, base, &args)?,
        BackendChoice::Reference => plans::<Reference>(&model, base, &args)?,
        BackendChoice::Auto | BackendChoice::Cpu => plans::<Cpu>(&model, base, &args)?,
    };
    let mut out = std::io::stdout().lock();
    if args.json {
        let all: Vec<Value> = plans.iter().map(|(node, p)| as_json(node.as_deref(), p)).collect();
        let text = serde_json::to_string_pretty(&all).map_err(std::io::Error::from)?;
        writeln!(out, "{text}")?;
        return Ok(());
    }
    for (node, p) in &plans {
        if let Some(node) = node {
            writeln!(out, "{node}: --layers {}", p.settings.slice)?;
        }
        writeln!(out, "{p}")?;
    }
    Ok(())
}

/// A plan, or one for each of several machines.
fn plans<B: Backend>(
    model: &OpenModel,
    base: Settings,
    args: &PlanArgs,
) -> Result<Vec<(Option<String>, MemoryPlan)>, CliError> {
    Ok(match (args.node.is_empty(), args.memory) {
        (false, _) => nodes::<B>(model, base, &args.node)?,
        (true, Some(bytes)) => vec![(None, chosen::<B>(model, base, args, bytes)?)],
        (true, None) => vec![(None, MemoryPlan::new::<B>(&model.gguf, &model.hyper, base)?)],
    })
}

/// What fits into `bytes`, keeping the flags that were given.
fn chosen<B: Backend>(
    model: &OpenModel,
    base: Settings,
    args: &PlanArgs,
    bytes: u64,
) -> Result<MemoryPlan, CliError> {
    let asked = Asked { context: args.model.ctx.map(|c| c as usize), ..Asked::default() };
    match plan::choose::<B>(&model.gguf, &model.hyper, base, asked, &Budget::shared(bytes))? {
        Choice::Fits(p) => Ok(p),
        Choice::Refused { plan, excess, nearest } => {
            let instead = nearest
                .map_or("no setting fits".to_string(), |n| format!("--ctx {} would fit", n.settings.context));
            let reason = format!("a context of {} {excess}; {instead}", plan.settings.context);
            Err(CliError::Load { path: model.path.clone(), reason })
        }
    }
}

fn nodes<B: Backend>(
    model: &OpenModel,
    base: Settings,
    nodes: &[Node],
) -> Result<Vec<(Option<String>, MemoryPlan)>, CliError> {
    match plan::split::<B>(&model.gguf, &model.hyper, base, nodes)? {
        Ok(plans) => Ok(nodes.iter().map(|n| Some(n.name.clone())).zip(plans).collect()),
        Err(excess) => {
            let reason = format!("{} nodes together: {excess}", nodes.len());
            Err(CliError::Load { path: model.path.clone(), reason })
        }
    }
}

fn as_json(node: Option<&str>, p: &MemoryPlan) -> Value {
    let s = &p.settings;
    json!({
        "node": node,
        "layers": s.slice.to_string(),
        "context": s.context,
        "sessions": s.sessions,
        "prefill_chunk": s.chunk,
        "longest_prompt": p.longest_prompt(),
        "bytes": p.total(),
        "lines": p.lines.iter().map(|l| {
            json!({"name": l.name, "memory": l.memory.name(), "bytes": l.bytes})
        }).collect::<Vec<_>>(),
    })
}

/// `name=51.3GiB` or `name=51.3GiB@speed`.
pub fn parse_node(text: &str) -> Result<Node, String> {
    let form = || "expected NAME=MEMORY or NAME=MEMORY@SPEED, as in a=51.3GiB".to_string();
    let (name, rest) = text.split_once('=').ok_or_else(form)?;
    let (memory, speed) = match rest.split_once('@') {
        Some((m, s)) => (m, s.parse().ok().filter(|s: &f64| *s > 0.0).ok_or_else(form)?),
        None => (rest, 1.0),
    };
    let bytes = parse_memory(memory)?;
    Ok(Node { name: name.to_string(), budget: Budget::shared(bytes), speed })
}

pub fn parse_memory(text: &str) -> Result<u64, String> {
    plan::parse_size(text)
        .ok_or_else(|| format!("{text:?} is no amount of memory; 51.3GiB is one of {}", Size(55_083_430_707)))
}
