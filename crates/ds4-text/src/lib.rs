//! Tokenizer, chat encoder and streaming output parser of DeepSeek V4.

#![forbid(unsafe_code)]

pub mod chat;
pub mod parser;
pub mod tokenizer;

pub use tokenizer::{TokenKind, Tokenizer, TokenizerError, Utf8Stream};
