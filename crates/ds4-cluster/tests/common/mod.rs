//! Several processes on loopback. A test starts workers by running its own program again: the ignored test
//! `worker_process` is what they run.

#![allow(dead_code)]

use std::net::SocketAddr;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use bytes::Bytes;
use ds4_cluster::activation::Format;
use ds4_cluster::coordinator::{self, Cluster};
use ds4_cluster::core::coordinator::Config;
use ds4_cluster::core::worker::Output;
use ds4_cluster::core::{PROTOCOL, Timing};
use ds4_cluster::endpoint::Endpoint;
use ds4_cluster::host::Host;
use ds4_cluster::security::{Identity, Security};
use ds4_cluster::wire::{self, state_op::Op};
use ds4_cluster::{fingerprint, worker};
use ds4_gguf::Gguf;
use ds4_model::{
    Backend, Batch, HyperParams, KvLayout, LayerSlice, Limits, Model, ModelError, Numerics, Outputs,
    RowFormat, Setup,
};
use ds4_reference::Reference;

pub const SECRET: &[u8] = b"the secret of these tests";
pub const CONTEXT: usize = 768;
pub const ROWS: u32 = 64;
pub const SLOTS: u32 = 2;

pub struct Tiny {
    pub gguf: Gguf,
    pub hyper: HyperParams,
}

pub fn tiny() -> Tiny {
    let gguf = Gguf::open(&ds4_testdata::tiny_model()).expect("tiny model");
    let hyper = HyperParams::from_metadata(gguf.metadata()).expect("hyper-parameters");
    Tiny { gguf, hyper }
}

impl Tiny {
    pub fn layers(&self) -> usize {
        self.hyper.layers.len()
    }

    pub fn slice(&self, text: &str) -> LayerSlice {
        LayerSlice::parse(text, self.layers()).expect("slice")
    }

    pub fn width(&self) -> usize {
        self.hyper.streams * self.hyper.hidden
    }

    pub fn welcome(&self, bits: u32) -> wire::Welcome {
        wire::Welcome {
            protocol: PROTOCOL,
            version: "test".into(),
            limits: Some(wire::Limits {
                context: CONTEXT as u64,
                rows: ROWS,
                outputs: ROWS,
                slots: SLOTS,
                pages: SLOTS * KvLayout::pages_for(CONTEXT) as u32,
                checkpoints: 8,
            }),
            activation_bits: bits,
            heartbeat_ms: 300,
            heartbeats_missed_max: 3,
            steps_max: 6,
            width: self.width() as u32,
            qat: false,
            exact: true,
            rows_f32: true,
        }
    }
}

/// A slice of the tiny model on the reference backend.
pub struct TinyStage {
    tiny: Tiny,
    slice: LayerSlice,
    format: Format,
    model: Option<Model<Reference>>,
    checkpoints: std::collections::HashMap<u64, Vec<u8>>,
}

fn fault(e: impl std::fmt::Display) -> wire::Fault {
    wire::Fault { kind: wire::FaultKind::Failed.into(), details: e.to_string(), ..Default::default() }
}

impl TinyStage {
    pub fn new(slice: &str) -> Self {
        let tiny = tiny();
        let slice = tiny.slice(slice);
        TinyStage { tiny, slice, format: Format::Bits32, model: None, checkpoints: Default::default() }
    }

    fn operations(&mut self, ops: &[wire::StateOp]) -> Result<(), ModelError> {
        let model = self.model.as_mut().expect("loaded");
        let bytes = model.setup().layout.frontier_bytes;
        for op in ops {
            match op.op.as_ref().expect("known") {
                Op::Reset(slot) => model.backend.reset(*slot)?,
                Op::SetPages(p) => model.backend.set_pages(p.slot, p.first as usize, &p.pages)?,
                Op::CopyPage(c) => model.backend.copy_page(c.from, c.to)?,
                Op::Save(c) => {
                    let mut frontier = vec![0; bytes];
                    model.backend.save_frontier(c.slot, &mut frontier)?;
                    self.checkpoints.insert(c.number, frontier);
                }
                Op::Load(c) => model.backend.load_frontier(c.slot, &self.checkpoints[&c.number])?,
                Op::Discard(number) => drop(self.checkpoints.remove(number)),
            }
        }
        Ok(())
    }

