//! The engine's thread: schedule, run, settle.

use std::collections::VecDeque;
use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use ds4_model::{KvLayout, MemoryPlan};
use ds4_text::Tokenizer;

use crate::constraint::{Drawn, Grammars};
use crate::handle::{Command, EngineHandle, Shared};
use crate::persist::{SnapshotConfig, Snapshots};
use crate::pipeline::Pipeline;
use crate::request::{EngineError, FinishReason};
use crate::sampler::{Chosen, RowResult, Sampler};
use crate::scheduler::{Plan, Scheduler, Work, WorkOutputs};
use crate::self_test::SelfTest;
use crate::sequence::Sequence;
use crate::stage::{StageError, StageFault, StageLimits, Step, StepId, StepOutput, Survived};
use crate::status::{Counters, Health, Status};

/// Times that failures elsewhere may make one request start over.
const REPLAYS_MAX: u32 = 8;
/// Pause where every reader is slow, or a stage is gone.
const PAUSE: Duration = Duration::from_millis(5);
/// Longest time between two looks at deadlines.
const IDLE: Duration = Duration::from_secs(1);
/// Time that one attempt to reach a lost stage gets.
const ATTEMPT: Duration = Duration::from_secs(2);

#[derive(Clone, Debug)]
pub struct EngineConfig {
    /// Requests that may wait for a session.
    pub queue_limit: usize,
    /// Prefill rows of one step while other sessions decode.
    pub prefill_quantum: usize,
    /// A step that has not ended by then never will.
    pub step_limit: Duration,
    /// Requests wait so long for a lost stage to come back.
    pub resume_wait: Duration,
    /// State that outlives the program; `None`: it does not.
    pub snapshots: Option<SnapshotConfig>,
    /// Run before anything is served; `None`: nothing is.
    pub self_test: Option<SelfTest>,
    /// What the stages were planned with; shown by [`Status::plan`].
    pub plan: Vec<MemoryPlan>,
}

impl Default for EngineConfig {
    fn default() -> Self {
        EngineConfig {
            queue_limit: 64,
            prefill_quantum: 128,
            step_limit: Duration::from_secs(120),
            resume_wait: Duration::from_secs(30),
            snapshots: None,
            self_test: None,
            plan: Vec::new(),
        }
    }
}

/// Stages have to be made ready before the next step.
struct Outage {
    since: Instant,
    /// What happened; `None` at the start.
    error: Option<StageError>,
}

pub struct Engine {
    config: EngineConfig,
    pipeline: Pipeline,
    scheduler: Scheduler,
    tokenizer: Arc<Tokenizer>,
    /// For constrained tokens.
    sampler: Sampler,
    commands: Receiver<Command>,
    shared: Arc<Shared>,
    in_flight: VecDeque<(StepId, Plan)>,
    snapshots: Option<Snapshots>,
    counters: Counters,
    health: Health,
    outage: Option<Outage>,
    draining: Option<Instant>,
    last_key: u64,
}

impl Engine {
    /// Starts the engine's thread, which first loads the stages. The handle answers at once: [`Health::Loading`].
    pub fn start(
        config: EngineConfig,
        tokenizer: Arc<Tokenizer>,
        load: impl FnOnce() -> Result<Pipeline, StageError> + Send + 'static,
    ) -> io::Result<EngineHandle> {
        let (sender, commands) = channel();
        let shared = Arc::new(Shared {
            status: Mutex::new(Status { plan: config.plan.clone(), ..Status::default() }),
            waiting: AtomicUsize::new(0),
            rejected: AtomicUsize::new(0),
            queue_limit: config.queue_limit,
            vocab: tokenizer.len(),
            grammars: Grammars::new(tokenizer.clone()),
        });
        let handle = EngineHandle { commands: sender, shared: shared.clone() };
        thread::Builder::new().name("engine".into()).spawn(move || {
            let loaded = load().and_then(|p| {
                let limits = check_limits(&p)?;
                let snapshots = open_snapshots(&config, &p)?;
                Ok((p, limits, snapshots))
            });
            match loaded {
                Ok((pipeline, limits, snapshots)) => {
                    Engine {
                        scheduler: Scheduler::new(
                            limits,
                            config.prefill_quantum.max(1),
                            pipeline.infos().len(),
                        ),
                        config,
                        pipeline,
                        sampler: Sampler::new(tokenizer.len()),
                        tokenizer,
                        commands,
                        shared: shared.clone(),
                        in_flight: VecDeque::new(),
                        snapshots,
                        counters: Counters::default(),
                        health: Health::Loading,
                        outage: Some(Outage { since: Instant::now(), error: None }),
                        draining: None,
                        last_key: 0,
                    }
                    .run();
                    shared.status().health = Health::Ended;
                }
                Err(e) => {
                    tracing::error!(error = %e, "the model cannot be loaded");
                    shared.status().health = Health::Faulted { reason: e.to_string() };
                }
            }
        })?;
        Ok(handle)
    }

