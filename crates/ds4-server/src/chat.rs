//! `POST /v1/chat/completions`.

use std::sync::Arc;

use axum::Json;
use axum::response::{IntoResponse, Response};
use ds4_text::chat::{FunctionCall, Message, Role, ToolCall};
use serde_json::{Map, Value, json};

use crate::answer::{Reason, Said, TokenProb, Usage};
use crate::ask::{
    Ask, CHOICES_MAX, Draw, Format, OfferedTool, Thinking, ToolChoice, ToolKind, Tools, content_text,
    take_format,
};
use crate::error::{ApiError, Dialect};
use crate::fields::{Fields, wrong};
use crate::memory::new_id;
use crate::stream::{self, Frames, Voice};
use crate::{App, now};

/// Fields that say who asks, or ask for what is so anyway. `docs/server.md` lists them.
const INFORM: &[&str] = &[
    "metadata",
    "user",
    "store",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "service_tier",
    "verbosity",
];

/// A request, read.
pub struct ChatRequest {
    pub ask: Ask,
    pub model: String,
    pub stream: bool,
    pub include_usage: bool,
    /// Whether log-probabilities were asked for.
    probs: bool,
    /// Asked with `functions` and `function_call`, and answered alike.
    legacy: bool,
}

impl ChatRequest {
    pub fn read(body: Value, app: &App) -> Result<Self, ApiError> {
        let mut f = Fields::of(body, "")?;
        let model = f.string("model")?.unwrap_or_else(|| app.model.name.clone());
        let list = f.list("messages")?.ok_or_else(|| f.missing("messages"))?;
        if list.is_empty() {
            return Err(ApiError::invalid("messages", "messages: at least one is needed"));
        }
        let (system, messages) = messages(list)?;
        let mut draw = Draw::take(&mut f, app)?;
        draw.take_openai(&mut f, app)?;
        draw.take_stop(&mut f, "stop")?;
        draw.choices = f.count("n", 1, CHOICES_MAX)?.unwrap_or(1);
        for key in ["max_tokens", "max_completion_tokens"] {
            if let Some(n) = f.count(key, 1, usize::MAX)? {
                draw.max_tokens = Some(n);
            }
        }
        let probs = f.bool("logprobs")?.unwrap_or(false);
        match f.count("top_logprobs", 0, 20)? {
            Some(k) if !probs && k > 0 => {
                return Err(ApiError::invalid("top_logprobs", "top_logprobs: needs logprobs to be true"));
            }
            k => draw.logprobs = probs.then_some(k.unwrap_or(0)),
        }
        let (tools, legacy) = take_tools(&mut f)?;
        let format = take_format(&mut f, "response_format", false)?;
        check_format(&format, &tools, "response_format")?;
        let thinking = take_thinking(&mut f, app)?;
        let stream = f.bool("stream")?.unwrap_or(false);
        let mut include_usage = false;
        if let Some(mut options) = f.object("stream_options")? {
            if !stream {
                return Err(ApiError::invalid("stream_options", "stream_options: only with stream"));
            }
            include_usage = options.bool("include_usage")?.unwrap_or(false);
            options.inform(&["include_obfuscation"]);
            options.end()?;
        }
        f.only("modalities", &[json!(["text"])], "modalities: this model writes text alone")?;
        f.inform(INFORM);
        f.end()?;
        let ask = Ask { system, messages, tools, thinking, format, draw };
        Ok(ChatRequest { ask, model, stream, include_usage, probs, legacy })
    }
}

/// A format and a free choice of tools exclude each other: one grammar holds for the whole answer.
pub fn check_format(format: &Format, tools: &Tools, param: &str) -> Result<(), ApiError> {
    let free = tools.choice != ToolChoice::None && !tools.offered.is_empty();
    match format {
        Format::Text => Ok(()),
        _ if free => Err(ApiError::invalid(
            param,
            format!("{param}: not together with tools that may be called; set tool_choice to \"none\""),
        )),
        _ => Ok(()),
    }
}

