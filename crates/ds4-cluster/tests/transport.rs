//! Sockets: how long a step takes to and fro, who is turned away and with what words, and what strangers cost.

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use common::{Process, SECRET, security, soon, tiny};
use ds4_cluster::activation::Format;
use ds4_cluster::coordinator::{self, Cluster};
use ds4_cluster::core::coordinator::Config;
use ds4_cluster::core::{PROTOCOL, Timing};
use ds4_cluster::endpoint::Endpoint;
use ds4_cluster::host::{Host, StageAsk};
use ds4_cluster::security::{Identity, Security};
use ds4_cluster::{transport, wire, worker};
use ds4_engine::{RowResult, StageError, Step, StepOutput, Survived};
use ds4_model::LayerSlice;

/// Counts what is allocated, so that a test can say what strangers cost.
struct Counting;

static HELD: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call goes to the system's allocator unchanged; the counters do not touch the memory.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let held = HELD.fetch_add(layout.size(), Ordering::Relaxed) + layout.size();
        PEAK.fetch_max(held, Ordering::Relaxed);
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        HELD.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's promise is passed on.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// One test at a time: they share the log and the counters.
static TURN: Mutex<()> = Mutex::new(());

fn turn() -> MutexGuard<'static, ()> {
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Everything that is logged, as text.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Log {
    fn text(&self) -> String {
        String::from_utf8_lossy(&self.0.lock().unwrap_or_else(PoisonError::into_inner)).into_owned()
    }

    fn wait_for(&self, words: &str) {
        let until = soon(15);
        while !self.text().contains(words) {
            assert!(Instant::now() < until, "nobody logged {words:?}: {}", self.text());
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

fn log() -> Log {
    static LOG: std::sync::OnceLock<Log> = std::sync::OnceLock::new();
    LOG.get_or_init(|| {
        let log = Log::default();
        let writer = log.clone();
        tracing_subscriber::fmt().with_ansi(false).with_writer(move || writer.clone()).init();
        log
    })
    .clone()
}

#[test]
#[ignore = "run by the other tests in a process of its own"]
fn worker_process() {
    common::serve_from_environment();
}

// ---- latency ----------------------------------------------------------------------------------------------------

const WIDTH: usize = 16 * 1024;

/// Answers every step with the rows that it was given, as logits.
struct Echo;

impl Host for Echo {
    fn load(&mut self, _: &StageAsk) -> Result<(), StageError> {
        Ok(())
    }

    fn run(&mut self, _: &Step, hidden: Option<&[f32]>) -> Result<StepOutput, StageError> {
        let rows = vec![RowResult::Logits(hidden.unwrap_or_default().to_vec())];
        Ok(StepOutput { rows, ..StepOutput::default() })
    }

    fn restart(&mut self) -> Result<Survived, StageError> {
        Ok(Survived::State)
    }
}

fn echo_cluster(security: Security) -> (Cluster, worker::Stop, std::thread::JoinHandle<String>) {
    let slice = |text| LayerSlice::parse(text, 2).expect("slice");
    let cluster = Cluster::start(coordinator::Options {
        listen: Endpoint { host: "127.0.0.1".into(), port: 0 },
        security: security.clone(),
        core: Config {
            timing: Timing::default(),
            layers: 2,
            spans: vec![slice("1:output")],
            sizes: Box::new(|_| (0, 0)),
            fingerprint: Box::new(|_| [7; 32]),
            welcome: wire::Welcome {
                protocol: PROTOCOL,
                limits: Some(wire::Limits { context: 1000, rows: 4096, slots: 1, ..Default::default() }),
                activation_bits: 32,
                heartbeat_ms: 1000,
                heartbeats_missed_max: 3,
                steps_max: 4,
                width: WIDTH as u32,
                ..Default::default()
            },
        },
    })
    .expect("listens");
    let options = worker::Options {
        coordinator: Endpoint { host: "127.0.0.1".into(), port: cluster.address().port() },
        listen: None,
        security,
        timing: Timing::default(),
        hello: wire::Hello {
            protocol: PROTOCOL,
            layers: Some(wire::Layers { first: 1, end: 2, total: 2, head: true }),
            fingerprint: vec![7; 32].into(),
            context: 1000,
            activation_bits: 32,
            boot: 1,
            ..Default::default()
        },
    };
    let (stop, stopped) = worker::Stop::new();
    let thread = std::thread::spawn(move || worker::run(options, || Echo, stopped).expect("ends as asked"));
    (cluster, stop, thread)
}

/// Time of one step to the worker and back, `rows` rows each way.
fn round_trip(cluster: &Cluster, epoch: u64, rows: usize) -> Duration {
    let step = wire::Step {
        epoch,
        segments: vec![wire::Segment { slot: 0, rows: rows as u32, mark: None }],
        tokens: vec![0; rows * 4].into(),
        ..Default::default()
    };
    let data = Bytes::from(vec![1u8; rows * WIDTH * 4]);
    let started = Instant::now();
    cluster.submit(0, step, data);
    let ended = cluster.next(0, epoch, soon(30)).expect("in time").expect("runs");
    let took = started.elapsed();
    let Some(wire::row_result::Result::Logits(back)) = &ended.reports[0].rows[0].result else {
        panic!("{ended:?}")
    };
    assert_eq!(back.len(), rows * WIDTH * 4);
    took
}

#[test]
fn a_round_trip_of_64_kib_takes_less_than_5_ms() {
    let _turn = turn();
    for encrypted in [true, false] {
        let (cluster, stop, thread) = echo_cluster(security(!encrypted));
        let up = cluster.wait(0, soon(10)).expect("a whole route");
        let mut times: Vec<Duration> = (0..300).map(|_| round_trip(&cluster, up.epoch, 1)).collect();
        times.sort_unstable();
        let (median, p99) = (times[150], times[297]);
        println!("encrypted {encrypted}: 64 KiB there and back: median {median:?}, p99 {p99:?}");
        assert!(
            median < Duration::from_millis(5),
            "median {median:?}: is TCP_NODELAY set on accepted sockets?"
        );
        stop.stop("the test is over");
        assert_eq!(thread.join().expect("ends"), "the test is over");
    }
}

// ---- strangers ----------------------------------------------------------------------------------------------------

#[test]
fn strangers_are_refused_on_both_sides_and_running_work_goes_on() {
    let _turn = turn();
    let log = log();
    let (cluster, stop, thread) = echo_cluster(security(false));
    let up = cluster.wait(0, soon(10)).expect("a whole route");
    let address = cluster.address();
    let works = || round_trip(&cluster, up.epoch, 1);
    works();

    // Another key.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("runtime");
    let other = Identity::from_secret(b"another cluster's secret").expect("identity");
    let error = runtime.block_on(transport::connect(address, &Security::Shared(other))).expect_err("refused");
    assert!(error.to_string().contains("--cluster-key is another one"), "{error}");
    log.wait_for("--cluster-key is another one");
    works();

    // No key: HTTP/2 in the clear.
    let mut plain = TcpStream::connect(address).expect("connects");
    plain.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").expect("sent");
    plain.set_read_timeout(Some(Duration::from_secs(5))).expect("set");
    let mut answer = Vec::new();
    drop(plain.read_to_end(&mut answer));
    log.wait_for("the peer does not speak TLS");
    works();

    // A port scanner.
    drop(TcpStream::connect(address).expect("connects"));
    log.wait_for("closed before it proved the key");
    works();

    // The right key and another model, another version, too small a context.
    let hello = wire::Hello {
        protocol: PROTOCOL,
        version: "test".into(),
        layers: Some(wire::Layers { first: 1, end: 2, total: 2, head: true }),
        fingerprint: vec![7; 32].into(),
        context: 1000,
        activation_bits: 32,
        boot: 2,
        ..Default::default()
    };
    for (hello, words) in [
        (wire::Hello { fingerprint: vec![8; 32].into(), ..hello.clone() }, "another model or quantisation"),
        (wire::Hello { protocol: 99, ..hello.clone() }, "its protocol is version 99"),
        (wire::Hello { context: 500, ..hello.clone() }, "--ctx 500 is less than the coordinator's 1000"),
        (wire::Hello { activation_bits: 8, ..hello.clone() }, "does not read activations of 32 bits"),
        (
            wire::Hello {
                layers: Some(wire::Layers { first: 1, end: 9, total: 9, head: true }),
                ..hello.clone()
            },
            "its model has 9 layers, this one has 2",
        ),
    ] {
        let options = worker::Options {
            coordinator: Endpoint { host: "127.0.0.1".into(), port: address.port() },
            listen: None,
            security: security(false),
            timing: Timing::default(),
            hello,
        };
        let (_keep, stopped) = worker::Stop::new();
        let error = worker::run(options, || Echo, stopped).expect_err("refused").to_string();
        assert!(error.contains(words), "the worker says: {error}");
        assert!(log.text().contains("refused 127.0.0.1:"), "{}", log.text());
        log.wait_for(words);
        works();
    }
    stop.stop("the test is over");
    thread.join().expect("ends");
}

#[test]
fn a_worker_with_another_key_says_so() {
    let _turn = turn();
    let tiny = tiny();
    let serve = tiny.serve(Some("0:2"), Format::Bits32);
    let (cluster, _stages) = common::coordinator(&tiny, &serve, security(false));
    let mut other = Process::worker_with_secret(cluster.address(), "3:output", "some other secret of 16");
    std::thread::sleep(Duration::from_millis(1500));
    let lost = cluster.lost().expect("no route").to_string();
    assert_eq!(lost, "route incomplete, missing layers 3 to 5, the output head");
    assert!(cluster.nodes().is_empty(), "a stranger is no node");
    other.kill();
}

#[test]
fn strangers_cost_less_than_a_mebibyte() {
    let _turn = turn();
    let (cluster, stop, thread) =
        echo_cluster(Security::Shared(Identity::from_secret(SECRET).expect("identity")));
    let up = cluster.wait(0, soon(10)).expect("a whole route");
    round_trip(&cluster, up.epoch, 1);
    std::thread::sleep(Duration::from_millis(200));
    let before = HELD.load(Ordering::Relaxed);
    PEAK.store(before, Ordering::Relaxed);
    // A TLS record header that announces a handshake message of 16 MiB, then as much of it as is taken.
    let mut announce = vec![0x16, 3, 1, 0x40, 0, 1, 0xff, 0xff, 0xff];
    announce.resize(5 + 0x4000, 0x55);
    let record = [&[0x16, 3, 1, 0x40, 0][..], &[0x55; 0x4000]].concat();
    for kind in 0..4 {
        let sockets: Vec<TcpStream> =
            (0..32).map(|_| TcpStream::connect(cluster.address()).expect("connects")).collect();
        for mut socket in &sockets {
            socket.set_nonblocking(true).expect("set");
            // What is not taken is not held.
            let send = |mut bytes: &[u8]| {
                while !bytes.is_empty() {
                    match (&*socket).write(bytes) {
                        Ok(n) if n > 0 => bytes = &bytes[n..],
                        _ => return,
                    }
                }
            };
            match kind {
                0 => send(&vec![0xaa; 1 << 16]),
                1 => {
                    send(&announce);
                    (0..16).for_each(|_| send(&record));
                }
                2 => send(b"GET / HTTP/1.1\r\n\r\n"),
                _ => drop(socket.flush()),
            }
        }
        std::thread::sleep(Duration::from_millis(300));
    }
    let cost = PEAK.load(Ordering::Relaxed).saturating_sub(before);
    println!("128 strangers: {cost} bytes at most");
    // Sockets of this test and log lines are in the figure, too.
    assert!(cost < 1 << 20, "strangers made the process hold {cost} bytes more");
    stop.stop("the test is over");
    thread.join().expect("ends");
}
