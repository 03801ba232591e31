//! The cluster's flags: help, meaning and checks in one place. Programs flatten [`ClusterArgs`] into theirs.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};
use ds4_engine::StageLimits;
use ds4_gguf::Gguf;
use ds4_model::{HyperParams, LayerSlice, Numerics, RowFormat};

use crate::activation::Format;
use crate::coordinator::{self, Cluster};
use crate::core::Timing;
use crate::endpoint::Endpoint;
use crate::error::ClusterError;
use crate::host::Host;
use crate::security::{self, Identity, Security};
use crate::setup::{self, Serve};
use crate::worker;

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Role {
    /// Serves requests; workers connect to it
    Coordinator,
    /// Computes a slice of the layers for a coordinator
    Worker,
}

/// Several machines.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Several machines")]
pub struct ClusterArgs {
    /// Part of this process in a cluster
    #[arg(long, value_enum)]
    pub role: Option<Role>,
    /// Layers that this process computes, both included; A:output goes to the last one and owns the output head.
    /// A coordinator without --layers computes none
    #[arg(long, value_name = "A:B|A:output")]
    pub layers: Option<String>,
    /// Coordinator: where workers connect. Worker: where the other workers of the route may connect; without it,
    /// activations for this worker pass through the coordinator
    #[arg(long, num_args = 2, value_names = ["HOST", "PORT"])]
    pub listen: Option<Vec<String>>,
    /// Worker: where the coordinator listens
    #[arg(long, num_args = 2, value_names = ["HOST", "PORT"])]
    pub coordinator: Option<Vec<String>>,
    /// Bits of an activation on the wire. 32 gives the logits of one machine, bit for bit
    #[arg(long, value_name = "32|16|8", value_parser = parse_bits)]
    pub dist_activation_bits: Option<Format>,
    /// Coordinator: prompt tokens of one step
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..=65536))]
    pub dist_prefill_chunk: Option<u32>,
    /// Coordinator: steps that are on their way through the workers at once
    #[arg(long, value_name = "STEPS", value_parser = clap::value_parser!(u32).range(1..=64))]
    pub dist_prefill_window: Option<u32>,
    /// Coordinator: remember what recent positions gave, and fail a step that gives something else for the same tokens
    #[arg(long)]
    pub dist_replay_check: bool,
    /// Milliseconds between heartbeats
    #[arg(long, value_name = "MS", value_parser = clap::value_parser!(u32).range(50..=60_000))]
    pub dist_heartbeat_ms: Option<u32>,
    /// Heartbeats without any message after which a node counts as dead
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(2..=100))]
    pub dist_heartbeats_missed: Option<u32>,
    /// Seconds that a step gets at least before its node counts as dead
    #[arg(long, value_name = "S", value_parser = clap::value_parser!(u32).range(1..=3600))]
    pub dist_step_timeout: Option<u32>,
    /// Coordinator: seconds that requests wait for a lost worker to come back before they fail
    #[arg(long, value_name = "S", value_parser = clap::value_parser!(u32).range(0..=3600))]
    pub resume_wait: Option<u32>,
    /// File with the secret that all nodes share. Default: ~/.config/ds4/cluster.key, made where it is missing
    #[arg(long, value_name = "FILE", conflicts_with = "insecure_cluster")]
    pub cluster_key: Option<PathBuf>,
    /// No encryption and no authentication between the nodes: for measurements on a closed network
    #[arg(long)]
    pub insecure_cluster: bool,
    /// Name of this node in messages. Default: the host's
    #[arg(long, value_name = "NAME")]
    pub node_name: Option<String>,
    /// Log every hop of every step
    #[arg(long)]
    pub debug: bool,
}

fn parse_bits(text: &str) -> Result<Format, String> {
    text.parse().ok().and_then(Format::from_bits).ok_or_else(|| "expected 32, 16 or 8".into())
}

fn usage<T>(reason: impl Into<String>) -> Result<T, ClusterError> {
    Err(ClusterError::Usage(reason.into()))
}