/// `reasoning_effort`, `thinking`, `chat_template_kwargs`: three ways to say it; the last one that is there counts.
fn take_thinking(f: &mut Fields, app: &App) -> Result<Thinking, ApiError> {
    let mut thinking = app.config.thinking;
    if let Some(word) = f.word("reasoning_effort", &Thinking::WORDS)? {
        thinking = Thinking::of_word(word);
    }
    if let Some(mut t) = f.object("thinking")? {
        thinking.on = t.need_word("type", &["enabled", "disabled"])? == "enabled";
        t.end()?;
    }
    if let Some(mut k) = f.object("chat_template_kwargs")? {
        for key in ["thinking", "enable_thinking"] {
            thinking.on = k.bool(key)?.unwrap_or(thinking.on);
        }
        if let Some(word) = k.word("reasoning_effort", &Thinking::WORDS)? {
            thinking = Thinking::of_word(word);
        }
        k.end()?;
    }
    Ok(thinking)
}

fn take_tools(f: &mut Fields) -> Result<(Tools, bool), ApiError> {
    let mut tools = Tools::default();
    for (at, tool) in f.list("tools")?.unwrap_or_default() {
        let mut t = Fields::of(tool, &at)?;
        let kind = t.need_word("type", &["function", "custom"])?;
        let mut inner = t.object(kind)?.ok_or_else(|| t.missing(kind))?;
        let offered = match kind {
            "function" => OfferedTool::function(&mut inner)?,
            _ => OfferedTool::custom(&mut inner)?,
        };
        inner.end()?;
        t.inform(&["cache_control"]);
        t.end()?;
        tools.add(&at, offered)?;
    }
    let functions = f.list("functions")?.unwrap_or_default();
    let legacy = !functions.is_empty();
    for (at, function) in functions {
        let mut inner = Fields::of(function, &at)?;
        let offered = OfferedTool::function(&mut inner)?;
        inner.end()?;
        tools.add(&at, offered)?;
    }
    if let Some(choice) = f.value("tool_choice") {
        tools.choice = choice_of(choice, "tool_choice")?;
        tools.check("tool_choice")?;
    }
    if let Some(choice) = f.value("function_call") {
        tools.choice = match choice {
            Value::Object(_) => {
                let mut c = Fields::of(choice, "function_call")?;
                let name = c.need_string("name")?;
                c.end()?;
                ToolChoice::Named(vec![name])
            }
            other => choice_of(other, "function_call")?,
        };
        tools.check("function_call")?;
    }
    // The legacy answer has place for one call.
    tools.parallel = f.bool("parallel_tool_calls")?.unwrap_or(true) && !legacy;
    Ok((tools, legacy))
}

/// `tool_choice` in the forms of Chat Completions and Responses.
pub fn choice_of(value: Value, name: &str) -> Result<ToolChoice, ApiError> {
    match &value {
        Value::String(s) => match s.as_str() {
            "none" => Ok(ToolChoice::None),
            "auto" => Ok(ToolChoice::Auto),
            "required" => Ok(ToolChoice::Required),
            _ => Err(wrong(name, "none, auto, required or a named tool", &value)),
        },
        Value::Object(_) => {
            let mut f = Fields::of(value, name)?;
            match f.need_word("type", &["function", "custom", "allowed_tools"])? {
                "allowed_tools" => {
                    let mut a = f.object("allowed_tools")?.unwrap_or(f);
                    let mode = a.need_word("mode", &["auto", "required"])?;
                    let mut names = Vec::new();
                    for (at, tool) in a.list("tools")?.unwrap_or_default() {
                        names.push(tool_name(Fields::of(tool, &at)?)?);
                    }
                    a.end()?;
                    match mode {
                        "required" => Ok(ToolChoice::Named(names)),
                        _ => Err(ApiError::invalid(
                            &format!("{name}.mode"),
                            format!(
                                "{name}.mode: \"auto\" among some tools is not supported; leave the others out"
                            ),
                        )),
                    }
                }
                _ => Ok(ToolChoice::Named(vec![tool_name_rest(f)?])),
            }
        }
        _ => Err(wrong(name, "a string or an object", &value)),
    }
}

fn tool_name(mut f: Fields) -> Result<String, ApiError> {
    f.need_word("type", &["function", "custom"])?;
    tool_name_rest(f)
}

