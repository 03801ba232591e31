//! The protocol core under seeds that delay, cut, duplicate and partition connections, and stop, pause and restart
//! workers. No sockets, no clocks: a seed gives one course of events, and is printed when its course goes wrong.
//!
//! A small engine stands in for ds4-engine: sessions, steps in flight, checkpoints, replay. A small model stands in for
//! the real one: every layer keeps a state per session that depends on every token so far, so that a lost, repeated
//! or reordered token shows in what is sampled.
//!
//! `DS4_SIMULATION_SEEDS=100000 cargo test --release -p ds4-cluster --test simulation` runs more of them;
//! `DS4_SIMULATION_FIRST=17` starts at seed 17.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, HashMap, VecDeque};
use std::time::Duration;

use bytes::Bytes;
use ds4_cluster::core::coordinator::{self as coord, Coordinator};
use ds4_cluster::core::worker::{self as work, Worker};
use ds4_cluster::core::{Link, PROTOCOL, Timing};
use ds4_cluster::setup;
use ds4_cluster::wire::{self, row_result, state_op::Op};
use ds4_engine::Mark;
use ds4_model::LayerSlice;
use ds4_testdata::Rng;
use prost::Message;

const LAYERS: usize = 6;
const SLOTS: usize = 3;
const ROWS_MAX: u32 = 8;
const VOCAB: u64 = 997;
/// f32 values of a row: eight bytes, one u64.
const WIDTH: usize = 2;
const RESUME_WAIT: Duration = Duration::from_secs(30);
/// Faults happen before this; afterwards everything must come right.
const QUIET: Duration = Duration::from_secs(60);
const END: Duration = Duration::from_secs(150);
const TICK: Duration = Duration::from_millis(100);

// ---- the model --------------------------------------------------------------------------------------------------

