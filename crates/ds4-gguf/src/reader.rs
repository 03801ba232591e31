//! The reader: one pass over the header, then tensors as ranges of the map.

use std::collections::HashMap;
use std::fs::File;
use std::ops::{Deref, Range};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use memmap2::Mmap;

use crate::Result;
use crate::error::Error;
use crate::format::BlockFormat;
use crate::metadata::{self, Metadata};

/// Parts of one split model.
const PARTS_MAX: usize = 1024;
/// Dimensions of a tensor.
const DIMS_MAX: u32 = 4;

/// Bytes of one file: mapped, owned, or part of the program.
enum Source {
    Map(Mmap),
    Owned(Vec<u8>),
    Static(&'static [u8]),
}

impl Deref for Source {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Self::Map(m) => m,
            Self::Owned(v) => v,
            Self::Static(s) => s,
        }
    }
}

/// A tensor's bytes, keeping the map alive: what backends hold on to.
#[derive(Clone)]
pub struct TensorBytes {
    source: Arc<Source>,
    range: Range<usize>,
}

impl Deref for TensorBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.source[self.range.clone()]
    }
}

/// One tensor of the table.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorInfo {
    pub name: String,
    pub format: BlockFormat,
    /// ggml order: the contiguous dimension first.
    pub shape: Vec<u64>,
    part: usize,
    range: Range<usize>,
}

impl TensorInfo {
    pub fn byte_len(&self) -> u64 {
        self.range.len() as u64
    }

    /// Byte offset in its file.
    pub fn offset(&self) -> u64 {
        self.range.start as u64
    }

    /// Elements of one row, the contiguous dimension.
    pub fn cols(&self) -> u64 {
        self.shape.first().copied().unwrap_or(1)
    }

    /// Product of the other dimensions.
    pub fn rows(&self) -> u64 {
        self.shape.iter().skip(1).product()
    }

    pub fn row_bytes(&self) -> u64 {
        self.format.row_bytes(self.cols())
    }
}

/// An open model file. Clones share the map.
#[derive(Clone)]
pub struct Gguf {
    inner: Arc<Inner>,
}

struct Inner {
    path: PathBuf,
    version: u32,
    metadata: Metadata,
    tensors: Vec<TensorInfo>,
    by_name: HashMap<String, usize>,
    parts: Vec<Arc<Source>>,
}

impl Gguf {
    /// Opens a file, and the other parts where it is one of `-00001-of-0000N`.
    pub fn open(path: &Path) -> Result<Self> {
        let paths = part_paths(path)?;
        let sources = paths.iter().map(|p| map(p)).collect::<Result<Vec<_>>>()?;
        Self::parse(path.to_path_buf(), sources)
    }

    /// A file that is in memory.
    pub fn from_bytes(name: &str, bytes: Vec<u8>) -> Result<Self> {
        Self::parse(name.into(), vec![Source::Owned(bytes)])
    }

    /// A file that is part of the program.
    pub fn from_static(name: &str, bytes: &'static [u8]) -> Result<Self> {
        Self::parse(name.into(), vec![Source::Static(bytes)])
    }

    fn parse(path: PathBuf, sources: Vec<Source>) -> Result<Self> {
        let mut inner = Inner {
            path,
            version: 0,
            metadata: Metadata::default(),
            tensors: Vec::new(),
            by_name: HashMap::new(),
            parts: Vec::new(),
        };
        for (part, source) in sources.into_iter().enumerate() {
            let (version, metadata, tensors) = parse_part(&source, part)?;
            if part == 0 {
                inner.version = version;
                inner.metadata = metadata;
            }
            for t in tensors {
                let index = inner.tensors.len();
                if inner.by_name.insert(t.name.clone(), index).is_some() {
                    return Err(Error::Tensor { name: t.name, reason: "appears twice".into() });
                }
                inner.tensors.push(t);
            }
            inner.parts.push(Arc::new(source));
        }
        Ok(Gguf { inner: Arc::new(inner) })
    }

    pub fn path(&self) -> &Path {
        &self.inner.path
    }

    pub fn version(&self) -> u32 {
        self.inner.version
    }

    pub fn metadata(&self) -> &Metadata {
        &self.inner.metadata
    }

    /// In file order.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = &TensorInfo> {
        self.inner.tensors.iter()
    }

    pub fn tensor(&self, name: &str) -> Option<&TensorInfo> {
        self.inner.by_name.get(name).map(|&i| &self.inner.tensors[i])
    }

    /// A tensor's bytes, borrowed from the map. `t` comes from this file.
    pub fn data(&self, t: &TensorInfo) -> &[u8] {
        &self.inner.parts[t.part][t.range.clone()]
    }

    /// The same as a handle that keeps the map alive.
    pub fn bytes(&self, t: &TensorInfo) -> TensorBytes {
        TensorBytes { source: self.inner.parts[t.part].clone(), range: t.range.clone() }
    }
}

