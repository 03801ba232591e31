//! Snapshots beside the engine: what to write is read by operations that ride in steps, and a thread of its own does
//! all file work, so no step waits for a disk.

use std::collections::{HashMap, HashSet, VecDeque};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::thread::{self, JoinHandle};

use ds4_model::{PAGE_TOKENS, PageId};

use crate::pages::Pages;
use crate::prefix::{Checkpoint, PrefixTree};
use crate::snapshot::{PageFile, PageName, Snapshot, SnapshotError, SnapshotKey, SnapshotStore};
use crate::stage::{Mark, StateOp, Step};

/// Checkpoints that wait to be read out; then the oldest are not written.
const WANTED_MAX: usize = 32;
/// Pages that one step reads out at most.
const READS_MAX: usize = 8;
/// Snapshots that wait for the disk; then new ones are not written.
const JOBS_MAX: usize = 8;
/// A snapshot must save so many rows more than what is in memory.
const GAIN_MIN: usize = 128;

/// Where snapshots live, and what they depend on.
#[derive(Clone, Debug)]
pub struct SnapshotConfig {
    pub dir: PathBuf,
    /// Bytes of all files.
    pub budget: u64,
    /// Fingerprint of the model's weights.
    pub model: Vec<u8>,
    /// Numeric mode, row format and prompt template, in words.
    pub mode: String,
}

struct Wanted {
    tokens: Vec<u32>,
    /// Its pages are held here too.
    checkpoint: Checkpoint,
}

/// A checkpoint that is being read out, over one or more steps.
struct Reading {
    wanted: Wanted,
    frontier: Vec<u8>,
    rows: HashMap<PageId, Vec<u8>>,
}

/// The answer to each read operation of a step.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Read {
    Frontier,
    Page(PageId),
}

enum Rows {
    Named(PageName),
    Read(Vec<u8>),
}

struct Write {
    mark: Mark,
    tokens: Vec<u32>,
    /// Full pages with the generation that was read.
    pages: Vec<(PageId, u32, Rows)>,
    last_page: Vec<u8>,
    frontier: Vec<u8>,
}

enum Job {
    Write(Box<Write>),
    Load(Mark),
}

enum Done {
    Written { mark: Mark, names: Vec<(PageId, u32, PageName)> },
    NotWritten { pages: Vec<PageId> },
    Loaded { mark: Mark, snapshot: Option<Snapshot> },
}

pub(crate) struct Snapshots {
    store: Arc<SnapshotStore>,
    jobs: Option<SyncSender<Job>>,
    done: Receiver<Done>,
    thread: Option<JoinHandle<()>>,
    /// Position and prefix of every checkpoint on disk.
    known: HashSet<(usize, u64)>,
    /// Names of full pages in memory that are on disk, with the generation that they hold for.
    names: HashMap<PageId, (u32, PageName)>,
    wanted: VecDeque<Wanted>,
    reading: Option<Reading>,
    /// Parts of `reading` that steps under way read.
    asked: usize,
    /// Snapshots that are being loaded.
    loading: HashSet<(usize, u64)>,
}

impl Snapshots {
    pub fn start(
        config: &SnapshotConfig,
        page_bytes: usize,
        frontier_bytes: usize,
    ) -> Result<Self, SnapshotError> {
        let store = Arc::new(SnapshotStore::open(&config.dir, config.budget)?);
        let key = SnapshotKey::new(&config.model, &config.mode, page_bytes, frontier_bytes);
        let known = store.marks(&key)?;
        let (jobs, inbox) = sync_channel(JOBS_MAX);
        let (answers, done) = sync_channel(2 * JOBS_MAX);
        let files = store.clone();
        let thread = thread::Builder::new()
            .name("snapshots".into())
            .spawn(move || {
                for job in inbox {
                    let answer = match job {
                        Job::Write(write) => write_out(&files, &key, *write),
                        Job::Load(mark) => {
                            let snapshot = files.load(&key, mark);
                            if let Err(e) = &snapshot {
                                tracing::warn!(error = %e, "snapshot not loaded");
                            }
                            Done::Loaded { mark, snapshot: snapshot.ok() }
                        }
                    };
                    if answers.send(answer).is_err() {
                        return;
                    }
                }
            })
            .map_err(|source| SnapshotError::Io { path: config.dir.clone(), source })?;
        Ok(Snapshots {
            store,
            jobs: Some(jobs),
            done,
            thread: Some(thread),
            known,
            names: HashMap::new(),
            wanted: VecDeque::new(),
            reading: None,
            asked: 0,
            loading: HashSet::new(),
        })
    }

