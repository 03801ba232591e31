//! The memory plan against what is really allocated, and what it says where memory is short.

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use common::*;
use ds4_engine::*;
use ds4_gguf::Gguf;
use ds4_model::plan::{Asked, Budget, Choice, Memory, Node, RUNTIME_BYTES, choose, parse_size, split};
use ds4_model::{HyperParams, LayerSlice, MemoryPlan, Model, Numerics, RowFormat, Settings};
use ds4_reference::Reference;

/// Live bytes in blocks of the size that planned buffers have; smaller ones are bookkeeping.
static LARGE: AtomicUsize = AtomicUsize::new(0);
/// Live bytes in all blocks.
static ALL: AtomicUsize = AtomicUsize::new(0);
const LARGE_MIN: usize = 64 << 10;

struct Counting;

fn count(size: usize, by: fn(&AtomicUsize, usize)) {
    by(&ALL, size);
    if size >= LARGE_MIN {
        by(&LARGE, size);
    }
}

fn plus(counter: &AtomicUsize, n: usize) {
    counter.fetch_add(n, Ordering::SeqCst);
}

fn minus(counter: &AtomicUsize, n: usize) {
    counter.fetch_sub(n, Ordering::SeqCst);
}

// SAFETY: every call goes to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size(), plus);
        // SAFETY: the caller's promises are the system allocator's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        count(layout.size(), minus);
        // SAFETY: `at` came from `alloc` above with the same layout.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn settings(slice: LayerSlice) -> Settings {
    Settings {
        slice,
        context: 4096,
        sessions: 2,
        chunk: 64,
        checkpoints: 8,
        spare_pages: 16,
        rows: RowFormat::Packed,
        numerics: Numerics::QAT,
    }
}

fn model(name: &str) -> (Gguf, HyperParams) {
    let gguf = Gguf::open(&ds4_testdata::path(name)).unwrap();
    let hyper = HyperParams::from_metadata(gguf.metadata()).unwrap();
    (gguf, hyper)
}

/// Allocations are counted for the whole process, so these tests run one after the other.
fn alone() -> std::sync::MutexGuard<'static, ()> {
    static LOCK: std::sync::Mutex<()> = std::sync::Mutex::new(());
    LOCK.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// One test for all that counts: other tests of this process would count along.
#[test]
fn what_is_planned_is_what_is_allocated() {
    let _alone = alone();
    let mut combinations = 0;
    for name in ["tiny-q2q4.gguf", "odd-mix.gguf"] {
        let (gguf, hyper) = model(name);
        let total = hyper.layers.len();
        let half = LayerSlice { end: total / 2, head: false, ..LayerSlice::whole(total) };
        let rest = LayerSlice { first: total / 2, ..LayerSlice::whole(total) };
        for slice in [LayerSlice::whole(total), half, rest] {
            for (context, sessions, chunk) in [(512, 1, 16), (4096, 3, 64), (70_000, 2, 200)] {
                for (rows, checkpoints) in
                    [(RowFormat::Packed, 0), (RowFormat::F32, 9), (RowFormat::Packed, 30)]
                {
                    let s = Settings { context, sessions, chunk, rows, checkpoints, ..settings(slice) };
                    let plan = MemoryPlan::new::<Reference>(&gguf, &hyper, s).unwrap();
                    let planned = plan.bytes(Memory::Host) + plan.bytes(Memory::Device) - RUNTIME_BYTES;
                    let path = ds4_testdata::path(name);
                    let setup = s.setup(&hyper);
                    let before = ALL.load(Ordering::SeqCst);
                    let machine = Machine::load("plan", checkpoints, move || {
                        Model::load(&Gguf::open(&path)?, setup.clone(), Reference::default(), &mut |_| ())
                    })
                    .unwrap();
                    let held = (ALL.load(Ordering::SeqCst) - before) as u64;
                    drop(machine);
                    // Names, tables of pages and layers, the header.
                    let extra = held as i64 - planned as i64;
                    assert!(
                        (0..300 << 10).contains(&extra),
                        "{name} {s:?}: planned {planned}, held {held}\n{plan}"
                    );
                    combinations += 1;
                }
            }
        }
    }
    assert_eq!(combinations, 54);
    no_step_allocates_buffers();
}

