//! `cargo xtask kernels [ARCH...]`: compiles the CUDA kernels for every architecture into `crates/ds4-cuda/artefacts`.

#![forbid(unsafe_code)]

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use serde_json::{Map, Value, json};

type Result<T> = std::result::Result<T, String>;

/// What the backend embeds; `a` targets use their card's own instructions.
const CUBINS: [&str; 7] = ["80", "86", "89", "90a", "100", "120", "121a"];
/// The driver compiles it for cards newer than all of the above.
const PTX: &str = "80";

/// The compiler as Python wheels, for machines without a CUDA toolkit.
const WHEELS: [&str; 5] = [
    "nvidia-cuda-nvcc==13.0.88",
    "nvidia-cuda-crt==13.0.88",
    "nvidia-nvvm==13.0.88",
    "nvidia-cuda-runtime==13.0.96",
    "nvidia-cuda-cccl==13.0.85",
];

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let done = match args.split_first() {
        Some((task, only)) if task == "kernels" => kernels(only),
        _ => Err("usage: cargo xtask kernels [ARCH...]".into()),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("xtask: {e}");
            ExitCode::from(2)
        }
    }
}

fn root() -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
}

/// Compiles into the artefacts folder; the manifest is written only when every architecture was.
fn kernels(only: &[String]) -> Result<()> {
    if let Some(unknown) = only.iter().find(|a| !CUBINS.contains(&a.as_str())) {
        return Err(format!("architecture {unknown}; known: {}", CUBINS.join(", ")));
    }
    let crate_dir = root().join("crates/ds4-cuda");
    let out = crate_dir.join("artefacts");
    std::fs::create_dir_all(&out).map_err(|e| format!("{}: {e}", out.display()))?;
    let nvcc = find_nvcc()?;
    let mut jobs: Vec<(String, String, &str)> = CUBINS
        .iter()
        .filter(|a| only.is_empty() || only.iter().any(|o| o == *a))
        .map(|a| (format!("sm_{a}.cubin"), format!("-gencode=arch=compute_{a},code=sm_{a}"), "-cubin"))
        .collect();
    if only.is_empty() {
        jobs.push((format!("compute_{PTX}.ptx"), format!("-arch=compute_{PTX}"), "-ptx"));
    }
    let built = compile_all(&nvcc, &crate_dir, &out, &jobs)?;
    if !only.is_empty() {
        return Ok(());
    }
    let manifest = json!({ "source": source_hash(&crate_dir.join("kernels"))?, "kernels": built });
    let text = serde_json::to_string_pretty(&manifest).map_err(|e| e.to_string())?;
    let file = out.join("manifest.json");
    std::fs::write(&file, text + "\n").map_err(|e| format!("{}: {e}", file.display()))
}

/// Runs the jobs (file, target, kind), as many at once as there are processors, and reports on each cubin.
fn compile_all(
    nvcc: &Path,
    crate_dir: &Path,
    out: &Path,
    jobs: &[(String, String, &str)],
) -> Result<Map<String, Value>> {
    let next = AtomicUsize::new(0);
    let built = Mutex::new(Ok(Map::new()));
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, |n| n.get()).min(jobs.len()) {
            scope.spawn(|| {
                while let Some((name, arch, kind)) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let file = out.join(name);
                    let done =
                        compile(nvcc, crate_dir, arch, kind, &file).and_then(|log| pack(&file).map(|()| log));
                    if let Ok(log) = &done
                        && let Value::Object(kernels) = report(log)
                    {
                        for (k, v) in kernels.iter().filter(|(_, v)| v[1] != json!(0)) {
                            eprintln!("xtask: {name}: {k} spills {} bytes", v[1]);
                        }
                    }
                    let mut built = built.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
                    match (&mut *built, done) {
                        (Ok(map), Ok(log)) if *kind == "-cubin" => {
                            map.insert(name.trim_end_matches(".cubin").to_string(), report(&log));
                        }
                        (Ok(_), Err(e)) => *built = Err(e),
                        _ => {}
                    }
                }
            });
        }
    });
    let mut built = built.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner)?;
    built.sort_keys();
    Ok(built)
}

