//! Nothing is computed twice, and what is reused is right: every row is compared with a cold run, bit for bit.

mod common;

use common::*;
use ds4_engine::*;

const CONTEXT: usize = 2048;

struct Bench {
    handle: EngineHandle,
    seen: Seen,
    cold: Cold,
}

impl Bench {
    fn new(rows: usize, slots: usize, checkpoints: usize) -> Self {
        let seen = Seen::default();
        let inner = stage(None, limits(CONTEXT, rows, slots, 64), checkpoints);
        let stages: Vec<Box<dyn Stage>> = vec![Box::new(Spy::new(inner, seen.clone()))];
        Bench { handle: engine(EngineConfig::default(), stages), seen, cold: Cold::new(CONTEXT) }
    }

    /// Runs a request to its end; every row it took is checked.
    fn run(&mut self, request: Request) -> Completion {
        let done = self.handle.submit(request).expect("taken").wait().expect("complete");
        assert!(check_cold(&self.seen, &mut self.cold) > 0);
        done
    }
}

fn prompt(n: usize) -> Vec<u32> {
    ds4_testdata::prompt_ids()[..n].to_vec()
}

#[test]
fn greedy_follows_the_goldens() {
    let mut b = Bench::new(64, 1, 8);
    let ids = prompt(300);
    let done = b.run(request(&ids, 4));
    let (_, golden) = ds4_testdata::npy_f32("logits_plain.npy");
    let vocab = golden.len() / 700;
    let row = &golden[299 * vocab..300 * vocab];
    let best = (0..vocab).max_by(|&a, &b| row[a].total_cmp(&row[b])).unwrap();
    assert_eq!(done.tokens[0].token as usize, best);
    assert_eq!((done.reason, done.usage.completion_tokens), (FinishReason::Length, 4));
}

#[test]
fn a_repeat_evaluates_one_row() {
    let mut b = Bench::new(64, 1, 8);
    let ids = prompt(300);
    let first = b.run(request(&ids, 5));
    assert_eq!(first.usage.reused_tokens, 0);
    for n in [5, 3, 7] {
        let again = b.run(request(&ids, n));
        assert_eq!(again.usage.reused_tokens, 299);
        let both = n.min(5);
        assert_eq!(again.tokens[..both], first.tokens[..both]);
    }
}

#[test]
fn the_next_turn_evaluates_what_is_new() {
    let mut b = Bench::new(64, 1, 16);
    let ids = prompt(200);
    let first = b.run(request(&ids, 20));
    let mut next = ids.clone();
    next.extend(first.ids());
    let answered = next.len();
    next.extend(&prompt(400)[360..]);
    let second = b.run(request(&next, 5));
    // All but the last sampled token had been evaluated.
    assert_eq!(second.usage.reused_tokens, answered - 1);
}

#[test]
fn an_edited_message_costs_what_comes_after_its_boundary() {
    let mut b = Bench::new(64, 1, 16);
    let ids = prompt(700);
    let with = |ids: &[u32]| Request { boundaries: vec![300, 600], ..request(ids, 3) };
    b.run(with(&ids));
    let mut edited = ids.clone();
    edited[620] = (edited[620] + 1) % 500;
    assert_eq!(b.run(with(&edited)).usage.reused_tokens, 600);
    let mut edited = ids.clone();
    edited[310] = (edited[310] + 1) % 500;
    assert_eq!(b.run(with(&edited)).usage.reused_tokens, 300);
}

#[test]
fn two_sessions_in_turn_keep_their_state() {
    let mut b = Bench::new(64, 1, 16);
    let mut histories = [prompt(150), ds4_testdata::prompt_ids()[300..460].to_vec()];
    for turn in 0..4 {
        for history in &mut histories {
            let done = b.run(request(history, 10));
            assert_eq!(done.usage.reused_tokens > 0, turn > 0);
            if turn > 0 {
                // The last answer's last token, and the 7 new ones.
                assert_eq!(history.len() - done.usage.reused_tokens, 8);
            }
            history.extend(done.ids());
            history.extend([5, 6, 7, 8, 9, 10, 11]);
        }
    }
}

