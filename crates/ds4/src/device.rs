//! Which backend runs, as one place where the choice becomes a type.

use ds4_cpu::Cpu;
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

/// Runs `job` on the backend that the flags ask for.
pub fn dispatch<J: Job>(args: &ModelArgs, job: J) -> Result<J::Output, CliError> {
    match args.backend {
        BackendChoice::Auto | BackendChoice::Cpu => {
            let threads = args.threads.map_or_else(ds4_cpu::default_threads, usize::from);
            job.run(move || Ok(Cpu::new(threads)?))
        }
        BackendChoice::Reference => job.run(|| Ok(Reference::default())),
    }
}
