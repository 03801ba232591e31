//! A stage on this machine: a model slice on its own thread.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

use ds4_model::plan::StageBuffers;
use ds4_model::{Backend, BackendError, Model, ModelError};

use crate::sampler::{RowResult, Sampler};
use crate::stage::{
    CheckpointId, Hidden, Mark, Reports, Stage, StageError, StageFault, StageInfo, StageLimits, StageTiming,
    StateOp, Step, StepOutput, Survived,
};

/// Steps that may wait for the thread: more than any pipeline has in flight.
const JOBS_MAX: usize = 64;

enum Job {
    Start(Reports),
    Step { step: Arc<Step>, hidden: Option<Hidden>, arrived: Instant },
    Restart { epoch: u64, answer: SyncSender<Result<Survived, StageError>> },
}

/// Runs a [`Model`] slice on its own thread. Dropping it ends the thread after the step it is in.
pub struct LocalStage {
    info: StageInfo,
    jobs: SyncSender<Job>,
}

impl LocalStage {
    /// Loads the slice on the stage's thread and returns when it is ready. `load` is called again where the device
    /// was lost and has to be set up anew.
    pub fn start<B: Backend + 'static>(
        name: &str,
        checkpoints: usize,
        load: impl FnMut() -> Result<Model<B>, ModelError> + Send + 'static,
    ) -> Result<Self, StageError> {
        let (jobs, inbox) = sync_channel(JOBS_MAX);
        let (ready, loaded) = sync_channel(1);
        let name = name.to_string();
        let failed = |stage: &str, reason: String| StageError {
            stage: stage.to_string(),
            fault: StageFault::Load(reason),
        };
        let thread_name = name.clone();
        thread::Builder::new()
            .name(format!("stage {name}"))
            .spawn(move || match Machine::load(&thread_name, checkpoints, load) {
                Ok(mut machine) => {
                    let _ = ready.send(Ok(machine.info.clone()));
                    machine.serve(&inbox);
                }
                Err(e) => {
                    let _ = ready.send(Err(e));
                }
            })
            .map_err(|e| failed(&name, format!("no thread: {e}")))?;
        let info = loaded.recv().map_err(|_| failed(&name, "its thread ended while loading".into()))??;
        Ok(LocalStage { info, jobs })
    }

    fn queue(&self, job: Job) -> Result<(), StageError> {
        self.jobs.try_send(job).map_err(|e| {
            let reason = match e {
                TrySendError::Full(_) => format!("{JOBS_MAX} steps wait already"),
                TrySendError::Disconnected(_) => "its thread has ended".to_string(),
            };
            StageError::new(&self.info, StageFault::Step(reason))
        })
    }
}

impl Stage for LocalStage {
    fn info(&self) -> &StageInfo {
        &self.info
    }

    fn start(&mut self, reports: Reports) -> Result<(), StageError> {
        self.queue(Job::Start(reports))
    }

    fn submit(&mut self, step: Arc<Step>, hidden: Option<Hidden>) -> Result<(), StageError> {
        self.queue(Job::Step { step, hidden, arrived: Instant::now() })
    }

    fn restart(&mut self, epoch: u64, deadline: Instant) -> Result<Survived, StageError> {
        let (answer, answered) = sync_channel(1);
        let from = Instant::now();
        self.queue(Job::Restart { epoch, answer })?;
        answered
            .recv_timeout(deadline.saturating_duration_since(from))
            .map_err(|_| StageError::new(&self.info, StageFault::Deadline { waited: from.elapsed() }))?
    }
}

/// The stage's state, on its thread. Also what a worker of a cluster runs.
pub struct Machine<B: Backend> {
    info: StageInfo,
    model: Model<B>,
    load: Box<dyn FnMut() -> Result<Model<B>, ModelError> + Send>,
    /// What each slot has seen; `None`: unknown, since a step failed half way.
    slots: Vec<Option<Mark>>,
    /// Frontiers kept aside, one behind the other.
    store: Vec<u8>,
    stored: Vec<Option<Mark>>,
    sampler: Sampler,
    /// One row of logits.
    logits: Vec<f32>,
    /// Streams of the step's rows.
    hidden: Vec<f32>,
}

impl<B: Backend> Machine<B> {
    /// Loads the slice with `load`, which is kept to set the device up again after it was lost.
    pub fn load(
        name: &str,
        checkpoints: usize,
        mut load: impl FnMut() -> Result<Model<B>, ModelError> + Send + 'static,
    ) -> Result<Self, StageError> {
        let model = load().map_err(|e| StageError { stage: name.to_string(), fault: load_fault(e) })?;
        let setup = model.setup();
        let limits = StageLimits { model: setup.limits, checkpoints };
        let info = StageInfo::new(name, model.backend.device(), &setup.layout, limits);
        let buffers = StageBuffers::new(setup, checkpoints);
        Ok(Machine {
            slots: vec![Some(Mark::default()); limits.model.slots],
            // Not zeros: those the system would hand out only when they are written to.
            store: vec![1; buffers.checkpoints],
            stored: vec![None; checkpoints],
            sampler: Sampler::new(buffers.logits),
            logits: vec![0.0; buffers.logits],
            hidden: vec![0.0; buffers.hidden],
            info,
            model,
            load: Box::new(load),
        })
    }

