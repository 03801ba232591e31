//! A stage: a contiguous slice of the model's layers, here or on another machine.
//!
//! All that a stage ever receives is [`Step`]s, in order. Operations on sessions' memory ride inside them, so a stage is
//! a deterministic machine: the same steps give the same state and the same results, wherever and whenever they run.
//! Page and checkpoint numbers are global, handed out by the engine; every stage keeps its own layers' bytes under them.

use std::fmt;
use std::sync::mpsc::SyncSender;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use ds4_model::{BackendError, Batch, KvLayout, LayerSlice, Limits, ModelError, PageId, Slot};
use thiserror::Error;

use crate::sampler::{RowResult, Want};

/// A place in the stages' checkpoint store, below [`StageLimits::checkpoints`]. Saving overwrites what is there.
pub type CheckpointId = u32;

/// Counts up by one over the life of a pipeline, from 1.
pub type StepId = u64;

/// What stages are sized for. Nothing is allocated after they are ready.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StageLimits {
    pub model: Limits,
    /// Frontiers that are kept aside, each of [`KvLayout::frontier_bytes`].
    pub checkpoints: usize,
}

/// An operation on sessions' memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StateOp {
    /// The slot holds no session: position 0, nothing remembered.
    Reset {
        slot: Slot,
    },
    /// From the `first`-th on, the session in `slot` uses these pages.
    SetPages {
        slot: Slot,
        first: usize,
        pages: Vec<PageId>,
    },
    CopyPage {
        from: PageId,
        to: PageId,
    },
    /// Keeps the slot's frontier under `id`.
    SaveCheckpoint {
        slot: Slot,
        id: CheckpointId,
    },
    /// The slot continues from the frontier under `id`. Its pages are set by [`StateOp::SetPages`].
    LoadCheckpoint {
        slot: Slot,
        id: CheckpointId,
    },
    /// Answered by [`StepOutput::reads`].
    ReadPage {
        page: PageId,
    },
    /// `bytes`: as long as the stage's own page.
    WritePage {
        page: PageId,
        bytes: Arc<[u8]>,
    },
    /// Answered by [`StepOutput::reads`].
    ReadCheckpoint {
        id: CheckpointId,
    },
    /// `mark`: the position and prefix that the frontier belongs to.
    WriteCheckpoint {
        id: CheckpointId,
        mark: Mark,
        bytes: Arc<[u8]>,
    },
}

/// Which tokens a frontier has seen: how many, and the hash over their ids.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Mark {
    pub pos: usize,
    pub prefix: u64,
}

impl Mark {
    /// The mark after `tokens` more.
    pub fn extend(self, tokens: &[u32]) -> Mark {
        Mark {
            pos: self.pos + tokens.len(),
            prefix: tokens.iter().fold(self.prefix, |h, &t| extend_hash(h, t)),
        }
    }
}

/// The hash of a prefix grown by one token: it depends on every id and its place. The mixing is SplitMix64 (Steele,
/// Lea, Flood 2014); it guards against faults, not against forgery.
pub fn extend_hash(prefix: u64, token: u32) -> u64 {
    crate::sampler::split_mix(prefix ^ u64::from(token))
}

/// One unit of work for the whole pipeline.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Step {
    pub id: StepId,
    /// Grows by one with every [`Stage::restart`].
    pub epoch: u64,
    /// Done before the rows.
    pub before: Vec<StateOp>,
    /// May be empty: then the step is its operations alone.
    pub batch: Batch,
    /// One per segment of the batch: what the stage must have seen before it.
    pub marks: Vec<Mark>,
    /// One per output row of the batch; the stage that owns the output head answers them.
    pub wants: Vec<Want>,
    /// Done after the rows.
    pub after: Vec<StateOp>,
}

impl Step {
    pub fn ops(&self) -> impl Iterator<Item = &StateOp> {
        self.before.iter().chain(&self.after)
    }
}

/// Residual streams `[rows, n*D]` between two stages.
pub type Hidden = Vec<f32>;

/// What one stage makes of a step.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepOutput {
    pub id: StepId,
    pub epoch: u64,
    /// For the next stage; empty from the stage that owns the output head, and for a step without rows.
    pub hidden: Hidden,
    /// One per [`Step::wants`], from the stage that owns the output head.
    pub rows: Vec<RowResult>,
    /// Bytes of every read operation, in the order of [`Step::ops`].
    pub reads: Vec<Vec<u8>>,
    pub timing: Vec<StageTiming>,
}

/// Where the time of a step went in one stage.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StageTiming {
    pub stage: String,
    pub rows: usize,
    pub compute: Duration,
    /// From the step's arrival until its rows were there and the stage was free.
    pub wait: Duration,
    pub send: Duration,
    pub bytes_in: u64,
    pub bytes_out: u64,
}

/// What a stage is.
#[derive(Clone, Debug, PartialEq)]
pub struct StageInfo {
    /// For people: "local", or the node's name.
    pub name: String,
    /// The device in words.
    pub device: String,
    pub slice: LayerSlice,
    /// Bytes of this slice's part of a page and of a frontier. Parts of consecutive slices, put one behind the other,
    /// are the whole model's page and frontier.
    pub page_bytes: usize,
    pub frontier_bytes: usize,
    pub limits: StageLimits,
}

