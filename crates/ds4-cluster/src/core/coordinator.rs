//! The coordinator's half of the protocol: who is there, the route over them, and the steps under way.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::net::SocketAddr;
use std::ops::Range;
use std::time::Duration;

use bytes::Bytes;
use ds4_model::LayerSlice;
use thiserror::Error;

use super::worker::pieces;
use super::{Link, PIECE_BYTES, PROTOCOL, Timing, route, stood_still};
use crate::activation::Format;
use crate::wire::state_op::Op;
use crate::wire::{self, FromWorkerMessage as From, GoodbyeReason, ToWorkerMessage as To};

/// Steps that the engine may have handed over before their turn.
const WAITING_MAX: usize = 64;

/// Connections at once: eight stages, and spares.
const LINKS_MAX: usize = 16;

/// From a slice to the fingerprint of its weights in this machine's file.
pub type Fingerprint = Box<dyn Fn(&LayerSlice) -> [u8; 32] + Send>;

/// From a slice to the bytes of its part of a page and of a frontier.
pub type Sizes = Box<dyn Fn(&LayerSlice) -> (usize, usize) + Send>;

/// What the coordinator asks of every node.
pub struct Config {
    pub timing: Timing,
    /// Layers of the model.
    pub layers: usize,
    pub sizes: Sizes,
    /// The slices that workers must cover, in order: all but what this process computes itself.
    pub spans: Vec<LayerSlice>,
    pub fingerprint: Fingerprint,
    pub welcome: wire::Welcome,
}

/// What happened.
#[derive(Debug)]
pub enum Event {
    Opened {
        link: Link,
        /// Address, for messages.
        peer: String,
    },
    Message {
        link: Link,
        message: From,
    },
    Closed {
        link: Link,
        reason: String,
    },
    /// The engine hands a step to a span, in the belief that `step.epoch` stands. The step's number is given here.
    Submit {
        span: usize,
        step: wire::Step,
        /// The activations that it starts from.
        rows: Bytes,
    },
    /// Steps cannot go on although every node is there: the engine's own stage failed. Starts a new epoch.
    Restart {
        epoch: u64,
        reason: String,
    },
    Tick,
}

/// What to do.
#[derive(Debug, PartialEq)]
pub enum Action {
    Send {
        link: Link,
        message: To,
    },
    /// After what was sent has gone out.
    Close {
        link: Link,
    },
    RouteUp(Up),
    RouteDown(Lost),
    /// Activations that a span gives to the stage after it.
    Rows {
        span: usize,
        piece: wire::Activations,
    },
    /// One report per node of the span, in their order.
    Done {
        span: usize,
        reports: Vec<wire::StepDone>,
    },
    /// One step has failed; they end in the order in which they were submitted.
    Failed {
        span: usize,
        failure: Failure,
    },
    Log {
        problem: bool,
        text: String,
    },
}

/// A whole route.
#[derive(Clone, Debug, PartialEq)]
pub struct Up {
    pub epoch: u64,
    /// As [`Config::spans`]: the nodes of each, which the engine sees as one stage.
    pub spans: Vec<Vec<SpanNode>>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct SpanNode {
    pub name: String,
    pub slice: LayerSlice,
    /// Names what the node remembers: the same number as before, the same pages and checkpoints.
    pub memory: u64,
}

/// Why no steps run.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{why}")]
pub struct Lost {
    pub why: Why,
    /// On the driver's clock.
    pub since: Duration,
}

#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum Why {
    #[error("route incomplete, missing {0}")]
    Missing(String),
    #[error("node {name}: {reason}")]
    Node { name: String, reason: String },
    #[error("{0}")]
    Restart(String),
}

/// Why one step gave nothing.
#[derive(Clone, Debug, PartialEq, Error)]
pub enum Failure {
    /// The route broke. What the nodes remember may lie between steps.
    #[error("{0}")]
    Lost(Lost),
    /// A node could not compute it.
    #[error("node {node}: {}", wire::describe(fault))]
    Fault { node: String, fault: Box<wire::Fault> },
}

