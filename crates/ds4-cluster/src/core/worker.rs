//! The worker's half of the protocol: greet, load, take steps in order, report, reconnect.

use std::collections::VecDeque;
use std::time::Duration;

use bytes::Bytes;

use super::{PIECE_BYTES, PROTOCOL, Timing, stood_still};
use crate::activation::Format;
use crate::wire::{self, FromWorkerMessage as From, GoodbyeReason, ToWorkerMessage as To};

const RECONNECT_MIN: Duration = Duration::from_millis(250);
const RECONNECT_MAX: Duration = Duration::from_secs(5);

#[derive(Debug)]
pub enum Event {
    Connected,
    /// The connection is over or could not be made.
    Closed {
        reason: String,
    },
    Message(To),
    /// Activations from the node before, not by way of the coordinator.
    Fed(wire::Activations),
    Loaded(Result<(), Box<wire::Fault>>),
    /// The stage has forgotten the steps of earlier epochs. `Ok(false)`: its memory is gone, too.
    Restarted {
        epoch: u64,
        result: Result<bool, Box<wire::Fault>>,
    },
    Ran {
        epoch: u64,
        step: u64,
        result: Result<Output, Box<wire::Fault>>,
        compute: Duration,
    },
    /// Activations could not be handed to the next node.
    FeedLost {
        reason: String,
    },
    Exit {
        reason: String,
    },
    Tick,
}

/// What a step gave.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Output {
    /// Activations for the next node.
    pub hidden: Bytes,
    /// From the node with the output head: one per want.
    pub rows: Vec<wire::RowResult>,
    /// One per read operation.
    pub reads: Vec<Bytes>,
}

#[derive(Debug, PartialEq)]
pub enum Action {
    /// Answered by [`Event::Connected`] or [`Event::Closed`].
    Connect,
    Send(From),
    Close,
    /// Size the stage for this. Answered by [`Event::Loaded`].
    Load(wire::Welcome),
    /// Make ready for steps of this epoch. Answered by [`Event::Restarted`].
    Restart {
        epoch: u64,
    },
    /// Answered by [`Event::Ran`]. `rows` are whole, in pieces; empty where the slice embeds.
    Run {
        step: wire::Step,
        rows: Vec<Bytes>,
    },
    /// Where [`Action::Feed`] goes from now on.
    Next {
        address: String,
    },
    Feed(wire::Activations),
    /// The process has nothing left to do: why.
    Stop {
        refused: bool,
        reason: String,
    },
    Log {
        problem: bool,
        text: String,
    },
}

pub struct Worker {
    timing: Timing,
    hello: wire::Hello,
    link: LinkState,
    heard: Duration,
    beat: Duration,
    ticked: Duration,
    retry: Duration,
    /// What the coordinator asked for last, what the stage is being sized for, and what it is sized for.
    wanted: Option<wire::Welcome>,
    loading: Option<wire::Welcome>,
    loaded: Option<wire::Welcome>,
    /// Names what the stage remembers.
    memory: u64,
    loads: u64,
    /// 0: none, until the coordinator sets a route.
    epoch: u64,
    next: Option<String>,
    /// A route was set; the stage restarts as soon as it is idle, then RouteReady goes out.
    announce: bool,
    restarting: bool,
    running: Option<Running>,
    queue: VecDeque<Pending>,
    next_step: u64,
    actions: Vec<Action>,
}

#[derive(Clone, Copy, PartialEq)]
enum LinkState {
    Down {
        until: Duration,
    },
    Connecting,
    /// Hello is out, the answer is not in.
    Greeting,
    Welcomed,
    Stopped,
}

struct Running {
    epoch: u64,
    step: wire::Step,
    waited: Duration,
    bytes_in: u64,
}

/// A step that is not complete: its head, its activations, or both are still to come.
struct Pending {
    number: u64,
    head: Option<wire::Step>,
    rows: u32,
    pieces: Vec<Bytes>,
    since: Duration,
}