    pub fn info(&self) -> &StageInfo {
        &self.info
    }

    fn serve(&mut self, inbox: &Receiver<Job>) {
        let mut reports = None;
        // Steps of any other epoch are not run: none before the first restart, none after a failure.
        let mut epoch = None;
        for job in inbox {
            match job {
                Job::Start(r) => reports = Some(r),
                Job::Restart { epoch: new, answer } => {
                    let survived = self.restart();
                    epoch = survived.is_ok().then_some(new);
                    // The asker may have given up; then it asks again.
                    let _ = answer.send(survived);
                }
                Job::Step { step, hidden, arrived } if Some(step.epoch) == epoch => {
                    let wait = arrived.elapsed();
                    let report = self.run(&step, hidden.as_deref()).map(|mut output| {
                        output.timing.iter_mut().for_each(|t| t.wait = wait);
                        output
                    });
                    if report.is_err() {
                        epoch = None;
                    }
                    if !reports.as_ref().is_some_and(|r| r.send(report)) {
                        return;
                    }
                }
                Job::Step { .. } => {}
            }
        }
    }

    /// Makes the machine usable after an error. Slots must be reset or loaded afterwards.
    pub fn restart(&mut self) -> Result<Survived, StageError> {
        let alive = self.model.backend.reset(0);
        self.slots.fill(None);
        match alive {
            Ok(()) => Ok(Survived::State),
            Err(lost) => {
                tracing::warn!(stage = %self.info, error = %lost, "device lost, loading again");
                self.stored.fill(None);
                self.model = (self.load)().map_err(|e| StageError::new(&self.info, load_fault(e)))?;
                Ok(Survived::Nothing)
            }
        }
    }

    /// Runs one step. `hidden` as in [`Stage::submit`].
    pub fn run(&mut self, step: &Step, hidden: Option<&[f32]>) -> Result<StepOutput, StageError> {
        let from = Instant::now();
        match self.work(step, hidden) {
            Ok(mut output) => {
                output.timing = vec![StageTiming {
                    stage: self.info.name.clone(),
                    rows: step.batch.len(),
                    compute: from.elapsed(),
                    wait: Duration::ZERO,
                    send: Duration::ZERO,
                    bytes_in: hidden.map_or(0, |h| h.len() as u64 * 4),
                    bytes_out: output.hidden.len() as u64 * 4,
                }];
                Ok(output)
            }
            Err(fault) => {
                self.spoil(step);
                Err(StageError::new(&self.info, fault))
            }
        }
    }

    /// What the step touches is unknown: it failed half way.
    fn spoil(&mut self, step: &Step) {
        let mut unknown = |slot: u32| {
            if let Some(s) = self.slots.get_mut(slot as usize) {
                *s = None;
            }
        };
        step.batch.segments().iter().for_each(|s| unknown(s.slot));
        for op in step.ops() {
            match *op {
                StateOp::Reset { slot }
                | StateOp::SetPages { slot, .. }
                | StateOp::LoadCheckpoint { slot, .. } => unknown(slot),
                StateOp::SaveCheckpoint { id, .. } | StateOp::WriteCheckpoint { id, .. } => {
                    if let Some(s) = self.stored.get_mut(id as usize) {
                        *s = None;
                    }
                }
                _ => {}
            }
        }
    }

    fn work(&mut self, step: &Step, hidden: Option<&[f32]>) -> Result<StepOutput, StageFault> {
        let mut output = StepOutput { id: step.id, epoch: step.epoch, ..StepOutput::default() };
        for op in &step.before {
            self.apply(op, &mut output.reads)?;
        }
        if !step.batch.is_empty() {
            self.rows(step, hidden, &mut output)?;
        }
        for op in &step.after {
            self.apply(op, &mut output.reads)?;
        }
        Ok(output)
    }

    fn rows(
        &mut self,
        step: &Step,
        hidden: Option<&[f32]>,
        output: &mut StepOutput,
    ) -> Result<(), StageFault> {
        let batch = &step.batch;
        let segments = batch.segments();
        if step.marks.len() != segments.len() || step.wants.len() != batch.outputs().len() {
            return Err(StageFault::Step(format!(
                "{} marks for {} segments, {} wants for {} output rows",
                step.marks.len(),
                segments.len(),
                step.wants.len(),
                batch.outputs().len()
            )));
        }
        for (s, &expected) in segments.iter().zip(&step.marks) {
            let slot = self.slot(s.slot)?;
            if *slot != expected || expected.pos != s.pos {
                return Err(StageFault::OutOfStep { slot: s.slot, found: *slot, expected });
            }
            *slot = slot.extend(&batch.tokens()[s.row..s.row + s.len]);
        }
        self.model.forward(batch, hidden)?;
        let slice = self.info.slice;
        // A row without logits shows a bad number only in its streams.
        if !slice.head || batch.outputs().len() < batch.len() {
            let width = self.hidden.len() / self.info.limits.model.rows;
            let streams = &mut self.hidden[..batch.len() * width];
            self.model.hidden(0, streams)?;
            let finite = all_finite(streams);
            self.check_finite(finite, "hidden rows")?;
        }
        if !slice.head {
            let width = self.hidden.len() / self.info.limits.model.rows;
            output.hidden = self.hidden[..batch.len() * width].to_vec();
            return Ok(());
        }
        for (i, want) in step.wants.iter().enumerate() {
            self.model.logits(i, &mut self.logits)?;
            self.check_finite(all_finite(&self.logits), "logits")?;
            let row: RowResult = self.sampler.answer(&self.logits, want);
            output.rows.push(row);
        }
        Ok(())
    }

