//! Snapshots on disk: pages under the hash of their content, and small checkpoint files that name them.
//!
//! ```text
//! DIR/pages/<blake3>                          one full page of 128 tokens: header, token ids, rows
//! DIR/checkpoints/<key>-<position>-<prefix>   header, page names, last tokens, last page, frontier, blake3 of it all
//! ```
//! A page is written once, whoever shares it, so bytes written grow with new tokens. Every file is written under a
//! temporary name, flushed, and renamed: it is whole or not there. Everything is verified when it is read; what fails is
//! deleted and computed anew. `<key>` stands for what the bytes depend on: model, numeric mode, row format, layout.
//! Several processes may share a folder: files only ever appear whole or vanish, and collecting garbage takes a lock.

use std::collections::{HashMap, HashSet};
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use blake3::Hash;
use ds4_model::PAGE_TOKENS;
use thiserror::Error;

use crate::stage::Mark;

const PAGE_MAGIC: &[u8; 8] = b"DS4PAGE\x01";
const CHECKPOINT_MAGIC: &[u8; 8] = b"DS4CKPT\x01";
const HASH_BYTES: usize = 32;
/// Pages that no checkpoint names are kept so long: another process may be about to name them.
const PAGE_GRACE: Duration = Duration::from_secs(600);
/// Longest checkpoint file that is read: a frontier and a page of any model, and 2^24 page names.
const FILE_BYTES_MAX: u64 = 2 << 30;

#[derive(Debug, Error)]
pub enum SnapshotError {
    #[error("{}: {source}", path.display())]
    Io { path: PathBuf, source: io::Error },
    #[error("{}: {reason}; the file is deleted", path.display())]
    Corrupt { path: PathBuf, reason: &'static str },
    #[error("{needs} bytes do not fit the snapshot budget of {budget}")]
    TooBig { needs: u64, budget: u64 },
}

type Result<T> = std::result::Result<T, SnapshotError>;

/// What snapshots depend on. Two keys that differ in anything never read each other's files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SnapshotKey {
    hash: Hash,
    pub page_bytes: usize,
    pub frontier_bytes: usize,
}

impl SnapshotKey {
    /// `model`: a fingerprint of the weights; `mode`: numeric mode, row format, prompt template, in words.
    pub fn new(model: &[u8], mode: &str, page_bytes: usize, frontier_bytes: usize) -> Self {
        let mut h = blake3::Hasher::new();
        for part in [model, mode.as_bytes()] {
            h.update(&(part.len() as u64).to_le_bytes());
            h.update(part);
        }
        h.update(&(page_bytes as u64).to_le_bytes());
        h.update(&(frontier_bytes as u64).to_le_bytes());
        SnapshotKey { hash: h.finalize(), page_bytes, frontier_bytes }
    }

    /// First part of the checkpoint files' names.
    fn short(&self) -> String {
        self.hash.to_hex()[..16].to_string()
    }
}

/// Name of a page: the hash of its file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PageName([u8; HASH_BYTES]);

/// A full page with the tokens that it belongs to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PageFile {
    pub tokens: Vec<u32>,
    pub rows: Vec<u8>,
}

impl PageFile {
    fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(8 + self.tokens.len() * 4 + self.rows.len());
        out.extend_from_slice(PAGE_MAGIC);
        out.extend(self.tokens.iter().flat_map(|t| t.to_le_bytes()));
        out.extend_from_slice(&self.rows);
        out
    }
}

/// All that continues a sequence: its tokens, and the state after them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot {
    pub mark: Mark,
    /// Full pages, in order.
    pub pages: Vec<PageFile>,
    /// Tokens behind the full pages, and the page that holds their rows; both empty at a multiple of 128.
    pub last_tokens: Vec<u32>,
    pub last_page: Vec<u8>,
    pub frontier: Vec<u8>,
}

impl Snapshot {
    pub fn tokens(&self) -> Vec<u32> {
        self.pages.iter().flat_map(|p| &p.tokens).chain(&self.last_tokens).copied().collect()
    }
}

