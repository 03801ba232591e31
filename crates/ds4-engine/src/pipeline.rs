//! The whole model as stages in order. One machine is a pipeline of one.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::time::{Duration, Instant};

use crate::stage::{
    Hidden, Reports, Stage, StageError, StageFault, StageInfo, StateOp, Step, StepId, StepOutput, Survived,
};

struct InFlight {
    step: Arc<Step>,
    submitted: Instant,
    /// What the stages so far have answered.
    output: StepOutput,
}

pub struct Pipeline {
    stages: Vec<Box<dyn Stage>>,
    infos: Vec<StageInfo>,
    reports: Receiver<(usize, Result<StepOutput, StageError>)>,
    epoch: u64,
    last_id: StepId,
    in_flight: VecDeque<InFlight>,
}

impl Pipeline {
    /// Puts the stages behind one another. They must cover the model without gap or overlap, under equal limits.
    pub fn new(mut stages: Vec<Box<dyn Stage>>) -> Result<Self, StageError> {
        let infos: Vec<StageInfo> = stages.iter().map(|s| s.info().clone()).collect();
        check_route(&infos)?;
        // Per stage: one report for each step in flight, and one failure on its own account.
        let (sender, reports) = sync_channel(stages.len() * (depth(stages.len()) + 1));
        for (stage, s) in stages.iter_mut().enumerate() {
            s.start(Reports::new(stage, sender.clone()))?;
        }
        Ok(Pipeline { stages, infos, reports, epoch: 0, last_id: 0, in_flight: VecDeque::new() })
    }

    pub fn infos(&self) -> &[StageInfo] {
        &self.infos
    }

    /// Steps that keep every stage busy.
    pub fn depth(&self) -> usize {
        depth(self.stages.len())
    }

    pub fn in_flight(&self) -> usize {
        self.in_flight.len()
    }

    /// Bytes of the whole model's page.
    pub fn page_bytes(&self) -> usize {
        self.infos.iter().map(|i| i.page_bytes).sum()
    }

    /// Bytes of the whole model's frontier.
    pub fn frontier_bytes(&self) -> usize {
        self.infos.iter().map(|i| i.frontier_bytes).sum()
    }

    /// Starts a step; its number and epoch are set here. Bytes of write operations are the whole model's.
    pub fn submit(&mut self, mut step: Step) -> Result<StepId, StageError> {
        self.last_id += 1;
        (step.id, step.epoch) = (self.last_id, self.epoch);
        let step = Arc::new(step);
        let output = StepOutput { id: step.id, epoch: step.epoch, ..StepOutput::default() };
        self.in_flight.push_back(InFlight { step: step.clone(), submitted: Instant::now(), output });
        self.hand_to(0, &step, None)?;
        Ok(self.last_id)
    }

    fn hand_to(&mut self, stage: usize, step: &Arc<Step>, hidden: Option<Hidden>) -> Result<(), StageError> {
        let step = part_for(step, &self.infos, stage)?;
        self.stages[stage].submit(step, hidden)
    }

    /// Waits for the oldest step to end, until it has run for `limit`; meanwhile passes rows from stage to stage. An
    /// error comes with the step that it struck.
    pub fn collect(&mut self, limit: Duration) -> Result<StepOutput, (StepId, StageError)> {
        self.pump(limit).map_err(|(stage, error)| (self.step_in(stage), error))
    }

    /// The oldest step that `stage` has not finished.
    fn step_in(&self, stage: usize) -> StepId {
        let mut waiting = self.in_flight.iter().filter(|f| f.output.timing.len() <= stage);
        waiting.next().map_or(self.last_id, |f| f.step.id)
    }

    fn pump(&mut self, limit: Duration) -> Result<StepOutput, (usize, StageError)> {
        loop {
            let broken = |reason: &str| StageError {
                stage: "pipeline".into(),
                fault: StageFault::Step(reason.to_string()),
            };
            let Some(oldest) = self.in_flight.front() else {
                return Err((0, broken("no step is under way")));
            };
            let left = limit.saturating_sub(oldest.submitted.elapsed());
            let (stage, report) = match self.reports.recv_timeout(left) {
                Ok(r) => r,
                Err(RecvTimeoutError::Timeout) => {
                    // The stage that the oldest step waits for.
                    let at = oldest.output.timing.len();
                    return Err((
                        at,
                        StageError::new(&self.infos[at], StageFault::Deadline { waited: limit }),
                    ));
                }
                Err(RecvTimeoutError::Disconnected) => return Err((0, broken("every stage has ended"))),
            };
            let report = report.map_err(|e| (stage, e))?;
            if let Some(done) = self.take(stage, report).map_err(|e| (stage, e))? {
                return Ok(done);
            }
        }
    }

