//! The server about itself: health, status, metrics, models; and the text side on its own.

use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::extract::{Extension, Path, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use ds4_engine::Health;
use serde_json::{Value, json};

use crate::chat::ChatRequest;
use crate::doors::Caller;
use crate::error::{ApiError, Dialect};
use crate::fields::{Fields, wrong};
use crate::{App, Name};

/// Everything that the page may do: its own script and style, and talk to this server.
const PAGE_POLICY: &str = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; \
                           img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

pub async fn page() -> Response {
    let headers = [
        (header::CONTENT_TYPE, "text/html; charset=utf-8"),
        (header::CONTENT_SECURITY_POLICY, PAGE_POLICY),
        (header::REFERRER_POLICY, "no-referrer"),
        (header::CACHE_CONTROL, "no-cache"),
    ];
    (headers, include_str!("page.html")).into_response()
}

fn health_word(health: &Health) -> (&'static str, Option<String>) {
    match health {
        Health::Loading => ("loading", None),
        Health::Ready => ("ok", None),
        Health::Waiting { reason, .. } => ("waiting", Some(reason.clone())),
        Health::Faulted { reason } => ("faulted", Some(reason.clone())),
        Health::Draining => ("draining", None),
        Health::Ended => ("ended", None),
    }
}

/// 200 where a request would be taken now, else 503.
pub async fn health(State(app): State<Arc<App>>) -> Response {
    let health = app.generator.status().health;
    let (word, reason) = health_word(&health);
    let status = if health == Health::Ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    let mut body = json!({"status": word});
    if let Some(reason) = reason {
        body["reason"] = json!(reason);
    }
    (status, Json(body)).into_response()
}

pub async fn status(State(app): State<Arc<App>>) -> Response {
    let s = app.generator.status();
    let (word, reason) = health_word(&s.health);
    let sessions: Vec<Value> = s
        .sessions
        .iter()
        .map(|x| {
            json!({
                "prompt_tokens": x.prompt_tokens,
                "reused_tokens": x.reused_tokens,
                "prefilled": x.prefilled,
                "generated": x.generated,
                "seconds": seconds(x.since),
            })
        })
        .collect();
    let stages: Vec<Value> = s
        .stages
        .iter()
        .map(|x| {
            json!({"name": x.name, "device": x.device, "first_layer": x.slice.first, "end_layer": x.slice.end, "head": x.slice.head})
        })
        .collect();
    let plan: Vec<Value> = s
        .plan
        .iter()
        .map(|p| {
            let line = |l: &ds4_model::plan::Line| json!({"name": l.name, "bytes": l.bytes, "memory": l.memory.name()});
            json!({"total": p.total(), "lines": p.lines.iter().map(line).collect::<Vec<_>>()})
        })
        .collect();
    let c = &s.counters;
    Json(json!({
        "status": word,
        "reason": reason,
        "model": app.model.name,
        "version": env!("CARGO_PKG_VERSION"),
        "context": s.context,
        "sessions": sessions,
        "waiting": s.waiting,
        "stages": stages,
        "plan": plan,
        "pages": {"used": s.pages_used, "total": s.pages_total},
        "checkpoints": {"used": s.checkpoints_used, "total": s.checkpoints_total},
        "counters": {
            "steps": c.steps,
            "step_seconds": c.step_seconds,
            "rows_prefill": c.rows_prefill,
            "rows_decode": c.rows_decode,
            "rows_reused": c.rows_reused,
            "requests_finished": c.requests_finished,
            "requests_failed": c.requests_failed,
            "requests_cancelled": c.requests_cancelled,
            "requests_rejected": c.requests_rejected,
            "restarts": c.restarts,
        },
        "connections": app.metrics.connections(),
    }))
    .into_response()
}

fn seconds(d: Duration) -> f64 {
    (d.as_secs_f64() * 1000.0).round() / 1000.0
}

pub async fn metrics(State(app): State<Arc<App>>) -> Response {
    let s = app.generator.status();
    let text = app.metrics.text(&s, app.memory.bytes(), app.responses.bytes());
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text).into_response()
}

fn model_object(app: &App) -> Value {
    json!({
        "id": app.model.name,
        "object": "model",
        "created": app.model.created,
        "owned_by": "ds4",
        // What clients of other servers look for.
        "context_length": app.model.context,
        "max_model_len": app.model.context,
        // Anthropic's names.
        "type": "model",
        "display_name": app.model.name,
        "created_at": timestamp(app.model.created),
    })
}

pub async fn models(State(app): State<Arc<App>>) -> Response {
    let model = model_object(&app);
    let id = &app.model.name;
    Json(json!({"object": "list", "data": [model], "has_more": false, "first_id": id, "last_id": id}))
        .into_response()
}

pub async fn model(State(app): State<Arc<App>>, Path(id): Name) -> Response {
    if id == app.model.name {
        return Json(model_object(&app)).into_response();
    }
    let e = ApiError::new(
        StatusCode::NOT_FOUND,
        format!("The model '{id}' does not exist; this server has '{}'", app.model.name),
    );
    e.code("model_not_found").into_response(Dialect::OpenAi)
}

