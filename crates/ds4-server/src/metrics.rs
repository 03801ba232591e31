//! Figures of the APIs, and `/metrics` in Prometheus' text format.

use std::fmt::Write;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use ds4_engine::{Health, Status};
use ds4_text::parser::Repair;

use crate::answer::{Reason, Usage};
use crate::error::ApiError;

/// Upper bounds of a histogram's buckets, seconds.
const BOUNDS: [f64; 14] =
    [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 60.0, 600.0];

#[derive(Default)]
struct Histogram {
    buckets: [AtomicU64; BOUNDS.len()],
    count: AtomicU64,
    micros: AtomicU64,
}

impl Histogram {
    fn add(&self, d: Duration) {
        let seconds = d.as_secs_f64();
        if let Some(bucket) = BOUNDS.iter().position(|b| seconds <= *b) {
            self.buckets[bucket].fetch_add(1, Ordering::Relaxed);
        }
        self.count.fetch_add(1, Ordering::Relaxed);
        self.micros.fetch_add(d.as_micros() as u64, Ordering::Relaxed);
    }

    fn write(&self, out: &mut String, name: &str, help: &str) {
        let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} histogram");
        let mut sum = 0;
        for (bound, bucket) in BOUNDS.iter().zip(&self.buckets) {
            sum += bucket.load(Ordering::Relaxed);
            let _ = writeln!(out, "{name}_bucket{{le=\"{bound}\"}} {sum}");
        }
        let count = self.count.load(Ordering::Relaxed);
        let seconds = self.micros.load(Ordering::Relaxed) as f64 / 1e6;
        let _ =
            writeln!(out, "{name}_bucket{{le=\"+Inf\"}} {count}\n{name}_sum {seconds}\n{name}_count {count}");
    }
}

/// Sums since the start.
#[derive(Default)]
pub struct Metrics {
    first_token: Histogram,
    token_gap: Histogram,
    finished: [AtomicU64; 4],
    failed: AtomicU64,
    refused: AtomicU64,
    repairs: AtomicU64,
    hidden: AtomicU64,
    prompt_tokens: AtomicU64,
    reused_tokens: AtomicU64,
    completion_tokens: AtomicU64,
    reasoning_tokens: AtomicU64,
    connections: AtomicU64,
    pub trace_dropped: AtomicU64,
}

const REASONS: [&str; 4] = ["stop", "stop_string", "length", "tool_calls"];

fn add(counter: &AtomicU64, n: usize) {
    counter.fetch_add(n as u64, Ordering::Relaxed);
}

impl Metrics {
    /// A token came so long after the one before, or after the request.
    pub fn token(&self, gap: Duration, first: bool) {
        if first { &self.first_token } else { &self.token_gap }.add(gap);
    }

    pub fn finished(&self, reason: &Reason, usage: &Usage) {
        let place = match reason {
            Reason::Stop => 0,
            Reason::StopString(_) => 1,
            Reason::Length => 2,
            Reason::Calls => 3,
        };
        add(&self.finished[place], 1);
        add(&self.prompt_tokens, usage.prompt);
        add(&self.reused_tokens, usage.reused);
        add(&self.completion_tokens, usage.completion);
        add(&self.reasoning_tokens, usage.reasoning);
    }

    pub fn failed(&self, _: &ApiError) {
        add(&self.failed, 1);
    }

    /// A request that was answered with an error at once.
    pub fn refused(&self) {
        add(&self.refused, 1);
    }

    pub fn repair(&self, repair: Repair) {
        if repair != Repair::NoEnd {
            add(&self.repairs, 1);
        }
    }

    /// An answer whose text stayed inside its thought.
    pub fn hidden(&self) {
        add(&self.hidden, 1);
    }

    pub fn connection(&self, opened: bool) {
        if opened {
            self.connections.fetch_add(1, Ordering::Relaxed);
        } else {
            self.connections.fetch_sub(1, Ordering::Relaxed);
        }
    }

    pub fn connections(&self) -> u64 {
        self.connections.load(Ordering::Relaxed)
    }

