//! Messages that no honest peer sends: neither half of the protocol panics on them, and neither keeps more than was
//! agreed.

use std::time::Duration;

use bytes::Bytes;
use ds4_cluster::core::coordinator::{self as coord, Coordinator};
use ds4_cluster::core::worker::{self as work, Worker};
use ds4_cluster::core::{PROTOCOL, Timing};
use ds4_cluster::wire::{
    self, FromWorkerMessage as From, StateOp, ToWorkerMessage as To, from_worker, state_op::Op, to_worker,
    want,
};
use ds4_model::LayerSlice;
use proptest::prelude::*;
use prost::Message;

const WIDTH: u32 = 4;

fn welcome() -> wire::Welcome {
    wire::Welcome {
        protocol: PROTOCOL,
        limits: Some(wire::Limits { context: 100, rows: 8, outputs: 8, slots: 2, pages: 4, checkpoints: 2 }),
        activation_bits: 32,
        heartbeat_ms: 1000,
        heartbeats_missed_max: 3,
        steps_max: 2,
        width: WIDTH,
        ..Default::default()
    }
}

fn hello() -> wire::Hello {
    wire::Hello {
        protocol: PROTOCOL,
        name: "node".into(),
        boot: 1,
        layers: Some(wire::Layers { first: 1, end: 2, total: 2, head: true }),
        fingerprint: vec![7; 32].into(),
        context: 100,
        activation_bits: 32,
        ..Default::default()
    }
}

fn step() -> wire::Step {
    let op = |op| StateOp { op: Some(op) };
    wire::Step {
        epoch: 1,
        number: 1,
        id: 1,
        before: vec![
            op(Op::Reset(0)),
            op(Op::SetPages(wire::SetPages { slot: 0, first: 0, pages: vec![1, 2] })),
            op(Op::WritePage(wire::WritePage { page: 1, data: Bytes::from_static(b"abc") })),
            op(Op::WriteCheckpoint(wire::WriteCheckpoint { id: 1, mark: None, data: Bytes::new() })),
        ],
        segments: vec![wire::Segment { slot: 0, rows: 2, mark: Some(wire::Mark { position: 3, prefix: 9 }) }],
        tokens: vec![1, 0, 0, 0, 2, 0, 0, 0].into(),
        wants: vec![wire::Want { row: 1, top: 1, choose: Some(want::Choose::Given(5)) }],
        after: vec![op(Op::Save(wire::Checkpoint { slot: 0, id: 1 }))],
    }
}

fn piece() -> wire::Activations {
    wire::Activations { epoch: 1, step: 1, first_row: 0, rows: 2, data: vec![0; 32].into() }
}

/// An honest message with some of its bytes changed, where it still decodes.
fn to_worker() -> impl Strategy<Value = Option<to_worker::Message>> {
    let honest = prop_oneof![
        Just(To::Welcome(welcome())),
        Just(To::Route(wire::Route { epoch: 1, place: 1, places: 2, next: "127.0.0.1:1".into() })),
        Just(To::Heartbeat(wire::Heartbeat { sent_us: 1, echo_us: 2 })),
        Just(To::Step(step())),
        Just(To::Activations(piece())),
        Just(To::Goodbye(wire::Goodbye { reason: 1, details: "\u{1b}[31m".into() })),
    ];
    (honest, damage()).prop_map(|(message, damage)| {
        let bytes = spoil(wire::ToWorker { message: Some(message) }.encode_to_vec(), &damage);
        wire::ToWorker::decode(&bytes[..]).ok().and_then(|m| m.message)
    })
}

