//! The messages of `proto/cluster.proto`, and their words.

mod generated {
    #![allow(missing_docs, clippy::all)]
    include!("generated.rs");
}

pub use generated::from_worker::Message as FromWorkerMessage;
pub use generated::to_worker::Message as ToWorkerMessage;
pub use generated::*;

/// A fault as one line for logs and errors.
pub fn describe(fault: &Fault) -> String {
    crate::convert::fault_from_wire(fault).to_string()
}

/// What the number in [`Goodbye::reason`] says.
pub fn reason_text(reason: i32) -> &'static str {
    match GoodbyeReason::try_from(reason).unwrap_or(GoodbyeReason::Unknown) {
        GoodbyeReason::Unknown => "a reason this version does not know",
        GoodbyeReason::Exit => "it exits",
        GoodbyeReason::ProtocolVersion => "other protocol version",
        GoodbyeReason::Model => "other model",
        GoodbyeReason::Layers => "no such layers",
        GoodbyeReason::Context => "context too small",
        GoodbyeReason::ActivationBits => "activation format",
        GoodbyeReason::Memory => "it cannot load its layers",
        GoodbyeReason::Protocol => "protocol broken",
        GoodbyeReason::Duplicate => "connected twice",
        GoodbyeReason::Full => "no place",
    }
}

/// A peer's words, fit for a log line.
pub fn printable(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(500).collect()
}
