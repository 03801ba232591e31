//! A running engine for one person: from flags to a handle, and an answer as it comes.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ds4_cluster::RemoteStage;
use ds4_cluster::args::ClusterArgs;
use ds4_engine::{
    Engine, EngineConfig, EngineHandle, Event, FinishReason, Health, LocalStage, Pipeline, Request,
    SamplingParams, Stage, StageError, StageFault, StageLimits, Usage,
};
use ds4_model::{Backend, KvLayout, LayerSlice, MemoryPlan, Model, Settings};
use ds4_text::Tokenizer;
use ds4_text::chat::{self, PromptIds};
use indicatif::{ProgressBar, ProgressStyle};

use crate::CliError;
use crate::args::{DrawArgs, ModelArgs, NumericArgs, RunArgs};
use crate::device::{Device, Job, Make};
use crate::open::{self, OpenModel};

/// Places to take a conversation up again.
pub const CHECKPOINTS: usize = 32;

pub struct Session {
    pub handle: EngineHandle,
    pub tokenizer: Arc<Tokenizer>,
    pub context: usize,
}

impl Session {
    /// Loads the model; returns when it is ready.
    pub fn start(
        model: OpenModel,
        device: &ModelArgs,
        numerics: &NumericArgs,
        cluster: &ClusterArgs,
    ) -> Result<Self, CliError> {
        let tokenizer = model.tokenizer()?;
        let context = model.context(device);
        let path = model.path.clone();
        let sizes = Sizes { sessions: 1, spare_pages: CHECKPOINTS };
        let config = EngineConfig::default();
        let handle = start(model, device, numerics, cluster, &tokenizer, sizes, config)?;
        let mut waiting = false;
        loop {
            match handle.health() {
                Health::Waiting { reason, .. } => {
                    if !std::mem::replace(&mut waiting, true) {
                        eprintln!("{reason}");
                    }
                    std::thread::sleep(Duration::from_millis(20));
                }
                Health::Loading => std::thread::sleep(Duration::from_millis(1)),
                Health::Ready => return Ok(Session { handle, tokenizer, context }),
                Health::Faulted { reason } => return Err(CliError::Load { path, reason }),
                other => return Err(CliError::Load { path, reason: format!("{other:?}") }),
            }
        }
    }

    /// Generates, and gives every token's bytes to `show`. Setting `stop` ends the answer within one step; what was
    /// said so far stays.
    pub fn answer(
        &self,
        prompt: &PromptIds,
        args: &RunArgs,
        stop: &AtomicBool,
        show: Show<'_>,
    ) -> Result<Answer, CliError> {
        let mut request = Request::new(prompt.ids.clone());
        request.boundaries = prompt.boundaries.clone();
        request.max_tokens = args.draw.tokens.map(|n| n as usize);
        request.stop_tokens = self.tokenizer.special(chat::EOS).into_iter().collect();
        request.sampling = sampling(&args.draw);
        request.sampling.seed = args.draw.seed.unwrap_or_else(seed);
        let mut generation = self.handle.submit(request)?;
        let bar = prefill_bar(prompt.ids.len());
        loop {
            if stop.load(Ordering::Relaxed) {
                bar.finish_and_clear();
                return Ok(Answer::Interrupted);
            }
            match generation.next_blocking() {
                Some(Event::Prefill { done, .. }) => bar.set_position(done as u64),
                Some(Event::Token { bytes, chosen }) => {
                    bar.finish_and_clear();
                    if self.tokenizer.special(chat::EOS) != Some(chosen.token) {
                        show(&bytes)?;
                    }
                }
                Some(Event::Finished { reason, usage }) => {
                    return Ok(Answer::Finished(reason, usage));
                }
                Some(Event::Failed(e)) => return Err(e.into()),
                Some(_) => {}
                None => return Err(ds4_engine::EngineError::ShuttingDown.into()),
            }
        }
    }
}

/// Hears of every token's bytes; they may cut a UTF-8 character.
pub type Show<'a> = &'a mut dyn FnMut(&[u8]) -> Result<(), CliError>;

pub enum Answer {
    Finished(FinishReason, Usage),
    Interrupted,
}