    fn check_finite(&self, finite: bool, what: &str) -> Result<(), StageFault> {
        if finite {
            return Ok(());
        }
        let what = format!("{what} of layers {}", self.info.slice);
        Err(BackendError::NotFinite { device: self.info.device.clone(), what }.into())
    }

    fn slot(&mut self, slot: u32) -> Result<&mut Mark, StageFault> {
        match self.slots.get_mut(slot as usize) {
            Some(Some(mark)) => Ok(mark),
            Some(None) => Err(StageFault::Step(format!("slot {slot} was neither reset nor loaded"))),
            None => Err(StageFault::Step(format!("slot {slot} is outside the stage's limits"))),
        }
    }

    /// Range of a checkpoint in the store.
    fn place(&self, id: CheckpointId) -> Result<std::ops::Range<usize>, StageFault> {
        if id as usize >= self.stored.len() {
            let found = self.stored.len();
            return Err(StageFault::Step(format!("checkpoint {id}: this stage keeps {found}")));
        }
        let at = id as usize * self.info.frontier_bytes;
        Ok(at..at + self.info.frontier_bytes)
    }

    fn apply(&mut self, op: &StateOp, reads: &mut Vec<Vec<u8>>) -> Result<(), StageFault> {
        let sized = |bytes: &[u8], want: usize| match bytes.len() == want {
            true => Ok(()),
            false => Err(StageFault::Step(format!("{} bytes to write, expected {want}", bytes.len()))),
        };
        let pages = self.info.limits.model.pages;
        let in_pool = |page: u32| match (page as usize) < pages {
            true => Ok(page),
            false => Err(StageFault::Step(format!("page {page}: the pool has {pages}"))),
        };
        match op {
            StateOp::Reset { slot } => {
                match self.slots.get_mut(*slot as usize) {
                    Some(s) => *s = Some(Mark::default()),
                    None => {
                        return Err(StageFault::Step(format!("slot {slot} is outside the stage's limits")));
                    }
                }
                self.model.backend.reset(*slot)?;
            }
            StateOp::SetPages { slot, first, pages } => {
                self.slot(*slot)?;
                self.model.backend.set_pages(*slot, *first, pages)?;
            }
            StateOp::CopyPage { from, to } => {
                self.model.backend.copy_page(in_pool(*from)?, in_pool(*to)?)?;
            }
            StateOp::SaveCheckpoint { slot, id } => {
                let (mark, place) = (*self.slot(*slot)?, self.place(*id)?);
                self.model.backend.save_frontier(*slot, &mut self.store[place])?;
                self.stored[*id as usize] = Some(mark);
            }
            StateOp::LoadCheckpoint { slot, id } => {
                let place = self.place(*id)?;
                let Some(mark) = self.stored[*id as usize] else {
                    return Err(StageFault::Step(format!("checkpoint {id}: nothing is kept there")));
                };
                match self.slots.get_mut(*slot as usize) {
                    Some(s) => *s = Some(mark),
                    None => {
                        return Err(StageFault::Step(format!("slot {slot} is outside the stage's limits")));
                    }
                }
                self.model.backend.reset(*slot)?;
                self.model.backend.load_frontier(*slot, &self.store[place])?;
            }
            StateOp::ReadPage { page } => {
                let mut bytes = vec![0; self.info.page_bytes];
                self.model.backend.read_page(in_pool(*page)?, &mut bytes)?;
                reads.push(bytes);
            }
            StateOp::WritePage { page, bytes } => {
                sized(bytes, self.info.page_bytes)?;
                self.model.backend.write_page(in_pool(*page)?, bytes)?;
            }
            StateOp::ReadCheckpoint { id } => {
                let place = self.place(*id)?;
                reads.push(self.store[place].to_vec());
            }
            StateOp::WriteCheckpoint { id, mark, bytes } => {
                sized(bytes, self.info.frontier_bytes)?;
                let place = self.place(*id)?;
                self.store[place].copy_from_slice(bytes);
                self.stored[*id as usize] = Some(*mark);
            }
        }
        Ok(())
    }
}

fn all_finite(values: &[f32]) -> bool {
    values.iter().all(|v| v.is_finite())
}

fn load_fault(e: ModelError) -> StageFault {
    StageFault::Load(e.to_string())
}