struct Node {
    peer: String,
    /// Name and layers, for messages; the address before the node has said hello.
    name: String,
    boot: u64,
    slice: LayerSlice,
    listen: String,
    state: State,
    opened: Duration,
    heard: Duration,
    round_trip: Option<Duration>,
    stats: NodeStats,
}

#[derive(Clone, Copy, PartialEq)]
enum State {
    Greeting,
    Loading,
    Ready,
}

/// What a node has done in this connection.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct NodeStats {
    pub steps: u64,
    pub rows: u64,
    pub compute_us: u64,
    pub wait_us: u64,
    pub bytes_in: u64,
    pub bytes_out: u64,
}

/// A line of the status page.
#[derive(Clone, Debug, PartialEq)]
pub struct NodeStatus {
    pub name: String,
    pub peer: String,
    pub layers: String,
    pub state: &'static str,
    pub in_route: bool,
    pub silent_for: Duration,
    pub round_trip: Option<Duration>,
    pub stats: NodeStats,
}

enum Route {
    Down(Lost),
    /// Waits for every node to be idle.
    Forming {
        members: Vec<Vec<Link>>,
        memories: HashMap<Link, u64>,
    },
    Up {
        spans: Vec<SpanState>,
    },
}

struct SpanState {
    links: Vec<Link>,
    next_step: u64,
    under_way: VecDeque<UnderWay>,
    /// Taken from the engine, but not yet in the window.
    waiting: VecDeque<(wire::Step, Bytes)>,
    /// Slowest seen.
    time_per_row: Option<Duration>,
}

struct UnderWay {
    step: u64,
    rows: u32,
    started: Duration,
    deadline: Duration,
    /// What the nodes of the span have reported.
    reports: Vec<Option<wire::StepDone>>,
}

pub struct Coordinator {
    config: Config,
    nodes: BTreeMap<Link, Node>,
    route: Route,
    epoch: u64,
    beat: Option<Duration>,
    ticked: Duration,
    actions: Vec<Action>,
}

impl Coordinator {
    pub fn new(config: Config) -> Self {
        let lost = Lost { why: Why::Restart("the cluster starts".into()), since: Duration::ZERO };
        let mut new = Coordinator {
            config,
            nodes: BTreeMap::new(),
            route: Route::Down(lost),
            epoch: 0,
            beat: None,
            ticked: Duration::ZERO,
            actions: Vec::new(),
        };
        new.form();
        new
    }

    /// Takes one event; `now` never goes back. The returned actions are in order.
    pub fn handle(&mut self, now: Duration, event: Event) -> Vec<Action> {
        match event {
            Event::Opened { link, peer } => self.opened(now, link, peer),
            Event::Message { link, message } => self.message(now, link, message),
            Event::Closed { link, reason } => self.lose(now, link, &reason),
            Event::Submit { span, step, rows } => self.submit(now, span, step, rows),
            Event::Restart { epoch, reason } => {
                if epoch == self.epoch && matches!(self.route, Route::Up { .. }) {
                    self.down(Lost { why: Why::Restart(reason), since: now }, None);
                    self.form();
                }
            }
            Event::Tick => self.tick(now),
        }
        std::mem::take(&mut self.actions)
    }

    /// Why no steps run now; `None` while the route is whole.
    pub fn lost(&self) -> Option<Lost> {
        match &self.route {
            Route::Up { .. } => None,
            Route::Down(lost) => Some(lost.clone()),
            Route::Forming { .. } => {
                Some(Lost { why: Why::Restart("the route is being set up".into()), since: Duration::ZERO })
            }
        }
    }

    pub fn status(&self, now: Duration) -> Vec<NodeStatus> {
        self.nodes
            .iter()
            .map(|(link, n)| NodeStatus {
                name: n.name.clone(),
                peer: n.peer.clone(),
                layers: if n.state == State::Greeting { String::new() } else { n.slice.to_string() },
                state: match n.state {
                    State::Greeting => "greeting",
                    State::Loading => "loading",
                    State::Ready => "ready",
                },
                in_route: self.is_member(*link),
                silent_for: now.saturating_sub(n.heard),
                round_trip: n.round_trip,
                stats: n.stats,
            })
            .collect()
    }

