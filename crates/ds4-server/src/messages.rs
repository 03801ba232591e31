//! `POST /v1/messages` and `/v1/messages/count_tokens`: Anthropic's API.

use std::sync::Arc;

use axum::Json;
use axum::response::{IntoResponse, Response};
use ds4_text::chat::{FunctionCall, Message, Role, ToolCall};
use serde_json::{Value, json};

use crate::App;
use crate::answer::{Reason, Said, Usage};
use crate::ask::{
    Ask, Draw, Format, OfferedTool, Thinking, ToolChoice, ToolKind, Tools, content_text, take_format,
};
use crate::chat::check_format;
use crate::error::{ApiError, Dialect};
use crate::fields::{Fields, wrong};
use crate::memory::{new_id, seal, unseal};
use crate::stream::{self, Frames, Voice};

/// Fields that say who asks, or ask for what is so anyway. `docs/server.md` lists them.
const INFORM: &[&str] =
    &["metadata", "service_tier", "cache_control", "context_management", "inference_geo", "speed"];

struct MessagesRequest {
    ask: Ask,
    model: String,
    stream: bool,
    /// Whether thoughts go out sealed instead of readable.
    sealed: bool,
    /// Whether the request speaks of caching; only then is what was reused told apart.
    caching: bool,
}

impl MessagesRequest {
    fn read(body: Value, app: &App, count: bool) -> Result<Self, ApiError> {
        let caching = mentions_caching(&body);
        let mut f = Fields::of(body, "")?;
        let model = f.string("model")?.unwrap_or_else(|| app.model.name.clone());
        let list = f.list("messages")?.ok_or_else(|| f.missing("messages"))?;
        if list.is_empty() {
            return Err(ApiError::invalid("messages", "messages: at least one is needed"));
        }
        let system = system(f.value("system"))?;
        let mut draw = Draw::take(&mut f, app)?;
        draw.take_stop(&mut f, "stop_sequences")?;
        draw.max_tokens = f.count("max_tokens", 1, usize::MAX)?;
        if draw.max_tokens.is_none() && !count {
            return Err(f.missing("max_tokens"));
        }
        let tools = tools(&mut f)?;
        let mut thinking = Thinking::OFF;
        let mut sealed = false;
        if let Some(mut t) = f.object("thinking")? {
            let kind = t.need_word("type", &["enabled", "disabled", "adaptive"])?;
            thinking = Thinking { on: kind != "disabled", effort: app.config.thinking.effort };
            t.count("budget_tokens", 1, usize::MAX)?;
            sealed = t.word("display", &["summarized", "omitted", "full"])? == Some("omitted");
            t.end()?;
        }
        let mut format = Format::Text;
        if let Some(mut o) = f.object("output_config")? {
            if let Some(word) = o.word("effort", &Thinking::WORDS)? {
                // It says how deep, not whether.
                thinking.effort = Thinking::of_word(word).effort;
            }
            format = take_format(&mut o, "format", true)?;
            o.inform(&["task_budget"]);
            o.end()?;
        }
        if f.value("output_format").is_some() {
            return Err(ApiError::invalid("output_format", "output_format: use output_config.format"));
        }
        check_format(&format, &tools, "output_config.format")?;
        let stream = f.bool("stream")?.unwrap_or(false);
        f.inform(INFORM);
        f.end()?;
        let messages = messages(list)?;
        let ask = Ask { system, messages, tools, thinking, format, draw };
        Ok(MessagesRequest { ask, model, stream, sealed, caching })
    }
}

/// Whether `cache_control` stands anywhere.
fn mentions_caching(value: &Value) -> bool {
    match value {
        Value::Object(o) => o.contains_key("cache_control") || o.values().any(mentions_caching),
        Value::Array(a) => a.iter().any(mentions_caching),
        _ => false,
    }
}

/// A system block that some clients put first: billing data with a number that is another one in every request. It is no
/// instruction, and would make every prompt a new one.
const BILLING: &str = "x-anthropic-billing-header";

