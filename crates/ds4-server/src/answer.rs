//! One answer as it comes: the engine's tokens to what is said, in no API's words yet.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;

use ds4_engine::{Chosen, EngineError, Event, FinishReason};
use ds4_text::chat::{END_THINK, EOS, FunctionCall, Message, ToolCall};
use ds4_text::parser::{End as ParseEnd, Event as Parsed, OutputParser, ParserOptions, Repair};
use ds4_text::{Tokenizer, Utf8Stream};
use futures_util::stream::{FuturesUnordered, StreamExt};

use crate::App;
use crate::error::ApiError;
use crate::generator::Events;
use crate::memory::{self, Sampled};

/// A token of the answer with its log-probability.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenProb {
    pub bytes: Vec<u8>,
    pub logprob: f32,
    /// The most likely tokens, best first.
    pub top: Vec<(Vec<u8>, f32)>,
}

/// What is said.
#[derive(Clone, Debug, PartialEq)]
pub enum Said {
    Reasoning(String),
    Content {
        text: String,
        /// The tokens that ended up in the text so far and were not told yet.
        probs: Vec<TokenProb>,
    },
    CallStart {
        index: usize,
        id: String,
        name: String,
    },
    /// The next piece of the arguments' JSON text.
    CallArguments {
        index: usize,
        json: String,
    },
    CallEnd {
        index: usize,
        complete: bool,
    },
    /// Log-probabilities of the prompt's tokens, from the second on.
    Prompt(Vec<Chosen>),
    /// The last thing said.
    End(Ending),
    /// There is no complete answer. The last thing said.
    Failed(ApiError),
}

#[derive(Clone, Debug, PartialEq)]
pub struct Ending {
    pub reason: Reason,
    pub usage: Usage,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reason {
    Stop,
    /// This stop string came.
    StopString(String),
    Length,
    Calls,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    pub prompt: usize,
    /// Of the prompt: not evaluated, since the state was there.
    pub reused: usize,
    pub completion: usize,
    /// Of the completion: inside thoughts.
    pub reasoning: usize,
}

impl Usage {
    /// The sum over several answers to one prompt.
    pub fn join(self, other: Usage) -> Usage {
        Usage {
            prompt: self.prompt.max(other.prompt),
            reused: self.reused.max(other.reused),
            completion: self.completion + other.completion,
            reasoning: self.reasoning + other.reasoning,
        }
    }
}

/// How an answer is read.
#[derive(Clone)]
pub struct Reading {
    /// `None`: text as it is, no thoughts and no calls.
    pub parser: Option<ParserOptions>,
    pub stop: Vec<String>,
    /// Whether log-probabilities were asked for.
    pub probs: bool,
    /// The answer ends with its first call.
    pub one_call: bool,
    /// Calls are not given on.
    pub no_calls: bool,
    /// What the names of calls begin with.
    pub call_prefix: &'static str,
    /// Where to file what was sampled.
    pub key: Option<memory::Key>,
    /// Prompt tokens.
    pub prompt: usize,
    /// The answer's text is not wanted, only the prompt's.
    pub silent: bool,
}

/// Reads one generation. Dropping it ends the generation.
pub struct Answer {
    app: Arc<App>,
    events: Option<Events>,
    how: Reading,
    parser: Option<OutputParser>,
    utf8: Utf8Stream,
    stops: StopScan,
    ready: VecDeque<Said>,
    usage: Usage,
    /// Tokens of the content that were not told yet.
    probs: Vec<TokenProb>,
    /// The answer as the client will know it.
    message: Message,
    reasoning: String,
    content_said: bool,
    raw: Vec<u8>,
    started: Instant,
    last_token: Option<Instant>,
}

impl Answer {
    pub fn new(app: Arc<App>, events: Events, how: Reading) -> Self {
        Answer {
            events: Some(events),
            parser: how.parser.map(OutputParser::new),
            utf8: Utf8Stream::new(),
            stops: StopScan::new(how.stop.clone()),
            ready: VecDeque::new(),
            usage: Usage { prompt: how.prompt, ..Usage::default() },
            probs: Vec::new(),
            message: Message::assistant(""),
            reasoning: String::new(),
            content_said: false,
            raw: Vec::new(),
            started: Instant::now(),
            last_token: None,
            app,
            how,
        }
    }