/// One hash over all kernel sources, names included; `ds4-cuda`'s test computes the same.
fn source_hash(dir: &Path) -> Result<String> {
    let list = std::fs::read_dir(dir).map_err(|e| format!("{}: {e}", dir.display()))?;
    let mut files =
        list.map(|f| f.map(|f| f.path())).collect::<std::io::Result<Vec<_>>>().map_err(|e| e.to_string())?;
    files.sort();
    let mut hasher = blake3::Hasher::new();
    for f in files {
        hasher.update(f.file_name().unwrap_or_default().as_encoded_bytes());
        hasher.update(&std::fs::read(&f).map_err(|e| format!("{}: {e}", f.display()))?);
    }
    Ok(hasher.finalize().to_hex().to_string())
}

fn compile(nvcc: &Path, crate_dir: &Path, arch: &str, kind: &str, out: &Path) -> Result<String> {
    eprintln!("xtask: {}", out.file_name().unwrap_or_default().to_string_lossy());
    let done = Command::new(nvcc)
        .args(["-std=c++17", "-O3", "-Xptxas", "-v", kind, arch, "-o"])
        .arg(out)
        .arg(crate_dir.join("kernels/ds4.cu"))
        .output()
        .map_err(|e| format!("{}: {e}", nvcc.display()))?;
    let log = String::from_utf8_lossy(&done.stderr).into_owned();
    if done.status.success() { Ok(log) } else { Err(format!("nvcc {arch}:\n{log}")) }
}

/// Registers and spilled bytes of every kernel, from ptxas' report.
fn report(log: &str) -> Value {
    let mut kernels = Map::new();
    let (mut name, mut spills) = (String::new(), 0u64);
    let number_before = |line: &str, word: &str| -> u64 {
        let before = line.split(word).next().unwrap_or_default();
        before.split_whitespace().next_back().and_then(|n| n.parse().ok()).unwrap_or(0)
    };
    for line in log.lines() {
        if let Some(rest) = line.split("Compiling entry function '").nth(1) {
            name = rest.split('\'').next().unwrap_or_default().to_string();
        } else if line.contains("bytes spill stores") {
            spills = number_before(line, " bytes spill stores");
        } else if line.contains("Used ") && line.contains(" registers") {
            kernels.insert(name.clone(), json!([number_before(line, " registers"), spills]));
        }
    }
    Value::Object(kernels)
}

/// Replaces `file` by its zstd-compressed form.
fn pack(file: &Path) -> Result<()> {
    let bytes = std::fs::read(file).map_err(|e| format!("{}: {e}", file.display()))?;
    let packed = zstd::bulk::compress(&bytes, 19).map_err(|e| format!("{}: {e}", file.display()))?;
    let target = PathBuf::from(format!("{}.zst", file.display()));
    std::fs::write(&target, packed).map_err(|e| format!("{}: {e}", target.display()))?;
    std::fs::remove_file(file).map_err(|e| format!("{}: {e}", file.display()))
}

/// `nvcc` on the path, in `CUDA_HOME`, or from the wheels.
fn find_nvcc() -> Result<PathBuf> {
    if Command::new("nvcc").arg("--version").output().is_ok_and(|o| o.status.success()) {
        return Ok("nvcc".into());
    }
    if let Some(home) = std::env::var_os("CUDA_HOME") {
        let nvcc = Path::new(&home).join("bin/nvcc");
        return if nvcc.exists() {
            Ok(nvcc)
        } else {
            Err(format!("CUDA_HOME: {} is missing", nvcc.display()))
        };
    }
    let folder = root().join("target/cuda-toolkit");
    let nvcc = folder.join("nvidia/cu13/bin/nvcc");
    if !nvcc.exists() {
        eprintln!("xtask: no nvcc on the path or in CUDA_HOME; fetching it as Python wheels (about 100 MB)");
        let mut pip = Command::new("python3");
        pip.args(["-m", "pip", "install", "--quiet", "--no-deps", "--target"]).arg(&folder).args(WHEELS);
        let done = pip.status().map_err(|e| format!("python3: {e}"))?;
        if !done.success() {
            return Err("pip could not install the compiler's wheels".into());
        }
    }
    Ok(nvcc)
}