fn system(value: Option<Value>) -> Result<Vec<String>, ApiError> {
    let blocks = match value {
        None => return Ok(Vec::new()),
        Some(Value::String(s)) => vec![s],
        Some(Value::Array(list)) => {
            let text = |(i, v)| {
                let name = format!("system[{i}]");
                content_text(&name, Some(Value::Array(vec![v])))
            };
            list.into_iter().enumerate().map(text).filter_map(Result::transpose).collect::<Result<_, _>>()?
        }
        Some(other) => return Err(wrong("system", "a string or a list of text blocks", &other)),
    };
    Ok(blocks.into_iter().filter(|b| !b.trim_start().starts_with(BILLING)).collect())
}

fn tools(f: &mut Fields) -> Result<Tools, ApiError> {
    let mut tools = Tools::default();
    for (at, tool) in f.list("tools")?.unwrap_or_default() {
        let mut t = Fields::of(tool, &at)?;
        let kind = t.string("type")?;
        if kind.as_deref().is_some_and(|k| k != "custom") {
            let param = format!("{at}.type");
            let message = format!(
                "{param}: {:?} would run on the server, which has no tools of its own",
                kind.unwrap_or_default()
            );
            return Err(ApiError::invalid(&param, message));
        }
        let name = t.need_string("name")?;
        let mut function = json!({"name": name});
        if let Some(d) = t.string("description")? {
            function["description"] = json!(d);
        }
        function["parameters"] = t.object("input_schema")?.ok_or_else(|| t.missing("input_schema"))?.rest();
        let mut checked = Fields::of(function, &at)?;
        let offered = OfferedTool::function(&mut checked)?;
        t.inform(&[
            "cache_control",
            "strict",
            "input_examples",
            "defer_loading",
            "allowed_callers",
            "eager_input_streaming",
        ]);
        t.end()?;
        tools.add(&at, OfferedTool { kind: ToolKind::Function, ..offered })?;
    }
    if let Some(mut c) = f.object("tool_choice")? {
        tools.choice = match c.need_word("type", &["auto", "any", "tool", "none"])? {
            "auto" => ToolChoice::Auto,
            "any" => ToolChoice::Required,
            "none" => ToolChoice::None,
            _ => ToolChoice::Named(vec![c.need_string("name")?]),
        };
        tools.parallel = !c.bool("disable_parallel_tool_use")?.unwrap_or(false);
        c.end()?;
        tools.check("tool_choice")?;
    }
    Ok(tools)
}

fn messages(list: Vec<(String, Value)>) -> Result<Vec<Message>, ApiError> {
    let mut messages: Vec<Message> = Vec::new();
    for (at, value) in list {
        let mut f = Fields::of(value, &at)?;
        let role = f.need_word("role", &["user", "assistant", "system"])?;
        let name = f.name("content");
        let content = f.value("content").ok_or_else(|| f.missing("content"))?;
        f.inform(&["id", "type", "cache_control"]);
        f.end()?;
        let blocks = match content {
            Value::String(s) => vec![json!({"type": "text", "text": s})],
            Value::Array(list) => list,
            other => return Err(wrong(&name, "a string or a list of blocks", &other)),
        };
        if role == "assistant" {
            let m = assistant(&name, blocks)?;
            match messages.last_mut() {
                // Two turns in a row are one.
                Some(last) if last.role == Role::Assistant => {
                    last.content.get_or_insert_default().push_str(m.content.as_deref().unwrap_or(""));
                    last.tool_calls.extend(m.tool_calls);
                }
                _ => messages.push(m),
            }
        } else {
            user(&name, blocks, &mut messages)?;
        }
    }
    Ok(messages)
}

fn assistant(name: &str, blocks: Vec<Value>) -> Result<Message, ApiError> {
    let mut m = Message::assistant("");
    let mut texts = Vec::new();
    for (i, block) in blocks.into_iter().enumerate() {
        let at = format!("{name}[{i}]");
        let mut b = Fields::of(block, &at)?;
        match b.need_word("type", &["text", "thinking", "redacted_thinking", "tool_use"])? {
            "text" => texts.push(b.need_string("text")?),
            "thinking" => {
                let text = b.string("thinking")?.unwrap_or_default();
                let signature = b.string("signature")?.unwrap_or_default();
                let text = if text.is_empty() { unseal(&signature).unwrap_or_default() } else { text };
                m.reasoning_content.get_or_insert_default().push_str(&text);
            }
            "redacted_thinking" => {
                let text = b.string("data")?.and_then(|d| unseal(&d)).unwrap_or_default();
                m.reasoning_content.get_or_insert_default().push_str(&text);
            }
            _ => {
                let id = b.need_string("id")?;
                let name = b.need_string("name")?;
                let input = b.object("input")?.ok_or_else(|| b.missing("input"))?.rest();
                let function = FunctionCall { name, arguments: input.to_string() };
                m.tool_calls.push(ToolCall { id, function });
            }
        }
        b.inform(&["cache_control", "citations", "caller"]);
        b.end()?;
    }
    m.content = Some(texts.concat());
    Ok(m)
}