    /// Everything, as Prometheus reads it.
    pub fn text(&self, s: &Status, memory_bytes: usize, responses_bytes: usize) -> String {
        let mut out = String::new();
        let o = &mut out;
        let up = u8::from(s.health == Health::Ready);
        gauge(o, "ds4_ready", "1 while requests are served.", up);
        gauge(o, "ds4_connections", "Open connections.", self.connections());
        gauge(o, "ds4_sessions_running", "Requests that run.", s.sessions.len());
        gauge(o, "ds4_queue_waiting", "Requests that wait.", s.waiting);
        let prefilling = s.sessions.iter().filter(|x| x.generated == 0).count();
        gauge(o, "ds4_sessions_prefilling", "Running requests whose prompt is still read.", prefilling);
        gauge(o, "ds4_context_tokens", "Positions of one session.", s.context);
        gauge(o, "ds4_pages_used", "Key-value pages in use.", s.pages_used);
        gauge(o, "ds4_pages_total", "Key-value pages.", s.pages_total);
        gauge(o, "ds4_checkpoints_used", "Checkpoints kept.", s.checkpoints_used);
        gauge(o, "ds4_checkpoints_total", "Places for checkpoints.", s.checkpoints_total);
        gauge(o, "ds4_turns_bytes", "Sampled turns kept for the clients' histories.", memory_bytes);
        gauge(o, "ds4_responses_bytes", "Answers kept for previous_response_id.", responses_bytes);
        let c = &s.counters;
        counter(o, "ds4_steps_total", "Steps computed.", c.steps);
        counter(o, "ds4_step_seconds_total", "Time in steps.", c.step_seconds);
        counter(o, "ds4_prefill_rows_total", "Prompt tokens evaluated.", c.rows_prefill);
        counter(o, "ds4_decode_rows_total", "Answer tokens evaluated.", c.rows_decode);
        counter(o, "ds4_reused_rows_total", "Prompt tokens that needed no evaluation.", c.rows_reused);
        counter(o, "ds4_requests_finished_total", "Requests that the engine finished.", c.requests_finished);
        counter(o, "ds4_requests_failed_total", "Requests that the engine failed.", c.requests_failed);
        counter(
            o,
            "ds4_requests_cancelled_total",
            "Requests whose client went away, or had enough.",
            c.requests_cancelled,
        );
        counter(
            o,
            "ds4_requests_rejected_total",
            "Requests that the engine did not take.",
            c.requests_rejected,
        );
        counter(o, "ds4_restarts_total", "Restarts of stages after a failure.", c.restarts);
        counter(o, "ds4_queue_seconds_total", "Time that requests waited.", c.queue_seconds);
        counter(
            o,
            "ds4_snapshot_bytes_written_total",
            "Bytes written to the snapshot folder.",
            c.snapshot_bytes_written,
        );
        counter(
            o,
            "ds4_snapshot_bytes_read_total",
            "Bytes read from the snapshot folder.",
            c.snapshot_bytes_read,
        );
        let load = |a: &AtomicU64| a.load(Ordering::Relaxed);
        counter(
            o,
            "ds4_prompt_tokens_total",
            "Prompt tokens of answered requests.",
            load(&self.prompt_tokens),
        );
        counter(o, "ds4_prompt_tokens_reused_total", "Of them, reused.", load(&self.reused_tokens));
        counter(o, "ds4_completion_tokens_total", "Answer tokens.", load(&self.completion_tokens));
        counter(o, "ds4_reasoning_tokens_total", "Of them, thoughts.", load(&self.reasoning_tokens));
        counter(o, "ds4_http_refused_total", "Requests answered with an error at once.", load(&self.refused));
        counter(o, "ds4_answers_failed_total", "Answers that broke off with an error.", load(&self.failed));
        counter(
            o,
            "ds4_answers_repaired_total",
            "Departures from the output format that were mended.",
            load(&self.repairs),
        );
        counter(
            o,
            "ds4_answers_hidden_total",
            "Answers that stayed inside their thought and were taken out of it.",
            load(&self.hidden),
        );
        counter(
            o,
            "ds4_trace_dropped_total",
            "Trace records that were not written.",
            load(&self.trace_dropped),
        );
        let name = "ds4_answers_total";
        let _ = writeln!(o, "# HELP {name} Answers, by the reason of their end.\n# TYPE {name} counter");
        for (reason, n) in REASONS.iter().zip(&self.finished) {
            let _ = writeln!(o, "{name}{{reason=\"{reason}\"}} {}", load(n));
        }
        self.first_token.write(o, "ds4_time_to_first_token_seconds", "From a request to its first token.");
        self.token_gap.write(o, "ds4_token_gap_seconds", "From one token of an answer to the next.");
        stages(o, s);
        out
    }
}

fn stages(o: &mut String, s: &Status) {
    if !s.last_step.is_empty() {
        let name = "ds4_stage_last_step_seconds";
        let _ = writeln!(o, "# HELP {name} The last step in each stage.\n# TYPE {name} gauge");
        for t in &s.last_step {
            let stage = label(&t.stage);
            for (part, d) in [("compute", t.compute), ("wait", t.wait), ("send", t.send)] {
                let _ = writeln!(o, "{name}{{stage=\"{stage}\",part=\"{part}\"}} {}", d.as_secs_f64());
            }
        }
    }
    if !s.stages.is_empty() {
        let name = "ds4_stage_layers";
        let _ = writeln!(o, "# HELP {name} Layers of each stage.\n# TYPE {name} gauge");
        for stage in &s.stages {
            let (who, device) = (label(&stage.name), label(&stage.device));
            let layers = stage.slice.end - stage.slice.first;
            let _ = writeln!(o, "{name}{{stage=\"{who}\",device=\"{device}\"}} {layers}");
        }
    }
    if !s.plan.is_empty() {
        let name = "ds4_plan_bytes";
        let _ = writeln!(o, "# HELP {name} The memory plan.\n# TYPE {name} gauge");
        for (i, plan) in s.plan.iter().enumerate() {
            for line in &plan.lines {
                let (what, memory) = (label(&line.name), line.memory.name());
                let _ =
                    writeln!(o, "{name}{{stage=\"{i}\",line=\"{what}\",memory=\"{memory}\"}} {}", line.bytes);
            }
        }
    }
}

fn gauge(o: &mut String, name: &str, help: &str, value: impl std::fmt::Display) {
    let _ = writeln!(o, "# HELP {name} {help}\n# TYPE {name} gauge\n{name} {value}");
}

fn counter(o: &mut String, name: &str, help: &str, value: impl std::fmt::Display) {
    let _ = writeln!(o, "# HELP {name} {help}\n# TYPE {name} counter\n{name} {value}");
}

fn label(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', " ")
}