    /// The next thing said; `None` after the last. Safe to drop and call again.
    pub async fn next(&mut self) -> Option<Said> {
        loop {
            if let Some(said) = self.ready.pop_front() {
                return Some(said);
            }
            let event = match &mut self.events {
                Some(events) => events.next().await,
                None => return None,
            };
            match event {
                Some(event) => self.event(event),
                None => self.fail(EngineError::ShuttingDown.into()),
            }
        }
    }

    fn event(&mut self, event: Event) {
        match event {
            Event::Queued { .. } => {}
            Event::Prefill { reused, .. } => self.usage.reused = reused,
            Event::Prompt { tokens, .. } => self.ready.push_back(Said::Prompt(tokens)),
            Event::Token { bytes, chosen } => self.token(&bytes, chosen),
            Event::Finished { reason, usage } => {
                self.usage.reused = usage.reused_tokens;
                self.finish(match reason {
                    FinishReason::Stop => Reason::Stop,
                    FinishReason::Length => Reason::Length,
                });
            }
            Event::Failed(e) => self.fail(e.into()),
        }
    }

    fn fail(&mut self, e: ApiError) {
        self.events = None;
        tracing::warn!(error = %e.message, "a request failed");
        self.app.metrics.failed(&e);
        self.ready.push_back(Said::Failed(e));
    }

    fn token(&mut self, bytes: &[u8], chosen: Chosen) {
        let now = Instant::now();
        self.app.metrics.token(now - self.last_token.unwrap_or(self.started), self.last_token.is_none());
        self.last_token = Some(now);
        self.usage.completion += 1;
        if self.app.tracing() {
            self.raw.extend_from_slice(bytes);
        }
        if self.how.silent || self.app.tokenizer.special(EOS) == Some(chosen.token) {
            return;
        }
        let inside = self.parser.as_ref().is_some_and(OutputParser::is_thinking);
        if inside {
            self.usage.reasoning += 1;
        }
        let events = match &mut self.parser {
            Some(parser) => parser.push(bytes),
            None => vec![Parsed::Content(self.utf8.push(bytes))],
        };
        let calls = self.parser.as_ref().map_or(0, OutputParser::calls);
        let markup = self.app.tokenizer.special(END_THINK) == Some(chosen.token);
        if self.how.probs && !inside && calls == 0 && !markup {
            self.probs.push(token_prob(&self.app.tokenizer, bytes, chosen));
        }
        self.take(events);
    }

    /// Takes what the parser has decided, until the answer ends.
    fn take(&mut self, events: Vec<Parsed>) {
        for event in events {
            if self.events.is_none() {
                return;
            }
            match event {
                Parsed::Reasoning(text) => {
                    self.reasoning.push_str(&text);
                    self.ready.push_back(Said::Reasoning(text));
                }
                Parsed::Content(text) => {
                    let (text, hit) = self.stops.push(&text);
                    self.content(text);
                    if let Some(stop) = hit {
                        self.end(Reason::StopString(stop));
                    }
                }
                _ if self.how.no_calls => {}
                Parsed::CallStart { index, name } => {
                    let rest = self.stops.rest();
                    self.content(rest);
                    let id = memory::new_id(self.how.call_prefix);
                    let function = FunctionCall { name: name.clone(), arguments: String::new() };
                    self.message.tool_calls.push(ToolCall { id: id.clone(), function });
                    self.ready.push_back(Said::CallStart { index, id, name });
                }
                Parsed::CallArguments { index, json } => {
                    if let Some(call) = self.message.tool_calls.get_mut(index) {
                        call.function.arguments.push_str(&json);
                    }
                    self.ready.push_back(Said::CallArguments { index, json });
                }
                Parsed::CallEnd { index, complete } => {
                    self.ready.push_back(Said::CallEnd { index, complete });
                    if self.how.one_call && complete {
                        self.end(Reason::Calls);
                    }
                }
            }
        }
    }

