//! Several processes on loopback compute what one process computes.

mod common;

use std::time::Duration;

use common::{Process, ROWS, Tiny, coordinator, security, soon, tiny};
use ds4_cluster::activation::Format;
use ds4_engine::{Choose, Mark, Pipeline, RowResult, StateOp, Step, StepOutput, Want};
use ds4_model::{Batch, KvLayout, Outputs};

#[test]
#[ignore = "run by the other tests in a process of its own"]
fn worker_process() {
    common::serve_from_environment();
}

const PROMPT: usize = 300;
const LIMIT: Duration = Duration::from_secs(60);

/// Steps that evaluate `ids` from position 0 in chunks, all logits wanted.
fn steps(ids: &[u32], chunk: usize) -> Vec<Step> {
    let pages: Vec<u32> = (0..KvLayout::pages_for(ids.len()) as u32).collect();
    let (mut mark, mut steps) = (Mark::default(), Vec::new());
    for run in ids.chunks(chunk) {
        let mut step = Step::default();
        if mark.pos == 0 {
            let pages = pages.clone();
            step.before = vec![StateOp::Reset { slot: 0 }, StateOp::SetPages { slot: 0, first: 0, pages }];
        }
        step.batch = Batch::new();
        step.batch.push(0, mark.pos, run, Outputs::All);
        step.marks = vec![mark];
        step.wants = vec![Want { choose: Choose::Logits, top: 0 }; run.len()];
        mark = mark.extend(run);
        steps.push(step);
    }
    steps
}

fn logits(output: &StepOutput) -> Vec<f32> {
    let row = |r: &RowResult| match r {
        RowResult::Logits(values) => values.clone(),
        RowResult::Token(t) => panic!("{t:?} instead of logits"),
    };
    output.rows.iter().flat_map(row).collect()
}

/// Runs the steps with as many in flight as the pipeline takes.
fn run(pipeline: &mut Pipeline, steps: &[Step]) -> Vec<f32> {
    let (mut all, mut next) = (Vec::new(), steps.iter());
    loop {
        while pipeline.in_flight() < pipeline.depth() {
            let Some(step) = next.next() else { break };
            pipeline.submit(step.clone()).expect("taken");
        }
        if pipeline.in_flight() == 0 {
            return all;
        }
        all.extend(logits(&pipeline.collect(LIMIT).expect("runs")));
    }
}

/// Logits of `steps` over workers, and the cluster's parts.
fn over(
    tiny: &Tiny,
    local: Option<&str>,
    workers: &[&str],
    direct: bool,
    format: Format,
    steps: &[Step],
) -> Vec<f32> {
    let serve = tiny.serve(local, format);
    let (cluster, stages) = coordinator(tiny, &serve, security(false));
    let _workers: Vec<Process> =
        workers.iter().map(|l| Process::worker(cluster.address(), l, direct)).collect();
    let mut pipeline = Pipeline::new(stages).expect("a pipeline");
    pipeline.restart(soon(30)).expect("a whole route");
    run(&mut pipeline, steps)
}

#[test]
fn logits_do_not_depend_on_the_number_of_stages() {
    let tiny = tiny();
    let ids = &ds4_testdata::prompt_ids()[..PROMPT];
    let steps = steps(ids, ROWS);
    let expected = run(&mut tiny.alone(), &steps);
    assert_eq!(expected.len(), PROMPT * tiny.hyper.vocab);
    for (local, workers, direct) in [
        (Some("0:2"), &["3:output"][..], false),
        (Some("4:output"), &["0:3"], false),
        (None, &["0:output"], false),
        (Some("2:3"), &["0:1", "4:output"], false),
        (Some("0:1"), &["2:3", "4:output"], true),
        (None, &["0:0", "1:1", "2:3", "4:4", "5:output"], false),
        (None, &["0:0", "1:1", "2:3", "4:4", "5:output"], true),
    ] {
        let found = over(&tiny, local, workers, direct, Format::Bits32, &steps);
        let same = found.iter().map(|v| v.to_bits()).eq(expected.iter().map(|v| v.to_bits()));
        assert!(same, "{local:?} and {workers:?}, direct {direct}: logits differ from one process");
    }
}