    fn step(&mut self, step: &wire::Step, rows: Vec<Bytes>) -> Result<Output, Box<dyn std::error::Error>> {
        let width = self.tiny.width();
        self.operations(&step.before)?;
        let tokens: Vec<u32> =
            step.tokens.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
        let (mut batch, mut row) = (Batch::new(), 0);
        for s in &step.segments {
            let wants = step.wants.iter().filter(|w| (row..row + s.rows).contains(&w.row)).count();
            let outputs = match wants {
                0 => Outputs::None,
                1 => Outputs::Last,
                _ => Outputs::All,
            };
            batch.push(s.slot, s.position as usize, &tokens[row as usize..(row + s.rows) as usize], outputs);
            row += s.rows;
        }
        let model = self.model.as_mut().expect("loaded");
        let hidden = (!self.slice.embeds()).then(|| {
            let mut values = vec![0f32; batch.len() * width];
            self.format.decode(&rows.concat(), width, &mut values).map(|()| values)
        });
        model.forward(&batch, hidden.transpose()?.as_deref())?;
        let mut output = Output::default();
        if self.slice.head {
            let mut logits = vec![0f32; self.tiny.hyper.vocab];
            for (i, want) in step.wants.iter().enumerate() {
                model.logits(i, &mut logits)?;
                let best =
                    (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b])).expect("vocabulary");
                let mut sampled = wire::Sampled { token: best as u32, ..Default::default() };
                if want.logits {
                    sampled.logits = Format::Bits32.encode(logits.clone(), logits.len());
                }
                output.outcome.sampled.push(sampled);
            }
        } else {
            let mut values = vec![0f32; batch.len() * width];
            model.hidden(0, &mut values)?;
            output.rows = self.format.encode(values, width);
        }
        self.operations(&step.after)?;
        Ok(output)
    }
}

impl Host for TinyStage {
    fn load(&mut self, welcome: &wire::Welcome) -> Result<(), wire::Fault> {
        let limits = welcome.limits.unwrap_or_default();
        let format = if welcome.rows_f32 { RowFormat::F32 } else { RowFormat::Packed };
        let setup = Setup {
            hyper: self.tiny.hyper.clone(),
            layout: KvLayout::new(&self.tiny.hyper, self.slice, format),
            limits: Limits {
                context: limits.context as usize,
                rows: limits.rows as usize,
                outputs: limits.outputs as usize,
                slots: limits.slots as usize,
                pages: limits.pages as usize,
            },
            numerics: Numerics { qat: welcome.qat, exact: welcome.exact },
        };
        self.format = Format::from_bits(welcome.activation_bits).expect("agreed");
        self.checkpoints.clear();
        let model = Model::load(&self.tiny.gguf, setup, Reference::default(), &mut |_| ()).map_err(fault)?;
        self.model = Some(model);
        Ok(())
    }

    fn run(&mut self, step: &wire::Step, rows: Vec<Bytes>) -> Result<Output, wire::Fault> {
        self.step(step, rows).map_err(fault)
    }
}

pub fn hello(tiny: &Tiny, slice: &LayerSlice) -> wire::Hello {
    wire::Hello {
        protocol: PROTOCOL,
        version: "test".into(),
        name: format!("node-{}", slice.first),
        boot: u64::from(std::process::id()),
        layers: Some(wire::Layers {
            first: slice.first as u32,
            end: slice.end as u32,
            total: slice.total as u32,
            head: slice.head,
        }),
        fingerprint: fingerprint(&tiny.gguf, &tiny.hyper, slice).to_vec().into(),
        context: CONTEXT as u64,
        activation_bits: 8 + 16 + 32,
        listen: String::new(),
        device: "reference".into(),
    }
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
        hello: hello(&tiny, &slice),
    };
    let (_stop, stopped) = worker::Stop::new();
    match worker::run(options, TinyStage::new(layers), stopped) {
        Ok(reason) => println!("worker ended: {reason}"),
        Err(e) => println!("worker ended: {e}"),
    }
}

/// A child process that does not outlive the test.
pub struct Process(pub Child);

impl Process {
    pub fn worker(address: SocketAddr, layers: &str, direct: bool) -> Self {
        Self::worker_with_secret(address, layers, direct, std::str::from_utf8(SECRET).expect("text"))
    }

    pub fn worker_with_secret(address: SocketAddr, layers: &str, direct: bool, secret: &str) -> Self {
        let direct = if direct { "direct" } else { "-" };
        let program = std::env::current_exe().expect("this program");
        let child = Command::new(program)
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

    /// What it printed, once it has ended.
    pub fn output(mut self) -> String {
        use std::io::Read;
        let mut text = String::new();
        self.0.stdout.take().expect("piped").read_to_string(&mut text).expect("text");
        self.0.wait().expect("reaped");
        text
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

pub fn start(tiny: &Tiny, local: Option<&str>, security: Security, bits: u32) -> Cluster {
    let other = self::tiny();
    Cluster::start(coordinator::Options {
        listen: Endpoint { host: "127.0.0.1".into(), port: 0 },
        security,
        core: Config {
            timing: Timing { heartbeat: Duration::from_millis(300), ..Timing::default() },
            layers: tiny.layers(),
            local: local.map(|l| tiny.slice(l)),
            fingerprint: Box::new(move |slice| fingerprint(&other.gguf, &other.hyper, slice)),
            welcome: tiny.welcome(bits),
        },
    })
    .expect("listens")
}

pub fn soon(seconds: u64) -> Instant {
    Instant::now() + Duration::from_secs(seconds)
}

/// Whether `path` holds anything; for the words of a skipped test.
pub fn exists(path: &str) -> bool {
    Path::new(path).exists()
}
