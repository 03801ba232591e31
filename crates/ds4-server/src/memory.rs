//! What was sampled here, so that it comes back byte for byte when a client sends the conversation again.
//!
//! Clients return an answer as text and parsed calls; most leave its reasoning out. Rendered from that alone, the history
//! would differ from what the model wrote, and everything behind it would be evaluated anew. So the exact bytes are kept
//! under the conversation that led to them and the answer as the client saw it. A conversation is matched as a whole: what
//! one client was told never shows in the prompt of another that did not have the same conversation.

use std::collections::{HashMap, VecDeque};
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use ds4_text::chat::{Message, Role};
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// Names a conversation, or a conversation with an answer.
pub type Key = blake3::Hash;

/// An answer's parts that a client does not send back.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sampled {
    pub reasoning: String,
    pub calls: Option<String>,
}

impl Sampled {
    fn bytes(&self) -> usize {
        self.reasoning.len() + self.calls.as_ref().map_or(0, String::len) + 64
    }
}

#[derive(Default)]
struct Kept {
    turns: HashMap<Key, Sampled>,
    /// Oldest first.
    order: VecDeque<Key>,
    bytes: usize,
    changed: bool,
}

pub struct Memory {
    kept: Mutex<Kept>,
    limit: usize,
}

impl Memory {
    /// Keeps `limit` bytes; the oldest go first.
    pub fn new(limit: usize) -> Self {
        Memory { kept: Mutex::default(), limit }
    }

    fn kept(&self) -> std::sync::MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts the sampled bytes into the turns that were answered here. Gives the conversation's own key.
    pub fn recall(&self, messages: &mut [Message]) -> Key {
        let mut hash = blake3::Hasher::new();
        for m in messages {
            let before = hash.clone();
            add(&mut hash, m);
            if m.role != Role::Assistant {
                continue;
            }
            let Some(sampled) = self.kept().turns.get(&answer_key(before.finalize(), m)).cloned() else {
                continue;
            };
            m.sampled_calls = sampled.calls;
            if m.reasoning_content.is_none() {
                m.reasoning_content = Some(sampled.reasoning);
            }
        }
        hash.finalize()
    }

    /// Keeps what was sampled after the conversation `key`; `answer` is what the client is given.
    pub fn keep(&self, key: Key, answer: &Message, sampled: Sampled) {
        let key = answer_key(key, answer);
        let mut kept = self.kept();
        kept.changed = true;
        kept.bytes += sampled.bytes();
        match kept.turns.insert(key, sampled) {
            Some(old) => kept.bytes -= old.bytes(),
            None => kept.order.push_back(key),
        }
        while kept.bytes > self.limit {
            let Some(oldest) = kept.order.pop_front() else { break };
            if let Some(old) = kept.turns.remove(&oldest) {
                kept.bytes -= old.bytes();
            }
        }
    }

    pub fn bytes(&self) -> usize {
        self.kept().bytes
    }

    /// Reads what [`Memory::save`] wrote. Lines that do not check are left out.
    pub fn load(&self, path: &Path) -> std::io::Result<usize> {
        let text = match std::fs::read_to_string(path) {
            Ok(text) => text,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(0),
            Err(e) => return Err(e),
        };
        let mut read = 0;
        for line in text.lines() {
            let Ok(Line { key, check, sampled }) = serde_json::from_str::<Line>(line) else { continue };
            let (Ok(key), true) = (Key::from_hex(&key), check == checksum(&key, &sampled)) else { continue };
            let mut kept = self.kept();
            if kept.bytes + sampled.bytes() <= self.limit && !kept.turns.contains_key(&key) {
                kept.bytes += sampled.bytes();
                kept.turns.insert(key, sampled);
                kept.order.push_back(key);
                read += 1;
            }
        }
        Ok(read)
    }

    /// Writes everything beside the snapshots, if anything changed: to another name first, then in one move.
    pub fn save(&self, path: &Path) -> std::io::Result<()> {
        let mut text = String::new();
        {
            let mut kept = self.kept();
            if !std::mem::take(&mut kept.changed) {
                return Ok(());
            }
            for key in &kept.order {
                let Some(sampled) = kept.turns.get(key).cloned() else { continue };
                let hex = key.to_hex().to_string();
                let line = Line { check: checksum(&hex, &sampled), key: hex, sampled };
                text.push_str(&serde_json::to_string(&line)?);
                text.push('\n');
            }
        }
        let unfinished = path.with_extension("new");
        std::fs::write(&unfinished, text)?;
        std::fs::rename(unfinished, path)
    }
}

#[derive(Serialize, Deserialize)]
struct Line {
    key: String,
    check: String,
    #[serde(flatten)]
    sampled: Sampled,
}

fn checksum(key: &str, s: &Sampled) -> String {
    let mut hash = blake3::Hasher::new();
    part(&mut hash, key);
    part(&mut hash, &s.reasoning);
    part(&mut hash, s.calls.as_deref().unwrap_or("\0"));
    hash.finalize().to_hex()[..16].to_string()
}

