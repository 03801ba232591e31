//! The tokenizer: byte-level BPE with the vocabulary and merges of the model's own file.
//!
//! User text goes through [`Tokenizer::encode`], which recognises no special token: `<｜User｜>` in a message is a few
//! ordinary tokens. Control tokens are pushed as ids, looked up by their exact text in [`Tokenizer::special`].

mod merge;
mod split;

use std::collections::HashMap;

use ds4_gguf::Metadata;
use thiserror::Error;

use merge::{Merge, Table};

/// The pre-tokenizer that all V4 files name.
pub const PRE_TOKENIZER: &str = "joyai-llm";

#[derive(Debug, Error)]
pub enum TokenizerError {
    #[error(transparent)]
    Metadata(#[from] ds4_gguf::Error),
    #[error("{key}: {found:?} is not supported; supported: {supported:?}")]
    Unsupported { key: &'static str, found: String, supported: &'static str },
    #[error("vocabulary: no token for byte {byte:#04x}; a byte-level vocabulary has all 256")]
    MissingByte { byte: u8 },
    #[error("vocabulary: merge {index} ({text:?}): {reason}")]
    Merge { index: usize, text: String, reason: &'static str },
    #[error("vocabulary: {len} tokens; supported: 1 to {max}")]
    Size { len: usize, max: usize },
    #[error("vocabulary: it has no token {text:?}, which the chat format needs")]
    MissingSpecial { text: String },
}

const VOCAB_MAX: usize = 1 << 24;

/// What a token id is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenKind {
    Normal,
    /// Marks structure; never part of a visible answer.
    Control,
    /// Recognised as a whole in text, and printed as text.
    UserDefined,
}

/// Text to token ids and back.
pub struct Tokenizer {
    /// Bytes of all tokens, one after the other.
    bytes: Vec<u8>,
    /// Where each token's bytes start; one more entry than tokens.
    starts: Vec<u32>,
    kinds: Vec<TokenKind>,
    byte_ids: [u32; 256],
    table: Table,
    /// Control and user-defined tokens by text, longest first among those with the same first byte.
    specials: HashMap<String, u32>,
    by_first_byte: Vec<Vec<u32>>,
}

impl Tokenizer {
    /// From the keys `tokenizer.ggml.*` of a model file.
    pub fn from_gguf(meta: &Metadata) -> Result<Self, TokenizerError> {
        for (key, supported) in [("tokenizer.ggml.model", "gpt2"), ("tokenizer.ggml.pre", PRE_TOKENIZER)] {
            let found = meta.str(key)?;
            if found != supported {
                return Err(TokenizerError::Unsupported { key, found: found.to_string(), supported });
            }
        }
        let tokens = meta.array_str("tokenizer.ggml.tokens")?;
        let merges = meta.array_str("tokenizer.ggml.merges")?;
        let types = match meta.get("tokenizer.ggml.token_type") {
            Some(_) => meta.array_i64("tokenizer.ggml.token_type")?,
            None => &[],
        };
        Self::new(tokens, merges, types)
    }

    /// `tokens` and `merges` in the byte-level alphabet; `types` as in GGUF (3 control, 4 user-defined).
    pub fn new(tokens: &[String], merges: &[String], types: &[i64]) -> Result<Self, TokenizerError> {
        if tokens.is_empty() || tokens.len() > VOCAB_MAX {
            return Err(TokenizerError::Size { len: tokens.len(), max: VOCAB_MAX });
        }
        let kind = |i: usize| match types.get(i) {
            Some(3) => TokenKind::Control,
            Some(4) => TokenKind::UserDefined,
            _ => TokenKind::Normal,
        };
        let alphabet = alphabet();
        let mut t = Tokenizer {
            bytes: Vec::new(),
            starts: vec![0],
            kinds: (0..tokens.len()).map(kind).collect(),
            byte_ids: [u32::MAX; 256],
            table: Table::default(),
            specials: HashMap::new(),
            by_first_byte: vec![Vec::new(); 256],
        };
        let mut ids: HashMap<&str, u32> = HashMap::with_capacity(tokens.len());
        for (id, token) in tokens.iter().enumerate() {
            if t.kinds[id] == TokenKind::Normal {
                let at = t.bytes.len();
                match token.chars().map(|c| alphabet.get(&c).copied()).collect::<Option<Vec<u8>>>() {
                    Some(raw) => t.bytes.extend(raw),
                    // Not in the byte-level alphabet: an added token that the file does not mark as such.
                    None => t.bytes.extend(token.as_bytes()),
                }
                if let [byte] = t.bytes[at..] {
                    t.byte_ids[byte as usize] = id as u32;
                }
                ids.insert(token, id as u32);
            } else {
                t.bytes.extend(token.as_bytes());
                if let Some(&first) = token.as_bytes().first() {
                    t.specials.insert(token.clone(), id as u32);
                    t.by_first_byte[first as usize].push(id as u32);
                }
            }
            t.starts.push(t.bytes.len() as u32);
        }
        if let Some(byte) = t.byte_ids.iter().position(|id| *id == u32::MAX) {
            return Err(TokenizerError::MissingByte { byte: byte as u8 });
        }
        for list in &mut t.by_first_byte {
            list.sort_by_key(|id| std::cmp::Reverse(t.starts[*id as usize + 1] - t.starts[*id as usize]));
        }
        t.table.reserve(merges.len());
        let mut joined = String::new();
        for (rank, text) in merges.iter().enumerate() {
            let bad = |reason| TokenizerError::Merge { index: rank, text: text.clone(), reason };
            let (left, right) =
                text.split_once(' ').ok_or_else(|| bad("expected two tokens with a space between"))?;
            joined.clear();
            joined.push_str(left);
            joined.push_str(right);
            let find = |s: &str| ids.get(s).copied();
            let (Some(left), Some(right), Some(id)) = (find(left), find(right), find(&joined)) else {
                return Err(bad("its parts or their union are not in the vocabulary"));
            };
            t.table.entry(merge::key(left, right)).or_insert(Merge { rank: rank as u32, id });
        }
        Ok(t)
    }

