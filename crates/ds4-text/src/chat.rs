//! The chat format: messages to a prompt.
//!
//! V4 ships no template but an encoder program; this is the same format, rendered as pieces. A piece is either text, which
//! is tokenised with no special token recognised, or a control token, pushed as an id. So nothing that a user, a tool or a
//! document says can open a turn or close a thought.

use serde::{Deserialize, Serialize};
use serde_json::Value;
use serde_json::ser::{Formatter, Serializer};

use crate::tokenizer::{Tokenizer, TokenizerError};

pub const BOS: &str = "<｜begin▁of▁sentence｜>";
pub const EOS: &str = "<｜end▁of▁sentence｜>";
pub const USER: &str = "<｜User｜>";
pub const ASSISTANT: &str = "<｜Assistant｜>";
pub const THINK: &str = "<think>";
pub const END_THINK: &str = "</think>";
pub const DSML: &str = "｜DSML｜";
pub const REMINDER: &str = "<｜latest_reminder｜>";
pub const FIM_BEGIN: &str = "<｜fim▁begin｜>";
pub const FIM_HOLE: &str = "<｜fim▁hole｜>";
pub const FIM_END: &str = "<｜fim▁end｜>";

const TOOLS_BEFORE: &str = "## Tools\n\nYou have access to a set of tools to help answer the user's question. You can invoke tools by writing a \"<｜DSML｜tool_calls>\" block like the following:\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"$TOOL_NAME\">\n<｜DSML｜parameter name=\"$PARAMETER_NAME\" string=\"true|false\">$PARAMETER_VALUE</｜DSML｜parameter>\n...\n</｜DSML｜invoke>\n<｜DSML｜invoke name=\"$TOOL_NAME2\">\n...\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>\n\nString parameters should be specified as is and set `string=\"true\"`. For all other types (numbers, booleans, arrays, objects), pass the value in JSON format and set `string=\"false\"`.\n\nIf thinking_mode is enabled (triggered by <think>), you MUST output your complete reasoning inside <think>...</think> BEFORE any tool calls or final response.\n\nOtherwise, output directly after </think> with tool calls or final response.\n\n### Available Tool Schemas\n\n";
const TOOLS_AFTER: &str =
    "\n\nYou MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.\n";
const RESPONSE_FORMAT: &str =
    "## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n";
const EFFORT_THOROUGH: &str = "Reasoning Effort: Absolute maximum with no shortcuts permitted.\nYou MUST be very thorough in your thinking and comprehensively decompose the problem to resolve the root cause, rigorously stress-testing your logic against all potential paths, edge cases, and adversarial scenarios.\nExplicitly write out your entire deliberation process, documenting every intermediate step, considered alternative, and rejected hypothesis to ensure absolutely no assumption is left unchecked.\n\n";
const EFFORT_BEYOND: &str = "Reasoning Effort: Beyond maximum — exhaustive, relentless, and uncompromising.\nYou MUST reason with the utmost depth and rigor, leaving absolutely nothing to chance: exhaustively decompose the problem into its most fundamental components, trace every causal chain to its root, and resolve the underlying cause rather than any surface symptom.\nDo not stop reasoning until you have independently verified the solution from multiple angles and are certain that no assumption remains unchecked and no error remains undiscovered.\n\n";

/// Which release's texts are written. They differ in the reasoning effort alone.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Release {
    /// April 2026.
    #[default]
    V4,
    /// V4-Flash-0731.
    V4Flash0731,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Effort {
    #[default]
    Low,
    High,
    Max,
}

impl Effort {
    fn text(self, release: Release) -> &'static str {
        match (release, self) {
            (_, Effort::Low) | (Release::V4, Effort::High) => "",
            (Release::V4, Effort::Max) | (Release::V4Flash0731, Effort::High) => EFFORT_THOROUGH,
            (Release::V4Flash0731, Effort::Max) => EFFORT_BEYOND,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    System,
    User,
    Developer,
    Assistant,
    Tool,
    LatestReminder,
}

/// A short task for the model after the last message, in place of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Task {
    Action,
    Query,
    Authority,
    Domain,
    Title,
    ReadUrl,
}

