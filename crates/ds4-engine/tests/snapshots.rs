//! State that outlives the program: it is right, or it is not there.

mod common;

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use common::*;
use ds4_engine::*;
use ds4_testdata::Rng;

const CONTEXT: usize = 1024;

fn config(dir: &Path, budget: u64, mode: &str) -> EngineConfig {
    let snapshots = SnapshotConfig { dir: dir.into(), budget, model: b"tiny".to_vec(), mode: mode.into() };
    EngineConfig { snapshots: Some(snapshots), ..EngineConfig::default() }
}

fn start(config: EngineConfig, slices: &[Option<&str>]) -> EngineHandle {
    let boxed = |s: &Option<&str>| Box::new(stage(*s, limits(CONTEXT, 64, 2, 32), 16)) as Box<dyn Stage>;
    engine(config, slices.iter().map(boxed).collect())
}

fn end(handle: EngineHandle) {
    handle.drain(Duration::from_secs(60));
    let until = Instant::now() + Duration::from_secs(60);
    while handle.health() != Health::Ended {
        assert!(Instant::now() < until, "{:?}", handle.health());
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn run(handle: &EngineHandle, prompt: &[u32], n: usize) -> Completion {
    handle.submit(request(prompt, n)).unwrap().wait().unwrap()
}

fn files(dir: &Path, sub: &str) -> Vec<PathBuf> {
    let mut paths: Vec<_> = fs::read_dir(dir.join(sub)).unwrap().map(|e| e.unwrap().path()).collect();
    paths.sort();
    paths
}

#[test]
fn a_restart_continues_where_it_stopped_on_one_machine_and_on_several() {
    let dir = tempfile::tempdir().unwrap();
    let ids = ds4_testdata::prompt_ids();
    let whole: &[Option<&str>] = &[None];
    let split: &[Option<&str>] = &[Some("0:2"), Some("3:output")];
    let cold = start(EngineConfig::default(), whole);

    let first = start(config(dir.path(), 1 << 30, "plain"), whole);
    let mut history = ids[..300].to_vec();
    history.extend(run(&first, &history, 10).ids());
    end(first);
    // Two full pages, and the end of the answer.
    assert_eq!((files(dir.path(), "pages").len(), files(dir.path(), "checkpoints").len()), (2, 1));

    let mut turn = |slices: &[Option<&str>]| {
        let handle = start(config(dir.path(), 1 << 30, "plain"), slices);
        let before = history.len();
        history.extend(&ids[600..640]);
        let got = run(&handle, &history, 12);
        assert_eq!(got.usage.reused_tokens, before - 1);
        assert_eq!(got.tokens, run(&cold, &history, 12).tokens);
        history.extend(got.ids());
        end(handle);
    };
    turn(split);
    turn(whole);
    turn(split);
    // Another numeric mode or template takes nothing of it.
    let other = start(config(dir.path(), 1 << 30, "qat"), whole);
    assert_eq!(run(&other, &history, 1).usage.reused_tokens, 0);
}

#[test]
fn what_is_damaged_is_deleted_and_computed_anew() {
    let prompt = ds4_testdata::prompt_ids()[..200].to_vec();
    let whole: &[Option<&str>] = &[None];
    for sub in ["pages", "checkpoints"] {
        let dir = tempfile::tempdir().unwrap();
        let first = start(config(dir.path(), 1 << 30, "plain"), whole);
        let mut longer = prompt.clone();
        longer.extend(run(&first, &prompt, 6).ids());
        longer.extend([1, 2, 3]);
        end(first);
        let path = files(dir.path(), sub).remove(0);
        let mut bytes = fs::read(&path).unwrap();
        let middle = bytes.len() / 2;
        bytes[middle] ^= 4;
        fs::write(&path, &bytes).unwrap();
        let handle = start(config(dir.path(), 1 << 30, "plain"), whole);
        assert_eq!(run(&handle, &longer, 3).usage.reused_tokens, 0, "{sub}");
        end(handle);
        let store = SnapshotStore::open(dir.path(), 1 << 30).unwrap();
        assert_eq!(
            store.verify().unwrap().deleted,
            Vec::<PathBuf>::new(),
            "the damaged {sub} file is gone or anew"
        );
    }
}

#[test]
fn bytes_written_grow_with_new_tokens() {
    let dir = tempfile::tempdir().unwrap();
    let handle = start(config(dir.path(), 1 << 30, "plain"), &[None]);
    let ids = ds4_testdata::prompt_ids();
    let mut histories = [ids[..100].to_vec(), ids[300..420].to_vec()];
    let (mut evaluated, mut fresh) = (0, 0);
    for turn in 0..10 {
        for history in &mut histories {
            let before = history.len();
            let done = run(&handle, history, 4);
            evaluated += history.len() - done.usage.reused_tokens;
            history.extend(done.ids());
            history.extend(&ids[turn * 50..turn * 50 + 46]);
            fresh += history.len() - before;
        }
    }
    assert!(evaluated <= fresh + 20 * 10, "{evaluated} rows for {fresh} new tokens");
    let page_and_frontier = {
        let s = setup(
            None,
            limits(CONTEXT, 64, 2, 0),
            ds4_model::RowFormat::F32,
            ds4_model::Numerics::PLAIN_EXACT,
        );
        (s.layout.page_bytes as u64, s.layout.frontier_bytes as u64)
    };
    end(handle.clone());
    let written = handle.status().counters.snapshot_bytes_written;
    let (page, frontier) = page_and_frontier;
    // Every full page once; per checkpoint its frontier and its unfinished page.
    let pages: u64 = histories.iter().map(|h| (h.len() / 128) as u64).sum();
    let checkpoints = files(dir.path(), "checkpoints").len() as u64;
    assert_eq!(files(dir.path(), "pages").len() as u64, pages);
    assert!(checkpoints >= 10, "{checkpoints}");
    assert!(written * 10 <= 12 * (pages * page + checkpoints * (frontier + page)), "{written}");
}

/// A store with small files, and what is in it.
fn small(dir: &Path) -> (SnapshotStore, SnapshotKey, Vec<Mark>) {
    let store = SnapshotStore::open(dir, 1 << 20).unwrap();
    let key = SnapshotKey::new(b"model", "mode", 96, 64);
    let marks =
        (0..3).map(|n| put(&store, &key, &tokens(n, 128 * (n as usize + 1) + 5 * n as usize))).collect();
    (store, key, marks)
}

fn tokens(seed: u64, n: usize) -> Vec<u32> {
    let mut rng = Rng(seed / 2);
    (0..n).map(|_| rng.below(1000) as u32).collect()
}

fn put(store: &SnapshotStore, key: &SnapshotKey, tokens: &[u32]) -> Mark {
    let mark = Mark::default().extend(tokens);
    let chunks = tokens.chunks_exact(128);
    let last_tokens = chunks.remainder().to_vec();
    let pages: Vec<PageFile> =
        chunks.map(|t| PageFile { tokens: t.to_vec(), rows: vec![t[0] as u8; key.page_bytes] }).collect();
    let names: Vec<PageName> = pages.iter().map(|p| store.put_page(p).unwrap()).collect();
    let last_page = if last_tokens.is_empty() { Vec::new() } else { vec![9; key.page_bytes] };
    let s =
        Snapshot { mark, pages, last_tokens, last_page, frontier: vec![mark.pos as u8; key.frontier_bytes] };
    store.put_checkpoint(key, &s, &names).unwrap();
    mark
}

#[test]
fn one_flipped_bit_is_rejected_wherever_it_is() {
    let dir = tempfile::tempdir().unwrap();
    let (store, key, marks) = small(dir.path());
    let mut rng = Rng(1);
    let all: Vec<PathBuf> =
        files(dir.path(), "pages").into_iter().chain(files(dir.path(), "checkpoints")).collect();
    let originals: Vec<Vec<u8>> = all.iter().map(|p| fs::read(p).unwrap()).collect();
    // DS4_FLIPS=10000 for a long run.
    let flips = std::env::var("DS4_FLIPS").ok().and_then(|n| n.parse().ok()).unwrap_or(600);
    for n in 0..flips {
        let at = n % all.len();
        let mut bytes = originals[at].clone();
        match n % 50 {
            0 => bytes.truncate(rng.below(bytes.len())),
            _ => {
                let bit = rng.below(bytes.len() * 8);
                bytes[bit / 8] ^= 1 << (bit % 8);
            }
        }
        fs::write(&all[at], &bytes).unwrap();
        let loaded: Vec<_> = marks.iter().map(|&m| store.load(&key, m)).collect();
        assert!(loaded.iter().any(Result::is_err), "flip {n} of {}", all[at].display());
        for (s, mark) in loaded.iter().flatten().zip(&marks) {
            assert_eq!(s.frontier, vec![s.mark.pos as u8; 64], "{mark:?}");
        }
        // What was rejected is gone; put all of it back.
        all.iter().zip(&originals).for_each(|(p, b)| fs::write(p, b).unwrap());
    }
}

#[test]
fn the_budget_is_kept_and_the_least_recently_used_goes() {
    let dir = tempfile::tempdir().unwrap();
    let store = SnapshotStore::open(dir.path(), 1 << 20).unwrap();
    let key = SnapshotKey::new(b"model", "mode", 4096, 1024);
    let marks: Vec<Mark> = (0..10)
        .map(|n| {
            std::thread::sleep(Duration::from_millis(12));
            put(&store, &key, &tokens(2 * n + 100, 300))
        })
        .collect();
    let full = store.size().unwrap();
    store.load(&key, marks[0]).unwrap();
    assert!(store.collect(full / 2, Duration::ZERO).unwrap());
    assert!(store.size().unwrap() <= full / 2);
    assert!(
        store.contains(&key, marks[0]) && store.contains(&key, marks[9]) && !store.contains(&key, marks[1])
    );
    store.load(&key, marks[9]).unwrap();
    // What alone is over the budget is not written at all.
    let tight = SnapshotStore::open(dir.path(), 2000).unwrap();
    let s = Snapshot {
        mark: Mark { pos: 5, prefix: 1 },
        pages: vec![],
        last_tokens: vec![1; 5],
        last_page: vec![0; 4096],
        frontier: vec![0; 1024],
    };
    assert!(matches!(tight.put_checkpoint(&key, &s, &[]), Err(SnapshotError::TooBig { .. })));
    // Removing every checkpoint leaves pages, which the next collection takes.
    for entry in store.list().unwrap() {
        store.remove(&entry).unwrap();
    }
    assert!(store.collect(1 << 20, Duration::ZERO).unwrap());
    assert_eq!(files(dir.path(), "pages").len(), 0);
}

/// Run by the test below in processes of its own, which it kills.
#[test]
fn write_until_killed() {
    let Ok(dir) = std::env::var("DS4_KILLED_WRITER") else { return };
    let store = SnapshotStore::open(Path::new(&dir), 1 << 20).unwrap();
    let key = SnapshotKey::new(b"model", "mode", 20_000, 30_000);
    let mut rng = Rng(u64::from(std::process::id()));
    for _ in 0..100_000 {
        put(&store, &key, &tokens(rng.below(200) as u64, 140 + rng.below(300)));
        store.keep_budget().unwrap();
    }
}

#[test]
fn killed_writers_leave_only_whole_files() {
    let dir = tempfile::tempdir().unwrap();
    let key = SnapshotKey::new(b"model", "mode", 20_000, 30_000);
    let mut rng = Rng(3);
    let mut loaded = 0;
    for _ in 0..60 {
        // Two at once share the folder.
        let mut writers: Vec<_> = (0..2)
            .map(|_| {
                std::process::Command::new(std::env::current_exe().unwrap())
                    .args(["--exact", "write_until_killed", "--test-threads=1"])
                    .env("DS4_KILLED_WRITER", dir.path())
                    .stdout(std::process::Stdio::null())
                    .spawn()
                    .unwrap()
            })
            .collect();
        std::thread::sleep(Duration::from_millis(20 + rng.below(60) as u64));
        for w in &mut writers {
            w.kill().unwrap();
            w.wait().unwrap();
        }
        let store = SnapshotStore::open(dir.path(), 1 << 20).unwrap();
        for entry in store.list().unwrap().into_iter().take(8) {
            // Whole, or without a page that the other's collection took: never corrupt.
            match store.load(&key, entry.mark) {
                Ok(s) => {
                    assert_eq!(s.frontier, vec![s.mark.pos as u8; key.frontier_bytes]);
                    loaded += 1;
                }
                Err(SnapshotError::Io { .. }) => {}
                Err(e) => panic!("{e}"),
            }
        }
    }
    assert!(loaded > 50, "{loaded}");
}
