//! From a model and what is asked of it to the two sides' first messages.

use ds4_engine::StageLimits;
use ds4_gguf::Gguf;
use ds4_model::{HyperParams, KvLayout, LayerSlice, Numerics, RowFormat};

use crate::activation::Format;
use crate::core::coordinator::Config;
use crate::core::{PROTOCOL, Timing};
use crate::error::ClusterError;
use crate::{convert, fingerprint, wire};

/// What a coordinator serves.
#[derive(Clone, Copy, Debug)]
pub struct Serve {
    /// The slice that it computes itself.
    pub local: Option<LayerSlice>,
    pub limits: StageLimits,
    pub numerics: Numerics,
    pub rows: RowFormat,
    pub activation: Format,
    pub timing: Timing,
    /// Steps on their way through a span of workers at once.
    pub window: u32,
    /// Whether recent results are kept and compared with what a replay gives.
    pub replay_check: bool,
}

/// Enough to keep eight nodes busy while the next steps travel.
pub const WINDOW_DEFAULT: u32 = 16;

/// The slices that workers must cover, in order: all but `local`.
pub fn spans(total: usize, local: Option<LayerSlice>) -> Result<Vec<LayerSlice>, ClusterError> {
    let Some(local) = local else { return Ok(vec![LayerSlice::whole(total)]) };
    if local.end == total && !local.head {
        return Err(ClusterError::Usage(format!(
            "--layers {local}: no other node can own the output head alone; use {}:output",
            local.first
        )));
    }
    let before = LayerSlice { first: 0, end: local.first, total, head: false };
    let after = LayerSlice { first: local.end, end: total, total, head: true };
    Ok([before, after].into_iter().filter(|s| !s.is_empty()).collect())
}

/// What the coordinator's protocol core runs on.
pub fn config(gguf: Gguf, hyper: &HyperParams, serve: &Serve) -> Result<Config, ClusterError> {
    let total = hyper.layers.len();
    let (sized, rows) = (hyper.clone(), serve.rows);
    let printed = hyper.clone();
    Ok(Config {
        timing: serve.timing,
        layers: total,
        spans: spans(total, serve.local)?,
        sizes: Box::new(move |slice| {
            let layout = KvLayout::new(&sized, *slice, rows);
            (layout.page_bytes, layout.frontier_bytes)
        }),
        fingerprint: Box::new(move |slice| fingerprint(&gguf, &printed, slice)),
        welcome: wire::Welcome {
            protocol: PROTOCOL,
            version: env!("CARGO_PKG_VERSION").into(),
            limits: Some(convert::limits(&serve.limits)),
            activation_bits: serve.activation.bits(),
            heartbeat_ms: serve.timing.heartbeat.as_millis() as u32,
            heartbeats_missed_max: serve.timing.heartbeats_missed_max,
            steps_max: serve.window,
            width: (hyper.streams * hyper.hidden) as u32,
            qat: serve.numerics.qat,
            exact: serve.numerics.exact,
            rows_f32: serve.rows == RowFormat::F32,
        },
    })
}

/// What a worker offers.
pub fn hello(
    gguf: &Gguf,
    hyper: &HyperParams,
    slice: &LayerSlice,
    context: usize,
    name: &str,
    device: &str,
) -> wire::Hello {
    wire::Hello {
        protocol: PROTOCOL,
        version: env!("CARGO_PKG_VERSION").into(),
        name: name.into(),
        boot: boot(),
        layers: Some(convert::layers(slice)),
        fingerprint: fingerprint(gguf, hyper, slice).to_vec().into(),
        context: context as u64,
        activation_bits: Format::ALL.iter().map(|f| f.bits()).sum(),
        listen: String::new(),
        device: device.into(),
    }
}

/// Tells this process from every other, well enough: no two start at the same nanosecond under the same number.
fn boot() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    let hash = blake3::hash(
        &[since.as_nanos().to_le_bytes(), u128::from(std::process::id()).to_le_bytes()].concat(),
    );
    let [a, b, c, d, e, f, g, h, ..] = *hash.as_bytes();
    u64::from_le_bytes([a, b, c, d, e, f, g, h]).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workers_cover_what_the_coordinator_does_not() {
        for (local, expected) in [
            (None, &["0:output"][..]),
            (Some("0:2"), &["3:output"]),
            (Some("3:output"), &["0:2"]),
            (Some("2:3"), &["0:1", "4:output"]),
            (Some("0:output"), &[]),
        ] {
            let local = local.map(|l| LayerSlice::parse(l, 6).expect("slice"));
            let found: Vec<String> =
                spans(6, local).expect("covers").iter().map(ToString::to_string).collect();
            assert_eq!(found, expected);
        }
        let e = spans(6, LayerSlice::parse("3:5", 6).ok()).expect_err("no head").to_string();
        assert!(e.contains("3:output"), "{e}");
    }
}