fn from_worker() -> impl Strategy<Value = Option<from_worker::Message>> {
    let timing = wire::StepTiming { rows: u32::MAX, compute_us: u64::MAX, ..Default::default() };
    let honest = prop_oneof![
        Just(From::Hello(hello())),
        Just(From::Ready(wire::Ready {})),
        Just(From::RouteReady(wire::RouteReady { epoch: 1, memory: 3 })),
        Just(From::Heartbeat(wire::Heartbeat { sent_us: u64::MAX, echo_us: u64::MAX })),
        Just(From::Activations(piece())),
        Just(From::StepDone(wire::StepDone {
            epoch: 1,
            step: 1,
            timing: Some(timing),
            ..Default::default()
        })),
        Just(From::StepFailed(wire::StepFailed { epoch: 1, step: 1, fault: None })),
        Just(From::Goodbye(wire::Goodbye { reason: 99, details: String::new() })),
    ];
    (honest, damage()).prop_map(|(message, damage)| {
        let bytes = spoil(wire::FromWorker { message: Some(message) }.encode_to_vec(), &damage);
        wire::FromWorker::decode(&bytes[..]).ok().and_then(|m| m.message)
    })
}

fn damage() -> impl Strategy<Value = Vec<(usize, u8)>> {
    proptest::collection::vec((any::<usize>(), any::<u8>()), 0..4)
}

fn spoil(mut bytes: Vec<u8>, damage: &[(usize, u8)]) -> Vec<u8> {
    for &(at, value) in damage {
        if let Some(n) = at.checked_rem(bytes.len()) {
            bytes[n] = value;
        }
    }
    bytes
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_worker_bears_any_coordinator(messages in proptest::collection::vec(to_worker(), 1..30)) {
        let mut core = Worker::new(Timing::default(), hello());
        let mut now = Duration::ZERO;
        let mut events = vec![work::Event::Tick, work::Event::Connected, work::Event::Message(To::Welcome(welcome()))];
        events.extend(messages.into_iter().flatten().map(work::Event::Message));
        for event in events {
            now += Duration::from_millis(10);
            let mut todo = core.handle(now, event);
            while let Some(action) = todo.pop() {
                match action {
                    work::Action::Load(_) => todo.extend(core.handle(now, work::Event::Loaded(Ok(())))),
                    work::Action::Restart { epoch } => {
                        todo.extend(core.handle(now, work::Event::Restarted { epoch, result: Ok(true) }));
                    }
                    work::Action::Run { step, rows } => {
                        // What reaches the stage is whole, and within what was agreed.
                        let count: u32 = step.segments.iter().map(|s| s.rows).sum();
                        prop_assert!(count <= 8, "{count} rows");
                        prop_assert_eq!(rows.iter().map(Bytes::len).sum::<usize>(), (count * WIDTH * 4) as usize);
                    }
                    _ => {}
                }
            }
        }
    }

    #[test]
    fn a_coordinator_bears_any_worker(messages in proptest::collection::vec(from_worker(), 1..30)) {
        let mut core = Coordinator::new(coord::Config {
            timing: Timing::default(),
            layers: 2,
            spans: vec![LayerSlice::parse("1:output", 2).expect("slice")],
            sizes: Box::new(|_| (8, 8)),
            fingerprint: Box::new(|_| [7; 32]),
            welcome: welcome(),
        });
        let mut now = Duration::ZERO;
        core.handle(now, coord::Event::Opened { link: 1, peer: "10.0.0.1:5".into() });
        let honest = [
            From::Hello(hello()),
            From::Ready(wire::Ready {}),
            From::RouteReady(wire::RouteReady { epoch: 1, memory: 3 }),
        ];
        for message in honest {
            core.handle(now, coord::Event::Message { link: 1, message });
        }
        core.handle(now, coord::Event::Submit { span: 0, step: step(), rows: vec![0; 32].into() });
        for message in messages.into_iter().flatten() {
            now += Duration::from_millis(10);
            core.handle(now, coord::Event::Message { link: 1, message });
            core.handle(now, coord::Event::Tick);
            core.status(now);
        }
    }

    #[test]
    fn any_bytes_decode_or_are_refused(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        drop(wire::FromWorker::decode(&bytes[..]));
        drop(wire::ToWorker::decode(&bytes[..]));
        drop(wire::Activations::decode(&bytes[..]));
    }
}
