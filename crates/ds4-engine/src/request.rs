//! What goes into the engine and what comes out: the boundary for servers and programs.

use std::time::{Duration, Instant};

use async_channel::Receiver;
use thiserror::Error;

use crate::constraint::Constraint;
use crate::sampler::Chosen;
use crate::stage::StageError;

/// One completion to make. For `n` choices, submit `n` requests with different seeds: the shared prompt is evaluated
/// once.
#[derive(Clone, Debug)]
pub struct Request {
    /// Token ids of the whole prompt; at least one.
    pub prompt: Vec<u32>,
    /// Positions where a message ends (ascending): where checkpoints are worth most.
    pub boundaries: Vec<usize>,
    pub sampling: SamplingParams,
    /// Generation ends after one of these, which is the last token of the answer.
    pub stop_tokens: Vec<u32>,
    /// Tokens to generate at most. `None`: until the context is full.
    pub max_tokens: Option<usize>,
    pub constraint: Option<Constraint>,
    /// `Some(k)`: every token comes with its log-probability and the `k` best.
    pub logprobs: Option<usize>,
    /// Log-probabilities of the prompt's own tokens too, as [`Event::Prompt`]. The whole prompt is then evaluated.
    pub prompt_logprobs: bool,
    /// The request fails with [`EngineError::DeadlineExceeded`] when it is not done by then.
    pub deadline: Option<Instant>,
    pub priority: Priority,
    /// `false`: neither reads nor leaves anything in the prefix tree and the snapshots.
    pub cache: bool,
}

impl Request {
    /// A greedy completion of `prompt`, everything else as a server would leave it.
    pub fn new(prompt: Vec<u32>) -> Self {
        Request {
            prompt,
            boundaries: Vec::new(),
            sampling: SamplingParams::default(),
            stop_tokens: Vec::new(),
            max_tokens: None,
            constraint: None,
            logprobs: None,
            prompt_logprobs: false,
            deadline: None,
            priority: Priority::Normal,
            cache: true,
        }
    }
}

/// Waiting requests of a higher priority start first; running ones are not stopped for them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Priority {
    Low,
    #[default]
    Normal,
    High,
}

#[derive(Clone, Debug, PartialEq)]
pub struct SamplingParams {
    /// 0: greedy.
    pub temperature: f32,
    /// 0: all.
    pub top_k: usize,
    pub top_p: f32,
    pub min_p: f32,
    pub seed: u64,
    /// Added to the logits of single tokens.
    pub bias: Vec<(u32, f32)>,
    /// Subtracted from the logit of every token generated so far, once.
    pub presence_penalty: f32,
    /// Subtracted as often as the token was generated.
    pub frequency_penalty: f32,
}

impl Default for SamplingParams {
    fn default() -> Self {
        SamplingParams {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            seed: 0,
            bias: Vec::new(),
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
        }
    }
}

/// What a running request tells, in order. After [`Event::Finished`] or [`Event::Failed`] comes nothing more.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// Requests ahead of this one. Sent when it changes, where there is room.
    Queued {
        ahead: usize,
    },
    /// Prompt tokens evaluated so far, of how many, and how many needed no evaluation.
    Prefill {
        done: usize,
        total: usize,
        reused: usize,
    },
    /// Log-probabilities of prompt tokens `first..`, from the second token of the prompt on.
    Prompt {
        first: usize,
        tokens: Vec<Chosen>,
    },
    /// One generated token. `bytes` may cut a UTF-8 character; [`ds4_text::Utf8Stream`] joins them. A stop token
    /// comes too.
    Token {
        bytes: Vec<u8>,
        chosen: Chosen,
    },
    Finished {
        reason: FinishReason,
        usage: Usage,
    },
    Failed(EngineError),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// A stop token, or the constraint is complete.
    Stop,
    /// `max_tokens`, or the context is full.
    Length,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    pub prompt_tokens: usize,
    /// Of the prompt: not evaluated, since the state was there.
    pub reused_tokens: usize,
    pub completion_tokens: usize,
    /// In the queue; from then to the first token; from there to the end.
    pub queued: Duration,
    pub prefill: Duration,
    pub decode: Duration,
}

/// Why a request was not taken.
#[derive(Clone, Debug, PartialEq, Error)]
pub enum Rejected {
    #[error("the queue is full: {waiting} requests wait, the limit is {limit}; try again in {} s", .retry_after.as_secs())]
    QueueFull { waiting: usize, limit: usize, retry_after: Duration },
    /// A prompt must leave room for one token; `max_tokens` beyond the context just ends there.
    #[error("the prompt has {prompt} tokens, the context is {context}, of which one is the answer's")]
    ContextExceeded { prompt: usize, context: usize },
    #[error("{field}: {reason}")]
    Invalid { field: &'static str, reason: String },
    #[error("not ready: the model is loading")]
    Loading,
    /// A stage is missing; it may come back.
    #[error("unavailable for {} s: {reason}", .since.as_secs())]
    Unavailable { reason: String, since: Duration },
    #[error("the engine has failed: {reason}")]
    Faulted { reason: String },
    #[error("shutting down")]
    ShuttingDown,
}

/// Why a request that was taken has no complete answer.
#[derive(Clone, Debug, PartialEq, Error)]
pub enum EngineError {
    #[error(transparent)]
    Stage(#[from] StageError),
    #[error("not done within its deadline")]
    DeadlineExceeded,
    #[error("constraint: {reason}")]
    Constraint { reason: String },
    #[error("shutting down")]
    ShuttingDown,
}

/// The answer to one request as it comes. Dropping it cancels the request within one step; what was evaluated stays
/// for the next one.
#[derive(Debug)]
pub struct Generation {
    pub(crate) events: Receiver<Event>,
}

impl Generation {
    /// The next event, awaited on any executor. `None` after the last.
    pub async fn next(&mut self) -> Option<Event> {
        self.events.recv().await.ok()
    }

    /// The next event, blocking the thread.
    pub fn next_blocking(&mut self) -> Option<Event> {
        self.events.recv_blocking().ok()
    }

    /// Waits for the end: the tokens and why it ended.
    pub fn wait(mut self) -> Result<Completion, EngineError> {
        let mut tokens = Vec::new();
        loop {
            match self.next_blocking() {
                Some(Event::Token { chosen, .. }) => tokens.push(chosen),
                Some(Event::Finished { reason, usage }) => return Ok(Completion { tokens, reason, usage }),
                Some(Event::Failed(e)) => return Err(e),
                Some(_) => {}
                None => return Err(EngineError::ShuttingDown),
            }
        }
    }
}

/// A whole answer.
#[derive(Clone, Debug, PartialEq)]
pub struct Completion {
    pub tokens: Vec<Chosen>,
    pub reason: FinishReason,
    pub usage: Usage,
}

impl Completion {
    pub fn ids(&self) -> Vec<u32> {
        self.tokens.iter().map(|c| c.token).collect()
    }
}
