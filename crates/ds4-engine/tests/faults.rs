//! Whatever fails, a request ends complete or with a typed error, and the next one is right.

mod common;

use std::sync::Arc;
use std::time::{Duration, Instant};

use common::*;
use ds4_engine::*;
use ds4_model::BackendError;

struct Bench {
    handle: EngineHandle,
    seen: Seen,
    faults: Faults,
    cold: Cold,
}

fn bench(slots: usize, config: EngineConfig) -> Bench {
    let (seen, faults) = (Seen::default(), Faults::default());
    let inner = stage(None, limits(1024, 32, slots, 16), 8);
    let spy = Spy::with_faults(inner, seen.clone(), faults.clone());
    Bench { handle: engine(config, vec![Box::new(spy)]), seen, faults, cold: Cold::new(1024) }
}

fn out_of_memory() -> StageFault {
    BackendError::OutOfMemory {
        device: "test".into(),
        what: "activations".into(),
        needed: 4096,
        available: 1024,
    }
    .into()
}

fn fault(after: usize, fault: StageFault) -> Fault {
    Fault { after, fault, silent: false, done: false, failing_restarts: 0, survived: Survived::State }
}

fn prompt(n: usize) -> Vec<u32> {
    ds4_testdata::prompt_ids()[..n].to_vec()
}

fn lost() -> StageFault {
    StageFault::Unreachable { silent: Duration::from_secs(3), reason: "no heartbeat".into() }
}

#[test]
fn a_failed_step_fails_its_request_by_name_and_the_next_is_right() {
    let mut b = bench(1, EngineConfig::default());
    // Prefill of 5 steps, then decode: struck at each of them.
    for after in [0, 3, 5, 7] {
        for done in [false, true] {
            for survived in [Survived::State, Survived::Nothing] {
                *b.faults.lock().unwrap() = Some(Fault { done, survived, ..fault(after, out_of_memory()) });
                let got =
                    b.handle.submit(Request { cache: false, ..request(&prompt(130), 6) }).unwrap().wait();
                let Err(EngineError::Stage(e)) = got else { panic!("step {after}: {got:?}") };
                assert!(e.to_string().contains("out of memory for activations: 4096 bytes needed"), "{e}");
                let next = b.handle.submit(request(&prompt(130), 3)).unwrap().wait().unwrap();
                assert_eq!(next.tokens.len(), 3);
                check_cold(&b.seen, &mut b.cold);
            }
        }
    }
    assert_eq!(b.handle.health(), Health::Ready);
    assert_eq!(b.handle.status().counters.restarts, 16);
}

#[test]
fn a_lost_stage_that_comes_back_is_not_noticed_in_the_answer() {
    let mut b = bench(2, EngineConfig::default());
    let want: Vec<_> =
        [140, 90].map(|n| b.handle.submit(request(&prompt(n), 20)).unwrap().wait().unwrap().tokens).into();
    for survived in [Survived::State, Survived::Nothing] {
        for after in [0, 5, 12] {
            let f = Fault { survived, failing_restarts: 3, ..fault(after, lost()) };
            *b.faults.lock().unwrap() = Some(f);
            let fresh = |n| Request { cache: after % 2 == 0, ..request(&prompt(n), 20) };
            let both = [140, 90].map(|n| b.handle.submit(fresh(n)).unwrap());
            for (g, want) in both.into_iter().zip(&want) {
                assert_eq!(&g.wait().unwrap().tokens, want, "lost at step {after}");
            }
            check_cold(&b.seen, &mut b.cold);
            *b.faults.lock().unwrap() = None;
        }
    }
}