    fn run(&mut self) {
        loop {
            self.publish();
            if !self.take_commands() {
                return;
            }
            self.drop_dead();
            if self.outage.is_some() && !self.revive() {
                continue;
            }
            self.submit();
            if self.pipeline.in_flight() > 0 {
                match self.pipeline.collect(self.config.step_limit) {
                    Ok(output) => self.settle(output),
                    Err((step, error)) => self.fail(step, error),
                }
            }
        }
    }

    /// Hands out steps until every stage is busy.
    fn submit(&mut self) {
        self.seek_snapshots();
        for (waited, reused) in self.scheduler.admit(&self.tokenizer) {
            self.shared.waiting.fetch_sub(1, Ordering::Relaxed);
            self.counters.queue_seconds += waited.as_secs_f64();
            self.counters.rows_reused += reused as u64;
        }
        while self.pipeline.in_flight() < self.pipeline.depth() {
            let Some((step, plan)) = self.next_step() else { return };
            let submitted = self.pipeline.submit(step);
            self.in_flight.push_back((*submitted.as_ref().unwrap_or(&0), plan));
            if let Err(error) = submitted {
                return self.fail(0, error);
            }
        }
    }

    fn next_step(&mut self) -> Option<(Step, Plan)> {
        let in_flight = self.pipeline.in_flight();
        let next = self.scheduler.schedule(in_flight);
        let Some(snapshots) = &mut self.snapshots else { return next };
        let s = &mut self.scheduler;
        if std::mem::take(&mut s.short_of_pages) {
            snapshots.let_go(&mut s.pages);
        }
        // Alone, read operations wait for an idle moment.
        if next.is_none() && in_flight > 0 {
            return None;
        }
        let idle = next.is_none();
        let (mut step, mut plan) = next.unwrap_or_default();
        plan.reads = snapshots.attach(&mut step, &s.tree, &mut s.pages);
        (!idle || !plan.reads.is_empty()).then_some((step, plan))
    }

    /// Looks for snapshots of waiting prompts, and takes those that have been loaded.
    fn seek_snapshots(&mut self) {
        let Some(snapshots) = &mut self.snapshots else { return };
        for snapshot in snapshots.poll() {
            self.scheduler.restore(snapshot);
        }
        let tree = &self.scheduler.tree;
        for s in &mut self.scheduler.waiting {
            if s.awaits.is_some_and(|mark| !snapshots.is_loading(mark)) {
                s.awaits = None;
            }
            if !s.sought && s.reads_cache() {
                s.sought = true;
                let limit = s.tokens.len() - 1;
                s.awaits = snapshots.seek(&s.tokens, limit, tree.reusable(&s.tokens, limit));
            }
        }
    }