    fn content(&mut self, text: String) {
        if text.is_empty() {
            return;
        }
        self.content_said |= !text.trim().is_empty();
        if let Some(content) = &mut self.message.content {
            content.push_str(&text);
        }
        self.ready.push_back(Said::Content { text, probs: std::mem::take(&mut self.probs) });
    }

    /// The engine has ended the answer.
    fn finish(&mut self, reason: Reason) {
        let outcome = match &mut self.parser {
            Some(parser) => {
                let end = if reason == Reason::Length { ParseEnd::Cut } else { ParseEnd::EndOfSentence };
                let (events, outcome) = parser.finish(end);
                self.take(events);
                Some(outcome)
            }
            None => {
                let text = self.utf8.finish();
                self.take(vec![Parsed::Content(text)]);
                None
            }
        };
        // A stop string or a first call may have come with the last words.
        if self.events.is_none() {
            return;
        }
        let rest = self.stops.rest();
        self.content(rest);
        let Some(outcome) = outcome else { return self.end(reason) };
        for repair in &outcome.repairs {
            self.app.metrics.repair(*repair);
            if *repair != Repair::NoEnd {
                tracing::info!(?repair, "the answer was not as the format says");
            }
        }
        let calls = !self.message.tool_calls.is_empty();
        let open = outcome.repairs.contains(&Repair::ThinkingNotClosed);
        if reason == Reason::Stop && !calls && !self.content_said {
            // An answer never hides: what stayed inside the thought is the answer.
            self.app.metrics.hidden();
            let text = self.reasoning.clone();
            self.content(text);
        } else if reason != Reason::Length && !open {
            self.keep(outcome.sampled_calls);
        }
        self.end(if calls && reason == Reason::Stop { Reason::Calls } else { reason });
    }

    fn keep(&self, calls: Option<String>) {
        if let Some(key) = self.how.key {
            let sampled = Sampled { reasoning: self.reasoning.clone(), calls };
            if !sampled.reasoning.is_empty() || sampled.calls.is_some() {
                self.app.memory.keep(key, &self.message, sampled);
            }
        }
    }

    fn end(&mut self, reason: Reason) {
        // Dropping the events ends the generation, where it has not ended itself.
        self.events = None;
        if !self.probs.is_empty() && !matches!(reason, Reason::StopString(_)) {
            let probs = std::mem::take(&mut self.probs);
            self.ready.push_back(Said::Content { text: String::new(), probs });
        }
        self.app.metrics.finished(&reason, &self.usage);
        if self.app.tracing() {
            self.app.trace(
                "answer",
                serde_json::json!({
                    "output": String::from_utf8_lossy(&self.raw),
                    "reason": format!("{reason:?}"),
                    "prompt_tokens": self.usage.prompt,
                    "reused_tokens": self.usage.reused,
                    "completion_tokens": self.usage.completion,
                }),
            );
        }
        self.ready.push_back(Said::End(Ending { reason, usage: self.usage }));
    }
}

/// A token in words: its own bytes, and those of the likely ones.
pub fn token_prob(tokenizer: &Tokenizer, bytes: &[u8], chosen: Chosen) -> TokenProb {
    let top = chosen.top.iter().map(|(id, p)| (tokenizer.token_bytes(*id).to_vec(), *p)).collect();
    TokenProb { bytes: bytes.to_vec(), logprob: chosen.logprob, top }
}

/// The choice's number, its answer, and what that says next.
type Step = Pin<Box<dyn Future<Output = (usize, Answer, Option<Said>)> + Send>>;

/// Several answers to one request, whichever says something next. Dropping it ends all of them.
pub struct Answers {
    running: FuturesUnordered<Step>,
}

impl Answers {
    pub fn new(answers: Vec<Answer>) -> Self {
        Answers { running: answers.into_iter().enumerate().map(|(i, a)| step(i, a)).collect() }
    }
}

fn step(i: usize, mut answer: Answer) -> Step {
    Box::pin(async move {
        let said = answer.next().await;
        (i, answer, said)
    })
}

impl futures_util::Stream for Answers {
    /// The choice's number, and what it says.
    type Item = (usize, Said);

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        loop {
            match self.running.poll_next_unpin(cx) {
                Poll::Ready(Some((i, answer, Some(said)))) => {
                    self.running.push(step(i, answer));
                    return Poll::Ready(Some((i, said)));
                }
                Poll::Ready(Some((_, _, None))) => {}
                Poll::Ready(None) => return Poll::Ready(None),
                Poll::Pending => return Poll::Pending,
            }
        }
    }
}

