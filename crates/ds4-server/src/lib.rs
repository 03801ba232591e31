//! The HTTP APIs: OpenAI's chat, completions and Responses, Anthropic's messages; and a page to talk to the model.
//!
//! A request becomes an [`ask::Ask`], whichever API it came by; the engine's tokens become [`answer::Said`], and an API's
//! voice tells that as a stream or as a whole. Every field is honoured or refused by name; every request ends in a
//! complete answer or an error in its API's own shape.

#![forbid(unsafe_code)]

mod answer;
mod ask;
mod chat;
mod completions;
mod config;
mod doors;
mod error;
mod fields;
mod generator;
mod info;
mod memory;
mod messages;
mod metrics;
mod openapi;
mod responses;
mod serve;
mod stream;
mod trace;

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use axum::Router;
use axum::extract::{DefaultBodyLimit, Path, Request, State};
use axum::http::{Method, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use ds4_text::Tokenizer;
use ds4_text::parser::ParserOptions;
use serde_json::Value;

pub use ask::Thinking;
pub use config::{ConfigError, ServerArgs, ServerConfig, TemplateChoice, with_file};
pub use generator::{Events, Generator};
pub use serve::{ServerError, serve, serve_on};

use answer::{Answer, Answers, Reading};
use ask::{Ask, ToolChoice};
use doors::Caller;
use error::{ApiError, Dialect};
use memory::Memory;
use metrics::Metrics;
use responses::Store;

/// Sampled turns that are kept, bytes.
const MEMORY_BYTES: usize = 64 << 20;
/// Answers that are kept for `previous_response_id`, bytes.
const RESPONSES_BYTES: usize = 64 << 20;

/// What the server says about its model.
#[derive(Clone, Debug)]
pub struct ModelInfo {
    pub name: String,
    /// Tokens that a conversation may have.
    pub context: usize,
    /// Seconds since 1970; of the file or the start.
    pub created: u64,
}

/// Everything that requests share.
pub struct App {
    config: ServerConfig,
    /// Hashes of the keys.
    keys: Vec<blake3::Hash>,
    generator: Arc<dyn Generator>,
    tokenizer: Arc<Tokenizer>,
    model: ModelInfo,
    memory: Memory,
    responses: Store,
    metrics: Metrics,
    trace: Option<trace::Trace>,
}

impl App {
    pub fn new(
        config: ServerConfig,
        generator: Arc<dyn Generator>,
        tokenizer: Arc<Tokenizer>,
        model: ModelInfo,
    ) -> Result<Arc<Self>, ServerError> {
        let memory = Memory::new(MEMORY_BYTES);
        if let Some(path) = serve::turns_file(&config) {
            match memory.load(&path) {
                Ok(turns) => tracing::info!(turns, "sampled turns read"),
                Err(e) => tracing::warn!(path = %path.display(), error = %e, "sampled turns cannot be read"),
            }
        }
        let trace = config.trace.as_deref().map(trace::Trace::open).transpose()?;
        Ok(Arc::new(App {
            keys: config.keys.iter().map(|k| blake3::hash(k.as_bytes())).collect(),
            responses: Store::new(RESPONSES_BYTES),
            metrics: Metrics::default(),
            config,
            generator,
            tokenizer,
            model,
            memory,
            trace,
        }))
    }

    fn special(&self, text: &str) -> Result<u32, ApiError> {
        self.tokenizer.need_special(text).map_err(|e| ApiError::internal(e.to_string()))
    }

    fn tracing(&self) -> bool {
        self.trace.is_some()
    }

    fn trace(&self, what: &str, record: Value) {
        if let Some(trace) = &self.trace
            && !trace.write(what, record)
        {
            self.metrics.trace_dropped.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        }
    }

    /// Starts a conversation's answers.
    async fn begin(self: &Arc<Self>, ask: Ask, call_prefix: &'static str) -> Result<Answers, ApiError> {
        self.begin_counted(ask, call_prefix).await.map(|(answers, _)| answers)
    }

    /// Starts a conversation's answers; also tells the prompt's tokens.
    async fn begin_counted(
        self: &Arc<Self>,
        ask: Ask,
        call_prefix: &'static str,
    ) -> Result<(Answers, usize), ApiError> {
        let app = self.clone();
        // Rendering and tokenising a long conversation takes a while.
        blocking(move || {
            let rendered = ask.render(&app)?;
            if app.tracing() {
                app.trace("prompt", serde_json::json!({"text": rendered.prompt.to_text()}));
            }
            let requests = ask.requests(&rendered, &app)?;
            let prompt = requests.first().map_or(0, |r| r.prompt.len());
            let tools = !ask.tools.offered.is_empty();
            let reading = Reading {
                parser: Some(ParserOptions { thinking: rendered.thinking, tools }),
                probs: ask.draw.logprobs.is_some(),
                stop: ask.draw.stop,
                one_call: !ask.tools.parallel,
                no_calls: ask.tools.choice == ToolChoice::None,
                call_prefix,
                key: Some(rendered.key),
                prompt,
                silent: false,
            };
            Ok((Answers::new(Answer::many(&app, requests, &reading)?), prompt))
        })
        .await
    }

    /// Starts answers to requests that are made already.
    async fn submit(
        self: &Arc<Self>,
        requests: Vec<ds4_engine::Request>,
        reading: Reading,
    ) -> Result<Answers, ApiError> {
        let app = self.clone();
        blocking(move || Ok(Answers::new(Answer::many(&app, requests, &reading)?))).await
    }

    /// Tokens of the prompt that a conversation would be answered from.
    async fn count(self: &Arc<Self>, ask: Ask) -> Result<usize, ApiError> {
        let app = self.clone();
        blocking(move || {
            let rendered = ask.render(&app)?;
            let ids =
                rendered.prompt.to_ids(&app.tokenizer).map_err(|e| ApiError::internal(e.to_string()))?;
            Ok(ids.ids.len())
        })
        .await
    }
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    tokio::task::spawn_blocking(work).await.map_err(|e| ApiError::internal(e.to_string()))?
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs())
}