/// A checkpoint file as listed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    pub path: PathBuf,
    pub key: String,
    pub mark: Mark,
    pub bytes: u64,
    pub used: SystemTime,
}

/// What a check of the whole folder found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Verified {
    pub checkpoints: usize,
    pub pages: usize,
    /// Files that failed and were deleted.
    pub deleted: Vec<PathBuf>,
}

/// A folder of snapshots.
#[derive(Debug)]
pub struct SnapshotStore {
    dir: PathBuf,
    budget: u64,
    written: AtomicU64,
    read: AtomicU64,
}

static TEMPORARY: AtomicU64 = AtomicU64::new(0);

impl SnapshotStore {
    /// Opens or makes the folder. `budget`: bytes of all files in it.
    pub fn open(dir: &Path, budget: u64) -> Result<Self> {
        for sub in ["pages", "checkpoints"] {
            let path = dir.join(sub);
            fs::create_dir_all(&path).map_err(|source| SnapshotError::Io { path, source })?;
        }
        Ok(SnapshotStore {
            dir: dir.to_path_buf(),
            budget,
            written: AtomicU64::new(0),
            read: AtomicU64::new(0),
        })
    }

    /// Bytes written and read since it was opened.
    pub fn traffic(&self) -> (u64, u64) {
        (self.written.load(Ordering::Relaxed), self.read.load(Ordering::Relaxed))
    }

    fn page_path(&self, name: PageName) -> PathBuf {
        self.dir.join("pages").join(Hash::from_bytes(name.0).to_hex().as_str())
    }

    fn checkpoint_path(&self, key: &SnapshotKey, mark: Mark) -> PathBuf {
        self.dir.join("checkpoints").join(format!("{}-{}-{:016x}", key.short(), mark.pos, mark.prefix))
    }

    /// Whether this checkpoint is stored already.
    pub fn contains(&self, key: &SnapshotKey, mark: Mark) -> bool {
        self.checkpoint_path(key, mark).exists()
    }

    /// Writes a page unless it is there.
    pub fn put_page(&self, page: &PageFile) -> Result<PageName> {
        let bytes = page.encode();
        let name = PageName(*blake3::hash(&bytes).as_bytes());
        let path = self.page_path(name);
        if !path.exists() {
            self.write(&path, &bytes)?;
        }
        Ok(name)
    }

    /// The page's name, if it is still there.
    pub fn has_page(&self, name: PageName) -> Result<PageName> {
        let path = self.page_path(name);
        match path.metadata() {
            Ok(_) => Ok(name),
            Err(source) => Err(SnapshotError::Io { path, source }),
        }
    }

    /// Writes a checkpoint whose full pages have been put. Older ones give way to the budget.
    pub fn put_checkpoint(&self, key: &SnapshotKey, s: &Snapshot, pages: &[PageName]) -> Result<()> {
        let mut out = Vec::new();
        out.extend_from_slice(CHECKPOINT_MAGIC);
        out.extend_from_slice(key.hash.as_bytes());
        for n in [s.mark.pos as u64, s.mark.prefix, pages.len() as u64] {
            out.extend_from_slice(&n.to_le_bytes());
        }
        for n in [s.last_tokens.len(), s.last_page.len(), s.frontier.len()] {
            out.extend_from_slice(&(n as u64).to_le_bytes());
        }
        out.extend(pages.iter().flat_map(|p| p.0));
        out.extend(s.last_tokens.iter().flat_map(|t| t.to_le_bytes()));
        out.extend_from_slice(&s.last_page);
        out.extend_from_slice(&s.frontier);
        let sum = blake3::hash(&out);
        out.extend_from_slice(sum.as_bytes());
        let page_file = (8 + PAGE_TOKENS * 4 + key.page_bytes) as u64;
        let needs = out.len() as u64 + pages.len() as u64 * page_file;
        if needs > self.budget {
            // It would be the next to go.
            return Err(SnapshotError::TooBig { needs, budget: self.budget });
        }
        self.write(&self.checkpoint_path(key, s.mark), &out)
    }

