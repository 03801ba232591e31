//! An engine on the tiny model, and a stage that checks every row against a cold run.
#![allow(dead_code)]

use std::collections::HashMap;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use ds4_engine::*;
use ds4_gguf::Gguf;
use ds4_model::{HyperParams, KvLayout, LayerSlice, Limits, Model, Numerics, RowFormat, Setup};
use ds4_reference::Reference;
use ds4_text::Tokenizer;

pub fn open() -> Gguf {
    Gguf::open(&ds4_testdata::tiny_model()).expect("tiny model")
}

pub fn tokenizer() -> Arc<Tokenizer> {
    Arc::new(Tokenizer::from_gguf(open().metadata()).expect("tokenizer"))
}

pub fn setup(slice: Option<&str>, limits: Limits, format: RowFormat, numerics: Numerics) -> Setup {
    let hyper = HyperParams::from_metadata(open().metadata()).expect("hyper-parameters");
    let total = hyper.layers.len();
    let slice = slice.map_or(LayerSlice::whole(total), |s| LayerSlice::parse(s, total).expect("slice"));
    Setup { layout: KvLayout::new(&hyper, slice, format), hyper, limits, numerics }
}

/// Room for `slots` sessions of `context` positions, and `spare` pages.
pub fn limits(context: usize, rows: usize, slots: usize, spare: usize) -> Limits {
    let pages = slots * (KvLayout::pages_for(context) + 1) + spare;
    Limits { context, rows, outputs: rows.max(slots), slots, pages }
}

pub fn stage(slice: Option<&str>, limits: Limits, checkpoints: usize) -> LocalStage {
    let setup = setup(slice, limits, RowFormat::F32, Numerics::PLAIN_EXACT);
    LocalStage::start("local", checkpoints, move || {
        Model::load(&open(), setup.clone(), Reference::default(), &mut |_| ())
    })
    .expect("stage")
}

pub fn engine(config: EngineConfig, stages: Vec<Box<dyn Stage>>) -> EngineHandle {
    let handle = Engine::start(config, tokenizer(), move || Pipeline::new(stages)).expect("thread");
    wait_ready(&handle);
    handle
}