#[test]
fn sessions_at_once_give_what_each_gives_alone() {
    let prompts: Vec<Vec<u32>> =
        (0..6).map(|i| ds4_testdata::prompt_ids()[i * 40..i * 90 + 30].to_vec()).collect();
    let mut alone = Bench::new(32, 1, 4);
    let want: Vec<_> = prompts.iter().map(|p| alone.run(request(p, 12)).tokens).collect();
    let mut b = Bench::new(32, 4, 4);
    let running: Vec<_> = prompts.iter().map(|p| b.handle.submit(request(p, 12)).unwrap()).collect();
    for (g, want) in running.into_iter().zip(want) {
        assert_eq!(g.wait().unwrap().tokens, want);
    }
    assert!(check_cold(&b.seen, &mut b.cold) >= 72);
}

#[test]
fn choices_of_one_prompt_evaluate_it_once() {
    let b = Bench::new(64, 4, 8);
    let ids = prompt(400);
    let choice = |seed| Request {
        sampling: SamplingParams { temperature: 1.0, seed, ..SamplingParams::default() },
        ..request(&ids, 6)
    };
    let running: Vec<_> = (0..4).map(|seed| b.handle.submit(choice(seed)).unwrap()).collect();
    let answers: Vec<_> = running.into_iter().map(|g| g.wait().unwrap()).collect();
    assert!(answers[1..].iter().all(|a| a.usage.reused_tokens == 399));
    assert!(answers[1..].iter().any(|a| a.ids() != answers[0].ids()));
    // A seed gives the same answer whatever ran beside it.
    let again = b.handle.submit(choice(2)).unwrap().wait().unwrap();
    assert_eq!(again.tokens, answers[2].tokens);
}

#[test]
fn a_cancelled_request_stops_and_its_work_stays() {
    let b = Bench::new(16, 1, 8);
    let ids = prompt(700);
    let with = || Request { boundaries: vec![350], ..request(&ids, 2) };
    let mut g = b.handle.submit(with()).unwrap();
    while let Some(e) = g.next_blocking() {
        if matches!(e, Event::Prefill { done, .. } if done >= 100) {
            break;
        }
    }
    drop(g);
    let done = b.handle.submit(with()).unwrap().wait().unwrap();
    assert!((100..=200).contains(&done.usage.reused_tokens), "{:?}", done.usage);
    assert_eq!(b.handle.status().counters.requests_cancelled, 1);
}

#[test]
fn prompt_log_probabilities_are_those_of_the_rows() {
    let mut b = Bench::new(16, 1, 4);
    let ids = prompt(50);
    let mut g = b.handle.submit(Request { prompt_logprobs: true, ..request(&ids, 1) }).unwrap();
    let mut told = Vec::new();
    while let Some(e) = g.next_blocking() {
        if let Event::Prompt { first, tokens } = e {
            assert_eq!(first, told.len() + 1);
            told.extend(tokens);
        }
    }
    assert_eq!(told.iter().map(|c| c.token).collect::<Vec<_>>(), ids[1..]);
    assert_eq!(check_cold(&b.seen, &mut b.cold), 50);
}

#[test]
fn several_stages_compute_what_one_computes() {
    let ids = prompt(260);
    let mut one = Bench::new(32, 2, 8);
    let want = one.run(request(&ids, 8));
    for slices in [vec!["0:2", "3:output"], vec!["0:0", "1:1", "2:3", "4:4", "5:output"]] {
        let n = slices.len();
        let mut stages: Vec<Box<dyn Stage>> = Vec::new();
        let seen = Seen::default();
        for (i, slice) in slices.iter().enumerate() {
            let s = stage(Some(slice), limits(CONTEXT, 32, 2, 64), 8);
            match i + 1 == n {
                true => stages.push(Box::new(Spy::new(s, seen.clone()))),
                false => stages.push(Box::new(s)),
            }
        }
        let handle = engine(EngineConfig::default(), stages);
        let both: Vec<_> = (0..2).map(|_| handle.submit(request(&ids, 8)).unwrap()).collect();
        for g in both {
            assert_eq!(g.wait().unwrap().tokens, want.tokens);
        }
        assert_eq!(handle.submit(request(&ids, 8)).unwrap().wait().unwrap().usage.reused_tokens, 259);
        assert!(check_cold(&seen, &mut one.cold) >= 24);
    }
}
