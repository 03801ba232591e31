//! Which backend runs, as one place where the choice becomes a type.

use ds4_cpu::Cpu;
use ds4_cuda::Cuda;
use ds4_model::{Backend, ModelError};
use ds4_reference::Reference;

use crate::CliError;
use crate::args::{BackendChoice, ModelArgs};

/// A job over whichever backend was chosen. `make` can be called again, to set a lost device up anew.
pub trait Job {
    type Output;
    fn run<B: Backend + 'static>(self, make: impl Make<B>) -> Result<Self::Output, CliError>;
}

/// Sets a device up.
pub trait Make<B>: Fn() -> Result<B, ModelError> + Send + 'static {}

impl<B, F: Fn() -> Result<B, ModelError> + Send + 'static> Make<B> for F {}

/// Memory of a card that must be free beside the weights before `auto` takes it.
const ROOM: u64 = 2 << 30;

/// A choice that was looked up on this machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Device {
    Cpu { threads: usize },
    Cuda { ordinal: usize },
    Reference,
}

impl Device {
    /// The device that the flags ask for; `weights` bytes decide whether `auto` takes a card.
    pub fn choose(args: &ModelArgs, weights: u64) -> Result<Device, CliError> {
        let named = match args.gpu_devices.as_slice() {
            [] => None,
            [one] => Some(usize::from(*one)),
            many => {
                return Err(CliError::Usage(format!(
                    "--gpu-devices names {} cards; one process computes on one. For several, start a `ds4 worker --layers … \
                     --gpu-devices N` on each",
                    many.len()
                )));
            }
        };
        let choice = args.choice();
        if named.is_some() && !matches!(choice, BackendChoice::Cuda | BackendChoice::Auto) {
            return Err(CliError::Usage("--gpu-devices: no card is used with this backend".into()));
        }
        let cpu = || Device::Cpu { threads: args.threads.map_or_else(ds4_cpu::default_threads, usize::from) };
        let fits = |n: &usize| ds4_cuda::free_memory(*n).is_some_and(|free| free >= weights + ROOM);
        let card =
            || named.or_else(|| (0..ds4_cuda::count()).find(fits)).map(|ordinal| Device::Cuda { ordinal });
        Ok(match choice {
            BackendChoice::Reference => Device::Reference,
            BackendChoice::Cpu => cpu(),
            // Where none has the memory, opening the first says by name what is missing.
            BackendChoice::Cuda => card().unwrap_or(Device::Cuda { ordinal: 0 }),
            BackendChoice::Auto => card().unwrap_or_else(cpu),
        })
    }

    /// Prompt tokens of a step that suit the device.
    pub fn chunk(self, args: &ModelArgs) -> usize {
        let usual = if matches!(self, Device::Cuda { .. }) { 2048 } else { 512 };
        args.prefill_chunk.map_or(usual, |n| n as usize)
    }

    /// Runs `job` on it.
    pub fn run<J: Job>(self, job: J) -> Result<J::Output, CliError> {
        match self {
            Device::Cpu { threads } => job.run(move || Ok(Cpu::new(threads)?)),
            Device::Cuda { ordinal } => {
                // Before anything is loaded, so that a missing card is one line at once.
                ds4_cuda::probe(ordinal).map_err(|e| CliError::Usage(e.to_string()))?;
                job.run(move || Ok(Cuda::open(ordinal)?))
            }
            Device::Reference => job.run(|| Ok(Reference::default())),
        }
    }

    /// For messages.
    pub fn name(self) -> &'static str {
        match self {
            Device::Cpu { .. } => "cpu",
            Device::Cuda { .. } => "cuda",
            Device::Reference => "reference",
        }
    }
}
