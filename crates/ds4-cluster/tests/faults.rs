//! An engine over two workers while workers are killed, stopped and cut off: every request ends, complete or with an
//! error; what is complete is right; and the next request is answered.
//!
//! `DS4_FAULTS=200` gives more faults than the few of every day, `DS4_FAULTS_SEED` another course, `DS4_FAULTS_LOG=1`
//! what the coordinator says.

mod common;

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use common::{Process, coordinator, security, soon, tiny};
use ds4_cluster::activation::Format;
use ds4_engine::{EngineError, EngineHandle, Health, Request};
use ds4_testdata::Rng;

#[test]
#[ignore = "run by the other tests in a process of its own"]
fn worker_process() {
    common::serve_from_environment();
}

const RESUME_WAIT: Duration = Duration::from_secs(6);

/// A cable that can be cut (both sides see it) and pulled (nobody sees it).
struct Cable {
    address: SocketAddr,
    sockets: Arc<Mutex<Vec<TcpStream>>>,
    pulled: Arc<AtomicBool>,
}

impl Cable {
    fn new(to: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("bound");
        let cable = Cable { address, sockets: Arc::default(), pulled: Arc::default() };
        let (sockets, pulled) = (cable.sockets.clone(), cable.pulled.clone());
        std::thread::spawn(move || {
            for near in listener.incoming() {
                let (Ok(near), Ok(far)) = (near, TcpStream::connect(to)) else { return };
                let copies = [near.try_clone(), far.try_clone(), near.try_clone(), far.try_clone()];
                let [Ok(a), Ok(b), Ok(c), Ok(d)] = copies else { return };
                for socket in [&near, &far] {
                    drop(socket.set_nodelay(true));
                }
                sockets.lock().expect("no panic").extend([near, far]);
                for (from, to) in [(a, b), (d, c)] {
                    let pulled = pulled.clone();
                    std::thread::spawn(move || carry(from, to, &pulled));
                }
            }
        });
        cable
    }

    fn cut(&self) {
        for socket in self.sockets.lock().expect("no panic").drain(..) {
            // Closed already: as good.
            drop(socket.shutdown(Shutdown::Both));
        }
    }
}

fn carry(mut from: TcpStream, mut to: TcpStream, pulled: &AtomicBool) {
    let mut buffer = vec![0; 1 << 16];
    while let Ok(count) = from.read(&mut buffer) {
        while pulled.load(Ordering::Relaxed) {
            std::thread::sleep(Duration::from_millis(5));
        }
        if count == 0 || to.write_all(&buffer[..count]).is_err() {
            break;
        }
    }
    drop(to.shutdown(Shutdown::Both));
}

struct Node {
    layers: &'static str,
    cable: Cable,
    process: Process,
}

impl Node {
    fn start(layers: &'static str, to: SocketAddr) -> Self {
        let cable = Cable::new(to);
        let process = Process::worker(cable.address, layers, true);
        Node { layers, cable, process }
    }

    fn restart(&mut self) {
        self.process = Process::worker(self.cable.address, self.layers, true);
    }
}

/// A prompt and what one process answers.
struct Case {
    prompt: Vec<u32>,
    tokens: usize,
    answer: Vec<u32>,
}

impl Case {
    fn request(&self) -> Request {
        Request { max_tokens: Some(self.tokens), ..Request::new(self.prompt.clone()) }
    }
}

