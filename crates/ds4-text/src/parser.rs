//! The streaming output parser: a model's words to reasoning, content and tool calls.
//!
//! It takes bytes in any portions and gives the same events in sum. What the official parser accepts comes out as the
//! official parser reads it; what it rejects is repaired, and each repair is named in [`Outcome::repairs`]. Where tools
//! were offered no markup of theirs ever comes out as text.
//!
//! Arguments stream as a JSON object, piece by piece. A string parameter is passed on as it comes; any other waits for its
//! end, and comes as JSON if it is JSON, else as a string: never as an empty object.

use serde_json::Value;

use crate::chat::{END_THINK, EOS, THINK};
use crate::tokenizer::Utf8Stream;

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    Reasoning(String),
    Content(String),
    CallStart {
        index: usize,
        name: String,
    },
    /// The next piece of the arguments' JSON text.
    CallArguments {
        index: usize,
        json: String,
    },
    /// `complete` is false where the output was cut inside the call: its arguments are the beginning of a JSON object.
    CallEnd {
        index: usize,
        complete: bool,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ParserOptions {
    /// Whether the prompt ended inside a thought.
    pub thinking: bool,
    /// Whether tools were offered. Without them tool markup is ordinary text.
    pub tools: bool,
}

/// Why the output ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// The model said so.
    EndOfSentence,
    /// A limit, a stop string, a cancellation.
    Cut,
}

/// What was not as the format says, and was mended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Repair {
    /// The text ended inside a thought. What was said is in the reasoning: a server delivers it as the answer, too.
    ThinkingNotClosed,
    /// `</think>` or `<think>` where no thought was open or begun.
    StrayThink,
    /// A tool block inside a thought that was not closed.
    CallInThinking,
    /// Markup with other bars, quotes or spelling than the format's.
    Spelling,
    /// A call, block or parameter that was not closed.
    MissingCloser,
    /// A closing tag of something that was not open, or of another format.
    StrayCloser,
    /// Text where the format has none.
    StrayText,
    /// A parameter outside a call, a call without a name.
    Malformed,
    /// `string="false"` and no JSON inside: passed as a string.
    NotJson,
    /// A second parameter of the same name: the first counts.
    DuplicateParameter,
    /// No end of sentence.
    NoEnd,
}

/// What there is to say once the output has ended.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// Empty for what the official parser accepts.
    pub repairs: Vec<Repair>,
    /// The text of all tool blocks as sampled, from the end of the content on; to render the history byte for byte.
    pub sampled_calls: Option<String>,
}

/// Longest tag; what goes on longer is text.
const TAG_MAX: usize = 1024;
/// Text is looked at in pieces of this many bytes, so that what is left of a piece is cheap to move.
const PIECE: usize = 4096;

#[derive(Debug)]
enum State {
    Thinking,
    Content,
    /// In a tool block, between calls.
    Block,
    /// In a call, between parameters.
    Invoke(Call),
    /// In a parameter.
    Parameter(Call, Parameter),
}

#[derive(Debug, Default)]
struct Call {
    index: usize,
    names: Vec<String>,
}

#[derive(Debug)]
struct Parameter {
    /// `string="true"`: passed on as it comes.
    streams: bool,
    /// A second of the same name: not passed on.
    ignored: bool,
    /// What has come of a value that does not stream.
    value: String,
}

pub struct OutputParser {
    options: ParserOptions,
    utf8: Utf8Stream,
    /// Text that is not yet decided.
    buf: String,
    /// `buf` is white space at the end of a value, where more of it decides nothing.
    blank: bool,
    state: State,
    events: Vec<Event>,
    calls: usize,
    repairs: Vec<Repair>,
    sampled_calls: Option<String>,
    /// Something was said as content.
    said: bool,
    /// A tool block has ended: newlines behind it are the format's.
    after_block: bool,
    /// Inside words that stand where only tags should: their white space is theirs.
    stray: bool,
    ended: bool,
}

impl OutputParser {
    pub fn new(options: ParserOptions) -> Self {
        OutputParser {
            options,
            utf8: Utf8Stream::new(),
            buf: String::new(),
            blank: false,
            state: if options.thinking { State::Thinking } else { State::Content },
            events: Vec::new(),
            calls: 0,
            repairs: Vec::new(),
            sampled_calls: None,
            said: false,
            after_block: false,
            stray: false,
            ended: false,
        }
    }

