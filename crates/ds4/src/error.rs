use std::path::PathBuf;

use thiserror::Error;

/// What a command ends with. Displayed as one line.
#[derive(Debug, Error)]
pub enum CliError {
    #[error("{path}: {source}")]
    Gguf { path: PathBuf, source: ds4_gguf::Error },
    #[error("{path}: {source}")]
    Model { path: PathBuf, source: ds4_model::ModelError },
    #[error("{path}: {source}")]
    Tokenizer { path: PathBuf, source: ds4_text::TokenizerError },
    #[error("{path}: {reason}")]
    Load { path: PathBuf, reason: String },
    #[error(transparent)]
    Step(#[from] ds4_model::ModelError),
    #[error(transparent)]
    Rejected(#[from] ds4_engine::Rejected),
    #[error(transparent)]
    Engine(#[from] ds4_engine::EngineError),
    #[error(transparent)]
    Cluster(#[from] ds4_cluster::ClusterError),
    #[error(transparent)]
    Server(#[from] ds4_server::ServerError),
    #[error(transparent)]
    Config(#[from] ds4_server::ConfigError),
    #[error("{path}: {source}")]
    File { path: PathBuf, source: std::io::Error },
    #[error("{0}")]
    Usage(String),
    #[error("output closed")]
    BrokenPipe,
    #[error("output: {0}")]
    Output(std::io::Error),
}

impl From<std::io::Error> for CliError {
    /// Errors of stdout; files are named with [`CliError::File`].
    fn from(e: std::io::Error) -> Self {
        if e.kind() == std::io::ErrorKind::BrokenPipe { Self::BrokenPipe } else { Self::Output(e) }
    }
}
