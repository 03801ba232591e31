use std::ffi::OsString;
use std::process::ExitCode;

/// `ds4-server …` is `ds4 serve …`.
fn main() -> ExitCode {
    let mut argv: Vec<OsString> = std::env::args_os().collect();
    argv.insert(1.min(argv.len()), "serve".into());
    ds4_cli::main(argv)
}