impl ClusterArgs {
    /// The role; `implied` is the program's own (`ds4 worker`). `None`: no cluster. Flags that have no meaning in the
    /// role are refused by name.
    pub fn role(&self, implied: Option<Role>) -> Result<Option<Role>, ClusterError> {
        let role = match (self.role, implied) {
            (Some(asked), Some(implied)) if asked != implied => {
                return usage(format!("--role {}: this program is a {}", name(asked), name(implied)));
            }
            (asked, implied) => asked.or(implied),
        };
        let coordinator = [
            ("--dist-activation-bits", self.dist_activation_bits.is_some()),
            ("--dist-prefill-chunk", self.dist_prefill_chunk.is_some()),
            ("--dist-prefill-window", self.dist_prefill_window.is_some()),
            ("--dist-replay-check", self.dist_replay_check),
            ("--dist-heartbeat-ms", self.dist_heartbeat_ms.is_some()),
            ("--dist-heartbeats-missed", self.dist_heartbeats_missed.is_some()),
            ("--dist-step-timeout", self.dist_step_timeout.is_some()),
            ("--resume-wait", self.resume_wait.is_some()),
        ];
        let worker = [("--coordinator", self.coordinator.is_some())];
        let either = [
            ("--listen", self.listen.is_some()),
            ("--cluster-key", self.cluster_key.is_some()),
            ("--insecure-cluster", self.insecure_cluster),
            ("--node-name", self.node_name.is_some()),
        ];
        let given = |flags: &[(&'static str, bool)]| flags.iter().find(|f| f.1).map(|f| f.0);
        match role {
            None => match given(&[&coordinator[..], &worker, &either].concat()) {
                Some(flag) => usage(format!("{flag} needs --role coordinator or --role worker")),
                None => Ok(None),
            },
            Some(Role::Coordinator) => {
                if let Some(flag) = given(&worker) {
                    return usage(format!("{flag} is a worker's flag; this is --role coordinator"));
                }
                if self.listen.is_none() {
                    return usage("--role coordinator needs --listen HOST PORT, where workers connect");
                }
                Ok(role)
            }
            Some(Role::Worker) => {
                if let Some(flag) = given(&coordinator) {
                    return usage(format!(
                        "{flag} is set at the coordinator, for all nodes; this is a worker"
                    ));
                }
                if self.coordinator.is_none() {
                    return usage("--role worker needs --coordinator HOST PORT");
                }
                if self.layers.is_none() {
                    return usage(
                        "--role worker needs --layers A:B or A:output; `ds4 plan --node` proposes slices",
                    );
                }
                Ok(role)
            }
        }
    }

    /// The slice of `--layers` in a model of `total` layers.
    pub fn slice(&self, total: usize) -> Result<Option<LayerSlice>, ClusterError> {
        let parse =
            |text: &String| LayerSlice::parse(text, total).map_err(|e| ClusterError::Usage(e.to_string()));
        self.layers.as_ref().map(parse).transpose()
    }

    /// Prompt tokens of one step, where `--dist-prefill-chunk` says so.
    pub fn prefill_chunk(&self) -> Option<usize> {
        self.dist_prefill_chunk.map(|n| n as usize)
    }

    /// How long requests wait for a lost worker.
    pub fn resume_wait(&self) -> Duration {
        Duration::from_secs(self.resume_wait.unwrap_or(30).into())
    }

    pub fn security(&self) -> Result<Security, ClusterError> {
        if self.insecure_cluster {
            return Ok(Security::Insecure);
        }
        let identity = match (&self.cluster_key, security::default_key_path()) {
            (Some(path), _) => Identity::from_file(path)?,
            (None, Some(path)) => Identity::from_default_file(&path)?,
            (None, None) => {
                return usage("--cluster-key FILE is needed: there is no home folder for a default");
            }
        };
        Ok(Security::Shared(identity))
    }

    fn timing(&self) -> Timing {
        let default = Timing::default();
        Timing {
            heartbeat: self
                .dist_heartbeat_ms
                .map_or(default.heartbeat, |ms| Duration::from_millis(ms.into())),
            heartbeats_missed_max: self.dist_heartbeats_missed.unwrap_or(default.heartbeats_missed_max),
            step_min: self.dist_step_timeout.map_or(default.step_min, |s| Duration::from_secs(s.into())),
            ..default
        }
    }

    fn node_name(&self) -> String {
        let host = || {
            std::fs::read_to_string("/proc/sys/kernel/hostname")
                .or_else(|_| std::fs::read_to_string("/etc/hostname"))
        };
        let name = self.node_name.clone().or_else(|| host().ok()).or_else(|| std::env::var("HOSTNAME").ok());
        name.map(|n| n.trim().to_string()).filter(|n| !n.is_empty()).unwrap_or_else(|| "node".into())
    }

    /// What a coordinator serves, by these flags.
    pub fn serve(
        &self,
        hyper: &HyperParams,
        limits: StageLimits,
        numerics: Numerics,
        rows: RowFormat,
    ) -> Result<Serve, ClusterError> {
        Ok(Serve {
            local: self.slice(hyper.layers.len())?,
            limits,
            numerics,
            rows,
            activation: self.dist_activation_bits.unwrap_or(Format::Bits32),
            timing: self.timing(),
            window: self.dist_prefill_window.unwrap_or(setup::WINDOW_DEFAULT),
            replay_check: self.dist_replay_check,
        })
    }

    /// Listens for workers.
    pub fn start_coordinator(
        &self,
        gguf: Gguf,
        hyper: &HyperParams,
        serve: &Serve,
    ) -> Result<Cluster, ClusterError> {
        let listen = self.listen.as_deref().unwrap_or_default();
        Cluster::start(coordinator::Options {
            listen: Endpoint::from_flag("--listen", listen)?,
            security: self.security()?,
            core: setup::config(gguf, hyper, serve)?,
        })
    }

    /// Runs a worker until it is told to stop, refused, or interrupted; returns why it ended. `make` runs on the
    /// stage's thread; `context` is `--ctx`, `device` the backend in words.
    pub fn run_worker<H: Host>(
        &self,
        gguf: &Gguf,
        hyper: &HyperParams,
        context: usize,
        device: &str,
        make: impl FnOnce() -> H + Send + 'static,
    ) -> Result<String, ClusterError> {
        let Some(slice) = self.slice(hyper.layers.len())? else {
            return usage("--role worker needs --layers");
        };
        let coordinator =
            Endpoint::from_flag("--coordinator", self.coordinator.as_deref().unwrap_or_default())?;
        let listen = self.listen.as_deref().map(|l| Endpoint::from_flag("--listen", l)).transpose()?;
        let options = worker::Options {
            coordinator,
            listen,
            security: self.security()?,
            timing: self.timing(),
            hello: setup::hello(gguf, hyper, &slice, context, &self.node_name(), device),
        };
        let (_stop, stopped) = worker::Stop::new();
        worker::run(options, make, stopped)
    }
}

fn name(role: Role) -> &'static str {
    match role {
        Role::Coordinator => "coordinator",
        Role::Worker => "worker",
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Program {
        #[command(flatten)]
        cluster: ClusterArgs,
    }

    fn parse(line: &str) -> ClusterArgs {
        let words = std::iter::once("ds4").chain(line.split_whitespace());
        Program::try_parse_from(words).unwrap_or_else(|e| panic!("{line}: {e}")).cluster
    }

    #[test]
    fn the_commands_of_the_report_parse() {
        let coordinator =
            parse("--role coordinator --layers 0:23 --listen 10.99.0.2 9000 --dist-activation-bits 32");
        assert_eq!(coordinator.role(None), Ok(Some(Role::Coordinator)));
        assert_eq!(coordinator.dist_activation_bits, Some(Format::Bits32));
        let worker = parse("--role worker --layers 24:output --coordinator 10.99.0.2 9000");
        assert_eq!(worker.role(None), Ok(Some(Role::Worker)));
        assert_eq!(worker.role(Some(Role::Worker)), Ok(Some(Role::Worker)));
        assert_eq!(worker.slice(43).expect("a slice").map(|s| s.to_string()), Some("24:output".into()));
    }

    #[test]
    fn flags_without_meaning_are_refused_by_name() {
        for (line, words) in [
            ("--listen 0.0.0.0 9000", "--listen needs --role"),
            ("--dist-replay-check", "--dist-replay-check needs --role"),
            ("--role coordinator", "needs --listen"),
            ("--role coordinator --listen a 1 --coordinator b 2", "--coordinator is a worker's flag"),
            ("--role worker --layers 0:1", "needs --coordinator"),
            ("--role worker --coordinator a 1", "needs --layers"),
            (
                "--role worker --layers 0:1 --coordinator a 1 --dist-activation-bits 16",
                "--dist-activation-bits is set at",
            ),
        ] {
            let e = parse(line).role(None).expect_err(line).to_string();
            assert!(e.contains(words), "{line}: {e}");
        }
        let e = parse("--role coordinator --listen a 1").role(Some(Role::Worker)).expect_err("two roles");
        assert!(e.to_string().contains("this program is a worker"), "{e}");
    }
}