    /// Whether the words so far are inside a thought.
    pub fn is_thinking(&self) -> bool {
        matches!(self.state, State::Thinking)
    }

    /// Calls begun so far.
    pub fn calls(&self) -> usize {
        self.calls
    }

    /// Takes bytes of the output and gives what they decide.
    pub fn push(&mut self, bytes: &[u8]) -> Vec<Event> {
        let text = self.utf8.push(bytes);
        self.push_text(&text);
        std::mem::take(&mut self.events)
    }

    /// The output has ended. The end-of-sentence token itself may or may not have been pushed.
    pub fn finish(&mut self, end: End) -> (Vec<Event>, Outcome) {
        let text = self.utf8.finish();
        self.push_text(&text);
        let end = if self.ended { End::EndOfSentence } else { end };
        self.run(true);
        if end == End::Cut {
            self.note(Repair::NoEnd);
        }
        match std::mem::replace(&mut self.state, State::Content) {
            State::Thinking => self.note(Repair::ThinkingNotClosed),
            State::Content => {}
            State::Block => self.note(Repair::MissingCloser),
            State::Invoke(call) => self.close_unfinished(call, end),
            State::Parameter(call, parameter) => {
                if end == End::EndOfSentence {
                    let call = self.end_parameter(call, parameter);
                    self.close_unfinished(call, end);
                } else {
                    self.close_unfinished(call, end);
                }
            }
        }
        let outcome =
            Outcome { repairs: std::mem::take(&mut self.repairs), sampled_calls: self.sampled_calls.take() };
        (std::mem::take(&mut self.events), outcome)
    }

    fn close_unfinished(&mut self, call: Call, end: End) {
        self.note(Repair::MissingCloser);
        if end == End::EndOfSentence {
            self.end_call(call);
        } else {
            self.events.push(Event::CallEnd { index: call.index, complete: false });
        }
    }

    fn push_text(&mut self, mut text: &str) {
        while !text.is_empty() && !self.ended {
            let (piece, rest) = text.split_at(text.ceil_char_boundary(PIECE.min(text.len())));
            self.push_piece(piece);
            text = rest;
        }
    }

    fn push_piece(&mut self, piece: &str) {
        // The end of sentence may have begun in what is held back.
        let seen = self.buf.floor_char_boundary(self.buf.len().saturating_sub(EOS.len()));
        self.buf.push_str(piece);
        if self.blank && piece.trim_start().is_empty() {
            return;
        }
        if let Some(at) = self.buf[seen..].find(EOS) {
            self.buf.truncate(seen + at);
            self.ended = true;
        }
        self.run(false);
        self.blank = matches!(self.state, State::Parameter(..)) && self.buf.trim_start().is_empty();
    }

    fn note(&mut self, repair: Repair) {
        if !self.repairs.contains(&repair) {
            self.repairs.push(repair);
        }
    }

    /// Decides as much of the buffer as can be; all of it if nothing more will come.
    fn run(&mut self, last: bool) {
        loop {
            let progressed = match &self.state {
                State::Thinking | State::Content => self.prose(last),
                State::Block | State::Invoke(_) => self.structure(last),
                State::Parameter(..) => self.value(last),
            };
            if !progressed {
                return;
            }
        }
    }

    /// Takes `len` bytes off the buffer; part of what was sampled as calls if a block is open.
    fn take(&mut self, len: usize) -> String {
        let taken: String = self.buf.drain(..len).collect();
        if let Some(raw) = &mut self.sampled_calls {
            raw.push_str(&taken);
        }
        taken
    }

    fn emit_prose(&mut self, mut text: String) {
        if matches!(self.state, State::Content) && self.after_block {
            text = text.trim_start_matches('\n').to_string();
        }
        if text.is_empty() {
            return;
        }
        if matches!(self.state, State::Thinking) {
            self.events.push(Event::Reasoning(text));
        } else {
            self.said = true;
            self.after_block = false;
            self.events.push(Event::Content(text));
        }
    }