fn tool_name_rest(mut f: Fields) -> Result<String, ApiError> {
    for key in ["function", "custom"] {
        if let Some(mut inner) = f.object(key)? {
            let name = inner.need_string("name")?;
            inner.end()?;
            f.end()?;
            return Ok(name);
        }
    }
    let name = f.need_string("name")?;
    f.end()?;
    Ok(name)
}

/// The instructions in front, and the conversation. Instructions inside the conversation stay where they are, as words of
/// the user's turn: the format has no place for them, and moving them would change everything that was read already.
fn messages(list: Vec<(String, Value)>) -> Result<(Vec<String>, Vec<Message>), ApiError> {
    let (mut system, mut messages) = (Vec::new(), Vec::new());
    for (at, value) in list {
        let mut f = Fields::of(value, &at)?;
        let role = f.need_word("role", &["system", "developer", "user", "assistant", "tool", "function"])?;
        let content = content_text(&f.name("content"), f.value("content"))?;
        let needed = |f: &Fields, content: Option<String>| content.ok_or_else(|| f.missing("content"));
        match role {
            "system" | "developer" if messages.is_empty() => system.push(needed(&f, content)?),
            "system" | "developer" | "user" => messages.push(Message::user(needed(&f, content)?)),
            "tool" => {
                let mut m = Message::new(Role::Tool, needed(&f, content)?);
                m.tool_call_id = Some(f.need_string("tool_call_id")?);
                messages.push(m);
            }
            "function" => messages.push(Message::new(Role::Tool, needed(&f, content)?)),
            _ => messages.push(assistant(&mut f, content)?),
        }
        f.inform(&["name", "cache_control"]);
        f.end()?;
    }
    Ok((system, messages))
}

fn assistant(f: &mut Fields, content: Option<String>) -> Result<Message, ApiError> {
    let mut m = Message::assistant(content.unwrap_or_default());
    for key in ["reasoning_content", "reasoning"] {
        if let Some(text) = f.string(key)? {
            m.reasoning_content = Some(text);
        }
    }
    if let Some(text) = f.string("refusal")? {
        m.content.get_or_insert_default().push_str(&text);
    }
    for (at, call) in f.list("tool_calls")?.unwrap_or_default() {
        let mut c = Fields::of(call, &at)?;
        let id = c.string("id")?.unwrap_or_default();
        let kind = c.word("type", &["function", "custom"])?.unwrap_or("function");
        let mut inner = c.object(kind)?.ok_or_else(|| c.missing(kind))?;
        let name = inner.need_string("name")?;
        let arguments = match kind {
            "function" => inner.string("arguments")?.unwrap_or_default(),
            _ => json!({"input": inner.need_string("input")?}).to_string(),
        };
        inner.end()?;
        c.inform(&["index", "extra_content"]);
        c.end()?;
        m.tool_calls.push(ToolCall { id, function: FunctionCall { name, arguments } });
    }
    if let Some(mut call) = f.object("function_call")? {
        let function = FunctionCall {
            name: call.need_string("name")?,
            arguments: call.string("arguments")?.unwrap_or_default(),
        };
        call.end()?;
        m.tool_calls.push(ToolCall { id: String::new(), function });
    }
    f.inform(&["annotations", "audio", "reasoning_details"]);
    // DeepSeek's own way to say that this message goes on; it does anyway.
    f.only("prefix", &[json!(true), json!(false)], "prefix: expected true or false")?;
    Ok(m)
}

