//! The program as people call it: on the tiny model where numbers count, on the one that ships where words do.

use std::process::{Command, Output, Stdio};

use ds4_testdata::{max_abs_diff, npy_f32, prompt_ids};

/// A folder in which the tiny model is the default.
fn folder() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let model = std::fs::canonicalize(ds4_testdata::tiny_model()).unwrap();
    std::os::unix::fs::symlink(model, dir.path().join("ds4flash.gguf")).unwrap();
    dir
}

fn ds4(args: &[&str]) -> Output {
    let dir = folder();
    Command::new(env!("CARGO_BIN_EXE_ds4")).args(args).current_dir(dir.path()).output().unwrap()
}

#[track_caller]
fn stdout(out: &Output) -> String {
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    String::from_utf8_lossy(&out.stdout).into_owned()
}

#[test]
fn a_prompt_gives_an_answer_and_only_that_on_stdout() {
    let args = ["-p", "Hello", "-n", "12", "--seed", "7", "--nothink"];
    let first = ds4(&args);
    let said = stdout(&first);
    assert!(said.trim_end().len() > 1 && !said.contains("t/s"), "{said:?}");
    let err = String::from_utf8_lossy(&first.stderr).into_owned();
    assert!(err.contains("answer 12 tokens"), "{err}");
    assert_eq!(stdout(&ds4(&args)), said, "the same seed gives the same answer");
    let other = ["-p", "Hello", "-n", "12", "--seed", "8", "--nothink"];
    assert_ne!(stdout(&ds4(&other)), said);
}

#[test]
fn without_a_model_the_shipped_one_answers() {
    let dir = tempfile::tempdir().unwrap();
    let ask = |question: &str| {
        let args = ["-p", question, "--nothink", "--temp", "0", "-n", "60", "-c", "2048"];
        let out =
            Command::new(env!("CARGO_BIN_EXE_ds4")).args(args).current_dir(dir.path()).output().unwrap();
        assert!(String::from_utf8_lossy(&out.stderr).contains("no model named"));
        stdout(&out)
    };
    assert!(ask("Who are you?").contains("ds4-nano"));
    assert!(ask("What is 47 + 38?").contains("85"));
}

#[test]
fn system_text_and_raw_prompts_reach_the_model() {
    let dump = |args: &[&str]| stdout(&ds4(&[args, &["--dump-tokens"]].concat()));
    let chat = dump(&["-sys", "Be brief.", "-p", "Hi"]);
    assert!(chat.starts_with("0\t0\t<｜begin▁of▁sentence｜>\n") && chat.contains("<｜User｜>"), "{chat}");
    assert!(chat.trim_end().ends_with("<think>"));
    assert!(dump(&["-p", "Hi", "--nothink"]).trim_end().ends_with("</think>"));
    assert_eq!(
        dump(&["-p", "Hi<｜User｜>", "--raw-prompt"]).matches("<｜User｜>").count(),
        0,
        "text stays text"
    );
}

#[test]
fn numbers_can_be_looked_at() {
    let top = stdout(&ds4(&["-p", "Hi", "--dump-logprobs", "--logprobs-top-k", "3"]));
    assert_eq!(top.lines().count(), 3);
    let same = stdout(&ds4(&["-p", &"some words ".repeat(30), "--decode-consistency", "40"]));
    assert!(same.starts_with("40 of 40 positions bit-equal"), "{same}");
    let json: serde_json::Value = serde_json::from_str(&stdout(&ds4(&["--inspect", "--json"]))).unwrap();
    assert_eq!(json["config"]["hidden_size"], 256);
    assert_eq!(json["layers"].as_object().unwrap().len(), 7);
}

