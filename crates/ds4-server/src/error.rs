//! Errors as each API's clients expect them.

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use ds4_engine::{EngineError, Rejected};
use serde_json::{Value, json};

/// Which family of APIs a request belongs to: their errors differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dialect {
    OpenAi,
    Anthropic,
}

impl Dialect {
    pub fn of_path(path: &str) -> Self {
        if path.starts_with("/v1/messages") { Dialect::Anthropic } else { Dialect::OpenAi }
    }
}

/// What a client is told instead of an answer.
#[derive(Clone, Debug, PartialEq)]
pub struct ApiError {
    pub status: StatusCode,
    pub message: String,
    /// The field that is meant, as a path: `messages[0].content`.
    pub param: Option<String>,
    pub code: Option<&'static str>,
    /// Seconds after which another try is worth it.
    pub retry_after: Option<u64>,
    /// The prompt's length and the longest that is taken, where that is the trouble.
    pub tokens: Option<(usize, usize)>,
}

impl ApiError {
    pub fn new(status: StatusCode, message: impl Into<String>) -> Self {
        ApiError { status, message: message.into(), param: None, code: None, retry_after: None, tokens: None }
    }

    /// A field that cannot be honoured.
    pub fn invalid(param: &str, message: impl Into<String>) -> Self {
        let mut e = Self::new(StatusCode::BAD_REQUEST, message);
        e.param = Some(param.to_string());
        e
    }

    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, message)
    }

    pub fn code(mut self, code: &'static str) -> Self {
        self.code = Some(code);
        self
    }

    fn retry_after(mut self, seconds: u64) -> Self {
        self.retry_after = Some(seconds);
        self
    }

    pub fn context_exceeded(prompt: usize, context: usize) -> Self {
        let longest = context.saturating_sub(1);
        let mut e = Self::invalid(
            "messages",
            format!(
                "This model's maximum context length is {context} tokens, of which one is the answer's. However, \
                 your prompt has {prompt} tokens. Please shorten it, or start the server with a larger --ctx."
            ),
        )
        .code("context_length_exceeded");
        e.tokens = Some((prompt, longest));
        e
    }

    /// The error's `type` in OpenAI's words.
    fn openai_type(&self) -> &'static str {
        match self.status.as_u16() {
            401 => "authentication_error",
            403 => "permission_error",
            404 => "not_found_error",
            429 => "rate_limit_error",
            503 => "service_unavailable_error",
            400..500 => "invalid_request_error",
            _ => "server_error",
        }
    }

    fn anthropic_type(&self) -> &'static str {
        match self.status.as_u16() {
            401 => "authentication_error",
            403 => "permission_error",
            404 => "not_found_error",
            413 => "request_too_large",
            429 => "rate_limit_error",
            503 => "overloaded_error",
            504 => "timeout_error",
            400..500 => "invalid_request_error",
            _ => "api_error",
        }
    }

    /// The body, which is also what a stream carries in-band.
    pub fn body(&self, dialect: Dialect) -> Value {
        match dialect {
            Dialect::OpenAi => json!({"error": self.openai_object()}),
            Dialect::Anthropic => {
                let message = match self.tokens {
                    // The words that Anthropic's clients look for to shorten a conversation.
                    Some((prompt, longest)) => {
                        format!("prompt is too long: {prompt} tokens > {longest} maximum")
                    }
                    None => self.message.clone(),
                };
                let mut error = json!({"type": self.anthropic_type(), "message": message});
                if let Some(param) = &self.param {
                    error["param"] = json!(param);
                }
                json!({"type": "error", "error": error})
            }
        }
    }

    pub fn openai_object(&self) -> Value {
        json!({
            "message": self.message,
            "type": self.openai_type(),
            "param": self.param,
            "code": self.code,
        })
    }

    pub fn into_response(self, dialect: Dialect) -> Response {
        let mut response = (self.status, Json(self.body(dialect))).into_response();
        let headers = response.headers_mut();
        if let Some(seconds) = self.retry_after {
            headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}

impl From<Rejected> for ApiError {
    fn from(r: Rejected) -> Self {
        let message = r.to_string();
        let unavailable = |m| ApiError::new(StatusCode::SERVICE_UNAVAILABLE, m);
        match r {
            Rejected::QueueFull { retry_after, .. } => ApiError::new(StatusCode::TOO_MANY_REQUESTS, message)
                .code("queue_full")
                .retry_after(retry_after.as_secs().max(1)),
            Rejected::ContextExceeded { prompt, context } => ApiError::context_exceeded(prompt, context),
            Rejected::Invalid { field, .. } => ApiError::invalid(field_name(field), message),
            Rejected::Loading => unavailable(message).code("model_loading").retry_after(2),
            Rejected::Unavailable { .. } => unavailable(message).code("unavailable").retry_after(5),
            Rejected::Faulted { .. } => unavailable(message).code("faulted"),
            Rejected::ShuttingDown => unavailable(message).code("shutting_down").retry_after(10),
        }
    }
}

/// The engine's name of a field in the APIs' words.
fn field_name(field: &'static str) -> &'static str {
    match field {
        "constraint" => "response_format",
        "prompt" => "messages",
        "stop_tokens" => "stop",
        other => other,
    }
}

impl From<EngineError> for ApiError {
    fn from(e: EngineError) -> Self {
        let message = e.to_string();
        match e {
            EngineError::DeadlineExceeded => {
                ApiError::new(StatusCode::GATEWAY_TIMEOUT, message).code("deadline_exceeded")
            }
            EngineError::ShuttingDown => {
                ApiError::new(StatusCode::SERVICE_UNAVAILABLE, message).code("shutting_down").retry_after(10)
            }
            EngineError::Stage(_) => {
                ApiError::new(StatusCode::SERVICE_UNAVAILABLE, message).code("engine_failed").retry_after(5)
            }
            EngineError::Constraint { .. } => ApiError::internal(message).code("constraint_failed"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn context_overflow_names_both_numbers_in_each_shape() {
        let e = ApiError::from(Rejected::ContextExceeded { prompt: 700, context: 512 });
        let openai = e.body(Dialect::OpenAi);
        assert_eq!(openai["error"]["code"], "context_length_exceeded");
        assert_eq!(openai["error"]["type"], "invalid_request_error");
        let said = openai["error"]["message"].as_str().unwrap();
        assert!(said.contains("700") && said.contains("512"), "{said}");
        let anthropic = e.body(Dialect::Anthropic);
        assert_eq!(anthropic["error"]["message"], "prompt is too long: 700 tokens > 511 maximum");
        assert_eq!(e.status, 400);
    }

    #[test]
    fn a_full_queue_says_when_to_come_back() {
        let retry_after = std::time::Duration::from_secs(7);
        let e = ApiError::from(Rejected::QueueFull { waiting: 4, limit: 4, retry_after });
        let r = e.into_response(Dialect::OpenAi);
        assert_eq!((r.status().as_u16(), r.headers()["retry-after"].to_str().unwrap()), (429, "7"));
    }
}