fn part(hash: &mut blake3::Hasher, text: &str) {
    hash.update(&(text.len() as u64).to_le_bytes());
    hash.update(text.as_bytes());
}

fn add(hash: &mut blake3::Hasher, m: &Message) {
    hash.update(&[m.role as u8]);
    part(hash, m.content.as_deref().unwrap_or(""));
    for call in &m.tool_calls {
        part(hash, &call.function.name);
        // Clients parse arguments and print them again.
        let arguments = &call.function.arguments;
        let same = serde_json::from_str(arguments).map(|v: Value| v.to_string());
        part(hash, same.as_deref().unwrap_or(arguments));
    }
    for tool in &m.tools {
        part(hash, &tool.function.to_string());
    }
}

fn answer_key(conversation: Key, answer: &Message) -> Key {
    let mut hash = blake3::Hasher::new();
    hash.update(conversation.as_bytes());
    add(&mut hash, answer);
    hash.finalize()
}

/// A number that nobody can guess.
pub fn random() -> u64 {
    getrandom::u64().unwrap_or_else(|_| {
        // Without the system's source: unique, and no secret depends on it alone.
        use std::hash::{BuildHasher, RandomState};
        RandomState::new().hash_one(std::time::Instant::now())
    })
}

/// A name for an object of an API: `prefix` and 24 letters.
pub fn new_id(prefix: &str) -> String {
    format!("{prefix}{:016x}{:08x}", random(), random() as u32)
}

const SEALED: &str = "ds4:";

/// Reasoning as the opaque text that clients keep and send back.
pub fn seal(reasoning: &str) -> String {
    format!("{SEALED}{}", STANDARD.encode(reasoning))
}

/// What [`seal`] was given; `None` for a text of another origin.
pub fn unseal(sealed: &str) -> Option<String> {
    String::from_utf8(STANDARD.decode(sealed.strip_prefix(SEALED)?).ok()?).ok()
}

#[cfg(test)]
mod tests {
    use ds4_text::chat::{FunctionCall, ToolCall};

    use super::*;

    fn call(arguments: &str) -> Message {
        let mut m = Message::assistant("");
        m.tool_calls = vec![ToolCall {
            id: "any".into(),
            function: FunctionCall { name: "f".into(), arguments: arguments.into() },
        }];
        m
    }

    fn sampled(text: &str) -> Sampled {
        Sampled { reasoning: "because".into(), calls: Some(text.into()) }
    }

    #[test]
    fn comes_back_for_the_same_conversation_alone() {
        let memory = Memory::new(1 << 20);
        let mut asked = vec![Message::user("hi")];
        let key = memory.recall(&mut asked);
        memory.keep(key, &call(r#"{"a": 1}"#), sampled("raw"));
        // Printed anew by the client.
        let mut again = vec![Message::user("hi"), call(r#"{"a":1}"#), Message::user("go on")];
        memory.recall(&mut again);
        assert_eq!(again[1].sampled_calls.as_deref(), Some("raw"));
        assert_eq!(again[1].reasoning_content.as_deref(), Some("because"));
        for (first, arguments) in [("hello", r#"{"a":1}"#), ("hi", r#"{"a":2}"#)] {
            let mut other = vec![Message::user(first), call(arguments)];
            memory.recall(&mut other);
            assert_eq!(other[1].sampled_calls, None, "{first} {arguments}");
            assert_eq!(other[1].reasoning_content, None);
        }
    }

    #[test]
    fn is_bounded_and_survives_on_disk() {
        let memory = Memory::new(400);
        let key = memory.recall(&mut []);
        for i in 0..10 {
            memory.keep(key, &Message::assistant(i.to_string()), sampled("x"));
        }
        assert!(memory.bytes() <= 400);
        let newest = |m: &Memory| {
            let mut messages = [Message::assistant("9")];
            m.recall(&mut messages);
            messages[0].reasoning_content.clone()
        };
        assert!(newest(&memory).is_some());
        let dir = tempfile();
        let path = dir.join("turns.jsonl");
        memory.save(&path).unwrap();
        let mut text = std::fs::read_to_string(&path).unwrap();
        text.insert_str(0, "not a line\n");
        std::fs::write(&path, text.replacen("because", "becouse", 1)).unwrap();
        let other = Memory::new(400);
        let lines = memory.kept().order.len();
        assert_eq!(other.load(&path).unwrap(), lines - 1, "the forged line is left out");
        assert!(newest(&other).is_some());
        std::fs::remove_dir_all(dir).unwrap();
    }

    fn tempfile() -> std::path::PathBuf {
        let dir = std::env::temp_dir().join(new_id("ds4-memory-"));
        std::fs::create_dir(&dir).unwrap();
        dir
    }

    #[test]
    fn sealed_reasoning_opens_again() {
        assert_eq!(unseal(&seal("a thought: ü")).as_deref(), Some("a thought: ü"));
        assert_eq!(unseal("gAAAA"), None);
    }
}
