//! The protocol without sockets, clocks or threads: state machines that take events with the time they happened at and
//! say what to do. The drivers in [`crate::coordinator`] and [`crate::worker`] run them on real connections,
//! `tests/simulation.rs` on a network that misbehaves from a seed.

pub mod coordinator;
pub mod route;
pub mod worker;

use std::time::Duration;

/// Version of the protocol in `proto/cluster.proto`. Another one is refused.
pub const PROTOCOL: u32 = 1;

/// Bytes of activations in one message. Rows longer than this travel one by one.
pub const PIECE_BYTES: usize = 1 << 20;

/// The longest message, encoded: a step whose operations carry pages and checkpoints.
pub const MESSAGE_BYTES_MAX: usize = 64 << 20;

/// A connection, numbered by the driver; never reused.
pub type Link = u64;

/// When silence and slowness count as death.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Timing {
    pub heartbeat: Duration,
    /// Heartbeats without any message from the peer, then it is dead.
    pub heartbeats_missed_max: u32,
    /// A stranger must say hello within this time.
    pub hello: Duration,
    /// The least time that a step gets.
    pub step_min: Duration,
    /// The time of a step before any has been measured (a device may compile or page in its weights).
    pub step_first: Duration,
    /// Times the measured time per row.
    pub step_factor: u32,
}

impl Default for Timing {
    fn default() -> Self {
        Timing {
            heartbeat: Duration::from_secs(1),
            heartbeats_missed_max: 3,
            hello: Duration::from_secs(5),
            step_min: Duration::from_secs(30),
            step_first: Duration::from_secs(300),
            step_factor: 10,
        }
    }
}

impl Timing {
    /// Silence after which a peer is dead.
    pub fn silence_max(&self) -> Duration {
        self.heartbeat * self.heartbeats_missed_max
    }
}

/// Time that this process itself stood still between two ticks: a stopped process, a suspended or overloaded machine.
/// It has heard nothing meanwhile, and that is not its peers' silence.
fn stood_still(now: Duration, ticked: Duration, timing: &Timing) -> Duration {
    let gap = now.saturating_sub(ticked);
    if gap >= timing.heartbeat { gap } else { Duration::ZERO }
}
