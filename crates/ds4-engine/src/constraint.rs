//! What an answer may look like: JSON, a regular expression or a grammar, as masks over the next token.
//!
//! The grammar engine is `llguidance`. A mask is computed on a thread of its own while the step runs whose result it
//! applies to; the row then comes back as logits, and the token is drawn here.

use serde_json::Value;

/// Limits the tokens that may be generated.
#[derive(Clone, Debug, PartialEq)]
pub struct Constraint {
    pub form: Form,
    /// Free text comes first, up to and including this token (`</think>`); the form holds for what follows. Until
    /// then no stop token is drawn.
    pub after: Option<u32>,
}

#[derive(Clone, Debug, PartialEq)]
pub enum Form {
    /// Any JSON object.
    JsonObject,
    /// JSON that the schema accepts.
    JsonSchema(Value),
    Regex(String),
    /// A grammar in Lark's notation, as `llguidance` reads it; special tokens are written `<[id]>`.
    Lark(String),
    /// A block of valid calls in the model's own notation, each to one of these tools; several only where `many`.
    ToolCalls {
        tools: Vec<ToolForm>,
        many: bool,
    },
}

/// A tool that may be called.
#[derive(Clone, Debug, PartialEq)]
pub struct ToolForm {
    pub name: String,
    /// JSON schema of its arguments, an object.
    pub parameters: Value,
}

/// The grammar of a tool-call block (the notation is the published chat encoder's): arguments come in the schema's
/// order, strings as they are, everything else as JSON.
#[cfg(feature = "grammar")]
fn tool_grammar(tools: &[ToolForm], many: bool) -> Result<String, String> {
    use std::fmt::Write;

    let dsml = ds4_text::chat::DSML;
    let quote = |text: String| Value::String(text).to_string();
    let close = quote(format!("</{dsml}parameter>\n"));
    let mut out = format!(
        "start: {} call{} {}\n",
        quote(format!("\n\n<{dsml}tool_calls>\n")),
        if many { "+" } else { "" },
        quote(format!("</{dsml}tool_calls>"))
    );
    let names: Vec<String> = (0..tools.len()).map(|i| format!("call_{i}")).collect();
    let mut rule = |text: String| writeln!(out, "{text}").map_err(|e| e.to_string());
    rule(format!("call: {}", names.join(" | ")))?;
    rule(format!("text[suffix={close}]: /(.|\\n)*/"))?;
    for (i, tool) in tools.iter().enumerate() {
        let empty = serde_json::Map::new();
        let schema = tool.parameters.as_object().unwrap_or(&empty);
        let properties = schema.get("properties").and_then(Value::as_object).unwrap_or(&empty);
        let required = schema.get("required").and_then(Value::as_array).cloned().unwrap_or_default();
        let mut arguments = Vec::new();
        for (j, (key, property)) in properties.iter().enumerate() {
            let open = |string: bool| quote(format!("<{dsml}parameter name=\"{key}\" string=\"{string}\">"));
            let plain = property.get("type") == Some(&Value::String("string".into()));
            let choices = property.get("enum").and_then(Value::as_array);
            rule(match (plain, choices) {
                (true, Some(choices)) => {
                    let all: Vec<String> =
                        choices.iter().filter_map(Value::as_str).map(|c| quote(c.to_string())).collect();
                    format!("arg_{i}_{j}: {} ({}) {close}", open(true), all.join(" | "))
                }
                (true, None) => format!("arg_{i}_{j}: {} text", open(true)),
                (false, _) => {
                    let mut whole = property.clone();
                    // References reach the definitions of the whole schema.
                    for defs in ["$defs", "definitions"] {
                        if let (Some(d), Some(o)) = (schema.get(defs), whole.as_object_mut()) {
                            o.entry(defs).or_insert_with(|| d.clone());
                        }
                    }
                    format!("arg_{i}_{j}: {} json_{i}_{j} {close}\njson_{i}_{j}: %json {whole}", open(false))
                }
            })?;
            let needed = required.iter().any(|r| r.as_str() == Some(key));
            arguments.push(format!("arg_{i}_{j}{}", if needed { "" } else { "?" }));
        }
        if arguments.is_empty() {
            arguments.push(quote("\n".into()));
        }
        let open = quote(format!("<{dsml}invoke name=\"{}\">\n", tool.name));
        let end = quote(format!("</{dsml}invoke>\n"));
        rule(format!("call_{i}: {open} {} {end}", arguments.join(" ")))?;
    }
    Ok(out)
}