    /// Takes a step's results to its sequences.
    fn settle(&mut self, output: StepOutput) {
        let Some((_, plan)) = self.in_flight.pop_front() else { return };
        self.counters.steps += 1;
        self.counters.step_seconds += output.timing.iter().map(|t| t.compute.as_secs_f64()).sum::<f64>();
        self.shared.status().last_step = output.timing;
        if let Some(snapshots) = &mut self.snapshots {
            let s = &mut self.scheduler;
            snapshots.take(plan.reads, output.reads, &mut s.pages);
            for save in plan.saves.into_iter().filter(|s| s.to_disk) {
                snapshots.want(save.tokens, &s.tree, &mut s.pages);
            }
        }
        let mut rows = output.rows.into_iter();
        for work in plan.work {
            let count = match work.outputs {
                WorkOutputs::None => 0,
                WorkOutputs::Next => 1,
                WorkOutputs::Prompt => work.to - work.from,
            };
            self.settle_work(&work, rows.by_ref().take(count).collect());
        }
    }

    fn settle_work(&mut self, work: &Work, rows: Vec<RowResult>) {
        match work.outputs {
            WorkOutputs::Next => self.counters.rows_decode += 1,
            _ => self.counters.rows_prefill += (work.to - work.from) as u64,
        }
        // It may have been cancelled meanwhile.
        let Some(index) = self.scheduler.running.iter().position(|s| s.key == work.key) else { return };
        let sequence = &mut self.scheduler.running[index];
        if let Some(place) = &mut sequence.place {
            place.settled = work.to;
        }
        match work.outputs {
            WorkOutputs::None => sequence.tell_prefill(work.to),
            WorkOutputs::Prompt => {
                let chosen = |r| match r {
                    RowResult::Token(chosen) => Some(chosen),
                    RowResult::Logits(_) => None,
                };
                sequence.tell_prefill(work.to);
                sequence.tell_prompt(work.from + 1, rows.into_iter().filter_map(chosen).collect());
            }
            WorkOutputs::Next => {
                let Some(row) = rows.into_iter().next() else { return };
                let (chosen, complete) = match row {
                    RowResult::Token(chosen) => (chosen, false),
                    RowResult::Logits(logits) => match draw(sequence, &logits, &mut self.sampler) {
                        Ok(drawn) => drawn,
                        Err(reason) => return self.fail_one(index, EngineError::Constraint { reason }),
                    },
                };
                let context = self.pipeline.infos()[0].limits.model.context;
                let ended = sequence.push(chosen, &self.tokenizer, context);
                if let Some(reason) = complete.then_some(FinishReason::Stop).or(ended) {
                    self.finish(index, reason);
                }
            }
        }
    }

    fn fail_one(&mut self, index: usize, error: EngineError) {
        self.counters.requests_failed += 1;
        self.scheduler.remove(index, true).fail(error);
    }

    fn finish(&mut self, index: usize, reason: FinishReason) {
        let sequence = self.scheduler.remove(index, true);
        self.counters.requests_finished += 1;
        if let Some(t) = sequence.time_to_first_token() {
            self.counters.first_token_seconds += t.as_secs_f64();
            self.counters.first_tokens += 1;
        }
        sequence.finish(reason);
    }

    /// `false`: the engine ends.
    fn take_commands(&mut self) -> bool {
        let reading = self.snapshots.as_ref().is_some_and(Snapshots::busy);
        let busy = self.pipeline.in_flight() > 0 || self.scheduler.has_work() || reading;
        let open = !self.scheduler.running.is_empty() || !self.scheduler.waiting.is_empty();
        let wait = match (busy, open) {
            (true, _) => Duration::ZERO,
            (false, true) => PAUSE,
            (false, false) => IDLE,
        };
        let mut next = match wait.is_zero() {
            true => self.commands.try_recv().map_err(|e| match e {
                std::sync::mpsc::TryRecvError::Empty => RecvTimeoutError::Timeout,
                std::sync::mpsc::TryRecvError::Disconnected => RecvTimeoutError::Disconnected,
            }),
            false => self.commands.recv_timeout(wait),
        };
        loop {
            match next {
                Ok(Command::Submit(submitted)) => {
                    self.last_key += 1;
                    self.scheduler.enqueue(Sequence::new(self.last_key, *submitted));
                }
                Ok(Command::Drain { deadline }) => self.draining = Some(deadline),
                Err(RecvTimeoutError::Timeout) => break,
                Err(RecvTimeoutError::Disconnected) => {
                    // No handle is left; answers under way may still be read.
                    if self.draining.is_none() {
                        self.draining = Some(Instant::now() + self.config.step_limit);
                    }
                    break;
                }
            }
            next = self.commands.try_recv().map_err(|_| RecvTimeoutError::Timeout);
        }
        !self.drained()
    }

