//! `POST /v1/completions`: text that goes on, with no chat format around it; with `suffix`, what belongs between.

use std::sync::Arc;

use axum::Json;
use axum::response::{IntoResponse, Response};
use ds4_engine::{Chosen, Request};
use ds4_text::chat::{Prompt, PromptIds};
use ds4_text::{Tokenizer, Utf8Stream};
use serde_json::{Map, Value, json};

use crate::answer::{Answer, Answers, Reading, Reason, Said, TokenProb, Usage, token_prob};
use crate::ask::{CHOICES_MAX, Draw};
use crate::chat::{number, usage_object};
use crate::error::{ApiError, Dialect};
use crate::fields::{Fields, wrong};
use crate::memory::new_id;
use crate::stream::{self, Frames, Voice};
use crate::{App, now};

/// Prompts of one request, times choices.
const PROMPTS_MAX: usize = 64;

enum Source {
    Text(String),
    Ids(Vec<u32>),
}

pub async fn handle(app: Arc<App>, body: Value) -> Result<Response, ApiError> {
    let mut f = Fields::of(body, "")?;
    let model = f.string("model")?.unwrap_or_else(|| app.model.name.clone());
    let sources = prompts(f.value("prompt"), app.tokenizer.len())?;
    let suffix = f.string("suffix")?;
    let mut draw = Draw::take(&mut f, &app)?;
    draw.take_openai(&mut f, &app)?;
    draw.take_stop(&mut f, "stop")?;
    draw.choices = f.count("n", 1, CHOICES_MAX)?.unwrap_or(1);
    let best_of = [json!(draw.choices)];
    f.only("best_of", &best_of, "best_of: only as many as n: choices are not ranked")?;
    let max_tokens = f.count("max_tokens", 0, usize::MAX)?.or(draw.max_tokens).or(Some(16));
    let echo = f.bool("echo")?.unwrap_or(false);
    let silent = max_tokens == Some(0);
    if silent && !echo {
        return Err(ApiError::invalid("max_tokens", "max_tokens: 0 only with echo"));
    }
    draw.max_tokens = if silent { Some(1) } else { max_tokens };
    draw.logprobs = f.count("logprobs", 0, 20)?;
    let streamed = f.bool("stream")?.unwrap_or(false);
    let mut include_usage = false;
    if let Some(mut options) = f.object("stream_options")? {
        include_usage = options.bool("include_usage")?.unwrap_or(false);
        options.inform(&["include_obfuscation"]);
        options.end()?;
    }
    f.inform(&["user", "metadata", "store"]);
    f.end()?;
    if sources.len() * draw.choices > PROMPTS_MAX {
        return Err(ApiError::invalid(
            "prompt",
            format!("prompt: at most {PROMPTS_MAX} answers in one request"),
        ));
    }
    if suffix.is_some() && echo {
        return Err(ApiError::invalid("echo", "echo: not together with suffix"));
    }

    let probs = draw.logprobs.is_some();
    let reading = Reading {
        parser: None,
        stop: draw.stop.clone(),
        probs,
        one_call: false,
        no_calls: true,
        call_prefix: "",
        key: None,
        prompt: 0,
        silent,
    };
    let tokenizer = app.tokenizer.clone();
    let (at, per_prompt) = (app.clone(), draw.choices);
    let made = move || -> Result<Vec<(Vec<u32>, Request)>, ApiError> {
        let mut out = Vec::new();
        for source in sources {
            let ids = match (source, &suffix) {
                (Source::Text(text), None) => {
                    PromptIds { ids: app_bos_free(&at, &text), boundaries: Vec::new() }
                }
                (Source::Text(text), Some(suffix)) => Prompt::fill_in_the_middle(&text, suffix)
                    .to_ids(&at.tokenizer)
                    .map_err(|e| ApiError::internal(e.to_string()))?,
                (Source::Ids(ids), None) => PromptIds { ids, boundaries: Vec::new() },
                (Source::Ids(_), Some(_)) => {
                    return Err(ApiError::invalid("suffix", "suffix: needs the prompt as text"));
                }
            };
            let prompt = ids.ids.clone();
            for mut r in draw.requests(ids, &at)? {
                r.prompt_logprobs = echo && probs;
                out.push((prompt.clone(), r));
            }
        }
        Ok(out)
    };
    let requests =
        tokio::task::spawn_blocking(made).await.map_err(|e| ApiError::internal(e.to_string()))??;
    let prompts: Vec<Vec<u32>> = requests.iter().map(|(p, _)| p.clone()).collect();
    let answers = app.submit(requests.into_iter().map(|(_, r)| r).collect(), reading).await?;
    let texts: Vec<Text> = prompts
        .into_iter()
        .map(|p| Text::new(tokenizer.clone(), if echo { p } else { Vec::new() }, probs))
        .collect();
    let head = Head { id: new_id("cmpl-"), created: now(), model, per_prompt };
    if streamed {
        let voice = CompletionVoice { head, texts, include_usage, usage: Usage::default(), broken: false };
        return Ok(stream::respond(&app, answers, voice));
    }
    whole(answers, head, texts).await
}