#[test]
fn a_stage_that_stays_away_fails_requests_in_time() {
    let b = bench(1, EngineConfig { resume_wait: Duration::from_millis(200), ..EngineConfig::default() });
    *b.faults.lock().unwrap() = Some(Fault { failing_restarts: usize::MAX, ..fault(3, lost()) });
    let from = Instant::now();
    let got = b.handle.submit(request(&prompt(130), 6)).unwrap().wait();
    assert!(matches!(&got, Err(EngineError::Stage(e)) if e.fault == lost()), "{got:?}");
    assert!(from.elapsed() < Duration::from_secs(10));
    let refused = b.handle.submit(request(&prompt(10), 1));
    assert!(
        matches!(&refused, Err(Rejected::Unavailable { reason, .. }) if reason.contains("no heartbeat")),
        "{refused:?}"
    );
    // And when it is back, all is well.
    if let Some(f) = b.faults.lock().unwrap().as_mut() {
        f.failing_restarts = 0;
    }
    wait_ready(&b.handle);
    assert_eq!(b.handle.submit(request(&prompt(10), 2)).unwrap().wait().unwrap().tokens.len(), 2);
}

#[test]
fn a_dead_device_is_a_faulted_engine() {
    let b = bench(1, EngineConfig::default());
    let dead: StageFault =
        BackendError::DeviceLost { device: "test".into(), what: "attend".into(), reason: "gone".into() }
            .into();
    *b.faults.lock().unwrap() = Some(Fault { failing_restarts: usize::MAX, ..fault(1, dead) });
    let got = b.handle.submit(request(&prompt(130), 6)).unwrap().wait();
    assert!(matches!(got, Err(EngineError::Stage(_))), "{got:?}");
    let until = Instant::now() + Duration::from_secs(5);
    while !matches!(b.handle.health(), Health::Faulted { .. }) {
        assert!(Instant::now() < until);
        std::thread::sleep(Duration::from_millis(2));
    }
    assert!(matches!(b.handle.submit(request(&prompt(10), 1)), Err(Rejected::Faulted { .. })));
}

#[test]
fn a_step_that_never_ends_is_noticed() {
    let b = bench(1, EngineConfig { step_limit: Duration::from_secs(4), ..EngineConfig::default() });
    *b.faults.lock().unwrap() = Some(Fault { silent: true, ..fault(0, out_of_memory()) });
    let got = b.handle.submit(request(&prompt(100), 2)).unwrap().wait();
    assert!(
        matches!(&got, Err(EngineError::Stage(e)) if matches!(e.fault, StageFault::Deadline { .. })),
        "{got:?}"
    );
    assert_eq!(b.handle.submit(request(&prompt(20), 2)).unwrap().wait().unwrap().tokens.len(), 2);
}

#[test]
fn bad_numbers_never_become_an_answer() {
    // A kept frontier full of NaN, as a broken device would leave it.
    let limits = limits(256, 16, 1, 4);
    let setup = setup(None, limits, ds4_model::RowFormat::F32, ds4_model::Numerics::PLAIN_EXACT);
    let bytes: Arc<[u8]> = f32::NAN.to_le_bytes().repeat(setup.layout.frontier_bytes / 4).into();
    let mut machine = Machine::load("test", 2, move || {
        ds4_model::Model::load(&open(), setup.clone(), ds4_reference::Reference::default(), &mut |_| ())
    })
    .unwrap();
    let mark = Mark { pos: 16, prefix: 7 };
    let pages: Vec<u32> = vec![0];
    for outputs in [ds4_model::Outputs::Last, ds4_model::Outputs::None] {
        let mut step = Step {
            before: vec![
                StateOp::WriteCheckpoint { id: 0, mark, bytes: bytes.clone() },
                StateOp::LoadCheckpoint { slot: 0, id: 0 },
                StateOp::SetPages { slot: 0, first: 0, pages: pages.clone() },
            ],
            marks: vec![mark],
            ..Step::default()
        };
        step.batch.push(0, 16, &[1, 2, 3], outputs);
        if outputs == ds4_model::Outputs::Last {
            step.wants.push(Want { choose: Choose::Sample(Sampling::greedy()), top: 0 });
        }
        let error = machine.run(&step, None).unwrap_err();
        assert!(matches!(error.fault, StageFault::Backend(BackendError::NotFinite { .. })), "{error}");
    }
    // The slot is unknown now; a step that continues it is refused.
    let mut step = Step { marks: vec![mark.extend(&[1, 2, 3])], ..Step::default() };
    step.batch.push(0, 19, &[1], ds4_model::Outputs::None);
    assert!(matches!(machine.run(&step, None).unwrap_err().fault, StageFault::Step(_)));
}