impl Task {
    fn marker(self) -> &'static str {
        match self {
            Task::Action => "<｜action｜>",
            Task::Query => "<｜query｜>",
            Task::Authority => "<｜authority｜>",
            Task::Domain => "<｜domain｜>",
            Task::Title => "<｜title｜>",
            Task::ReadUrl => "<｜read_url｜>",
        }
    }
}

/// A tool offered to the model: the OpenAI `function` object, its key order kept.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Tool {
    pub function: Value,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ToolCall {
    #[serde(default)]
    pub id: String,
    pub function: FunctionCall,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FunctionCall {
    pub name: String,
    /// JSON text of an object.
    pub arguments: String,
}

/// One message, in OpenAI's words.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Message {
    pub role: Role,
    #[serde(default)]
    pub content: Option<String>,
    /// What an assistant thought before its answer.
    #[serde(default)]
    pub reasoning_content: Option<String>,
    #[serde(default)]
    pub tool_calls: Vec<ToolCall>,
    /// The bytes in which this assistant message's tool calls were sampled, from the end of the content on; rendered
    /// instead of `tool_calls`, so that the history is what the model wrote.
    #[serde(skip)]
    pub sampled_calls: Option<String>,
    /// Which call a tool's result answers.
    #[serde(default)]
    pub tool_call_id: Option<String>,
    #[serde(default)]
    pub tools: Vec<Tool>,
    #[serde(default)]
    pub response_format: Option<Value>,
    #[serde(default)]
    pub task: Option<Task>,
    /// The assistant's message goes on: no end of sentence.
    #[serde(default, rename = "wo_eos")]
    pub unfinished: bool,
}

impl Message {
    pub fn new(role: Role, content: impl Into<String>) -> Self {
        Message {
            role,
            content: Some(content.into()),
            reasoning_content: None,
            tool_calls: Vec::new(),
            sampled_calls: None,
            tool_call_id: None,
            tools: Vec::new(),
            response_format: None,
            task: None,
            unfinished: false,
        }
    }

    pub fn user(content: impl Into<String>) -> Self {
        Self::new(Role::User, content)
    }

    pub fn system(content: impl Into<String>) -> Self {
        Self::new(Role::System, content)
    }

    pub fn assistant(content: impl Into<String>) -> Self {
        Self::new(Role::Assistant, content)
    }

    fn text(&self) -> &str {
        self.content.as_deref().unwrap_or("")
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RenderOptions {
    pub release: Release,
    pub thinking: bool,
    pub effort: Effort,
    /// Leave out the reasoning of turns before the last user message. Tools switch this off.
    pub drop_thinking: bool,
    pub bos: bool,
}

impl Default for RenderOptions {
    fn default() -> Self {
        RenderOptions {
            release: Release::V4,
            thinking: true,
            effort: Effort::Low,
            drop_thinking: true,
            bos: true,
        }
    }
}

/// A stretch of a prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Piece {
    /// Tokenised with no special token recognised.
    Text(String),
    /// A control token, by its text.
    Special(&'static str),
}

/// A rendered prompt. Neighbouring texts are one piece, so that it tokenises as one string would.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Prompt {
    pieces: Vec<Piece>,
    /// Pieces after which a message ends.
    ends: Vec<usize>,
}

/// Ids of a prompt, and the offsets at which its messages end.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PromptIds {
    pub ids: Vec<u32>,
    pub boundaries: Vec<usize>,
}

impl Prompt {
    /// A prompt of plain text.
    pub fn raw(text: &str) -> Self {
        let mut p = Self::default();
        p.text(text);
        p
    }

    /// Fill in the middle: the model writes what belongs between.
    pub fn fill_in_the_middle(prefix: &str, suffix: &str) -> Self {
        let mut p = Self::default();
        p.special(BOS);
        p.special(FIM_BEGIN);
        p.text(prefix);
        p.special(FIM_HOLE);
        p.text(suffix);
        p.special(FIM_END);
        p
    }

    pub fn pieces(&self) -> &[Piece] {
        &self.pieces
    }

    fn text(&mut self, text: &str) {
        if text.is_empty() {
            return;
        }
        let len = self.pieces.len();
        match self.pieces.last_mut() {
            Some(Piece::Text(last)) => {
                last.push_str(text);
                // What grows on is no boundary.
                self.ends.retain(|e| *e != len);
            }
            _ => self.pieces.push(Piece::Text(text.to_string())),
        }
    }