fn mix(mut z: u64) -> u64 {
    z = z.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

type States = [u64; LAYERS];

fn layer(state: &mut u64, value: u64) -> u64 {
    *state = mix(*state ^ value);
    mix(value.wrapping_add(*state))
}

/// What one process says: the tokens that follow `prompt`.
fn truth(prompt: &[u32], count: usize) -> Vec<u32> {
    let (mut states, mut tokens, mut out) = ([0; LAYERS], prompt.to_vec(), Vec::new());
    let mut at = 0;
    while out.len() < count {
        let mut value = 0;
        for &token in &tokens[at..] {
            value = states.iter_mut().fold(u64::from(token), |v, s| layer(s, v));
        }
        at = tokens.len();
        let token = (value % VOCAB) as u32;
        out.push(token);
        tokens.push(token);
    }
    out
}

/// What a slot or a checkpoint holds.
#[derive(Clone, Copy, Default)]
struct Memory {
    states: States,
    mark: Mark,
}

/// A slice of the model with its sessions' memory.
struct Stage {
    slice: LayerSlice,
    slots: [Memory; SLOTS],
    checkpoints: HashMap<u32, Memory>,
}

impl Stage {
    fn new(slice: LayerSlice) -> Self {
        Stage { slice, slots: Default::default(), checkpoints: HashMap::new() }
    }

    fn run(&mut self, step: &wire::Step, rows: &[u64]) -> work::Output {
        self.operations(&step.before);
        let mut tokens = step.tokens.chunks_exact(4).map(|b| u32::from_le_bytes(b.try_into().unwrap()));
        let (mut hidden, mut answers) = (Vec::new(), Vec::new());
        for segment in &step.segments {
            let slot = &mut self.slots[segment.slot as usize];
            let asked = segment.mark.expect("a mark");
            // The one thing that must never happen: a stage that goes on from other tokens than the step does.
            assert_eq!(
                (asked.position as usize, asked.prefix),
                (slot.mark.pos, slot.mark.prefix),
                "out of step"
            );
            for _ in 0..segment.rows {
                let token = tokens.next().expect("a token per row");
                let first = if self.slice.embeds() { u64::from(token) } else { rows[hidden.len()] };
                hidden.push(slot.states[self.slice.layers()].iter_mut().fold(first, |v, s| layer(s, v)));
                slot.mark = slot.mark.extend(&[token]);
            }
            // The simulation wants a token after every segment.
            let token = (hidden.last().expect("rows") % VOCAB) as u32;
            let chosen = wire::Chosen { token, ..Default::default() };
            answers.push(wire::RowResult { result: Some(row_result::Result::Token(chosen)) });
        }
        self.operations(&step.after);
        match self.slice.head {
            true => work::Output { rows: answers, ..Default::default() },
            false => work::Output { hidden: to_bytes(&hidden), ..Default::default() },
        }
    }

    fn operations(&mut self, ops: &[wire::StateOp]) {
        for op in ops {
            match op.op.as_ref().expect("known") {
                Op::Reset(slot) => self.slots[*slot as usize] = Memory::default(),
                Op::Save(c) => drop(self.checkpoints.insert(c.id, self.slots[c.slot as usize])),
                Op::Load(c) => self.slots[c.slot as usize] = self.checkpoints[&c.id],
                other => panic!("{other:?}"),
            }
        }
    }
}

fn to_bytes(rows: &[u64]) -> Bytes {
    rows.iter().flat_map(|r| r.to_le_bytes()).collect()
}

fn from_bytes(bytes: &[u8]) -> Vec<u64> {
    bytes.chunks_exact(8).map(|b| u64::from_le_bytes(b.try_into().unwrap())).collect()
}

// ---- the engine -------------------------------------------------------------------------------------------------

#[derive(Debug, PartialEq)]
enum End {
    Complete,
    Failed(String),
}

struct Session {
    prompt: usize,
    wanted: usize,
    tokens: Vec<u32>,
    /// What every stage has been asked to evaluate.
    asked: Mark,
    /// A step that will give its next token is under way.
    sampling: bool,
    saved: Vec<(u32, usize)>,
    /// Reset or load that its next step begins with.
    begin: Option<Op>,
    started: Duration,
}

struct Flight {
    step: wire::Step,
    /// Place in the route's stages.
    stage: usize,
    rows: Vec<u64>,
    /// Slots whose last token is in it.
    samples: Vec<usize>,
    /// Checkpoints that it saves: slot, number, position. They count once the step has ended everywhere.
    saves: Vec<(usize, u32, usize)>,
}

#[derive(Default)]
struct Engine {
    up: Option<coord::Up>,
    down_since: Duration,
    sessions: [Option<Session>; SLOTS],
    flights: VecDeque<Flight>,
    /// What the nodes remembered when the route came up last.
    memories: Vec<u64>,
    /// The route's stages: a span of workers, or the local slice.
    stages: Vec<Option<usize>>,
    next_checkpoint: u32,
    local: Option<Stage>,
    collected: HashMap<(usize, u64), Vec<u8>>,
    ended: Vec<(Duration, End)>,
    complete: usize,
}

// ---- the world --------------------------------------------------------------------------------------------------

enum Happening {
    Tick,
    ToCoordinator { link: Link, bytes: Vec<u8> },
    ToWorker { link: Link, bytes: Vec<u8> },
    Fed { worker: usize, epoch: u64, piece: wire::Activations },
    ClosedAtCoordinator(Link),
    ClosedAtWorker(Link),
    Accepted { link: Link, worker: usize, life: u64 },
    Loaded { worker: usize, life: u64, fails: bool },
    Ran { worker: usize, life: u64, step: wire::Step, rows: Vec<Bytes>, fails: bool },
    LocalRan,
    Fault,
    Request,
}

struct Entry {
    at: Duration,
    order: u64,
    what: Happening,
}

impl PartialEq for Entry {
    fn eq(&self, other: &Self) -> bool {
        (self.at, self.order) == (other.at, other.order)
    }
}
impl Eq for Entry {}
impl PartialOrd for Entry {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Entry {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.at, self.order).cmp(&(other.at, other.order))
    }
}

struct Node {
    core: Worker,
    stage: Stage,
    /// Counts restarts: what was under way in an earlier life does not come back.
    life: u64,
    link: Option<Link>,
    paused_until: Duration,
    cut_until: Duration,
    next: Option<usize>,
}

#[derive(Clone)]
struct Wire {
    worker: usize,
    /// Last delivery in each direction: messages keep their order.
    last: [Duration; 2],
    open: bool,
}

