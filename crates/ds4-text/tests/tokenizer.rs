//! The tokenizer against ids from the Rust `tokenizers` library, on the real vocabulary and on the tiny one.

mod common;

use std::time::{Duration, Instant};

use common::{jsonl, real_tokenizer};
use ds4_gguf::Gguf;
use ds4_text::{Tokenizer, Utf8Stream};

fn ids(v: &serde_json::Value) -> Vec<u32> {
    v.as_array().unwrap().iter().map(|i| i.as_u64().unwrap() as u32).collect()
}

fn unhex(text: &str) -> Vec<u8> {
    (0..text.len()).step_by(2).map(|i| u8::from_str_radix(&text[i..i + 2], 16).unwrap()).collect()
}

#[test]
fn goldens() {
    let t = real_tokenizer();
    let cases = jsonl("text/tokenizer_goldens.jsonl");
    assert_eq!(cases.len(), 416);
    for case in cases {
        let text = case["text"].as_str().unwrap();
        assert_eq!(t.encode_with_specials(text), ids(&case["ids"]), "{text:?}");
        let plain = case.get("ids_no_special").unwrap_or(&case["ids"]);
        assert_eq!(t.encode(text), ids(plain), "{text:?} without specials");
        assert_eq!(t.decode(&t.encode(text)), text.as_bytes());
    }
}

#[test]
fn detokenize_goldens() {
    let t = real_tokenizer();
    let cases = jsonl("text/detokenize_goldens.jsonl");
    assert_eq!(cases.len(), 40);
    for case in cases {
        let ids = ids(&case["ids"]);
        let want = unhex(case["hex"].as_str().unwrap());
        assert_eq!(t.decode(&ids), want);
        for (id, hex) in ids.iter().zip(case["per_token_hex"].as_array().unwrap()) {
            assert_eq!(t.token_bytes(*id), unhex(hex.as_str().unwrap()));
        }
        let mut stream = Utf8Stream::new();
        let mut text: String = ids.iter().map(|id| stream.push(t.token_bytes(*id))).collect();
        text.push_str(&stream.finish());
        assert_eq!(text, String::from_utf8_lossy(&want));
    }
}

#[test]
fn the_tiny_vocabulary() {
    let gguf = Gguf::open(&ds4_testdata::tiny_model()).unwrap();
    let t = Tokenizer::from_gguf(gguf.metadata()).unwrap();
    for case in jsonl("text/tiny_tokenizer_goldens.jsonl") {
        let text = case["text"].as_str().unwrap();
        assert_eq!(t.encode_with_specials(text), ids(&case["ids"]), "{text:?}");
    }
}

/// Texts that cut into no pieces are one long merge each.
#[test]
fn a_megabyte_of_one_kind_takes_under_a_second() {
    let t = real_tokenizer();
    for (name, text) in [
        ("one letter", "a".repeat(1 << 20)),
        ("spaces", " ".repeat(1 << 20)),
        ("CJK", "今天天气".repeat((1 << 20) / 12)),
    ] {
        // The fastest of three: other programs may have the machine for a while.
        let took = (0..3).map(|_| {
            let started = Instant::now();
            let ids = t.encode(&text);
            let took = started.elapsed();
            assert_eq!(t.decode(&ids), text.as_bytes());
            took
        });
        let took = took.min().unwrap();
        assert!(took < Duration::from_secs(1), "{name}: {took:?}");
    }
}
