//! The output parser: the official parser's goldens, and what models really write.

mod common;

use std::time::{Duration, Instant};

use common::jsonl;
use ds4_text::parser::{End, Event, Outcome, OutputParser, ParserOptions, Repair};
use proptest::prelude::*;

#[derive(Debug, Default, PartialEq)]
struct Said {
    reasoning: String,
    content: String,
    /// Name, arguments, whether it is complete.
    calls: Vec<(String, String, bool)>,
    /// A piece of content held an opening tag.
    markup: bool,
}

fn gather(events: Vec<Event>, said: &mut Said) {
    for e in events {
        match e {
            Event::Reasoning(t) => said.reasoning += &t,
            Event::Content(t) => {
                said.markup |= t.contains("<｜DSML｜invoke name");
                said.content += &t;
            }
            Event::CallStart { index, name } => {
                assert_eq!(index, said.calls.len());
                said.calls.push((name, String::new(), false));
            }
            Event::CallArguments { index, json } => said.calls[index].1 += &json,
            Event::CallEnd { index, complete } => said.calls[index].2 = complete,
        }
    }
}

fn feed<'a>(parts: impl Iterator<Item = &'a [u8]>, options: ParserOptions, end: End) -> (Said, Outcome) {
    let mut parser = OutputParser::new(options);
    let mut said = Said::default();
    for part in parts {
        gather(parser.push(part), &mut said);
    }
    let (events, outcome) = parser.finish(end);
    gather(events, &mut said);
    (said, outcome)
}

/// Whole and byte by byte must agree.
fn parse(text: &str, thinking: bool, end: End) -> (Said, Outcome) {
    let options = ParserOptions { thinking, tools: true };
    let whole = feed(std::iter::once(text.as_bytes()), options, end);
    let bytes = feed(text.as_bytes().chunks(1), options, end);
    assert_eq!(whole, bytes, "{text:?}");
    whole
}

#[test]
fn goldens_of_the_official_parser() {
    let cases = jsonl("text/parse_goldens.jsonl");
    assert_eq!(cases.len(), 10);
    for case in cases {
        let text = case["text"].as_str().unwrap();
        let (said, outcome) = parse(text, case["thinking_mode"] == "thinking", End::Cut);
        let ok = case["ok"].as_bool().unwrap();
        assert_eq!(outcome.repairs.is_empty(), ok, "{text:?}: {:?}", outcome.repairs);
        if !ok {
            continue;
        }
        let m = &case["message"];
        assert_eq!(said.content, m["content"].as_str().unwrap());
        assert_eq!(said.reasoning, m["reasoning_content"].as_str().unwrap());
        let calls: Vec<_> = m["tool_calls"]
            .as_array()
            .unwrap()
            .iter()
            .map(|c| {
                let f = &c["function"];
                (f["name"].as_str().unwrap().to_string(), f["arguments"].as_str().unwrap().to_string(), true)
            })
            .collect();
        assert_eq!(said.calls, calls);
    }
}

const OPEN: &str = "<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"run\">\n";
const CMD: &str = "<｜DSML｜parameter name=\"cmd\" string=\"true\">ls</｜DSML｜parameter>\n";
const CLOSE: &str = "</｜DSML｜invoke>\n</｜DSML｜tool_calls>";

/// Model text, thinking; reasoning, content, arguments of each call, a repair that must be named.
type Case<'a> = (String, bool, &'a str, &'a str, Vec<&'a str>, Option<Repair>);

