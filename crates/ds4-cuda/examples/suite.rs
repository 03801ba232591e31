//! What a machine with a card runs: `suite goldens`, `suite agree MODEL` (every operation of some layers,
//! fast against exact), `suite whole MODEL` (logits of steps, fast against exact), `suite ops MODEL [ROWS...]` (the time of each), and `suite bench MODEL [CONTEXT...]`.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::process::ExitCode;
use std::time::Instant;

use ds4_cuda::Cuda;
use ds4_gguf::Gguf;
use ds4_model::backend::{Element, TensorSpec};
use ds4_model::weights::{self, Weights};
use ds4_model::{
    Backend, Batch, HyperParams, KvLayout, LayerSlice, Limits, Model, Numerics, Outputs, RowFormat, Setup,
};
use ds4_reference::goldens::{self, best, chunked, prefill_then_decode};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let done = match args.as_slice() {
        ["goldens"] => run_goldens(),
        ["bench", model, contexts @ ..] => bench(Path::new(model), contexts),
        ["agree", model] => agree(Path::new(model)),
        ["whole", model] => whole(Path::new(model)),
        ["ops", model, rows @ ..] => ops(Path::new(model), rows),
        _ => Err("usage: suite goldens | suite agree MODEL | suite whole MODEL | suite ops MODEL [ROWS...] | suite bench MODEL [CONTEXT...]".into()),
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

type Suite = (&'static str, Box<dyn Fn()>);

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
    let suites: [Suite; 5] = [
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

/// Even noise in -1..1 (splitmix64).
fn random(len: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mut next = || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (state ^ state >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    };
    (0..len).map(|_| (next() >> 40) as f32 / 8_388_608.0 - 1.0).collect()
}

/// One backend over some layers, with the buffers of a step.
struct Side {
    b: Cuda,
    w: Weights<Cuda>,
    t: Vec<<Cuda as Backend>::Tensor>,
}

/// What fast operations may differ from exact ones by, relative: 8-bit activations and f16 products.
const AGREEMENT: f64 = 2e-2;

/// Every operation on the same inputs in the fast and in the exact mode, in steps of several sizes.
fn agree(path: &Path) -> Result<()> {
    const ROWS: usize = 300;
    let gguf = Gguf::open(path)?;
    let hyper = HyperParams::from_metadata(gguf.metadata())?;
    let total = hyper.layers.len();
    let slice = LayerSlice { first: total - 3, end: total, total, head: true };
    let (n, k, d) = (hyper.streams, hyper.experts_used, hyper.hidden);
    let context = 3000;
    let side = |exact: bool| -> Result<Side> {
        let setup = Setup {
            layout: KvLayout::new(&hyper, slice, RowFormat::Packed),
            limits: Limits { context, rows: ROWS, outputs: 1, slots: 1, pages: KvLayout::pages_for(context) },
            numerics: Numerics { qat: true, exact },
            hyper: hyper.clone(),
        };
        let mut b = Cuda::open(0)?;
        b.prepare(&setup)?;
        let w = weights::bind(&hyper, &slice, &gguf, &mut b, &mut |_| ())?;
        goldens::open_session(&mut b, &setup, 0);
        let f = |name, cols| TensorSpec { name, rows: ROWS, cols, element: Element::F32 };
        let i = |name, cols| TensorSpec { name, rows: ROWS, cols, element: Element::I32 };
        let specs = [
            f("x", n * d),
            f("h", d),
            f("mix", n + n * n),
            f("qr", hyper.q_lora),
            f("q", hyper.q_dim()),
            f("kv", hyper.head_dim),
            i("selected", hyper.index_topk),
            f("o", hyper.q_dim()),
            f("y", d),
            i("experts", k),
            f("gates", k),
            f("logits", hyper.vocab),
        ];
        let t = specs.into_iter().map(|s| b.tensor(s)).collect::<std::result::Result<Vec<_>, _>>()?;
        Ok(Side { b, w, t })
    };
    let (mut exact, mut fast) = (side(true)?, side(false)?);
    let cols = [
        n * d,
        d,
        n + n * n,
        hyper.q_lora,
        hyper.q_dim(),
        hyper.head_dim,
        hyper.index_topk,
        hyper.q_dim(),
        d,
        k,
        k,
        hyper.vocab,
    ];
    let (mut pos, mut failed) = (0, 0);
    for rows in [300, 1, 2, 5, 16, 40, 300, 300, 300, 300, 300, 300, 1, 12, 70] {
        let noise = random(rows * n * d, pos as u64);
        let ids: Vec<u32> = (0..rows as u32).collect();
        let batch = Batch::single(0, pos, &ids);
        for s in [&mut exact, &mut fast] {
            s.b.begin(&batch)?;
            s.b.write(&mut s.t[0], 0, &noise)?;
        }
        for l in 0..exact.w.layers.len() {
            let compressed = exact.w.layers[l].compressor.is_some();
            let indexed = exact.w.layers[l].indexer.is_some();
            // Runs one operation on both sides, compares its results, and copies the exact ones over.
            let both = |exact: &mut Side,
                        fast: &mut Side,
                        failed: &mut usize,
                        name: &str,
                        outs: &[usize],
                        op: &dyn Fn(&mut Side) -> ds4_model::backend::Result<()>|
             -> Result<()> {
                op(exact)?;
                op(fast)?;
                for &o in outs {
                    let len = cols[o] * if o == 11 { 1 } else { rows };
                    if matches!(o, 6 | 9) {
                        let (mut a, mut b) = (vec![0i32; len], vec![0i32; len]);
                        exact.b.read_ids(&exact.t[o], 0, &mut a)?;
                        fast.b.read_ids(&fast.t[o], 0, &mut b)?;
                        let other = a
                            .chunks(cols[o])
                            .zip(b.chunks(cols[o]))
                            .map(|(a, b)| a.iter().filter(|v| !b.contains(v)).count())
                            .sum::<usize>();
                        let share = other as f64 / len as f64;
                        *failed += usize::from(share > 0.05);
                        println!(
                            "{} {rows} rows at {pos}, layer {l} {name}: {share:.4} chosen otherwise",
                            if share > 0.05 { "FAIL" } else { "ok  " }
                        );
                        fast.b.write_ids(&mut fast.t[o], 0, &a)?;
                        continue;
                    }
                    let (mut a, mut b) = (vec![0f32; len], vec![0f32; len]);
                    exact.b.read(&exact.t[o], 0, &mut a)?;
                    fast.b.read(&fast.t[o], 0, &mut b)?;
                    let norm = |v: &mut dyn Iterator<Item = f64>| v.map(|x| x * x).sum::<f64>().sqrt();
                    let off = |a: &[f32], b: &[f32]| {
                        let size = norm(&mut a.iter().map(|v| f64::from(*v))).max(1e-9);
                        norm(&mut a.iter().zip(b).map(|(x, y)| f64::from(x - y))) / size
                    };
                    let mut each: Vec<(f64, usize)> = a
                        .chunks(cols[o])
                        .zip(b.chunks(cols[o]))
                        .enumerate()
                        .map(|(i, (a, b))| (off(a, b), i))
                        .collect();
                    each.sort_by(|a, b| a.0.total_cmp(&b.0));
                    let (median, (worst, at)) = (each[each.len() / 2].0, each[each.len() - 1]);
                    // The gates of other experts are other gates. A key-value row is rounded to E4M3: an input that
                    // differs a little may round to the neighbour, an eighth away.
                    let most = if o == 5 { 2.0 * AGREEMENT } else { AGREEMENT };
                    let bad = o != 10 && (worst.is_nan() || worst > most);
                    *failed += usize::from(bad);
                    println!(
                        "{} {rows} rows at {pos}, layer {l} {name}: median {median:.2e}, worst {worst:.2e} in row {at}",
                        if bad { "FAIL" } else { "ok  " }
                    );
                    if bad {
                        let (a, b) =
                            (&a[at * cols[o]..(at + 1) * cols[o]], &b[at * cols[o]..(at + 1) * cols[o]]);
                        let parts = a.chunks(64).zip(b.chunks(64)).map(|(a, b)| format!("{:.1e}", off(a, b)));
                        println!("     by 64 columns: {}", parts.take(24).collect::<Vec<_>>().join(" "));
                    }
                    fast.b.write(&mut fast.t[o], 0, &a)?;
                }
                Ok(())
            };
            macro_rules! op {
                ($name:literal, $outs:expr, |$s:ident, $layer:ident, [$($t:ident),*]| $body:expr) => {
                    both(&mut exact, &mut fast, &mut failed, $name, &$outs, &|$s: &mut Side| {
                        let [$($t),*] = &mut $s.t[..] else { return Ok(()) };
                        let $layer = &$s.w.layers[l];
                        $body
                    })?
                };
            }
            op!("hc_pre", [1, 2], |s, w, [x, h, mix, _qr, _q, _kv, _sel, _o, _y, _e, _g, _lo]| s.b.hc_pre(
                &w.hc_attn,
                &w.attn_norm,
                x,
                h,
                mix
            ));
            op!("project_q", [3, 4], |s, w, [_x, h, _mix, qr, q, _kv, _sel, _o, _y, _e, _g, _lo]| s
                .b
                .project_q(w, h, qr, q));
            op!("project_kv", [5], |s, w, [_x, h, _mix, _qr, _q, kv, _sel, _o, _y, _e, _g, _lo]| s
                .b
                .project_kv(w, h, kv));
            if compressed {
                op!("compress", [], |s, w, [_x, h, _mix, _qr, _q, _kv, _sel, _o, _y, _e, _g, _lo]| match &w
                    .compressor
                {
                    Some(c) => s.b.compress(w, c, h),
                    None => Ok(()),
                });
            }
            if indexed {
                op!(
                    "select_rows",
                    [6],
                    |s, w, [_x, h, _mix, qr, _q, _kv, sel, _o, _y, _e, _g, _lo]| match &w.indexer {
                        Some(i) => s.b.select_rows(w, i, h, qr, sel),
                        None => Ok(()),
                    }
                );
            }
            op!("attend", [7], |s, w, [_x, _h, _mix, _qr, q, kv, sel, o, _y, _e, _g, _lo]| s.b.attend(
                w,
                q,
                kv,
                indexed.then_some(&*sel),
                o
            ));
            // What the window holds now is what the rows were.
            let layout = KvLayout::new(&hyper, slice, RowFormat::Packed);
            let place = layout.layer(total - 3 + l).clone();
            for (side, s) in [("exact", &mut exact), ("fast", &mut fast)] {
                let mut kv = vec![0f32; rows * hyper.head_dim];
                s.b.read(&s.t[5], 0, &mut kv)?;
                let mut frontier = vec![0u8; layout.frontier_bytes];
                s.b.save_frontier(0, &mut frontier)?;
                let (mut row, mut bytes) = (vec![0f32; hyper.head_dim], vec![0u8; layout.main_row_bytes]);
                let mut worst = 0f32;
                for i in rows.saturating_sub(hyper.window)..rows {
                    let at = place.ring_at + (pos + i) % hyper.window * layout.main_row_bytes;
                    let stored = &frontier[at..at + layout.main_row_bytes];
                    layout.decode_main(stored, &mut row);
                    let want = &kv[i * hyper.head_dim..(i + 1) * hyper.head_dim];
                    worst = row.iter().zip(want).fold(worst, |m, (a, b)| m.max((a - b).abs()));
                    layout.encode_main(want, &mut bytes);
                    let used = hyper.nope_dim() + hyper.nope_dim() / 64 + 2 * hyper.rope_dim;
                    if bytes[..used] != stored[..used] && i + 1 == rows {
                        println!(
                            "     {side}: bytes differ: {:?} {:?}",
                            &bytes[hyper.nope_dim()..used.min(hyper.nope_dim() + 24)],
                            &stored[hyper.nope_dim()..used.min(hyper.nope_dim() + 24)]
                        );
                        println!(
                            "     values {:?} {:?}",
                            &want[hyper.nope_dim()..hyper.nope_dim() + 6],
                            &row[hyper.nope_dim()..hyper.nope_dim() + 6]
                        );
                    }
                }
                failed += usize::from(worst > 0.0);
                println!(
                    "{} {rows} rows at {pos}, layer {l} window of {side}: stored rows off by {worst:e}",
                    if worst > 0.0 { "FAIL" } else { "ok  " }
                );
            }
            op!("project_output", [8], |s, w, [_x, _h, _mix, _qr, _q, _kv, _sel, o, y, _e, _g, _lo]| s
                .b
                .project_output(&w.attention, o, y));
            op!("hc_post_pre", [0, 1, 2], |s, w, [x, h, mix, _qr, _q, _kv, _sel, _o, y, _e, _g, _lo]| s
                .b
                .hc_post_pre(y, &w.hc_ffn, &w.ffn_norm, x, h, mix));
            op!("route", [9, 10], |s, w, [_x, h, _mix, _qr, _q, _kv, _sel, _o, _y, e, g, _lo]| s
                .b
                .route(&w.router, h, e, g));
            op!("route", [9, 10], |s, w, [_x, h, _mix, _qr, _q, _kv, _sel, _o, _y, e, g, _lo]| s
                .b
                .route(&w.router, h, e, g));
            op!("run_experts", [8], |s, w, [_x, h, _mix, _qr, _q, _kv, _sel, _o, y, e, g, _lo]| s
                .b
                .run_experts(&w.experts, h, e, g, y));
            op!("hc_post", [0], |s, _w, [x, _h, mix, _qr, _q, _kv, _sel, _o, y, _e, _g, _lo]| s
                .b
                .hc_post(y, mix, x));
        }
        let heads = exact.w.head.is_some();
        if heads {
            let mut logits = [vec![0f32; hyper.vocab], vec![0f32; hyper.vocab]];
            for (s, out) in [&mut exact, &mut fast].into_iter().zip(&mut logits) {
                let (first, rest) = s.t.split_at_mut(11);
                if let Some(head) = &s.w.head {
                    s.b.head(head, &first[0], &mut rest[0])?;
                }
                s.b.read(&rest[0], 0, out)?;
            }
            let size = logits[0].iter().map(|v| f64::from(*v).powi(2)).sum::<f64>().sqrt();
            let off =
                logits[0].iter().zip(&logits[1]).map(|(a, b)| f64::from(a - b).powi(2)).sum::<f64>().sqrt()
                    / size;
            failed += usize::from(off.is_nan() || off > AGREEMENT);
            println!(
                "{} {rows} rows at {pos}, head: off by {off:.2e}",
                if off <= AGREEMENT { "ok  " } else { "FAIL" }
            );
        }
        pos += rows;
    }
    if failed == 0 { Ok(()) } else { Err(format!("{failed} results differ by more than {AGREEMENT}").into()) }
}

/// The logits of a whole model, fast against exact, where operations hand each other what they made: a prefill, single
/// rows, then steps of several rows. Graphs are recorded and replayed on the way.
fn whole(path: &Path) -> Result<()> {
    let gguf = Gguf::open(path)?;
    let hyper = HyperParams::from_metadata(gguf.metadata())?;
    let vocab = hyper.vocab;
    let pages = KvLayout::pages_for(1024);
    let load = |exact: bool| -> Result<Model<Cuda>> {
        let slice = LayerSlice::whole(hyper.layers.len());
        let setup = Setup {
            layout: KvLayout::new(&hyper, slice, RowFormat::Packed),
            limits: Limits { context: 1024, rows: 256, outputs: 1, slots: 1, pages },
            numerics: Numerics { qat: true, exact },
            hyper: hyper.clone(),
        };
        let mut m = Model::load(&gguf, setup, Cuda::open(0)?, &mut |_| ())?;
        m.backend.reset(0)?;
        m.backend.set_pages(0, 0, &(0..pages as u32).collect::<Vec<_>>())?;
        Ok(m)
    };
    let (mut exact, mut fast) = (load(true)?, load(false)?);
    let token = |i: usize| (i as u32).wrapping_mul(2_654_435_761) % vocab.min(120_000) as u32;
    let (mut pos, mut offs, mut same) = (0, Vec::new(), 0);
    let mut steps = vec![200];
    steps.extend([1; 24]);
    steps.extend([2, 2, 2, 5, 5, 5, 8, 8, 8, 16, 16, 16, 40, 40, 1, 1, 1]);
    for rows in steps {
        let ids: Vec<u32> = (pos..pos + rows).map(token).collect();
        let mut out = [vec![0f32; vocab], vec![0f32; vocab]];
        for (m, out) in [&mut exact, &mut fast].into_iter().zip(&mut out) {
            m.forward(&Batch::single(0, pos, &ids), None)?;
            m.logits(0, out)?;
        }
        pos += rows;
        let norm = |v: &mut dyn Iterator<Item = f64>| v.map(|x| x * x).sum::<f64>().sqrt();
        let size = norm(&mut out[0].iter().map(|v| f64::from(*v)));
        let off = norm(&mut out[0].iter().zip(&out[1]).map(|(a, b)| f64::from(a - b))) / size;
        same += usize::from(best(&out[0]) == best(&out[1]));
        println!("  {rows} rows to {pos}: off by {off:.2e}");
        offs.push(off);
    }
    let steps = offs.len();
    offs.sort_by(f64::total_cmp);
    let (median, worst) = (offs[steps / 2], offs[steps - 1]);
    println!("whole: median {median:.2e}, worst {worst:.2e}, the same best token in {same} of {steps}");
    let bad = worst.is_nan() || median > 3e-2;
    if bad { Err("the fast mode differs by more than 3e-2".into()) } else { Ok(()) }
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
    let noise = random(most * n * d, 0);
    // One plain run of each, for a profiler to look at.
    let once = std::env::var_os("ONCE").is_some();
    for rows in rows {
        b.write(&mut x, 0, &noise)?;
        let ids: Vec<u32> = (0..rows as u32).collect();
        let batch = Batch::single(0, OPS_POS, &ids);
        b.begin(&batch)?;
        println!("{rows} rows at position {OPS_POS}");
        for l in &w.layers {
            // The clock stops when one value of the result has come back; its own time is below a microsecond a run.
            macro_rules! time {
                ($name:literal, $out:expr, $op:expr) => {{
                    // Recorded where the backend records, as a step is: launches of their own would be what is timed.
                    if once {
                        ($op)(&mut b)?;
                    } else {
                    b.forget_recorded()?;
                    let mut times = Vec::new();
                    for i in 0..7 {
                        let start = Instant::now();
                        b.record(&batch, |b| (0..20).try_for_each(|_| $op(b)))?;
                        b.read(&$out, 0, &mut [0f32])?;
                        if i >= 2 {
                            times.push(start.elapsed().as_secs_f64() / 20.0);
                        }
                    }
                    times.sort_by(f64::total_cmp);
                    println!("  {:?} {:<16} {:>9.1} us", l.kind, $name, times[2] * 1e6);
                    }
                }};
            }
            let a = &l.attention;
            time!("hc_pre", h, |b: &mut Cuda| b.hc_pre(&l.hc_attn, &l.attn_norm, &x, &mut h, &mut mix));
            time!("project_q", q, |b: &mut Cuda| b.project_q(l, &h, &mut qr, &mut q));
            time!("project_kv", kv, |b: &mut Cuda| b.project_kv(l, &h, &mut kv));
            if let Some(c) = &l.compressor {
                time!("compress", kv, |b: &mut Cuda| b.compress(l, c, &h));
            }
            let rows = match &l.indexer {
                Some(i) => {
                    time!("select_rows", kv, |b: &mut Cuda| b.select_rows(l, i, &h, &qr, &mut selected));
                    Some(&selected)
                }
                None => None,
            };
            time!("attend", o, |b: &mut Cuda| b.attend(l, &q, &kv, rows, &mut o));
            time!("project_output", y, |b: &mut Cuda| b.project_output(a, &o, &mut y));
            time!("hc_post", x, |b: &mut Cuda| b.hc_post(&y, &mix, &mut x));
            time!("route", gates, |b: &mut Cuda| b.route(&l.router, &h, &mut experts, &mut gates));
            time!("run_experts", y, |b: &mut Cuda| b.run_experts(&l.experts, &h, &experts, &gates, &mut y));
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
