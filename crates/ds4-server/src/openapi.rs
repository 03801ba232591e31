//! `GET /openapi.json`: what the server takes and answers, in short. `docs/server.md` has every field.

use axum::Json;
use serde_json::{Map, Value, json};

pub async fn document() -> Json<Value> {
    Json(build())
}

fn build() -> Value {
    let mut paths = Map::new();
    let mut add = |path: &str, method: &str, operation: Value| {
        if let Some(item) = paths.entry(path).or_insert_with(|| json!({})).as_object_mut() {
            item.insert(method.to_string(), operation);
        }
    };
    add("/", "get", plain("page", "The chat page.", "text/html"));
    add("/health", "get", get("health", "Whether requests are served now.", &[200, 503]));
    add("/status", "get", get("status", "Sessions, memory plan, pipeline, counters.", &[200, 401]));
    add("/metrics", "get", plain("metrics", "Figures in Prometheus' text format.", "text/plain"));
    add("/openapi.json", "get", get("openapi", "This document.", &[200]));
    add("/v1/models", "get", get("listModels", "The model.", &[200, 401]));
    add("/v1/models/{id}", "get", with_id(get("getModel", "The model by name.", &[200, 401, 404])));
    for (path, name, what) in [
        ("/v1/chat/completions", "chatCompletions", "A chat's next message (OpenAI Chat Completions)."),
        ("/v1/completions", "completions", "How a text goes on (OpenAI Completions)."),
        ("/v1/responses", "responses", "A response (OpenAI Responses)."),
        ("/v1/messages", "messages", "A message (Anthropic Messages)."),
        ("/v1/messages/count_tokens", "countTokens", "Tokens that a message's prompt has."),
        ("/tokenize", "tokenize", "A text's token ids."),
        ("/detokenize", "detokenize", "The text of token ids."),
        ("/apply-template", "applyTemplate", "The prompt that a chat is answered from."),
    ] {
        add(path, "post", post(name, what, schema(path)));
    }
    let response = |name: &str, what: &str| with_id(get(name, what, &[200, 401, 404]));
    add("/v1/responses/{id}", "get", response("getResponse", "A stored response."));
    add("/v1/responses/{id}", "delete", response("deleteResponse", "Forgets a stored response."));
    json!({
        "openapi": "3.1.0",
        "info": {"title": "ds4", "version": env!("CARGO_PKG_VERSION"), "description": "DeepSeek V4 models over HTTP."},
        "security": [{}, {"bearer": []}, {"key": []}],
        "paths": paths,
        "components": {
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
            "schemas": {"Error": {
                "type": "object",
                "properties": {"error": {
                    "type": "object",
                    "properties": {
                        "message": {"type": "string"},
                        "type": {"type": "string"},
                        "param": {"type": ["string", "null"]},
                        "code": {"type": ["string", "null"]},
                    },
                    "required": ["message", "type"],
                }},
                "required": ["error"],
            }},
        },
    })
}

fn answer(status: u16) -> Value {
    let what = match status {
        200 => "Done.",
        400 => "The request is wrong: `param` names the field.",
        401 => "The API key is missing or wrong.",
        404 => "There is no such thing.",
        413 => "The body is too large.",
        429 => "Too many requests wait: `Retry-After` says when to come back.",
        _ => "No request is served now: `Retry-After` says when to come back.",
    };
    let schema = if status < 300 { json!({}) } else { json!({"$ref": "#/components/schemas/Error"}) };
    // Health answers with its own words at 503 as well.
    let schema = if status == 503 { json!({}) } else { schema };
    json!({"description": what, "content": {"application/json": {"schema": schema}}})
}

fn get(name: &str, what: &str, statuses: &[u16]) -> Value {
    let responses: Map<String, Value> = statuses.iter().map(|s| (s.to_string(), answer(*s))).collect();
    json!({"operationId": name, "summary": what, "responses": responses})
}

fn plain(name: &str, what: &str, kind: &str) -> Value {
    let mut content = Map::new();
    content.insert(kind.to_string(), json!({"schema": {"type": "string"}}));
    json!({"operationId": name, "summary": what, "responses": {
        "200": {"description": "Done.", "content": content},
        "401": answer(401),
    }})
}

