//! The GGUF container and ggml's block formats.
//!
//! [`Gguf`] reads a file (or its split parts) over a memory map: the header is parsed and checked once, tensors are
//! borrowed from the map as they lie. [`GgufWriter`] writes one, a tensor at a time. [`BlockFormat`] says how a tensor's values are laid out, and turns them into f32.
//!
//! Format: `ggml-org/ggml`, `docs/gguf.md`. Every count, length and offset is checked before it is used.

mod error;
mod format;
mod metadata;
mod reader;
mod writer;

pub use error::Error;
pub use format::{BlockFormat, iq2_xxs, k_quants, mxfp4, q8_0};
pub use metadata::{Metadata, Value};
pub use reader::{Gguf, TensorBytes, TensorInfo};
pub use writer::{GgufWriter, NewTensor};

pub type Result<T> = std::result::Result<T, Error>;
