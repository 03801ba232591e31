//! What the server is told: flags, each of which a TOML file can give too.

use std::ffi::OsString;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use ds4_engine::SamplingParams;
use ds4_text::chat::{Effort, Release};
use thiserror::Error;

use crate::ask::Thinking;

#[derive(Debug, Error)]
pub enum ConfigError {
    #[error("{path}: {reason}")]
    File { path: PathBuf, reason: String },
    #[error("{0}")]
    Flag(String),
}

/// The server's flags. Names of ds4 keep their meaning.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Server")]
pub struct ServerArgs {
    /// Read flags from this TOML file: `port = 8000` is --port 8000. Flags on the command line come after it
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Address to listen on. Anyone who reaches it can use the model: set --api-key before leaving the loopback
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1")]
    pub host: IpAddr,
    /// Port to listen on; 0 takes a free one
    #[arg(long, value_name = "N", default_value_t = 8000)]
    pub port: u16,
    /// Requests must carry this key (repeatable)
    #[arg(long, value_name = "KEY", env = "DS4_API_KEY", value_delimiter = ',', hide_env_values = true)]
    pub api_key: Vec<String>,
    /// A file of keys, one a line
    #[arg(long, value_name = "FILE")]
    pub api_key_file: Option<PathBuf>,
    /// Web pages of this origin may use the server (repeatable); without a value: those of any origin
    #[arg(long, value_name = "ORIGIN", num_args = 0..=1, default_missing_value = "*", action = clap::ArgAction::Append)]
    pub cors: Vec<String>,
    /// Write every request's prompt and answer to this file, one JSON object a line. Keys are left out
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,
    /// The name that the server gives its model. Default: the file's
    #[arg(long, value_name = "NAME")]
    pub alias: Option<String>,
    /// Requests that may wait; more are refused with 429
    #[arg(long, value_name = "N", default_value_t = 64)]
    pub max_queue: usize,
    /// Requests that run at once
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub batched_session: u32,
    /// Keep state of conversations in this folder, so that it survives a restart
    #[arg(long, value_name = "DIR")]
    pub kv_disk_dir: Option<PathBuf>,
    /// Space of that folder, MiB
    #[arg(long, value_name = "MIB", default_value_t = 8192, requires = "kv_disk_dir")]
    pub kv_disk_space_mb: u64,
    /// Which release's prompt texts to write
    #[arg(long, value_enum, default_value_t = TemplateChoice::V4)]
    pub template: TemplateChoice,
    /// Largest body of a request, MiB
    #[arg(long, value_name = "MIB", default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub body_limit_mb: u32,
    /// Connections at once
    #[arg(long, value_name = "N", default_value_t = 1024, value_parser = clap::value_parser!(u32).range(1..))]
    pub max_connections: u32,
    /// Seconds of silence after which a stream says that it is alive
    #[arg(long, value_name = "S", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=3600))]
    pub keepalive: u32,
    /// Seconds that a request may take in all. Default: as long as it makes progress
    #[arg(long, value_name = "S", value_parser = clap::value_parser!(u32).range(1..))]
    pub request_timeout: Option<u32>,
    /// Seconds that running answers get when the server is told to end
    #[arg(long, value_name = "S", default_value_t = 30)]
    pub drain: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum TemplateChoice {
    /// V4, April 2026
    V4,
    /// V4-Flash-0731
    V4Flash0731,
}

/// A server's settings.
#[derive(Debug, Clone)]
pub struct ServerConfig {
    pub host: IpAddr,
    pub port: u16,
    /// Empty: everyone may ask.
    pub keys: Vec<String>,
    /// Origins of web pages that may ask; `*`: all.
    pub cors: Vec<String>,
    pub trace: Option<PathBuf>,
    /// Where sampled turns are kept; see [`crate::memory`].
    pub state_dir: Option<PathBuf>,
    pub release: Release,
    /// What a request gets that does not say.
    pub thinking: Thinking,
    pub sampling: SamplingParams,
    /// `None`: another one every time.
    pub seed: Option<u64>,
    pub max_tokens: Option<usize>,
    pub body_limit: usize,
    pub connections: usize,
    pub keepalive: Duration,
    /// A client that reads nothing for so long is taken for dead.
    pub client_limit: Duration,
    pub request_limit: Option<Duration>,
    pub drain: Duration,
}

impl Default for ServerConfig {
    fn default() -> Self {
        ServerConfig {
            host: IpAddr::from([127, 0, 0, 1]),
            port: 8000,
            keys: Vec::new(),
            cors: Vec::new(),
            trace: None,
            state_dir: None,
            release: Release::V4,
            thinking: Thinking { on: true, effort: Effort::Low },
            sampling: SamplingParams { temperature: 0.6, top_p: 0.95, ..SamplingParams::default() },
            seed: None,
            max_tokens: None,
            body_limit: 32 << 20,
            connections: 1024,
            keepalive: Duration::from_secs(5),
            client_limit: Duration::from_secs(60),
            request_limit: None,
            drain: Duration::from_secs(30),
        }
    }
}

impl ServerArgs {
    /// The settings that the flags give; what they do not say is the default.
    pub fn settings(&self) -> Result<ServerConfig, ConfigError> {
        let mut keys = self.api_key.clone();
        if let Some(path) = &self.api_key_file {
            let text = std::fs::read_to_string(path)
                .map_err(|e| ConfigError::File { path: path.clone(), reason: e.to_string() })?;
            keys.extend(text.lines().map(str::trim).filter(|l| !l.is_empty()).map(String::from));
        }
        if self.api_key_file.is_some() && keys.is_empty() {
            return Err(ConfigError::Flag("--api-key-file: the file has no key".into()));
        }
        if keys.iter().any(String::is_empty) {
            return Err(ConfigError::Flag("--api-key: an empty key protects nothing".into()));
        }
        for origin in &self.cors {
            let plain =
                origin.split_once("://").is_some_and(|(_, host)| !host.is_empty() && !host.contains('/'));
            if origin != "*" && !plain {
                return Err(ConfigError::Flag(format!(
                    "--cors {origin}: expected an origin, as https://example.org or http://localhost:3000"
                )));
            }
        }
        Ok(ServerConfig {
            host: self.host,
            port: self.port,
            keys,
            cors: self.cors.clone(),
            trace: self.trace.clone(),
            state_dir: self.kv_disk_dir.clone(),
            release: match self.template {
                TemplateChoice::V4 => Release::V4,
                TemplateChoice::V4Flash0731 => Release::V4Flash0731,
            },
            body_limit: (self.body_limit_mb as usize) << 20,
            connections: self.max_connections as usize,
            keepalive: Duration::from_secs(self.keepalive.into()),
            request_limit: self.request_timeout.map(|s| Duration::from_secs(s.into())),
            drain: Duration::from_secs(self.drain.into()),
            ..ServerConfig::default()
        })
    }
}

/// Command-line arguments with those of the file that `--config` names in front of the others, behind the first `keep`.
/// `known` says whether a flag exists and may be given several times.
pub fn with_file(
    argv: Vec<OsString>,
    keep: usize,
    known: impl Fn(&str) -> Option<bool>,
) -> Result<Vec<OsString>, ConfigError> {
    let Some(path) = config_path(&argv) else { return Ok(argv) };
    let given: Vec<String> = argv
        .iter()
        .filter_map(|a| a.to_str()?.strip_prefix("--"))
        .map(|a| a.split('=').next().unwrap_or(a).to_string())
        .collect();
    let mut from_file = file_flags(Path::new(&path), &known)?;
    // The command line wins, also over lists.
    from_file.retain(|(flag, _)| !given.contains(flag));
    let mut out: Vec<OsString> = argv.iter().take(keep).cloned().collect();
    for (flag, value) in from_file {
        out.push(match value {
            Some(value) => format!("--{flag}={value}").into(),
            None => format!("--{flag}").into(),
        });
    }
    out.extend(argv.into_iter().skip(keep));
    Ok(out)
}

fn config_path(argv: &[OsString]) -> Option<OsString> {
    for (i, arg) in argv.iter().enumerate() {
        let text = arg.to_string_lossy();
        if text == "--config" {
            return argv.get(i + 1).cloned();
        }
        if let Some(path) = text.strip_prefix("--config=") {
            return Some(path.into());
        }
    }
    None
}

fn file_flags(
    path: &Path,
    known: &impl Fn(&str) -> Option<bool>,
) -> Result<Vec<(String, Option<String>)>, ConfigError> {
    let bad = |reason: String| ConfigError::File { path: path.to_path_buf(), reason };
    let text = std::fs::read_to_string(path).map_err(|e| bad(e.to_string()))?;
    let table: toml::Table =
        text.parse().map_err(|e: toml::de::Error| bad(e.to_string().trim().to_string()))?;
    let mut flags = Vec::new();
    for (key, value) in table {
        let flag = key.replace('_', "-");
        let many = known(&flag).ok_or_else(|| bad(format!("{key}: there is no flag --{flag}")))?;
        match value {
            toml::Value::Boolean(true) => flags.push((flag, None)),
            toml::Value::Boolean(false) => {}
            toml::Value::Array(list) if many => {
                for v in list {
                    let text = scalar(&v).ok_or_else(|| bad(format!("{key}: expected texts or numbers")))?;
                    flags.push((flag.clone(), Some(text)));
                }
            }
            other => {
                let text = scalar(&other)
                    .ok_or_else(|| bad(format!("{key}: expected a text, a number, true or false")))?;
                flags.push((flag, Some(text)));
            }
        }
    }
    Ok(flags)
}

fn scalar(value: &toml::Value) -> Option<String> {
    match value {
        toml::Value::String(s) => Some(s.clone()),
        toml::Value::Integer(i) => Some(i.to_string()),
        toml::Value::Float(f) => Some(f.to_string()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        server: ServerArgs,
    }

    fn known(flag: &str) -> Option<bool> {
        match flag {
            "port" | "host" => Some(false),
            "api-key" | "cors" => Some(true),
            _ => None,
        }
    }

    fn parse(file: &str, args: &[&str]) -> Result<ServerArgs, String> {
        let path = std::env::temp_dir().join(crate::memory::new_id("ds4-config-"));
        std::fs::write(&path, file).unwrap();
        let mut argv: Vec<OsString> = vec!["ds4-server".into(), "--config".into(), path.clone().into()];
        argv.extend(args.iter().map(OsString::from));
        let argv = with_file(argv, 1, known).map_err(|e| e.to_string());
        std::fs::remove_file(path).unwrap();
        Ok(Cli::try_parse_from(argv?).map_err(|e| e.to_string())?.server)
    }

    #[test]
    fn a_file_gives_flags_and_the_command_line_wins() {
        let a = parse(
            "port = 9000\nhost = \"127.0.0.2\"\napi_key = [\"a\", \"b\"]\ncors = true",
            &["--port", "9001"],
        )
        .unwrap();
        assert_eq!((a.port, a.host.to_string().as_str(), a.api_key.len()), (9001, "127.0.0.2", 2));
        assert_eq!(a.cors, ["*"]);
        let e = parse("prot = 1", &[]).unwrap_err();
        assert!(e.contains("--prot"), "{e}");
        assert!(parse("port = [1]", &[]).unwrap_err().contains("port"));
        assert!(parse("port = ", &[]).is_err());
    }

    #[test]
    fn doors_are_checked() {
        let settings = |args: &[&str]| parse("", args).unwrap().settings();
        assert!(settings(&["--cors", "https://a.example"]).is_ok());
        assert!(settings(&["--cors", "a.example"]).is_err());
        assert!(settings(&["--api-key", ""]).is_err());
        assert!(settings(&["--api-key-file", "/nowhere/at/all"]).is_err());
    }
}