    fn drained(&mut self) -> bool {
        let Some(deadline) = self.draining else { return false };
        self.health = Health::Draining;
        let overdue = deadline <= Instant::now();
        self.fail_all(&EngineError::ShuttingDown, |s| overdue || s.started.is_none());
        let reading = self.snapshots.as_ref().is_some_and(Snapshots::busy);
        let settled = self.pipeline.in_flight() == 0 && !self.scheduler.has_operations() && !reading;
        self.scheduler.running.is_empty() && self.scheduler.waiting.is_empty() && (settled || overdue)
    }

    /// Ends requests that nobody waits for, or that are too late.
    fn drop_dead(&mut self) {
        let now = Instant::now();
        let cancelled = self.take_out(|s| s.cancelled());
        self.counters.requests_cancelled += cancelled.len() as u64;
        self.fail_all(&EngineError::DeadlineExceeded, |s| s.overdue(now));
    }

    /// Takes out the sequences that `which` picks; the state of running ones is kept for later requests.
    fn take_out(&mut self, which: impl Fn(&Sequence) -> bool) -> Vec<Sequence> {
        let mut out = Vec::new();
        while let Some(i) = self.scheduler.running.iter().position(&which) {
            out.push(self.scheduler.remove(i, true));
        }
        while let Some(i) = self.scheduler.waiting.iter().position(&which) {
            let Some(sequence) = self.scheduler.waiting.remove(i) else { break };
            if sequence.started.is_none() {
                self.shared.waiting.fetch_sub(1, Ordering::Relaxed);
            }
            out.push(sequence);
        }
        out
    }

    fn fail_all(&mut self, error: &EngineError, which: impl Fn(&Sequence) -> bool) {
        for sequence in self.take_out(which) {
            self.counters.requests_failed += 1;
            sequence.fail(error.clone());
        }
    }

    /// A stage failed at `step`: its requests fail, unless waiting may help; all others start over from their last
    /// checkpoints.
    fn fail(&mut self, step: StepId, error: StageError) {
        tracing::error!(step, %error, "step failed");
        let struck: Vec<u64> = self
            .in_flight
            .iter()
            .filter(|(id, _)| *id == step && !error.fault.resumable())
            .flat_map(|(_, plan)| plan.work.iter().map(|w| w.key))
            .collect();
        self.scheduler.abandon(self.in_flight.drain(..).map(|(_, plan)| plan));
        if let Some(snapshots) = &mut self.snapshots {
            snapshots.lost();
        }
        self.fail_all(&error.clone().into(), |s| struck.contains(&s.key) || s.replays > REPLAYS_MAX);
        self.outage = Some(Outage { since: Instant::now(), error: Some(error) });
    }

