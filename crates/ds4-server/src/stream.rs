//! Answers on their way to a client: as server-sent events, or collected.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures_util::{FutureExt, StreamExt, stream};
use serde_json::Value;
use tokio::sync::mpsc;

use crate::App;
use crate::answer::{Answers, Ending, Said, TokenProb};
use crate::error::ApiError;

/// Frames on their way to a slow reader; then its answer waits.
const FRAMES_MAX: usize = 64;
/// Bytes of one frame, after which it goes out even if more is there.
const FRAME_BYTES: usize = 16 * 1024;

/// How an API tells an answer, event by event.
pub trait Voice: Send + 'static {
    /// Before anything is known.
    fn begin(&mut self, out: &mut Frames);
    fn say(&mut self, choice: usize, said: Said, out: &mut Frames);
    /// After the last choice has ended.
    fn end(&mut self, out: &mut Frames);
    /// What keeps a connection alive while nothing is said.
    fn keepalive(&self, out: &mut Frames) {
        out.text.push_str(": keepalive\n\n");
    }
}

/// Server-sent events in the making.
#[derive(Default)]
pub struct Frames {
    text: String,
}

impl Frames {
    /// Forgets what nobody reads.
    pub fn clear(&mut self) {
        self.text.clear();
    }

    /// An event without a name.
    pub fn data(&mut self, data: &Value) {
        self.raw(&data.to_string());
    }

    /// An event that is named in its line and by `type` in its data.
    pub fn event(&mut self, name: &str, data: &Value) {
        self.text.push_str("event: ");
        self.text.push_str(name);
        self.text.push('\n');
        self.data(data);
    }

    /// Data that is no JSON. It must not have line breaks; printed JSON has none.
    pub fn raw(&mut self, data: &str) {
        self.text.push_str("data: ");
        self.text.push_str(data);
        self.text.push_str("\n\n");
    }
}

/// Sends headers at once, then events as they come. When the client is gone, the answers are dropped, which ends them.
pub fn respond(app: &Arc<App>, mut answers: Answers, mut voice: impl Voice) -> Response {
    let (frames, mut receiver) = mpsc::channel::<Bytes>(FRAMES_MAX);
    let (keepalive, patience) = (app.config.keepalive, app.config.client_limit);
    tokio::spawn(async move {
        let mut out = Frames::default();
        voice.begin(&mut out);
        let mut over = false;
        while send(&frames, &mut out, patience).await && !over {
            let next = tokio::select! {
                () = frames.closed() => return,
                next = tokio::time::timeout(keepalive, answers.next()) => next,
            };
            match next {
                Err(_) => voice.keepalive(&mut out),
                Ok(mut next) => loop {
                    match next {
                        Some((choice, said)) => voice.say(choice, said, &mut out),
                        None => {
                            voice.end(&mut out);
                            over = true;
                            break;
                        }
                    }
                    // What is there already goes into the same frame.
                    match answers.next().now_or_never() {
                        Some(more) if out.text.len() < FRAME_BYTES => next = more,
                        Some(Some((choice, said))) => {
                            voice.say(choice, said, &mut out);
                            break;
                        }
                        Some(None) => next = None,
                        None => break,
                    }
                },
            }
        }
    });
    let body =
        Body::from_stream(stream::poll_fn(move |cx| receiver.poll_recv(cx)).map(Ok::<_, std::io::Error>));
    let headers = [
        (header::CONTENT_TYPE, "text/event-stream; charset=utf-8"),
        (header::CACHE_CONTROL, "no-cache"),
        // Proxies that would otherwise wait for more.
        (header::HeaderName::from_static("x-accel-buffering"), "no"),
    ];
    (headers, body).into_response()
}

/// `false`: the client is gone, or has read nothing for too long.
async fn send(frames: &mpsc::Sender<Bytes>, out: &mut Frames, patience: Duration) -> bool {
    if out.text.is_empty() {
        return true;
    }
    let frame = Bytes::from(std::mem::take(&mut out.text));
    match tokio::time::timeout(patience, frames.send(frame)).await {
        Ok(sent) => sent.is_ok(),
        Err(_) => {
            tracing::warn!("a client reads nothing: its answer is ended");
            false
        }
    }
}

/// A call of a whole answer.
#[derive(Clone, Debug, PartialEq)]
pub struct Call {
    pub id: String,
    pub name: String,
    /// JSON text; only its beginning where the call is not complete.
    pub arguments: String,
    pub complete: bool,
}

/// A whole answer.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Whole {
    pub reasoning: String,
    pub content: String,
    pub probs: Vec<TokenProb>,
    pub calls: Vec<Call>,
    pub prompt_probs: Vec<ds4_engine::Chosen>,
    pub ending: Option<Ending>,
}

impl Whole {
    pub fn add(&mut self, said: Said) -> Result<(), ApiError> {
        match said {
            Said::Reasoning(text) => self.reasoning.push_str(&text),
            Said::Content { text, probs } => {
                self.content.push_str(&text);
                self.probs.extend(probs);
            }
            Said::CallStart { id, name, .. } => {
                self.calls.push(Call { id, name, arguments: String::new(), complete: false });
            }
            Said::CallArguments { index, json } => {
                if let Some(call) = self.calls.get_mut(index) {
                    call.arguments.push_str(&json);
                }
            }
            Said::CallEnd { index, complete } => {
                if let Some(call) = self.calls.get_mut(index) {
                    call.complete = complete;
                }
            }
            Said::Prompt(tokens) => self.prompt_probs.extend(tokens),
            Said::End(ending) => self.ending = Some(ending),
            Said::Failed(e) => return Err(e),
        }
        Ok(())
    }
}

/// Waits for all of `choices` answers to end.
pub async fn collect(mut answers: Answers, choices: usize) -> Result<Vec<(Whole, Ending)>, ApiError> {
    let mut wholes = vec![Whole::default(); choices];
    while let Some((i, said)) = answers.next().await {
        if let Some(whole) = wholes.get_mut(i) {
            whole.add(said)?;
        }
    }
    let ended = |mut w: Whole| {
        let ending = w.ending.take().ok_or_else(|| ApiError::internal("an answer ended without its end"))?;
        Ok((w, ending))
    };
    wholes.into_iter().map(ended).collect()
}
