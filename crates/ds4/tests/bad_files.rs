//! A file that cannot run ends in one readable line that names the trouble, and exit code 2.

use std::path::Path;
use std::process::{Command, Output};

fn inspect(path: &Path) -> Output {
    Command::new(env!("CARGO_BIN_EXE_ds4")).arg("--inspect").arg("-m").arg(path).output().unwrap()
}

fn logits(path: &Path) -> Output {
    let dir = path.parent().unwrap();
    let ids = dir.join("ids.txt");
    std::fs::write(&ids, "1 2 3").unwrap();
    Command::new(env!("CARGO_BIN_EXE_ds4"))
        .arg("logits")
        .args(["--tokens".as_ref(), ids.as_os_str(), "--out".as_ref(), dir.join("out.f32").as_os_str()])
        .arg("-m")
        .arg(path)
        .output()
        .unwrap()
}

#[track_caller]
fn one_line(out: &Output, words: &[&str]) {
    let err = String::from_utf8(out.stderr.clone()).unwrap();
    assert_eq!(out.status.code(), Some(2), "{err}");
    assert_eq!(err.trim_end().lines().count(), 1, "{err}");
    for w in words {
        assert!(err.contains(w), "{w:?} is not in {err}");
    }
}

fn tiny() -> Vec<u8> {
    std::fs::read(ds4_testdata::tiny_model()).unwrap()
}

/// The tiny model with the first `from` replaced by `to`, of the same length.
fn patched(from: &[u8], to: &[u8]) -> Vec<u8> {
    assert_eq!(from.len(), to.len());
    let mut bytes = tiny();
    let at = (0..bytes.len()).find(|&i| bytes[i..].starts_with(from)).unwrap();
    bytes[at..at + to.len()].copy_from_slice(to);
    bytes
}

#[test]
fn files_that_are_no_model() {
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, bytes: &[u8]| {
        let path = dir.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        path
    };
    one_line(&inspect(&dir.path().join("nothing.gguf")), &["nothing.gguf", "No such file"]);
    one_line(&inspect(dir.path()), &["is a directory"]);
    one_line(&inspect(&write("text.gguf", b"hello, this is text")), &["text.gguf", "not a GGUF file"]);
    one_line(&inspect(&write("empty.gguf", b"")), &["not a GGUF file"]);
    one_line(&inspect(&write("v9.gguf", b"GGUF\x09\0\0\0")), &["version 9", "2 and 3"]);
    let whole = tiny();
    one_line(&inspect(&write("cut.gguf", &whole[..whole.len() - 5000])), &["truncated", "tensor blk."]);
    one_line(&inspect(&write("head.gguf", &whole[..3000])), &["head.gguf"]);
    one_line(
        &inspect(&write("other.gguf", &patched(b"deepseek4", b"deepseek9"))),
        &["general.architecture", "deepseek9"],
    );
}

#[test]
fn tensors_that_do_not_fit() {
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, bytes: &[u8]| {
        let path = dir.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        path
    };
    let renamed = patched(b"blk.3.attn_kv.weight", b"blk.3.attn_zz.weight");
    one_line(&logits(&write("missing.gguf", &renamed)), &["blk.3.attn_kv.weight", "missing"]);

    // The info of a tensor: name, dimensions, shape, type, offset.
    let name = b"blk.3.attn_kv.weight";
    let bytes = tiny();
    let at = (0..bytes.len()).find(|&i| bytes[i..].starts_with(name)).unwrap() + name.len();
    let mut shape = bytes.clone();
    shape[at + 4..at + 12].copy_from_slice(&128u64.to_le_bytes());
    one_line(&logits(&write("shape.gguf", &shape)), &["blk.3.attn_kv.weight", "[128, 192]", "[256, 192]"]);
    let mut kind = bytes.clone();
    kind[at + 20..at + 24].copy_from_slice(&23u32.to_le_bytes());
    one_line(
        &logits(&write("kind.gguf", &kind)),
        &["blk.3.attn_kv.weight", "23", "IQ4_XS", "supported", "Q8_0"],
    );
}
