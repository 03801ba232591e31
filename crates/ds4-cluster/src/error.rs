use std::net::SocketAddr;

use thiserror::Error;

/// Why a node cannot take part, or a step over the network failed. Texts reach the user as they are.
#[derive(Debug, Error, Clone, PartialEq)]
pub enum ClusterError {
    #[error("--cluster-key: {0}")]
    Key(String),
    #[error("cannot listen on {address}: {reason}")]
    Listen { address: SocketAddr, reason: String },
    #[error("cannot connect to {address}: {reason}")]
    Connect { address: SocketAddr, reason: String },
    #[error("{host}: {reason}")]
    Resolve { host: String, reason: String },
    #[error("{0}")]
    Usage(String),
    /// The peer broke the protocol.
    #[error("protocol: {0}")]
    Protocol(String),
    /// The peer will not work with this node, now or later.
    #[error("{peer} refused: {reason}")]
    Refused { peer: String, reason: String },
}