pub async fn handle(app: Arc<App>, body: Value) -> Result<Response, ApiError> {
    let request = ChatRequest::read(body, &app)?;
    let (probs, choices) = (request.probs, request.ask.draw.choices);
    let head = Head {
        id: new_id("chatcmpl-"),
        created: now(),
        model: request.model,
        tools: request.ask.tools.clone(),
        legacy: request.legacy,
        probs,
    };
    let answers = app.begin(request.ask, "call_").await?;
    if request.stream {
        let voice = ChatVoice {
            head,
            choices,
            include_usage: request.include_usage,
            usage: Usage::default(),
            broken: false,
            calls: vec![Vec::new(); choices],
        };
        return Ok(stream::respond(&app, answers, voice));
    }
    let wholes = stream::collect(answers, choices).await?;
    let usage = wholes.iter().fold(Usage::default(), |u, (_, e)| u.join(e.usage));
    let choices: Vec<Value> = wholes
        .into_iter()
        .enumerate()
        .map(|(i, (w, ending))| {
            let mut message = Map::new();
            message.insert("role".into(), json!("assistant"));
            let silent = w.content.is_empty() && !w.calls.is_empty();
            message.insert("content".into(), if silent { Value::Null } else { json!(w.content) });
            message.insert("refusal".into(), Value::Null);
            if !w.reasoning.is_empty() {
                message.insert("reasoning_content".into(), json!(w.reasoning));
            }
            let called = !w.calls.is_empty();
            if head.legacy {
                if let Some(c) = w.calls.first() {
                    message.insert("function_call".into(), json!({"name": c.name, "arguments": c.arguments}));
                }
            } else if called {
                let calls: Vec<Value> =
                    w.calls.iter().map(|c| head.call(&c.id, &c.name, &c.arguments)).collect();
                message.insert("tool_calls".into(), json!(calls));
            }
            json!({
                "index": i,
                "message": message,
                "logprobs": head.logprobs(&w.probs),
                "finish_reason": head.finish_reason(&ending.reason),
            })
        })
        .collect();
    let mut body = head.object("chat.completion");
    body["choices"] = json!(choices);
    body["usage"] = usage_object(&usage);
    Ok(Json(body).into_response())
}

/// What all parts of one response share.
struct Head {
    id: String,
    created: u64,
    model: String,
    tools: Tools,
    legacy: bool,
    probs: bool,
}

impl Head {
    fn object(&self, kind: &str) -> Value {
        json!({
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": concat!("ds4-", env!("CARGO_PKG_VERSION")),
        })
    }

    fn is_custom(&self, name: &str) -> bool {
        self.tools.find(name).is_some_and(|t| t.kind == ToolKind::Custom)
    }

    fn call(&self, id: &str, name: &str, arguments: &str) -> Value {
        if self.is_custom(name) {
            let custom = json!({"name": name, "input": custom_input(arguments)});
            return json!({"id": id, "type": "custom", "custom": custom});
        }
        json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}})
    }

    fn logprobs(&self, probs: &[TokenProb]) -> Value {
        if !self.probs {
            return Value::Null;
        }
        let one = |bytes: &[u8], logprob: f32| json!({"token": String::from_utf8_lossy(bytes), "logprob": number(logprob), "bytes": bytes});
        let content: Vec<Value> = probs
            .iter()
            .map(|p| {
                let mut entry = one(&p.bytes, p.logprob);
                entry["top_logprobs"] = p.top.iter().map(|(b, l)| one(b, *l)).collect();
                entry
            })
            .collect();
        json!({"content": content, "refusal": null})
    }

    fn finish_reason(&self, reason: &Reason) -> &'static str {
        match reason {
            Reason::Stop | Reason::StopString(_) => "stop",
            Reason::Length => "length",
            Reason::Calls if self.legacy => "function_call",
            Reason::Calls => "tool_calls",
        }
    }
}

/// A log-probability as JSON can say it.
pub fn number(logprob: f32) -> f32 {
    if logprob.is_finite() { logprob } else { -9999.0 }
}

/// The raw text of a custom tool's call. Arguments of another form are given on as they are.
pub fn custom_input(arguments: &str) -> String {
    let parsed: Result<Value, _> = serde_json::from_str(arguments);
    match parsed {
        Ok(Value::Object(o)) if o.len() == 1 => match o.into_iter().next() {
            Some((_, Value::String(s))) => s,
            _ => arguments.to_string(),
        },
        Ok(_) => arguments.to_string(),
        // Cut inside: the beginning of the text, as far as it came.
        Err(_) => match arguments.split_once(":\"").or_else(|| arguments.split_once(": \"")) {
            Some((_, text)) => {
                let end = text.len() - text.bytes().rev().take_while(|b| *b == b'\\').count() % 2;
                serde_json::from_str(&format!("\"{}\"", &text[..end])).unwrap_or_else(|_| text.to_string())
            }
            None => String::new(),
        },
    }
}

