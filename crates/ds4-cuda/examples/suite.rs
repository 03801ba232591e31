//! What a machine with a card runs: `suite goldens`, `suite ops MODEL [ROWS...]` (every operation of two layers by
//! itself), and `suite bench MODEL [CONTEXT...]`.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::process::ExitCode;
use std::time::Instant;

use ds4_cuda::Cuda;
use ds4_gguf::Gguf;
use ds4_model::backend::{Element, TensorSpec};
use ds4_model::weights;
use ds4_model::{
    Backend, Batch, HyperParams, KvLayout, LayerSlice, Limits, Model, Numerics, Outputs, RowFormat, Setup,
};
use ds4_reference::goldens::{self, best, chunked, prefill_then_decode};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// A suite's name, and what runs it.
type Suite = (&'static str, Box<dyn Fn()>);

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let done = match args.as_slice() {
        ["goldens"] => run_goldens(),
        ["bench", model, contexts @ ..] => bench(Path::new(model), contexts),
        ["ops", model, rows @ ..] => ops(Path::new(model), rows),
        _ => Err("usage: suite goldens | suite ops MODEL [ROWS...] | suite bench MODEL [CONTEXT...]".into()),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("suite: {e}");
            ExitCode::FAILURE
        }
    }
}

fn open() -> Cuda {
    Cuda::open(0).unwrap_or_else(|e| panic!("{e}"))
}

/// Every golden of the conformance suite, each reported by itself.
fn run_goldens() -> Result<()> {
    let plans = vec![
        chunked(700, 700),
        chunked(700, 64),
        chunked(700, 3),
        prefill_then_decode(700, 127),
        prefill_then_decode(700, 300),
    ];
    let odd = vec![chunked(270, 270), chunked(270, 7), prefill_then_decode(270, 130)];
    let suites: Vec<Suite> = vec![
        ("units", Box::new(|| goldens::units(open))),
        ("trace", Box::new(|| goldens::trace(open))),
        ("qat logits", Box::new(|| goldens::qat_logits(open))),
        (
            "plain logits, bit-equal in every chunking",
            Box::new(move || goldens::plain_logits(open, &plans, true)),
        ),
        ("odd model, bit-equal in every chunking", Box::new(move || goldens::odd_logits(open, &odd, true))),
    ];
    let mut failed = 0;
    for (name, suite) in &suites {
        let start = Instant::now();
        let ok = catch_unwind(AssertUnwindSafe(suite)).is_ok();
        failed += usize::from(!ok);
        println!("{} {name} ({:.1} s)", if ok { "pass" } else { "FAIL" }, start.elapsed().as_secs_f64());
    }
    if failed == 0 { Ok(()) } else { Err(format!("{failed} of {} suites failed", suites.len()).into()) }
}

/// Position that the timed operations start from.
const OPS_POS: usize = 4096;

/// Median time of every operation of an indexed and a pooled layer, in steps of so many rows.
fn ops(path: &Path, rows: &[&str]) -> Result<()> {
    let rows = rows.iter().map(|c| c.parse()).collect::<std::result::Result<Vec<usize>, _>>()?;
    let most = rows.iter().max().copied().unwrap_or(1);
    let gguf = Gguf::open(path)?;
    let hyper = HyperParams::from_metadata(gguf.metadata())?;
    let total = hyper.layers.len();
    let slice = LayerSlice { first: total - 2, end: total, total, head: true };
    let (n, k, d) = (hyper.streams, hyper.experts_used, hyper.hidden);
    let context = OPS_POS + most;
    let setup = Setup {
        layout: KvLayout::new(&hyper, slice, RowFormat::Packed),
        limits: Limits { context, rows: most, outputs: 1, slots: 1, pages: KvLayout::pages_for(context) },
        numerics: Numerics { qat: true, exact: std::env::var_os("EXACT").is_some() },
        hyper: hyper.clone(),
    };
    let mut b = Cuda::open(0)?;
    b.prepare(&setup)?;
    let w = weights::bind(&hyper, &slice, &gguf, &mut b, &mut |_| ())?;
    goldens::open_session(&mut b, &setup, 0);
    let mut buffer =
        |cols: usize, element: Element| b.tensor(TensorSpec { name: "ops", rows: most, cols, element });
    let mut x = buffer(n * d, Element::F32)?;
    let (mut h, mut mix, mut y) =
        (buffer(d, Element::F32)?, buffer(n + n * n, Element::F32)?, buffer(d, Element::F32)?);
    let (mut qr, mut q, mut o) = (
        buffer(hyper.q_lora, Element::F32)?,
        buffer(hyper.q_dim(), Element::F32)?,
        buffer(hyper.q_dim(), Element::F32)?,
    );
    let (mut kv, mut selected) =
        (buffer(hyper.head_dim, Element::F32)?, buffer(hyper.index_topk, Element::I32)?);
    let (mut experts, mut gates, mut logits) =
        (buffer(k, Element::I32)?, buffer(k, Element::F32)?, buffer(hyper.vocab, Element::F32)?);
    let noise: Vec<f32> = (0..most * n * d)
        .map(|i| ((i as u32).wrapping_mul(2_654_435_761) >> 8) as f32 / 8_388_608.0 - 1.0)
        .collect();
    for rows in rows {
        b.write(&mut x, 0, &noise)?;
        let ids: Vec<u32> = (0..rows as u32).collect();
        b.begin(&Batch::single(0, OPS_POS, &ids))?;
        println!("{rows} rows at position {OPS_POS}");
        for l in &w.layers {
            // The clock stops when one value of the result has come back; its own time is below a microsecond a run.
            macro_rules! time {
                ($name:literal, $out:expr, $op:expr) => {{
                    let mut times = Vec::new();
                    for _ in 0..5 {
                        let start = Instant::now();
                        for _ in 0..20 {
                            $op?;
                        }
                        b.read(&$out, 0, &mut [0f32])?;
                        times.push(start.elapsed().as_secs_f64() / 20.0);
                    }
                    times.sort_by(f64::total_cmp);
                    println!("  {:?} {:<16} {:>9.1} us", l.kind, $name, times[2] * 1e6);
                }};
            }
            let a = &l.attention;
            time!("hc_pre", h, b.hc_pre(&l.hc_attn, &l.attn_norm, &x, &mut h, &mut mix));
            time!("project_q", q, b.project_q(l, &h, &mut qr, &mut q));
            time!("project_kv", kv, b.project_kv(l, &h, &mut kv));
            if let Some(c) = &l.compressor {
                time!("compress", kv, b.compress(l, c, &h));
            }
            let rows = match &l.indexer {
                Some(i) => {
                    time!("select_rows", kv, b.select_rows(l, i, &h, &qr, &mut selected));
                    Some(&selected)
                }
                None => None,
            };
            time!("attend", o, b.attend(l, &q, &kv, rows, &mut o));
            time!("project_output", y, b.project_output(a, &o, &mut y));
            time!("hc_post", x, b.hc_post(&y, &mix, &mut x));
            time!("route", gates, b.route(&l.router, &h, &mut experts, &mut gates));
            time!("run_experts", y, b.run_experts(&l.experts, &h, &experts, &gates, &mut y));
        }
        let l = &w.layers[0];
        if let Some(head) = &w.head {
            let start = Instant::now();
            for _ in 0..20 {
                b.head(head, &x, &mut logits)?;
            }
            b.read(&logits, 0, &mut [0f32])?;
            println!("  {:?} head {:.1} us", l.kind, start.elapsed().as_secs_f64() / 20.0 * 1e6);
        }
    }
    Ok(())
}

