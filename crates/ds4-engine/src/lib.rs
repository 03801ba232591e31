//! Sessions, key-value pages, prefix tree, scheduler, sampler, grammar and snapshots: everything between the APIs and
//! the layers. It speaks to [`Stage`]s only: no sockets, no kernels.

#![forbid(unsafe_code)]

mod constraint;
// Its other end, the engine's thread, follows.
#[allow(dead_code)]
mod handle;
mod local;
mod pipeline;
mod request;
pub mod sampler;
pub mod stage;
mod status;

pub use constraint::{Constraint, Form};
pub use handle::{EngineHandle, LOGPROBS_MAX};
pub use local::{LocalStage, Machine};
pub use pipeline::Pipeline;
pub use request::{
    Completion, EngineError, Event, FinishReason, Generation, Priority, Rejected, Request, SamplingParams,
    Usage,
};
pub use sampler::{Choose, Chosen, RowResult, Sampler, Sampling, Want};
pub use stage::{
    CheckpointId, Hidden, Mark, Reports, Stage, StageError, StageFault, StageInfo, StageLimits, StageTiming,
    StateOp, Step, StepId, StepOutput, Survived,
};
pub use status::{Counters, Health, SessionStatus, Status};