#[test]
fn a_stage_out_of_step_says_so() {
    let limits = limits(256, 16, 1, 4);
    let setup = setup(None, limits, ds4_model::RowFormat::F32, ds4_model::Numerics::PLAIN_EXACT);
    let mut machine = Machine::load("test", 2, move || {
        ds4_model::Model::load(&open(), setup.clone(), ds4_reference::Reference::default(), &mut |_| ())
    })
    .unwrap();
    let mut step = Step {
        before: vec![StateOp::Reset { slot: 0 }, StateOp::SetPages { slot: 0, first: 0, pages: vec![0] }],
        marks: vec![Mark::default()],
        ..Step::default()
    };
    step.batch.push(0, 0, &[1, 2, 3], ds4_model::Outputs::None);
    machine.run(&step, None).unwrap();
    let mut next = Step { marks: vec![Mark::default().extend(&[1, 2, 4])], ..Step::default() };
    next.batch.push(0, 3, &[5], ds4_model::Outputs::None);
    let error = machine.run(&next, None).unwrap_err();
    assert!(matches!(error.fault, StageFault::OutOfStep { slot: 0, .. }), "{error}");
}

#[test]
fn limits_are_kept() {
    let b = bench(1, EngineConfig { queue_limit: 2, ..EngineConfig::default() });
    let long = prompt(700);
    let _running = b.handle.submit(request(&long, 20)).unwrap();
    let mut held = Vec::new();
    let refused = loop {
        match b.handle.submit(request(&prompt(20), 1)) {
            Ok(g) => held.push(g),
            Err(e) => break e,
        }
        assert!(held.len() <= 3);
    };
    assert!(matches!(refused, Rejected::QueueFull { limit: 2, .. }), "{refused:?}");
    assert!(matches!(
        b.handle.submit(request(&vec![1; 1024], 1)),
        Err(Rejected::ContextExceeded { prompt: 1024, context: 1024 })
    ));
    assert!(matches!(b.handle.submit(request(&[], 1)), Err(Rejected::Invalid { field: "prompt", .. })));
    assert!(matches!(b.handle.submit(request(&[99_999], 1)), Err(Rejected::Invalid { field: "prompt", .. })));
    // A deadline that passes in the queue.
    let late = Request { deadline: Some(Instant::now()), ..request(&prompt(20), 1) };
    held.clear();
    let until = Instant::now() + Duration::from_secs(20);
    let got = loop {
        match b.handle.submit(late.clone()) {
            Ok(g) => break g.wait(),
            Err(Rejected::QueueFull { .. }) if Instant::now() < until => {
                std::thread::sleep(Duration::from_millis(5))
            }
            Err(e) => panic!("{e}"),
        }
    };
    assert_eq!(got, Err(EngineError::DeadlineExceeded));
}

#[test]
fn draining_ends_what_runs_and_refuses_the_rest() {
    let b = bench(1, EngineConfig::default());
    let mut running = b.handle.submit(request(&prompt(60), 5)).unwrap();
    while !matches!(running.next_blocking(), Some(Event::Prefill { .. })) {}
    b.handle.drain(Duration::from_secs(30));
    assert_eq!(running.wait().unwrap().tokens.len(), 5);
    let until = Instant::now() + Duration::from_secs(5);
    while b.handle.health() != Health::Ended {
        assert!(Instant::now() < until);
        std::thread::sleep(Duration::from_millis(2));
    }
    assert!(matches!(b.handle.submit(request(&prompt(10), 1)), Err(Rejected::ShuttingDown)));
}