impl Worker {
    pub fn new(timing: Timing, hello: wire::Hello) -> Self {
        Worker {
            timing,
            hello,
            link: LinkState::Down { until: Duration::ZERO },
            heard: Duration::ZERO,
            beat: Duration::ZERO,
            ticked: Duration::ZERO,
            retry: RECONNECT_MIN,
            wanted: None,
            loading: None,
            loaded: None,
            memory: 0,
            loads: 0,
            epoch: 0,
            next: None,
            announce: false,
            restarting: false,
            running: None,
            queue: VecDeque::new(),
            next_step: 1,
            actions: Vec::new(),
        }
    }

    pub fn handle(&mut self, now: Duration, event: Event) -> Vec<Action> {
        match event {
            Event::Connected => self.connected(now),
            Event::Closed { reason } => self.closed(now, &reason),
            Event::Message(message) => {
                self.heard = now;
                self.message(now, message);
            }
            Event::Fed(piece) => self.activations(now, piece),
            Event::Loaded(result) => self.load_ended(result),
            Event::Restarted { epoch, result } => self.restarted(now, epoch, result),
            Event::Ran { epoch, step, result, compute } => self.ran(epoch, step, result, compute),
            Event::FeedLost { reason } => self.feed_lost(reason),
            Event::Exit { reason } => {
                self.say_goodbye(GoodbyeReason::Exit, reason.clone());
                self.stop(false, reason);
            }
            Event::Tick => self.tick(now),
        }
        self.run_next(now);
        std::mem::take(&mut self.actions)
    }

    fn send(&mut self, message: From) {
        self.actions.push(Action::Send(message));
    }

    fn log(&mut self, problem: bool, text: String) {
        self.actions.push(Action::Log { problem, text });
    }

    // ---- the connection ---------------------------------------------------------------------------------------

    fn connected(&mut self, now: Duration) {
        if self.link != LinkState::Connecting {
            return;
        }
        self.link = LinkState::Greeting;
        self.heard = now;
        self.beat = now;
        self.send(From::Hello(self.hello.clone()));
    }

    fn closed(&mut self, now: Duration, reason: &str) {
        if matches!(self.link, LinkState::Down { .. } | LinkState::Stopped) {
            return;
        }
        self.log(true, format!("no coordinator: {reason}; next try in {:.1} s", self.retry.as_secs_f64()));
        self.link = LinkState::Down { until: now + self.retry };
        self.retry = (self.retry * 2).min(RECONNECT_MAX);
        self.end_epoch();
        self.epoch = 0;
        self.announce = false;
    }

    fn end_epoch(&mut self) {
        self.queue.clear();
        self.next_step = 1;
    }

    fn say_goodbye(&mut self, reason: GoodbyeReason, details: String) {
        if matches!(self.link, LinkState::Greeting | LinkState::Welcomed) {
            self.send(From::Goodbye(wire::Goodbye { reason: reason.into(), details }));
            self.actions.push(Action::Close);
        }
    }

    fn stop(&mut self, refused: bool, reason: String) {
        self.link = LinkState::Stopped;
        self.end_epoch();
        self.actions.push(Action::Stop { refused, reason });
    }

    /// The coordinator does what the protocol does not allow.
    fn broken(&mut self, now: Duration, details: String) {
        self.say_goodbye(GoodbyeReason::Protocol, details.clone());
        self.closed(now, &details);
    }

    fn tick(&mut self, now: Duration) {
        let stood = stood_still(now, std::mem::replace(&mut self.ticked, now), &self.timing);
        self.heard = (self.heard + stood).min(now);
        match self.link {
            LinkState::Down { until } if now >= until => {
                self.link = LinkState::Connecting;
                self.actions.push(Action::Connect);
            }
            LinkState::Greeting | LinkState::Welcomed => {
                let silent = now.saturating_sub(self.heard);
                if silent >= self.timing.silence_max().max(self.timing.heartbeat) {
                    self.actions.push(Action::Close);
                    self.closed(now, &format!("no message for {:.1} s", silent.as_secs_f64()));
                } else if self.link == LinkState::Welcomed && now >= self.beat {
                    self.beat = now + self.timing.heartbeat;
                    self.send(From::Heartbeat(wire::Heartbeat {
                        sent_us: now.as_micros() as u64,
                        echo_us: 0,
                    }));
                }
            }
            _ => {}
        }
    }