fn user(name: &str, blocks: Vec<Value>, messages: &mut Vec<Message>) -> Result<(), ApiError> {
    let mut texts = Vec::new();
    for (i, block) in blocks.into_iter().enumerate() {
        let at = format!("{name}[{i}]");
        if block.get("type").and_then(Value::as_str) != Some("tool_result") {
            texts.extend(content_text(name, Some(Value::Array(vec![block]))).map_err(|mut e| {
                // The list had this block alone.
                e.param = e.param.map(|p| p.replacen("[0]", &format!("[{i}]"), 1));
                e
            })?);
            continue;
        }
        let mut b = Fields::of(block, &at)?;
        b.inform(&["type", "cache_control"]);
        let id = b.need_string("tool_use_id")?;
        let mut text = content_text(&b.name("content"), b.value("content"))?.unwrap_or_default();
        if b.bool("is_error")?.unwrap_or(false) {
            text = format!("Error: {text}");
        }
        b.end()?;
        if !texts.is_empty() {
            messages.push(Message::user(std::mem::take(&mut texts).join("\n\n")));
        }
        let mut m = Message::new(Role::Tool, text);
        m.tool_call_id = Some(id);
        messages.push(m);
    }
    if !texts.is_empty() {
        messages.push(Message::user(texts.join("\n\n")));
    }
    Ok(())
}

/// Tokens of the prompt that the same body would be answered from.
pub async fn count(app: Arc<App>, body: Value) -> Result<Response, ApiError> {
    let request = MessagesRequest::read(body, &app, true)?;
    let tokens = app.count(request.ask).await?;
    Ok(Json(json!({"input_tokens": tokens})).into_response())
}

pub async fn handle(app: Arc<App>, body: Value) -> Result<Response, ApiError> {
    let request = MessagesRequest::read(body, &app, false)?;
    let head =
        Head { id: new_id("msg_"), model: request.model, sealed: request.sealed, caching: request.caching };
    let (answers, prompt) = app.begin_counted(request.ask, "toolu_").await?;
    if request.stream {
        let voice = MessagesVoice {
            head,
            prompt,
            block: None,
            blocks: 0,
            sealed: String::new(),
            ending: None,
            broken: false,
        };
        return Ok(stream::respond(&app, answers, voice));
    }
    let mut wholes = stream::collect(answers, 1).await?;
    let Some((w, ending)) = wholes.pop() else { return Err(ApiError::internal("no answer")) };
    let mut content = Vec::new();
    if !w.reasoning.is_empty() {
        content.push(head.thinking(&w.reasoning));
    }
    if !w.content.is_empty() {
        content.push(json!({"type": "text", "text": w.content}));
    }
    for call in w.calls {
        // A call that was cut has no input that could be told; the reason says what happened.
        if let Ok(input) = serde_json::from_str::<Value>(&call.arguments)
            && call.complete
        {
            content.push(json!({"type": "tool_use", "id": call.id, "name": call.name, "input": input}));
        }
    }
    let mut body = head.object();
    body["content"] = json!(content);
    let (reason, stop) = stop_reason(&ending.reason);
    body["stop_reason"] = json!(reason);
    body["stop_sequence"] = json!(stop);
    body["usage"] = head.usage(&ending.usage);
    Ok(Json(body).into_response())
}

fn stop_reason(reason: &Reason) -> (&'static str, Option<&str>) {
    match reason {
        Reason::Stop => ("end_turn", None),
        Reason::StopString(s) => ("stop_sequence", Some(s)),
        Reason::Length => ("max_tokens", None),
        Reason::Calls => ("tool_use", None),
    }
}

struct Head {
    id: String,
    model: String,
    sealed: bool,
    caching: bool,
}

impl Head {
    fn object(&self) -> Value {
        json!({
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": [],
            "stop_reason": null,
            "stop_sequence": null,
        })
    }