pub fn usage_object(u: &Usage) -> Value {
    json!({
        "prompt_tokens": u.prompt,
        "completion_tokens": u.completion,
        "total_tokens": u.prompt + u.completion,
        "prompt_tokens_details": {"cached_tokens": u.reused},
        "completion_tokens_details": {"reasoning_tokens": u.reasoning},
    })
}

struct ChatVoice {
    head: Head,
    choices: usize,
    include_usage: bool,
    usage: Usage,
    broken: bool,
    /// Per choice: id, name and arguments of the calls so far; for custom tools, which are told when they are whole.
    calls: Vec<Vec<(String, String, String)>>,
}

impl ChatVoice {
    fn chunk(&self, choices: Value) -> Value {
        let mut chunk = self.head.object("chat.completion.chunk");
        chunk["choices"] = choices;
        if self.include_usage {
            chunk["usage"] = Value::Null;
        }
        chunk
    }

    fn delta(&self, choice: usize, delta: Value, out: &mut Frames) {
        out.data(&self.chunk(json!([
            {"index": choice, "delta": delta, "logprobs": null, "finish_reason": null}
        ])));
    }

    fn call_delta(&self, choice: usize, call: Value, out: &mut Frames) {
        let delta = match self.head.legacy {
            true => json!({"function_call": call["function"]}),
            false => json!({"tool_calls": [call]}),
        };
        self.delta(choice, delta, out);
    }
}

impl Voice for ChatVoice {
    fn begin(&mut self, out: &mut Frames) {
        for choice in 0..self.choices {
            self.delta(choice, json!({"role": "assistant", "content": ""}), out);
        }
    }

    fn say(&mut self, choice: usize, said: Said, out: &mut Frames) {
        match said {
            Said::Reasoning(text) => self.delta(choice, json!({"reasoning_content": text}), out),
            Said::Content { text, probs } => {
                let choice = json!({
                    "index": choice,
                    "delta": {"content": text},
                    "logprobs": self.head.logprobs(&probs),
                    "finish_reason": null,
                });
                out.data(&self.chunk(json!([choice])));
            }
            Said::CallStart { index, id, name } => {
                let custom = self.head.is_custom(&name);
                self.calls[choice].push((id.clone(), name.clone(), String::new()));
                if !custom {
                    let mut call = self.head.call(&id, &name, "");
                    call["index"] = json!(index);
                    self.call_delta(choice, call, out);
                }
            }
            Said::CallArguments { index, json } => {
                let Some((_, name, arguments)) = self.calls[choice].get_mut(index) else { return };
                if self.head.is_custom(name) {
                    arguments.push_str(&json);
                } else {
                    let call = json!({"index": index, "function": {"arguments": json}});
                    self.call_delta(choice, call, out);
                }
            }
            Said::CallEnd { index, .. } => {
                let Some((id, name, arguments)) = self.calls[choice].get(index) else { return };
                if self.head.is_custom(name) {
                    let mut call = self.head.call(id, name, arguments);
                    call["index"] = json!(index);
                    self.call_delta(choice, call, out);
                }
            }
            Said::Prompt(_) => {}
            Said::End(ending) => {
                self.usage = self.usage.join(ending.usage);
                out.data(&self.chunk(json!([{
                    "index": choice,
                    "delta": {},
                    "logprobs": null,
                    "finish_reason": self.head.finish_reason(&ending.reason),
                }])));
            }
            Said::Failed(e) => {
                self.broken = true;
                out.data(&e.body(Dialect::OpenAi));
            }
        }
    }

    fn end(&mut self, out: &mut Frames) {
        // After an error nothing claims that this was an answer.
        if self.broken {
            return;
        }
        if self.include_usage {
            let mut chunk = self.chunk(json!([]));
            chunk["usage"] = usage_object(&self.usage);
            out.data(&chunk);
        }
        out.raw("[DONE]");
    }
}