#[cfg(feature = "grammar")]
pub(crate) use with_grammar::{Grammars, State};
#[cfg(not(feature = "grammar"))]
pub(crate) use without_grammar::{Grammars, State};

/// What drawing a constrained token came to.
pub(crate) enum Drawn {
    Token(u32),
    /// The constraint is complete: the answer ends with this token.
    Last(u32),
}

#[cfg(feature = "grammar")]
mod with_grammar {
    use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
    use std::sync::{Arc, OnceLock};
    use std::thread;

    use ds4_text::{TokenKind, Tokenizer, chat};
    use llguidance::api::TopLevelGrammar;
    use llguidance::toktrie::{SimpleVob, TokEnv, TokRxInfo, TokTrie, TokenId, TokenizerEnv};
    use llguidance::{Matcher, ParserFactory};
    use serde_json::json;

    use super::{Constraint, Drawn, Form, tool_grammar};
    use crate::sampler::{Sampler, Sampling};

    /// Masks that wait for the thread: at most one per session.
    const JOBS_MAX: usize = 1024;

    struct Vocabulary {
        tokenizer: Arc<Tokenizer>,
        trie: TokTrie,
    }

    impl TokenizerEnv for Vocabulary {
        fn tok_trie(&self) -> &TokTrie {
            &self.trie
        }

        fn tokenize_bytes(&self, bytes: &[u8]) -> Vec<TokenId> {
            self.trie.tokenize_with_greedy_fallback(bytes, |text| self.tokenizer.encode(text))
        }
    }

    type Masked = (Box<Matcher>, Result<SimpleVob, String>);

    struct Job {
        matcher: Box<Matcher>,
        answer: SyncSender<Masked>,
    }

    /// Compiles constraints, and computes masks beside the steps.
    pub(crate) struct Grammars {
        tokenizer: Arc<Tokenizer>,
        /// Made for the first constraint: building the vocabulary's tree takes a moment.
        factory: OnceLock<Result<(ParserFactory, SyncSender<Job>), String>>,
    }

    impl Grammars {
        pub fn new(tokenizer: Arc<Tokenizer>) -> Self {
            Grammars { tokenizer, factory: OnceLock::new() }
        }

        /// Checks and compiles a constraint.
        pub fn compile(&self, constraint: &Constraint) -> Result<State, String> {
            let made = self.factory.get_or_init(|| factory(&self.tokenizer));
            let (factory, jobs) = made.as_ref().map_err(Clone::clone)?;
            let grammar = match &constraint.form {
                Form::JsonObject => TopLevelGrammar::from_json_schema(json!({"type": "object"})),
                Form::JsonSchema(schema) => TopLevelGrammar::from_json_schema(schema.clone()),
                Form::Regex(text) => TopLevelGrammar::from_regex(text),
                Form::Lark(text) => TopLevelGrammar::from_lark(text.clone()),
                Form::ToolCalls { tools, many } => {
                    if tools.is_empty() {
                        return Err("a tool call is demanded, and there are no tools".into());
                    }
                    TopLevelGrammar::from_lark(tool_grammar(tools, *many)?)
                }
            };
            let matcher = Matcher::new(factory.create_parser(grammar));
            match matcher.get_error() {
                Some(reason) => Err(reason),
                None => Ok(State {
                    phase: Phase::Idle(Box::new(matcher)),
                    after: constraint.after,
                    jobs: jobs.clone(),
                }),
            }
        }
    }