    fn write(&self, path: &Path, bytes: &[u8]) -> Result<()> {
        let fail = |source| SnapshotError::Io { path: path.to_path_buf(), source };
        let n = TEMPORARY.fetch_add(1, Ordering::Relaxed);
        let temporary = path.with_extension(format!("{}-{n}.tmp", std::process::id()));
        let done = File::create(&temporary)
            .and_then(|mut f| f.write_all(bytes).and_then(|()| f.sync_data()))
            .and_then(|()| fs::rename(&temporary, path));
        if done.is_err() {
            // Best effort: `gc` removes what is left.
            let _ = fs::remove_file(&temporary);
        }
        done.map_err(fail)?;
        self.written.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        Ok(())
    }

    fn read(&self, path: &Path) -> Result<Vec<u8>> {
        let fail = |source| SnapshotError::Io { path: path.to_path_buf(), source };
        let file = File::open(path).map_err(fail)?;
        let mut bytes = Vec::new();
        file.take(FILE_BYTES_MAX).read_to_end(&mut bytes).map_err(fail)?;
        self.read.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        Ok(bytes)
    }

    fn corrupt(&self, path: &Path, reason: &'static str) -> SnapshotError {
        tracing::warn!(path = %path.display(), reason, "snapshot rejected");
        // Another process may have deleted it already.
        let _ = fs::remove_file(path);
        SnapshotError::Corrupt { path: path.to_path_buf(), reason }
    }

    /// Position and prefix of every checkpoint under `key`.
    pub fn marks(&self, key: &SnapshotKey) -> Result<HashSet<(usize, u64)>> {
        let short = key.short();
        Ok(self.list()?.into_iter().filter(|e| e.key == short).map(|e| (e.mark.pos, e.mark.prefix)).collect())
    }

    /// Reads and verifies a checkpoint with all its pages.
    pub fn load(&self, key: &SnapshotKey, mark: Mark) -> Result<Snapshot> {
        let path = self.checkpoint_path(key, mark);
        let (mut snapshot, names) = self.read_checkpoint(&path, Some((key, mark)))?;
        for name in names {
            snapshot.pages.push(self.load_page(name, key.page_bytes).inspect_err(|_| {
                // A checkpoint without its pages is of no use.
                let _ = fs::remove_file(&path);
            })?);
        }
        if Mark::default().extend(&snapshot.tokens()) != mark {
            return Err(self.corrupt(&path, "its tokens are not those of its name"));
        }
        // The least recently used go first; where the clock cannot be set, they go by age.
        let _ = File::open(&path).and_then(|f| f.set_modified(SystemTime::now()));
        Ok(snapshot)
    }

    fn load_page(&self, name: PageName, page_bytes: usize) -> Result<PageFile> {
        let path = self.page_path(name);
        let bytes = self.read(&path)?;
        if *blake3::hash(&bytes).as_bytes() != name.0 {
            return Err(self.corrupt(&path, "its content is not what its name says"));
        }
        let tokens_end = 8 + PAGE_TOKENS * 4;
        if bytes.get(..8) != Some(PAGE_MAGIC) || bytes.len() != tokens_end + page_bytes {
            return Err(self.corrupt(&path, "it is no page of this model"));
        }
        Ok(PageFile { tokens: ids(&bytes[8..tokens_end]), rows: bytes[tokens_end..].to_vec() })
    }