    fn is_member(&self, link: Link) -> bool {
        match &self.route {
            Route::Down(_) => false,
            Route::Forming { members, .. } => members.iter().flatten().any(|&l| l == link),
            Route::Up { spans } => spans.iter().any(|s| s.links.contains(&link)),
        }
    }

    fn send(&mut self, link: Link, message: To) {
        self.actions.push(Action::Send { link, message });
    }

    fn log(&mut self, problem: bool, text: String) {
        self.actions.push(Action::Log { problem, text });
    }

    // ---- connections ------------------------------------------------------------------------------------------

    fn opened(&mut self, now: Duration, link: Link, peer: String) {
        if self.nodes.len() >= LINKS_MAX {
            self.log(true, format!("refused {peer}: {LINKS_MAX} nodes are connected"));
            self.goodbye(link, GoodbyeReason::Full, format!("{LINKS_MAX} nodes are connected"));
            return;
        }
        let node = Node {
            name: peer.clone(),
            peer,
            boot: 0,
            slice: LayerSlice { first: 0, end: 0, total: self.config.layers, head: false },
            listen: String::new(),
            state: State::Greeting,
            opened: now,
            heard: now,
            round_trip: None,
            stats: NodeStats::default(),
        };
        self.nodes.insert(link, node);
    }

    fn goodbye(&mut self, link: Link, reason: GoodbyeReason, details: String) {
        self.send(link, To::Goodbye(wire::Goodbye { reason: reason.into(), details }));
        self.actions.push(Action::Close { link });
    }

    /// Turns a peer away for good.
    fn refuse(&mut self, now: Duration, link: Link, reason: GoodbyeReason, details: String) {
        if let Some(node) = self.nodes.get(&link) {
            let text = format!("refused {}: {details}", node.name);
            self.log(true, text);
        }
        self.goodbye(link, reason, details.clone());
        self.drop_node(now, link, &details);
    }

    /// The connection is over, or counts as over.
    fn lose(&mut self, now: Duration, link: Link, reason: &str) {
        if let Some(node) = self.nodes.get(&link) {
            let text = format!("lost {}: {reason}", node.name);
            self.log(true, text);
            self.actions.push(Action::Close { link });
            self.drop_node(now, link, reason);
        }
    }

    fn drop_node(&mut self, now: Duration, link: Link, reason: &str) {
        let Some(node) = self.nodes.remove(&link) else { return };
        if self.is_member(link) {
            let why = Why::Node { name: node.name, reason: reason.into() };
            self.down(Lost { why, since: now }, None);
        }
        self.form();
    }

    fn message(&mut self, now: Duration, link: Link, message: From) {
        let Some(node) = self.nodes.get_mut(&link) else { return };
        node.heard = now;
        match (node.state, message) {
            (State::Greeting, From::Hello(hello)) => self.hello(now, link, hello),
            (State::Loading, From::Ready(_)) => {
                node.state = State::Ready;
                let text = format!("{} is ready", node.name);
                self.log(false, text);
                self.form();
            }
            (State::Loading | State::Ready, From::Heartbeat(beat)) => {
                if beat.echo_us > 0 {
                    node.round_trip = Some(now.saturating_sub(Duration::from_micros(beat.echo_us)));
                }
            }
            (State::Ready, From::RouteReady(ready)) => self.route_ready(link, ready),
            (State::Ready, From::Activations(piece)) => self.activations(now, link, piece),
            (State::Ready, From::StepDone(done)) => self.step_done(now, link, done),
            (State::Ready, From::StepFailed(failed)) => self.step_failed(now, link, failed),
            (_, From::Goodbye(goodbye)) => {
                let reason =
                    format!("{}: {}", wire::reason_text(goodbye.reason), wire::printable(&goodbye.details));
                self.lose(now, link, &reason);
            }
            _ => self.refuse(now, link, GoodbyeReason::Protocol, "a message out of turn".into()),
        }
    }

