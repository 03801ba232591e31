//! One request on its way: its tokens, how far they are evaluated, and what it holds.

use std::collections::HashMap;
use std::time::Instant;

use async_channel::Sender;
use ds4_model::{PageId, Slot};
use ds4_text::Tokenizer;

use crate::constraint::State;
use crate::handle::{EVENTS_MAX, Submitted};
use crate::request::{EngineError, Event, FinishReason, Request, Usage};
use crate::sampler::{Choose, Chosen, Sampling, Want};
use crate::scheduler::choose_cuts;
use crate::stage::Mark;
use crate::status::SessionStatus;

/// Events that must always find room: a token, and the end.
const EVENTS_KEPT: usize = 8;

pub(crate) struct Sequence {
    pub key: u64,
    pub request: Request,
    pub grammar: Option<State>,
    events: Sender<Event>,
    /// Prompt, then what was generated.
    pub tokens: Vec<u32>,
    pub prompt_len: usize,
    /// Message boundaries that get checkpoints, ascending.
    pub cuts: Vec<usize>,
    /// A snapshot that it waits for; and whether one was looked for.
    pub awaits: Option<Mark>,
    pub sought: bool,
    /// Where the sequence runs; `None`: it waits for a slot.
    pub place: Option<Place>,
    /// Prompt tokens that needed no evaluation, when it first ran.
    pub reused: Option<usize>,
    /// How often generated tokens occurred, for penalties.
    counts: HashMap<u32, u32>,
    /// Times that a failure elsewhere made it start over.
    pub replays: u32,
    pub submitted: Instant,
    pub started: Option<Instant>,
    first_token: Option<Instant>,
    told_ahead: Option<usize>,
    /// Prompt tokens whose log-probabilities were told.
    scored: usize,
}

/// A slot and its state.
pub(crate) struct Place {
    pub slot: Slot,
    /// Each held once.
    pub pages: Vec<PageId>,
    /// What the slot has seen once all steps under way are done.
    pub at: Mark,
    /// Positions whose steps have been settled.
    pub settled: usize,
}

impl Sequence {
    pub fn new(key: u64, submitted: Submitted) -> Self {
        let Submitted { request, grammar, events, at } = submitted;
        Sequence {
            key,
            tokens: request.prompt.clone(),
            prompt_len: request.prompt.len(),
            cuts: choose_cuts(&request.boundaries, request.prompt.len()),
            request,
            grammar,
            events,
            awaits: None,
            sought: false,
            place: None,
            reused: None,
            counts: HashMap::new(),
            replays: 0,
            submitted: at,
            started: None,
            first_token: None,
            told_ahead: None,
            scored: 1,
        }
    }

    pub fn generated(&self) -> usize {
        self.tokens.len() - self.prompt_len
    }

    /// Whether it may start from a checkpoint. Where all prompt rows give log-probabilities, all are evaluated.
    pub fn reads_cache(&self) -> bool {
        self.request.cache && !self.request.prompt_logprobs
    }

    /// Whether nobody waits for the answer any more.
    pub fn cancelled(&self) -> bool {
        self.events.is_closed()
    }

    pub fn overdue(&self, now: Instant) -> bool {
        self.request.deadline.is_some_and(|d| d <= now)
    }

    /// Whether the reader has room for another token.
    pub fn has_room(&self) -> bool {
        self.events.len() < EVENTS_MAX - EVENTS_KEPT
    }

    /// What is wanted of the row that ends the sequence. A constrained token is drawn by the engine.
    pub fn want_next(&mut self) -> Want {
        if let Some(grammar) = self.grammar.as_mut().filter(|g| g.active()) {
            grammar.prepare();
            return Want { choose: Choose::Logits, top: 0 };
        }
        Want { choose: Choose::Sample(self.sampling()), top: self.request.logprobs.unwrap_or(0) }
    }

