//! The committed kernels are those of the committed sources.

use std::path::Path;

#[test]
fn artefacts_are_as_new_as_their_sources() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut files: Vec<_> =
        std::fs::read_dir(dir.join("kernels")).expect("kernels").map(|f| f.expect("file").path()).collect();
    files.sort();
    let mut hasher = blake3::Hasher::new();
    for f in files {
        hasher.update(f.file_name().expect("a file").as_encoded_bytes());
        hasher.update(&std::fs::read(&f).expect("source"));
    }
    let manifest = std::fs::read_to_string(dir.join("artefacts/manifest.json")).expect("manifest");
    let manifest: serde_json::Value = serde_json::from_str(&manifest).expect("manifest");
    assert_eq!(
        manifest["source"].as_str(),
        Some(hasher.finalize().to_hex().as_str()),
        "kernels changed: run cargo xtask kernels"
    );
}
