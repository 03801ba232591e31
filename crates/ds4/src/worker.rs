//! `ds4 worker`: a slice of the layers for a coordinator.

use ds4_cluster::args::{ClusterArgs, Role};
use ds4_cluster::host::{MachineHost, StageAsk};
use ds4_engine::Machine;
use ds4_model::{Backend, KvLayout, LayerSlice, Model, Setup};

use crate::CliError;
use crate::args::{Cli, ModelArgs};
use crate::device::{Device, Job, Make};
use crate::open::{self, OpenModel};

/// Serves until it is told to end, and says why it does.
pub fn run(args: &ModelArgs, cluster: &ClusterArgs) -> Result<(), CliError> {
    cluster.role(Some(Role::Worker))?;
    let model = open::open(args)?;
    let total = model.hyper.layers.len();
    let slice = cluster.slice(total)?.ok_or_else(|| CliError::Usage("a worker needs --layers".into()))?;
    let context = model.context(args);
    // A slice's share of the weights, near enough for choosing a device.
    let weights = model.weight_bytes() / total.max(1) as u64 * (slice.end - slice.first) as u64;
    let place = Device::choose(args, weights)?;
    let device = place.name().to_string();
    let reason = place.run(Work { model, slice, context, device, cluster: cluster.clone() })?;
    eprintln!("ds4 worker ends: {reason}");
    Ok(())
}

/// Flags that mean nothing to a worker, by name.
pub fn refuse_others(cli: &Cli) -> Result<(), CliError> {
    let (n, r) = (&cli.numerics, &cli.run);
    let given = [
        ("--plain", n.plain),
        ("--qat", n.qat),
        ("--exact", n.exact),
        ("--kv", n.kv.is_some()),
        ("--prompt", r.prompt.is_some()),
        ("--prompt-file", r.prompt_file.is_some()),
        ("--inspect", cli.probe.inspect),
    ];
    match given.iter().find(|g| g.1) {
        Some((flag, _)) => Err(CliError::Usage(format!(
            "{flag}: a worker computes what its coordinator asks for; give the flag there"
        ))),
        None => Ok(()),
    }
}

struct Work {
    model: OpenModel,
    slice: LayerSlice,
    context: usize,
    device: String,
    cluster: ClusterArgs,
}

impl Job for Work {
    type Output = String;

    fn run<B: Backend + 'static>(self, make: impl Make<B>) -> Result<String, CliError> {
        let Work { model, slice, context, device, cluster } = self;
        let (gguf, hyper) = (model.gguf.clone(), model.hyper.clone());
        // A worker may be asked for other sizes later, by a coordinator that was restarted; each load makes its own
        // backend.
        let make = std::sync::Arc::new(std::sync::Mutex::new(make));
        let host = move || {
            MachineHost::new(move |ask: &StageAsk| {
                let setup = Setup {
                    layout: KvLayout::new(&hyper, slice, ask.rows),
                    hyper: hyper.clone(),
                    limits: ask.limits.model,
                    numerics: ask.numerics,
                };
                let (gguf, make) = (gguf.clone(), make.clone());
                let load = move || {
                    let backend = make.lock().unwrap_or_else(std::sync::PoisonError::into_inner)();
                    Model::load(&gguf, setup.clone(), backend?, &mut |_| ())
                };
                Machine::load("worker", ask.limits.checkpoints, load)
            })
        };
        Ok(cluster.run_worker(&model.gguf, &model.hyper, context, &device, host)?)
    }
}
