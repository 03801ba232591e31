//! A run of layers on other machines, as the engine sees it: one more [`Stage`].

use std::collections::{HashMap, VecDeque};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use bytes::Bytes;
use ds4_engine::{
    Hidden, Reports, Stage, StageError, StageFault, StageInfo, StageTiming, Step, StepOutput, Survived,
};
use ds4_model::{HyperParams, KvLayout, LayerSlice};

use crate::activation::Format;
use crate::convert;
use crate::coordinator::{Cluster, Finished};
use crate::core::coordinator::{Failure, Lost, Why};
use crate::error::ClusterError;
use crate::setup::{Serve, spans};

/// How often an idle stage looks whether its nodes are still there.
const LOOK: Duration = Duration::from_millis(100);
/// The core ends every step sooner; this bounds a single wait.
const WAIT: Duration = Duration::from_secs(60);

/// The engine's epoch and the cluster's that serves it: one pair for all spans of a coordinator.
#[derive(Clone, Copy, Debug, Default)]
struct Epochs {
    engine: u64,
    route: u64,
}

/// One span of the route.
pub struct RemoteStage {
    info: StageInfo,
    cluster: Cluster,
    span: usize,
    format: Format,
    width: usize,
    epochs: Arc<Mutex<Epochs>>,
    memories: Vec<u64>,
    replay_check: bool,
    jobs: Option<Sender<Job>>,
}

enum Job {
    Epoch(Epochs),
    Step { step: Arc<Step>, sent: Instant, bytes: u64 },
}

impl RemoteStage {
    /// One stage per span that workers cover, in order.
    pub fn all(
        cluster: &Cluster,
        hyper: &HyperParams,
        serve: &Serve,
    ) -> Result<Vec<RemoteStage>, ClusterError> {
        let epochs = Arc::new(Mutex::new(Epochs::default()));
        let stage = |(span, slice): (usize, LayerSlice)| {
            let layout = KvLayout::new(hyper, slice, serve.rows);
            RemoteStage {
                info: StageInfo::new("cluster", "other machines".into(), &layout, serve.limits),
                cluster: cluster.clone(),
                span,
                format: serve.activation,
                width: hyper.streams * hyper.hidden,
                epochs: epochs.clone(),
                memories: Vec::new(),
                replay_check: serve.replay_check,
                jobs: None,
            }
        };
        Ok(spans(hyper.layers.len(), serve.local)?.into_iter().enumerate().map(stage).collect())
    }

    /// A coordinator's whole pipeline: `local` is its own slice's stage, the workers' spans lie around it.
    pub fn pipeline(
        cluster: &Cluster,
        hyper: &HyperParams,
        serve: &Serve,
        local: Option<Box<dyn Stage>>,
    ) -> Result<Vec<Box<dyn Stage>>, ClusterError> {
        let mut stages: Vec<Box<dyn Stage>> = Vec::new();
        for stage in Self::all(cluster, hyper, serve)? {
            stages.push(Box::new(stage));
        }
        if let Some(local) = local {
            let place = usize::from(local.info().slice.first > 0);
            stages.insert(place.min(stages.len()), local);
        }
        Ok(stages)
    }

    fn fail<T>(&self, lost: &Lost) -> Result<T, StageError> {
        Err(StageError::new(&self.info, fault(&self.cluster, lost)))
    }

    fn job(&self, job: Job) -> Result<(), StageError> {
        let sent = self.jobs.as_ref().is_some_and(|jobs| jobs.send(job).is_ok());
        if sent {
            Ok(())
        } else {
            Err(StageError::new(&self.info, StageFault::Load("it was not started".into())))
        }
    }
}

fn fault(cluster: &Cluster, lost: &Lost) -> StageFault {
    match &lost.why {
        Why::Missing(missing) => StageFault::Incomplete { missing: missing.clone() },
        why => StageFault::Unreachable { silent: cluster.age(lost), reason: why.to_string() },
    }
}

impl Stage for RemoteStage {
    fn info(&self) -> &StageInfo {
        &self.info
    }

    fn start(&mut self, reports: Reports) -> Result<(), StageError> {
        // Bounded by the steps that the engine keeps in flight.
        let (jobs, queue) = channel();
        self.jobs = Some(jobs);
        let collector = Collector {
            info: self.info.clone(),
            cluster: self.cluster.clone(),
            span: self.span,
            format: self.format,
            width: self.width,
            reports,
            epochs: Epochs::default(),
            failed: true,
            replay: self.replay_check.then(ReplayCheck::default),
        };
        let no_thread =
            |e: std::io::Error| StageError::new(&self.info, StageFault::Load(format!("no thread: {e}")));
        thread::Builder::new()
            .name(format!("span {}", self.info.slice))
            .spawn(move || collector.run(&queue))
            .map(drop)
            .map_err(no_thread)
    }