/// Model text → reasoning, content, arguments of each call; from field reports.
#[test]
fn what_models_really_write() {
    let think = true;
    let run = r#"{"cmd": "ls"}"#;
    let cases: Vec<Case> = vec![
        (format!("ok\n\n{OPEN}{CMD}{CLOSE}"), false, "", "ok", vec![run], None),
        // Block opened, then closers of other formats.
        (format!("{OPEN}{CMD}</tool_call></function>"), false, "", "", vec![run], Some(Repair::StrayCloser)),
        (
            format!("{OPEN}<｜DSML｜parameter name=\"cmd\" string=\"true\">ls</tool_call>\n</function>"),
            false,
            "",
            "",
            vec![run],
            Some(Repair::MissingCloser),
        ),
        // Bad JSON is a string, never an empty object.
        (
            format!(
                "{OPEN}<｜DSML｜parameter name=\"x\" string=\"false\">{{a:1</｜DSML｜parameter>\n{CLOSE}"
            ),
            false,
            "",
            "",
            vec![r#"{"x": "{a:1"}"#],
            Some(Repair::NotJson),
        ),
        // A call before the thought closes: exactly once, the prose stays reasoning.
        (
            format!("I will look.\n\n{OPEN}{CMD}{CLOSE}"),
            think,
            "I will look.",
            "",
            vec![run],
            Some(Repair::CallInThinking),
        ),
        (
            format!("I will look.\n\n{OPEN}{CMD}{CLOSE}</think>"),
            think,
            "I will look.",
            "",
            vec![run],
            Some(Repair::StrayThink),
        ),
        // Stray closers alone.
        ("hello </｜DSML｜tool_calls>".into(), false, "", "hello ", vec![], Some(Repair::StrayCloser)),
        // The output starts with the end of a thought, in either mode.
        (format!("</think>\n\n{OPEN}{CMD}{CLOSE}"), false, "", "", vec![run], Some(Repair::StrayThink)),
        (format!("</think>\n\n{OPEN}{CMD}{CLOSE}"), think, "", "", vec![run], None),
        // Doubled and ASCII bars, typographic quotes, the underscore lost.
        (
            format!("{OPEN}{CMD}{CLOSE}").replace('｜', "｜｜"),
            false,
            "",
            "",
            vec![run],
            Some(Repair::Spelling),
        ),
        (format!("{OPEN}{CMD}{CLOSE}").replace('｜', "|"), false, "", "", vec![run], Some(Repair::Spelling)),
        (
            format!("{OPEN}{CMD}{CLOSE}").replace("name=\"run\"", "name=“run”"),
            false,
            "",
            "",
            vec![run],
            Some(Repair::Spelling),
        ),
        (
            format!("{OPEN}{CMD}{CLOSE}").replace("name=\"run\"", "name=\"run”"),
            false,
            "",
            "",
            vec![run],
            Some(Repair::Spelling),
        ),
        (
            format!("{OPEN}{CMD}{CLOSE}").replace("tool_calls", "toolcalls"),
            false,
            "",
            "",
            vec![run],
            Some(Repair::Spelling),
        ),
        (
            format!("{OPEN}{CMD}{CLOSE}").replace("tool_calls", "tool calls"),
            false,
            "",
            "",
            vec![run],
            Some(Repair::Spelling),
        ),
        // Missing closers of every kind.
        (format!("{OPEN}{CMD}"), false, "", "", vec![run], Some(Repair::MissingCloser)),
        (format!("{OPEN}{CMD}</｜DSML｜tool_calls>"), false, "", "", vec![run], Some(Repair::MissingCloser)),
        (
            format!("{OPEN}{CMD}<｜DSML｜invoke name=\"run\">\n{CMD}{CLOSE}"),
            false,
            "",
            "",
            vec![run, run],
            Some(Repair::MissingCloser),
        ),
        (
            format!("{OPEN}<｜DSML｜parameter name=\"cmd\" string=\"true\">ls\n{CLOSE}"),
            false,
            "",
            "",
            vec![run],
            Some(Repair::MissingCloser),
        ),
        (
            format!("{}{CMD}{CLOSE}", &OPEN[OPEN.find("\n").unwrap() + 1..]),
            false,
            "",
            "",
            vec![run],
            Some(Repair::Malformed),
        ),
        // Twice the same parameter: the first counts.
        (format!("{OPEN}{CMD}{CMD}{CLOSE}"), false, "", "", vec![run], Some(Repair::DuplicateParameter)),
        // A value may contain closers of other formats, and tags of ours that are none.
        (
            format!(
                "{OPEN}<｜DSML｜parameter name=\"cmd\" string=\"true\">a</b> </parameter> c <｜DSML</｜DSML｜parameter>\n{CLOSE}"
            ),
            false,
            "",
            "",
            vec![r#"{"cmd": "a</b> </parameter> c <｜DSML"}"#],
            None,
        ),
        // A name with an apostrophe is whole.
        (
            format!(
                "{OPEN}<｜DSML｜parameter name=\"user's\" string=\"true\">x</｜DSML｜parameter>\n{CLOSE}"
            ),
            false,
            "",
            "",
            vec![r#"{"user's": "x"}"#],
            None,
        ),
        // A call's opener in a value is data: no second call.
        (
            format!(
                "{OPEN}<｜DSML｜parameter name=\"cmd\" string=\"true\">a <｜DSML｜invoke name='g'> b</｜DSML｜parameter>\n{CLOSE}"
            ),
            false,
            "",
            "",
            vec![r#"{"cmd": "a <｜DSML｜invoke name='g'> b"}"#],
            None,
        ),
        // A tag cut in the middle is not shown.
        ("ok\n\n<｜DSML｜tool_cal".into(), false, "", "ok\n\n", vec![], Some(Repair::Malformed)),
        ("ok <｜DSML｜invoke name=\"r".into(), false, "", "ok ", vec![], Some(Repair::Malformed)),
        (
            format!("{OPEN}{CMD}</｜DSML｜invoke>\n</｜DSML｜tool_ca"),
            false,
            "",
            "",
            vec![run],
            Some(Repair::MissingCloser),
        ),
        // Text that only looks like a beginning.
        (
            "a < b, <th, <｜DS and <｜DSML｜other> end\n\n".into(),
            false,
            "",
            "a < b, <th, <｜DS and <｜DSML｜other> end\n\n",
            vec![],
            None,
        ),
    ];
    for (text, thinking, reasoning, content, calls, repair) in cases {
        let (said, outcome) = parse(&text, thinking, End::EndOfSentence);
        assert_eq!(said.reasoning, reasoning, "{text:?}");
        assert_eq!(said.content, content, "{text:?}");
        let want: Vec<_> = calls.iter().map(|a| ("run".to_string(), a.to_string(), true)).collect();
        assert_eq!(said.calls, want, "{text:?}");
        match repair {
            None => assert_eq!(outcome.repairs, [], "{text:?}"),
            Some(r) => assert!(outcome.repairs.contains(&r), "{text:?}: {:?}", outcome.repairs),
        }
        for shown in [&said.reasoning, &said.content] {
            assert!(!shown.contains("tool_calls>") && !shown.contains("invoke"), "{text:?} leaks {shown:?}");
        }
    }
}

#[test]
fn an_answer_that_never_closes_its_thinking_is_named() {
    let (said, outcome) = parse("the answer is 4", true, End::EndOfSentence);
    assert_eq!(said.reasoning, "the answer is 4");
    assert_eq!(outcome.repairs, [Repair::ThinkingNotClosed]);
}

#[test]
fn a_cut_call_is_incomplete_and_its_arguments_begin_an_object() {
    let text = format!("{OPEN}<｜DSML｜parameter name=\"cmd\" string=\"true\">ls -l");
    let (said, outcome) = parse(&text, false, End::Cut);
    assert_eq!(said.calls, [("run".to_string(), r#"{"cmd": "ls -l"#.to_string(), false)]);
    assert!(outcome.repairs.contains(&Repair::NoEnd));
}

#[test]
fn sampled_calls_are_the_bytes_behind_the_content() {
    let text = format!("ok\n\n{OPEN}{CMD}{CLOSE}");
    let (_, outcome) = parse(&text, false, End::EndOfSentence);
    assert_eq!(format!("ok{}", outcome.sampled_calls.unwrap()), text);
}

#[test]
fn without_tools_markup_is_text() {
    let text = format!("see {OPEN}{CMD}{CLOSE}");
    let options = ParserOptions { thinking: false, tools: false };
    let (said, outcome) = feed(text.as_bytes().chunks(1), options, End::EndOfSentence);
    assert_eq!(said.content, text);
    assert_eq!(outcome.repairs, []);
}

fn fragments() -> impl Strategy<Value = String> {
    let atoms = prop::sample::select(vec![
        "<",
        "</",
        ">",
        "\n",
        "\n\n",
        "｜",
        "｜DSML｜",
        "|",
        "tool_calls",
        "invoke name=\"f\">",
        "parameter name=\"a\" string=\"true\">",
        "parameter name=\"b\" string=\"false\">",
        "<think>",
        "</think>",
        "{\"x\": 1}",
        "text é",
        "<｜DSML｜tool_calls>\n",
        "<｜DSML｜invoke name=\"f\">\n",
        "</｜DSML｜invoke>\n",
        "</｜DSML｜tool_calls>",
        "</｜DSML｜parameter>\n",
        "<｜DSML｜parameter name=\"a\" string=\"true\">",
        "</tool_call>",
        "“",
        "😀",
        "<｜end▁of▁sentence｜>",
    ]);
    prop::collection::vec(atoms, 0..24).prop_map(|v| v.concat())
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(2000) })]
    #[test]
    fn any_split_gives_the_same(text in fragments(), thinking: bool, tools: bool, cuts in prop::collection::vec(0usize..400, 0..8), cut: bool) {
        let options = ParserOptions { thinking, tools };
        let end = if cut { End::Cut } else { End::EndOfSentence };
        let bytes = text.as_bytes();
        let mut at: Vec<usize> = cuts.into_iter().map(|c| c.min(bytes.len())).collect();
        at.extend([0, bytes.len()]);
        at.sort_unstable();
        let parts: Vec<&[u8]> = at.windows(2).map(|w| &bytes[w[0]..w[1]]).collect();
        let whole = feed(std::iter::once(bytes), options, end);
        let split = feed(parts.into_iter(), options, end);
        prop_assert_eq!(&whole, &split);
        let (said, _) = whole;
        prop_assert!(!(tools && said.markup), "{}", said.content);
        for (_, arguments, complete) in &said.calls {
            if *complete {
                let v: serde_json::Value = serde_json::from_str(arguments).unwrap();
                prop_assert!(v.is_object());
            }
        }
    }
}

/// Whatever a model repeats for ever, in one piece or byte by byte: the work grows with the text, not with its square,
/// which for these would be minutes.
#[test]
fn long_runs_take_linear_time() {
    let open =
        "<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"f\">\n<｜DSML｜parameter name=\"a\" string=\"true\">";
    let texts = [
        ("brackets", "<".repeat(1 << 20)),
        ("brackets before plain text", "<a ".repeat(1 << 18) + &"b".repeat(1 << 19)),
        ("newlines in a value", open.to_string() + &"\n".repeat(1 << 20) + "x"),
        ("brackets in a value", open.to_string() + &"< a".repeat(1 << 18)),
        ("half a closer in a block", "<｜DSML｜tool_calls></".to_string() + &"a".repeat(1 << 20)),
        ("half a tag in a value", open.to_string() + "<｜DSML｜" + &"a".repeat(1 << 20)),
        ("bars", "<".to_string() + &"｜".repeat(1 << 18)),
    ];
    for (name, text) in texts {
        for piece in [1, 5, text.len()] {
            let options = ParserOptions { thinking: false, tools: true };
            let started = Instant::now();
            feed(text.as_bytes().chunks(piece), options, End::Cut);
            let took = started.elapsed();
            assert!(took < Duration::from_secs(8), "{name} in pieces of {piece}: {took:?}");
        }
    }
}