struct World {
    rng: Rng,
    now: Duration,
    order: u64,
    queue: BinaryHeap<Reverse<Entry>>,
    coordinator: Coordinator,
    engine: Engine,
    nodes: Vec<Node>,
    wires: BTreeMap<Link, Wire>,
    next_link: Link,
    direct: bool,
    local_busy: bool,
    logging: bool,
}

fn hello(slice: LayerSlice, boot: u64, listen: String) -> wire::Hello {
    wire::Hello {
        protocol: PROTOCOL,
        version: "test".into(),
        name: format!("node-{slice}"),
        boot,
        layers: Some(wire::Layers {
            first: slice.first as u32,
            end: slice.end as u32,
            total: LAYERS as u32,
            head: slice.head,
        }),
        fingerprint: vec![7; 32].into(),
        context: 1000,
        activation_bits: 32,
        listen,
        device: "simulated".into(),
    }
}

fn millis(rng: &mut Rng, from: u64, to: u64) -> Duration {
    Duration::from_millis(from + rng.below((to - from) as usize) as u64)
}

impl World {
    fn new(seed: u64) -> Self {
        let mut rng = Rng(seed.wrapping_mul(0x5851_f42d_4c95_7f2d) ^ 0xd54);
        let layouts: [(Option<&str>, &[&str]); 7] = [
            (Some("0:2"), &["3:output"]),
            (Some("3:output"), &["0:2"]),
            (Some("2:3"), &["0:1", "4:output"]),
            (None, &["0:2", "3:output"]),
            (None, &["0:0", "1:1", "2:3", "4:4", "5:output"]),
            (Some("0:1"), &["2:3", "4:output"]),
            (Some("0:2"), &["3:output", "3:output"]),
        ];
        let (local, workers) = layouts[rng.below(layouts.len())];
        let slice = |text: &str| LayerSlice::parse(text, LAYERS).expect("slice");
        let local = local.map(slice);
        let direct = rng.below(2) == 0;
        let spans = setup::spans(LAYERS, local).expect("spans");
        let mut stages: Vec<Option<usize>> = (0..spans.len()).map(Some).collect();
        if let Some(local) = local {
            stages.insert(usize::from(local.first > 0), None);
        }
        let welcome = wire::Welcome {
            protocol: PROTOCOL,
            limits: Some(wire::Limits {
                context: 500,
                rows: ROWS_MAX,
                slots: SLOTS as u32,
                ..Default::default()
            }),
            activation_bits: 32,
            heartbeat_ms: 1000,
            heartbeats_missed_max: 3,
            // Narrow windows hold steps back at the coordinator.
            steps_max: 1 + rng.below(8) as u32,
            width: WIDTH as u32,
            ..Default::default()
        };
        let coordinator = Coordinator::new(coord::Config {
            timing: Timing {
                step_min: Duration::from_secs(5),
                step_first: Duration::from_secs(5),
                ..Timing::default()
            },
            layers: LAYERS,
            spans: spans.clone(),
            sizes: Box::new(|_| (0, 0)),
            fingerprint: Box::new(|_| [7; 32]),
            welcome,
        });
        let nodes = workers
            .iter()
            .enumerate()
            .map(|(i, text)| {
                let slice = slice(text);
                let listen = if direct { i.to_string() } else { String::new() };
                let boot = i as u64 + 1;
                Node {
                    core: Worker::new(Timing::default(), hello(slice, boot, listen)),
                    stage: Stage::new(slice),
                    life: boot,
                    link: None,
                    paused_until: Duration::ZERO,
                    cut_until: Duration::ZERO,
                    next: None,
                }
            })
            .collect();
        let engine = Engine { local: local.map(Stage::new), stages, ..Engine::default() };
        let mut world = World {
            rng,
            now: Duration::ZERO,
            order: 0,
            queue: BinaryHeap::new(),
            coordinator,
            engine,
            nodes,
            wires: BTreeMap::new(),
            next_link: 1,
            direct,
            local_busy: false,
            logging: std::env::var_os("DS4_SIMULATION_LOG").is_some(),
        };
        world.at(Duration::ZERO, Happening::Tick);
        world.at(Duration::from_millis(1500), Happening::Request);
        let faults = 1 + world.rng.below(10);
        for _ in 0..faults {
            let when = millis(&mut world.rng, 0, QUIET.as_millis() as u64);
            world.at(when, Happening::Fault);
        }
        world
    }

