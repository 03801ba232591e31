//! The real vocabulary, and golden lines. Each test binary uses its part.
#![allow(dead_code)]

use std::io::Cursor;

use ds4_gguf::Gguf;
use ds4_text::Tokenizer;

/// Lines of a `.jsonl` golden file.
pub fn jsonl(name: &str) -> Vec<serde_json::Value> {
    let text = String::from_utf8(ds4_testdata::bytes(name)).unwrap();
    text.lines().map(|l| serde_json::from_str(l).unwrap()).collect()
}

/// The tokenizer of the published models. The test file holds the GGUF keys alone (a count, then the pairs).
pub fn real_tokenizer() -> Tokenizer {
    let mut blob = Vec::new();
    lzma_rs::xz_decompress(&mut Cursor::new(ds4_testdata::bytes("text/tokenizer_kv.bin.xz")), &mut blob)
        .unwrap();
    let mut file = b"GGUF\x03\0\0\0".to_vec();
    file.extend(0u64.to_le_bytes());
    file.extend(u64::from(u32::from_le_bytes([blob[0], blob[1], blob[2], blob[3]])).to_le_bytes());
    file.extend(&blob[4..]);
    let gguf = Gguf::from_bytes("tokenizer", file).unwrap();
    Tokenizer::from_gguf(gguf.metadata()).unwrap()
}