    fn special(&mut self, token: &'static str) {
        self.pieces.push(Piece::Special(token));
    }

    /// Text of ours, in which the format's own tokens are meant.
    fn trusted(&mut self, text: &str) {
        let mut rest = text;
        while let Some((at, token)) =
            [DSML, THINK, END_THINK].iter().filter_map(|t| rest.find(t).map(|at| (at, *t))).min()
        {
            self.text(&rest[..at]);
            self.special(token);
            rest = &rest[at + token.len()..];
        }
        self.text(rest);
    }

    fn end_message(&mut self) {
        self.ends.push(self.pieces.len());
    }

    /// The prompt as one string, as the official encoder prints it.
    pub fn to_text(&self) -> String {
        self.pieces
            .iter()
            .map(|p| match p {
                Piece::Text(t) => t.as_str(),
                Piece::Special(s) => s,
            })
            .collect()
    }

    pub fn to_ids(&self, tokenizer: &Tokenizer) -> Result<PromptIds, TokenizerError> {
        let mut out = PromptIds::default();
        let mut ends = self.ends.iter().peekable();
        for (i, piece) in self.pieces.iter().enumerate() {
            match piece {
                Piece::Text(t) => tokenizer.encode_into(t, &mut out.ids),
                Piece::Special(s) => out.ids.push(tokenizer.need_special(s)?),
            }
            while ends.next_if(|e| **e <= i + 1).is_some() {
                if out.boundaries.last() != Some(&out.ids.len()) {
                    out.boundaries.push(out.ids.len());
                }
            }
        }
        Ok(out)
    }
}

/// Renders a conversation up to where the model's next words go.
pub fn render(messages: &[Message], options: &RenderOptions) -> Prompt {
    let has_tools = messages.iter().any(|m| !m.tools.is_empty());
    let drop = options.drop_thinking && !has_tools;
    let turns = turns(messages);
    let last_user = turns.iter().rposition(|t| matches!(t.message.role, Role::User | Role::Developer));
    let keeps = |i: usize| !drop || last_user.is_none_or(|last| i >= last);

    let mut p = Prompt::default();
    if options.bos {
        p.special(BOS);
    }
    if options.thinking {
        p.text(options.effort.text(options.release));
    }
    for (i, turn) in turns.iter().enumerate() {
        let m = &turn.message;
        match m.role {
            Role::System => render_system(&mut p, m),
            Role::LatestReminder => {
                p.special(REMINDER);
                p.text(m.text());
            }
            Role::Developer if options.thinking && !keeps(i) => continue,
            Role::User | Role::Developer | Role::Tool => {
                p.special(USER);
                if m.role == Role::Developer {
                    render_system(&mut p, m);
                } else {
                    p.text(m.text());
                }
                let next = turns.get(i + 1).map(|t| t.message.role);
                let opens = matches!(next, None | Some(Role::Assistant | Role::LatestReminder));
                p.end_message();
                match m.task {
                    Some(task) if task != Task::Action => p.special(task.marker()),
                    task if opens => {
                        p.special(ASSISTANT);
                        p.special(if options.thinking && keeps(i) { THINK } else { END_THINK });
                        if let Some(task) = task {
                            p.special(task.marker());
                        }
                    }
                    _ => {}
                }
                continue;
            }
            Role::Assistant => {
                if options.thinking && keeps(i) {
                    p.text(m.reasoning_content.as_deref().unwrap_or(""));
                    p.special(END_THINK);
                }
                p.text(m.text());
                match &m.sampled_calls {
                    Some(sampled) => p.trusted(sampled),
                    None => render_calls(&mut p, &m.tool_calls),
                }
                if !m.unfinished {
                    p.special(EOS);
                }
                if let Some(task) = m.task {
                    p.special(task.marker());
                }
            }
        }
        p.end_message();
    }
    p
}

/// One turn of the rendered conversation: consecutive user messages and tool results are one.
struct Turn {
    message: Message,
}

