//! `POST /v1/responses`, and what is kept of the answers for `previous_response_id`.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};

use axum::Json;
use axum::response::{IntoResponse, Response};
use ds4_text::chat::{FunctionCall, Message, Role, ToolCall};
use futures_util::StreamExt;
use serde_json::{Value, json};

use crate::answer::{Ending, Reason, Said, TokenProb};
use crate::ask::{Ask, Draw, OfferedTool, Thinking, ToolKind, Tools, content_text, take_format};
use crate::chat::{check_format, choice_of, custom_input, number};
use crate::doors::Caller;
use crate::error::ApiError;
use crate::fields::{Fields, wrong};
use crate::memory::{new_id, seal, unseal};
use crate::stream::{self, Frames, Voice};
use crate::{App, now};

/// Fields that say who asks, or ask for what is so anyway. `docs/server.md` lists them.
const INFORM: &[&str] = &[
    "user",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "service_tier",
    "max_tool_calls",
    "client_metadata",
];

/// Tools that would run on the server, which has none: they are left out, and the model does not hear of them.
const HOSTED: &[&str] = &[
    "web_search",
    "web_search_preview",
    "web_search_2025_08_26",
    "web_search_preview_2025_03_11",
    "file_search",
    "code_interpreter",
    "image_generation",
    "computer",
    "computer_use",
    "computer_use_preview",
    "mcp",
    "local_shell",
    "shell",
    "apply_patch",
    "tool_search",
];

/// Items of a history that such tools left, and marks without words: they say nothing to this model.
const SILENT: &[&str] = &[
    "web_search_call",
    "file_search_call",
    "image_generation_call",
    "code_interpreter_call",
    "computer_call",
    "computer_call_output",
    "mcp_list_tools",
    "mcp_approval_request",
    "mcp_approval_response",
    "mcp_call",
    "tool_search_call",
    "tool_search_output",
    "ghost_snapshot",
    "compaction_trigger",
];

const INCLUDE: &[&str] = &[
    "reasoning.encrypted_content",
    "message.output_text.logprobs",
    "web_search_call.action.sources",
    "web_search_call.results",
    "file_search_call.results",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "message.input_image.image_url",
];

struct ResponsesRequest {
    ask: Ask,
    stream: bool,
    store: bool,
    sealed: bool,
    probs: bool,
    /// The response object's fields that repeat the request.
    echo: Value,
}