/// Which handler a body goes to.
#[derive(Clone, Copy)]
enum Endpoint {
    Chat,
    Completions,
    Responses,
    Messages,
    CountTokens,
    Tokenize,
    Detokenize,
    ApplyTemplate,
}

/// Every path of the server.
pub fn router(app: Arc<App>) -> Router {
    let endpoint = |endpoint: Endpoint| {
        post(move |State(app): State<Arc<App>>, request: Request| run(app, endpoint, request))
    };
    Router::new()
        .route("/", get(info::page))
        .route("/health", get(info::health))
        .route("/status", get(info::status))
        .route("/metrics", get(info::metrics))
        .route("/openapi.json", get(openapi::document))
        .route("/v1/models", get(info::models))
        .route("/v1/models/{*id}", get(info::model))
        .route("/v1/chat/completions", endpoint(Endpoint::Chat))
        .route("/v1/completions", endpoint(Endpoint::Completions))
        .route("/v1/responses", endpoint(Endpoint::Responses))
        .route("/v1/responses/{id}", get(info::response).delete(info::forget_response))
        .route("/v1/messages", endpoint(Endpoint::Messages))
        .route("/v1/messages/count_tokens", endpoint(Endpoint::CountTokens))
        .route("/tokenize", endpoint(Endpoint::Tokenize))
        .route("/detokenize", endpoint(Endpoint::Detokenize))
        .route("/apply-template", endpoint(Endpoint::ApplyTemplate))
        .fallback(unknown_path)
        .method_not_allowed_fallback(wrong_method)
        .layer(axum::middleware::from_fn_with_state(app.clone(), doors::guard))
        .layer(DefaultBodyLimit::disable())
        .with_state(app)
}

async fn run(app: Arc<App>, endpoint: Endpoint, request: Request) -> Response {
    let dialect = Dialect::of_path(request.uri().path());
    let path = request.uri().path().to_string();
    let caller = request.extensions().get::<Caller>().copied().unwrap_or(Caller(0));
    let answered = async {
        let body = doors::json_body(&app, request.into_body()).await?;
        if app.tracing() {
            app.trace("request", serde_json::json!({"path": path, "body": body}));
        }
        let app = app.clone();
        match endpoint {
            Endpoint::Chat => chat::handle(app, body).await,
            Endpoint::Completions => completions::handle(app, body).await,
            Endpoint::Responses => responses::handle(app, caller, body).await,
            Endpoint::Messages => messages::handle(app, body).await,
            Endpoint::CountTokens => messages::count(app, body).await,
            Endpoint::Tokenize => info::tokenize(app, body).await,
            Endpoint::Detokenize => info::detokenize(app, body).await,
            Endpoint::ApplyTemplate => info::apply_template(app, body).await,
        }
    };
    answered.await.unwrap_or_else(|e| {
        app.metrics.refused();
        tracing::debug!(path, status = e.status.as_u16(), error = %e.message, "refused");
        if app.tracing() {
            app.trace(
                "refused",
                serde_json::json!({"path": path, "status": e.status.as_u16(), "error": e.message}),
            );
        }
        e.into_response(dialect)
    })
}

async fn unknown_path(method: Method, request: Request) -> Response {
    let path = request.uri().path();
    let e = ApiError::new(
        StatusCode::NOT_FOUND,
        format!("{method} {path}: there is no such path; see /openapi.json"),
    );
    e.code("unknown_path").into_response(Dialect::of_path(path))
}

async fn wrong_method(method: Method, request: Request) -> Response {
    let path = request.uri().path();
    let message = format!("{method} {path}: this path takes another method; see /openapi.json");
    let e = ApiError::new(StatusCode::METHOD_NOT_ALLOWED, message).code("method_not_allowed");
    e.into_response(Dialect::of_path(path)).into_response()
}

/// A path's name part, as handlers get it.
type Name = Path<String>;
