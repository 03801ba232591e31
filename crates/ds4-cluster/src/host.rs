//! What a worker needs of the stage that it serves.

use bytes::Bytes;

use crate::core::worker::Output;
use crate::wire;

/// A slice of the model that takes steps off the wire. Called from one thread.
pub trait Host: Send {
    /// Sizes the stage for `welcome`; whatever it remembered is gone.
    fn load(&mut self, welcome: &wire::Welcome) -> Result<(), wire::Fault>;

    /// Runs one step. `rows`: the activations from the node before, in pieces; empty where the slice embeds.
    fn run(&mut self, step: &wire::Step, rows: Vec<Bytes>) -> Result<Output, wire::Fault>;
}