impl ResponsesRequest {
    fn read(body: Value, app: &App, caller: Caller) -> Result<Self, ApiError> {
        let mut f = Fields::of(body, "")?;
        let model = f.string("model")?.unwrap_or_else(|| app.model.name.clone());
        let mut draw = Draw::take(&mut f, app)?;
        if let Some(n) = f.count("max_output_tokens", 1, usize::MAX)? {
            draw.max_tokens = Some(n);
        }
        let instructions = f.string("instructions")?;
        let previous = f.string("previous_response_id")?;
        let mut messages = match &previous {
            None => Vec::new(),
            Some(id) => app.responses.conversation(id, caller).ok_or_else(|| {
                ApiError::invalid(
                    "previous_response_id",
                    format!(
                        "Previous response with id '{id}' not found: it was not stored, or is no longer kept."
                    ),
                )
                .code("previous_response_not_found")
            })?,
        };
        let mut system: Vec<String> = instructions.clone().into_iter().collect();
        let (tools, tools_echo) = take_tools(&mut f)?;
        let choice = f.value("tool_choice");
        let choice_echo = choice.clone().unwrap_or_else(|| json!("auto"));
        let mut tools = tools;
        if let Some(choice) = choice {
            tools.choice = choice_of(choice, "tool_choice")?;
            tools.check("tool_choice")?;
        }
        tools.parallel = f.bool("parallel_tool_calls")?.unwrap_or(true);
        input(&mut f, &mut system, &mut messages)?;
        let mut thinking = app.config.thinking;
        let mut effort = Value::Null;
        if let Some(mut r) = f.object("reasoning")? {
            if let Some(word) = r.word("effort", &Thinking::WORDS)? {
                thinking = Thinking::of_word(word);
                effort = json!(word);
            }
            // Thoughts come as they are, not summarised.
            r.inform(&["summary", "generate_summary", "context", "mode"]);
            r.end()?;
        }
        let mut text = f.object("text")?;
        let text_echo =
            text.as_mut().and_then(|t| t.peek("format")).unwrap_or_else(|| json!({"type": "text"}));
        let format = match &mut text {
            Some(t) => take_format(t, "format", true)?,
            None => crate::ask::Format::Text,
        };
        if let Some(mut t) = text {
            t.inform(&["verbosity"]);
            t.end()?;
        }
        check_format(&format, &tools, "text.format")?;
        let (mut sealed, mut probs) = (false, false);
        for (at, v) in f.list("include")?.unwrap_or_default() {
            let word = crate::fields::text(&at, v)?;
            sealed |= word == "reasoning.encrypted_content";
            probs |= word == "message.output_text.logprobs";
            if !INCLUDE.contains(&word.as_str()) {
                return Err(ApiError::invalid(&at, format!("{at}: {word:?} is not supported")));
            }
        }
        let top = f.count("top_logprobs", 0, 20)?;
        draw.logprobs = (probs || top.is_some_and(|k| k > 0)).then_some(top.unwrap_or(0));
        let probs = draw.logprobs.is_some();
        let stream = f.bool("stream")?.unwrap_or(false);
        if let Some(mut options) = f.object("stream_options")? {
            options.inform(&["include_obfuscation"]);
            options.end()?;
        }
        let store = f.bool("store")?.unwrap_or(true);
        let metadata = f.object("metadata")?.map_or_else(|| json!({}), Fields::rest);
        f.only(
            "truncation",
            &[json!("disabled")],
            "truncation: only \"disabled\": nothing is left out silently",
        )?;
        f.only("background", &[json!(false)], "background: only false: an answer ends with its connection")?;
        f.inform(INFORM);
        f.end()?;
        let echo = json!({
            "model": model,
            "instructions": instructions,
            "max_output_tokens": draw.max_tokens,
            "metadata": metadata,
            "parallel_tool_calls": tools.parallel,
            "previous_response_id": previous,
            "reasoning": {"effort": effort, "summary": null},
            "store": store,
            "temperature": draw.sampling.temperature,
            "text": {"format": text_echo},
            "tool_choice": choice_echo,
            "tools": tools_echo,
            "top_p": draw.sampling.top_p,
            "truncation": "disabled",
            "background": false,
        });
        let ask = Ask { system, messages, tools, thinking, format, draw };
        Ok(ResponsesRequest { ask, stream, store, sealed, probs, echo })
    }
}

/// The tools, and the list as the response repeats it.
fn take_tools(f: &mut Fields) -> Result<(Tools, Vec<Value>), ApiError> {
    let mut tools = Tools::default();
    let mut echo = Vec::new();
    for (at, tool) in f.list("tools")?.unwrap_or_default() {
        echo.push(tool.clone());
        let mut t = Fields::of(tool, &at)?;
        let kind = t.need_string("type")?;
        match kind.as_str() {
            "namespace" => {
                let namespace = t.need_string("name")?;
                t.inform(&["description"]);
                for (at, member) in t.list("tools")?.unwrap_or_default() {
                    let mut m = Fields::of(member, &at)?;
                    let mut offered = one_tool(&mut m, &at)?;
                    let name = std::mem::take(&mut offered.name);
                    offered.name = member_name(&namespace, &name);
                    offered.function["name"] = json!(offered.name);
                    offered.kind = ToolKind::Member { namespace: namespace.clone(), name };
                    m.end()?;
                    tools.add(&at, offered)?;
                }
                t.end()?;
            }
            hosted if HOSTED.contains(&hosted) => {}
            _ => {
                t.put("type", json!(kind));
                let offered = one_tool(&mut t, &at)?;
                t.end()?;
                tools.add(&at, offered)?;
            }
        }
    }
    Ok((tools, echo))
}