    /// Tokens in the vocabulary.
    pub fn len(&self) -> usize {
        self.kinds.len()
    }

    pub fn is_empty(&self) -> bool {
        self.kinds.is_empty()
    }

    /// Bytes of a token; empty for an id outside the vocabulary.
    pub fn token_bytes(&self, id: u32) -> &[u8] {
        let at = id as usize;
        match (self.starts.get(at), self.starts.get(at + 1)) {
            (Some(&from), Some(&to)) => &self.bytes[from as usize..to as usize],
            _ => &[],
        }
    }

    pub fn kind(&self, id: u32) -> TokenKind {
        self.kinds.get(id as usize).copied().unwrap_or(TokenKind::Normal)
    }

    /// The id of a control or user-defined token, by its exact text.
    pub fn special(&self, text: &str) -> Option<u32> {
        self.specials.get(text).copied()
    }

    /// [`Tokenizer::special`], as an error that names what is missing.
    pub fn need_special(&self, text: &str) -> Result<u32, TokenizerError> {
        self.special(text).ok_or_else(|| TokenizerError::MissingSpecial { text: text.to_string() })
    }

    /// Ids of `text`, none of them special.
    pub fn encode(&self, text: &str) -> Vec<u32> {
        let mut out = Vec::with_capacity(text.len() / 3);
        self.encode_into(text, &mut out);
        out
    }

    /// Appends the ids of `text`, none of them special.
    pub fn encode_into(&self, text: &str, out: &mut Vec<u32>) {
        let mut symbols = Vec::new();
        split::split(text, &mut |piece| {
            symbols.clear();
            symbols.extend(piece.bytes().map(|b| self.byte_ids[b as usize]));
            merge::merge(&self.table, &mut symbols, out);
        });
    }

    /// Ids of `text` with every control and user-defined token recognised, the leftmost first and of those the longest.
    /// For text that is trusted to be a whole prompt.
    pub fn encode_with_specials(&self, text: &str) -> Vec<u32> {
        let mut out = Vec::with_capacity(text.len() / 3);
        let bytes = text.as_bytes();
        let (mut plain, mut at) = (0, 0);
        while at < bytes.len() {
            let here = &bytes[at..];
            let found = self.by_first_byte[bytes[at] as usize]
                .iter()
                .find(|id| here.starts_with(self.token_bytes(**id)));
            match found {
                Some(&id) => {
                    self.encode_into(&text[plain..at], &mut out);
                    out.push(id);
                    at += self.token_bytes(id).len();
                    plain = at;
                }
                None => at += 1,
            }
        }
        self.encode_into(&text[plain..], &mut out);
        out
    }

    /// Bytes of a run of tokens. They may cut a UTF-8 character at either end.
    pub fn decode(&self, ids: &[u32]) -> Vec<u8> {
        ids.iter().flat_map(|id| self.token_bytes(*id)).copied().collect()
    }
}

/// The byte-level alphabet of GPT-2: each byte as one printable character.
fn alphabet() -> HashMap<char, u8> {
    let printable = |b: u8| matches!(b, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    let mut extra = 0;
    (0..=255u8)
        .map(|b| {
            if printable(b) {
                return (b as char, b);
            }
            let c = char::from_u32(256 + extra).unwrap_or('\u{fffd}');
            extra += 1;
            (c, b)
        })
        .collect()
}

/// Turns a stream of bytes into text without ever cutting a character.
///
/// Bytes that cannot become valid UTF-8 any more come out as U+FFFD, each maximal run of a broken character once, as
/// `String::from_utf8_lossy` does.
#[derive(Debug, Default)]
pub struct Utf8Stream {
    held: Vec<u8>,
}

impl Utf8Stream {
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes bytes and gives the text that is complete.
    pub fn push(&mut self, bytes: &[u8]) -> String {
        self.held.extend_from_slice(bytes);
        let mut text = String::new();
        let mut rest: &[u8] = &self.held;
        loop {
            match std::str::from_utf8(rest) {
                Ok(valid) => {
                    text.push_str(valid);
                    rest = &[];
                    break;
                }
                Err(e) => {
                    let (valid, broken) = rest.split_at(e.valid_up_to());
                    text.push_str(&String::from_utf8_lossy(valid));
                    match e.error_len() {
                        Some(len) => {
                            text.push('\u{fffd}');
                            rest = &broken[len..];
                        }
                        None => {
                            rest = broken;
                            break;
                        }
                    }
                }
            }
        }
        self.held = rest.to_vec();
        text
    }

    /// The end: what is held back is a broken character.
    pub fn finish(&mut self) -> String {
        let text = String::from_utf8_lossy(&self.held).into_owned();
        self.held.clear();
        text
    }
}