/// Seconds since 1970 in RFC 3339. The calendar is that of Howard Hinnant's `civil_from_days`.
fn timestamp(seconds: u64) -> String {
    let (days, rest) = (seconds / 86_400, seconds % 86_400);
    let z = days + 719_468;
    let (era, doe) = (z / 146_097, z % 146_097);
    let yoe = (doe - doe / 1460 + doe / 36_524 - doe / 146_096) / 365;
    let doy = doe - (365 * yoe + yoe / 4 - yoe / 100);
    let mp = (5 * doy + 2) / 153;
    let (day, month) = (doy - (153 * mp + 2) / 5 + 1, if mp < 10 { mp + 3 } else { mp - 9 });
    let year = yoe + era * 400 + u64::from(month <= 2);
    format!("{year:04}-{month:02}-{day:02}T{:02}:{:02}:{:02}Z", rest / 3600, rest / 60 % 60, rest % 60)
}

fn caller(extension: Option<Extension<Caller>>) -> Caller {
    extension.map_or(Caller(0), |e| e.0)
}

fn no_response(id: &str) -> Response {
    let e = ApiError::new(StatusCode::NOT_FOUND, format!("Response with id '{id}' not found."));
    e.into_response(Dialect::OpenAi)
}

pub async fn response(
    State(app): State<Arc<App>>,
    Path(id): Name,
    who: Option<Extension<Caller>>,
) -> Response {
    match app.responses.response(&id, caller(who)) {
        Some(response) => Json(response).into_response(),
        None => no_response(&id),
    }
}

pub async fn forget_response(
    State(app): State<Arc<App>>,
    Path(id): Name,
    who: Option<Extension<Caller>>,
) -> Response {
    match app.responses.forget(&id, caller(who)) {
        true => Json(json!({"id": id, "object": "response", "deleted": true})).into_response(),
        false => no_response(&id),
    }
}

/// `POST /tokenize`: a text's token ids.
pub async fn tokenize(app: Arc<App>, body: Value) -> Result<Response, ApiError> {
    let mut f = Fields::of(body, "")?;
    let text = match f.string("content")? {
        Some(text) => text,
        None => f.need_string("prompt")?,
    };
    let special = f.bool("parse_special")?.unwrap_or(false);
    let pieces = f.bool("with_pieces")?.unwrap_or(false);
    f.inform(&["model"]);
    f.end()?;
    let out = crate::blocking(move || {
        let t = &app.tokenizer;
        let ids = if special { t.encode_with_specials(&text) } else { t.encode(&text) };
        let tokens: Vec<Value> = match pieces {
            true => ids
                .iter()
                .map(|id| json!({"id": id, "piece": String::from_utf8_lossy(t.token_bytes(*id))}))
                .collect(),
            false => ids.iter().map(|id| json!(id)).collect(),
        };
        Ok(json!({"tokens": tokens, "count": ids.len(), "max_model_len": app.model.context}))
    });
    Ok(Json(out.await?).into_response())
}

/// `POST /detokenize`: the text of token ids.
pub async fn detokenize(app: Arc<App>, body: Value) -> Result<Response, ApiError> {
    let mut f = Fields::of(body, "")?;
    let list = f.list("tokens")?.ok_or_else(|| f.missing("tokens"))?;
    f.inform(&["model"]);
    f.end()?;
    let vocab = app.tokenizer.len();
    let id = |(at, v): (String, Value)| {
        let id = v.as_u64().filter(|id| (*id as usize) < vocab);
        id.map(|id| id as u32).ok_or_else(|| wrong(&at, &format!("a token id below {vocab}"), &v))
    };
    let ids = list.into_iter().map(id).collect::<Result<Vec<u32>, _>>()?;
    let text = String::from_utf8_lossy(&app.tokenizer.decode(&ids)).into_owned();
    Ok(Json(json!({"content": text, "prompt": text})).into_response())
}

/// `POST /apply-template`: the prompt that a chat request would be answered from.
pub async fn apply_template(app: Arc<App>, body: Value) -> Result<Response, ApiError> {
    let request = ChatRequest::read(body, &app)?;
    let out = crate::blocking(move || {
        let rendered = request.ask.render(&app)?;
        let ids = rendered.prompt.to_ids(&app.tokenizer).map_err(|e| ApiError::internal(e.to_string()))?;
        Ok(json!({"prompt": rendered.prompt.to_text(), "tokens": ids.ids, "count": ids.ids.len()}))
    });
    Ok(Json(out.await?).into_response())
}

#[cfg(test)]
mod tests {
    #[test]
    fn timestamps() {
        for (seconds, text) in [
            (0, "1970-01-01T00:00:00Z"),
            (951_782_400, "2000-02-29T00:00:00Z"),
            (1_796_083_199, "2026-11-30T23:59:59Z"),
        ] {
            assert_eq!(super::timestamp(seconds), text);
        }
    }
}
