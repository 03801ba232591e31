//! Every flag of `ds4`: help, man page and completions come from here.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};

#[derive(Debug, Parser)]
#[command(
    name = "ds4",
    version,
    about = "Runs DeepSeek V4 models from GGUF files",
    args_conflicts_with_subcommands = true
)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Option<Command>,
    #[command(flatten)]
    pub model: ModelArgs,
    /// Print what the model file holds, and stop
    #[arg(long)]
    pub inspect: bool,
    /// With --inspect: print JSON
    #[arg(long, requires = "inspect")]
    pub json: bool,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Write the logits of given tokens as little-endian f32 [positions, vocabulary]
    Logits(LogitsArgs),
}

/// Which model, on what.
#[derive(Debug, Clone, Args)]
pub struct ModelArgs {
    /// Model file (GGUF). Default: ds4flash.gguf in this folder, else the model that ships with the program
    #[arg(short = 'm', long, value_name = "FILE")]
    pub model: Option<PathBuf>,
    /// Where to compute
    #[arg(long, value_enum, default_value_t = BackendChoice::Auto)]
    pub backend: BackendChoice,
    /// Threads of the CPU backend. Default: the cores that this process may use
    #[arg(short = 't', long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub threads: Option<u16>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum BackendChoice {
    /// The fastest that this machine has
    Auto,
    /// This machine's processor
    Cpu,
    /// The clear f32 program that the others are tested against; slow
    Reference,
}

/// Numeric mode.
#[derive(Debug, Clone, Copy, Args)]
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

/// Spellings that other programs of this kind take, which a standard parser does not know.
pub fn normalise(argv: impl IntoIterator<Item = OsString>) -> impl Iterator<Item = OsString> {
    argv.into_iter().map(|a| if a == "-sys" { "--system".into() } else { a })
}