    // ---- messages ---------------------------------------------------------------------------------------------

    fn message(&mut self, now: Duration, message: To) {
        match (self.link, message) {
            (LinkState::Greeting, To::Welcome(welcome)) => self.welcome(now, welcome),
            (LinkState::Greeting | LinkState::Welcomed, To::Goodbye(goodbye)) => self.dismissed(now, goodbye),
            (LinkState::Welcomed, To::Heartbeat(beat)) => {
                let echo = wire::Heartbeat { sent_us: now.as_micros() as u64, echo_us: beat.sent_us };
                self.send(From::Heartbeat(echo));
            }
            (LinkState::Welcomed, To::Route(route)) if self.loaded.is_some() => self.route(route),
            (LinkState::Welcomed, To::Step(step)) if self.loaded.is_some() => self.step(now, step),
            (LinkState::Welcomed, To::Activations(piece)) if self.loaded.is_some() => {
                self.activations(now, piece)
            }
            (LinkState::Greeting | LinkState::Welcomed, _) => {
                self.broken(now, "a message out of turn".into())
            }
            // The connection is over on this side; what was on its way does not count.
            _ => {}
        }
    }

    fn welcome(&mut self, now: Duration, welcome: wire::Welcome) {
        if welcome.protocol != PROTOCOL {
            let reason = format!(
                "the coordinator's protocol is version {} (program {}), this worker speaks {PROTOCOL}",
                welcome.protocol, welcome.version
            );
            self.say_goodbye(GoodbyeReason::ProtocolVersion, reason.clone());
            return self.stop(true, reason);
        }
        let format = Format::from_bits(welcome.activation_bits);
        if format.is_none() || welcome.limits.is_none() || welcome.heartbeat_ms == 0 || welcome.steps_max == 0
        {
            return self.broken(now, "a welcome that asks for nothing this version knows".into());
        }
        self.link = LinkState::Welcomed;
        self.retry = RECONNECT_MIN;
        self.timing.heartbeat = Duration::from_millis(welcome.heartbeat_ms.into());
        self.timing.heartbeats_missed_max = welcome.heartbeats_missed_max.max(1);
        self.wanted = Some(welcome);
        self.load();
    }

    /// Brings the stage to what the coordinator wants, one load at a time.
    fn load(&mut self) {
        let Some(wanted) = self.wanted.as_ref().filter(|_| self.loading.is_none()) else { return };
        if self.loaded.as_ref().is_some_and(|l| same_stage(l, wanted)) {
            self.loaded = Some(wanted.clone());
            self.send(From::Ready(wire::Ready {}));
        } else {
            self.loaded = None;
            self.loading = Some(wanted.clone());
            self.actions.push(Action::Load(wanted.clone()));
        }
    }

    fn load_ended(&mut self, result: Result<(), Box<wire::Fault>>) {
        let Some(welcome) = self.loading.take() else { return };
        match result {
            Ok(()) => {
                self.loaded = Some(welcome);
                self.forget();
                if self.link == LinkState::Welcomed {
                    self.load();
                }
            }
            Err(fault) => {
                let reason = wire::describe(&fault);
                self.say_goodbye(GoodbyeReason::Memory, reason.clone());
                self.stop(true, reason);
            }
        }
    }

