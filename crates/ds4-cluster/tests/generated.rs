//! `src/generated.rs` is what `proto/cluster.proto` says. Rewrite it with `DS4_UPDATE=1 cargo test -p ds4-cluster
//! --test generated`; users need no protobuf compiler.

use std::path::Path;

#[test]
fn committed_code_matches_the_schema() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let schema =
        protox::compile(["cluster.proto"], [root.join("proto")]).expect("proto/cluster.proto compiles");
    let out = tempfile::tempdir().expect("temporary folder");
    tonic_prost_build::configure()
        .bytes(".")
        .out_dir(out.path())
        .compile_fds(schema)
        .expect("code from the schema");
    let fresh = std::fs::read_to_string(out.path().join("ds4.cluster.v1.rs")).expect("generated file");
    let committed = root.join("src/generated.rs");
    if std::env::var_os("DS4_UPDATE").is_some() {
        std::fs::write(&committed, &fresh).expect("src/generated.rs is writable");
    }
    let found = std::fs::read_to_string(&committed).expect("src/generated.rs");
    assert!(found == fresh, "src/generated.rs is not what proto/cluster.proto gives; run with DS4_UPDATE=1");
}
