//! What the engine shows of itself, for health checks, metrics and status pages.

use std::time::{Duration, Instant};

use ds4_model::MemoryPlan;

use crate::stage::{StageInfo, StageTiming};

#[derive(Clone, Debug, Default, PartialEq)]
pub enum Health {
    #[default]
    Loading,
    Ready,
    /// A stage is gone and may come back; requests wait.
    Waiting {
        reason: String,
        since: Instant,
    },
    /// Nothing more can be computed.
    Faulted {
        reason: String,
    },
    /// No new requests.
    Draining,
    /// The engine's thread has ended.
    Ended,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Status {
    pub health: Health,
    /// Positions of one session.
    pub context: usize,
    pub sessions: Vec<SessionStatus>,
    pub waiting: usize,
    pub stages: Vec<StageInfo>,
    /// The memory plan of every stage that is known here, from [`crate::EngineConfig::plan`].
    pub plan: Vec<MemoryPlan>,
    pub pages_used: usize,
    pub pages_total: usize,
    pub checkpoints_used: usize,
    pub checkpoints_total: usize,
    pub counters: Counters,
    /// Of the last step, one per stage.
    pub last_step: Vec<StageTiming>,
}

/// A running request.
#[derive(Clone, Debug, PartialEq)]
pub struct SessionStatus {
    pub prompt_tokens: usize,
    pub reused_tokens: usize,
    /// Prompt tokens that are evaluated or were reused.
    pub prefilled: usize,
    pub generated: usize,
    pub since: Duration,
}

/// Sums since the start.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Counters {
    pub steps: u64,
    pub rows_prefill: u64,
    pub rows_decode: u64,
    /// Prompt tokens that needed no evaluation.
    pub rows_reused: u64,
    pub requests_finished: u64,
    pub requests_failed: u64,
    pub requests_cancelled: u64,
    pub requests_rejected: u64,
    /// Times that stages were restarted after a failure.
    pub restarts: u64,
    pub step_seconds: f64,
    pub queue_seconds: f64,
    /// From submission to the first token, summed over the requests that gave one, and their number.
    pub first_token_seconds: f64,
    pub first_tokens: u64,
    /// Pages and bytes written to and read from the snapshot folder.
    pub snapshot_bytes_written: u64,
    pub snapshot_bytes_read: u64,
}
