use std::path::PathBuf;

use thiserror::Error;

/// Why bytes are not a usable GGUF file.
#[derive(Debug, Error)]
pub enum Error {
    #[error("{path}: {source}")]
    Io { path: PathBuf, source: std::io::Error },
    #[error("{path}: is a directory; name a .gguf file")]
    Directory { path: PathBuf },
    #[error("not a GGUF file: starts with {found:?}, expected \"GGUF\"")]
    Magic { found: String },
    #[error("GGUF version {found}; supported: 2 and 3 (little-endian)")]
    Version { found: u32 },
    #[error("ends at byte {len}, inside {what} at byte {at}: the file is truncated")]
    Truncated { what: String, at: u64, len: u64 },
    #[error("{what} at byte {at}: {reason}")]
    Malformed { what: String, at: u64, reason: String },
    #[error("key {key}: missing")]
    MissingKey { key: String },
    #[error("key {key}: found {found}, expected {expected}")]
    WrongType { key: String, found: String, expected: &'static str },
    #[error(
        "tensor {name}: type {number}{known} is not supported; supported: {supported}; a file whose tensors are of these types works"
    )]
    UnknownType { name: String, number: u32, known: String, supported: &'static str },
    #[error("tensor {name}: {reason}")]
    Tensor { name: String, reason: String },
    #[error("writing: {0}")]
    Write(#[from] std::io::Error),
    #[error("{format}: {reason}")]
    Block { format: &'static str, reason: String },
    #[error("split file: {reason}")]
    Split { reason: String },
}