    /// Reads and verifies a checkpoint file; without its pages.
    fn read_checkpoint(
        &self,
        path: &Path,
        want: Option<(&SnapshotKey, Mark)>,
    ) -> Result<(Snapshot, Vec<PageName>)> {
        let bytes = self.read(path)?;
        let bad = |reason| self.corrupt(path, reason);
        let head = 8 + HASH_BYTES + 6 * 8;
        if bytes.len() < head + HASH_BYTES {
            return Err(bad("it is cut off"));
        }
        let (body, sum) = bytes.split_at(bytes.len() - HASH_BYTES);
        if blake3::hash(body).as_bytes() != sum {
            return Err(bad("its checksum does not match"));
        }
        if &body[..8] != CHECKPOINT_MAGIC {
            return Err(bad("it is no checkpoint of this version"));
        }
        let number = |i: usize| {
            let at = 8 + HASH_BYTES + i * 8;
            let mut n = [0; 8];
            n.copy_from_slice(&body[at..at + 8]);
            u64::from_le_bytes(n)
        };
        let mark = Mark { pos: number(0) as usize, prefix: number(1) };
        if let Some((key, wanted)) = want
            && (&body[8..8 + HASH_BYTES] != key.hash.as_bytes() || mark != wanted)
        {
            return Err(bad("it belongs to another model or sequence"));
        }
        let (pages, tokens, page, frontier) = (number(2), number(3), number(4), number(5));
        let parts = [pages.saturating_mul(HASH_BYTES as u64), tokens.saturating_mul(4), page, frontier];
        let total = parts.iter().fold(head as u64, |a, b| a.saturating_add(*b));
        if total != body.len() as u64 {
            return Err(bad("its parts are not as long as it says"));
        }
        if let Some((key, _)) = want
            && (frontier != key.frontier_bytes as u64
                || page != if tokens == 0 { 0 } else { key.page_bytes as u64 }
                || pages.saturating_mul(PAGE_TOKENS as u64).saturating_add(tokens) != mark.pos as u64
                || tokens >= PAGE_TOKENS as u64)
        {
            return Err(bad("its parts are not those of this model"));
        }
        let mut rest = &body[head..];
        let mut part = |bytes: u64| {
            let (a, b) = rest.split_at(bytes as usize);
            rest = b;
            a
        };
        let names = part(parts[0]).chunks_exact(HASH_BYTES).map(page_name).collect();
        let last_tokens = ids(part(parts[1]));
        let last_page = part(parts[2]).to_vec();
        let frontier = part(parts[3]).to_vec();
        Ok((Snapshot { mark, pages: Vec::new(), last_tokens, last_page, frontier }, names))
    }

    /// All checkpoints, the least recently used first.
    pub fn list(&self) -> Result<Vec<Entry>> {
        let mut entries: Vec<Entry> = self
            .files("checkpoints")?
            .into_iter()
            .filter_map(|(path, bytes, used)| {
                let name = path.file_name()?.to_str()?;
                let mut parts = name.split('-');
                let key = parts.next()?.to_string();
                let pos = parts.next()?.parse().ok()?;
                let prefix = u64::from_str_radix(parts.next()?, 16).ok()?;
                parts.next().is_none().then_some(())?;
                Some(Entry { key, mark: Mark { pos, prefix }, bytes, used, path })
            })
            .collect();
        entries.sort_by_key(|e| e.used);
        Ok(entries)
    }

    fn files(&self, sub: &str) -> Result<Vec<(PathBuf, u64, SystemTime)>> {
        let dir = self.dir.join(sub);
        let read = fs::read_dir(&dir).map_err(|source| SnapshotError::Io { path: dir, source })?;
        // A file that vanishes meanwhile was deleted by another process.
        let known = |e: io::Result<fs::DirEntry>| {
            let e = e.ok()?;
            let meta = e.metadata().ok()?;
            Some((e.path(), meta.len(), meta.modified().ok()?))
        };
        Ok(read.filter_map(known).collect())
    }

    /// Bytes of all files.
    pub fn size(&self) -> Result<u64> {
        let pages = self.files("pages")?;
        Ok(pages.iter().chain(&self.files("checkpoints")?).map(|f| f.1).sum())
    }