    /// Thinking or content: text up to the next tag.
    fn prose(&mut self, last: bool) -> bool {
        let open = self.buf.find('<').unwrap_or(self.buf.len());
        if open > 0 {
            // Newlines may belong to a tool block that follows them.
            let mut len = open;
            if self.options.tools && !(last && open == self.buf.len()) {
                let newlines = self.buf[..open].bytes().rev().take_while(|b| *b == b'\n').count();
                len = open - newlines.min(2);
            }
            if len > 0 {
                let text = self.take(len);
                self.emit_prose(text);
                return true;
            }
        }
        if open == self.buf.len() {
            return false;
        }
        let (tag, len) = match read_tag(&self.buf[open..], last) {
            Read::Partial if !last => return false,
            // A tag of the format cut in the middle is not text either.
            Read::Partial if self.options.tools && self.buf[open..].contains("DSML") => {
                let text = self.take(self.buf.len());
                self.emit_prose(text[..open].to_string());
                self.note(Repair::Malformed);
                return true;
            }
            Read::Partial | Read::No => {
                let text = self.take(open + 1);
                self.emit_prose(text);
                return true;
            }
            Read::Tag(tag, len) => (tag, open + len),
        };
        match tag {
            Tag::EndThink => {
                let text = self.take(len);
                if matches!(self.state, State::Thinking) {
                    self.emit_prose(text[..open].to_string());
                    self.state = State::Content;
                } else {
                    if self.said {
                        self.emit_prose(text[..open].to_string());
                    }
                    self.note(Repair::StrayThink);
                }
            }
            Tag::Think => {
                let text = self.take(len);
                self.emit_prose(text[..open].to_string());
                self.note(Repair::StrayThink);
                self.state = State::Thinking;
            }
            Tag::Dsml(_) if !self.options.tools => {
                let text = self.take(len);
                self.emit_prose(text);
            }
            Tag::Dsml(d) => {
                if d.close || d.kind == Kind::Parameter {
                    self.take(len);
                    self.note(if d.close { Repair::StrayCloser } else { Repair::Malformed });
                    return true;
                }
                if matches!(self.state, State::Thinking) {
                    self.note(Repair::CallInThinking);
                }
                // From here on the bytes are the call's, so that history can be rendered as sampled.
                self.sampled_calls.get_or_insert_default();
                self.state = State::Block;
                if d.kind == Kind::Calls {
                    self.check_spelling(&d);
                    self.take(len);
                } else {
                    self.note(Repair::Malformed);
                    self.take(open);
                }
            }
        }
        true
    }

    fn check_spelling(&mut self, d: &Dsml) {
        if !d.exact {
            self.note(Repair::Spelling);
        }
    }

    /// Inside a block or a call, where only tags and white space stand.
    fn structure(&mut self, last: bool) -> bool {
        let space = self.buf.len() - self.buf.trim_start().len();
        if space > 0 && !self.stray {
            self.take(space);
            return true;
        }
        if self.buf.is_empty() {
            return false;
        }
        if !self.buf.starts_with('<') {
            let len = self.buf.find('<').unwrap_or(self.buf.len());
            let text = self.take(len);
            self.note(Repair::StrayText);
            self.stray = true;
            // Words between calls are still an answer; words between parameters are nothing.
            if matches!(self.state, State::Block) {
                self.said = true;
                self.events.push(Event::Content(text));
            }
            return true;
        }
        self.stray = false;
        let (tag, len) = match read_tag(&self.buf, last) {
            Read::Tag(tag, len) => (Some(tag), len),
            Read::Partial if !last => return false,
            // A tag of the format cut in the middle: no words.
            Read::Partial if self.buf.contains("DSML") => {
                self.take(self.buf.len());
                self.note(Repair::MissingCloser);
                return false;
            }
            Read::Partial | Read::No => match foreign_closer(&self.buf) {
                Some(0) if !last => return false,
                Some(len) if len > 0 => (None, len),
                _ => (None, self.buf.chars().next().map_or(0, char::len_utf8)),
            },
        };
        let Some(Tag::Dsml(d)) = tag else {
            self.take(len);
            self.note(if tag.is_some() { Repair::StrayThink } else { Repair::StrayCloser });
            return true;
        };
        self.check_spelling(&d);
        let state = std::mem::replace(&mut self.state, State::Block);
        match (d.kind, d.close) {
            (Kind::Invoke, false) => {
                if let State::Invoke(call) = state {
                    self.note(Repair::MissingCloser);
                    self.end_call(call);
                }
                self.take(len);
                self.start_call(&d);
            }
            (Kind::Invoke, true) => {
                self.take(len);
                match state {
                    State::Invoke(call) => self.end_call(call),
                    _ => self.note(Repair::StrayCloser),
                }
            }
            (Kind::Calls, true) => {
                if let State::Invoke(call) = state {
                    self.note(Repair::MissingCloser);
                    self.end_call(call);
                }
                self.take(len);
                self.after_block = true;
                self.state = State::Content;
            }
            (Kind::Calls, false) => {
                self.take(len);
                self.note(Repair::Malformed);
                self.state = state;
            }
            (Kind::Parameter, false) => {
                self.take(len);
                match state {
                    State::Invoke(call) => self.start_parameter(call, &d),
                    other => {
                        self.note(Repair::Malformed);
                        self.state = other;
                    }
                }
            }
            (Kind::Parameter, true) => {
                self.take(len);
                self.note(Repair::StrayCloser);
                self.state = state;
            }
        }
        true
    }

