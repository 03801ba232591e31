//! Golden files under `testdata/`, and how tests read them. Everything here panics with the file's name: it is for
//! tests only, and a missing golden is a broken checkout.

#![forbid(unsafe_code)]

use std::path::PathBuf;

use safetensors::{Dtype, SafeTensors};

/// Path of a file under `testdata/`.
pub fn path(name: &str) -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../testdata")).join(name)
}

pub fn bytes(name: &str) -> Vec<u8> {
    std::fs::read(path(name)).unwrap_or_else(|e| panic!("testdata/{name}: {e}"))
}

/// The tiny model: six layers of every kind, random weights, every clamp and selection reached.
pub fn tiny_model() -> PathBuf {
    path("tiny-q2q4.gguf")
}

/// Another tiny model, of other shapes and formats: compressed from layer 0 on as Pro is, two residual streams, window
/// 64, six heads in three groups, MXFP4, Q3_K, Q5_K, Q6_K and BF16 tensors.
pub fn odd_model() -> PathBuf {
    path("odd-mix.gguf")
}

/// The 700 token ids that every golden of the tiny model starts from.
pub fn prompt_ids() -> Vec<u32> {
    ids("prompt_ids.npy")
}

/// Token ids of an `.npy` file.
pub fn ids(name: &str) -> Vec<u32> {
    npy(name, "<i4").1.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
}

/// Rows and values of a two-dimensional f32 `.npy` file.
pub fn npy_f32(name: &str) -> (usize, Vec<f32>) {
    let (rows, data) = npy(name, "<f4");
    (rows, floats(&data))
}

/// First dimension and data of a `.npy` file (version 1, C order), whose element type must be `dtype`.
fn npy(name: &str, dtype: &str) -> (usize, Vec<u8>) {
    let file = bytes(name);
    assert_eq!(&file[..6], b"\x93NUMPY", "{name}");
    let header_len = u16::from_le_bytes([file[8], file[9]]) as usize;
    let header = std::str::from_utf8(&file[10..10 + header_len]).expect(name);
    assert!(header.contains(&format!("'descr': '{dtype}'")), "{name}: {header}");
    assert!(header.contains("'fortran_order': False"), "{name}: {header}");
    let shape = header.split("'shape': (").nth(1).expect(name);
    let rows = shape.split([',', ')']).next().and_then(|n| n.trim().parse().ok()).expect(name);
    (rows, file[10 + header_len..].to_vec())
}

fn floats(data: &[u8]) -> Vec<f32> {
    data.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
}

/// A `.safetensors` file of goldens.
pub struct Goldens {
    name: String,
    data: Vec<u8>,
}

impl Goldens {
    pub fn open(name: &str) -> Self {
        Goldens { name: name.to_string(), data: bytes(name) }
    }

    fn with<R>(&self, key: &str, dtype: Dtype, f: impl Fn(&[usize], &[u8]) -> R) -> R {
        let file = SafeTensors::deserialize(&self.data).unwrap_or_else(|e| panic!("{}: {e}", self.name));
        let t = file.tensor(key).unwrap_or_else(|e| panic!("{}: {key}: {e}", self.name));
        assert_eq!(t.dtype(), dtype, "{}: {key}", self.name);
        f(t.shape(), t.data())
    }

    pub fn names(&self) -> Vec<String> {
        let file = SafeTensors::deserialize(&self.data).unwrap_or_else(|e| panic!("{}: {e}", self.name));
        file.names().into_iter().map(str::to_string).collect()
    }

    /// Shape and values.
    pub fn f32(&self, key: &str) -> (Vec<usize>, Vec<f32>) {
        self.with(key, Dtype::F32, |shape, data| (shape.to_vec(), floats(data)))
    }

    /// Shape and values.
    pub fn i32(&self, key: &str) -> (Vec<usize>, Vec<i32>) {
        self.with(key, Dtype::I32, |shape, data| {
            let values = data.chunks_exact(4).map(|b| i32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
            (shape.to_vec(), values)
        })
    }
}

/// Largest absolute difference; infinite where a value is not a number.
pub fn max_abs_diff(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).fold(0.0, |m, (x, y)| {
        let d = (x - y).abs();
        if d.is_nan() { f32::INFINITY } else { m.max(d) }
    })
}

/// A small deterministic generator for test inputs (SplitMix64: Steele, Lea, Flood 2014).
#[derive(Clone)]
pub struct Rng(pub u64);

impl Rng {
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, n: usize) -> usize {
        (self.next_u64() % n as u64) as usize
    }

    /// In `[-1, 1)`.
    pub fn unit(&mut self) -> f32 {
        (self.next_u64() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    /// About normal, variance 1.
    pub fn normal(&mut self) -> f32 {
        (0..12).map(|_| self.unit()).sum::<f32>() / 2.0
    }
}
