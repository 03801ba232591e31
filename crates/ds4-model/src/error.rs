use thiserror::Error;

/// Why a file cannot be run as a DeepSeek V4 model, or a step of it failed.
#[derive(Debug, Error)]
pub enum ModelError {
    #[error(transparent)]
    Gguf(#[from] ds4_gguf::Error),
    #[error("{what}: found {found}, supported: {supported}")]
    Unsupported { what: String, found: String, supported: String },
    #[error("tensor {name}: missing; layers {slice} need it{hint}")]
    MissingTensor { name: String, slice: String, hint: &'static str },
    #[error("tensor {name}: shape {found:?}, expected {expected:?} (ggml order, contiguous dimension first)")]
    Shape { name: String, found: Vec<u64>, expected: Vec<u64> },
    #[error("tensor {name}: format {found} does not serve as {role}; supported: {supported}")]
    Format { name: String, found: &'static str, role: &'static str, supported: &'static str },
    #[error("layers {asked}: {reason}")]
    Slice { asked: String, reason: String },
    #[error("batch: {0}")]
    Batch(String),
    #[error(transparent)]
    Backend(#[from] BackendError),
}

/// A device's own failures. Each names the thing that failed, so that the line reaches the user unchanged.
#[derive(Debug, Error, Clone, PartialEq)]
pub enum BackendError {
    #[error("{device}: out of memory for {what}: {needed} bytes needed, {available} available")]
    OutOfMemory { device: String, what: String, needed: u64, available: u64 },
    /// The device cannot be used any more; its state is gone.
    #[error("{device}: lost during {what}: {reason}")]
    DeviceLost { device: String, what: String, reason: String },
    #[error("{device}: {what}: result is not a finite number")]
    NotFinite { device: String, what: String },
    #[error("{device} does not support {what}: {reason}")]
    Unsupported { device: String, what: String, reason: String },
    #[error("{device}: {what}: {reason}")]
    Failed { device: String, what: String, reason: String },
}
