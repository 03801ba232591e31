use std::ffi::OsString;
use std::process::ExitCode;

/// `ds4-server …` is `ds4 serve …`, and says so in its usage.
fn main() -> ExitCode {
    let flags = std::env::args_os().skip(1);
    ds4_cli::main(["ds4".into(), "serve".into()].into_iter().chain(flags).collect::<Vec<OsString>>())
}
