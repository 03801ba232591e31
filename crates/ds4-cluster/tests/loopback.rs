//! Several processes on loopback compute what one process computes.

mod common;

use bytes::Bytes;
use common::{Process, ROWS, TinyStage, security, soon, start, tiny};
use ds4_cluster::coordinator::Cluster;
use ds4_cluster::core::coordinator::Up;
use ds4_cluster::core::ledger;
use ds4_cluster::host::Host;
use ds4_cluster::wire::{self, state_op::Op};
use ds4_model::KvLayout;

#[test]
#[ignore = "run by the other tests in a process of its own"]
fn worker_process() {
    common::serve_from_environment();
}

const PROMPT: usize = 300;

/// Steps that evaluate `ids` from position 0 in chunks, all logits wanted.
fn steps(ids: &[u32], chunk: usize) -> Vec<wire::Step> {
    let pages: Vec<u32> = (0..KvLayout::pages_for(ids.len()) as u32).collect();
    let (mut prefix, mut position, mut steps) = (0, 0u32, Vec::new());
    for run in ids.chunks(chunk) {
        let mut step = wire::Step::default();
        if position == 0 {
            let set = wire::SetPages { slot: 0, first: 0, pages: pages.clone() };
            step.before = [Op::Reset(0), Op::SetPages(set)].map(|op| wire::StateOp { op: Some(op) }).to_vec();
        }
        step.segments.push(wire::Segment { slot: 0, position, rows: run.len() as u32, prefix });
        step.tokens = run.iter().flat_map(|t| t.to_le_bytes()).collect();
        step.wants =
            (0..run.len() as u32).map(|row| wire::Want { row, logits: true, ..Default::default() }).collect();
        prefix = ledger::hash(prefix, run.iter().copied());
        position += run.len() as u32;
        steps.push(step);
    }
    steps
}

fn logits(outcome: &wire::Outcome) -> Vec<u8> {
    outcome.sampled.iter().flat_map(|s| s.logits.iter().copied()).collect()
}

fn one_process(steps: &[wire::Step]) -> Vec<u8> {
    let mut stage = TinyStage::new("0:output");
    stage.load(&tiny().welcome(32)).expect("loads");
    steps.iter().flat_map(|s| logits(&stage.run(s, Vec::new()).expect("runs").outcome)).collect()
}

/// Runs the steps through the route, the coordinator's own slice in this process. One step at a time.
fn through(cluster: &Cluster, up: &Up, local: &mut Option<TinyStage>, steps: &[wire::Step]) -> Vec<u8> {
    let mut all = Vec::new();
    for (i, step) in steps.iter().enumerate() {
        let (mut rows, mut outcome) = (Vec::<Bytes>::new(), wire::Outcome::default());
        for stage in &up.stages {
            match stage {
                None => {
                    let output = local
                        .as_mut()
                        .expect("local slice")
                        .run(step, std::mem::take(&mut rows))
                        .expect("runs");
                    rows = vec![output.rows];
                    outcome = output.outcome;
                }
                Some(span) => {
                    let step = wire::Step { epoch: up.epoch, number: i as u64 + 1, ..step.clone() };
                    cluster.submit(span.index, step, rows.concat().into());
                    let ended = cluster.next(span.index, up.epoch, soon(30)).expect("in time").expect("runs");
                    rows = ended.rows;
                    outcome = ended.outcome;
                }
            }
        }
        all.extend(logits(&outcome));
    }
    all
}

#[test]
fn logits_do_not_depend_on_the_number_of_stages() {
    let tiny = tiny();
    let ids = &ds4_testdata::prompt_ids()[..PROMPT];
    let steps = steps(ids, ROWS as usize);
    let expected = one_process(&steps);
    assert_eq!(expected.len(), PROMPT * tiny.hyper.vocab * 4);
    for (local, workers, direct) in [
        (Some("0:2"), &["3:output"][..], false),
        (Some("4:output"), &["0:3"], false),
        (None, &["0:output"], false),
        (Some("2:3"), &["0:1", "4:output"], false),
        (Some("0:1"), &["2:3", "4:output"], true),
        (None, &["0:0", "1:1", "2:3", "4:4", "5:output"], false),
        (None, &["0:0", "1:1", "2:3", "4:4", "5:output"], true),
    ] {
        let cluster = start(&tiny, local, security(false), 32);
        let _workers: Vec<Process> =
            workers.iter().map(|l| Process::worker(cluster.address(), l, direct)).collect();
        let mut stage = local.map(|l| {
            let mut stage = TinyStage::new(l);
            stage.load(&tiny.welcome(32)).expect("loads");
            stage
        });
        let up = cluster.wait(soon(30)).expect("a whole route");
        let found = through(&cluster, &up, &mut stage, &steps);
        assert!(
            found == expected,
            "{local:?} and {workers:?}, direct {direct}: logits differ from one process"
        );
    }
}