    fn at(&mut self, at: Duration, what: Happening) {
        self.order += 1;
        self.queue.push(Reverse(Entry { at, order: self.order, what }));
    }

    fn run(&mut self) {
        while let Some(Reverse(entry)) = self.queue.pop() {
            if entry.at > END {
                break;
            }
            self.now = entry.at;
            self.happen(entry.what);
            self.schedule();
        }
        for (slot, session) in self.engine.sessions.iter().enumerate() {
            let Some(s) = session else { continue };
            let flights: Vec<String> = self
                .engine
                .flights
                .iter()
                .map(|f| format!("stage {} {:?}", f.stage, f.step.segments))
                .collect();
            panic!(
                "slot {slot} has not ended: {} of {} tokens asked, sampling {}, since {:?}; in flight: {flights:?}; route {:?}",
                s.asked.pos,
                s.tokens.len(),
                s.sampling,
                s.started,
                self.engine.up
            );
        }
        let late = self.engine.ended.iter().filter(|(at, _)| *at > QUIET + Duration::from_secs(50));
        for (at, end) in late {
            assert_eq!(*end, End::Complete, "a request after the faults, at {at:?}");
        }
        assert!(self.engine.complete > 0, "no request was answered");
    }

    fn happen(&mut self, what: Happening) {
        match what {
            Happening::Tick => {
                self.coordinate(coord::Event::Tick);
                for i in 0..self.nodes.len() {
                    if self.now >= self.nodes[i].paused_until {
                        self.work(i, work::Event::Tick);
                    }
                }
                self.give_up();
                self.at(self.now + TICK, Happening::Tick);
            }
            Happening::ToCoordinator { link, bytes } => {
                let Some(wire) = self.wires.get(&link).cloned() else { return };
                let cut = self.nodes[wire.worker].cut_until;
                if cut > self.now {
                    return self.at(cut, Happening::ToCoordinator { link, bytes });
                }
                let message =
                    wire::FromWorker::decode(&bytes[..]).expect("decodes").message.expect("message");
                self.coordinate(coord::Event::Message { link, message });
            }
            Happening::ToWorker { link, bytes } => {
                let Some(wire) = self.wires.get(&link).cloned() else { return };
                let node = &self.nodes[wire.worker];
                let later = node.cut_until.max(node.paused_until);
                if later > self.now {
                    return self.at(later, Happening::ToWorker { link, bytes });
                }
                if node.link == Some(link) {
                    let message =
                        wire::ToWorker::decode(&bytes[..]).expect("decodes").message.expect("message");
                    self.work(wire.worker, work::Event::Message(message));
                }
            }
            Happening::Fed { worker, epoch, piece } => {
                let node = &self.nodes[worker];
                let later = node.cut_until.max(node.paused_until);
                if later > self.now {
                    return self.at(later, Happening::Fed { worker, epoch, piece });
                }
                self.work(worker, work::Event::Fed(piece));
            }
            Happening::ClosedAtCoordinator(link) => {
                self.coordinate(coord::Event::Closed { link, reason: "connection closed".into() });
            }
            Happening::ClosedAtWorker(link) => {
                let Some(wire) = self.wires.get(&link).cloned() else { return };
                let paused = self.nodes[wire.worker].paused_until;
                if paused > self.now {
                    return self.at(paused, Happening::ClosedAtWorker(link));
                }
                if self.nodes[wire.worker].link == Some(link) {
                    self.nodes[wire.worker].link = None;
                    self.work(wire.worker, work::Event::Closed { reason: "connection closed".into() });
                }
            }
            Happening::Accepted { link, worker, life } => {
                let node = &self.nodes[worker];
                if node.life != life {
                    return;
                }
                if node.cut_until > self.now {
                    return self.at(node.cut_until, Happening::Accepted { link, worker, life });
                }
                self.wires.insert(link, Wire { worker, last: [self.now; 2], open: true });
                self.nodes[worker].link = Some(link);
                self.coordinate(coord::Event::Opened { link, peer: format!("10.0.0.{worker}") });
                self.work(worker, work::Event::Connected);
            }
            Happening::Loaded { worker, life, fails } => {
                if self.nodes[worker].life == life {
                    assert!(!fails);
                    self.nodes[worker].stage = Stage::new(self.nodes[worker].stage.slice);
                    self.work(worker, work::Event::Loaded(Ok(())));
                }
            }
            Happening::Ran { worker, life, step, rows, fails } => {
                let node = &mut self.nodes[worker];
                if node.life != life {
                    return;
                }
                if node.paused_until > self.now {
                    let later = node.paused_until;
                    return self.at(later, Happening::Ran { worker, life, step, rows, fails });
                }
                let (epoch, number) = (step.epoch, step.number);
                let result = if fails {
                    Err(Box::new(wire::Fault {
                        kind: wire::FaultKind::OutOfMemory.into(),
                        ..Default::default()
                    }))
                } else {
                    let rows: Vec<u64> = rows.iter().flat_map(|b| from_bytes(b)).collect();
                    Ok(node.stage.run(&step, &rows))
                };
                let compute = Duration::from_millis(1);
                self.work(worker, work::Event::Ran { epoch, step: number, result, compute });
            }
            Happening::LocalRan => self.local_ran(),
            Happening::Fault => self.fault(),
            Happening::Request => self.request(),
        }
    }