pub fn wait_ready(handle: &EngineHandle) {
    let until = Instant::now() + Duration::from_secs(60);
    while handle.health() != Health::Ready {
        assert!(Instant::now() < until, "not ready: {:?}", handle.health());
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// A request for `n` tokens with a log-probability each.
pub fn request(prompt: &[u32], n: usize) -> Request {
    Request { max_tokens: Some(n), logprobs: Some(5), ..Request::new(prompt.to_vec()) }
}

/// Logits after every prefix of the sequences asked for, each sequence evaluated from scratch.
pub struct Cold {
    model: Model<Reference>,
    known: Vec<(Vec<u32>, Vec<f32>)>,
}

impl Cold {
    pub fn new(context: usize) -> Self {
        let limits = limits(context, context, 1, 0);
        let setup = setup(None, limits, RowFormat::F32, Numerics::PLAIN_EXACT);
        let model = Model::load(&open(), setup, Reference::default(), &mut |_| ()).expect("model");
        Cold { model, known: Vec::new() }
    }

    pub fn forget(&mut self) {
        self.known.clear();
    }

    /// Logits after `tokens`.
    pub fn logits(&mut self, tokens: &[u32]) -> &[f32] {
        let vocab = self.model.setup().hyper.vocab;
        let at = self.known.iter().position(|(known, _)| known.starts_with(tokens)).unwrap_or_else(|| {
            let pages: Vec<u32> = (0..KvLayout::pages_for(tokens.len()) as u32).collect();
            self.model.backend_reset(&pages);
            let mut batch = ds4_model::Batch::new();
            batch.push(0, 0, tokens, ds4_model::Outputs::All);
            self.model.forward(&batch, None).expect("cold run");
            let mut logits = vec![0.0; vocab * tokens.len()];
            self.model.logits(0, &mut logits).expect("logits");
            self.known.push((tokens.to_vec(), logits));
            self.known.len() - 1
        });
        let end = tokens.len() * vocab;
        &self.known[at].1[end - vocab..end]
    }
}

trait Fresh {
    fn backend_reset(&mut self, pages: &[u32]);
}

impl Fresh for Model<Reference> {
    fn backend_reset(&mut self, pages: &[u32]) {
        use ds4_model::Backend;
        self.backend.reset(0).expect("reset");
        self.backend.set_pages(0, 0, pages).expect("pages");
    }
}

/// What the spied-on stage computed: per output row the tokens before it and its logits.
pub type Seen = Arc<Mutex<Vec<(Vec<u32>, Vec<f32>)>>>;

/// A step, and the tokens up to each of its output rows.
type Watched = (Arc<Step>, Vec<Vec<u32>>);

/// What goes wrong, and when.
#[derive(Clone, Debug)]
pub struct Fault {
    /// Steps until then.
    pub after: usize,
    pub fault: StageFault,
    /// The stage does not even report.
    pub silent: bool,
    /// The step is done all the same; else not at all.
    pub done: bool,
    /// Restarts that fail before one succeeds.
    pub failing_restarts: usize,
    /// What the stage still knows afterwards.
    pub survived: Survived,
}

pub type Faults = Arc<Mutex<Option<Fault>>>;

/// Wraps the stage that owns the head: asks it for whole rows of logits, keeps them, and answers the engine itself.
pub struct Spy {
    inner: LocalStage,
    seen: Seen,
    faults: Faults,
    reports: Option<Reports>,
    /// A fault was reported; steps are ignored until the restart.
    down: bool,
    slots: HashMap<u32, Vec<u32>>,
    checkpoints: HashMap<u32, Vec<u32>>,
    steps: SyncSender<Watched>,
    inbox: Option<Receiver<Watched>>,
}

impl Spy {
    pub fn new(inner: LocalStage, seen: Seen) -> Self {
        Self::with_faults(inner, seen, Faults::default())
    }

    pub fn with_faults(inner: LocalStage, seen: Seen, faults: Faults) -> Self {
        let (steps, inbox) = sync_channel(64);
        Spy {
            inner,
            seen,
            faults,
            reports: None,
            down: false,
            slots: HashMap::new(),
            checkpoints: HashMap::new(),
            steps,
            inbox: Some(inbox),
        }
    }

    fn ops(&mut self, ops: &[StateOp]) {
        for op in ops {
            match op {
                StateOp::Reset { slot } => drop(self.slots.insert(*slot, Vec::new())),
                StateOp::SaveCheckpoint { slot, id } => {
                    drop(self.checkpoints.insert(*id, self.slots[slot].clone()))
                }
                StateOp::LoadCheckpoint { slot, id } => {
                    drop(self.slots.insert(*slot, self.checkpoints[id].clone()))
                }
                _ => {}
            }
        }
    }
}

impl Stage for Spy {
    fn info(&self) -> &StageInfo {
        self.inner.info()
    }

    fn start(&mut self, reports: Reports) -> Result<(), StageError> {
        self.reports = Some(reports.clone());
        let (seen, inbox) = (self.seen.clone(), self.inbox.take().expect("started once"));
        let mut sampler = Sampler::default();
        let inner = reports.map(move |mut output: StepOutput| {
            let (step, prefixes) = loop {
                let (step, prefixes) = inbox.recv().expect("a step");
                if (step.id, step.epoch) == (output.id, output.epoch) {
                    break (step, prefixes);
                }
            };
            let rows = std::mem::take(&mut output.rows);
            for ((row, want), prefix) in rows.into_iter().zip(&step.wants).zip(prefixes) {
                let RowResult::Logits(logits) = row else { panic!("logits were asked for") };
                output.rows.push(sampler.answer(&logits, want));
                seen.lock().unwrap().push((prefix, logits));
            }
            output
        });
        self.inner.start(inner)
    }

    fn submit(&mut self, step: Arc<Step>, hidden: Option<Hidden>) -> Result<(), StageError> {
        if self.down {
            return Ok(());
        }
        let mut strike = None;
        if let Some(f) = self.faults.lock().unwrap().as_mut() {
            match f.after.checked_sub(1) {
                Some(left) => f.after = left,
                None => strike = Some(f.clone()),
            }
        }
        if let Some(f) = &strike {
            self.down = true;
            let report = Err(StageError::new(self.inner.info(), f.fault.clone()));
            if !f.silent {
                self.reports.as_ref().expect("started").send(report);
            }
            if !f.done {
                return Ok(());
            }
        }
        self.ops(&step.before);
        let mut prefixes = Vec::new();
        for s in step.batch.segments() {
            let tokens = self.slots.get_mut(&s.slot).expect("a known slot");
            assert_eq!(tokens.len(), s.pos);
            for row in s.row..s.row + s.len {
                tokens.push(step.batch.tokens()[row]);
                if step.batch.outputs().contains(&(row as u32)) {
                    prefixes.push(tokens.clone());
                }
            }
        }
        self.ops(&step.after);
        self.steps.send((step.clone(), prefixes)).expect("listener");
        let mut asked = Step::clone(&step);
        asked.wants.iter_mut().for_each(|w| w.choose = Choose::Logits);
        self.inner.submit(Arc::new(asked), hidden)
    }

    fn restart(&mut self, epoch: u64, deadline: Instant) -> Result<Survived, StageError> {
        let mut faults = self.faults.lock().unwrap();
        let survived = match faults.take() {
            Some(mut f) if self.down && f.failing_restarts > 0 => {
                f.failing_restarts -= 1;
                let error = StageError::new(self.inner.info(), f.fault.clone());
                *faults = Some(f);
                return Err(error);
            }
            Some(f) if self.down => f.survived,
            // Another stage's restart.
            other => {
                *faults = other;
                Survived::State
            }
        };
        self.down = false;
        self.inner.restart(epoch, deadline)?;
        if survived == Survived::Nothing {
            self.checkpoints.clear();
        }
        Ok(survived)
    }
}

/// Every row that was seen, bit for bit as a cold run gives it. Returns how many.
pub fn check_cold(seen: &Seen, cold: &mut Cold) -> usize {
    let mut rows = std::mem::take(&mut *seen.lock().unwrap());
    // One cold run serves all prefixes of a sequence.
    rows.sort_by_key(|(tokens, _)| std::cmp::Reverse(tokens.len()));
    for (tokens, logits) in &rows {
        let want = cold.logits(tokens);
        let same = want.iter().zip(logits).all(|(a, b)| a.to_bits() == b.to_bits());
        assert!(same, "after {} tokens ending in {:?}", tokens.len(), tokens.last());
    }
    rows.len()
}
