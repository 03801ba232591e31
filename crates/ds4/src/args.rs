//! Every flag of `ds4`: help, man page and completions come from here.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};
use ds4_cluster::args::ClusterArgs;
use ds4_model::plan::Node;
use ds4_server::ServerArgs;

const USAGE: &str = "Without a prompt: a chat in the terminal (/help there). Only the answer goes to stdout.";

#[derive(Debug, Parser)]
#[command(
    name = "ds4",
    version,
    about = "Runs DeepSeek V4 models from GGUF files",
    after_help = USAGE,
    args_conflicts_with_subcommands = true
)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Option<Command>,
    #[command(flatten)]
    pub model: ModelArgs,
    #[command(flatten)]
    pub numerics: NumericArgs,
    #[command(flatten)]
    pub run: RunArgs,
    #[command(flatten)]
    pub probe: ProbeArgs,
    #[command(flatten)]
    pub cluster: ClusterArgs,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Write the logits of given tokens as little-endian f32 [positions, vocabulary]
    Logits(LogitsArgs),
    /// Serve the model over HTTP: OpenAI's chat, completions and Responses, Anthropic's messages, and a page
    Serve(Box<ServeArgs>),
    /// Print what memory a model needs, from its header alone; or what fits into a memory, or onto several machines
    Plan(PlanArgs),
    /// Compute a slice of the layers for a coordinator (as `ds4 --role worker`)
    Worker(WorkerArgs),
    /// Print shell completions
    Completions { shell: clap_complete::Shell },
    /// Print the man page
    Man,
}

/// Which model, on what.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Model")]
pub struct ModelArgs {
    /// Model file (GGUF). Default: ds4flash.gguf in this folder, else the model that ships with the program
    #[arg(short = 'm', long, value_name = "FILE")]
    pub model: Option<PathBuf>,
    /// Tokens that a conversation may have. Default: what the model was trained for, at most 32768
    #[arg(short = 'c', long, value_name = "N", value_parser = clap::value_parser!(u32).range(2..=1 << 24))]
    pub ctx: Option<u32>,
    /// Where to compute
    #[arg(long, value_enum, default_value_t = BackendChoice::Auto)]
    pub backend: BackendChoice,
    /// Compute on an NVIDIA card (as --backend cuda)
    #[arg(long, conflicts_with_all = ["backend", "cpu"])]
    pub cuda: bool,
    /// Compute on the processor (as --backend cpu)
    #[arg(long, conflicts_with = "backend")]
    pub cpu: bool,
    /// Number of the NVIDIA card to compute on, as nvidia-smi lists them. Default: the first that has the memory
    #[arg(long, value_name = "N", value_delimiter = ',', value_parser = clap::value_parser!(u16))]
    pub gpu_devices: Vec<u16>,
    /// Threads of the CPU backend. Default: the cores that this process may use
    #[arg(short = 't', long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub threads: Option<u16>,
    /// Prompt tokens per step. Default: 512 on the processor, 2048 on a card
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=65536))]
    pub prefill_chunk: Option<u32>,
}