    pub fn traffic(&self) -> (u64, u64) {
        self.store.traffic()
    }

    /// Whether something is still to be read out.
    pub fn busy(&self) -> bool {
        !self.wanted.is_empty() || self.reading.is_some()
    }

    /// Notes a settled checkpoint for writing.
    pub fn want(&mut self, tokens: Vec<u32>, tree: &PrefixTree, pages: &mut Pages) {
        let Some(checkpoint) = tree.get(&tokens) else { return };
        if self.known.contains(&(checkpoint.mark.pos, checkpoint.mark.prefix)) {
            return;
        }
        if self.wanted.len() >= WANTED_MAX
            && let Some(oldest) = self.wanted.pop_front()
        {
            pages.release(&oldest.checkpoint.pages);
        }
        pages.hold(&checkpoint.pages);
        self.wanted.push_back(Wanted { tokens, checkpoint: checkpoint.clone() });
    }

    /// Adds read operations to a step. The answers to them, in order.
    pub fn attach(&mut self, step: &mut Step, tree: &PrefixTree, pages: &mut Pages) -> Vec<Read> {
        let mut reads = Vec::new();
        if self.asked > 0 {
            return reads;
        }
        while self.reading.is_none() {
            let Some(wanted) = self.wanted.pop_front() else { return reads };
            // Its place may have been given to another checkpoint.
            if tree.get(&wanted.tokens).is_none_or(|c| c.id != wanted.checkpoint.id) {
                pages.release(&wanted.checkpoint.pages);
                continue;
            }
            step.after.push(StateOp::ReadCheckpoint { id: wanted.checkpoint.id });
            reads.push(Read::Frontier);
            self.reading = Some(Reading { wanted, frontier: Vec::new(), rows: HashMap::new() });
        }
        let Some(reading) = &self.reading else { return reads };
        for &page in missing(reading, &self.names, pages).iter().take(READS_MAX) {
            step.after.push(StateOp::ReadPage { page });
            reads.push(Read::Page(page));
        }
        self.asked = reads.len();
        reads
    }

    /// Takes what a settled step has read out.
    pub fn take(&mut self, reads: Vec<Read>, answers: Vec<Vec<u8>>, pages: &mut Pages) {
        let Some(mut reading) = self.reading.take() else { return };
        if reads.is_empty() {
            self.reading = Some(reading);
            return;
        }
        self.asked = 0;
        for (read, bytes) in reads.into_iter().zip(answers) {
            match read {
                Read::Frontier => reading.frontier = bytes,
                Read::Page(page) => drop(reading.rows.insert(page, bytes)),
            }
        }
        if !missing(&reading, &self.names, pages).is_empty() {
            self.reading = Some(reading);
            return;
        }
        let Reading { wanted: Wanted { tokens, checkpoint }, frontier, mut rows } = reading;
        let full = checkpoint.mark.pos / PAGE_TOKENS;
        let last_page = checkpoint.pages.get(full).and_then(|p| rows.remove(p)).unwrap_or_default();
        let mut sources = Vec::with_capacity(full);
        for &page in &checkpoint.pages[..full] {
            let generation = pages.generation(page);
            let source = match (rows.remove(&page), self.names.get(&page)) {
                (Some(bytes), _) => Rows::Read(bytes),
                (None, Some((_, name))) => Rows::Named(*name),
                // Cannot be: nothing is missing.
                (None, None) => return pages.release(&checkpoint.pages),
            };
            sources.push((page, generation, source));
        }
        pages.release(&checkpoint.pages);
        let write = Write { mark: checkpoint.mark, tokens, pages: sources, last_page, frontier };
        match self.jobs.as_ref().map(|j| j.try_send(Job::Write(Box::new(write)))) {
            Some(Ok(())) => {}
            Some(Err(TrySendError::Full(_))) => {
                tracing::warn!("the disk is slower than the sessions grow: a snapshot is left out");
            }
            Some(Err(TrySendError::Disconnected(_))) | None => {}
        }
    }

    /// Steps were lost: what they read out is read again.
    pub fn lost(&mut self) {
        self.asked = 0;
        if let Some(reading) = self.reading.take() {
            self.wanted.push_front(reading.wanted);
        }
    }

    /// Lets go of every page, for sessions that need them or because the stages remember nothing.
    pub fn let_go(&mut self, pages: &mut Pages) {
        self.lost();
        self.wanted.drain(..).for_each(|w| pages.release(&w.checkpoint.pages));
    }

