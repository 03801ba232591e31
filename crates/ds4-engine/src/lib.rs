//! Sessions, key-value pages, prefix tree, scheduler, sampler, grammar and snapshots: everything between the APIs and
//! the layers. It speaks to [`Stage`]s only: no sockets, no kernels.

#![forbid(unsafe_code)]

mod constraint;
mod engine;
mod handle;
mod local;
mod pages;
mod persist;
mod pipeline;
mod prefix;
mod request;
pub mod sampler;
mod scheduler;
mod self_test;
mod sequence;
mod snapshot;
pub mod stage;
mod status;

pub use constraint::{Constraint, Form, ToolForm};
pub use engine::{Engine, EngineConfig};
pub use handle::{EngineHandle, LOGPROBS_MAX};
pub use local::{LocalStage, Machine};
pub use persist::SnapshotConfig;
pub use pipeline::Pipeline;
pub use prefix::{Checkpoint, PrefixTree};
pub use request::{
    Completion, EngineError, Event, FinishReason, Generation, Priority, Rejected, Request, SamplingParams,
    Usage,
};
pub use sampler::{Choose, Chosen, RowResult, Sampler, Sampling, Want};
pub use scheduler::CHECKPOINT_TOKENS;
pub use self_test::SelfTest;
pub use snapshot::{
    Entry as SnapshotEntry, PageFile, PageName, Snapshot, SnapshotError, SnapshotKey, SnapshotStore, Verified,
};
pub use stage::{
    CheckpointId, Hidden, Mark, Reports, Stage, StageError, StageFault, StageInfo, StageLimits, StageTiming,
    StateOp, Step, StepId, StepOutput, Survived,
};
pub use status::{Counters, Health, SessionStatus, Status};
