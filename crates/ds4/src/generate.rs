//! One prompt, one answer; and the chat in a terminal.

use std::io::{IsTerminal, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use ds4_text::Utf8Stream;
use ds4_text::chat::{self, Effort, Message, Prompt, PromptIds, RenderOptions};
use ds4_text::parser::{End as ParseEnd, Event as Said, OutputParser, ParserOptions};
use rustyline::error::ReadlineError;

use crate::CliError;
use crate::args::{Cli, RunArgs};
use crate::logits;
use crate::open::{self, OpenModel};
use crate::session::{Answer, Session};

pub fn run(mut cli: Cli) -> Result<(), CliError> {
    let model = open::open(&cli.model)?;
    let text = prompt_text(&cli.run)?;
    let ids = match &text {
        Some(text) => Some(prompt_ids(&model, &cli.run, text)?),
        None => None,
    };
    if logits::probe(&model, &cli.model, &cli.numerics, &cli.probe, ids.as_ref().map(|p| p.ids.as_slice()))? {
        return Ok(());
    }
    if let Some(note) = model.note {
        eprintln!("ds4: {note}");
    }
    let session = Session::start(model, &cli.model, &cli.numerics, &cli.cluster)?;
    let stop = Arc::new(AtomicBool::new(false));
    let flag = stop.clone();
    // The first Ctrl+C ends the answer, the next one before another answer ends the program.
    ctrlc::set_handler(move || {
        if flag.swap(true, Ordering::Relaxed) {
            std::process::exit(130);
        }
    })
    .map_err(|e| CliError::Usage(format!("Ctrl+C cannot be caught: {e}")))?;
    match ids {
        Some(ids) => once(&session, &cli.run, &ids, &stop),
        None => Chat { session, run: &mut cli.run, messages: Vec::new(), stop }.talk(),
    }
}

fn prompt_text(args: &RunArgs) -> Result<Option<String>, CliError> {
    match (&args.prompt, &args.prompt_file) {
        (Some(text), _) => Ok(Some(text.clone())),
        (None, Some(path)) => std::fs::read_to_string(path)
            .map(Some)
            .map_err(|source| CliError::File { path: path.clone(), source }),
        (None, None) => Ok(None),
    }
}

fn prompt_ids(model: &OpenModel, args: &RunArgs, text: &str) -> Result<PromptIds, CliError> {
    let prompt = if args.raw_prompt {
        Prompt::raw(text)
    } else {
        let mut messages: Vec<Message> = args.system.iter().map(Message::system).collect();
        messages.push(Message::user(text));
        chat::render(&messages, &render_options(args))
    };
    let path = model.path.clone();
    let tokenizer = model.tokenizer()?;
    prompt.to_ids(&tokenizer).map_err(|source| CliError::Tokenizer { path, source })
}

fn render_options(args: &RunArgs) -> RenderOptions {
    RenderOptions {
        thinking: !args.draw.nothink,
        effort: if args.draw.think_max { Effort::Max } else { Effort::Low },
        ..RenderOptions::default()
    }
}

/// Prints the answer to stdout as it comes; the thinking to stderr.
fn once(session: &Session, args: &RunArgs, ids: &PromptIds, stop: &AtomicBool) -> Result<(), CliError> {
    let mut printer = Printer::new(!args.raw_prompt && !args.draw.nothink);
    let answer = session.answer(ids, args, stop, &mut |bytes| match args.raw_prompt {
        true => printer.raw(bytes),
        false => printer.push(bytes),
    })?;
    printer.finish(&answer)?;
    eprintln!("{}", answer.summary());
    Ok(())
}

/// Splits what the model says into thoughts (stderr) and the answer (stdout).
struct Printer {
    parser: OutputParser,
    utf8: Utf8Stream,
    content: String,
    reasoning: String,
    thinking_shown: bool,
}

impl Printer {
    fn new(thinking: bool) -> Self {
        Printer {
            parser: OutputParser::new(ParserOptions { thinking, tools: false }),
            utf8: Utf8Stream::new(),
            content: String::new(),
            reasoning: String::new(),
            thinking_shown: false,
        }
    }

    fn raw(&mut self, bytes: &[u8]) -> Result<(), CliError> {
        let text = self.utf8.push(bytes);
        self.content.push_str(&text);
        print(&text)
    }

    fn push(&mut self, bytes: &[u8]) -> Result<(), CliError> {
        let events = self.parser.push(bytes);
        self.show(events)
    }

    fn show(&mut self, events: Vec<Said>) -> Result<(), CliError> {
        for event in events {
            match event {
                Said::Content(text) => {
                    if self.thinking_shown {
                        eprintln!("\n");
                        self.thinking_shown = false;
                    }
                    self.content.push_str(&text);
                    print(&text)?;
                }
                Said::Reasoning(text) => {
                    self.reasoning.push_str(&text);
                    self.thinking_shown = true;
                    // Dimmed where someone looks at it.
                    match std::io::stderr().is_terminal() {
                        true => eprint!("\x1b[2m{text}\x1b[0m"),
                        false => eprint!("{text}"),
                    }
                }
                // Without tools there are no calls.
                _ => {}
            }
        }
        Ok(())
    }

    fn finish(&mut self, answer: &Answer) -> Result<(), CliError> {
        let end = match answer {
            Answer::Finished(ds4_engine::FinishReason::Stop, _) => ParseEnd::EndOfSentence,
            _ => ParseEnd::Cut,
        };
        let (events, _) = self.parser.finish(end);
        self.show(events)?;
        let rest = self.utf8.finish();
        print(&rest)?;
        // An answer that stayed inside its thoughts is still an answer.
        if end == ParseEnd::EndOfSentence && self.content.is_empty() {
            print(&self.reasoning)?;
        }
        println!();
        Ok(())
    }
}

fn print(text: &str) -> Result<(), CliError> {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()?;
    Ok(())
}

const HELP: &str = "/help            this
/status          how full the context is, and what was reused
/think           let the model think before it answers
/think-max       ask for the most thorough thinking
/nothink         answer without thinking
/read FILE       say the text of a file
/ctx             the length of the context
/quit            end (also Ctrl+D); Ctrl+C stops an answer";

struct Chat<'a> {
    session: Session,
    run: &'a mut RunArgs,
    messages: Vec<Message>,
    stop: Arc<AtomicBool>,
}