fn ready(engine: &EngineHandle) {
    let until = soon(60);
    while engine.health() != Health::Ready {
        assert!(Instant::now() < until, "not ready: {:?}", engine.health());
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn cases() -> Vec<Case> {
    let tiny = tiny();
    let whole = ds4_model::LayerSlice::whole(tiny.hyper.layers.len());
    let stage = tiny.local_stage(whole, &tiny.serve(None, Format::Bits32));
    let alone = tiny.engine(vec![Box::new(stage)], RESUME_WAIT);
    ready(&alone);
    let ids = ds4_testdata::prompt_ids();
    [(0, 300, 12), (100, 150, 30), (250, 40, 40), (0, 310, 6)]
        .into_iter()
        .map(|(at, length, tokens)| {
            let mut case = Case { prompt: ids[at..at + length].to_vec(), tokens, answer: Vec::new() };
            case.answer = alone.submit(case.request()).expect("taken").wait().expect("answered").ids();
            case
        })
        .collect()
}

#[test]
fn every_request_ends_and_the_next_one_is_right() {
    let number = |name: &str| std::env::var(name).ok().and_then(|v| v.parse::<usize>().ok());
    let faults = number("DS4_FAULTS").unwrap_or(6);
    if std::env::var_os("DS4_FAULTS_LOG").is_some() {
        tracing_subscriber::fmt().with_ansi(false).init();
    }
    let mut rng = Rng(number("DS4_FAULTS_SEED").unwrap_or(1) as u64);
    let cases = cases();
    let tiny = tiny();
    let (cluster, stages) = coordinator(&tiny, &tiny.serve(Some("0:1"), Format::Bits32), security(false));
    let mut nodes = ["2:3", "4:output"].map(|layers| Node::start(layers, cluster.address()));
    let engine = tiny.engine(stages, RESUME_WAIT);
    ready(&engine);
    let (mut complete, mut failed, mut slowest) = (0, 0, Duration::ZERO);
    for i in 0..faults {
        let running: Vec<(usize, _)> = (0..2)
            .map(|_| rng.below(cases.len()))
            .map(|c| (c, engine.submit(cases[c].request()).expect("taken")))
            .collect();
        let started = Instant::now();
        std::thread::sleep(Duration::from_millis(rng.below(600) as u64));
        let both = rng.below(5) == 0;
        let first = rng.below(2);
        let struck: Vec<usize> = if both { vec![first, 1 - first] } else { vec![first] };
        let away = Duration::from_millis(rng.below(2500) as u64);
        let kind = rng.below(4);
        for &n in &struck {
            match kind {
                0 => nodes[n].process.kill(),
                1 => nodes[n].process.signal("-STOP"),
                2 => nodes[n].cable.cut(),
                _ => nodes[n].cable.pulled.store(true, Ordering::Relaxed),
            }
        }
        std::thread::sleep(away);
        for &n in &struck {
            match kind {
                0 => nodes[n].restart(),
                1 => nodes[n].process.signal("-CONT"),
                2 => {}
                _ => nodes[n].cable.pulled.store(false, Ordering::Relaxed),
            }
        }
        let what = ["kill -9", "SIGSTOP", "cut", "pulled"][kind];
        tracing::info!("fault {i}: {what} of {struck:?} for {away:?}");
        for (c, generation) in running {
            let ended = generation.wait();
            let took = started.elapsed();
            slowest = slowest.max(took);
            assert!(took < Duration::from_secs(10) + RESUME_WAIT, "fault {i} ({what}): {took:?}");
            match ended {
                Ok(done) => {
                    assert_eq!(done.ids(), cases[c].answer, "fault {i} ({what}), case {c}");
                    complete += 1;
                }
                Err(EngineError::Stage(e)) => {
                    assert!(!e.to_string().is_empty());
                    println!("fault {i} ({what}, {away:?}): {e}");
                    failed += 1;
                }
                Err(other) => panic!("fault {i} ({what}): {other}"),
            }
        }
        let c = rng.below(cases.len());
        let next = engine.submit(cases[c].request()).expect("taken").wait();
        assert_eq!(
            next.expect("the next request is answered").ids(),
            cases[c].answer,
            "after fault {i} ({what})"
        );
    }
    println!(
        "{faults} faults: {complete} requests complete, {failed} with an error, the slowest after {slowest:?}"
    );
}

#[test]
fn a_coordinator_without_workers_says_what_is_missing() {
    let tiny = tiny();
    let (_cluster, stages) = coordinator(&tiny, &tiny.serve(Some("0:2"), Format::Bits32), security(false));
    let engine = tiny.engine(stages, Duration::from_secs(1));
    let until = soon(10);
    while engine.health() == Health::Loading {
        assert!(Instant::now() < until, "still loading");
        std::thread::sleep(Duration::from_millis(5));
    }
    let error = engine.submit(Request { max_tokens: Some(4), ..Request::new(vec![1, 2, 3]) });
    // Refused at once or when the wait is over, in the same words.
    let text = match error {
        Ok(generation) => generation.wait().expect_err("no head").to_string(),
        Err(rejected) => rejected.to_string(),
    };
    assert!(text.contains("missing layers 3 to 5, the output head"), "{text}");
    assert!(matches!(engine.health(), Health::Waiting { .. }), "{:?}", engine.health());
}
