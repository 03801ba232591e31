//! Random histories of turns, rewinds, forks, edits, cancellations, evictions and failures: every row that the engine
//! ever computed is compared with a cold run, bit for bit.

mod common;

use std::time::Duration;

use common::*;
use ds4_engine::*;
use ds4_testdata::Rng;

const CONTEXT: usize = 640;

fn histories(seed: u64, operations: usize) {
    let mut rng = Rng(seed);
    let (seen, faults) = (Seen::default(), Faults::default());
    // Few pages and checkpoints: something is evicted all the time.
    let slots = 1 + rng.below(3);
    let rows = [7, 16, 40][rng.below(3)];
    let inner = stage(None, limits(CONTEXT, rows, slots, rng.below(4)), 3 + rng.below(6));
    let spy = Spy::with_faults(inner, seen.clone(), faults.clone());
    let handle = engine(EngineConfig::default(), vec![Box::new(spy)]);
    let mut cold = Cold::new(CONTEXT);
    let base = ds4_testdata::prompt_ids();
    let mut lines: Vec<Vec<u32>> = vec![base[..130].to_vec(), base[200..460].to_vec()];
    let mut running: Vec<(Generation, Vec<u32>)> = Vec::new();
    let mut rows_checked = 0;
    for n in 0..operations {
        let at = rng.below(lines.len());
        let mut prompt = lines[at].clone();
        match rng.below(8) {
            // Another turn.
            0..3 => prompt.extend((0..1 + rng.below(12)).map(|_| rng.below(400) as u32)),
            // Rewind.
            3 => prompt.truncate(1 + rng.below(prompt.len())),
            // An edit.
            4 => {
                let place = rng.below(prompt.len());
                prompt[place] = rng.below(400) as u32;
            }
            // Something breaks during one of the next steps.
            5 if rng.below(4) == 0 => {
                let survived = if rng.below(2) == 0 { Survived::State } else { Survived::Nothing };
                let fault = match rng.below(2) {
                    0 => StageFault::Unreachable { silent: Duration::from_secs(1), reason: "test".into() },
                    _ => ds4_model::BackendError::NotFinite { device: "test".into(), what: "test".into() }
                        .into(),
                };
                let done = rng.below(2) == 0;
                let after = rng.below(12);
                *faults.lock().unwrap() =
                    Some(Fault { after, fault, silent: false, done, failing_restarts: 0, survived });
            }
            // The same again.
            _ => {}
        }
        if prompt.len() + 20 > CONTEXT {
            prompt.truncate(100);
        }
        let boundaries = if rng.below(2) == 0 { vec![prompt.len() / 2] } else { Vec::new() };
        let request = Request { boundaries, ..request(&prompt, 1 + rng.below(8)) };
        match handle.submit(request) {
            Ok(g) => running.push((g, prompt.clone())),
            Err(Rejected::Unavailable { .. }) => {}
            Err(e) => panic!("operation {n}: {e}"),
        }
        if rng.below(10) == 0 {
            // Dropped: cancelled somewhere on its way.
            running.pop();
        }
        while running.len() > rng.below(4) {
            let (g, mut tokens) = running.remove(0);
            match g.wait() {
                Ok(done) => {
                    tokens.extend(done.ids());
                    if lines.len() < 5 { lines.push(tokens) } else { lines[at] = tokens }
                }
                Err(EngineError::Stage(e)) => assert!(e.to_string().contains("test"), "{e}"),
                Err(e) => panic!("operation {n}: {e}"),
            }
            rows_checked += check_cold(&seen, &mut cold);
        }
        if n % 50 == 0 {
            cold.forget();
        }
    }
    drop(running);
    assert!(rows_checked > 0);
    // Once nothing runs, only checkpoints hold pages.
    let until = std::time::Instant::now() + Duration::from_secs(20);
    while !handle.status().sessions.is_empty() {
        assert!(std::time::Instant::now() < until);
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn every_row_of_random_histories_equals_a_cold_run() {
    // DS4_HISTORIES=10000 for a long run.
    let operations = std::env::var("DS4_HISTORIES").ok().and_then(|n| n.parse().ok()).unwrap_or(24);
    for seed in 0..4 {
        histories(seed, operations / 4);
    }
}
