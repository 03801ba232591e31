//! Several processes on loopback. A test starts workers by running its own program again: the ignored test
//! `worker_process` is what they run.

#![allow(dead_code)]

use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ds4_cluster::activation::Format;
use ds4_cluster::coordinator::{self, Cluster};
use ds4_cluster::core::Timing;
use ds4_cluster::endpoint::Endpoint;
use ds4_cluster::host::{MachineHost, StageAsk};
use ds4_cluster::security::{Identity, Security};
use ds4_cluster::setup::{self, Serve};
use ds4_cluster::{RemoteStage, worker};
use ds4_engine::{Engine, EngineConfig, EngineHandle, LocalStage, Machine, Pipeline, Stage, StageLimits};
use ds4_gguf::Gguf;
use ds4_model::{HyperParams, KvLayout, LayerSlice, Limits, Model, ModelError, Numerics, RowFormat, Setup};
use ds4_reference::Reference;
use ds4_text::Tokenizer;

pub const SECRET: &[u8] = b"the secret of these tests";
pub const CONTEXT: usize = 768;
pub const ROWS: usize = 64;
pub const SLOTS: usize = 2;

#[derive(Clone)]
pub struct Tiny {
    pub hyper: HyperParams,
}

pub fn gguf() -> Gguf {
    Gguf::open(&ds4_testdata::tiny_model()).expect("tiny model")
}

pub fn tiny() -> Tiny {
    Tiny { hyper: HyperParams::from_metadata(gguf().metadata()).expect("hyper-parameters") }
}

impl Tiny {
    pub fn slice(&self, text: &str) -> LayerSlice {
        LayerSlice::parse(text, self.hyper.layers.len()).expect("slice")
    }

    pub fn serve(&self, local: Option<&str>, activation: Format) -> Serve {
        let pages = SLOTS * (KvLayout::pages_for(CONTEXT) + 1) + 8;
        Serve {
            local: local.map(|l| self.slice(l)),
            limits: StageLimits {
                model: Limits { context: CONTEXT, rows: ROWS, outputs: ROWS, slots: SLOTS, pages },
                checkpoints: 4,
            },
            numerics: Numerics::PLAIN_EXACT,
            rows: RowFormat::F32,
            activation,
            timing: Timing { heartbeat: Duration::from_millis(300), ..Timing::default() },
            window: setup::WINDOW_DEFAULT,
            replay_check: true,
        }
    }

    fn load(&self, slice: LayerSlice, ask: &StageAsk) -> Result<Model<Reference>, ModelError> {
        let setup = Setup {
            hyper: self.hyper.clone(),
            layout: KvLayout::new(&self.hyper, slice, ask.rows),
            limits: ask.limits.model,
            numerics: ask.numerics,
        };
        Model::load(&gguf(), setup, Reference::default(), &mut |_| ())
    }

    pub fn local_stage(&self, slice: LayerSlice, serve: &Serve) -> LocalStage {
        let (tiny, ask) = (self.clone(), ask(serve));
        LocalStage::start("local", ask.limits.checkpoints, move || tiny.load(slice, &ask)).expect("loads")
    }

    /// An engine over `stages`.
    pub fn engine(&self, stages: Vec<Box<dyn Stage>>, resume_wait: Duration) -> EngineHandle {
        let tokenizer = Arc::new(Tokenizer::from_gguf(gguf().metadata()).expect("tokenizer"));
        let config = EngineConfig { resume_wait, ..EngineConfig::default() };
        Engine::start(config, tokenizer, move || Pipeline::new(stages)).expect("a thread")
    }

    /// The whole model in one process.
    pub fn alone(&self) -> Pipeline {
        let whole = LayerSlice::whole(self.hyper.layers.len());
        let stage = self.local_stage(whole, &self.serve(None, Format::Bits32));
        let mut pipeline = Pipeline::new(vec![Box::new(stage)]).expect("a pipeline");
        pipeline.restart(soon(10)).expect("ready");
        pipeline
    }
}

fn ask(serve: &Serve) -> StageAsk {
    StageAsk { limits: serve.limits, numerics: serve.numerics, rows: serve.rows }
}

/// A coordinator, and the stages of its pipeline: its own slice here, the others at workers.
pub fn coordinator(tiny: &Tiny, serve: &Serve, security: Security) -> (Cluster, Vec<Box<dyn Stage>>) {
    coordinator_at("127.0.0.1", tiny, serve, security)
}