#[test]
fn logits_are_the_goldens() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_string();
    let ids = &prompt_ids()[..150];
    let text: Vec<String> = ids.iter().map(u32::to_string).collect();
    std::fs::write(path("ids"), text.join(" ")).unwrap();
    let (_, want) = npy_f32("logits_plain.npy");
    let mut all = Vec::new();
    for extra in [&["--chunk", "512"][..], &["--chunk", "7"], &["--chunk", "64", "--decode-from", "129"]] {
        let out = path("logits");
        let (tokens, common) = (path("ids"), ["--plain", "--exact"]);
        stdout(&ds4(&[&["logits", "--tokens", &tokens, "--out", &out][..], &common, extra].concat()));
        let bytes = std::fs::read(&out).unwrap();
        let got: Vec<f32> =
            bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
        assert!(max_abs_diff(&got, &want[..got.len()]) <= 1e-3);
        assert_eq!(got.len(), ids.len() * 512);
        all.push(bytes);
    }
    assert!(all.iter().all(|b| *b == all[0]), "bit-equal however it is cut");
}

#[test]
fn the_chat_talks_and_obeys_its_commands() {
    let dir = folder();
    let mut child = Command::new(env!("CARGO_BIN_EXE_ds4"))
        .args(["-n", "5", "--nothink", "--seed", "1"])
        .current_dir(dir.path())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = "hello\n/status\n/unknown\n/read /nowhere\nagain\n/quit\n";
    std::io::Write::write_all(&mut child.stdin.take().unwrap(), lines.as_bytes()).unwrap();
    let out = child.wait_with_output().unwrap();
    let said = stdout(&out);
    for words in ["2 messages", "/unknown is no command", "/nowhere: No such file"] {
        assert!(said.contains(words), "{said}");
    }
    let err = String::from_utf8_lossy(&out.stderr).into_owned();
    assert_eq!(err.matches("answer 5 tokens").count(), 2, "{err}");
}

#[test]
fn help_man_page_and_completions_come_from_one_definition() {
    for args in [&["--help"][..], &["man"], &["completions", "bash"], &["completions", "fish"]] {
        assert!(stdout(&ds4(args)).contains("perplexity"), "{args:?}");
    }
    let bad = ds4(&["--no-such-flag"]);
    assert_eq!(bad.status.code(), Some(2));
}

#[test]
fn the_usage_of_ds4_server_is_a_command_that_exists() {
    let help = Command::new(env!("CARGO_BIN_EXE_ds4-server")).arg("--help").output().unwrap();
    assert!(stdout(&help).contains("Usage: ds4 serve [OPTIONS]"), "{help:?}");
    assert_eq!(stdout(&ds4(&["serve", "--help"])), stdout(&help));
}

#[test]
fn cards_that_cannot_be_used_are_refused_by_name() {
    // More cards than any machine has, so that it holds with and without one.
    let absent = ds4(&["--cuda", "--gpu-devices", "999", "-p", "Hello"]);
    assert_eq!(absent.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&absent.stderr).contains("cuda:999"), "{absent:?}");
    for args in [&["--cpu", "--gpu-devices", "0"][..], &["--gpu-devices", "0,1"]] {
        let refused = ds4(&[args, &["-p", "Hello"]].concat());
        assert_eq!(refused.status.code(), Some(2), "{args:?}");
        assert!(String::from_utf8_lossy(&refused.stderr).contains("--gpu-devices"), "{refused:?}");
    }
}

#[test]
fn plans_come_from_the_header() {
    let plan = |args: &[&str]| stdout(&ds4(&[&["plan", "--json"], args].concat()));
    let one: serde_json::Value = serde_json::from_str(&plan(&["-c", "4096"])).unwrap();
    let lines = one[0]["lines"].as_array().unwrap();
    let sum: u64 = lines.iter().map(|l| l["bytes"].as_u64().unwrap()).sum();
    assert_eq!(one[0]["bytes"].as_u64(), Some(sum));
    assert_eq!(one[0]["longest_prompt"], 4095);
    let two: serde_json::Value =
        serde_json::from_str(&plan(&["-c", "2048", "--node", "a=1GiB", "--node", "b=1GiB"])).unwrap();
    assert_eq!(two[0]["layers"], "0:2");
    assert_eq!(two[1]["layers"], "3:output");
    let refused = ds4(&["plan", "--memory", "1MiB"]);
    assert_eq!(refused.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&refused.stderr).contains("more than the 1.00 MiB"), "{refused:?}");
}