    fn hello(&mut self, now: Duration, link: Link, hello: wire::Hello) {
        let slice = match self.check(&hello) {
            Ok(slice) => slice,
            Err((reason, details)) => return self.refuse(now, link, reason, details),
        };
        let again = self.nodes.iter().find(|(l, n)| **l != link && n.boot == hello.boot && n.boot != 0);
        if let Some((&old, _)) = again {
            self.lose(now, old, "the same process has connected again");
        }
        let Some(node) = self.nodes.get_mut(&link) else { return };
        let name = wire::printable(&hello.name);
        node.name = format!("{name} (layers {slice}, {})", node.peer);
        node.boot = hello.boot;
        node.slice = slice;
        node.listen = reachable(&hello.listen, &node.peer);
        node.state = State::Loading;
        let text = format!("{} has joined: {}", node.name, wire::printable(&hello.device));
        self.log(false, text);
        self.send(link, To::Welcome(self.config.welcome.clone()));
    }

    fn check(&self, hello: &wire::Hello) -> Result<LayerSlice, (GoodbyeReason, String)> {
        if hello.protocol != PROTOCOL {
            let details = format!(
                "its protocol is version {} (program {}), this coordinator speaks {PROTOCOL}",
                hello.protocol,
                wire::printable(&hello.version)
            );
            return Err((GoodbyeReason::ProtocolVersion, details));
        }
        let total = self.config.layers;
        let layers = hello.layers.unwrap_or_default();
        let slice = LayerSlice {
            first: layers.first as usize,
            end: layers.end as usize,
            total: layers.total as usize,
            head: layers.head,
        };
        if slice.total != total {
            return Err((
                GoodbyeReason::Model,
                format!("its model has {} layers, this one has {total}", slice.total),
            ));
        }
        if slice.first >= slice.end || slice.end > total || (slice.head && slice.end != total) {
            return Err((GoodbyeReason::Layers, format!("layers {slice} of {total} are no slice")));
        }
        if hello.fingerprint != (self.config.fingerprint)(&slice)[..] {
            let details =
                format!("its layers {slice} differ from this model file (another model or quantisation)");
            return Err((GoodbyeReason::Model, details));
        }
        let context = self.config.welcome.limits.unwrap_or_default().context;
        if hello.context < context {
            let details = format!("its --ctx {} is less than the coordinator's {context}", hello.context);
            return Err((GoodbyeReason::Context, details));
        }
        let bits = self.config.welcome.activation_bits;
        if hello.activation_bits & bits == 0 {
            return Err((
                GoodbyeReason::ActivationBits,
                format!("it does not read activations of {bits} bits"),
            ));
        }
        Ok(slice)
    }

    // ---- the route --------------------------------------------------------------------------------------------

    /// Ends the epoch: every step under way fails, `fault`y ones by their own reason.
    fn down(&mut self, lost: Lost, fault: Option<(Link, wire::StepFailed)>) {
        let route = std::mem::replace(&mut self.route, Route::Down(lost.clone()));
        let Route::Up { spans } = route else { return };
        for (index, span) in spans.into_iter().enumerate() {
            for step in span.under_way {
                let failure = match &fault {
                    Some((link, f)) if span.links.contains(link) && f.step == step.step => Failure::Fault {
                        node: self.nodes.get(link).map_or_else(String::new, |n| n.name.clone()),
                        fault: Box::new(f.fault.clone().unwrap_or_default()),
                    },
                    _ => Failure::Lost(lost.clone()),
                };
                self.actions.push(Action::Failed { span: index, failure });
            }
            for _ in span.waiting {
                self.actions.push(Action::Failed { span: index, failure: Failure::Lost(lost.clone()) });
            }
        }
        self.actions.push(Action::RouteDown(lost));
    }