impl Answer {
    /// How it went, for stderr.
    pub fn summary(&self) -> String {
        let Answer::Finished(reason, u) = self else { return "[stopped]".into() };
        let rate = |n: usize, t: Duration| n as f64 / t.as_secs_f64().max(1e-9);
        let length = if *reason == FinishReason::Length { ", cut at the limit" } else { "" };
        format!(
            "[prompt {} tokens, {} reused, {:.1} t/s; answer {} tokens, {:.1} t/s{length}]",
            u.prompt_tokens,
            u.reused_tokens,
            rate(u.prompt_tokens - u.reused_tokens, u.prefill),
            u.completion_tokens,
            rate(u.completion_tokens.saturating_sub(1), u.decode),
        )
    }
}

/// Everything but the seed.
pub fn sampling(args: &DrawArgs) -> SamplingParams {
    SamplingParams {
        temperature: args.temp,
        top_k: args.top_k as usize,
        top_p: args.top_p,
        min_p: args.min_p,
        ..SamplingParams::default()
    }
}

/// Another one every time.
fn seed() -> u64 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one(Instant::now())
}

/// On stderr, and only where that is a terminal.
fn prefill_bar(tokens: usize) -> ProgressBar {
    let bar = ProgressBar::new(tokens as u64);
    if let Ok(style) = ProgressStyle::with_template("reading {bar:30} {pos}/{len} tokens, {per_sec}") {
        bar.set_style(style);
    }
    bar
}

/// What an engine is sized for beyond its model and context.
pub struct Sizes {
    /// Requests that run at once.
    pub sessions: usize,
    /// Pages for the state of earlier requests.
    pub spare_pages: usize,
}

/// Starts the engine that the flags ask for: on this machine, or as the coordinator of several. The model is loaded
/// meanwhile; the handle tells when it is ready.
pub fn start(
    model: OpenModel,
    device: &ModelArgs,
    numerics: &NumericArgs,
    cluster: &ClusterArgs,
    tokenizer: &Arc<Tokenizer>,
    sizes: Sizes,
    config: EngineConfig,
) -> Result<EngineHandle, CliError> {
    let context = model.context(device);
    let (numerics, rows) = open::numeric_mode(numerics);
    let place = Device::choose(device, model.weight_bytes())?;
    let settings = Settings {
        slice: LayerSlice::whole(model.hyper.layers.len()),
        context,
        sessions: sizes.sessions,
        chunk: cluster.prefill_chunk().unwrap_or(place.chunk(device)).min(context),
        checkpoints: CHECKPOINTS,
        spare_pages: sizes.spare_pages,
        rows,
        numerics,
    };
    let cluster = cluster.role(None)?.is_some().then(|| cluster.clone());
    place.run(Start { model, settings, tokenizer: tokenizer.clone(), cluster, config })
}

struct Start {
    model: OpenModel,
    settings: Settings,
    tokenizer: Arc<Tokenizer>,
    /// Where this is a coordinator.
    cluster: Option<ClusterArgs>,
    config: EngineConfig,
}

impl Job for Start {
    type Output = EngineHandle;

    fn run<B: Backend + 'static>(self, make: impl Make<B>) -> Result<EngineHandle, CliError> {
        let Start { model, settings, tokenizer, cluster, mut config } = self;
        let mut setup = settings.setup(&model.hyper);
        let gguf = model.gguf.clone();
        let local = |setup: ds4_model::Setup| {
            let load = move || Model::load(&gguf, setup.clone(), make()?, &mut |_| ());
            LocalStage::start("local", CHECKPOINTS, load)
        };
        let Some(args) = cluster else {
            config.plan = vec![MemoryPlan::new::<B>(&model.gguf, &model.hyper, settings)?];
            let load = move || Pipeline::new(vec![Box::new(local(setup)?)]);
            return Engine::start(config, tokenizer, load).map_err(CliError::Output);
        };
        config.resume_wait = args.resume_wait();
        let limits = StageLimits { model: setup.limits, checkpoints: CHECKPOINTS };
        let serve = args.serve(&setup.hyper, limits, setup.numerics, setup.layout.format)?;
        let cluster = args.start_coordinator(model.gguf, &setup.hyper, &serve)?;
        let load = move || {
            let hyper = setup.hyper.clone();
            let own = serve.local.map(|slice| {
                setup.layout = KvLayout::new(&setup.hyper, slice, serve.rows);
                local(setup)
            });
            let own = own.transpose()?.map(|s| Box::new(s) as Box<dyn Stage>);
            let stages = RemoteStage::pipeline(&cluster, &hyper, &serve, own).map_err(|e| StageError {
                stage: "cluster".into(),
                fault: StageFault::Load(e.to_string()),
            })?;
            Pipeline::new(stages)
        };
        Engine::start(config, tokenizer, load).map_err(CliError::Output)
    }
}