    fn start_call(&mut self, d: &Dsml) {
        if d.name.is_empty() {
            self.note(Repair::Malformed);
            return;
        }
        let call = Call { index: self.calls, names: Vec::new() };
        self.calls += 1;
        self.events.push(Event::CallStart { index: call.index, name: d.name.clone() });
        self.state = State::Invoke(call);
    }

    fn arguments(&mut self, index: usize, json: String) {
        self.events.push(Event::CallArguments { index, json });
    }

    fn end_call(&mut self, call: Call) {
        self.arguments(call.index, if call.names.is_empty() { "{}".into() } else { "}".into() });
        self.events.push(Event::CallEnd { index: call.index, complete: true });
        self.state = State::Block;
    }

    fn start_parameter(&mut self, mut call: Call, d: &Dsml) {
        let ignored = call.names.contains(&d.name);
        if ignored {
            self.note(Repair::DuplicateParameter);
        } else {
            let lead = if call.names.is_empty() { "{" } else { ", " };
            self.arguments(call.index, format!("{lead}{}: ", Value::String(d.name.clone())));
            call.names.push(d.name.clone());
        }
        let streams = d.string == Some(true);
        if streams && !ignored {
            self.arguments(call.index, "\"".into());
        }
        self.state = State::Parameter(call, Parameter { streams, ignored, value: String::new() });
    }

    /// Passes on a piece of the value.
    fn add_value(&mut self, text: String) {
        let State::Parameter(call, parameter) = &mut self.state else { return };
        if parameter.ignored || text.is_empty() {
            return;
        }
        if !parameter.streams {
            parameter.value.push_str(&text);
            return;
        }
        let index = call.index;
        let quoted = Value::String(text).to_string();
        self.arguments(index, quoted[1..quoted.len() - 1].to_string());
    }

    /// Closes the value. The state is left to the caller.
    fn end_parameter(&mut self, call: Call, parameter: Parameter) -> Call {
        if parameter.ignored {
            return call;
        }
        if parameter.streams {
            self.arguments(call.index, "\"".into());
            return call;
        }
        let text = parameter.value.trim();
        let json = match serde_json::from_str::<Value>(text) {
            Ok(_) => text.to_string(),
            Err(_) => {
                self.note(Repair::NotJson);
                Value::String(parameter.value.clone()).to_string()
            }
        };
        self.arguments(call.index, json);
        call
    }