fn one_tool(t: &mut Fields, at: &str) -> Result<OfferedTool, ApiError> {
    let kind = t.need_string("type")?;
    t.inform(&["defer_loading", "output_schema", "allowed_callers"]);
    match kind.as_str() {
        "function" => OfferedTool::function(t),
        "custom" => OfferedTool::custom(t),
        _ => {
            let param = format!("{at}.type");
            Err(ApiError::invalid(
                &param,
                format!("{param}: {kind:?} is no kind of tool that this server knows"),
            ))
        }
    }
}

/// One name for the model.
fn member_name(namespace: &str, name: &str) -> String {
    if namespace.ends_with("__") { format!("{namespace}{name}") } else { format!("{namespace}__{name}") }
}

fn input(f: &mut Fields, system: &mut Vec<String>, messages: &mut Vec<Message>) -> Result<(), ApiError> {
    let list = match f.value("input") {
        None => return Ok(()),
        Some(Value::String(s)) => {
            messages.push(Message::user(s));
            return Ok(());
        }
        Some(list @ Value::Array(_)) => {
            f.put("input", list);
            f.list("input")?.unwrap_or_default()
        }
        Some(other) => return Err(wrong("input", "a string or a list of items", &other)),
    };
    for (at, value) in list {
        item(Fields::of(value, &at)?, &at, system, messages)?;
    }
    Ok(())
}

/// The assistant's turn that an item belongs to: consecutive items are one turn.
fn assistant(messages: &mut Vec<Message>) -> &mut Message {
    if messages.last().is_none_or(|m| m.role != Role::Assistant) {
        messages.push(Message::assistant(""));
    }
    let last = messages.len() - 1;
    &mut messages[last]
}

fn item(
    mut f: Fields,
    at: &str,
    system: &mut Vec<String>,
    messages: &mut Vec<Message>,
) -> Result<(), ApiError> {
    let kind = f.string("type")?.unwrap_or_else(|| "message".into());
    let call = |id: String, name: String, arguments: String| ToolCall {
        id,
        function: FunctionCall { name, arguments },
    };
    match kind.as_str() {
        "message" => {
            let role = f.need_word("role", &["user", "assistant", "system", "developer"])?;
            let name = f.name("content");
            let text = content_text(&name, f.value("content"))?.ok_or_else(|| f.missing("content"))?;
            match role {
                "assistant" => {
                    let m = assistant(messages);
                    m.content.get_or_insert_default().push_str(&text);
                }
                "system" | "developer" if messages.is_empty() => system.push(text),
                _ => messages.push(Message::user(text)),
            }
            f.inform(&["phase"]);
        }
        "reasoning" => {
            let content = content_text(&f.name("content"), f.value("content"))?.filter(|t| !t.is_empty());
            let summary = content_text(&f.name("summary"), f.value("summary"))?.filter(|t| !t.is_empty());
            let sealed = f.string("encrypted_content")?.and_then(|s| unseal(&s));
            if let Some(text) = content.or(sealed).or(summary) {
                assistant(messages).reasoning_content.get_or_insert_default().push_str(&text);
            }
        }
        "function_call" => {
            let (id, mut name) = (f.need_string("call_id")?, f.need_string("name")?);
            if let Some(namespace) = f.string("namespace")? {
                name = member_name(&namespace, &name);
            }
            let arguments = f.string("arguments")?.unwrap_or_default();
            assistant(messages).tool_calls.push(call(id, name, arguments));
        }
        "custom_tool_call" => {
            let (id, mut name) = (f.need_string("call_id")?, f.need_string("name")?);
            if let Some(namespace) = f.string("namespace")? {
                name = member_name(&namespace, &name);
            }
            let input = json!({"input": f.need_string("input")?}).to_string();
            assistant(messages).tool_calls.push(call(id, name, input));
        }
        "local_shell_call" => {
            let id = f.string("call_id")?.or(f.string("id")?).unwrap_or_default();
            let action = f.value("action").unwrap_or_else(|| json!({}));
            assistant(messages).tool_calls.push(call(id, "local_shell".into(), action.to_string()));
        }
        "function_call_output" | "custom_tool_call_output" | "local_shell_call_output" => {
            let id = f.string("call_id")?.or(f.string("id")?).ok_or_else(|| f.missing("call_id"))?;
            let name = f.name("output");
            let text = content_text(&name, f.value("output"))?.ok_or_else(|| f.missing("output"))?;
            let mut m = Message::new(Role::Tool, text);
            m.tool_call_id = Some(id);
            messages.push(m);
        }
        // What another server has sealed cannot be read here.
        "compaction" | "compaction_summary" | "context_compaction" => {
            if let Some(text) = f.string("encrypted_content")?.and_then(|s| unseal(&s)) {
                messages.push(Message::user(text));
            }
        }
        silent if SILENT.contains(&silent) => return Ok(()),
        _ => {
            let param = format!("{at}.type");
            return Err(ApiError::invalid(
                &param,
                format!("{param}: {kind:?} is no kind of item that this server knows"),
            ));
        }
    }
    f.inform(&["id", "status", "name", "internal_chat_message_metadata_passthrough", "created_by"]);
    f.end()
}

