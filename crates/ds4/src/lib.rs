//! The `ds4` program: thin commands over the crates below. [`args`] is the one definition of every flag.

#![forbid(unsafe_code)]

pub mod args;
mod device;
mod error;
mod generate;
mod inspect;
mod logits;
mod open;
mod plan;
mod serve;
mod session;
mod worker;

use std::ffi::OsString;
use std::io::Write;
use std::process::ExitCode;

use clap::{CommandFactory, Parser};
use ds4_cluster::args::Role;

pub use error::CliError;

/// Runs one command line. Every failure is one readable line on stderr and exit code 2.
pub fn main(argv: impl IntoIterator<Item = OsString>) -> ExitCode {
    let argv = match serve::with_config(args::normalise(argv).collect()) {
        Ok(argv) => argv,
        Err(e) => {
            eprintln!("ds4: {e}");
            return ExitCode::from(2);
        }
    };
    let cli = match args::Cli::try_parse_from(argv) {
        Ok(cli) => cli,
        Err(e) => {
            // Help and version go to stdout and are no failure.
            let code = if e.use_stderr() { 2 } else { 0 };
            let _ = e.print();
            return ExitCode::from(code);
        }
    };
    let debug = match &cli.command {
        Some(args::Command::Worker(a)) => a.cluster.debug,
        Some(args::Command::Serve(a)) => a.cluster.debug,
        _ => cli.cluster.debug,
    };
    log(debug);
    match run(cli) {
        Ok(()) => ExitCode::SUCCESS,
        Err(CliError::BrokenPipe) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("ds4: {e}");
            ExitCode::from(2)
        }
    }
}

/// What the crates below report, on stderr.
fn log(debug: bool) {
    let level = if debug { tracing::Level::DEBUG } else { tracing::Level::INFO };
    let colours = std::io::IsTerminal::is_terminal(&std::io::stderr());
    let log = tracing_subscriber::fmt().with_max_level(level).with_target(false).with_ansi(colours);
    // Err: a log is set up already, by whoever calls this as a library.
    drop(log.with_writer(std::io::stderr).try_init());
}

fn run(cli: args::Cli) -> Result<(), CliError> {
    let mut out = std::io::stdout().lock();
    match cli.command {
        Some(args::Command::Logits(a)) => {
            drop(out);
            logits::run(a)
        }
        Some(args::Command::Serve(a)) => {
            drop(out);
            serve::run(*a)
        }
        Some(args::Command::Plan(a)) => {
            drop(out);
            plan::run(a)
        }
        Some(args::Command::Worker(a)) => {
            drop(out);
            worker::run(&a.model, &a.cluster)
        }
        Some(args::Command::Completions { shell }) => {
            // Into memory first: the generator panics where its output is closed.
            let mut text = Vec::new();
            clap_complete::generate(shell, &mut args::Cli::command(), "ds4", &mut text);
            Ok(out.write_all(&text)?)
        }
        Some(args::Command::Man) => Ok(clap_mangen::Man::new(args::Cli::command()).render(&mut out)?),
        None if cli.cluster.role(None)? == Some(Role::Worker) => {
            drop(out);
            worker::refuse_others(&cli)?;
            worker::run(&cli.model, &cli.cluster)
        }
        None => {
            drop(out);
            if cli.probe.inspect { inspect::run(&cli.model, cli.probe.json) } else { generate::run(cli) }
        }
    }
}