pub fn coordinator_at(
    host: &str,
    tiny: &Tiny,
    serve: &Serve,
    security: Security,
) -> (Cluster, Vec<Box<dyn Stage>>) {
    let cluster = Cluster::start(coordinator::Options {
        listen: Endpoint { host: host.into(), port: 0 },
        security,
        core: setup::config(gguf(), &tiny.hyper, serve).expect("a layout"),
    })
    .expect("listens");
    let local = serve.local.map(|l| Box::new(tiny.local_stage(l, serve)) as Box<dyn Stage>);
    let stages = RemoteStage::pipeline(&cluster, &tiny.hyper, serve, local).expect("spans");
    (cluster, stages)
}

pub fn security(insecure: bool) -> Security {
    if insecure {
        Security::Insecure
    } else {
        Security::Shared(Identity::from_secret(SECRET).expect("identity"))
    }
}

/// The body of `worker_process`: serves until the process is killed.
pub fn serve_from_environment() {
    let Ok(text) = std::env::var("DS4_TEST_WORKER") else { return };
    let parts: Vec<&str> = text.split(' ').collect();
    let [address, layers, direct, secret] = parts[..] else { panic!("{text}") };
    let address: SocketAddr = address.parse().expect("address");
    let tiny = tiny();
    let slice = tiny.slice(layers);
    let options = worker::Options {
        coordinator: Endpoint { host: address.ip().to_string(), port: address.port() },
        listen: (direct == "direct").then(|| Endpoint { host: "127.0.0.1".into(), port: 0 }),
        security: match secret {
            "-" => Security::Insecure,
            secret => Security::Shared(
                Identity::from_secret(secret.replace('_', " ").as_bytes()).expect("identity"),
            ),
        },
        timing: Timing::default(),
        hello: setup::hello(
            &gguf(),
            &tiny.hyper,
            &slice,
            CONTEXT,
            &format!("node-{}", slice.first),
            "reference",
        ),
    };
    let (_stop, stopped) = worker::Stop::new();
    let make = move || {
        MachineHost::new(move |ask: &StageAsk| {
            let (tiny, ask) = (tiny.clone(), *ask);
            Machine::load("worker", ask.limits.checkpoints, move || tiny.load(slice, &ask))
        })
    };
    match worker::run(options, make, stopped) {
        Ok(reason) => println!("worker ended: {reason}"),
        Err(e) => println!("worker ended: {e}"),
    }
}

/// A child process that does not outlive the test.
pub struct Process(pub Child);

impl Process {
    pub fn worker(address: SocketAddr, layers: &str, direct: bool) -> Self {
        let secret = std::str::from_utf8(SECRET).expect("text");
        Self::start(Command::new(Self::program()), address, layers, direct, secret)
    }

    pub fn worker_with_secret(address: SocketAddr, layers: &str, secret: &str) -> Self {
        Self::start(Command::new(Self::program()), address, layers, false, secret)
    }

    /// In a network namespace.
    pub fn worker_in(namespace: &str, address: SocketAddr, layers: &str) -> Self {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", namespace]).arg(Self::program());
        Self::start(command, address, layers, false, std::str::from_utf8(SECRET).expect("text"))
    }

    fn program() -> std::path::PathBuf {
        std::env::current_exe().expect("this program")
    }

    fn start(mut command: Command, address: SocketAddr, layers: &str, direct: bool, secret: &str) -> Self {
        let direct = if direct { "direct" } else { "-" };
        let child = command
            .args(["--exact", "worker_process", "--ignored", "--nocapture"])
            .env("DS4_TEST_WORKER", format!("{address} {layers} {direct} {}", secret.replace(' ', "_")))
            .stdout(Stdio::piped())
            .spawn()
            .expect("starts");
        Process(child)
    }

    pub fn signal(&self, signal: &str) {
        let status =
            Command::new("kill").args([signal, &self.0.id().to_string()]).status().expect("kill runs");
        assert!(status.success());
    }

    pub fn kill(&mut self) {
        self.0.kill().expect("killed");
        self.0.wait().expect("reaped");
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

pub fn soon(seconds: u64) -> Instant {
    Instant::now() + Duration::from_secs(seconds)
}
