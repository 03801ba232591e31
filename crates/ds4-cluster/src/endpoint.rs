//! `HOST PORT`, as the flags give it.

use std::fmt;
use std::net::SocketAddr;

use crate::error::ClusterError;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    pub host: String,
    pub port: u16,
}

impl Endpoint {
    /// From the two values of `--listen HOST PORT` or `--coordinator HOST PORT`.
    pub fn from_flag(flag: &str, values: &[String]) -> Result<Self, ClusterError> {
        let [host, port] = values else {
            return Err(ClusterError::Usage(format!("{flag}: expected HOST PORT")));
        };
        let port = port
            .parse()
            .map_err(|_| ClusterError::Usage(format!("{flag}: port {port:?} is not 0 to 65535")))?;
        Ok(Endpoint { host: host.clone(), port })
    }

    /// The first address that the name has.
    pub async fn resolve(&self) -> Result<SocketAddr, ClusterError> {
        let failed = |reason: String| ClusterError::Resolve { host: self.host.clone(), reason };
        tokio::net::lookup_host((self.host.as_str(), self.port))
            .await
            .map_err(|e| failed(e.to_string()))?
            .next()
            .ok_or_else(|| failed("no address".into()))
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.host, self.port)
    }
}