    /// The stage remembers nothing of before.
    fn forget(&mut self) {
        self.loads += 1;
        self.memory = self.hello.boot.wrapping_add(self.loads.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    }

    fn restarted(&mut self, now: Duration, epoch: u64, result: Result<bool, Box<wire::Fault>>) {
        self.restarting = false;
        match result {
            Ok(kept) => {
                if !kept {
                    self.forget();
                }
                if epoch == self.epoch && self.link == LinkState::Welcomed {
                    self.send(From::RouteReady(wire::RouteReady { epoch, memory: self.memory }));
                }
            }
            Err(fault) => {
                // A stage that cannot be made ready again is loaded anew, by the next welcome.
                self.loaded = None;
                let details = wire::describe(&fault);
                self.say_goodbye(GoodbyeReason::Memory, details.clone());
                self.closed(now, &details);
            }
        }
    }

    fn dismissed(&mut self, now: Duration, goodbye: wire::Goodbye) {
        let reason = format!("{}: {}", wire::reason_text(goodbye.reason), wire::printable(&goodbye.details));
        self.actions.push(Action::Close);
        let final_word = matches!(
            goodbye.reason(),
            GoodbyeReason::ProtocolVersion
                | GoodbyeReason::Model
                | GoodbyeReason::Layers
                | GoodbyeReason::Context
                | GoodbyeReason::ActivationBits
                | GoodbyeReason::Memory
        );
        if final_word {
            self.stop(true, format!("the coordinator refused this worker: {reason}"));
        } else {
            self.closed(now, &reason);
        }
    }

    fn route(&mut self, route: wire::Route) {
        self.end_epoch();
        self.epoch = route.epoch;
        self.next = Some(route.next.clone()).filter(|n| !n.is_empty());
        if self.next.is_some() {
            self.actions.push(Action::Next { address: route.next });
        }
        self.announce = true;
    }

    fn step(&mut self, now: Duration, step: wire::Step) {
        if step.epoch != self.epoch {
            return;
        }
        if step.number < self.next_step
            || self.queue.iter().any(|p| p.number == step.number && p.head.is_some())
        {
            return self.broken(now, format!("step {} came twice", step.number));
        }
        let rows: u64 = step.segments.iter().map(|s| u64::from(s.rows)).sum();
        let limit = self.loaded.as_ref().and_then(|l| l.limits).map_or(0, |l| l.rows);
        if rows > u64::from(limit) || step.tokens.len() as u64 != rows * 4 {
            return self.broken(
                now,
                format!(
                    "a step of {rows} rows and {} bytes of tokens; {limit} rows were agreed",
                    step.tokens.len()
                ),
            );
        }
        let number = step.number;
        match self.pending(now, number) {
            Some(pending) => pending.head = Some(step),
            None => self.broken(now, format!("step {number}: more steps than were agreed")),
        }
    }

    /// The entry of step `number`, new where there is none; `None` where the window does not hold it.
    fn pending(&mut self, now: Duration, number: u64) -> Option<&mut Pending> {
        let window = u64::from(self.loaded.as_ref()?.steps_max);
        if number < self.next_step || number >= self.next_step + window {
            return None;
        }
        let at = match self.queue.binary_search_by_key(&number, |p| p.number) {
            Ok(at) => at,
            Err(at) => {
                let new = Pending { number, head: None, rows: 0, pieces: Vec::new(), since: now };
                self.queue.insert(at, new);
                at
            }
        };
        self.queue.get_mut(at)
    }

    fn activations(&mut self, now: Duration, piece: wire::Activations) {
        if piece.epoch != self.epoch || self.link != LinkState::Welcomed {
            return;
        }
        let Some(loaded) = &self.loaded else { return };
        let row_bytes =
            Format::from_bits(loaded.activation_bits).map_or(0, |f| f.row_bytes(loaded.width as usize));
        let rows_max = loaded.limits.map_or(0, |l| l.rows);
        let fits = piece.data.len() == piece.rows as usize * row_bytes
            && piece.data.len() <= PIECE_BYTES.max(row_bytes);
        let Some(pending) = self.pending(now, piece.step).filter(|p| {
            fits && piece.first_row == p.rows
                && u64::from(p.rows) + u64::from(piece.rows) <= u64::from(rows_max)
        }) else {
            return self.broken(now, format!("activations of step {} that were not agreed", piece.step));
        };
        pending.rows += piece.rows;
        pending.pieces.push(piece.data);
    }

    // ---- the stage --------------------------------------------------------------------------------------------

    fn embeds(&self) -> bool {
        self.hello.layers.is_none_or(|l| l.first == 0)
    }

    fn run_next(&mut self, now: Duration) {
        if self.running.is_some() || self.loading.is_some() || self.restarting {
            return;
        }
        if self.announce && self.link == LinkState::Welcomed {
            self.announce = false;
            self.restarting = true;
            self.actions.push(Action::Restart { epoch: self.epoch });
            return;
        }
        let embeds = self.embeds();
        let complete = self.queue.front().is_some_and(|p| {
            let rows = p.head.as_ref().map(|h| h.segments.iter().map(|s| s.rows).sum::<u32>());
            p.number == self.next_step && rows.is_some_and(|n| embeds || p.rows == n)
        });
        if !complete {
            return;
        }
        let Some(Pending { head: Some(step), pieces, since, .. }) = self.queue.pop_front() else { return };
        self.next_step += 1;
        let bytes_in = pieces.iter().map(|p| p.len() as u64).sum();
        let running =
            Running { epoch: self.epoch, step: step.clone(), waited: now.saturating_sub(since), bytes_in };
        self.running = Some(running);
        self.actions.push(Action::Run { step, rows: pieces });
    }

    fn fail(&mut self, step: u64, fault: wire::Fault) {
        self.log(true, format!("step {step} failed: {}", wire::describe(&fault)));
        let failed = wire::StepFailed { epoch: self.epoch, step, fault: Some(fault) };
        self.send(From::StepFailed(failed));
        // What follows was made in the belief that this step worked.
        self.end_epoch();
        self.epoch = 0;
    }

    fn ran(&mut self, epoch: u64, step: u64, result: Result<Output, Box<wire::Fault>>, compute: Duration) {
        let Some(running) = self.running.take().filter(|r| r.epoch == epoch && r.step.number == step) else {
            return;
        };
        if epoch != self.epoch || self.link != LinkState::Welcomed {
            return;
        }
        let output = match result {
            Ok(output) => output,
            Err(fault) => return self.fail(step, *fault),
        };
        let rows: u32 = running.step.segments.iter().map(|s| s.rows).sum();
        let timing = wire::StepTiming {
            rows,
            compute_us: compute.as_micros() as u64,
            wait_us: running.waited.as_micros() as u64,
            bytes_in: running.bytes_in,
            bytes_out: output.hidden.len() as u64,
        };
        for piece in pieces(epoch, step, rows, output.hidden) {
            match self.next {
                Some(_) => self.actions.push(Action::Feed(piece)),
                None => self.send(From::Activations(piece)),
            }
        }
        let done =
            wire::StepDone { epoch, step, timing: Some(timing), rows: output.rows, reads: output.reads };
        self.send(From::StepDone(done));
    }

    fn feed_lost(&mut self, reason: String) {
        if self.next.is_some() && self.link == LinkState::Welcomed {
            let details =
                format!("cannot reach the next node at {}: {reason}", self.next.as_deref().unwrap_or(""));
            let kind = wire::FaultKind::NextLost.into();
            let fault = wire::Fault { kind, details, ..Default::default() };
            self.fail(self.next_step.saturating_sub(1), fault);
        }
    }
}

/// Whether a stage loaded for `a` serves `b` without loading again.
fn same_stage(a: &wire::Welcome, b: &wire::Welcome) -> bool {
    a.limits == b.limits && (a.qat, a.exact, a.rows_f32, a.width) == (b.qat, b.exact, b.rows_f32, b.width)
}

/// Cuts `rows` rows in `data` into messages. The pieces share its memory.
pub fn pieces(epoch: u64, step: u64, rows: u32, data: Bytes) -> Vec<wire::Activations> {
    if data.is_empty() || rows == 0 {
        return Vec::new();
    }
    let row_bytes = data.len() / rows as usize;
    let per_piece = (PIECE_BYTES / row_bytes.max(1)).max(1) as u32;
    (0..rows)
        .step_by(per_piece as usize)
        .map(|first_row| {
            let count = per_piece.min(rows - first_row);
            let (from, to) = (first_row as usize * row_bytes, (first_row + count) as usize * row_bytes);
            wire::Activations { epoch, step, first_row, rows: count, data: data.slice(from..to) }
        })
        .collect()
}