    /// Inside a parameter: its value goes on to the next tag of the format.
    fn value(&mut self, last: bool) -> bool {
        let mut from = 0;
        while let Some(open) = self.buf[from..].find('<').map(|at| from + at) {
            match read_tag(&self.buf[open..], last) {
                // A call's opener in here is data, say a document about the format: no call comes of it.
                Read::Tag(Tag::Dsml(d), _) if !d.close && d.kind != Kind::Parameter => from = open + 1,
                Read::Tag(Tag::Dsml(d), len) => {
                    let closes = d.kind == Kind::Parameter && d.close;
                    // Without its own closer the value ends before the line break and other formats' closers.
                    let end = if closes { open } else { trim_tail(&self.buf[..open]) };
                    let text = self.take(end);
                    self.add_value(text);
                    let State::Parameter(call, parameter) = std::mem::replace(&mut self.state, State::Block)
                    else {
                        return true;
                    };
                    let call = self.end_parameter(call, parameter);
                    self.state = State::Invoke(call);
                    if closes {
                        self.check_spelling(&d);
                        self.take(open - end + len);
                    } else {
                        self.note(Repair::MissingCloser);
                        self.take(open - end);
                    }
                    return true;
                }
                Read::Partial if !last => {
                    return self.pass_value(trim_tail(&self.buf[..open]));
                }
                _ => from = open + 1,
            }
        }
        let end = trim_tail(&self.buf);
        if last {
            let text = self.take(end);
            self.add_value(text);
            let rest = self.buf.len();
            self.take(rest);
            return false;
        }
        self.pass_value(end)
    }

    fn pass_value(&mut self, len: usize) -> bool {
        let text = self.take(len);
        self.add_value(text);
        false
    }
}

/// Length of `text` without the white space and closing tags of other formats at its end, whole or begun: they are the
/// value's only if something follows them.
fn trim_tail(text: &str) -> usize {
    let mut t = text;
    loop {
        let trimmed = t.trim_end();
        let body = trimmed.strip_suffix('>').unwrap_or(trimmed);
        let name = body.trim_end_matches(|c: char| c.is_ascii_alphabetic() || c == '_');
        let next = match name.strip_suffix("</") {
            Some(before) => before,
            // A tag that has only begun.
            None if body.len() == trimmed.len() => trimmed.strip_suffix('<').unwrap_or(trimmed),
            None => trimmed,
        };
        if next.len() == t.len() {
            return t.len();
        }
        t = next;
    }
}