    /// For the course of one seed: `DS4_SIMULATION_LOG=1`, and `--nocapture`.
    fn log(&self, text: &str) {
        if self.logging {
            println!("{:8.3} {text}", self.now.as_secs_f64());
        }
    }

    // ---- faults -------------------------------------------------------------------------------------------------

    fn fault(&mut self) {
        let worker = self.rng.below(self.nodes.len());
        // Mostly shorter than a client waits, now and then longer.
        let longest = if self.rng.below(10) == 0 { 45_000 } else { 12_000 };
        let until = self.now + millis(&mut self.rng, 100, longest);
        let kind = self.rng.below(7);
        self.log(&format!("fault {kind} of worker {worker} until {until:?}"));
        match kind {
            // Killed; the system closes its connections.
            0 => self.restart(worker, true),
            // The machine lost power: nobody hears of it.
            1 => self.restart(worker, false),
            2 => self.nodes[worker].paused_until = until,
            3 => self.nodes[worker].cut_until = until,
            // Connection reset, seen by both sides, by the worker alone, by the coordinator alone.
            kind @ 4..=6 => {
                let Some(link) = self.nodes[worker].link else { return };
                if kind != 5 {
                    self.at(self.now, Happening::ClosedAtCoordinator(link));
                }
                if kind != 6 {
                    self.at(self.now, Happening::ClosedAtWorker(link));
                }
            }
            _ => {}
        }
        // Two at once.
        if self.rng.below(4) == 0 {
            self.at(self.now + Duration::from_millis(1), Happening::Fault);
        }
    }

    fn restart(&mut self, worker: usize, heard: bool) {
        self.order += 1;
        let life = 1000 + self.order;
        let listen = if self.direct { worker.to_string() } else { String::new() };
        let node = &mut self.nodes[worker];
        let old = node.link.take();
        node.core = Worker::new(Timing::default(), hello(node.stage.slice, life, listen));
        node.stage = Stage::new(node.stage.slice);
        node.life = life;
        node.next = None;
        // It takes a while to come back.
        node.paused_until = self.now + Duration::from_millis(300);
        if let (Some(link), true) = (old, heard) {
            self.at(self.now, Happening::ClosedAtCoordinator(link));
        }
    }

    // ---- running the cores --------------------------------------------------------------------------------------

