//! What every API's request becomes: a conversation, what may be answered, and how to draw it.

use std::time::Duration;

use ds4_engine::{Constraint, Form, Request, SamplingParams, ToolForm};
use ds4_text::chat::{
    self, DSML, END_THINK, EOS, Effort, Message, Prompt, PromptIds, RenderOptions, Role, Tool,
};
use serde_json::{Value, json};

use crate::App;
use crate::error::ApiError;
use crate::fields::{Fields, wrong};
use crate::memory;

/// Answers to one request.
pub const CHOICES_MAX: usize = 16;
const STOPS_MAX: usize = 16;
const TOOLS_MAX: usize = 1024;
const NAME_MAX: usize = 128;
/// A logit this much lower is never drawn.
const NEVER: f32 = -1e4;

/// How deep to think before the answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Thinking {
    pub on: bool,
    pub effort: Effort,
}

impl Thinking {
    pub const OFF: Self = Thinking { on: false, effort: Effort::Low };

    /// The words that all APIs use for it. The releases know three depths: see `docs/server.md`.
    pub const WORDS: [&'static str; 7] = ["none", "minimal", "low", "medium", "high", "xhigh", "max"];

    pub fn of_word(word: &str) -> Self {
        let effort = match word {
            "high" => Effort::High,
            "xhigh" | "max" => Effort::Max,
            _ => Effort::Low,
        };
        Thinking { on: word != "none", effort }
    }
}

/// How a tool's calls are given to the client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ToolKind {
    Function,
    /// Its one argument is free text.
    Custom,
    /// A function of a group; the model sees both names as one.
    Member {
        namespace: String,
        name: String,
    },
}

#[derive(Clone, Debug, PartialEq)]
pub struct OfferedTool {
    /// As the model knows it.
    pub name: String,
    pub kind: ToolKind,
    /// The object that the model reads: name, description, parameters.
    pub function: Value,
}

impl OfferedTool {
    pub fn function(f: &mut Fields) -> Result<Self, ApiError> {
        let name = tool_name(f)?;
        let mut function = serde_json::Map::new();
        function.insert("name".into(), json!(name));
        if let Some(d) = f.string("description")? {
            function.insert("description".into(), json!(d));
        }
        let parameters = f.object("parameters")?.map(Fields::rest);
        function.insert(
            "parameters".into(),
            parameters.unwrap_or_else(|| json!({"type": "object", "properties": {}})),
        );
        if let Some(strict) = f.bool("strict")? {
            function.insert("strict".into(), json!(strict));
        }
        Ok(OfferedTool { name, kind: ToolKind::Function, function: Value::Object(function) })
    }

    /// A tool whose input is raw text, as a function with one string.
    pub fn custom(f: &mut Fields) -> Result<Self, ApiError> {
        let name = tool_name(f)?;
        let mut description = f.string("description")?.unwrap_or_default();
        if let Some(mut format) = f.object("format")? {
            if format.need_word("type", &["text", "grammar"])? == "grammar" {
                // Where Chat Completions and Responses put the same two fields.
                let mut grammar = format.object("grammar")?.unwrap_or(format);
                let syntax = grammar.need_word("syntax", &["lark", "regex"])?;
                let definition = grammar.need_string("definition")?;
                description.push_str(&format!("\n\nThe input follows this {syntax} grammar:\n{definition}"));
                grammar.inform(&["type"]);
                grammar.end()?;
            } else {
                format.end()?;
            }
        }
        let function = json!({
            "name": name,
            "description": description,
            "parameters": {
                "type": "object",
                "properties": {"input": {"type": "string", "description": "The whole input, as raw text."}},
                "required": ["input"],
            },
        });
        Ok(OfferedTool { name, kind: ToolKind::Custom, function })
    }

    fn parameters(&self) -> Value {
        self.function.get("parameters").cloned().unwrap_or(Value::Null)
    }
}