/// After "ready", steps allocate nothing of a buffer's size.
fn no_step_allocates_buffers() {
    let handle = engine(EngineConfig::default(), vec![Box::new(stage(None, limits(2048, 64, 2, 16), 8))]);
    let ids = ds4_testdata::prompt_ids();
    let run = |n: usize| handle.submit(request(&ids[..n], 5)).unwrap().wait().unwrap();
    run(600);
    let before = LARGE.load(Ordering::SeqCst);
    for n in [300, 600, 601, 650] {
        run(n);
    }
    assert_eq!(LARGE.load(Ordering::SeqCst), before);
}

#[test]
fn a_budget_chooses_settings_that_fit() {
    let _alone = alone();
    let (gguf, hyper) = model("tiny-q2q4.gguf");
    let base = settings(LayerSlice::whole(hyper.layers.len()));
    let pick = |asked: Asked, bytes: u64| {
        choose::<Reference>(&gguf, &hyper, base, asked, &Budget::shared(bytes)).unwrap()
    };
    let mut last = 0;
    for mib in [90, 100, 120, 160, 400] {
        let Choice::Fits(plan) = pick(Asked::default(), mib << 20) else { panic!("{mib} MiB") };
        assert!(plan.total() <= mib << 20);
        assert!(plan.settings.context >= last, "{mib} MiB: {}", plan.settings.context);
        last = plan.settings.context;
    }
    assert!(last >= 32 * 1024);
}

#[test]
fn a_refusal_names_the_line_and_the_nearest_that_fits() {
    let _alone = alone();
    let (gguf, hyper) = model("tiny-q2q4.gguf");
    let base = settings(LayerSlice::whole(hyper.layers.len()));
    let asked = Asked { context: Some(1_000_000), sessions: Some(64), ..Asked::default() };
    let budget = Budget::shared(120 << 20);
    let choice = choose::<Reference>(&gguf, &hyper, base, asked, &budget).unwrap();
    let Choice::Refused { excess, nearest, plan } = choice else { panic!("{choice:?}") };
    assert_eq!(excess.line, "key-value pages");
    assert_eq!(excess.needs, plan.total());
    let nearest = nearest.expect("something fits");
    assert!(nearest.excess(&budget).is_none());
    // Weights alone too big: nothing fits, and that is what it says.
    let tight = choose::<Reference>(&gguf, &hyper, base, asked, &Budget::shared(4 << 20)).unwrap();
    let Choice::Refused { excess, nearest: None, .. } = tight else { panic!("{tight:?}") };
    assert_eq!(excess.line, "weights");
}

#[test]
fn nodes_get_slices_that_fit_and_balance() {
    let _alone = alone();
    let (gguf, hyper) = model("tiny-q2q4.gguf");
    let total = hyper.layers.len();
    let base = settings(LayerSlice::whole(total));
    let node =
        |name: &str, mib: u64, speed| Node { name: name.into(), budget: Budget::shared(mib << 20), speed };
    let slices = |nodes: &[Node]| {
        let parts = split::<Reference>(&gguf, &hyper, base, nodes).unwrap();
        parts.map(|p| p.iter().map(|p| p.settings.slice.to_string()).collect::<Vec<_>>())
    };
    let even = slices(&[node("a", 200, 1.0), node("b", 200, 1.0)]).unwrap();
    assert_eq!(even, ["0:2", "3:output"]);
    let faster = slices(&[node("a", 200, 2.0), node("b", 200, 1.0)]).unwrap();
    assert_eq!(faster, ["0:3", "4:output"]);
    let short = slices(&[node("a", 65, 1.0), node("b", 65, 1.0)]).unwrap_err();
    assert!(short.needs > short.has);
}

#[test]
fn sizes_read_as_written() {
    let _alone = alone();
    assert_eq!(parse_size("51.3GiB"), Some((51.3 * (1u64 << 30) as f64) as u64));
    assert_eq!(parse_size("800M"), Some(800 << 20));
    assert_eq!(parse_size("1024"), Some(1024));
    for bad in ["", "GiB", "1.2.3G", "5 parsecs", "-1"] {
        assert_eq!(parse_size(bad), None, "{bad}");
    }
}