    fn work(&mut self, worker: usize, event: work::Event) {
        let actions = self.nodes[worker].core.handle(self.now, event);
        let life = self.nodes[worker].life;
        for action in actions {
            match action {
                work::Action::Connect => {
                    let link = self.next_link;
                    self.next_link += 1;
                    let when = self.now + millis(&mut self.rng, 1, 50);
                    self.at(when, Happening::Accepted { link, worker, life });
                }
                work::Action::Send(message) => {
                    let Some(link) = self.nodes[worker].link else { continue };
                    let bytes = wire::FromWorker { message: Some(message) }.encode_to_vec();
                    let when = self.delay(link, 0);
                    self.at(when, Happening::ToCoordinator { link, bytes });
                }
                work::Action::Close => {
                    if let Some(link) = self.nodes[worker].link.take() {
                        let when = self.delay(link, 0);
                        self.at(when, Happening::ClosedAtCoordinator(link));
                    }
                }
                work::Action::Load(_) => {
                    let when = self.now + millis(&mut self.rng, 10, 500);
                    self.at(when, Happening::Loaded { worker, life, fails: false });
                }
                work::Action::Restart { epoch } => {
                    self.work(worker, work::Event::Restarted { epoch, result: Ok(true) });
                }
                work::Action::Run { step, rows } => {
                    let when = self.now + millis(&mut self.rng, 1, 40);
                    let fails = self.now < QUIET && self.rng.below(300) == 0;
                    self.at(when, Happening::Ran { worker, life, step, rows, fails });
                }
                work::Action::Next { address, .. } => {
                    self.nodes[worker].next = Some(address.parse().expect("worker index"));
                }
                work::Action::Feed(piece) => {
                    let next = self.nodes[worker].next.expect("a next node");
                    let when = self.now + millis(&mut self.rng, 1, 4);
                    if self.nodes[next].cut_until > self.now && self.rng.below(2) == 0 {
                        self.work(worker, work::Event::FeedLost { reason: "cut".into() });
                    } else {
                        // One stream: pieces of one sender keep their order.
                        let epoch = piece.epoch;
                        self.at(
                            when.max(self.now + Duration::from_millis(4)),
                            Happening::Fed { worker: next, epoch, piece },
                        );
                    }
                }
                work::Action::Stop { reason, .. } => panic!("worker {worker} stopped: {reason}"),
                work::Action::Log { text, .. } => self.log(&format!("worker {worker}: {text}")),
            }
        }
    }

    /// When a message sent now arrives.
    fn delay(&mut self, link: Link, direction: usize) -> Duration {
        let spread = if self.rng.below(50) == 0 { 900 } else { 5 };
        let when = self.now + millis(&mut self.rng, 0, spread);
        let Some(wire) = self.wires.get_mut(&link) else { return when };
        wire.last[direction] = wire.last[direction].max(when);
        wire.last[direction]
    }

    fn coordinate(&mut self, event: coord::Event) {
        let actions = self.coordinator.handle(self.now, event);
        for action in actions {
            match action {
                coord::Action::Send { link, message } => {
                    if self.wires.get(&link).is_some_and(|w| w.open) {
                        let bytes = wire::ToWorker { message: Some(message) }.encode_to_vec();
                        let when = self.delay(link, 1);
                        self.at(when, Happening::ToWorker { link, bytes });
                    }
                }
                coord::Action::Close { link } => {
                    if let Some(wire) = self.wires.get_mut(&link) {
                        wire.open = false;
                        let when = self.delay(link, 1);
                        self.at(when, Happening::ClosedAtWorker(link));
                    }
                }
                coord::Action::RouteUp(up) => self.route_up(up),
                coord::Action::RouteDown(_) => {
                    self.engine.up = None;
                    self.engine.down_since = self.now;
                }
                coord::Action::Rows { span, piece } => {
                    self.engine
                        .collected
                        .entry((span, piece.step))
                        .or_default()
                        .extend_from_slice(&piece.data);
                }
                coord::Action::Done { span, reports } => self.span_done(span, reports),
                coord::Action::Failed { .. } => {}
                coord::Action::Log { text, .. } => self.log(&format!("coordinator: {text}")),
            }
        }
    }

    // ---- the engine's turns ---------------------------------------------------------------------------------------