    /// Reads and checks every file; those that fail are deleted.
    pub fn verify(&self) -> Result<Verified> {
        let mut found = Verified::default();
        let mut there = HashSet::new();
        for (path, ..) in self.files("pages")? {
            let name = path.file_name().and_then(|n| n.to_str()).and_then(|n| Hash::from_hex(n).ok());
            let Some(name) = name else { continue };
            match self.read(&path) {
                Ok(bytes) if blake3::hash(&bytes) == name => {
                    there.insert(PageName(*name.as_bytes()));
                    found.pages += 1;
                }
                Ok(_) => {
                    self.corrupt(&path, "its content is not what its name says");
                    found.deleted.push(path);
                }
                Err(e) => return Err(e),
            }
        }
        for entry in self.list()? {
            match self.read_checkpoint(&entry.path, None) {
                Ok((_, names)) if names.iter().all(|n| there.contains(n)) => found.checkpoints += 1,
                Ok(_) => {
                    self.corrupt(&entry.path, "a page of it is missing");
                    found.deleted.push(entry.path);
                }
                Err(SnapshotError::Corrupt { path, .. }) => found.deleted.push(path),
                Err(e) => return Err(e),
            }
        }
        Ok(found)
    }

    /// Deletes the least recently used checkpoints until the folder fits `budget`, pages that no checkpoint names, and
    /// what writers left behind. `false`: another process is at it.
    pub fn collect(&self, budget: u64, grace: Duration) -> Result<bool> {
        let path = self.dir.join("lock");
        let fail = |source| SnapshotError::Io { path: path.clone(), source };
        let lock = File::options().create(true).truncate(false).write(true).open(&path).map_err(fail)?;
        if lock.try_lock().is_err() {
            return Ok(false);
        }
        let mut named: HashMap<PageName, usize> = HashMap::new();
        let mut entries = Vec::new();
        for entry in self.list()? {
            let Ok((_, names)) = self.read_checkpoint(&entry.path, None) else { continue };
            names.iter().for_each(|n| *named.entry(*n).or_default() += 1);
            entries.push((entry, names));
        }
        let mut pages: HashMap<PageName, (PathBuf, u64, SystemTime)> = HashMap::new();
        let old = |t: SystemTime| t.elapsed().is_ok_and(|age| age >= grace);
        for file in self.files("pages")?.into_iter().chain(self.files("checkpoints")?) {
            let name = file.0.file_name().and_then(|n| n.to_str()).unwrap_or_default();
            if name.ends_with(".tmp") {
                if old(file.2) {
                    self.remove_file(&file.0)?;
                }
            } else if let Ok(hash) = Hash::from_hex(name) {
                pages.insert(PageName(*hash.as_bytes()), file);
            }
        }
        let mut size = self.size()?;
        for (name, (path, bytes, modified)) in &pages {
            if !named.contains_key(name) && old(*modified) {
                self.remove_file(path)?;
                size = size.saturating_sub(*bytes);
            }
        }
        for (entry, names) in entries {
            if size <= budget {
                break;
            }
            self.remove_file(&entry.path)?;
            size = size.saturating_sub(entry.bytes);
            for name in names {
                let Some(count) = named.get_mut(&name) else { continue };
                *count -= 1;
                if *count == 0
                    && let Some((path, bytes, _)) = pages.get(&name)
                {
                    self.remove_file(path)?;
                    size = size.saturating_sub(*bytes);
                }
            }
        }
        Ok(true)
    }

    /// Deletes one checkpoint; its pages go with the next collection.
    pub fn remove(&self, entry: &Entry) -> Result<()> {
        self.remove_file(&entry.path)
    }

    /// Keeps the budget after something was written.
    pub fn keep_budget(&self) -> Result<()> {
        if self.size()? > self.budget {
            self.collect(self.budget, PAGE_GRACE)?;
        }
        Ok(())
    }

    fn remove_file(&self, path: &Path) -> Result<()> {
        match fs::remove_file(path) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => {
                Err(SnapshotError::Io { path: path.to_path_buf(), source: e })
            }
            _ => Ok(()),
        }
    }
}

fn ids(bytes: &[u8]) -> Vec<u32> {
    bytes.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
}

fn page_name(bytes: &[u8]) -> PageName {
    let mut name = [0; HASH_BYTES];
    name.copy_from_slice(bytes);
    PageName(name)
}
