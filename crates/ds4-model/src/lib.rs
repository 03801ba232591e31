//! DeepSeek V4: hyper-parameters, typed weights, key-value layout, and the forward pass over the [`Backend`] trait.
//!
//! Read [`forward`] for the model, [`backend`] for what it asks of a device, [`weights`] for its data, and [`kv`] for
//! what a session remembers, and [`plan`] for the memory that all of it takes.

pub mod backend;
pub mod batch;
mod error;
pub mod forward;
pub mod hyper;
pub mod kv;
pub mod plan;
pub mod rounding;
pub mod slice;
pub mod weights;

pub use backend::{Backend, Handles, MatrixSource, Numerics, PlanLine, Setup, TensorSpec};
pub use batch::{Batch, Limits, Outputs, PageId, Segment, Slot};
pub use error::{BackendError, ModelError};
pub use forward::Model;
pub use hyper::{HyperParams, LayerKind};
pub use kv::{KvLayout, PAGE_TOKENS, RowFormat};
pub use plan::{MemoryPlan, Settings};
pub use slice::LayerSlice;