pub async fn handle(app: Arc<App>, caller: Caller, body: Value) -> Result<Response, ApiError> {
    let request = ResponsesRequest::read(body, &app, caller)?;
    let mut voice = ResponsesVoice {
        id: new_id("resp_"),
        created: now(),
        echo: request.echo,
        tools: request.ask.tools.clone(),
        sealed: request.sealed,
        probs: request.probs,
        keep: request.store.then(|| (app.clone(), caller, request.ask.messages.clone())),
        sequence: 0,
        output: Vec::new(),
        open: None,
        answer: Message::assistant(""),
        finished: None,
    };
    let mut answers = app.begin(request.ask, "call_").await?;
    if request.stream {
        return Ok(stream::respond(&app, answers, voice));
    }
    // The same story, told to nobody: its end is the response.
    let mut out = Frames::default();
    while let Some((choice, said)) = answers.next().await {
        if let Said::Failed(e) = said {
            return Err(e);
        }
        voice.say(choice, said, &mut out);
        out.clear();
    }
    match voice.finished {
        Some(response) => Ok(Json(response).into_response()),
        None => Err(ApiError::internal("the answer ended without its end")),
    }
}

/// The item that is being told.
struct Open {
    kind: Kind,
    id: String,
    text: String,
    probs: Vec<Value>,
    /// Of a call: its id for the client, and the tool's name as the model knows it.
    call: Option<(String, String)>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Reasoning,
    Message,
    Call,
    Custom,
}

struct ResponsesVoice {
    id: String,
    created: u64,
    echo: Value,
    tools: Tools,
    sealed: bool,
    probs: bool,
    /// Where to keep the conversation, whose it is, and its messages so far.
    keep: Option<(Arc<App>, Caller, Vec<Message>)>,
    sequence: u64,
    /// Items that are done.
    output: Vec<Value>,
    open: Option<Open>,
    /// The answer as the next turn's history has it.
    answer: Message,
    finished: Option<Value>,
}

impl ResponsesVoice {
    fn response(&self, status: &str) -> Value {
        let mut r = json!({
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": null,
            "incomplete_details": null,
            "output": self.output,
            "usage": null,
        });
        if let (Value::Object(r), Value::Object(echo)) = (&mut r, self.echo.clone()) {
            r.extend(echo);
        }
        r
    }

    fn event(&mut self, name: &str, mut data: Value, out: &mut Frames) {
        if let Value::Object(data) = &mut data {
            data.insert("type".into(), json!(name));
            data.insert("sequence_number".into(), json!(self.sequence));
        }
        self.sequence += 1;
        out.event(name, &data);
    }

