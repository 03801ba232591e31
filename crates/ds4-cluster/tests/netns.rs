//! A worker behind a cable of its own: a network namespace, where the system lets us make one.

mod common;

use std::net::SocketAddr;
use std::process::{Command, Stdio};
use std::time::Duration;

use common::{Process, security, soon, tiny};
use ds4_cluster::activation::Format;
use ds4_engine::{Health, Request};

#[test]
#[ignore = "run by the other tests in a process of its own"]
fn worker_process() {
    common::serve_from_environment();
}

/// A namespace `name` with one cable to this one; gone when dropped.
struct Namespace {
    name: String,
    cable: String,
    near: String,
}

fn ip(arguments: &str) -> Result<(), String> {
    let run = Command::new("ip").args(arguments.split_whitespace()).stdin(Stdio::null()).output();
    let output = run.map_err(|e| format!("ip: {e}"))?;
    if output.status.success() {
        Ok(())
    } else {
        Err(String::from_utf8_lossy(&output.stderr).trim().to_string())
    }
}

impl Namespace {
    fn new() -> Result<Self, String> {
        let id = std::process::id();
        let (name, cable) = (format!("ds4-{id}"), format!("ds4c{}", id % 100_000));
        let net = format!("10.213.{}", id % 250);
        ip(&format!("netns add {name}"))?;
        let made = Namespace { name: name.clone(), cable: cable.clone(), near: format!("{net}.1") };
        ip(&format!("link add {cable} type veth peer name far netns {name}"))?;
        ip(&format!("addr add {net}.1/24 dev {cable}"))?;
        ip(&format!("link set {cable} up"))?;
        ip(&format!("-n {name} addr add {net}.2/24 dev far"))?;
        ip(&format!("-n {name} link set far up"))?;
        Ok(made)
    }

    fn pull(&self, pulled: bool) {
        ip(&format!("link set {} {}", self.cable, if pulled { "down" } else { "up" })).expect("the link");
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        // The cable goes with it.
        drop(ip(&format!("netns del {}", self.name)));
    }
}

#[test]
fn a_pulled_cable_is_noticed_and_survived() {
    let namespace = match Namespace::new() {
        Ok(namespace) => namespace,
        Err(why) => return println!("SKIPPED: no network namespace here: {why}"),
    };
    let tiny = tiny();
    let whole = ds4_model::LayerSlice::whole(tiny.hyper.layers.len());
    let serve = tiny.serve(Some("0:2"), Format::Bits32);
    let alone = tiny.engine(vec![Box::new(tiny.local_stage(whole, &serve))], Duration::ZERO);
    let (cluster, stages) = common::coordinator_at(&namespace.near, &tiny, &serve, security(false));
    let address = SocketAddr::new(namespace.near.parse().expect("address"), cluster.address().port());
    let _worker = Process::worker_in(&namespace.name, address, "3:output");
    let engine = tiny.engine(stages, Duration::from_secs(20));
    for handle in [&alone, &engine] {
        let until = soon(60);
        while handle.health() != Health::Ready {
            assert!(std::time::Instant::now() < until, "not ready: {:?}", handle.health());
            std::thread::sleep(Duration::from_millis(5));
        }
    }
    let prompt = ds4_testdata::prompt_ids()[..200].to_vec();
    let request = || Request { max_tokens: Some(40), ..Request::new(prompt.clone()) };
    let answer = alone.submit(request()).expect("taken").wait().expect("answered").ids();
    let running = engine.submit(request()).expect("taken");
    std::thread::sleep(Duration::from_millis(300));
    namespace.pull(true);
    let until = soon(30);
    while cluster.lost().is_none() {
        assert!(std::time::Instant::now() < until, "nobody noticed");
        std::thread::sleep(Duration::from_millis(20));
    }
    let lost = cluster.lost().expect("lost").to_string();
    assert!(lost.contains("no message for"), "{lost}");
    namespace.pull(false);
    assert_eq!(running.wait().expect("goes on").ids(), answer);
    assert_eq!(engine.submit(request()).expect("taken").wait().expect("answered").ids(), answer);
}