/// A prompt as it is: the caller says what stands in front.
fn app_bos_free(app: &App, text: &str) -> Vec<u32> {
    let mut ids = Vec::new();
    app.tokenizer.encode_into(text, &mut ids);
    if ids.is_empty() {
        // Nothing to go on from: the beginning of a text.
        ids.extend(app.tokenizer.special(ds4_text::chat::BOS));
    }
    ids
}

/// A text, its ids, or a list of either.
fn prompts(value: Option<Value>, vocab: usize) -> Result<Vec<Source>, ApiError> {
    let ids = |name: &str, list: Vec<Value>| -> Result<Source, ApiError> {
        let id = |(i, v): (usize, Value)| {
            let found = v.as_u64().filter(|id| (*id as usize) < vocab);
            let expected = format!("a token id below {vocab}");
            found.map(|id| id as u32).ok_or_else(|| wrong(&format!("{name}[{i}]"), &expected, &v))
        };
        if list.is_empty() {
            return Err(ApiError::invalid(name, format!("{name}: no tokens")));
        }
        list.into_iter().enumerate().map(id).collect::<Result<_, _>>().map(Source::Ids)
    };
    match value {
        None => Ok(vec![Source::Text(String::new())]),
        Some(Value::String(s)) => Ok(vec![Source::Text(s)]),
        Some(Value::Array(list)) if list.first().is_some_and(Value::is_number) => {
            Ok(vec![ids("prompt", list)?])
        }
        Some(Value::Array(list)) if !list.is_empty() && list.len() <= PROMPTS_MAX => {
            let one = |(i, v): (usize, Value)| match v {
                Value::String(s) => Ok(Source::Text(s)),
                Value::Array(list) => ids(&format!("prompt[{i}]"), list),
                other => Err(wrong(&format!("prompt[{i}]"), "a string or a list of token ids", &other)),
            };
            list.into_iter().enumerate().map(one).collect()
        }
        Some(other) => Err(wrong(
            "prompt",
            &format!("a string, token ids, or a list of 1 to {PROMPTS_MAX} of them"),
            &other,
        )),
    }
}

struct Head {
    id: String,
    created: u64,
    model: String,
    per_prompt: usize,
}

impl Head {
    fn object(&self, choices: Value) -> Value {
        json!({
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
        })
    }
}

/// One choice's text and the tokens in it, with the prompt in front where that is echoed.
struct Text {
    tokenizer: Arc<Tokenizer>,
    echo: Vec<u32>,
    probs: bool,
    prompt_probs: Vec<Chosen>,
    echoed: bool,
    /// Characters so far.
    offset: usize,
}

impl Text {
    fn new(tokenizer: Arc<Tokenizer>, echo: Vec<u32>, probs: bool) -> Self {
        Text { tokenizer, echo, probs, prompt_probs: Vec::new(), echoed: false, offset: 0 }
    }

    /// The prompt, once, when everything about it is known.
    fn echo(&mut self) -> Option<(String, Value)> {
        if std::mem::replace(&mut self.echoed, true) || self.echo.is_empty() {
            return None;
        }
        let text = String::from_utf8_lossy(&self.tokenizer.decode(&self.echo)).into_owned();
        let mut known: Vec<Option<TokenProb>> = vec![None];
        let bytes = |id: u32| self.tokenizer.token_bytes(id).to_vec();
        known.extend(
            std::mem::take(&mut self.prompt_probs)
                .into_iter()
                .map(|c| Some(token_prob(&self.tokenizer, &bytes(c.token), c))),
        );
        let tokens: Vec<(Vec<u8>, Option<TokenProb>)> = self
            .echo
            .iter()
            .enumerate()
            .map(|(i, id)| (bytes(*id), known.get_mut(i).and_then(Option::take)))
            .collect();
        let logprobs = self.logprobs(tokens);
        Some((text, logprobs))
    }

    fn said(&mut self, probs: Vec<TokenProb>) -> Value {
        let tokens = probs.into_iter().map(|p| (p.bytes.clone(), Some(p))).collect();
        self.logprobs(tokens)
    }

