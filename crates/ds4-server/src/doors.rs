//! Who may ask, from where, and how much at once.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, to_bytes};
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use serde_json::Value;
use subtle::ConstantTimeEq;

use crate::App;
use crate::error::{ApiError, Dialect};

/// Bytes of a request's line and headers.
pub const HEAD_MAX: usize = 64 * 1024;
/// A body must be there by then.
const BODY_TIME: Duration = Duration::from_secs(60);
/// Nesting of a body's JSON; `serde_json` counts and refuses at 128.
const ALLOWED_METHODS: &str = "GET, POST, DELETE, OPTIONS";

/// Whose request it is: the place of its key. What one was told is kept from the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Caller(pub usize);

/// Checks origin and key; puts the CORS headers on every answer, errors and streams alike.
pub async fn guard(State(app): State<Arc<App>>, mut request: Request, next: Next) -> Response {
    let dialect = Dialect::of_path(request.uri().path());
    let origin = request.headers().get(header::ORIGIN).cloned();
    let allowed = match &origin {
        None => None,
        Some(origin) => match allow(&app, origin, request.headers()) {
            Some(allowed) => Some(allowed),
            None => {
                return ApiError::new(
                    StatusCode::FORBIDDEN,
                    "pages of this origin may not use the server; start it with --cors ORIGIN",
                )
                .code("origin_not_allowed")
                .into_response(dialect);
            }
        },
    };
    let mut response = if request.method() == Method::OPTIONS {
        preflight(request.headers())
    } else {
        match caller(&app, &request) {
            Ok(caller) => {
                request.extensions_mut().insert(caller);
                next.run(request).await
            }
            Err(e) => e.into_response(dialect),
        }
    };
    let headers = response.headers_mut();
    if let Some(Cors::Cross(value)) = allowed {
        headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, value);
        headers.insert(header::ACCESS_CONTROL_EXPOSE_HEADERS, HeaderValue::from_static("retry-after"));
    }
    headers.append(header::VARY, HeaderValue::from_static("origin"));
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    response
}

enum Cors {
    /// The page came from this server.
    Same,
    /// What to say to the browser.
    Cross(HeaderValue),
}

/// Whether pages of `origin` may ask. A page's own server counts only where its name cannot be made to point here by
/// someone else: an address, `localhost`, or any name once a key is needed.
fn allow(app: &App, origin: &HeaderValue, headers: &HeaderMap) -> Option<Cors> {
    let text = origin.to_str().ok()?;
    if app.config.cors.iter().any(|o| o == "*") {
        return Some(Cors::Cross(HeaderValue::from_static("*")));
    }
    if app.config.cors.iter().any(|o| o == text) {
        return Some(Cors::Cross(origin.clone()));
    }
    let own = headers.get(header::HOST)?.to_str().ok()?;
    let host = text.split_once("://")?.1;
    let name = match host.strip_prefix('[') {
        Some(v6) => v6.split(']').next()?,
        None => host.split(':').next()?,
    };
    let safe = name == "localhost"
        || name.parse::<IpAddr>().is_ok()
        || !app.config.keys.is_empty()
        || !app.config.host.is_loopback();
    (host == own && safe).then_some(Cors::Same)
}

fn preflight(asked: &HeaderMap) -> Response {
    let mut response = StatusCode::NO_CONTENT.into_response();
    let headers = response.headers_mut();
    headers.insert(header::ACCESS_CONTROL_ALLOW_METHODS, HeaderValue::from_static(ALLOWED_METHODS));
    headers.insert(header::ALLOW, HeaderValue::from_static(ALLOWED_METHODS));
    let wanted = asked.get(header::ACCESS_CONTROL_REQUEST_HEADERS).cloned();
    headers.insert(
        header::ACCESS_CONTROL_ALLOW_HEADERS,
        wanted.unwrap_or_else(|| HeaderValue::from_static("authorization, content-type, x-api-key")),
    );
    headers.insert(header::ACCESS_CONTROL_MAX_AGE, HeaderValue::from_static("600"));
    response
}

/// Paths that tell nothing about anyone: health for supervisors, and the page, which asks for the key itself.
fn is_open(path: &str) -> bool {
    matches!(path, "/" | "/health" | "/openapi.json")
}

/// Whose key the request carries.
fn caller(app: &App, request: &Request) -> Result<Caller, ApiError> {
    if app.config.keys.is_empty() || is_open(request.uri().path()) {
        return Ok(Caller(0));
    }
    let headers = request.headers();
    let bearer = headers.get(header::AUTHORIZATION).map(HeaderValue::as_bytes).and_then(|v| {
        let (scheme, key) = v.split_at_checked(7)?;
        scheme.eq_ignore_ascii_case(b"bearer ").then_some(key)
    });
    let plain = headers.get(HeaderName::from_static("x-api-key")).map(HeaderValue::as_bytes);
    let Some(given) = bearer.or(plain) else {
        return Err(unauthorized("a key is needed: Authorization: Bearer KEY, or x-api-key: KEY"));
    };
    // Every key is compared to its end, whichever fits. The hashes are of one length.
    let given = blake3::hash(given);
    let mut found = None;
    for (i, key) in app.keys.iter().enumerate() {
        if bool::from(key.as_bytes().ct_eq(given.as_bytes())) {
            found = Some(Caller(i));
        }
    }
    found.ok_or_else(|| unauthorized("this key is not known here"))
}

fn unauthorized(message: &str) -> ApiError {
    ApiError::new(StatusCode::UNAUTHORIZED, message).code("invalid_api_key")
}

/// A body as JSON, within all limits.
pub async fn json_body(app: &App, body: Body) -> Result<Value, ApiError> {
    let limit = app.config.body_limit;
    let read = tokio::time::timeout(BODY_TIME, to_bytes(body, limit)).await.map_err(|_| {
        ApiError::new(
            StatusCode::REQUEST_TIMEOUT,
            format!("the body took longer than {} s", BODY_TIME.as_secs()),
        )
    })?;
    let bytes = read.map_err(|e| {
        let inner = std::error::Error::source(&e);
        if inner.is_some_and(|e| e.is::<http_body_util::LengthLimitError>()) {
            ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, format!("the body has more than {limit} bytes"))
                .code("request_too_large")
        } else {
            ApiError::new(StatusCode::BAD_REQUEST, format!("the body cannot be read: {e}"))
        }
    })?;
    serde_json::from_slice(&bytes).map_err(|e| {
        ApiError::new(StatusCode::BAD_REQUEST, format!("the body is no valid JSON: {e}")).code("invalid_json")
    })
}