    /// The open item as an object.
    fn item(&self, open: &Open, status: &str) -> Value {
        let (call_id, name) = open.call.clone().unwrap_or_default();
        match open.kind {
            Kind::Reasoning => {
                let content = if open.text.is_empty() {
                    json!([])
                } else {
                    json!([{"type": "reasoning_text", "text": open.text}])
                };
                let mut item = json!({
                    "id": open.id, "type": "reasoning", "summary": [], "content": content, "status": status,
                });
                if self.sealed {
                    item["encrypted_content"] = json!(seal(&open.text));
                }
                item
            }
            Kind::Message => {
                let content = match open.text.is_empty() && status == "in_progress" {
                    true => json!([]),
                    false => json!([self.text_part(&open.text, &open.probs)]),
                };
                json!({"id": open.id, "type": "message", "role": "assistant", "status": status, "content": content})
            }
            Kind::Call => {
                let mut item = json!({
                    "id": open.id,
                    "type": "function_call",
                    "call_id": call_id,
                    "name": name,
                    "arguments": open.text,
                    "status": status,
                });
                if let Some(ToolKind::Member { namespace, name }) = self.tools.find(&name).map(|t| &t.kind) {
                    item["name"] = json!(name);
                    item["namespace"] = json!(namespace);
                }
                item
            }
            Kind::Custom => {
                let input = if open.text.is_empty() { String::new() } else { custom_input(&open.text) };
                json!({
                    "id": open.id,
                    "type": "custom_tool_call",
                    "call_id": call_id,
                    "name": name,
                    "input": input,
                    "status": status,
                })
            }
        }
    }

    fn text_part(&self, text: &str, probs: &[Value]) -> Value {
        json!({"type": "output_text", "text": text, "annotations": [], "logprobs": probs})
    }

    fn begin_item(&mut self, kind: Kind, call: Option<(String, String)>, out: &mut Frames) {
        self.end_item("completed", out);
        let prefix = match kind {
            Kind::Reasoning => "rs_",
            Kind::Message => "msg_",
            Kind::Call => "fc_",
            Kind::Custom => "ctc_",
        };
        let open = Open { kind, id: new_id(prefix), text: String::new(), probs: Vec::new(), call };
        let at = self.output.len();
        let item = self.item(&open, "in_progress");
        self.event("response.output_item.added", json!({"output_index": at, "item": item}), out);
        let part = match kind {
            Kind::Reasoning => Some(json!({"type": "reasoning_text", "text": ""})),
            Kind::Message => Some(self.text_part("", &[])),
            Kind::Call | Kind::Custom => None,
        };
        if let Some(part) = part {
            let data = json!({"item_id": open.id, "output_index": at, "content_index": 0, "part": part});
            self.event("response.content_part.added", data, out);
        }
        self.open = Some(open);
    }

    /// A piece of the open item's text.
    fn delta(&mut self, delta: String, probs: Vec<Value>, out: &mut Frames) {
        let at = self.output.len();
        let Some(open) = &mut self.open else { return };
        open.text.push_str(&delta);
        open.probs.extend(probs.iter().cloned());
        let mut data = json!({"item_id": open.id, "output_index": at, "delta": delta});
        let name = match open.kind {
            Kind::Reasoning => "response.reasoning_text.delta",
            Kind::Message => "response.output_text.delta",
            Kind::Call => "response.function_call_arguments.delta",
            // Told when it is whole: what comes are arguments, what is told is the text in them.
            Kind::Custom => return,
        };
        if open.kind != Kind::Call {
            data["content_index"] = json!(0);
        }
        if open.kind == Kind::Message {
            data["logprobs"] = json!(probs);
        }
        self.event(name, data, out);
    }