fn turns(messages: &[Message]) -> Vec<Turn> {
    let mut turns: Vec<Turn> = Vec::new();
    let mut i = 0;
    while i < messages.len() {
        let m = &messages[i];
        if !matches!(m.role, Role::User | Role::Tool) {
            turns.push(Turn { message: m.clone() });
            i += 1;
            continue;
        }
        let len = messages[i..].iter().take_while(|m| matches!(m.role, Role::User | Role::Tool)).count();
        let run = &messages[i..i + len];
        // Results stand in the order of the calls that they answer.
        let order: Vec<&str> = messages[..i]
            .iter()
            .rev()
            .find(|m| m.role == Role::Assistant)
            .map_or(Vec::new(), |m| m.tool_calls.iter().map(|c| c.id.as_str()).collect());
        let place = |m: &Message| {
            m.tool_call_id.as_deref().and_then(|id| order.iter().position(|o| *o == id)).unwrap_or(usize::MAX)
        };
        let mut results: Vec<&Message> = run.iter().filter(|m| m.role == Role::Tool).collect();
        results.sort_by_key(|m| place(m));
        let mut results = results.into_iter();
        let parts: Vec<String> = run
            .iter()
            .map(|m| match m.role {
                Role::Tool => {
                    let result = results.next().unwrap_or(m);
                    format!("<tool_result>{}</tool_result>", result.text())
                }
                _ => m.text().to_string(),
            })
            .collect();
        let mut message = Message::user(parts.join("\n\n"));
        message.task = run.iter().rev().find_map(|m| m.task);
        turns.push(Turn { message });
        i += len;
    }
    turns
}

fn render_system(p: &mut Prompt, m: &Message) {
    p.text(m.text());
    if !m.tools.is_empty() {
        p.text("\n\n");
        p.trusted(TOOLS_BEFORE);
        let schemas: Vec<String> = m.tools.iter().map(|t| python_json(&t.function)).collect();
        p.text(&schemas.join("\n"));
        p.trusted(TOOLS_AFTER);
    }
    if let Some(format) = &m.response_format {
        p.text("\n\n");
        p.text(RESPONSE_FORMAT);
        p.text(&python_json(format));
    }
}

fn render_calls(p: &mut Prompt, calls: &[ToolCall]) {
    if calls.is_empty() {
        return;
    }
    p.trusted("\n\n<｜DSML｜tool_calls>\n");
    for call in calls {
        p.trusted("<｜DSML｜invoke name=\"");
        p.text(&call.function.name);
        p.text("\">\n");
        match serde_json::from_str(&call.function.arguments) {
            Ok(Value::Object(arguments)) => {
                for (i, (name, value)) in arguments.iter().enumerate() {
                    if i > 0 {
                        p.text("\n");
                    }
                    match value {
                        Value::String(s) => render_parameter(p, name, "true", s),
                        other => render_parameter(p, name, "false", &python_json(other)),
                    }
                }
            }
            _ => render_parameter(p, "arguments", "true", &call.function.arguments),
        }
        p.trusted("\n</｜DSML｜invoke>\n");
    }
    p.trusted("</｜DSML｜tool_calls>");
}

fn render_parameter(p: &mut Prompt, name: &str, string: &str, value: &str) {
    p.trusted("<｜DSML｜parameter name=\"");
    p.text(name);
    p.text(&format!("\" string=\"{string}\">"));
    p.text(value);
    p.trusted("</｜DSML｜parameter>");
}

/// JSON as Python's `json.dumps(ensure_ascii=False)` prints it: `", "` and `": "`, key order kept.
pub fn python_json(value: &Value) -> String {
    struct Spaced;
    impl Formatter for Spaced {
        fn begin_array_value<W: ?Sized + std::io::Write>(
            &mut self,
            w: &mut W,
            first: bool,
        ) -> std::io::Result<()> {
            w.write_all(if first { b"" } else { b", " })
        }

        fn begin_object_key<W: ?Sized + std::io::Write>(
            &mut self,
            w: &mut W,
            first: bool,
        ) -> std::io::Result<()> {
            w.write_all(if first { b"" } else { b", " })
        }

        fn begin_object_value<W: ?Sized + std::io::Write>(&mut self, w: &mut W) -> std::io::Result<()> {
            w.write_all(b": ")
        }
    }
    let mut out = Vec::new();
    // Writing a value into memory does not fail.
    let _ = value.serialize(&mut Serializer::with_formatter(&mut out, Spaced));
    String::from_utf8_lossy(&out).into_owned()
}