    fn submit(&mut self, step: Arc<Step>, hidden: Option<Hidden>) -> Result<(), StageError> {
        let epochs = *self.epochs.lock().unwrap_or_else(PoisonError::into_inner);
        if step.epoch != epochs.engine {
            return Ok(());
        }
        let rows = hidden.map_or_else(Bytes::new, |h| self.format.encode(h, self.width));
        let bytes = rows.len() as u64;
        self.job(Job::Step { step: step.clone(), sent: Instant::now(), bytes })?;
        self.cluster.submit(self.span, convert::step_to_wire(&step, epochs.route), rows);
        Ok(())
    }

    fn restart(&mut self, epoch: u64, deadline: Instant) -> Result<Survived, StageError> {
        let mut epochs = self.epochs.lock().unwrap_or_else(PoisonError::into_inner);
        // Another span of this coordinator may have begun the epoch already.
        if epochs.engine != epoch {
            let old = epochs.route;
            self.cluster.restart(old, "the engine restarts its stages");
            match self.cluster.wait(old, deadline) {
                Ok(up) => *epochs = Epochs { engine: epoch, route: up.epoch },
                Err(lost) => {
                    drop(epochs);
                    return self.fail(&lost);
                }
            }
        }
        let now = *epochs;
        drop(epochs);
        // Not waited for: an epoch that is over already shows at the first step.
        let up = match self.cluster.wait(now.route.saturating_sub(1), deadline) {
            Ok(up) => up,
            Err(lost) => return self.fail(&lost),
        };
        let nodes = up.spans.get(self.span).map(Vec::as_slice).unwrap_or_default();
        let memories: Vec<u64> = nodes.iter().map(|n| n.memory).collect();
        let survived = if memories == self.memories { Survived::State } else { Survived::Nothing };
        self.memories = memories;
        self.job(Job::Epoch(now))?;
        Ok(survived)
    }
}

/// Waits for what the span gives, and reports it.
struct Collector {
    info: StageInfo,
    cluster: Cluster,
    span: usize,
    format: Format,
    width: usize,
    reports: Reports,
    epochs: Epochs,
    /// The failure of this epoch is told; nothing more is, until the next.
    failed: bool,
    replay: Option<ReplayCheck>,
}

/// What recent positions gave, by the tokens up to them and by what was asked. A replay must give the same.
#[derive(Default)]
struct ReplayCheck {
    seen: HashMap<u64, u64>,
    order: VecDeque<u64>,
}

impl ReplayCheck {
    const KEPT_MAX: usize = 8192;

    fn compare(&mut self, step: &Step, output: &StepOutput, width: usize) -> Result<(), String> {
        let hash = |text: &[u8]| {
            let [a, b, c, d, e, f, g, h, ..] = *blake3::hash(text).as_bytes();
            u64::from_le_bytes([a, b, c, d, e, f, g, h])
        };
        for (segment, mark) in step.batch.segments().iter().zip(&step.marks) {
            let tokens = &step.batch.tokens()[segment.row..segment.row + segment.len];
            let (last, end) = (segment.row + segment.len - 1, mark.extend(tokens));
            let answer = step.batch.outputs().iter().position(|&row| row as usize == last);
            let (asked, found) = match answer.and_then(|i| Some((step.wants.get(i)?, output.rows.get(i)?))) {
                Some((want, row)) => (format!("{want:?}"), hash(format!("{row:?}").as_bytes())),
                None => match output.hidden.get(last * width..(last + 1) * width) {
                    Some(row) => (String::new(), hash(bytemuck::cast_slice(row))),
                    None => continue,
                },
            };
            let key = hash(format!("{end:?} {asked}").as_bytes());
            match self.seen.insert(key, found) {
                Some(before) if before != found => {
                    return Err(format!(
                        "replay check: position {} gives another result than before",
                        end.pos - 1
                    ));
                }
                Some(_) => {}
                None => self.order.push_back(key),
            }
            if self.order.len() > Self::KEPT_MAX {
                self.order.pop_front().map(|old| self.seen.remove(&old));
            }
        }
        Ok(())
    }
}

impl Collector {
    fn run(mut self, queue: &Receiver<Job>) {
        loop {
            let report = match queue.recv_timeout(LOOK) {
                Ok(Job::Epoch(epochs)) => {
                    self.epochs = epochs;
                    self.failed = false;
                    continue;
                }
                Ok(Job::Step { step, sent, bytes }) => {
                    if self.failed || step.epoch != self.epochs.engine {
                        continue;
                    }
                    self.collect().and_then(|done| self.output(&step, sent, bytes, done))
                }
                Err(RecvTimeoutError::Timeout) => match self.cluster.lost() {
                    Some(lost) if !self.failed => Err(fault(&self.cluster, &lost)),
                    _ => continue,
                },
                Err(RecvTimeoutError::Disconnected) => return,
            };
            self.failed = report.is_err();
            if !self.reports.send(report.map_err(|fault| StageError::new(&self.info, fault))) {
                return;
            }
        }
    }