impl Chat<'_> {
    fn talk(&mut self) -> Result<(), CliError> {
        self.messages.extend(self.run.system.iter().map(Message::system));
        let terminal = |e: ReadlineError| CliError::Usage(format!("terminal: {e}"));
        let mut editor = rustyline::DefaultEditor::new().map_err(terminal)?;
        loop {
            self.stop.store(false, Ordering::Relaxed);
            let line = match editor.readline("> ") {
                Ok(line) => line,
                Err(ReadlineError::Interrupted) => continue,
                Err(ReadlineError::Eof) => return Ok(()),
                Err(e) => return Err(terminal(e)),
            };
            if line.trim().is_empty() {
                continue;
            }
            let _ = editor.add_history_entry(&line);
            let (word, rest) = line.trim().split_once(' ').unwrap_or((line.trim(), ""));
            match word {
                "/quit" | "/exit" => return Ok(()),
                "/help" => println!("{HELP}"),
                "/status" => self.status(),
                "/ctx" => println!("{} tokens", self.session.context),
                "/think" | "/think-max" | "/nothink" => {
                    self.run.draw.nothink = word == "/nothink";
                    self.run.draw.think_max = word == "/think-max";
                    println!(
                        "{}",
                        if self.run.draw.nothink { "answering at once" } else { "thinking first" }
                    );
                }
                "/read" => match std::fs::read_to_string(rest.trim()) {
                    Ok(text) => self.say(text),
                    Err(e) => println!("{}: {e}", rest.trim()),
                },
                _ if word.starts_with('/') => println!("{word} is no command; /help lists them"),
                _ => self.say(line),
            }
        }
    }

    fn status(&self) {
        let s = self.session.handle.status();
        println!(
            "{} messages; {} of {} pages, {} of {} checkpoints in use; {} prompt tokens evaluated, {} reused",
            self.messages.len(),
            s.pages_used,
            s.pages_total,
            s.checkpoints_used,
            s.checkpoints_total,
            s.counters.rows_prefill,
            s.counters.rows_reused
        );
    }

    /// Says `text` and prints the answer. A failure is printed, and the conversation stays as it was.
    fn say(&mut self, text: String) {
        self.messages.push(Message::user(text));
        match self.reply() {
            Ok(message) => self.messages.push(message),
            Err(e) => {
                self.messages.pop();
                println!("ds4: {e}");
            }
        }
    }

    fn reply(&mut self) -> Result<Message, CliError> {
        let prompt = chat::render(&self.messages, &render_options(self.run));
        let ids = prompt
            .to_ids(&self.session.tokenizer)
            .map_err(|source| CliError::Tokenizer { path: "model".into(), source })?;
        let mut printer = Printer::new(!self.run.draw.nothink);
        let answer = self.session.answer(&ids, self.run, &self.stop, &mut |bytes| printer.push(bytes))?;
        printer.finish(&answer)?;
        eprintln!("{}", answer.summary());
        let mut message = Message::assistant(std::mem::take(&mut printer.content));
        message.reasoning_content = Some(std::mem::take(&mut printer.reasoning));
        Ok(message)
    }
}