    fn end_item(&mut self, status: &str, out: &mut Frames) {
        let Some(open) = self.open.take() else { return };
        let at = self.output.len();
        let item = self.item(&open, status);
        let place = |mut data: Value| {
            data["item_id"] = json!(open.id);
            data["output_index"] = json!(at);
            data
        };
        match open.kind {
            Kind::Reasoning => {
                let data = place(json!({"content_index": 0, "text": open.text}));
                self.event("response.reasoning_text.done", data, out);
                let part = json!({"type": "reasoning_text", "text": open.text});
                let data = place(json!({"content_index": 0, "part": part}));
                self.event("response.content_part.done", data, out);
            }
            Kind::Message => {
                let data = place(json!({"content_index": 0, "text": open.text, "logprobs": open.probs}));
                self.event("response.output_text.done", data, out);
                let part = self.text_part(&open.text, &open.probs);
                let data = place(json!({"content_index": 0, "part": part}));
                self.event("response.content_part.done", data, out);
            }
            Kind::Call => {
                let data = place(json!({"arguments": open.text, "name": item["name"]}));
                self.event("response.function_call_arguments.done", data, out);
            }
            Kind::Custom => {
                let data = place(json!({"delta": item["input"]}));
                self.event("response.custom_tool_call_input.delta", data, out);
                let data = place(json!({"input": item["input"]}));
                self.event("response.custom_tool_call_input.done", data, out);
            }
        }
        self.event("response.output_item.done", json!({"output_index": at, "item": item}), out);
        match (open.kind, open.call) {
            (Kind::Reasoning, _) => {
                self.answer.reasoning_content.get_or_insert_default().push_str(&open.text)
            }
            (Kind::Message, _) => self.answer.content.get_or_insert_default().push_str(&open.text),
            (_, Some((id, name))) => {
                let function = FunctionCall { name, arguments: open.text };
                self.answer.tool_calls.push(ToolCall { id, function });
            }
            (_, None) => {}
        }
        self.output.push(item);
    }

    fn is_open(&self, kind: Kind) -> bool {
        self.open.as_ref().is_some_and(|o| o.kind == kind)
    }

    fn finish(&mut self, ending: Ending, out: &mut Frames) {
        let cut = ending.reason == Reason::Length;
        let status = if cut { "incomplete" } else { "completed" };
        self.end_item(status, out);
        let mut response = self.response(status);
        if cut {
            response["incomplete_details"] = json!({"reason": "max_output_tokens"});
        } else {
            response["completed_at"] = json!(now());
        }
        let u = ending.usage;
        response["usage"] = json!({
            "input_tokens": u.prompt,
            "input_tokens_details": {"cached_tokens": u.reused},
            "output_tokens": u.completion,
            "output_tokens_details": {"reasoning_tokens": u.reasoning},
            "total_tokens": u.prompt + u.completion,
        });
        if let Some((app, caller, mut messages)) = self.keep.take() {
            messages.push(std::mem::replace(&mut self.answer, Message::assistant("")));
            app.responses.keep(&self.id, Stored { caller, messages, response: response.clone() });
        }
        let name = if cut { "response.incomplete" } else { "response.completed" };
        self.event(name, json!({"response": response}), out);
        self.finished = Some(response);
    }
}

fn prob_objects(probs: Vec<TokenProb>) -> Vec<Value> {
    let one = |bytes: &[u8], logprob: f32| json!({"token": String::from_utf8_lossy(bytes), "logprob": number(logprob), "bytes": bytes});
    let entry = |p: TokenProb| {
        let mut entry = one(&p.bytes, p.logprob);
        entry["top_logprobs"] = p.top.iter().map(|(b, l)| one(b, *l)).collect();
        entry
    };
    probs.into_iter().map(entry).collect()
}

impl Voice for ResponsesVoice {
    fn begin(&mut self, out: &mut Frames) {
        for name in ["response.created", "response.in_progress"] {
            let response = self.response("in_progress");
            self.event(name, json!({"response": response}), out);
        }
    }