fn tool_name(f: &mut Fields) -> Result<String, ApiError> {
    let name = f.need_string("name")?;
    let fine = |c: char| c.is_ascii_alphanumeric() || "_-.:/".contains(c);
    if name.is_empty() || name.len() > NAME_MAX || !name.chars().all(fine) {
        let param = f.name("name");
        return Err(ApiError::invalid(
            &param,
            format!("{param}: 1 to {NAME_MAX} characters of a-z, A-Z, 0-9, _, -, ., : and / are taken"),
        ));
    }
    Ok(name)
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ToolChoice {
    None,
    #[default]
    Auto,
    /// Some call.
    Required,
    /// A call to one of these.
    Named(Vec<String>),
}

#[derive(Clone, Debug, PartialEq)]
pub struct Tools {
    pub offered: Vec<OfferedTool>,
    pub choice: ToolChoice,
    /// More than one call in one answer.
    pub parallel: bool,
}

impl Default for Tools {
    fn default() -> Self {
        Tools { offered: Vec::new(), choice: ToolChoice::Auto, parallel: true }
    }
}

impl Tools {
    pub fn find(&self, name: &str) -> Option<&OfferedTool> {
        self.offered.iter().find(|t| t.name == name)
    }

    /// Adds a tool; a second one of the same name is an error.
    pub fn add(&mut self, at: &str, tool: OfferedTool) -> Result<(), ApiError> {
        if self.find(&tool.name).is_some() {
            return Err(ApiError::invalid(at, format!("{at}: there is a tool {:?} already", tool.name)));
        }
        if self.offered.len() >= TOOLS_MAX {
            return Err(ApiError::invalid(at, format!("more than {TOOLS_MAX} tools")));
        }
        self.offered.push(tool);
        Ok(())
    }

    /// Checks the choice against what is offered.
    pub fn check(&self, param: &str) -> Result<(), ApiError> {
        match &self.choice {
            ToolChoice::Required if self.offered.is_empty() => {
                Err(ApiError::invalid(param, format!("{param}: a call is required, and no tools are given")))
            }
            ToolChoice::Named(names) => match names.iter().find(|n| self.find(n).is_none()) {
                Some(name) => Err(ApiError::invalid(param, format!("{param}: there is no tool {name:?}"))),
                None => Ok(()),
            },
            _ => Ok(()),
        }
    }

    fn allowed(&self) -> impl Iterator<Item = &OfferedTool> {
        self.offered.iter().filter(|t| match &self.choice {
            ToolChoice::Named(names) => names.contains(&t.name),
            _ => true,
        })
    }

    fn demanded(&self) -> bool {
        matches!(self.choice, ToolChoice::Required | ToolChoice::Named(_))
    }
}

/// What the answer's text must be.
#[derive(Clone, Debug, PartialEq)]
pub enum Format {
    Text,
    JsonObject,
    Schema(Value),
}

/// A conversation to answer.
#[derive(Clone, Debug)]
pub struct Ask {
    /// Instructions in front of everything.
    pub system: Vec<String>,
    pub messages: Vec<Message>,
    pub tools: Tools,
    pub thinking: Thinking,
    pub format: Format,
    pub draw: Draw,
}

/// How tokens are drawn, and when it ends.
#[derive(Clone, Debug)]
pub struct Draw {
    pub sampling: SamplingParams,
    pub max_tokens: Option<usize>,
    pub choices: usize,
    pub stop: Vec<String>,
    /// So many likely tokens beside every token of the answer.
    pub logprobs: Option<usize>,
}

impl Draw {
    /// The fields that all APIs share.
    pub fn take(f: &mut Fields, app: &App) -> Result<Self, ApiError> {
        let d = &app.config.sampling;
        let sampling = SamplingParams {
            temperature: f.number("temperature", 0.0, 2.0)?.unwrap_or(d.temperature),
            top_p: match f.number("top_p", 0.0, 1.0)? {
                // Nothing of the probability: the one most likely token.
                Some(p) => p.max(f32::MIN_POSITIVE),
                None => d.top_p,
            },
            top_k: f.count("top_k", 0, 1 << 24)?.unwrap_or(d.top_k),
            min_p: f.number("min_p", 0.0, 1.0)?.unwrap_or(d.min_p),
            seed: match f.integer("seed")? {
                Some(n) => n as u64,
                None => app.config.seed.unwrap_or_else(memory::random),
            },
            ..SamplingParams::default()
        };
        Ok(Draw { sampling, max_tokens: app.config.max_tokens, choices: 1, stop: Vec::new(), logprobs: None })
    }

    /// Penalties and bias, which Anthropic's API does not have.
    pub fn take_openai(&mut self, f: &mut Fields, app: &App) -> Result<(), ApiError> {
        let s = &mut self.sampling;
        s.presence_penalty = f.number("presence_penalty", -2.0, 2.0)?.unwrap_or(0.0);
        s.frequency_penalty = f.number("frequency_penalty", -2.0, 2.0)?.unwrap_or(0.0);
        let name = f.name("logit_bias");
        if let Some(bias) = f.object("logit_bias")? {
            for (key, value) in bias.into_pairs() {
                let at = format!("{name}.{key}");
                let id = key.parse().ok().filter(|id: &u32| (*id as usize) < app.tokenizer.len());
                let id = id.ok_or_else(|| {
                    ApiError::invalid(&at, format!("{at}: expected a token id below {}", app.tokenizer.len()))
                })?;
                let b = value.as_f64().filter(|b| b.abs() <= 100.0);
                let b = b.ok_or_else(|| wrong(&at, "a number from -100 to 100", &value))?;
                // 100 and -100 mean always and never.
                let b = if b.abs() == 100.0 { b.signum() as f32 * -NEVER } else { b as f32 };
                s.bias.push((id, b));
            }
        }
        Ok(())
    }

    /// One stop string or a list of them.
    pub fn take_stop(&mut self, f: &mut Fields, key: &str) -> Result<(), ApiError> {
        let name = f.name(key);
        let Some(value) = f.value(key) else { return Ok(()) };
        let list = match value {
            Value::String(s) => vec![Value::String(s)],
            Value::Array(list) => list,
            other => return Err(wrong(&name, "a string or a list of strings", &other)),
        };
        if list.len() > STOPS_MAX {
            return Err(ApiError::invalid(&name, format!("{name}: at most {STOPS_MAX} strings are taken")));
        }
        for (i, v) in list.into_iter().enumerate() {
            let at = format!("{name}[{i}]");
            let s = crate::fields::text(&at, v)?;
            if s.is_empty() || s.len() > 1024 {
                return Err(ApiError::invalid(&at, format!("{at}: 1 to 1024 bytes are taken")));
            }
            self.stop.push(s);
        }
        Ok(())
    }

    /// One request for each choice.
    pub fn requests(&self, ids: PromptIds, app: &App) -> Result<Vec<Request>, ApiError> {
        let eos = app.special(EOS)?;
        let mut request = Request::new(ids.ids);
        request.boundaries = ids.boundaries;
        request.sampling = self.sampling.clone();
        request.max_tokens = self.max_tokens;
        request.stop_tokens = vec![eos];
        request.logprobs = self.logprobs;
        request.deadline =
            app.config.request_limit.and_then(|d: Duration| std::time::Instant::now().checked_add(d));
        Ok((0..self.choices as u64)
            .map(|i| {
                let mut r = request.clone();
                r.sampling.seed = r.sampling.seed.wrapping_add(i);
                r
            })
            .collect())
    }
}

/// A rendered conversation.
pub struct Rendered {
    pub prompt: Prompt,
    /// Whether the answer begins inside a thought.
    pub thinking: bool,
    /// The conversation as the client knows it; what is remembered of the answer is filed under it.
    pub key: memory::Key,
}

impl Ask {
    /// The prompt. Turns that were answered here come back as they were sampled.
    pub fn render(&self, app: &App) -> Result<Rendered, ApiError> {
        let mut messages = Vec::with_capacity(self.messages.len() + 2);
        let schema = match &self.format {
            Format::Schema(s) => Some(s.clone()),
            _ => None,
        };
        if !self.system.is_empty() || !self.tools.offered.is_empty() || schema.is_some() {
            let mut system = Message::system(self.system.join("\n\n"));
            system.tools = self.tools.offered.iter().map(|t| Tool { function: t.function.clone() }).collect();
            system.response_format = schema;
            messages.push(system);
        }
        messages.extend(self.messages.iter().cloned());
        let key = app.memory.recall(&mut messages);
        let mut thinking = self.thinking.on;
        match messages.last_mut() {
            Some(last) if last.role == Role::Assistant => {
                if !last.tool_calls.is_empty() {
                    return Err(ApiError::invalid(
                        "messages",
                        "the last message calls tools: their results must follow it",
                    ));
                }
                // The answer goes on from here.
                last.unfinished = true;
                thinking = false;
            }
            Some(last) if matches!(last.role, Role::User | Role::Tool) => {}
            _ => messages.push(Message::user("")),
        }
        let options = RenderOptions {
            release: app.config.release,
            thinking: self.thinking.on,
            effort: self.thinking.effort,
            ..RenderOptions::default()
        };
        Ok(Rendered { prompt: chat::render(&messages, &options), thinking, key })
    }

    /// The engine's requests.
    pub fn requests(&self, rendered: &Rendered, app: &App) -> Result<Vec<Request>, ApiError> {
        let ids = rendered.prompt.to_ids(&app.tokenizer).map_err(|e| ApiError::internal(e.to_string()))?;
        let mut requests = self.draw.requests(ids, app)?;
        let after = if rendered.thinking { Some(app.special(END_THINK)?) } else { None };
        let form = if self.tools.demanded() {
            let tools =
                self.tools.allowed().map(|t| ToolForm { name: t.name.clone(), parameters: t.parameters() });
            Some(Form::ToolCalls { tools: tools.collect(), many: self.tools.parallel })
        } else {
            match &self.format {
                Format::Text => None,
                Format::JsonObject => Some(Form::JsonObject),
                Format::Schema(schema) => Some(Form::JsonSchema(schema.clone())),
            }
        };
        let forbidden = self.tools.choice == ToolChoice::None && !self.tools.offered.is_empty();
        let dsml = forbidden.then(|| app.special(DSML)).transpose()?;
        for r in &mut requests {
            r.constraint = form.clone().map(|form| Constraint { form, after });
            // Every call begins with this token.
            r.sampling.bias.extend(dsml.map(|id| (id, NEVER)));
        }
        Ok(requests)
    }
}

/// `response_format` and `text.format`; `flat`: the schema lies beside its type.
pub fn take_format(f: &mut Fields, key: &str, flat: bool) -> Result<Format, ApiError> {
    let Some(mut format) = f.object(key)? else { return Ok(Format::Text) };
    let found = match format.need_word("type", &["text", "json_object", "json_schema"])? {
        "text" => Format::Text,
        "json_object" => Format::JsonObject,
        _ if flat => Format::Schema(take_schema(&mut format)?),
        _ => {
            let mut inner = format.object("json_schema")?.ok_or_else(|| format.missing("json_schema"))?;
            let schema = take_schema(&mut inner)?;
            inner.end()?;
            Format::Schema(schema)
        }
    };
    format.end()?;
    Ok(found)
}

fn take_schema(f: &mut Fields) -> Result<Value, ApiError> {
    // The schema is kept to the letter in any case.
    f.inform(&["name", "description", "strict"]);
    Ok(f.object("schema")?.ok_or_else(|| f.missing("schema"))?.rest())
}

/// The text of a message: a string, or parts of which each is text.
pub fn content_text(name: &str, value: Option<Value>) -> Result<Option<String>, ApiError> {
    match value {
        None => Ok(None),
        Some(Value::String(s)) => Ok(Some(s)),
        Some(Value::Array(parts)) => {
            let mut texts = Vec::with_capacity(parts.len());
            for (i, part) in parts.into_iter().enumerate() {
                texts.push(part_text(&format!("{name}[{i}]"), part)?);
            }
            Ok(Some(texts.join("\n\n")))
        }
        Some(other) => Err(wrong(name, "a string or a list of parts", &other)),
    }
}

/// One part's text. Other media are refused: the model reads text alone, and nothing is ever fetched.
fn part_text(name: &str, part: Value) -> Result<String, ApiError> {
    if let Value::String(s) = part {
        return Ok(s);
    }
    let mut f = Fields::of(part, name)?;
    let kind = f.need_string("type")?;
    let key = match kind.as_str() {
        "text" | "input_text" | "output_text" | "summary_text" | "reasoning_text" => "text",
        "refusal" => "refusal",
        _ => {
            let param = f.name("type");
            return Err(ApiError::invalid(
                &param,
                format!("{param}: {kind:?} is not supported: this model reads text alone"),
            )
            .code("unsupported_content"));
        }
    };
    let text = f.need_string(key)?;
    f.inform(&["annotations", "logprobs", "cache_control", "citations"]);
    f.end()?;
    Ok(text)
}