    fn thinking(&self, text: &str) -> Value {
        let shown = if self.sealed { "" } else { text };
        json!({"type": "thinking", "thinking": shown, "signature": seal(if self.sealed { text } else { "" })})
    }

    /// What was reused is told apart only to clients that speak of caching; the sum is the prompt in any case.
    fn usage(&self, u: &Usage) -> Value {
        let reused = if self.caching { u.reused } else { 0 };
        json!({
            "input_tokens": u.prompt - reused.min(u.prompt),
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": reused,
            "output_tokens": u.completion,
        })
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Block {
    Thinking,
    Text,
    Call(usize),
}

struct MessagesVoice {
    head: Head,
    prompt: usize,
    /// The open block.
    block: Option<Block>,
    /// Blocks begun so far.
    blocks: usize,
    /// Thoughts that go out sealed.
    sealed: String,
    ending: Option<crate::answer::Ending>,
    broken: bool,
}

impl MessagesVoice {
    fn event(&self, name: &str, mut data: Value, out: &mut Frames) {
        data["type"] = json!(name);
        out.event(name, &data);
    }

    fn open(&mut self, block: Block, content: Value, out: &mut Frames) {
        if self.block == Some(block) {
            return;
        }
        self.close(out);
        self.block = Some(block);
        self.event(
            "content_block_start",
            json!({"type": "", "index": self.blocks, "content_block": content}),
            out,
        );
        self.blocks += 1;
    }

    fn delta(&self, delta: Value, out: &mut Frames) {
        let data = json!({"type": "", "index": self.blocks.saturating_sub(1), "delta": delta});
        self.event("content_block_delta", data, out);
    }

    fn close(&mut self, out: &mut Frames) {
        let Some(block) = self.block.take() else { return };
        if block == Block::Thinking {
            let signature = seal(&std::mem::take(&mut self.sealed));
            self.delta(json!({"type": "signature_delta", "signature": signature}), out);
        }
        self.event("content_block_stop", json!({"type": "", "index": self.blocks.saturating_sub(1)}), out);
    }
}

impl Voice for MessagesVoice {
    fn begin(&mut self, out: &mut Frames) {
        let mut message = self.head.object();
        message["usage"] = self.head.usage(&Usage { prompt: self.prompt, ..Usage::default() });
        self.event("message_start", json!({"type": "", "message": message}), out);
        self.keepalive(out);
    }

    fn say(&mut self, _: usize, said: Said, out: &mut Frames) {
        match said {
            Said::Reasoning(text) => {
                self.open(Block::Thinking, json!({"type": "thinking", "thinking": "", "signature": ""}), out);
                if self.head.sealed {
                    self.sealed.push_str(&text);
                } else {
                    self.delta(json!({"type": "thinking_delta", "thinking": text}), out);
                }
            }
            Said::Content { text, .. } if text.is_empty() => {}
            Said::Content { text, .. } => {
                self.open(Block::Text, json!({"type": "text", "text": ""}), out);
                self.delta(json!({"type": "text_delta", "text": text}), out);
            }
            Said::CallStart { index, id, name } => {
                let block = json!({"type": "tool_use", "id": id, "name": name, "input": {}});
                self.open(Block::Call(index), block, out);
            }
            Said::CallArguments { json: text, .. } => {
                self.delta(json!({"type": "input_json_delta", "partial_json": text}), out);
            }
            Said::CallEnd { .. } => self.close(out),
            Said::Prompt(_) => {}
            Said::End(ending) => self.ending = Some(ending),
            Said::Failed(e) => {
                self.broken = true;
                out.event("error", &e.body(Dialect::Anthropic));
            }
        }
    }

    fn end(&mut self, out: &mut Frames) {
        if self.broken {
            return;
        }
        self.close(out);
        let Some(ending) = self.ending.take() else { return };
        let (reason, stop) = stop_reason(&ending.reason);
        let delta = json!({"stop_reason": reason, "stop_sequence": stop});
        self.event(
            "message_delta",
            json!({"type": "", "delta": delta, "usage": self.head.usage(&ending.usage)}),
            out,
        );
        self.event("message_stop", json!({"type": ""}), out);
    }

    fn keepalive(&self, out: &mut Frames) {
        self.event("ping", json!({"type": ""}), out);
    }
}
