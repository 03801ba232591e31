use std::process::ExitCode;

fn main() -> ExitCode {
    ds4_cli::main(std::env::args_os())
}