    fn collect(&self) -> Result<Finished, StageFault> {
        loop {
            match self.cluster.next(self.span, self.epochs.route, Instant::now() + WAIT) {
                None => {}
                Some(Ok(done)) => return Ok(done),
                Some(Err(Failure::Lost(lost))) => return Err(fault(&self.cluster, &lost)),
                Some(Err(Failure::Fault { node, fault })) => {
                    tracing::warn!(%node, "a step failed");
                    return Err(convert::fault_from_wire(&fault));
                }
            }
        }
    }

    fn output(
        &mut self,
        step: &Step,
        sent: Instant,
        bytes_in: u64,
        done: Finished,
    ) -> Result<StepOutput, StageFault> {
        let (id, epoch, rows) = (step.id, step.epoch, step.batch.len());
        let took = sent.elapsed();
        let unclear = |e: ClusterError| StageFault::Step(e.to_string());
        let last = done.reports.last().ok_or_else(|| StageFault::Step("no node has reported".into()))?;
        let answers =
            last.rows.iter().map(convert::row_from_wire).collect::<Result<_, _>>().map_err(unclear)?;
        let hidden = match self.info.slice.head || rows == 0 {
            true => Vec::new(),
            false => {
                convert::hidden_from_wire(&done.hidden, self.format, rows, self.width).map_err(unclear)?
            }
        };
        let mut reads: Vec<Vec<u8>> = vec![Vec::new(); last.reads.len()];
        for report in &done.reports {
            if report.reads.len() != reads.len() {
                return Err(StageFault::Step("its nodes answered different numbers of reads".into()));
            }
            reads.iter_mut().zip(&report.reads).for_each(|(whole, part)| whole.extend_from_slice(part));
        }
        let sum = |f: fn(&crate::wire::StepTiming) -> u64| {
            let all = done.reports.iter().filter_map(|r| r.timing.as_ref()).map(f);
            Duration::from_micros(all.fold(0, u64::saturating_add))
        };
        let (compute, wait) = (sum(|t| t.compute_us), sum(|t| t.wait_us));
        let timing = StageTiming {
            stage: self.info.name.clone(),
            rows,
            compute,
            wait,
            send: took.saturating_sub(compute + wait),
            bytes_in,
            bytes_out: done.hidden.iter().map(|b| b.len() as u64).sum(),
        };
        for (node, report) in done.reports.iter().enumerate() {
            let Some(t) = &report.timing else { continue };
            tracing::debug!(
                step = id,
                node,
                rows,
                compute_us = t.compute_us,
                wait_us = t.wait_us,
                bytes_in = t.bytes_in,
                bytes_out = t.bytes_out,
                all_us = took.as_micros() as u64,
                "hop"
            );
        }
        let output = StepOutput { id, epoch, hidden, rows: answers, reads, timing: vec![timing] };
        if let Some(check) = &mut self.replay {
            check.compare(step, &output, self.width).map_err(StageFault::Step)?;
        }
        Ok(output)
    }
}

#[cfg(test)]
mod tests {
    use ds4_engine::{Choose, Chosen, Mark, RowResult, Want};
    use ds4_model::{Batch, Outputs};

    use super::*;

    #[test]
    fn a_replay_must_give_what_was_given_before() {
        let mut batch = Batch::new();
        batch.push(0, 3, &[7, 8], Outputs::Last);
        let mut step = Step {
            batch,
            marks: vec![Mark::default().extend(&[4, 5, 6])],
            wants: vec![Want { choose: Choose::Given(1), top: 0 }],
            ..Step::default()
        };
        let answer = |token| StepOutput {
            rows: vec![RowResult::Token(Chosen { token, logprob: 0.0, top: Vec::new() })],
            ..StepOutput::default()
        };
        let mut check = ReplayCheck::default();
        assert_eq!(check.compare(&step, &answer(1), 2), Ok(()));
        assert_eq!(check.compare(&step, &answer(1), 2), Ok(()));
        let e = check.compare(&step, &answer(2), 2).expect_err("another token");
        assert!(e.contains("position 4"), "{e}");
        // Other tokens before it, or another question: nothing to compare with.
        step.wants[0].choose = Choose::Given(2);
        assert_eq!(check.compare(&step, &answer(3), 2), Ok(()));
        step.marks[0] = Mark::default().extend(&[4, 5, 9]);
        assert_eq!(check.compare(&step, &answer(4), 2), Ok(()));
        // Without an answer the streams count.
        step.wants.clear();
        step.batch = Batch::new();
        step.batch.push(0, 3, &[7, 8], Outputs::None);
        let streams = |last| StepOutput { hidden: vec![0.0, 0.0, 1.0, last], ..StepOutput::default() };
        assert_eq!(check.compare(&step, &streams(1.0), 2), Ok(()));
        assert!(check.compare(&step, &streams(1.5), 2).is_err());
    }
}