    /// Takes one stage's report. `Some`: the step has passed the last stage.
    fn take(&mut self, stage: usize, report: StepOutput) -> Result<Option<StepOutput>, StageError> {
        if report.epoch != self.epoch {
            return Ok(None);
        }
        let last = stage + 1 == self.stages.len();
        let Some(at) = self.in_flight.iter().position(|f| f.step.id == report.id) else {
            return Err(self.contract(stage, format!("reported step {}, which is not under way", report.id)));
        };
        let flight = &mut self.in_flight[at];
        let step = flight.step.clone();
        if flight.output.timing.len() != stage || report.timing.len() != 1 || (last && at != 0) {
            return Err(self.contract(stage, format!("reported step {} out of order", report.id)));
        }
        if last && report.rows.len() != step.wants.len() {
            let (found, want) = (report.rows.len(), step.wants.len());
            return Err(self.contract(stage, format!("answered {found} rows, {want} were wanted")));
        }
        let output = &mut flight.output;
        output.timing.extend(report.timing);
        output.rows = report.rows;
        match output.reads.is_empty() {
            true => output.reads = report.reads,
            false => output.reads.iter_mut().zip(report.reads).for_each(|(whole, part)| whole.extend(part)),
        }
        if last {
            return Ok(self.in_flight.pop_front().map(|f| f.output));
        }
        let hidden = (!step.batch.is_empty()).then_some(report.hidden);
        self.hand_to(stage + 1, &step, hidden)?;
        Ok(None)
    }

    fn contract(&self, stage: usize, reason: String) -> StageError {
        StageError::new(&self.infos[stage], StageFault::Step(reason))
    }

    /// Forgets every step under way and makes all stages ready for new ones, by `deadline`.
    pub fn restart(&mut self, deadline: Instant) -> Result<Survived, StageError> {
        self.epoch += 1;
        self.in_flight.clear();
        let mut survived = Survived::State;
        for stage in &mut self.stages {
            // A stage that waits to report would not hear of the restart.
            while self.reports.try_recv().is_ok() {}
            if stage.restart(self.epoch, deadline)? == Survived::Nothing {
                survived = Survived::Nothing;
            }
        }
        while self.reports.try_recv().is_ok() {}
        Ok(survived)
    }
}

fn depth(stages: usize) -> usize {
    stages + 1
}

fn check_route(infos: &[StageInfo]) -> Result<(), StageError> {
    let fail = |fault| Err(StageError { stage: "pipeline".into(), fault });
    let missing = |missing: String| fail(StageFault::Incomplete { missing });
    let mut next = 0;
    for (i, info) in infos.iter().enumerate() {
        let slice = &info.slice;
        if slice.first > next {
            return missing(format!("layers {next} to {}", slice.first - 1));
        }
        if slice.first < next || (slice.head && i + 1 < infos.len()) || slice.total != infos[0].slice.total {
            return fail(StageFault::Load(format!("{info} does not follow {next} layers")));
        }
        if info.limits != infos[0].limits {
            return fail(StageFault::Load(format!("{info} has other limits than {}", infos[0])));
        }
        next = slice.end;
    }
    match infos.last() {
        None => missing("all layers".into()),
        Some(last) if next < last.slice.total => {
            missing(format!("layers {next} to {} and the output head", last.slice.total - 1))
        }
        Some(last) if !last.slice.head => missing("the output head".into()),
        Some(_) => Ok(()),
    }
}

/// The step as `stage` gets it: written bytes are cut to its part.
fn part_for(step: &Arc<Step>, infos: &[StageInfo], stage: usize) -> Result<Arc<Step>, StageError> {
    let writes = |op: &StateOp| matches!(op, StateOp::WritePage { .. } | StateOp::WriteCheckpoint { .. });
    if infos.len() == 1 || !step.ops().any(writes) {
        return Ok(step.clone());
    }
    let mut part = Step::clone(step);
    for op in part.before.iter_mut().chain(&mut part.after) {
        let (bytes, size): (_, fn(&StageInfo) -> usize) = match op {
            StateOp::WritePage { bytes, .. } => (bytes, |i| i.page_bytes),
            StateOp::WriteCheckpoint { bytes, .. } => (bytes, |i| i.frontier_bytes),
            _ => continue,
        };
        let from: usize = infos[..stage].iter().map(size).sum();
        let cut = bytes.get(from..from + size(&infos[stage])).ok_or_else(|| {
            let reason = format!("{} bytes to write are not the whole model's", bytes.len());
            StageError::new(&infos[stage], StageFault::Step(reason))
        })?;
        *bytes = Arc::from(cut);
    }
    Ok(Arc::new(part))
}