    /// Where no route stands, tries to set one up from who is ready.
    fn form(&mut self) {
        let Route::Down(lost) = &self.route else { return };
        let ready: Vec<(Link, LayerSlice)> =
            self.nodes.iter().filter(|(_, n)| n.state == State::Ready).map(|(l, n)| (*l, n.slice)).collect();
        let slices: Vec<LayerSlice> = ready.iter().map(|r| r.1).collect();
        let (mut members, mut missing) = (Vec::new(), Vec::new());
        for span in &self.config.spans {
            match route::assemble(&slices, span) {
                Ok(path) => members.push(path.iter().map(|&i| ready[i].0).collect::<Vec<Link>>()),
                Err(what) => missing.push(what),
            }
        }
        if missing.is_empty() {
            return self.announce(members);
        }
        // Who went, and why, says more than what is missing since.
        let why = Why::Missing(missing.join("; "));
        if why != lost.why && !matches!(lost.why, Why::Node { .. }) {
            self.log(false, why.to_string());
            let Route::Down(lost) = &mut self.route else { return };
            lost.why = why;
        }
    }

    /// Tells the nodes of a route their places, under a new epoch.
    fn announce(&mut self, members: Vec<Vec<Link>>) {
        self.epoch += 1;
        for span in &members {
            for (place, &link) in span.iter().enumerate() {
                let next = span.get(place + 1).and_then(|l| self.nodes.get(l));
                let route = wire::Route {
                    epoch: self.epoch,
                    place: place as u32,
                    places: span.len() as u32,
                    next: next.map_or(String::new(), |n| n.listen.clone()),
                };
                self.actions.push(Action::Send { link, message: To::Route(route) });
            }
        }
        self.route = Route::Forming { members, memories: HashMap::new() };
        self.complete();
    }

    fn route_ready(&mut self, link: Link, ready: wire::RouteReady) {
        if ready.epoch != self.epoch || !self.is_member(link) {
            return;
        }
        if let Route::Forming { memories, .. } = &mut self.route {
            memories.insert(link, ready.memory);
            self.complete();
        }
    }

    fn complete(&mut self) {
        let Route::Forming { members, memories } = &self.route else { return };
        if !members.iter().flatten().all(|l| memories.contains_key(l)) {
            return;
        }
        let describe = |link: &Link| {
            let (node, memory) = (self.nodes.get(link)?, *memories.get(link)?);
            Some(SpanNode { name: node.name.clone(), slice: node.slice, memory })
        };
        let spans: Vec<Vec<SpanNode>> =
            members.iter().map(|span| span.iter().filter_map(describe).collect()).collect();
        let states = members.iter().map(|links| SpanState {
            links: links.clone(),
            next_step: 1,
            under_way: VecDeque::new(),
            waiting: VecDeque::new(),
            time_per_row: None,
        });
        self.route = Route::Up { spans: states.collect() };
        let names: Vec<&str> = spans.iter().flatten().map(|n| n.name.as_str()).collect();
        self.log(false, format!("the route is whole: {}", names.join(" > ")));
        self.actions.push(Action::RouteUp(Up { epoch: self.epoch, spans }));
    }

    // ---- steps ------------------------------------------------------------------------------------------------

    fn submit(&mut self, now: Duration, index: usize, step: wire::Step, rows: Bytes) {
        let (lost, epoch) = (self.lost(), self.epoch);
        let span = match &mut self.route {
            Route::Up { spans } if step.epoch == epoch => spans.get_mut(index),
            _ => None,
        };
        let Some(span) = span.filter(|s| s.waiting.len() < WAITING_MAX) else {
            let why = Why::Restart("the route has changed since the step was made".into());
            let failure = Failure::Lost(lost.unwrap_or(Lost { why, since: now }));
            return self.actions.push(Action::Failed { span: index, failure });
        };
        span.waiting.push_back((step, rows));
        self.fill_window(now, index);
    }

    /// Sends waiting steps on their way, as many as the window takes.
    fn fill_window(&mut self, now: Duration, index: usize) {
        let window = self.config.welcome.steps_max as usize;
        loop {
            let Route::Up { spans } = &mut self.route else { return };
            let Some(span) = spans.get_mut(index).filter(|s| s.under_way.len() < window) else { return };
            let Some((step, rows)) = span.waiting.pop_front() else { return };
            self.send_step(now, index, step, rows);
        }
    }