fn map(path: &Path) -> Result<Source> {
    let io = |source| Error::Io { path: path.to_path_buf(), source };
    let file = File::open(path).map_err(io)?;
    let meta = file.metadata().map_err(io)?;
    if meta.is_dir() {
        return Err(Error::Directory { path: path.to_path_buf() });
    }
    if meta.len() == 0 {
        return Ok(Source::Owned(Vec::new()));
    }
    // SAFETY: the map is read-only and lives as long as the Source. Another process that truncates the file while it is
    // mapped would raise SIGBUS; that is the known price of mapped weights, which every program of this kind pays.
    let map = unsafe { Mmap::map(&file) }.map_err(io)?;
    Ok(Source::Map(map))
}

/// The file itself, or all parts of its split, in order.
fn part_paths(path: &Path) -> Result<Vec<PathBuf>> {
    let whole = vec![path.to_path_buf()];
    let Some(stem) = path.file_name().and_then(|n| n.to_str()).and_then(|n| n.strip_suffix(".gguf")) else {
        return Ok(whole);
    };
    // `<name>-00001-of-00003`
    let Some((head, total)) = stem.rsplit_once("-of-") else { return Ok(whole) };
    let Some((head, number)) = head.rsplit_once('-') else { return Ok(whole) };
    let digits = |s: &str| (s.len() == 5).then(|| s.parse::<usize>().ok()).flatten();
    let (Some(number), Some(total)) = (digits(number), digits(total)) else { return Ok(whole) };
    if total == 0 || number == 0 || number > total || total > PARTS_MAX {
        return Err(Error::Split {
            reason: format!("{stem}: part {number} of {total}; expected 1 to {PARTS_MAX} parts"),
        });
    }
    let paths: Vec<PathBuf> =
        (1..=total).map(|i| path.with_file_name(format!("{head}-{i:05}-of-{total:05}.gguf"))).collect();
    if let Some(missing) = paths.iter().find(|p| !p.exists()) {
        return Err(Error::Split {
            reason: format!("part {} is missing beside the others", missing.display()),
        });
    }
    Ok(paths)
}

fn parse_part(bytes: &[u8], part: usize) -> Result<(u32, Metadata, Vec<TensorInfo>)> {
    let mut c = Cursor { bytes, at: 0 };
    let magic = &bytes[..bytes.len().min(4)];
    if magic != b"GGUF" {
        return Err(Error::Magic { found: String::from_utf8_lossy(magic).into_owned() });
    }
    c.at = 4;
    let version = c.u32("version")?;
    if version != 2 && version != 3 {
        return Err(Error::Version { found: version });
    }
    let n_tensors = c.u64("tensor count")?;
    let n_kv = c.u64("key count")?;
    // A key is at least its length, its type and one byte; a tensor its length, dimensions, type and offset.
    let n_tensors = c.count("tensor count", n_tensors, 8 + 4 + 4 + 8)?;
    let n_kv = c.count("key count", n_kv, 8 + 4 + 1)?;

    let mut metadata = Metadata::default();
    for _ in 0..n_kv {
        let key = c.string("a metadata key")?;
        let kind = c.u32(&key)?;
        let (value, kind) = metadata::read_value(&mut c, &key, kind)?;
        if metadata.get(&key).is_some() {
            return Err(c.malformed(&key, "the key appears twice".into()));
        }
        metadata.insert_as(key, value, kind);
    }
    let alignment = match metadata.get("general.alignment") {
        Some(_) => metadata.u64("general.alignment")?,
        None => 32,
    };
    if !alignment.is_power_of_two() || alignment > 1 << 20 {
        return Err(c.malformed("general.alignment", format!("{alignment} is not a power of two up to 2^20")));
    }

    struct Raw {
        info: TensorInfo,
        offset: u64,
        len: u64,
        at: usize,
    }
    let mut raw = Vec::with_capacity(n_tensors);
    for _ in 0..n_tensors {
        let name = c.string("a tensor name")?;
        let at = c.at;
        let dims = c.u32(&name)?;
        if dims == 0 || dims > DIMS_MAX {
            return Err(c.malformed(&name, format!("{dims} dimensions; supported: 1 to {DIMS_MAX}")));
        }
        let shape = (0..dims).map(|_| c.u64(&name)).collect::<Result<Vec<_>>>()?;
        let number = c.u32(&name)?;
        let format = BlockFormat::from_type_number(number).ok_or_else(|| Error::UnknownType {
            name: name.clone(),
            number,
            known: BlockFormat::foreign_name(number).map_or(String::new(), |n| format!(" ({n})")),
            supported: BlockFormat::SUPPORTED,
        })?;
        let offset = c.u64(&name)?;
        let len = byte_len(&name, format, &shape)?;
        let info = TensorInfo { name, format, shape, part, range: 0..0 };
        raw.push(Raw { info, offset, len, at });
    }
    let data_at = (c.at as u64).next_multiple_of(alignment);
    let total = bytes.len() as u64;
    let mut tensors = Vec::with_capacity(raw.len());
    for Raw { mut info, offset, len, at } in raw {
        let bad = |reason: String| Error::Malformed {
            what: format!("tensor {}", info.name),
            at: at as u64,
            reason,
        };
        if !offset.is_multiple_of(alignment) {
            return Err(bad(format!("offset {offset} is not a multiple of the alignment {alignment}")));
        }
        let start = data_at.checked_add(offset).ok_or_else(|| bad(format!("offset {offset} overflows")))?;
        let end = start.checked_add(len).ok_or_else(|| bad(format!("length {len} overflows")))?;
        if end > total {
            return Err(Error::Truncated {
                what: format!("tensor {} ({len} bytes)", info.name),
                at: start,
                len: total,
            });
        }
        info.range = start as usize..end as usize;
        tensors.push(info);
    }
    Ok((version, metadata, tensors))
}