    fn factory(tokenizer: &Arc<Tokenizer>) -> Result<(ParserFactory, SyncSender<Job>), String> {
        let eos = tokenizer.need_special(chat::EOS).map_err(|e| e.to_string())?;
        let words: Vec<Vec<u8>> = (0..tokenizer.len() as u32)
            .map(|id| match tokenizer.kind(id) {
                TokenKind::Control => [&[TokTrie::SPECIAL_TOKEN_MARKER], tokenizer.token_bytes(id)].concat(),
                _ => tokenizer.token_bytes(id).to_vec(),
            })
            .collect();
        let trie = TokTrie::from(&TokRxInfo::new(words.len() as u32, eos), &words);
        let env: TokEnv = Arc::new(Vocabulary { tokenizer: tokenizer.clone(), trie });
        let mut factory = ParserFactory::new_simple(&env).map_err(|e| e.to_string())?;
        factory.quiet();
        let (jobs, inbox) = sync_channel::<Job>(JOBS_MAX);
        thread::Builder::new()
            .name("grammar".into())
            .spawn(move || {
                for Job { mut matcher, answer } in inbox {
                    let mask = matcher.compute_mask_or_eos().map_err(|e| e.to_string());
                    // Nobody waits for it where its request has ended.
                    let _ = answer.send((matcher, mask));
                }
            })
            .map_err(|e| format!("no thread for grammars: {e}"))?;
        Ok((factory, jobs))
    }

    enum Phase {
        Idle(Box<Matcher>),
        /// The mask for the next token is being computed.
        Masking(Receiver<Masked>),
        Failed(String),
    }

    /// A constraint of one running sequence.
    pub(crate) struct State {
        phase: Phase,
        after: Option<u32>,
        jobs: SyncSender<Job>,
    }

    impl State {
        /// Whether the next token is constrained already.
        pub fn active(&self) -> bool {
            self.after.is_none()
        }

        /// Takes a token of the free text.
        pub fn pass(&mut self, token: u32) {
            if self.after == Some(token) {
                self.after = None;
            }
        }

        /// Starts on the mask for the next token, unless that is under way.
        pub fn prepare(&mut self) {
            if !matches!(self.phase, Phase::Idle(_)) {
                return;
            }
            let Phase::Idle(matcher) = self.take() else { return };
            let (answer, answered) = sync_channel(1);
            self.phase = match self.jobs.try_send(Job { matcher, answer }) {
                Ok(()) => Phase::Masking(answered),
                Err(e) => Phase::Failed(format!("the grammar thread takes no more work: {e}")),
            };
        }

        fn take(&mut self) -> Phase {
            std::mem::replace(&mut self.phase, Phase::Failed("an earlier token failed".into()))
        }

        /// Draws the next token from `logits`.
        pub fn draw(
            &mut self,
            logits: &[f32],
            sampling: &Sampling,
            sampler: &mut Sampler,
        ) -> Result<Drawn, String> {
            self.prepare();
            let (mut matcher, mask) = match self.take() {
                Phase::Masking(answer) => {
                    let (matcher, mask) =
                        answer.recv().map_err(|_| "the grammar thread has ended".to_string())?;
                    (matcher, mask?)
                }
                Phase::Failed(reason) => return Err(reason),
                Phase::Idle(_) => return Err("no mask was prepared".into()),
            };
            if mask.num_set() == 0 {
                return Err("no token continues the answer".into());
            }
            let token = sampler.sample(logits, sampling, Some(mask.as_slice()));
            matcher.consume_token(token).map_err(|e| e.to_string())?;
            let last = matcher.is_stopped();
            self.phase = Phase::Idle(matcher);
            Ok(if last { Drawn::Last(token) } else { Drawn::Token(token) })
        }
    }
}

#[cfg(not(feature = "grammar"))]
mod without_grammar {
    use std::sync::Arc;

    use ds4_text::Tokenizer;

    use super::{Constraint, Drawn};
    use crate::sampler::{Sampler, Sampling};

    /// This build has no grammar engine: every constraint is refused.
    pub(crate) struct Grammars;

    /// Never made.
    pub(crate) enum State {}

    impl Grammars {
        pub fn new(_: Arc<Tokenizer>) -> Self {
            Grammars
        }

        pub fn compile(&self, _: &Constraint) -> Result<State, String> {
            Err("this program was built without constrained decoding (feature \"grammar\")".into())
        }
    }

    impl State {
        pub fn active(&self) -> bool {
            match *self {}
        }

        pub fn pass(&mut self, _: u32) {
            match *self {}
        }

        pub fn prepare(&mut self) {
            match *self {}
        }

        pub fn draw(&mut self, _: &[f32], _: &Sampling, _: &mut Sampler) -> Result<Drawn, String> {
            match *self {}
        }
    }
}