impl StageInfo {
    pub fn new(name: &str, device: String, layout: &KvLayout, limits: StageLimits) -> Self {
        StageInfo {
            name: name.to_string(),
            device,
            slice: layout.slice,
            page_bytes: layout.page_bytes,
            frontier_bytes: layout.frontier_bytes,
            limits,
        }
    }
}

/// Where a stage puts its results.
#[derive(Clone)]
pub struct Reports {
    send: Arc<dyn Fn(Result<StepOutput, StageError>) -> bool + Send + Sync>,
}

impl Reports {
    pub(crate) fn new(stage: usize, sender: SyncSender<(usize, Result<StepOutput, StageError>)>) -> Self {
        Reports { send: Arc::new(move |report| sender.send((stage, report)).is_ok()) }
    }

    /// Hands over one step's result, or tells at any time that the stage has failed. Waits only where more results
    /// are pending than there can be steps in flight. `false`: nobody listens any more; the stage should end.
    pub fn send(&self, report: Result<StepOutput, StageError>) -> bool {
        (self.send)(report)
    }

    /// The same, with every result passed through `change` first: for a stage that wraps another.
    pub fn map(self, change: impl FnMut(StepOutput) -> StepOutput + Send + 'static) -> Self {
        let change = Mutex::new(change);
        Reports {
            send: Arc::new(move |report| {
                let report = report.map(|o| (change.lock().unwrap_or_else(PoisonError::into_inner))(o));
                self.send(report)
            }),
        }
    }
}

/// What is left of a stage's memory after a restart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Survived {
    /// Pages and checkpoints of steps that were settled.
    State,
    /// Nothing: another process, or a rebuilt device.
    Nothing,
}

/// A contiguous layer slice, local or remote. Blocking calls are bounded; `submit` does not wait for the work.
pub trait Stage: Send {
    fn info(&self) -> &StageInfo;

    /// Called once, before any step. Results go to `reports`, one per submitted step and in the same order. A stage
    /// that fails reports the error once, then ignores steps until [`Stage::restart`].
    fn start(&mut self, reports: Reports) -> Result<(), StageError>;

    /// Takes a step. `hidden` `[rows, n*D]` comes from the stage before; `None` for the stage that embeds.
    fn submit(&mut self, step: Arc<Step>, hidden: Option<Hidden>) -> Result<(), StageError>;

    /// After a failure of any stage: forgets the steps of earlier epochs (reports of theirs may still come, and are
    /// ignored) and makes ready for steps of `epoch`, by `deadline`. Slots are undefined afterwards.
    fn restart(&mut self, epoch: u64, deadline: Instant) -> Result<Survived, StageError>;
}

/// A stage could not do its part.
#[derive(Clone, Debug, PartialEq, Error)]
#[error("{stage}: {fault}")]
pub struct StageError {
    /// Which stage, for people: name and layers.
    pub stage: String,
    pub fault: StageFault,
}

#[derive(Clone, Debug, PartialEq, Error)]
pub enum StageFault {
    /// The device failed at this step. The step's requests fail; the others go on after a restart.
    #[error(transparent)]
    Backend(#[from] BackendError),
    /// The step did not end in time.
    #[error("a step has not ended after {} s", .waited.as_secs())]
    Deadline { waited: Duration },
    /// The node is gone. It, or another with its layers, may come back.
    #[error("unreachable for {} s: {reason}", .silent.as_secs())]
    Unreachable { silent: Duration, reason: String },
    /// The stage has not seen the tokens that the step continues.
    #[error(
        "out of step: slot {slot} is at position {} with hash {:016x}, the step continues position {} with hash {:016x}",
        .found.pos, .found.prefix, .expected.pos, .expected.prefix
    )]
    OutOfStep { slot: Slot, found: Mark, expected: Mark },
    /// The step breaks the contract of [`Step`].
    #[error("step: {0}")]
    Step(String),
    /// The stage could not be set up.
    #[error("load: {0}")]
    Load(String),
    /// The route does not cover the model.
    #[error("route incomplete, missing {missing}")]
    Incomplete { missing: String },
}

impl StageFault {
    /// Whether waiting for the stage to come back makes sense; else only the step itself was at fault.
    pub fn resumable(&self) -> bool {
        matches!(self, Self::Unreachable { .. } | Self::Incomplete { .. } | Self::OutOfStep { .. })
    }
}

impl StageError {
    pub fn new(info: &StageInfo, fault: impl Into<StageFault>) -> Self {
        StageError { stage: info.to_string(), fault: fault.into() }
    }
}

impl From<ModelError> for StageFault {
    fn from(e: ModelError) -> Self {
        match e {
            ModelError::Backend(b) => Self::Backend(b),
            other => Self::Step(other.to_string()),
        }
    }
}

impl fmt::Display for StageInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (layers {})", self.name, self.slice)
    }
}