    fn send_step(&mut self, now: Duration, index: usize, mut step: wire::Step, rows: Bytes) {
        let (timing, epoch) = (self.config.timing, self.epoch);
        let Route::Up { spans } = &mut self.route else { return };
        let Some(span) = spans.get_mut(index) else { return };
        step.number = span.next_step;
        span.next_step += 1;
        let count: u32 = step.segments.iter().map(|s| s.rows).sum();
        let ahead: u32 = span.under_way.iter().map(|s| s.rows).sum::<u32>() + count.max(1);
        let allowed = match span.time_per_row {
            Some(t) => (t * ahead * timing.step_factor).max(timing.step_min),
            None => timing.step_first,
        };
        span.under_way.push_back(UnderWay {
            step: step.number,
            rows: count.max(1),
            started: now,
            deadline: now + allowed,
            reports: vec![None; span.links.len()],
        });
        let links = span.links.clone();
        let (mut page_at, mut frontier_at) = (0, 0);
        for &link in &links {
            let Some(node) = self.nodes.get(&link) else { continue };
            let (page, frontier) = (self.config.sizes)(&node.slice);
            let part = part_of(&step, page_at..page_at + page, frontier_at..frontier_at + frontier);
            (page_at, frontier_at) = (page_at + page, frontier_at + frontier);
            self.actions.push(Action::Send { link, message: To::Step(part) });
        }
        if let Some(&first) = links.first() {
            for piece in pieces(epoch, step.number, count, rows) {
                self.actions.push(Action::Send { link: first, message: To::Activations(piece) });
            }
        }
    }

    fn activations(&mut self, now: Duration, link: Link, piece: wire::Activations) {
        if piece.epoch != self.epoch {
            return;
        }
        let row_bytes = Format::from_bits(self.config.welcome.activation_bits)
            .map_or(0, |f| f.row_bytes(self.config.welcome.width as usize));
        if piece.data.len() > PIECE_BYTES.max(row_bytes) {
            return self.refuse(
                now,
                link,
                GoodbyeReason::Protocol,
                "activations in too large a piece".into(),
            );
        }
        let Route::Up { spans } = &self.route else { return };
        let place = spans.iter().enumerate().find_map(|(i, s)| {
            s.links.iter().position(|&l| l == link).map(|p| (i, s.links.get(p + 1).copied()))
        });
        match place {
            Some((_, Some(next))) => self.send(next, To::Activations(piece)),
            Some((span, None)) => self.actions.push(Action::Rows { span, piece }),
            None => {}
        }
    }

    fn step_done(&mut self, now: Duration, link: Link, done: wire::StepDone) {
        if done.epoch != self.epoch {
            return;
        }
        if let (Some(node), Some(t)) = (self.nodes.get_mut(&link), &done.timing) {
            let add = |sum: &mut u64, value: u64| *sum = sum.saturating_add(value);
            add(&mut node.stats.steps, 1);
            add(&mut node.stats.rows, t.rows.into());
            add(&mut node.stats.compute_us, t.compute_us);
            add(&mut node.stats.wait_us, t.wait_us);
            add(&mut node.stats.bytes_in, t.bytes_in);
            add(&mut node.stats.bytes_out, t.bytes_out);
        }
        let Route::Up { spans } = &mut self.route else { return };
        let place = spans
            .iter_mut()
            .enumerate()
            .find_map(|(i, s)| s.links.iter().position(|&l| l == link).map(|place| (i, s, place)));
        let Some((index, span, place)) = place else { return };
        let number = done.step;
        // A node reports its steps in order, each once.
        let waiting = span.under_way.iter_mut().find(|s| s.reports[place].is_none());
        let Some(step) = waiting.filter(|s| s.step == number) else {
            return self.refuse(now, link, GoodbyeReason::Protocol, format!("step {number} is not its next"));
        };
        step.reports[place] = Some(done);
        while span.under_way.front().is_some_and(|s| s.reports.iter().all(Option::is_some)) {
            let Some(step) = span.under_way.pop_front() else { return };
            let per_row = now.saturating_sub(step.started) / step.rows;
            span.time_per_row = Some(span.time_per_row.map_or(per_row, |t| t.max(per_row)));
            let reports = step.reports.into_iter().flatten().collect();
            self.actions.push(Action::Done { span: index, reports });
        }
        self.fill_window(now, index);
    }