/// Bytes of a tensor, every step checked.
pub(crate) fn byte_len(name: &str, format: BlockFormat, shape: &[u64]) -> Result<u64> {
    let bad = |reason: String| Error::Tensor { name: name.to_string(), reason };
    let cols = shape[0];
    let block = format.block_len() as u64;
    if !cols.is_multiple_of(block) {
        return Err(bad(format!("rows of {cols} values; {} comes in blocks of {block}", format.name())));
    }
    (cols / block)
        .checked_mul(format.block_bytes() as u64)
        .and_then(|row| shape[1..].iter().try_fold(row, |n, &d| n.checked_mul(d)))
        .ok_or_else(|| bad(format!("shape {shape:?} is too large")))
}

/// A bounds-checked little-endian reader that can say where it is.
pub(crate) struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl Cursor<'_> {
    fn take(&mut self, what: &str, n: usize) -> Result<&[u8]> {
        let end = self.at.checked_add(n).filter(|&e| e <= self.bytes.len()).ok_or_else(|| {
            Error::Truncated { what: what.to_string(), at: self.at as u64, len: self.bytes.len() as u64 }
        })?;
        let taken = &self.bytes[self.at..end];
        self.at = end;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self, what: &str) -> Result<[u8; N]> {
        let mut a = [0; N];
        a.copy_from_slice(self.take(what, N)?);
        Ok(a)
    }

    pub fn u8(&mut self, what: &str) -> Result<u8> {
        Ok(self.array::<1>(what)?[0])
    }

    pub fn u16(&mut self, what: &str) -> Result<u16> {
        Ok(u16::from_le_bytes(self.array(what)?))
    }

    pub fn u32(&mut self, what: &str) -> Result<u32> {
        Ok(u32::from_le_bytes(self.array(what)?))
    }

    pub fn u64(&mut self, what: &str) -> Result<u64> {
        Ok(u64::from_le_bytes(self.array(what)?))
    }

    pub fn bool(&mut self, what: &str) -> Result<bool> {
        match self.u8(what)? {
            0 => Ok(false),
            1 => Ok(true),
            b => Err(self.malformed(what, format!("boolean byte {b}; expected 0 or 1"))),
        }
    }

    pub fn string(&mut self, what: &str) -> Result<String> {
        let len = self.u64(what)?;
        let len = self.count(what, len, 1)?;
        let bytes = self.take(what, len)?.to_vec();
        String::from_utf8(bytes).map_err(|e| self.malformed(what, format!("not UTF-8: {e}")))
    }

    /// `n` things of at least `smallest` bytes each must fit into what is left of the file.
    pub fn count(&self, what: &str, n: u64, smallest: u64) -> Result<usize> {
        let left = (self.bytes.len() - self.at) as u64;
        match n.checked_mul(smallest) {
            Some(need) if need <= left => Ok(n as usize),
            _ => {
                Err(self
                    .malformed(what, format!("count {n} does not fit into the {left} bytes that are left")))
            }
        }
    }

    pub fn malformed(&self, what: &str, reason: String) -> Error {
        Error::Malformed { what: what.to_string(), at: self.at as u64, reason }
    }
}
