//! Sessions beside each other: nobody starves, and k rows may be tried and taken back.

mod common;

use std::time::{Duration, Instant};

use common::*;
use ds4_engine::*;
use ds4_model::{Model, Numerics, Outputs, RowFormat};
use ds4_reference::Reference;

#[test]
fn a_long_prompt_does_not_starve_short_ones() {
    let handle = engine(EngineConfig::default(), vec![Box::new(stage(None, limits(1024, 32, 4, 16), 16))]);
    let ids = ds4_testdata::prompt_ids();
    let long = handle.submit(request(&ids[..690], 1)).unwrap();
    let short: Vec<_> =
        (0..12).map(|i| handle.submit(request(&ids[i * 20..i * 20 + 5], 2)).unwrap()).collect();
    let from = Instant::now();
    let watch = std::thread::spawn(move || {
        long.wait().unwrap();
        from.elapsed()
    });
    let mut times: Vec<Duration> = short
        .into_iter()
        .map(|g| {
            let usage = g.wait().unwrap().usage;
            usage.queued + usage.prefill
        })
        .collect();
    times.sort();
    let long = watch.join().unwrap();
    assert!(times[11] < long, "last short {:?}, long {long:?}", times[11]);
}

#[test]
fn a_slow_reader_pauses_alone() {
    let handle = engine(EngineConfig::default(), vec![Box::new(stage(None, limits(1024, 32, 2, 16), 16))]);
    let ids = ds4_testdata::prompt_ids();
    let slow = handle.submit(request(&ids[..5], 400)).unwrap();
    let quick = handle.submit(request(&ids[20..40], 20)).unwrap().wait().unwrap();
    assert_eq!(quick.tokens.len(), 20);
    let until = Instant::now() + Duration::from_secs(60);
    let generated = |h: &EngineHandle| h.status().sessions.first().map_or(0, |s| s.generated);
    while generated(&handle) < 240 {
        assert!(Instant::now() < until);
        std::thread::sleep(Duration::from_millis(10));
    }
    std::thread::sleep(Duration::from_millis(300));
    // Events that nobody reads are limited, and nothing of them is lost.
    assert!(generated(&handle) < 256, "{}", generated(&handle));
    assert_eq!(slow.wait().unwrap().tokens.len(), 400);
}

/// Speculation's place: k rows are evaluated in one step, and any number of them taken back.
#[test]
fn k_rows_are_tried_and_rolled_back_to_any_of_them() {
    let limits = limits(512, 64, 1, 4);
    let setup = setup(None, limits, RowFormat::F32, Numerics::PLAIN_EXACT);
    let mut machine = Machine::load("test", 1, move || {
        Model::load(&open(), setup.clone(), Reference::default(), &mut |_| ())
    })
    .unwrap();
    let ids = ds4_testdata::prompt_ids();
    let mut cold = Cold::new(512);
    let all = |n: usize| vec![Want { choose: Choose::Logits, top: 0 }; n];
    let mut run = |before: Vec<StateOp>, from: usize, tokens: &[u32]| {
        let mut step = Step { before, marks: vec![Mark::default().extend(&ids[..from])], ..Step::default() };
        step.batch.push(0, from, tokens, Outputs::All);
        step.wants = all(tokens.len());
        machine.run(&step, None).unwrap().rows
    };
    // Just before a compressed row of ratio 128, so that rolling back crosses it.
    let at = 125;
    let pages = StateOp::SetPages { slot: 0, first: 0, pages: vec![0, 1] };
    run(vec![StateOp::Reset { slot: 0 }, pages.clone()], 0, &ids[..64]);
    run(vec![], 64, &ids[64..at]);
    let save = StateOp::SaveCheckpoint { slot: 0, id: 0 };
    let back = [StateOp::LoadCheckpoint { slot: 0, id: 0 }, pages];
    let drafted: Vec<u32> = (0..8).map(|i| (i * 37 + 5) as u32).collect();
    let mut first = Some(save);
    for accepted in [3, 0, 8, 5] {
        // The draft, then back, then what was accepted of it and another token.
        let before = first.take().map_or(back.to_vec(), |s| vec![s]);
        run(before, at, &drafted);
        let tokens = [&drafted[..accepted], &ids[300..301]].concat();
        let rows = run(back.to_vec(), at, &tokens);
        for (n, row) in rows.into_iter().enumerate() {
            let RowResult::Logits(logits) = row else { panic!() };
            let prefix = [&ids[..at], &tokens[..=n]].concat();
            let want = cold.logits(&prefix);
            assert!(want.iter().zip(&logits).all(|(a, b)| a.to_bits() == b.to_bits()), "{accepted} {n}");
        }
    }
}

#[test]
fn a_device_that_computes_wrong_does_not_serve() {
    let ids = ds4_testdata::prompt_ids();
    let (_, golden) = ds4_testdata::npy_f32("logits_plain.npy");
    let vocab = golden.len() / 700;
    let row = &golden[23 * vocab..24 * vocab];
    let norm = row.iter().map(|&l| f64::from(l).exp()).sum::<f64>().ln() as f32;
    let mut expected: Vec<(u32, f32)> = row.iter().enumerate().map(|(t, l)| (t as u32, l - norm)).collect();
    expected.sort_by(|a, b| b.1.total_cmp(&a.1));
    expected.truncate(5);
    let start = |test: SelfTest| {
        let config = EngineConfig { self_test: Some(test), ..EngineConfig::default() };
        let stages: Vec<Box<dyn Stage>> = vec![Box::new(stage(None, limits(256, 32, 1, 4), 2))];
        Engine::start(config, tokenizer(), move || Pipeline::new(stages)).unwrap()
    };
    let good = SelfTest { tokens: ids[..24].to_vec(), expected: expected.clone(), tolerance: 0.01 };
    for test in [good.clone(), SelfTest::consistency(vocab)] {
        let handle = start(test);
        wait_ready(&handle);
        assert_eq!(handle.submit(request(&ids[..30], 3)).unwrap().wait().unwrap().tokens.len(), 3);
    }
    let mut wrong = good;
    wrong.expected[1].1 += 0.5;
    let handle = start(wrong);
    let until = Instant::now() + Duration::from_secs(20);
    let reason = loop {
        match handle.health() {
            Health::Faulted { reason } => break reason,
            h => assert!(Instant::now() < until, "{h:?}"),
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    assert!(reason.contains("self-test"), "{reason}");
    assert!(matches!(handle.submit(request(&ids[..30], 3)), Err(Rejected::Faulted { .. })));
}
