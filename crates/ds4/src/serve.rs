//! `ds4 serve` and `ds4-server`: the model over HTTP.

use std::ffi::OsString;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use clap::{ArgAction, CommandFactory};
use ds4_cluster::fingerprint;
use ds4_engine::{EngineConfig, SelfTest, SnapshotConfig};
use ds4_model::{KvLayout, LayerSlice};
use ds4_server::{App, ConfigError, ModelInfo, ServerConfig, Thinking};
use ds4_text::chat::Effort;

use crate::CliError;
use crate::args::{Cli, ServeArgs};
use crate::open::{self, OpenModel};
use crate::session::{self, Sizes};

/// Pages beside those of running sessions, at most: half a million tokens of earlier conversations.
const SPARE_PAGES_MAX: usize = 4096;

/// Serves until the program is told to end.
pub fn run(args: ServeArgs) -> Result<(), CliError> {
    let model = open::open(&args.model)?;
    if let Some(note) = model.note {
        eprintln!("ds4: {note}");
    }
    let tokenizer = model.tokenizer()?;
    let context = model.context(&args.model);
    let sessions = args.server.batched_session as usize;
    let config = EngineConfig {
        queue_limit: args.server.max_queue,
        snapshots: snapshots(&args, &model)?,
        self_test: Some(SelfTest::consistency(tokenizer.len())),
        ..EngineConfig::default()
    };
    let info = ModelInfo { name: name(&args, &model), context, created: created(&model) };
    let settings = settings(&args)?;
    let sizes =
        Sizes { sessions, spare_pages: (sessions * KvLayout::pages_for(context)).min(SPARE_PAGES_MAX) };
    let handle =
        session::start(model, &args.model, &args.numerics, &args.cluster, &tokenizer, sizes, config)?;
    for plan in handle.status().plan {
        eprintln!("{plan}");
    }
    let app = App::new(settings, Arc::new(handle), tokenizer, info)?;
    Ok(ds4_server::serve(app)?)
}

fn settings(args: &ServeArgs) -> Result<ServerConfig, CliError> {
    let draw = &args.draw;
    Ok(ServerConfig {
        thinking: Thinking {
            on: !draw.nothink,
            effort: if draw.think_max { Effort::Max } else { Effort::Low },
        },
        sampling: session::sampling(draw),
        seed: draw.seed,
        max_tokens: draw.tokens.map(|n| n as usize),
        ..args.server.settings()?
    })
}

fn snapshots(args: &ServeArgs, model: &OpenModel) -> Result<Option<SnapshotConfig>, CliError> {
    let Some(dir) = &args.server.kv_disk_dir else { return Ok(None) };
    std::fs::create_dir_all(dir).map_err(|source| CliError::File { path: dir.clone(), source })?;
    let (numerics, rows) = open::numeric_mode(&args.numerics);
    let whole = LayerSlice::whole(model.hyper.layers.len());
    Ok(Some(SnapshotConfig {
        dir: dir.clone(),
        budget: args.server.kv_disk_space_mb.saturating_mul(1 << 20),
        model: fingerprint(&model.gguf, &model.hyper, &whole).to_vec(),
        mode: format!("{numerics:?} {rows:?}"),
    }))
}

/// What the server calls its model.
fn name(args: &ServeArgs, model: &OpenModel) -> String {
    let stem = || model.path.file_stem().map(|s| s.to_string_lossy().into_owned());
    match (&args.server.alias, model.note) {
        (Some(alias), _) => alias.clone(),
        (None, Some(_)) => "ds4-nano".into(),
        (None, None) => stem().unwrap_or_else(|| "ds4".into()),
    }
}

/// When the file was written; of the model that ships, now.
fn created(model: &OpenModel) -> u64 {
    let written = std::fs::metadata(&model.path).and_then(|m| m.modified());
    let since = written.unwrap_or_else(|_| SystemTime::now()).duration_since(UNIX_EPOCH);
    since.map_or(0, |d| d.as_secs())
}

/// The command line of `serve` with the flags of its `--config` file.
pub fn with_config(argv: Vec<OsString>) -> Result<Vec<OsString>, ConfigError> {
    if argv.get(1).is_none_or(|a| a != "serve") {
        return Ok(argv);
    }
    let mut cli = Cli::command();
    cli.build();
    let many = |flag: &str| {
        let serve = cli.find_subcommand("serve")?;
        let arg = serve.get_arguments().find(|a| a.get_long() == Some(flag) && flag != "config")?;
        Some(matches!(arg.get_action(), ArgAction::Append))
    };
    ds4_server::with_file(argv, 2, many)
}
