//! The layers import only downwards: ARCHITECTURE.md's table, checked against every manifest.

use std::path::Path;

/// Bottom up. A crate may depend on those before it.
const ORDER: [&str; 10] = [
    "ds4-gguf",
    "ds4-text",
    "ds4-model",
    "ds4-reference",
    "ds4-cpu",
    "ds4-cuda",
    "ds4-engine",
    "ds4-cluster",
    "ds4-server",
    "ds4",
];

/// Pairs that the order allows and the design does not.
const FORBIDDEN: [(&str, &str); 6] = [
    ("ds4-model", "ds4-text"),
    ("ds4-cpu", "ds4-text"),
    ("ds4-engine", "ds4-cpu"),
    ("ds4-engine", "ds4-cuda"),
    ("ds4-cluster", "ds4-cpu"),
    ("ds4-server", "ds4-cuda"),
];

/// The workspace crates that a manifest's `[dependencies]` names.
fn dependencies(manifest: &str) -> Vec<String> {
    let mut inside = false;
    let mut found = Vec::new();
    for line in manifest.lines().map(str::trim) {
        if line.starts_with('[') {
            inside = line.contains("dependencies") && !line.contains("dev-dependencies");
        } else if inside && line.starts_with("ds4-") {
            let name: String = line.chars().take_while(|c| c.is_ascii_alphanumeric() || *c == '-').collect();
            found.push(name);
        }
    }
    found
}

#[test]
fn layers_import_only_downwards() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut checked = 0;
    for (place, name) in ORDER.iter().enumerate() {
        let manifest = std::fs::read_to_string(crates.join(name).join("Cargo.toml")).unwrap();
        for dep in dependencies(&manifest) {
            if dep == "ds4-testdata" {
                assert_eq!(*name, "ds4-reference", "{name} depends on {dep} outside its tests");
                continue;
            }
            let below =
                ORDER.iter().position(|c| *c == dep).unwrap_or_else(|| panic!("{name} names {dep}, unknown"));
            assert!(below < place, "{name} imports {dep}, which is not below it");
            assert!(!FORBIDDEN.contains(&(name, dep.as_str())), "{name} must not know {dep}");
            checked += 1;
        }
    }
    assert!(checked > 10, "the manifests were read");
}