const DECODED: usize = 32;

/// Load, then per context: prefill of the interval that ends there and greedy decode.
fn bench(path: &Path, contexts: &[&str]) -> Result<()> {
    let contexts = contexts.iter().map(|c| c.parse()).collect::<std::result::Result<Vec<usize>, _>>()?;
    let rows = std::env::var("ROWS").map_or(Ok(2048), |r| r.parse())?;
    let gguf = Gguf::open(path)?;
    let hyper = HyperParams::from_metadata(gguf.metadata())?;
    let context = contexts.iter().max().copied().unwrap_or(2048) + 2 * DECODED + 64;
    let slice = LayerSlice::whole(hyper.layers.len());
    let numerics = Numerics { qat: true, exact: std::env::var_os("EXACT").is_some() };
    let slots = 64.min(rows);
    let pages = KvLayout::pages_for(context) + slots * 4;
    let setup = Setup {
        layout: KvLayout::new(&hyper, slice, RowFormat::Packed),
        limits: Limits { context, rows, outputs: slots, slots, pages },
        numerics,
        hyper,
    };
    let start = Instant::now();
    let backend = Cuda::open(0)?;
    println!("{}; opened in {:.2} s", backend.device(), start.elapsed().as_secs_f64());
    let start = Instant::now();
    let vocab = setup.hyper.vocab;
    let own = KvLayout::pages_for(context) as u32;
    let mut m = Model::load(&gguf, setup, backend, &mut |_| ())?;
    println!("loaded in {:.2} s", start.elapsed().as_secs_f64());
    m.backend.reset(0)?;
    m.backend.set_pages(0, 0, &(0..own).collect::<Vec<_>>())?;
    let token = |i: usize| (i as u32).wrapping_mul(2_654_435_761) % 120_000 % vocab as u32;
    let mut logits = vec![0f32; vocab];
    let mut pos = 0;
    for target in contexts {
        let (start, from) = (Instant::now(), pos);
        while pos < target {
            let n = rows.min(target - pos);
            let ids: Vec<u32> = (pos..pos + n).map(token).collect();
            m.forward(&Batch::single(0, pos, &ids), None)?;
            m.logits(0, &mut logits)?;
            pos += n;
        }
        let prefill = (pos - from) as f64 / start.elapsed().as_secs_f64();
        let mut id = best(&logits) as u32;
        let mut times = Vec::new();
        for _ in 0..DECODED {
            let start = Instant::now();
            m.forward(&Batch::single(0, pos, &[id]), None)?;
            m.logits(0, &mut logits)?;
            id = best(&logits) as u32;
            times.push(start.elapsed().as_secs_f64());
            pos += 1;
        }
        times.sort_by(f64::total_cmp);
        let finite = logits.iter().all(|v| v.is_finite());
        println!(
            "{target}: prefill {prefill:.0} t/s, decode {:.1} t/s, finite {finite}, best {id}",
            1.0 / times[DECODED / 2]
        );
    }
    // Sessions together, 128 positions each.
    for sessions in [4usize, 16, 64].into_iter().filter(|n| *n < slots) {
        let mut batch = Batch::new();
        for s in 1..=sessions as u32 {
            m.backend.reset(s)?;
            m.backend.set_pages(s, 0, &[own + 4 * (s - 1), own + 4 * (s - 1) + 1])?;
        }
        let mut times = Vec::new();
        for pos in 0..8 {
            batch.clear();
            for s in 1..=sessions as u32 {
                batch.push(s, pos, &[token(pos + s as usize * 1000)], Outputs::Last);
            }
            let start = Instant::now();
            m.forward(&batch, None)?;
            m.logits(0, &mut logits)?;
            times.push(start.elapsed().as_secs_f64());
        }
        times.sort_by(f64::total_cmp);
        println!("{sessions} sessions: {:.0} t/s together", sessions as f64 / times[4]);
    }
    Ok(())
}
