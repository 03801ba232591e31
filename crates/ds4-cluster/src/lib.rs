//! Remote stages: wire protocol, coordinator, worker, heartbeat, replay.
//!
//! Read [`core`] for the protocol's behaviour, `proto/cluster.proto` for its messages.

#![forbid(unsafe_code)]

pub mod activation;
pub mod args;
mod convert;
pub mod coordinator;
pub mod core;
pub mod endpoint;
mod error;
mod fingerprint;
pub mod host;
mod remote;
pub mod security;
pub mod setup;
pub mod transport;
pub mod wire;
pub mod worker;

pub use error::ClusterError;
pub use fingerprint::fingerprint;
pub use remote::RemoteStage;

/// The network's own threads. The engine and its stages stay on theirs.
fn runtime() -> Result<tokio::runtime::Runtime, ClusterError> {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .thread_name("cluster")
        .enable_all()
        .build()
        .map_err(|e| ClusterError::Usage(format!("cannot start the network's threads: {e}")))
}
