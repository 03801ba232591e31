//! The engine from outside: submit, watch, drain.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use async_channel::{Sender as EventSender, bounded};

use crate::constraint::{Grammars, State};
use crate::request::{Event, Generation, Rejected, Request};
use crate::status::{Health, Status};

/// Most likely tokens that a request may ask for.
pub const LOGPROBS_MAX: usize = 64;
/// Events that wait for a slow reader; then its request pauses.
pub(crate) const EVENTS_MAX: usize = 256;
const STOP_TOKENS_MAX: usize = 64;
const BIAS_MAX: usize = 4096;

pub(crate) enum Command {
    Submit(Box<Submitted>),
    /// Finish what runs, refuse the rest, then end.
    Drain {
        deadline: Instant,
    },
}

pub(crate) struct Submitted {
    pub request: Request,
    pub grammar: Option<State>,
    pub events: EventSender<Event>,
    pub at: Instant,
}

/// What handles and the engine thread share.
pub(crate) struct Shared {
    pub status: Mutex<Status>,
    /// Requests taken and not yet started.
    pub waiting: AtomicUsize,
    pub rejected: AtomicUsize,
    pub queue_limit: usize,
    pub vocab: usize,
    pub grammars: Grammars,
}

impl Shared {
    pub fn status(&self) -> MutexGuard<'_, Status> {
        // A panic elsewhere leaves figures at worst a step old.
        self.status.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A running engine. Cheap to clone; the engine ends when it is drained or every handle is gone.
#[derive(Clone)]
pub struct EngineHandle {
    pub(crate) commands: Sender<Command>,
    pub(crate) shared: Arc<Shared>,
}

impl EngineHandle {
    /// Queues a request, or says at once why not.
    pub fn submit(&self, request: Request) -> Result<Generation, Rejected> {
        let taken = self.admit(&request).and_then(|()| {
            let compile = |c| {
                let invalid = |reason| Rejected::Invalid { field: "constraint", reason };
                self.shared.grammars.compile(c).map_err(invalid)
            };
            let grammar = request.constraint.as_ref().map(compile).transpose()?;
            let (sender, events) = bounded(EVENTS_MAX);
            let submitted = Submitted { request, grammar, events: sender, at: Instant::now() };
            self.shared.waiting.fetch_add(1, Ordering::Relaxed);
            self.commands.send(Command::Submit(Box::new(submitted))).map_err(|_| Rejected::ShuttingDown)?;
            Ok(Generation { events })
        });
        if taken.is_err() {
            self.shared.rejected.fetch_add(1, Ordering::Relaxed);
        }
        taken
    }

    fn admit(&self, request: &Request) -> Result<(), Rejected> {
        let (context, health, mean) = {
            let s = self.shared.status();
            let done = s.counters.requests_finished.max(1);
            (s.context, s.health.clone(), s.counters.queue_seconds / done as f64)
        };
        match health {
            Health::Loading => return Err(Rejected::Loading),
            Health::Waiting { reason, since } => {
                return Err(Rejected::Unavailable { reason, since: since.elapsed() });
            }
            Health::Faulted { reason } => return Err(Rejected::Faulted { reason }),
            Health::Draining | Health::Ended => return Err(Rejected::ShuttingDown),
            Health::Ready => {}
        }
        self.check(request, context)?;
        let (waiting, limit) = (self.shared.waiting.load(Ordering::Relaxed), self.shared.queue_limit);
        if waiting >= limit {
            let retry_after = Duration::from_secs_f64(mean.clamp(1.0, 60.0));
            return Err(Rejected::QueueFull { waiting, limit, retry_after });
        }
        Ok(())
    }

    fn check(&self, request: &Request, context: usize) -> Result<(), Rejected> {
        let rule = |ok: bool, field: &'static str, reason: &str| match ok {
            true => Ok(()),
            false => Err(Rejected::Invalid { field, reason: reason.to_string() }),
        };
        let (p, s) = (&request.prompt, &request.sampling);
        rule(!p.is_empty(), "prompt", "no tokens")?;
        if p.len() >= context {
            return Err(Rejected::ContextExceeded { prompt: p.len(), context });
        }
        let known = |t: &u32| (*t as usize) < self.shared.vocab;
        rule(p.iter().all(known), "prompt", "a token id outside the vocabulary")?;
        rule(request.max_tokens != Some(0), "max_tokens", "must be at least 1")?;
        let ascending = request.boundaries.is_sorted();
        rule(ascending, "boundaries", "must ascend")?;
        rule(s.temperature.is_finite() && s.temperature >= 0.0, "temperature", "must be 0 or more")?;
        rule(s.top_p > 0.0 && s.top_p <= 1.0, "top_p", "must be above 0, at most 1")?;
        rule((0.0..=1.0).contains(&s.min_p), "min_p", "must be 0 to 1")?;
        rule(s.presence_penalty.is_finite(), "presence_penalty", "must be a number")?;
        rule(s.frequency_penalty.is_finite(), "frequency_penalty", "must be a number")?;
        rule(s.bias.len() <= BIAS_MAX, "logit_bias", "more than 4096 entries")?;
        rule(
            s.bias.iter().all(|(t, b)| known(t) && b.is_finite()),
            "logit_bias",
            "a token id or value out of range",
        )?;
        rule(request.stop_tokens.len() <= STOP_TOKENS_MAX, "stop_tokens", "more than 64")?;
        rule(request.logprobs.is_none_or(|k| k <= LOGPROBS_MAX), "top_logprobs", "more than 64")
    }

    /// A copy of the engine's state, as of its last turn.
    pub fn status(&self) -> Status {
        let mut status = self.shared.status().clone();
        status.waiting = self.shared.waiting.load(Ordering::Relaxed);
        status.counters.requests_rejected = self.shared.rejected.load(Ordering::Relaxed) as u64;
        status
    }

    pub fn health(&self) -> Health {
        self.shared.status().health.clone()
    }

    /// Takes no more requests; running ones may end until `limit` has passed, then they fail. Returns at once;
    /// [`Health::Ended`] tells that it is over.
    pub fn drain(&self, limit: Duration) {
        // An engine that has ended needs no draining.
        let _ = self.commands.send(Command::Drain { deadline: Instant::now() + limit });
    }
}
