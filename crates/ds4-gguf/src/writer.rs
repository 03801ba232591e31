//! The writer: the header with every offset first, then the tensors one by one, so that a file larger than memory can be
//! written to anything that takes bytes.

use std::collections::HashSet;
use std::io::Write;

use crate::Result;
use crate::error::Error;
use crate::format::BlockFormat;
use crate::metadata::{ARRAY, Kind, Metadata, Value};
use crate::reader::byte_len;

/// The version that is written.
const VERSION: u32 = 3;
const ALIGNMENT: u64 = 32;

/// A line of the tensor table of a file to be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewTensor {
    pub name: String,
    pub format: BlockFormat,
    /// ggml order: the contiguous dimension first.
    pub shape: Vec<u64>,
}

/// Writes one file. The tensors' bytes follow in the order of the table.
pub struct GgufWriter<W> {
    out: W,
    /// What is still to come: name, bytes, padding after it.
    left: std::vec::IntoIter<(String, u64, u64)>,
    /// Bytes that the tensor under way still lacks, and its padding.
    open: Option<(String, u64, u64)>,
}

impl<W: Write> GgufWriter<W> {
    /// Writes the header. The alignment is the metadata's, or 32.
    pub fn new(mut out: W, metadata: &Metadata, tensors: &[NewTensor]) -> Result<Self> {
        let alignment = match metadata.get("general.alignment") {
            Some(_) => metadata.u64("general.alignment")?,
            None => ALIGNMENT,
        };
        if !alignment.is_power_of_two() || alignment > 1 << 20 {
            return Err(Error::WrongType {
                key: "general.alignment".into(),
                found: alignment.to_string(),
                expected: "a power of two up to 2^20",
            });
        }
        let mut header = Vec::new();
        header.extend(b"GGUF");
        header.extend(VERSION.to_le_bytes());
        header.extend((tensors.len() as u64).to_le_bytes());
        header.extend((metadata.len() as u64).to_le_bytes());
        for (key, value, kind) in metadata.entries() {
            string(&mut header, key);
            header.extend(kind.value.to_le_bytes());
            put_value(&mut header, value, kind);
        }
        let mut names = HashSet::new();
        let mut offset = 0u64;
        let mut left = Vec::with_capacity(tensors.len());
        for t in tensors {
            let bad = |reason: &str| Error::Tensor { name: t.name.clone(), reason: reason.into() };
            if t.shape.is_empty() || t.shape.len() > 4 {
                return Err(bad("has not 1 to 4 dimensions"));
            }
            if !names.insert(t.name.as_str()) {
                return Err(bad("appears twice"));
            }
            string(&mut header, &t.name);
            header.extend((t.shape.len() as u32).to_le_bytes());
            for d in &t.shape {
                header.extend(d.to_le_bytes());
            }
            header.extend(t.format.type_number().to_le_bytes());
            header.extend(offset.to_le_bytes());
            let len = byte_len(&t.name, t.format, &t.shape)?;
            let padded = len.checked_next_multiple_of(alignment).ok_or_else(|| bad("is too large"))?;
            offset = offset.checked_add(padded).ok_or_else(|| bad("ends beyond 2^64 bytes"))?;
            left.push((t.name.clone(), len, padded - len));
        }
        header.resize(header.len().next_multiple_of(alignment as usize), 0);
        out.write_all(&header)?;
        Ok(GgufWriter { out, left: left.into_iter(), open: None })
    }

    /// All bytes of the next tensor of the table.
    pub fn tensor(&mut self, name: &str, bytes: &[u8]) -> Result<()> {
        self.begin(name)?;
        self.append(bytes)?;
        self.close()
    }

    /// Starts the next tensor of the table, whose bytes come in pieces.
    pub fn begin(&mut self, name: &str) -> Result<()> {
        self.close()?;
        match self.left.next() {
            Some(next) if next.0 == name => {
                self.open = Some(next);
                Ok(())
            }
            Some((next, ..)) => Err(out_of_order(name, format!("{next} comes next in the table"))),
            None => Err(out_of_order(name, "the table has no more tensors".into())),
        }
    }

    /// More bytes of the tensor under way.
    pub fn append(&mut self, bytes: &[u8]) -> Result<()> {
        let Some((name, left, _)) = &mut self.open else {
            return Err(out_of_order("(none)", "no tensor was started".into()));
        };
        let n = bytes.len() as u64;
        *left = left
            .checked_sub(n)
            .ok_or_else(|| out_of_order(name, format!("{n} bytes where {left} are left of its shape")))?;
        Ok(self.out.write_all(bytes)?)
    }

    /// Ends the tensor under way, if there is one.
    fn close(&mut self) -> Result<()> {
        let Some((name, left, padding)) = self.open.take() else { return Ok(()) };
        if left != 0 {
            return Err(out_of_order(&name, format!("{left} bytes of its shape are missing")));
        }
        let zeros = [0u8; 64];
        let mut padding = padding as usize;
        while padding > 0 {
            let n = padding.min(zeros.len());
            self.out.write_all(&zeros[..n])?;
            padding -= n;
        }
        Ok(())
    }

    /// Ends the file and hands the output back, flushed.
    pub fn finish(mut self) -> Result<W> {
        self.close()?;
        if let Some((name, ..)) = self.left.next() {
            return Err(out_of_order(&name, "its bytes were never written".into()));
        }
        self.out.flush()?;
        Ok(self.out)
    }
}

fn out_of_order(name: &str, reason: String) -> Error {
    Error::Tensor { name: name.to_string(), reason }
}

fn string(out: &mut Vec<u8>, s: &str) {
    out.extend((s.len() as u64).to_le_bytes());
    out.extend(s.as_bytes());
}

fn put_value(out: &mut Vec<u8>, value: &Value, kind: Kind) {
    match value {
        Value::U64(v) => integer(out, i128::from(*v), kind.value),
        Value::I64(v) => integer(out, i128::from(*v), kind.value),
        Value::F64(v) => number(out, *v, kind.value),
        Value::Bool(v) => out.push(u8::from(*v)),
        Value::String(v) => string(out, v),
        Value::Integers(v) => array(out, kind, v, |out, x| integer(out, i128::from(*x), kind.element)),
        Value::Floats(v) => array(out, kind, v, |out, x| number(out, *x, kind.element)),
        Value::Bools(v) => array(out, kind, v, |out, x| out.push(u8::from(*x))),
        Value::Strings(v) => array(out, kind, v, |out, x| string(out, x)),
    }
}

fn array<T>(out: &mut Vec<u8>, kind: Kind, values: &[T], mut put: impl FnMut(&mut Vec<u8>, &T)) {
    debug_assert_eq!(kind.value, ARRAY);
    out.extend(kind.element.to_le_bytes());
    out.extend((values.len() as u64).to_le_bytes());
    for v in values {
        put(out, v);
    }
}

/// The low bytes of `v`, as many as its type has. The type is the one the value was read in, or was chosen to hold it.
fn integer(out: &mut Vec<u8>, v: i128, kind: u32) {
    let bytes = v.to_le_bytes();
    let n = match kind {
        0 | 1 => 1,
        2 | 3 => 2,
        4 | 5 => 4,
        _ => 8,
    };
    out.extend(&bytes[..n]);
}

fn number(out: &mut Vec<u8>, v: f64, kind: u32) {
    match kind {
        6 => out.extend((v as f32).to_le_bytes()),
        _ => out.extend(v.to_le_bytes()),
    }
}
