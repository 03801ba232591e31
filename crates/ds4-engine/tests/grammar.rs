//! Constrained answers: every token fits, thinking stays free, and an answer ends when it is complete.
#![cfg(feature = "grammar")]

mod common;

use common::*;
use ds4_engine::*;
use ds4_text::{Tokenizer, chat};
use serde_json::{Value, json};

fn start() -> (EngineHandle, std::sync::Arc<Tokenizer>) {
    (engine(EngineConfig::default(), vec![Box::new(stage(None, limits(512, 32, 4, 8), 8))]), tokenizer())
}

fn constrained(form: Form, after: Option<u32>, seed: u64, tokenizer: &Tokenizer) -> Request {
    Request {
        constraint: Some(Constraint { form, after }),
        sampling: SamplingParams { temperature: 1.0, seed, ..SamplingParams::default() },
        stop_tokens: vec![tokenizer.special(chat::EOS).unwrap()],
        ..request(&ds4_testdata::prompt_ids()[..40], 300)
    }
}

fn text(done: &Completion, tokenizer: &Tokenizer) -> String {
    String::from_utf8(tokenizer.decode(&done.ids())).unwrap()
}

#[test]
fn a_schema_gives_json_that_it_accepts() {
    let (handle, tokenizer) = start();
    let schema = json!({
        "type": "object",
        "properties": {
            "name": {"enum": ["ada", "grace"]},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "alive": {"type": "boolean"},
        },
        "required": ["name", "age", "alive"],
        "additionalProperties": false,
        "x-guidance": {"whitespace_flexible": false},
    });
    let running: Vec<_> = (0..8)
        .map(|seed| {
            handle.submit(constrained(Form::JsonSchema(schema.clone()), None, seed, &tokenizer)).unwrap()
        })
        .collect();
    for g in running {
        let done = g.wait().unwrap();
        assert_eq!(done.reason, FinishReason::Stop);
        let text = text(&done, &tokenizer);
        let value: Value = serde_json::from_str(&text).unwrap_or_else(|e| panic!("{text}: {e}"));
        assert!(["ada", "grace"].contains(&value["name"].as_str().unwrap()), "{text}");
        assert!(value["age"].as_u64().unwrap() <= 150 && value["alive"].is_boolean(), "{text}");
    }
}

#[test]
fn the_same_seed_gives_the_same_constrained_answer_alone_and_beside_others() {
    let (handle, tokenizer) = start();
    let form = || Form::Regex("[a-z]{3,30}-[0-9]{2,9}".into());
    let alone = handle.submit(constrained(form(), None, 5, &tokenizer)).unwrap().wait().unwrap();
    let many: Vec<_> =
        (3..7).map(|seed| handle.submit(constrained(form(), None, seed, &tokenizer)).unwrap()).collect();
    let many: Vec<_> = many.into_iter().map(|g| g.wait().unwrap()).collect();
    assert_eq!(many[2].tokens, alone.tokens);
}

#[test]
fn thinking_is_free_and_the_answer_is_not() {
    let (handle, tokenizer) = start();
    let end = tokenizer.special(chat::END_THINK).unwrap();
    let mut thought = 0;
    for seed in 0..4 {
        let mut request = constrained(Form::Regex("yes|no".into()), Some(end), seed, &tokenizer);
        // A random model would seldom end its thinking by itself.
        request.sampling.bias = vec![(end, 1.0)];
        let done = handle.submit(request).unwrap().wait().unwrap();
        let ids = done.ids();
        let at = ids.iter().position(|&t| t == end).expect("thinking ends");
        thought += at;
        let answer = String::from_utf8(tokenizer.decode(&ids[at + 1..])).unwrap();
        assert!(["yes", "no"].contains(&answer.as_str()), "{answer}");
        assert_eq!(done.reason, FinishReason::Stop);
    }
    assert!(thought > 0, "some thinking");
}

#[test]
fn a_grammar_forces_special_tokens() {
    let (handle, tokenizer) = start();
    let end = tokenizer.special(chat::END_THINK).unwrap();
    let lark = format!("start: \"call \" /[a-z]{{1,4}}/ <[{end}]>");
    let done = handle.submit(constrained(Form::Lark(lark), None, 2, &tokenizer)).unwrap().wait().unwrap();
    assert_eq!(done.ids().last(), Some(&end));
    assert!(text(&done, &tokenizer).starts_with("call "));
}

#[test]
fn a_forced_tool_call_is_one_that_parses() {
    use ds4_text::parser::{End, Event as Parsed, OutputParser, ParserOptions};
    let (handle, tokenizer) = start();
    let tool = |name: &str, parameters: Value| ToolForm { name: name.into(), parameters };
    let tools = vec![
        tool("now", json!({"type": "object", "properties": {}})),
        tool(
            "weather",
            json!({
                "type": "object",
                "properties": {
                    "unit": {"type": "string", "enum": ["celsius", "kelvin"]},
                    "days": {"type": "integer", "minimum": 1, "maximum": 14},
                    "city": {"type": "string"},
                },
                "required": ["unit", "days"],
            }),
        ),
    ];
    let mut complete = 0;
    for seed in 0..4 {
        let form = Form::ToolCalls { tools: tools.clone(), many: false };
        let mut request = constrained(form, None, seed, &tokenizer);
        request.max_tokens = Some(400);
        let done = handle.submit(request).unwrap().wait().unwrap();
        let bytes = tokenizer.decode(&done.ids());
        // A random model may write a string without end.
        if done.reason == FinishReason::Length {
            continue;
        }
        complete += 1;
        let mut parser = OutputParser::new(ParserOptions { thinking: false, tools: true });
        let mut events = parser.push(&bytes);
        let (rest, outcome) = parser.finish(End::EndOfSentence);
        events.extend(rest);
        let text = String::from_utf8_lossy(&bytes).into_owned();
        assert!(outcome.repairs.is_empty(), "{text}: {:?}", outcome.repairs);
        assert_eq!(parser.calls(), 1, "{text}");
        assert!(!events.iter().any(|e| matches!(e, Parsed::Content(_))), "{text}: {events:?}");
    }
    assert!(complete >= 2, "{complete}");
}

#[test]
fn what_is_no_grammar_is_refused_at_once() {
    let (handle, tokenizer) = start();
    for form in [
        Form::JsonSchema(json!({"type": "strange"})),
        Form::Regex("(".into()),
        Form::Lark("begin: \"a\"".into()),
    ] {
        let refused = handle.submit(constrained(form, None, 0, &tokenizer));
        assert!(matches!(&refused, Err(Rejected::Invalid { field: "constraint", .. })), "{refused:?}");
    }
}