fn with_id(mut operation: Value) -> Value {
    operation["parameters"] =
        json!([{"name": "id", "in": "path", "required": true, "schema": {"type": "string", "minLength": 1}}]);
    operation
}

fn post(name: &str, what: &str, schema: Value) -> Value {
    let mut operation = get(name, what, &[200, 400, 401, 413, 429, 503]);
    operation["requestBody"] = json!({"required": true, "content": {"application/json": {"schema": schema}}});
    let streams = name.ends_with("ompletions") || matches!(name, "responses" | "messages");
    if streams {
        operation["responses"]["200"]["content"]["text/event-stream"] = json!({"schema": {"type": "string"}});
    }
    operation
}

/// The fields that matter most; others are named in the documentation and refused by name where they are not known.
fn schema(path: &str) -> Value {
    let text = json!({"type": "string"});
    let message = |roles: Value| {
        json!({
            "type": "object",
            "properties": {"role": {"enum": roles}, "content": {"type": "string"}},
            "required": ["role", "content"],
        })
    };
    let count = |most: u32| json!({"type": "integer", "minimum": 1, "maximum": most});
    let unit = |top: f32| json!({"type": "number", "minimum": 0, "maximum": top});
    let (properties, required) = match path {
        "/v1/chat/completions" | "/apply-template" => (
            json!({
                "model": text,
                "messages": {"type": "array", "minItems": 1, "items": message(json!(["system", "user", "assistant"]))},
                "max_tokens": count(64),
                "temperature": unit(2.0),
                "top_p": unit(1.0),
                "seed": {"type": "integer"},
                "stop": {"anyOf": [text, {"type": "array", "items": text, "maxItems": 4}]},
                "stream": {"type": "boolean"},
                "logprobs": {"type": "boolean"},
                "reasoning_effort": {"enum": ["none", "minimal", "low", "medium", "high", "xhigh", "max"]},
                "tools": {"type": "array", "items": {"type": "object"}},
                "tool_choice": {"anyOf": [{"enum": ["none", "auto", "required"]}, {"type": "object"}]},
                "response_format": {"type": "object"},
            }),
            json!(["messages"]),
        ),
        "/v1/completions" => (
            json!({
                "model": text,
                "prompt": text,
                "suffix": text,
                "echo": {"type": "boolean"},
                "max_tokens": count(64),
                "temperature": unit(2.0),
                "stream": {"type": "boolean"},
            }),
            json!(["prompt"]),
        ),
        "/v1/responses" => (
            json!({
                "model": text,
                "input": {"anyOf": [text, {"type": "array", "items": {"type": "object"}}]},
                "instructions": text,
                "max_output_tokens": count(64),
                "previous_response_id": text,
                "stream": {"type": "boolean"},
                "tools": {"type": "array", "items": {"type": "object"}},
            }),
            json!(["input"]),
        ),
        "/v1/messages" | "/v1/messages/count_tokens" => (
            json!({
                "model": text,
                "messages": {"type": "array", "minItems": 1, "items": message(json!(["user", "assistant"]))},
                "system": text,
                "max_tokens": count(64),
                "temperature": unit(1.0),
                "stream": {"type": "boolean"},
                "tools": {"type": "array", "items": {"type": "object"}},
            }),
            if path == "/v1/messages" { json!(["messages", "max_tokens"]) } else { json!(["messages"]) },
        ),
        "/tokenize" => (json!({"content": text, "with_pieces": {"type": "boolean"}}), json!(["content"])),
        _ => (
            json!({"tokens": {"type": "array", "items": {"type": "integer", "minimum": 0}}}),
            json!(["tokens"]),
        ),
    };
    json!({"type": "object", "properties": properties, "required": required})
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_operation_documents_its_statuses() {
        let document = build();
        let paths = document["paths"].as_object().unwrap();
        assert_eq!(paths.len(), 16);
        for (path, item) in paths {
            for (method, operation) in item.as_object().unwrap() {
                assert!(operation["responses"]["200"].is_object(), "{method} {path}");
                assert_eq!(operation["requestBody"].is_object(), method == "post", "{method} {path}");
            }
        }
    }
}