/// Mean negative log-likelihood of the next token.
fn loss(logits: &[f32], ids: &[u32], vocab: usize) -> f64 {
    let rows = logits.chunks(vocab).zip(&ids[1..]);
    let nll = rows.map(|(row, &next)| {
        let max = row.iter().fold(f32::NEG_INFINITY, |m, v| m.max(*v));
        let sum: f64 = row.iter().map(|v| f64::from(v - max).exp()).sum();
        f64::from(max) + sum.ln() - f64::from(row[next as usize])
    });
    nll.sum::<f64>() / (ids.len() - 1) as f64
}

#[test]
fn narrow_activations_keep_the_perplexity() {
    let tiny = tiny();
    let ids = &ds4_testdata::prompt_ids()[..PROMPT];
    let steps = steps(ids, ROWS);
    let vocab = tiny.hyper.vocab;
    let exact = loss(&run(&mut tiny.alone(), &steps), ids, vocab).exp();
    for (format, allowed) in [(Format::Bits16, 0.001), (Format::Bits8, 0.005)] {
        let found = loss(&over(&tiny, Some("0:2"), &["3:output"], false, format, &steps), ids, vocab).exp();
        let change = (found / exact - 1.0).abs();
        println!(
            "{} bits: perplexity {found:.3}, one process {exact:.3}, change {:.4} %",
            format.bits(),
            change * 100.0
        );
        assert!(change <= allowed, "{format:?}: perplexity {found}, one process {exact}");
    }
}

#[test]
fn state_moves_between_one_machine_and_several() {
    let tiny = tiny();
    let ids = &ds4_testdata::prompt_ids()[..PROMPT];
    let steps = steps(ids, 50);
    let (first, rest) = steps.split_at(3);
    let expected = run(&mut tiny.alone(), &steps);
    let pages = KvLayout::pages_for(150) as u32;
    let read = Step {
        before: vec![StateOp::SaveCheckpoint { slot: 0, id: 1 }, StateOp::ReadCheckpoint { id: 1 }]
            .into_iter()
            .chain((0..pages).map(|page| StateOp::ReadPage { page }))
            .collect(),
        ..Step::default()
    };
    let mark = Mark::default().extend(&ids[..150]);
    let write = |reads: &[Vec<u8>]| {
        let bytes = |i: usize| std::sync::Arc::from(&reads[i][..]);
        let mut before = vec![StateOp::WriteCheckpoint { id: 2, mark, bytes: bytes(0) }];
        before.extend((0..pages).map(|page| StateOp::WritePage { page, bytes: bytes(page as usize + 1) }));
        before.push(StateOp::LoadCheckpoint { slot: 0, id: 2 });
        let all: Vec<u32> = (0..KvLayout::pages_for(PROMPT) as u32).collect();
        before.push(StateOp::SetPages { slot: 0, first: 0, pages: all });
        Step { before, ..Step::default() }
    };
    let skip: usize = 150 * tiny.hyper.vocab;
    let bits = |v: &[f32]| v.iter().map(|x| x.to_bits()).collect::<Vec<u32>>();

    // Taken here, loaded on a split of three: the coordinator and a span of two nodes.
    let mut alone = tiny.alone();
    run(&mut alone, first);
    alone.submit(read.clone()).expect("taken");
    let taken_here = alone.collect(LIMIT).expect("read").reads;
    let serve = tiny.serve(Some("0:1"), Format::Bits32);
    let (cluster, stages) = coordinator(&tiny, &serve, security(false));
    let _workers: Vec<Process> =
        ["2:3", "4:output"].iter().map(|l| Process::worker(cluster.address(), l, true)).collect();
    let mut split = Pipeline::new(stages).expect("a pipeline");
    split.restart(soon(30)).expect("a whole route");
    split.submit(write(&taken_here)).expect("taken");
    split.collect(LIMIT).expect("written");
    assert!(bits(&run(&mut split, rest)) == bits(&expected[skip..]), "one machine to several");

    // And the other way round.
    run(&mut split, first);
    split.submit(read).expect("taken");
    let taken_there = split.collect(LIMIT).expect("read").reads;
    // The frontier and the full page; rows of the last page that no token has written hold anything.
    assert!(taken_there[..2] == taken_here[..2], "the same bytes, wherever they were made");
    let mut alone = tiny.alone();
    alone.submit(write(&taken_there)).expect("taken");
    alone.collect(LIMIT).expect("written");
    assert!(bits(&run(&mut alone, rest)) == bits(&expected[skip..]), "several machines to one");
}