    fn request(&mut self) {
        if self.now + Duration::from_secs(45) < END {
            let when = self.now + millis(&mut self.rng, 500, 5000);
            self.at(when, Happening::Request);
        }
        let Some(slot) = self.engine.sessions.iter().position(Option::is_none) else { return };
        let prompt: Vec<u32> =
            (0..1 + self.rng.below(40)).map(|_| self.rng.below(VOCAB as usize) as u32).collect();
        self.engine.sessions[slot] = Some(Session {
            prompt: prompt.len(),
            wanted: 1 + self.rng.below(20),
            tokens: prompt,
            asked: Mark::default(),
            sampling: false,
            saved: Vec::new(),
            begin: Some(Op::Reset(slot as u32)),
            started: self.now,
        });
    }

    fn route_up(&mut self, up: coord::Up) {
        self.engine.flights.clear();
        self.engine.collected.clear();
        self.local_busy = false;
        let memories: Vec<u64> = up.spans.iter().flatten().map(|n| n.memory).collect();
        let survived = memories == self.engine.memories;
        self.engine.memories = memories;
        for (slot, session) in self.engine.sessions.iter_mut().enumerate() {
            let Some(s) = session else { continue };
            let slot = slot as u32;
            s.sampling = false;
            if !survived {
                s.saved.clear();
            }
            // One row at least is left to sample from.
            match s.saved.iter().rev().find(|(_, position)| *position < s.tokens.len()) {
                Some(&(id, position)) => {
                    s.asked = Mark::default().extend(&s.tokens[..position]);
                    s.begin = Some(Op::Load(wire::Checkpoint { slot, id }));
                }
                None => {
                    s.asked = Mark::default();
                    s.begin = Some(Op::Reset(slot));
                }
            }
        }
        self.engine.up = Some(up);
    }

    /// Sessions that have waited for a whole route too long fail.
    fn give_up(&mut self) {
        let waiting = self.engine.up.is_none();
        for session in &mut self.engine.sessions {
            let Some(s) = session else { continue };
            if waiting && self.now >= self.engine.down_since.max(s.started) + RESUME_WAIT {
                self.engine.ended.push((self.now, End::Failed("lost".into())));
                *session = None;
            } else {
                assert!(self.now < s.started + Duration::from_secs(140), "a request is stuck");
            }
        }
    }

    /// Puts one more step under way where there is work.
    fn schedule(&mut self) {
        let Some(up) = &self.engine.up else { return };
        if self.engine.flights.len() > self.engine.stages.len() {
            return;
        }
        let mut step = wire::Step { epoch: up.epoch, ..Default::default() };
        let (mut tokens, mut samples, mut saves) = (Vec::new(), Vec::new(), Vec::new());
        let mut room = ROWS_MAX as usize;
        for (slot, session) in self.engine.sessions.iter_mut().enumerate() {
            let Some(s) =
                session.as_mut().filter(|s| s.asked.pos < s.tokens.len() && !s.sampling && room > 0)
            else {
                continue;
            };
            let count = (s.tokens.len() - s.asked.pos).min(room).min(1 + self.rng.below(ROWS_MAX as usize));
            room -= count;
            let run = &s.tokens[s.asked.pos..s.asked.pos + count];
            step.before.extend(s.begin.take().map(|op| wire::StateOp { op: Some(op) }));
            let mark = wire::Mark { position: s.asked.pos as u64, prefix: s.asked.prefix };
            step.segments.push(wire::Segment { slot: slot as u32, rows: count as u32, mark: Some(mark) });
            tokens.extend(run.iter().flat_map(|t| t.to_le_bytes()));
            s.asked = s.asked.extend(run);
            s.sampling = s.asked.pos == s.tokens.len();
            if s.sampling {
                samples.push(slot);
            }
            if self.rng.below(3) == 0 {
                self.engine.next_checkpoint += 1;
                let id = self.engine.next_checkpoint;
                let op = Op::Save(wire::Checkpoint { slot: slot as u32, id });
                step.after.push(wire::StateOp { op: Some(op) });
                saves.push((slot, id, s.asked.pos));
            }
        }
        if step.segments.is_empty() {
            return;
        }
        step.tokens = tokens.into();
        self.engine.flights.push_back(Flight { step, stage: 0, rows: Vec::new(), samples, saves });
        self.advance(self.engine.flights.len() - 1);
    }

