//! What a worker runs: a slice of the model, sized as the coordinator asks.

use ds4_engine::{Machine, StageError, StageLimits, Step, StepOutput, Survived};
use ds4_model::{Backend, Numerics, RowFormat};

/// What the coordinator asks a stage to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StageAsk {
    pub limits: StageLimits,
    pub numerics: Numerics,
    pub rows: RowFormat,
}

/// A slice of the model on this machine. It is made, used and dropped on one thread.
pub trait Host {
    /// Sets the slice up for `ask`; what it remembered is gone.
    fn load(&mut self, ask: &StageAsk) -> Result<(), StageError>;

    /// Runs one step. `hidden` `[rows, n*D]`: the streams from the node before; `None` where the slice embeds.
    fn run(&mut self, step: &Step, hidden: Option<&[f32]>) -> Result<StepOutput, StageError>;

    /// Makes the slice usable after an error, for steps of a new epoch.
    fn restart(&mut self) -> Result<Survived, StageError>;
}

/// A [`Host`] over whichever backend `make` loads the slice on.
pub struct MachineHost<B: Backend, F> {
    make: F,
    machine: Option<Machine<B>>,
}

impl<B: Backend, F: FnMut(&StageAsk) -> Result<Machine<B>, StageError>> MachineHost<B, F> {
    pub fn new(make: F) -> Self {
        MachineHost { make, machine: None }
    }

    fn machine(&mut self) -> Result<&mut Machine<B>, StageError> {
        let fault = || ds4_engine::StageFault::Load("used before it was loaded".into());
        self.machine.as_mut().ok_or_else(|| StageError { stage: "worker".into(), fault: fault() })
    }
}

impl<B: Backend, F: FnMut(&StageAsk) -> Result<Machine<B>, StageError>> Host for MachineHost<B, F> {
    fn load(&mut self, ask: &StageAsk) -> Result<(), StageError> {
        // The old one's memory is needed for the new one.
        self.machine = None;
        self.machine = Some((self.make)(ask)?);
        Ok(())
    }

    fn run(&mut self, step: &Step, hidden: Option<&[f32]>) -> Result<StepOutput, StageError> {
        self.machine()?.run(step, hidden)
    }

    fn restart(&mut self) -> Result<Survived, StageError> {
        self.machine()?.restart()
    }
}