    /// How the next token is drawn.
    pub fn sampling(&self) -> Sampling {
        let s = &self.request.sampling;
        let mut adjust = s.bias.clone();
        if s.presence_penalty != 0.0 || s.frequency_penalty != 0.0 {
            let penalty = |n: u32| s.presence_penalty + s.frequency_penalty * n as f32;
            let mut penalties: Vec<_> = self.counts.iter().map(|(&t, &n)| (t, -penalty(n))).collect();
            // Sums of several adjustments of one token must not depend on the map's order.
            penalties.sort_unstable_by_key(|p| p.0);
            adjust.extend(penalties);
        }
        if self.grammar.as_ref().is_some_and(|g| !g.active()) {
            // The answer proper is still to come.
            adjust.extend(self.request.stop_tokens.iter().map(|&t| (t, f32::NEG_INFINITY)));
        }
        Sampling {
            adjust,
            temperature: s.temperature,
            top_k: s.top_k,
            top_p: s.top_p,
            min_p: s.min_p,
            seed: s.seed,
            place: self.generated() as u64,
        }
    }

    /// What is wanted of the prompt's row at `pos`: the log-probability of the token that follows.
    pub fn want_given(&self, pos: usize) -> Want {
        Want { choose: Choose::Given(self.tokens[pos + 1]), top: self.request.logprobs.unwrap_or(0) }
    }

    /// Takes the next token. `Some`: the answer is complete.
    pub fn push(&mut self, chosen: Chosen, tokenizer: &Tokenizer, context: usize) -> Option<FinishReason> {
        let token = chosen.token;
        self.first_token.get_or_insert_with(Instant::now);
        self.tokens.push(token);
        if let Some(grammar) = self.grammar.as_mut().filter(|g| !g.active()) {
            grammar.pass(token);
        }
        *self.counts.entry(token).or_default() += 1;
        self.tell(Event::Token { bytes: tokenizer.token_bytes(token).to_vec(), chosen });
        if self.request.stop_tokens.contains(&token) {
            return Some(FinishReason::Stop);
        }
        let full = self.request.max_tokens.is_some_and(|max| self.generated() >= max);
        (full || self.tokens.len() >= context).then_some(FinishReason::Length)
    }

    /// Sends an event that must arrive; there is room, see [`Sequence::has_room`].
    pub fn tell(&self, event: Event) {
        // A reader that is gone is noticed by `cancelled`.
        let _ = self.events.try_send(event);
    }

    /// Sends an event that only informs, while the reader keeps up.
    pub fn hint(&self, event: Event) {
        if self.events.len() < EVENTS_MAX / 2 {
            self.tell(event);
        }
    }

    pub fn tell_ahead(&mut self, ahead: usize) {
        if self.told_ahead != Some(ahead) {
            self.told_ahead = Some(ahead);
            self.hint(Event::Queued { ahead });
        }
    }

    pub fn tell_prefill(&self, done: usize) {
        let total = self.request.prompt.len();
        self.hint(Event::Prefill { done: done.min(total), total, reused: self.reused.unwrap_or(0) });
    }

    /// Tells log-probabilities of the prompt's tokens from `first` on, those that were not told before a replay.
    pub fn tell_prompt(&mut self, first: usize, mut tokens: Vec<Chosen>) {
        tokens.drain(..tokens.len().min(self.scored.saturating_sub(first)));
        let first = first.max(self.scored);
        if !tokens.is_empty() {
            self.scored = first + tokens.len();
            self.tell(Event::Prompt { first, tokens });
        }
    }

    pub fn finish(self, reason: FinishReason) {
        let now = Instant::now();
        let started = self.started.unwrap_or(now);
        let first = self.first_token.unwrap_or(now);
        let usage = Usage {
            prompt_tokens: self.request.prompt.len(),
            reused_tokens: self.reused.unwrap_or(0),
            completion_tokens: self.generated(),
            queued: started - self.submitted,
            prefill: first - started,
            decode: now - first,
        };
        self.tell(Event::Finished { reason, usage });
    }

    pub fn fail(self, error: EngineError) {
        self.tell(Event::Failed(error));
    }

    pub fn time_to_first_token(&self) -> Option<std::time::Duration> {
        self.first_token.map(|t| t - self.submitted)
    }

    pub fn status(&self) -> SessionStatus {
        SessionStatus {
            prompt_tokens: self.prompt_len,
            reused_tokens: self.reused.unwrap_or(0),
            prefilled: self.place.as_ref().map_or(0, |p| p.settled.min(self.prompt_len)),
            generated: self.generated(),
            since: self.started.map_or_else(|| self.submitted.elapsed(), |s| s.elapsed()),
        }
    }
}