    /// Hands a flight to the stage it has come to.
    fn advance(&mut self, at: usize) {
        let flight = &mut self.engine.flights[at];
        match self.engine.stages[flight.stage] {
            // The local stage takes the flights in their order.
            None => self.start_local(),
            Some(span) => {
                let step = flight.step.clone();
                let rows = to_bytes(&std::mem::take(&mut flight.rows));
                self.coordinate(coord::Event::Submit { span, step, rows });
            }
        }
    }

    fn start_local(&mut self) {
        if !self.local_busy {
            self.local_busy = true;
            let when = self.now + millis(&mut self.rng, 1, 40);
            self.at(when, Happening::LocalRan);
        }
    }

    fn local_ran(&mut self) {
        if self.engine.up.is_none() || !self.local_busy {
            return;
        }
        self.local_busy = false;
        let place = self.engine.stages.iter().position(Option::is_none).expect("a local stage");
        let Some(at) = self.engine.flights.iter().position(|f| f.stage == place) else { return };
        let flight = &mut self.engine.flights[at];
        let stage = self.engine.local.as_mut().expect("a local stage");
        let output = stage.run(&flight.step, &std::mem::take(&mut flight.rows));
        flight.rows = from_bytes(&output.hidden);
        self.stage_done(at, &output.rows);
        if self.engine.flights.iter().any(|f| f.stage == place) {
            self.start_local();
        }
    }

    fn span_done(&mut self, span: usize, reports: Vec<wire::StepDone>) {
        let place = self.engine.stages.iter().position(|s| *s == Some(span)).expect("a stage");
        let at = self.engine.flights.iter().position(|f| f.stage == place).expect("a flight");
        let last = reports.last().expect("a node");
        assert!(reports.iter().all(|r| r.step == last.step), "one report per node");
        let rows = self.engine.collected.remove(&(span, last.step)).unwrap_or_default();
        self.engine.flights[at].rows = from_bytes(&rows);
        self.stage_done(at, &last.rows);
    }

    fn stage_done(&mut self, at: usize, answers: &[wire::RowResult]) {
        self.engine.flights[at].stage += 1;
        if self.engine.flights[at].stage < self.engine.stages.len() {
            return self.advance(at);
        }
        assert_eq!(at, 0, "steps end in their order");
        let flight = self.engine.flights.pop_front().expect("a flight");
        assert_eq!(answers.len(), flight.step.segments.len());
        for (slot, id, position) in flight.saves {
            if let Some(s) = &mut self.engine.sessions[slot] {
                s.saved.push((id, position));
            }
        }
        for (segment, answer) in flight.step.segments.iter().zip(answers) {
            let slot = segment.slot as usize;
            let Some(row_result::Result::Token(chosen)) = &answer.result else { panic!("no token") };
            let Some(s) = self.engine.sessions[slot].as_mut().filter(|_| flight.samples.contains(&slot))
            else {
                continue;
            };
            s.sampling = false;
            s.tokens.push(chosen.token);
            if s.tokens.len() - s.prompt == s.wanted {
                let expected = truth(&s.tokens[..s.prompt], s.wanted);
                assert_eq!(s.tokens[s.prompt..], expected, "slot {slot}");
                self.engine.sessions[slot] = None;
                self.engine.complete += 1;
                self.engine.ended.push((self.now, End::Complete));
            }
        }
    }
}

#[test]
fn every_request_ends_right_or_with_an_error() {
    let number = |name: &str| std::env::var(name).ok().and_then(|v| v.parse::<u64>().ok());
    let first = number("DS4_SIMULATION_FIRST").unwrap_or(1);
    let count = number("DS4_SIMULATION_SEEDS").unwrap_or(1000);
    let (mut complete, mut failed) = (0, 0);
    for seed in first..first + count {
        let result = std::panic::catch_unwind(|| {
            let mut world = World::new(seed);
            world.run();
            (world.engine.complete, world.engine.ended.len() - world.engine.complete)
        });
        match result {
            Ok((c, f)) => {
                complete += c;
                failed += f;
            }
            Err(_) => panic!(
                "seed {seed} went wrong (DS4_SIMULATION_FIRST={seed} DS4_SIMULATION_SEEDS=1 repeats it)"
            ),
        }
    }
    println!("{count} seeds: {complete} requests complete, {failed} failed with an error");
    assert!(complete > failed, "most requests are answered");
}