    fn say(&mut self, _: usize, said: Said, out: &mut Frames) {
        match said {
            Said::Reasoning(text) => {
                if !self.is_open(Kind::Reasoning) {
                    self.begin_item(Kind::Reasoning, None, out);
                }
                self.delta(text, Vec::new(), out);
            }
            Said::Content { text, probs } => {
                if !self.is_open(Kind::Message) {
                    if text.is_empty() {
                        return;
                    }
                    self.begin_item(Kind::Message, None, out);
                }
                let probs = if self.probs { prob_objects(probs) } else { Vec::new() };
                self.delta(text, probs, out);
            }
            Said::CallStart { id, name, .. } => {
                let custom = self.tools.find(&name).is_some_and(|t| t.kind == ToolKind::Custom);
                self.begin_item(if custom { Kind::Custom } else { Kind::Call }, Some((id, name)), out);
            }
            Said::CallArguments { json, .. } => self.delta(json, Vec::new(), out),
            Said::CallEnd { complete, .. } => {
                self.end_item(if complete { "completed" } else { "incomplete" }, out);
            }
            Said::Prompt(_) => {}
            Said::End(ending) => self.finish(ending, out),
            Said::Failed(e) => {
                self.open = None;
                let mut response = self.response("failed");
                response["error"] = json!({"code": e.code.unwrap_or("server_error"), "message": e.message});
                self.event("response.failed", json!({"response": response}), out);
            }
        }
    }

    fn end(&mut self, _: &mut Frames) {}
}

/// An answered conversation.
struct Stored {
    caller: Caller,
    messages: Vec<Message>,
    response: Value,
}

impl Stored {
    fn bytes(&self) -> usize {
        let message = |m: &Message| {
            let calls: usize = m.tool_calls.iter().map(|c| c.function.arguments.len() + 64).sum();
            let reasoning = m.reasoning_content.as_ref().map_or(0, String::len);
            m.content.as_ref().map_or(0, String::len) + reasoning + calls + 256
        };
        // The response object holds the last turn's words again, and the tools.
        self.messages.iter().map(message).sum::<usize>() + self.response.to_string().len()
    }
}

#[derive(Default)]
struct Kept {
    by_id: HashMap<String, (Stored, usize)>,
    /// Oldest first.
    order: VecDeque<String>,
    bytes: usize,
}

/// The answers of late, in bounded memory; the oldest go first.
pub struct Store {
    kept: Mutex<Kept>,
    limit: usize,
}

impl Store {
    pub fn new(limit: usize) -> Self {
        Store { kept: Mutex::default(), limit }
    }

    fn kept(&self) -> std::sync::MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn keep(&self, id: &str, stored: Stored) {
        let bytes = stored.bytes();
        let mut kept = self.kept();
        kept.bytes += bytes;
        kept.by_id.insert(id.to_string(), (stored, bytes));
        kept.order.push_back(id.to_string());
        while kept.bytes > self.limit {
            let Some(oldest) = kept.order.pop_front() else { break };
            if let Some((_, bytes)) = kept.by_id.remove(&oldest) {
                kept.bytes -= bytes;
            }
        }
    }

    /// The messages of an answer that this caller was given.
    fn conversation(&self, id: &str, caller: Caller) -> Option<Vec<Message>> {
        self.kept().by_id.get(id).filter(|(s, _)| s.caller == caller).map(|(s, _)| s.messages.clone())
    }

    pub fn response(&self, id: &str, caller: Caller) -> Option<Value> {
        self.kept().by_id.get(id).filter(|(s, _)| s.caller == caller).map(|(s, _)| s.response.clone())
    }

    /// Whether there was one to forget.
    pub fn forget(&self, id: &str, caller: Caller) -> bool {
        let mut kept = self.kept();
        if kept.by_id.get(id).is_none_or(|(s, _)| s.caller != caller) {
            return false;
        }
        if let Some((_, bytes)) = kept.by_id.remove(id) {
            kept.bytes -= bytes;
        }
        kept.order.retain(|o| o != id);
        true
    }

    pub fn bytes(&self) -> usize {
        self.kept().bytes
    }
}