/// Finds stop strings in text that comes in pieces. Holds back what may be the beginning of one.
struct StopScan {
    stops: Vec<String>,
    held: String,
}

impl StopScan {
    fn new(stops: Vec<String>) -> Self {
        StopScan { stops, held: String::new() }
    }

    /// The text that can be said, up to the first stop string if one came.
    fn push(&mut self, text: &str) -> (String, Option<String>) {
        if self.stops.is_empty() {
            return (text.to_string(), None);
        }
        self.held.push_str(text);
        // The one that is complete first, so that it does not matter how the text is cut.
        let found =
            self.stops.iter().filter_map(|s| self.held.find(s.as_str()).map(|at| (at + s.len(), at, s)));
        if let Some((_, at, stop)) = found.min() {
            let stop = stop.clone();
            self.held.truncate(at);
            return (self.rest(), Some(stop));
        }
        let begins = |tail: &str| self.stops.iter().any(|s| s.starts_with(tail));
        let longest = self.stops.iter().map(String::len).max().unwrap_or(0);
        let from = self.held.len().saturating_sub(longest);
        let keep = (from..self.held.len())
            .find(|&at| self.held.is_char_boundary(at) && begins(&self.held[at..]))
            .unwrap_or(self.held.len());
        let tail = self.held.split_off(keep);
        (std::mem::replace(&mut self.held, tail), None)
    }

    /// What was held back: nothing more comes.
    fn rest(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scan(stops: &[&str], pieces: &[&str]) -> (String, Option<String>) {
        let mut s = StopScan::new(stops.iter().map(|s| s.to_string()).collect());
        let mut said = String::new();
        for piece in pieces {
            let (text, hit) = s.push(piece);
            said.push_str(&text);
            if hit.is_some() {
                return (said, hit);
            }
        }
        said.push_str(&s.rest());
        (said, None)
    }

    #[test]
    fn stop_strings_across_pieces() {
        for (stops, text, said, hit) in [
            (&["END"][..], "one END two", "one ", Some("END")),
            (&["END"][..], "one EN two E", "one EN two E", None),
            (&["aab"][..], "aaab", "a", Some("aab")),
            (&["xyz", "y"][..], "axyz", "ax", Some("y")),
            (&["é!"][..], "caf\u{e9}! x", "caf", Some("é!")),
            (&[][..], "free", "free", None),
        ] {
            let want = (said.to_string(), hit.map(str::to_string));
            assert_eq!(scan(stops, &[text]), want, "{text} whole");
            let letters: Vec<String> = text.chars().map(String::from).collect();
            let letters: Vec<&str> = letters.iter().map(String::as_str).collect();
            assert_eq!(scan(stops, &letters), want, "{text} by letters");
        }
    }
}