/// Length of a closing tag `</name>` of any format at the start of `text`; 0 if it has only begun.
fn foreign_closer(text: &str) -> Option<usize> {
    let rest = text.strip_prefix('<')?;
    if rest.is_empty() {
        return Some(0);
    }
    let rest = rest.strip_prefix('/')?;
    let name = rest.trim_start_matches(|c: char| c.is_ascii_alphabetic() || c == '_');
    if name.is_empty() && text.len() < TAG_MAX {
        return Some(0);
    }
    name.starts_with('>').then(|| text.len() - name.len() + 1)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Calls,
    Invoke,
    Parameter,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Dsml {
    kind: Kind,
    close: bool,
    name: String,
    string: Option<bool>,
    /// Spelled as the format spells it.
    exact: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Tag {
    Think,
    EndThink,
    Dsml(Dsml),
}

enum Read {
    No,
    /// It may become a tag.
    Partial,
    Tag(Tag, usize),
}

const QUOTES: [char; 8] = ['"', '“', '”', '„', '‟', '＂', '\'', '’'];

/// Whether `c` closes what `open` opened: single quotes close single ones and double ones double ones, plain or
/// typographic, so that `name="user's"` is one name.
fn closes_quote(open: char, c: char) -> bool {
    let single = |c| matches!(c, '\'' | '’');
    QUOTES.contains(&c) && single(open) == single(c)
}

/// Reads a tag at the start of `text`, which begins with `<`.
fn read_tag(text: &str, last: bool) -> Read {
    // What looks like the end of a sentence behind a half tag may become one, and then the tag was cut.
    let may_be_cut = !last && text.len() < TAG_MAX + EOS.len();
    let eos = text.rfind('<').filter(|at| may_be_cut && *at > 0 && EOS.starts_with(&text[*at..]));
    match (read_complete_tag(text), eos) {
        (Read::No, Some(at)) if matches!(read_complete_tag(&text[..at]), Read::Partial) => Read::Partial,
        (Read::Partial, None) if text.len() >= TAG_MAX => Read::No,
        (read, _) => read,
    }
}

fn read_complete_tag(text: &str) -> Read {
    for (literal, tag) in [(THINK, Tag::Think), (END_THINK, Tag::EndThink)] {
        if text.starts_with(literal) {
            return Read::Tag(tag, literal.len());
        }
        if literal.starts_with(text) {
            return Read::Partial;
        }
    }
    if EOS.starts_with(text) {
        return Read::Partial;
    }
    let mut exact = true;
    let mut rest = &text[1..];
    let close = match rest.strip_prefix('/') {
        Some(r) => {
            rest = r;
            true
        }
        None => false,
    };
    let Some(r) = bars(rest, &mut exact) else { return Read::No };
    rest = r;
    // The word itself may still be coming.
    if rest.is_empty() || "DSML".starts_with(rest) {
        return Read::Partial;
    }
    let Some(r) = rest.strip_prefix("DSML") else { return Read::No };
    rest = r;
    if rest.is_empty() {
        return Read::Partial;
    }
    let Some(r) = bars(rest, &mut exact) else { return Read::No };
    rest = r.trim_start_matches(' ');
    exact &= rest.len() == r.len();

    let word_len =
        rest.find(|c: char| !(c.is_ascii_alphabetic() || c == '_' || c == '▁')).unwrap_or(rest.len());
    let (mut word, mut after) = rest.split_at(word_len);
    if word == "tool" && (" calls".starts_with(after) || after.starts_with(" calls")) {
        if after.len() < " calls".len() {
            return Read::Partial;
        }
        (word, after) = ("toolcalls", &after[" calls".len()..]);
    }
    if after.is_empty() {
        return Read::Partial;
    }
    let plain: String = word.chars().filter(|c| c.is_ascii_alphabetic()).collect();
    let kind = match plain.as_str() {
        "toolcalls" | "functioncalls" => Kind::Calls,
        "invoke" => Kind::Invoke,
        "parameter" => Kind::Parameter,
        _ => return Read::No,
    };
    exact &= matches!(word, "tool_calls" | "invoke" | "parameter");
    // Attributes: everything up to the bracket outside quotes. None of them has a line break.
    let mut quoted = None;
    let mut end = None;
    for (at, c) in after.char_indices() {
        match c {
            '>' if quoted.is_none() => {
                end = Some(at);
                break;
            }
            '\n' => return Read::No,
            c if quoted.is_some_and(|open| closes_quote(open, c)) => {
                exact &= c == '"';
                quoted = None;
            }
            c if quoted.is_none() && QUOTES.contains(&c) => {
                exact &= c == '"';
                quoted = Some(c);
            }
            _ => {}
        }
    }
    let Some(end) = end else { return Read::Partial };
    let attributes = &after[..end];
    let name = attribute(attributes, "name").unwrap_or("").to_string();
    let string = match attribute(attributes, "string") {
        Some("true") => Some(true),
        Some("false") => Some(false),
        _ => None,
    };
    let len = text.len() - after.len() + end + 1;
    Read::Tag(Tag::Dsml(Dsml { kind, close, name, string, exact }), len)
}

/// One or more bars, full-width in the format. `None` if there is none.
fn bars<'t>(text: &'t str, exact: &mut bool) -> Option<&'t str> {
    if text.is_empty() {
        return Some(text);
    }
    let rest = text.trim_start_matches(['｜', '|']);
    let bars = &text[..text.len() - rest.len()];
    *exact &= bars == "｜";
    (!bars.is_empty()).then_some(rest)
}

/// The value of `key="..."`, whatever its quotes.
fn attribute<'t>(attributes: &'t str, key: &str) -> Option<&'t str> {
    let mut rest = attributes;
    loop {
        let at = rest.find(key)?;
        let before = rest[..at].chars().next_back();
        let after = rest[at + key.len()..].trim_start();
        match after.strip_prefix('=') {
            Some(value) if before.is_none_or(|c| c.is_whitespace() || QUOTES.contains(&c)) => {
                let value = value.trim_start();
                let open = value.chars().next().filter(|c| QUOTES.contains(c));
                let inner = &value[open.map_or(0, char::len_utf8)..];
                let end = match open {
                    Some(open) => inner.find(|c| closes_quote(open, c)),
                    None => inner.find(char::is_whitespace),
                };
                let end = end.unwrap_or(inner.len());
                return Some(inner[..end].trim_end());
            }
            _ => rest = &rest[at + key.len()..],
        }
    }
}