    /// Makes the stages ready. `false`: not yet, or never again.
    fn revive(&mut self) -> bool {
        if matches!(self.health, Health::Faulted { .. }) {
            thread::sleep(PAUSE);
            return false;
        }
        let Some(outage) = &self.outage else { return true };
        let resumable = outage.error.as_ref().is_none_or(|e| e.fault.resumable());
        let limit = if resumable { ATTEMPT } else { self.config.step_limit };
        let since = outage.since;
        let fresh = outage.error.is_none();
        let restarted = self.pipeline.restart(Instant::now() + limit).and_then(|survived| {
            if let Some(test) =
                self.config.self_test.as_ref().filter(|_| fresh || survived == Survived::Nothing)
            {
                test.run(&mut self.pipeline, self.config.step_limit)?;
            }
            Ok(survived)
        });
        match restarted {
            Ok(survived) => {
                if survived == Survived::Nothing {
                    if let Some(snapshots) = &mut self.snapshots {
                        snapshots.forget(&mut self.scheduler.pages);
                    }
                    self.scheduler.forget();
                }
                self.counters.restarts += u64::from(!fresh);
                self.outage = None;
                self.health = Health::Ready;
                true
            }
            // A stage that is still in its last step gets as long as any step does.
            Err(error)
                if error.fault.resumable()
                    || (matches!(error.fault, StageFault::Deadline { .. })
                        && since.elapsed() < self.config.step_limit) =>
            {
                let reason = error.to_string();
                if since.elapsed() >= self.config.resume_wait {
                    self.fail_all(&error.into(), |_| true);
                }
                self.health = Health::Waiting { reason, since };
                thread::sleep(PAUSE);
                false
            }
            Err(error) => {
                tracing::error!(%error, "the stage cannot be used any more");
                self.health = Health::Faulted { reason: error.to_string() };
                self.fail_all(&error.into(), |_| true);
                false
            }
        }
    }

    fn publish(&self) {
        let s = &self.scheduler;
        let mut status = self.shared.status();
        if status.stages.is_empty() {
            status.stages = self.pipeline.infos().to_vec();
            status.context = self.pipeline.infos()[0].limits.model.context;
            status.pages_total = s.pages.total();
            status.checkpoints_total = self.pipeline.infos()[0].limits.checkpoints;
        }
        status.health = self.health.clone();
        status.sessions = s.running.iter().map(Sequence::status).collect();
        status.pages_used = s.pages.used();
        status.checkpoints_used = s.checkpoints_used();
        status.counters = self.counters.clone();
        if let Some(snapshots) = &self.snapshots {
            let (written, read) = snapshots.traffic();
            (status.counters.snapshot_bytes_written, status.counters.snapshot_bytes_read) = (written, read);
        }
    }
}

fn open_snapshots(config: &EngineConfig, pipeline: &Pipeline) -> Result<Option<Snapshots>, StageError> {
    let open = |c| {
        let opened = Snapshots::start(c, pipeline.page_bytes(), pipeline.frontier_bytes());
        opened.map_err(|e| StageError { stage: "snapshots".into(), fault: StageFault::Load(e.to_string()) })
    };
    config.snapshots.as_ref().map(open).transpose()
}

/// Draws a constrained token, and tells whether the constraint is complete with it.
fn draw(sequence: &mut Sequence, logits: &[f32], sampler: &mut Sampler) -> Result<(Chosen, bool), String> {
    let (sampling, top) = (sequence.sampling(), sequence.request.logprobs.unwrap_or(0));
    let Some(grammar) = &mut sequence.grammar else { return Err("logits that were not asked for".into()) };
    let (token, complete) = match grammar.draw(logits, &sampling, sampler)? {
        Drawn::Token(token) => (token, false),
        Drawn::Last(token) => (token, true),
    };
    Ok((sampler.describe(logits, token, top), complete))
}

/// What the engine relies on: every session can reach the context, whatever the others hold.
fn check_limits(pipeline: &Pipeline) -> Result<StageLimits, StageError> {
    let info = &pipeline.infos()[0];
    let limits = info.limits;
    let m = &limits.model;
    // One page more than the context's: a session starts by copying a page that others hold.
    let pages = m.slots * (KvLayout::pages_for(m.context) + 1);
    let rule = |ok: bool, reason: String| match ok {
        true => Ok(()),
        false => Err(StageError::new(info, StageFault::Load(reason))),
    };
    rule(m.slots > 0 && m.context > 1, format!("{} sessions of {} positions", m.slots, m.context))?;
    rule(m.rows > 0 && m.outputs > 0, format!("{} rows, {} outputs a step", m.rows, m.outputs))?;
    let sessions = m.slots;
    rule(
        m.pages >= pages,
        format!("{} pages; {sessions} sessions of {} positions need {pages}", m.pages, m.context),
    )?;
    Ok(limits)
}