    /// The stages remember nothing: no page in memory is what its name says.
    pub fn forget(&mut self, pages: &mut Pages) {
        self.let_go(pages);
        self.names.clear();
    }

    /// Where a prompt could continue from disk: the longest stored prefix of at most `limit` tokens that saves rows
    /// against the `reusable` in memory. Its loading begins, if there is room.
    pub fn seek(&mut self, tokens: &[u32], limit: usize, reusable: usize) -> Option<Mark> {
        if self.known.is_empty() {
            return None;
        }
        let mut mark = Mark::default();
        let mut best = None;
        for &token in &tokens[..limit] {
            mark = mark.extend(&[token]);
            if self.known.contains(&(mark.pos, mark.prefix)) {
                best = Some(mark);
            }
        }
        let best = best.filter(|m| m.pos >= reusable + GAIN_MIN)?;
        if self.loading.contains(&(best.pos, best.prefix)) {
            return Some(best);
        }
        self.jobs.as_ref()?.try_send(Job::Load(best)).ok()?;
        self.loading.insert((best.pos, best.prefix));
        Some(best)
    }

    pub fn is_loading(&self, mark: Mark) -> bool {
        self.loading.contains(&(mark.pos, mark.prefix))
    }

    /// What the thread has loaded since.
    pub fn poll(&mut self) -> Vec<Snapshot> {
        let mut loaded = Vec::new();
        while let Ok(done) = self.done.try_recv() {
            match done {
                Done::Written { mark, names } => {
                    self.known.insert((mark.pos, mark.prefix));
                    self.names.extend(names.into_iter().map(|(page, generation, n)| (page, (generation, n))));
                }
                Done::NotWritten { pages } => {
                    // A page that was on disk may be gone.
                    self.names.retain(|page, _| !pages.contains(page));
                }
                Done::Loaded { mark, snapshot } => {
                    self.loading.remove(&(mark.pos, mark.prefix));
                    match snapshot {
                        Some(s) => loaded.push(s),
                        None => drop(self.known.remove(&(mark.pos, mark.prefix))),
                    }
                }
            }
        }
        loaded
    }
}

impl Drop for Snapshots {
    fn drop(&mut self) {
        // What was handed over is written before the program ends.
        self.jobs = None;
        while self.done.recv().is_ok() {}
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the snapshot thread panicked");
        }
    }
}

/// Pages of the checkpoint whose rows are neither read nor on disk.
fn missing(reading: &Reading, names: &HashMap<PageId, (u32, PageName)>, pages: &Pages) -> Vec<PageId> {
    let c = &reading.wanted.checkpoint;
    let full = c.mark.pos / PAGE_TOKENS;
    let named = |page: PageId| names.get(&page).is_some_and(|n| n.0 == pages.generation(page));
    let there = |(i, page): (usize, PageId)| reading.rows.contains_key(&page) || (i < full && named(page));
    c.pages.iter().copied().enumerate().filter(|&p| !there(p)).map(|p| p.1).collect()
}

fn write_out(store: &SnapshotStore, key: &SnapshotKey, write: Write) -> Done {
    let Write { mark, tokens, pages, last_page, frontier } = write;
    let ids: Vec<PageId> = pages.iter().map(|p| p.0).collect();
    let full = pages.len() * PAGE_TOKENS;
    let written = || -> Result<Vec<(PageId, u32, PageName)>, SnapshotError> {
        let mut names = Vec::with_capacity(pages.len());
        for ((page, generation, rows), tokens) in pages.into_iter().zip(tokens.chunks_exact(PAGE_TOKENS)) {
            let name = match rows {
                Rows::Named(name) => store.has_page(name)?,
                Rows::Read(rows) => store.put_page(&PageFile { tokens: tokens.to_vec(), rows })?,
            };
            names.push((page, generation, name));
        }
        let list: Vec<PageName> = names.iter().map(|n| n.2).collect();
        let last_tokens = tokens[full..].to_vec();
        store.put_checkpoint(
            key,
            &Snapshot { mark, pages: Vec::new(), last_tokens, last_page, frontier },
            &list,
        )?;
        store.keep_budget()?;
        Ok(names)
    };
    match written() {
        Ok(names) => Done::Written { mark, names },
        Err(e) => {
            tracing::warn!(error = %e, "snapshot not written");
            Done::NotWritten { pages: ids }
        }
    }
}
