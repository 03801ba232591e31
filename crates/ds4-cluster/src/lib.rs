//! Remote stages: wire protocol, coordinator, worker, heartbeat, replay.
//!
//! Read [`core`] for the protocol's behaviour, `proto/cluster.proto` for its messages.

#![forbid(unsafe_code)]

pub mod activation;
pub mod core;
mod error;
pub mod security;
pub mod transport;
pub mod wire;

pub use error::ClusterError;