    fn step_failed(&mut self, now: Duration, link: Link, failed: wire::StepFailed) {
        if failed.epoch != self.epoch || !self.is_member(link) {
            return;
        }
        let Some(node) = self.nodes.get(&link) else { return };
        let reason = wire::describe(&failed.fault.clone().unwrap_or_default());
        let lost = Lost { why: Why::Node { name: node.name.clone(), reason }, since: now };
        self.log(true, format!("step {} failed: {lost}", failed.step));
        self.down(lost, Some((link, failed)));
        self.form();
    }

    // ---- time -------------------------------------------------------------------------------------------------

    fn tick(&mut self, now: Duration) {
        let timing = self.config.timing;
        let stood = stood_still(now, std::mem::replace(&mut self.ticked, now), &timing);
        self.nodes.values_mut().for_each(|n| n.heard = (n.heard + stood).min(now));
        let mut dead = Vec::new();
        for (&link, node) in &self.nodes {
            let silent = now.saturating_sub(node.heard);
            if node.state == State::Greeting && now.saturating_sub(node.opened) >= timing.hello {
                dead.push((link, format!("no hello within {:?}", timing.hello)));
            } else if node.state != State::Greeting && silent >= timing.silence_max() {
                dead.push((link, format!("no message for {:.1} s", silent.as_secs_f64())));
            }
        }
        if let Route::Up { spans } = &self.route {
            for span in spans {
                if let Some(step) = span.under_way.front().filter(|s| now >= s.deadline) {
                    let allowed = step.deadline.saturating_sub(step.started).as_secs_f64();
                    let late = step.reports.iter().position(Option::is_none).unwrap_or_default();
                    let culprit = span.links[late];
                    dead.push((
                        culprit,
                        format!("step {} of {} rows took more than {allowed:.1} s", step.step, step.rows),
                    ));
                }
            }
        }
        for (link, reason) in dead {
            self.lose(now, link, &reason);
        }
        if self.beat.is_none_or(|at| now >= at) {
            self.beat = Some(now + timing.heartbeat);
            let beat = wire::Heartbeat { sent_us: now.as_micros() as u64, echo_us: 0 };
            let greeted = self.nodes.iter().filter(|(_, n)| n.state != State::Greeting);
            for link in greeted.map(|(&l, _)| l).collect::<Vec<_>>() {
                self.send(link, To::Heartbeat(beat));
            }
        }
    }
}

/// The step as one node of a span gets it: written bytes are cut to its layers' part. Bytes that are too short give a
/// part that is, and the node refuses it by its length.
fn part_of(step: &wire::Step, page: Range<usize>, frontier: Range<usize>) -> wire::Step {
    let mut part = step.clone();
    for op in part.before.iter_mut().chain(&mut part.after) {
        let (data, range) = match &mut op.op {
            Some(Op::WritePage(w)) => (&mut w.data, &page),
            Some(Op::WriteCheckpoint(w)) => (&mut w.data, &frontier),
            _ => continue,
        };
        *data = data.slice(range.start.min(data.len())..range.end.min(data.len()));
    }
    part
}

/// Where other workers reach a node that listens at `listen`: the address by which it came, where it listens at all
/// of its own. Empty: nowhere.
fn reachable(listen: &str, peer: &str) -> String {
    let Ok(mut address) = listen.parse::<SocketAddr>() else { return String::new() };
    if let (true, Ok(peer)) = (address.ip().is_unspecified(), peer.parse::<SocketAddr>()) {
        address.set_ip(peer.ip());
    }
    address.to_string()
}