impl ModelArgs {
    /// The choice that the flags make together.
    pub fn choice(&self) -> BackendChoice {
        match (self.cuda, self.cpu) {
            (true, _) => BackendChoice::Cuda,
            (_, true) => BackendChoice::Cpu,
            _ => self.backend,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum BackendChoice {
    /// The fastest that this machine has
    Auto,
    /// This machine's processor
    Cpu,
    /// An NVIDIA card; needs its driver (580 or newer), nothing else
    Cuda,
    /// The clear f32 program that the others are tested against; slow, one thread
    Reference,
}

/// Numeric mode.
#[derive(Debug, Clone, Copy, Args)]
#[command(next_help_heading = "Numerics")]
pub struct NumericArgs {
    /// Compute without the activation rounding that the model was trained with
    #[arg(long, conflicts_with = "qat")]
    pub plain: bool,
    /// Round activations as the model was trained (the default)
    #[arg(long)]
    pub qat: bool,
    /// Keep the inputs of matrix products in f32 instead of 8 bits
    #[arg(long)]
    pub exact: bool,
    /// How key-value rows are stored. Default: f32 with --plain, else packed
    #[arg(long, value_enum, value_name = "FORMAT")]
    pub kv: Option<KvChoice>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum KvChoice {
    /// As computed
    F32,
    /// FP8 and FP4, which is what the model's own rounding leaves, and a 16-bit rotary part
    Packed,
}

/// What to say, and how to answer.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Generation")]
pub struct RunArgs {
    /// Answer this and stop
    #[arg(short = 'p', long, value_name = "TEXT")]
    pub prompt: Option<String>,
    /// Answer the text of this file and stop
    #[arg(long, value_name = "FILE", conflicts_with = "prompt")]
    pub prompt_file: Option<PathBuf>,
    /// System text (also -sys)
    #[arg(long, value_name = "TEXT")]
    pub system: Option<String>,
    /// The prompt is the beginning of a text to go on with: no chat format around it
    #[arg(long)]
    pub raw_prompt: bool,
    #[command(flatten)]
    pub draw: DrawArgs,
}

/// How an answer is drawn. To a server: what requests get that do not say.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Generation")]
pub struct DrawArgs {
    /// Tokens to generate at most. Default: until the model ends or the context is full
    #[arg(short = 'n', long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub tokens: Option<u32>,
    /// 0 takes the most likely token
    #[arg(long, value_name = "T", default_value_t = 0.6)]
    pub temp: f32,
    /// Only the most likely tokens that together reach this probability
    #[arg(long, value_name = "P", default_value_t = 0.95)]
    pub top_p: f32,
    /// Only so many most likely tokens; 0: all
    #[arg(long, value_name = "K", default_value_t = 0)]
    pub top_k: u32,
    /// Only tokens at least this share as likely as the most likely one
    #[arg(long, value_name = "P", default_value_t = 0.0)]
    pub min_p: f32,
    /// The same seed gives the same answer. Default: another one every time
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,
    /// Let the model think before it answers (the default)
    #[arg(long, overrides_with_all = ["think_max", "nothink"])]
    pub think: bool,
    /// Ask for the most thorough thinking
    #[arg(long, overrides_with_all = ["think", "nothink"])]
    pub think_max: bool,
    /// Answer without thinking
    #[arg(long, overrides_with_all = ["think", "think_max"])]
    pub nothink: bool,
}

/// Look at the model instead of talking to it.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Inspection")]
pub struct ProbeArgs {
    /// Print what the model file holds
    #[arg(long)]
    pub inspect: bool,
    /// With --inspect: as JSON
    #[arg(long, requires = "inspect")]
    pub json: bool,
    /// Print the prompt's token ids and texts
    #[arg(long)]
    pub dump_tokens: bool,
    /// Write the logits after the prompt to this file: little-endian f32 [vocabulary]
    #[arg(long, value_name = "FILE")]
    pub dump_logits: Option<PathBuf>,
    /// Print the log-probabilities of the tokens that may follow the prompt
    #[arg(long)]
    pub dump_logprobs: bool,
    /// With --dump-logprobs: so many
    #[arg(long, value_name = "K", default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub logprobs_top_k: u32,
    /// Print the perplexity of this file's text
    #[arg(long, value_name = "FILE")]
    pub perplexity_file: Option<PathBuf>,
    /// Check that the prompt's last N positions come out the same in one step and one by one
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub decode_consistency: Option<u32>,
}

#[derive(Debug, Args)]
pub struct ServeArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    #[command(flatten)]
    pub numerics: NumericArgs,
    #[command(flatten)]
    pub draw: DrawArgs,
    #[command(flatten)]
    pub server: ServerArgs,
    #[command(flatten)]
    pub cluster: ClusterArgs,
}

#[derive(Debug, Args)]
pub struct PlanArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    #[command(flatten)]
    pub numerics: NumericArgs,
    /// Conversations at once
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub sessions: u32,
    /// Only these layers
    #[arg(long, value_name = "A:B|A:output", conflicts_with = "node")]
    pub layers: Option<String>,
    /// Choose chunk, sessions and, without --ctx, the context for this much memory
    #[arg(long, value_name = "51.3GiB", value_parser = crate::plan::parse_memory, conflicts_with = "node")]
    pub memory: Option<u64>,
    /// A machine and its memory, and how fast it is beside the others: propose slices for all of them (repeatable)
    #[arg(long, value_name = "NAME=51.3GiB[@SPEED]", value_parser = crate::plan::parse_node)]
    pub node: Vec<Node>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct LogitsArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    #[command(flatten)]
    pub numerics: NumericArgs,
    /// File of whitespace-separated token ids
    #[arg(long, value_name = "FILE")]
    pub tokens: PathBuf,
    /// File to write
    #[arg(long, value_name = "FILE")]
    pub out: PathBuf,
    /// Tokens per step
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = clap::value_parser!(u32).range(1..=65536))]
    pub chunk: u32,
    /// From this position on, one token per step
    #[arg(long, value_name = "N")]
    pub decode_from: Option<u32>,
}

#[derive(Debug, Args)]
pub struct WorkerArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    #[command(flatten)]
    pub cluster: ClusterArgs,
}

/// Spellings that other programs of this kind take, which a standard parser does not know.
pub fn normalise(argv: impl IntoIterator<Item = OsString>) -> impl Iterator<Item = OsString> {
    argv.into_iter().map(|a| if a == "-sys" { "--system".into() } else { a })
}