    fn logprobs(&mut self, tokens: Vec<(Vec<u8>, Option<TokenProb>)>) -> Value {
        if !self.probs {
            return Value::Null;
        }
        let (mut texts, mut logprobs, mut tops, mut offsets) =
            (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        let mut utf8 = Utf8Stream::new();
        for (bytes, prob) in tokens {
            offsets.push(self.offset);
            self.offset += utf8.push(&bytes).chars().count();
            texts.push(String::from_utf8_lossy(&bytes).into_owned());
            logprobs.push(prob.as_ref().map(|p| number(p.logprob)));
            tops.push(prob.filter(|p| !p.top.is_empty()).map(|p| {
                let entry =
                    |(b, l): (Vec<u8>, f32)| (String::from_utf8_lossy(&b).into_owned(), json!(number(l)));
                Value::Object(p.top.into_iter().map(entry).collect::<Map<_, _>>())
            }));
        }
        json!({"tokens": texts, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets})
    }
}

fn finish_reason(reason: &Reason) -> &'static str {
    if *reason == Reason::Length { "length" } else { "stop" }
}

async fn whole(answers: Answers, head: Head, texts: Vec<Text>) -> Result<Response, ApiError> {
    let wholes = stream::collect(answers, texts.len()).await?;
    // A prompt counts once, however many answers it has.
    let mut usage = Usage::default();
    let mut choices = Vec::new();
    for (i, ((mut w, ending), mut text)) in wholes.into_iter().zip(texts).enumerate() {
        usage = add_usage(usage, ending.usage, i, head.per_prompt);
        text.prompt_probs = std::mem::take(&mut w.prompt_probs);
        let (mut said, mut logprobs) = text.echo().unwrap_or_default();
        said.push_str(&w.content);
        let more = text.said(w.probs);
        if logprobs.is_null() {
            logprobs = more;
        } else if let (Value::Object(all), Value::Object(more)) = (&mut logprobs, more) {
            for (key, value) in more {
                if let (Some(Value::Array(list)), Value::Array(more)) = (all.get_mut(&key), value) {
                    list.extend(more);
                }
            }
        }
        choices.push(json!({
            "index": i,
            "text": said,
            "logprobs": logprobs,
            "finish_reason": finish_reason(&ending.reason),
        }));
    }
    let mut body = head.object(json!(choices));
    body["usage"] = usage_object(&usage);
    Ok(Json(body).into_response())
}

fn add_usage(mut sum: Usage, one: Usage, choice: usize, per_prompt: usize) -> Usage {
    if choice.is_multiple_of(per_prompt) {
        sum.prompt += one.prompt;
        sum.reused += one.reused;
    }
    sum.completion += one.completion;
    sum
}

struct CompletionVoice {
    head: Head,
    texts: Vec<Text>,
    include_usage: bool,
    usage: Usage,
    broken: bool,
}

impl CompletionVoice {
    fn chunk(&self, choice: usize, text: &str, logprobs: Value, reason: Option<&str>, out: &mut Frames) {
        out.data(&self.head.object(json!([
            {"index": choice, "text": text, "logprobs": logprobs, "finish_reason": reason}
        ])));
    }

    fn echo(&mut self, choice: usize, out: &mut Frames) {
        if let Some((text, logprobs)) = self.texts[choice].echo() {
            self.chunk(choice, &text, logprobs, None, out);
        }
    }
}

impl Voice for CompletionVoice {
    fn begin(&mut self, _: &mut Frames) {}

    fn say(&mut self, choice: usize, said: Said, out: &mut Frames) {
        match said {
            Said::Prompt(tokens) => self.texts[choice].prompt_probs.extend(tokens),
            Said::Content { text, probs } => {
                self.echo(choice, out);
                let logprobs = self.texts[choice].said(probs);
                self.chunk(choice, &text, logprobs, None, out);
            }
            Said::End(ending) => {
                self.echo(choice, out);
                self.usage = add_usage(self.usage, ending.usage, choice, self.head.per_prompt);
                self.chunk(choice, "", Value::Null, Some(finish_reason(&ending.reason)), out);
            }
            Said::Failed(e) => {
                self.broken = true;
                out.data(&e.body(Dialect::OpenAi));
            }
            // Text as it is has neither thoughts nor calls.
            Said::Reasoning(_)
            | Said::CallStart { .. }
            | Said::CallArguments { .. }
            | Said::CallEnd { .. } => {}
        }
    }

    fn end(&mut self, out: &mut Frames) {
        if self.broken {
            return;
        }
        if self.include_usage {
            let mut chunk = self.head.object(json!([]));
            chunk["usage"] = usage_object(&self.usage);
            out.data(&chunk);
        }
        out.raw("[DONE]");
    }
}

impl Answer {
    /// For requests that were submitted together: each with its own prompt's length.
    pub fn many(app: &Arc<App>, requests: Vec<Request>, reading: &Reading) -> Result<Vec<Answer>, ApiError> {
        let mut answers = Vec::with_capacity(requests.len());
        for request in requests {
            let how = Reading { prompt: request.prompt.len(), ..reading.clone() };
            let events = app.generator.submit(request)?;
            answers.push(Answer::new(app.clone(), events, how));
        }
        Ok(answers)
    }
}
