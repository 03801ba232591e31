//! The CUDA backend: kernels compiled ahead, driver API loaded at run time. One binary runs with and without a card.
//!
//! `kernels/` holds the device code, [`abi`] what it takes by value, [`device`] the driver, [`state`] the memory that is
//! allocated once, and [`backend`] the model's blocks.

pub mod abi;
mod artefacts;
mod backend;
mod device;
mod state;

pub use backend::Cuda;
pub use device::{count, free_memory, probe};
