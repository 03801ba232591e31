//! A backend against numbers from programs that are not ours: `transformers` (plain), the official inference code
//! restated in numpy (qat), both on the tiny model. In exact mode everything agrees to f32 noise.

use ds4_gguf::Gguf;
use ds4_model::backend::{Element, Setup, TensorSpec};
use ds4_model::weights::{self, Weights};
use ds4_model::{
    Backend, Batch, HyperParams, KvLayout, LayerKind, LayerSlice, Limits, Model, Numerics, Outputs, RowFormat,
};
use ds4_testdata::{Goldens, max_abs_diff, npy_f32, prompt_ids};

/// What independent f32 programs are held to.
pub const LOGITS_TOLERANCE: f32 = 1e-3;

fn tiny() -> (Gguf, HyperParams) {
    open(&ds4_testdata::tiny_model())
}

fn open(path: &std::path::Path) -> (Gguf, HyperParams) {
    let gguf = Gguf::open(path).expect("test model");
    let hyper = HyperParams::from_metadata(gguf.metadata()).expect("test model");
    (gguf, hyper)
}

/// A setup for one session of up to 768 positions.
pub fn setup(
    hyper: &HyperParams,
    slice: LayerSlice,
    numerics: Numerics,
    format: RowFormat,
    rows: usize,
) -> Setup {
    let context = 768;
    Setup {
        hyper: hyper.clone(),
        layout: KvLayout::new(hyper, slice, format),
        limits: Limits { context, rows, outputs: rows, slots: 2, pages: 2 * KvLayout::pages_for(context) },
        numerics,
    }
}

fn load<B: Backend>(gguf: &Gguf, setup: Setup, backend: B) -> Model<B> {
    let mut model = Model::load(gguf, setup, backend, &mut |_| ()).expect("load");
    let setup = model.setup().clone();
    open_session(&mut model.backend, &setup, 0);
    model
}

/// Gives the session in `slot` a page list of its own and an empty frontier.
pub fn open_session<B: Backend>(backend: &mut B, setup: &Setup, slot: u32) {
    let n = KvLayout::pages_for(setup.limits.context) as u32;
    let pages: Vec<u32> = (slot * n..(slot + 1) * n).collect();
    backend.reset(slot).expect("reset");
    backend.set_pages(slot, 0, &pages).expect("set_pages");
}

/// How the prompt is fed: each entry is one step's rows.
pub fn chunked(total: usize, chunk: usize) -> Vec<usize> {
    let mut steps = vec![chunk; total / chunk];
    steps.extend((!total.is_multiple_of(chunk)).then_some(total % chunk));
    steps
}

/// Prefill of `first` tokens, then one by one.
pub fn prefill_then_decode(total: usize, first: usize) -> Vec<usize> {
    std::iter::once(first).chain(std::iter::repeat_n(1, total - first)).collect()
}

/// Logits at all positions of `ids`, fed in `steps`.
pub fn logits<B: Backend>(model: &mut Model<B>, ids: &[u32], steps: &[usize]) -> Vec<f32> {
    let vocab = model.setup().hyper.vocab;
    let mut all = vec![0f32; ids.len() * vocab];
    let mut pos = 0;
    for &len in steps {
        let mut batch = Batch::new();
        batch.push(0, pos, &ids[pos..pos + len], Outputs::All);
        model.forward(&batch, None).expect("forward");
        model.logits(0, &mut all[pos * vocab..(pos + len) * vocab]).expect("logits");
        pos += len;
    }
    all
}

/// Plain exact logits within [`LOGITS_TOLERANCE`] of transformers at all 700 positions with the same best token; and
/// bit-equal whatever the chunking in `plans` (the first is the yardstick).
pub fn plain_logits<B: Backend>(new: impl Fn() -> B, plans: &[Vec<usize>], bit_equal: bool) {
    hold_logits(new, tiny(), &prompt_ids(), "logits_plain.npy", plans, bit_equal);
}

/// The same for the model of odd shapes, at its 270 positions; these goldens come from the numpy program.
pub fn odd_logits<B: Backend>(new: impl Fn() -> B, plans: &[Vec<usize>], bit_equal: bool) {
    let model = open(&ds4_testdata::odd_model());
    hold_logits(new, model, &ds4_testdata::ids("odd_ids.npy"), "odd_logits.npy", plans, bit_equal);
}

fn hold_logits<B: Backend>(
    new: impl Fn() -> B,
    (gguf, hyper): (Gguf, HyperParams),
    ids: &[u32],
    golden: &str,
    plans: &[Vec<usize>],
    bit_equal: bool,
) {
    let (rows, want) = npy_f32(golden);
    assert_eq!(rows, ids.len());
    let vocab = hyper.vocab;
    let mut first: Option<Vec<f32>> = None;
    for plan in plans {
        assert_eq!(plan.iter().sum::<usize>(), ids.len());
        let rows = plan.iter().copied().max().unwrap_or(1);
        let slice = LayerSlice::whole(hyper.layers.len());
        let setup = setup(&hyper, slice, Numerics::PLAIN_EXACT, RowFormat::F32, rows);
        let got = logits(&mut load(&gguf, setup, new()), ids, plan);
        let name = format!("steps {:?}…", &plan[..plan.len().min(4)]);
        let diff = max_abs_diff(&got, &want);
        assert!(diff <= LOGITS_TOLERANCE, "{name}: off by {diff}");
        for (t, (g, w)) in got.chunks_exact(vocab).zip(want.chunks_exact(vocab)).enumerate() {
            assert_eq!(best(g), best(w), "{name}: best token at position {t}");
        }
        match &first {
            None => first = Some(got),
            Some(f) if bit_equal => assert!(f == &got, "{name}: not bit-equal to {:?}…", &plans[0][..1]),
            Some(_) => {}
        }
    }
}

/// Index of the largest value, the first of equals.
pub fn best(row: &[f32]) -> usize {
    row.iter().enumerate().fold(0, |b, (i, v)| if *v > row[b] { i } else { b })
}

/// Mean Kullback-Leibler divergence of `got` from `want`, and the share of rows with the same best token.
pub fn compare_distributions(got: &[f32], want: &[f32], vocab: usize) -> (f64, f64) {
    let log_softmax = |row: &[f32]| {
        let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max) as f64;
        let total: f64 = row.iter().map(|v| (*v as f64 - max).exp()).sum();
        row.iter().map(|v| *v as f64 - max - total.ln()).collect::<Vec<_>>()
    };
    let (mut kl, mut same) = (0.0, 0);
    let rows = want.len() / vocab;
    for (g, w) in got.chunks_exact(vocab).zip(want.chunks_exact(vocab)) {
        let (p, q) = (log_softmax(w), log_softmax(g));
        kl += p.iter().zip(&q).map(|(p, q)| p.exp() * (p - q)).sum::<f64>();
        same += usize::from(best(g) == best(w));
    }
    (kl / rows as f64, same as f64 / rows as f64)
}

/// Qat logits: the first rows agree with the numpy program to [`LOGITS_TOLERANCE`]; later ones as two correct programs
/// do, in which single roundings flip (KL 2e-3 between the official code and numpy).
pub fn qat_logits<B: Backend>(new: impl Fn() -> B) {
    let (gguf, hyper) = tiny();
    let ids = &prompt_ids()[..256];
    let (_, want) = npy_f32("logits_qat.npy");
    let slice = LayerSlice::whole(hyper.layers.len());
    let numerics = Numerics { qat: true, exact: true };
    let mut model = load(&gguf, setup(&hyper, slice, numerics, RowFormat::F32, 256), new());
    let got = logits(&mut model, ids, &[256]);
    let head = 12 * hyper.vocab;
    let diff = max_abs_diff(&got[..head], &want[..head]);
    assert!(diff <= LOGITS_TOLERANCE, "first 12 rows off by {diff}");
    let (kl, same) = compare_distributions(&got, &want, hyper.vocab);
    assert!(kl < 6e-3 && same > 0.95, "KL {kl}, same best token {same}");
}

/// The streams after each layer, the chosen experts and the rows kept by the indexer, as traced from numpy. Each layer
/// runs as a slice of its own, so this is also the split over six stages.
pub fn trace<B: Backend>(new: impl Fn() -> B) {
    let (gguf, hyper) = tiny();
    let golden = Goldens::open("trace_plain.safetensors");
    let ids = prompt_ids();
    let (_, positions) = golden.i32("positions");
    let (width, k) = (hyper.streams * hyper.hidden, hyper.experts_used);
    let mut hidden: Option<Vec<f32>> = None;
    for l in 0..hyper.layers.len() {
        let slice = LayerSlice { first: l, end: l + 1, total: hyper.layers.len(), head: false };
        let setup = setup(&hyper, slice, Numerics::PLAIN_EXACT, RowFormat::F32, ids.len());
        let mut model = load(&gguf, setup, new());
        let mut batch = Batch::new();
        batch.push(0, 0, &ids, Outputs::None);
        model.forward(&batch, hidden.as_deref()).expect("forward");
        let mut out = vec![0f32; ids.len() * width];
        model.hidden(0, &mut out).expect("hidden");

        let (_, want) = golden.f32(&format!("hidden.{}", l + 1));
        for (want, &p) in want.chunks_exact(width).zip(&positions) {
            let got = &out[p as usize * width..(p as usize + 1) * width];
            let scale = want.iter().fold(1f32, |m, v| m.max(v.abs()));
            let diff = max_abs_diff(got, want) / scale;
            assert!(diff < 2e-5, "layer {l}, position {p}: streams off by {diff} of their largest");
        }
        let (backend, act) = model.trace();
        let mut experts = vec![0i32; ids.len() * k];
        backend.read_ids(&act.experts, 0, &mut experts).expect("experts");
        let (_, want) = golden.i32(&format!("layer.{l}.experts"));
        for (t, (got, want)) in experts.chunks_exact(k).zip(want.chunks_exact(k)).enumerate() {
            assert_eq!(sorted(got), sorted(want), "layer {l}, position {t}: experts");
        }
        let mut gates = vec![0f32; ids.len() * k];
        backend.read(&act.gates, 0, &mut gates).expect("gates");
        let (_, want_gates) = golden.f32(&format!("layer.{l}.expert_weights"));
        for (want_gates, &p) in want_gates.chunks_exact(k).zip(&positions) {
            let at = p as usize * k;
            for (e, gate) in experts[at..at + k].iter().zip(&gates[at..at + k]) {
                let place = want[at..at + k].iter().position(|w| w == e).expect("same experts");
                assert!(
                    (gate - want_gates[place]).abs() < 1e-5,
                    "layer {l}, position {p}: gate of expert {e}"
                );
            }
        }
        if hyper.layers[l] == LayerKind::Indexed {
            let mut rows = vec![0i32; ids.len() * hyper.index_topk];
            backend.read_ids(&act.selected, 0, &mut rows).expect("selected");
            let (_, want) = golden.i32(&format!("layer.{l}.index_rows"));
            assert!(rows == want, "layer {l}: rows kept by the indexer");
        }
        hidden = Some(out);
    }
}

fn sorted(ids: &[i32]) -> Vec<i32> {
    let mut v = ids.to_vec();
    v.sort_unstable();
    v
}

/// The tiny model's weights on a backend, to run single operations with.
struct Units<B: Backend> {
    backend: B,
    weights: Weights<B>,
    setup: Setup,
    golden: Goldens,
}

const UNIT_TOLERANCE: f32 = 2e-5;

/// Attention with roundings inside: the program that wrote `attention.2.qat` in f32 differs from itself in f64 by
/// 4.87e-5 of the largest value, since one FP4 or FP8 rounding falls to the other side.
const ONE_FLIP_TOLERANCE: f32 = 1e-4;

impl<B: Backend> Units<B> {
    fn new(mut backend: B, qat: bool) -> Self {
        let (gguf, hyper) = tiny();
        let slice = LayerSlice::whole(hyper.layers.len());
        let setup = setup(&hyper, slice, Numerics { qat, exact: true }, RowFormat::F32, 300);
        backend.prepare(&setup).expect("prepare");
        let weights = weights::bind(&hyper, &slice, &gguf, &mut backend, &mut |_| ()).expect("bind");
        open_session(&mut backend, &setup, 0);
        Units { backend, weights, setup, golden: Goldens::open("unit.safetensors") }
    }

    fn tensor(&mut self, cols: usize) -> B::Tensor {
        self.backend
            .tensor(TensorSpec { name: "test", rows: 300, cols, element: Element::F32 })
            .expect("tensor")
    }

    fn ids(&mut self, cols: usize) -> B::Tensor {
        self.backend
            .tensor(TensorSpec { name: "test", rows: 300, cols, element: Element::I32 })
            .expect("tensor")
    }

    fn filled(&mut self, cols: usize, values: &[f32]) -> B::Tensor {
        let mut t = self.tensor(cols);
        self.backend.write(&mut t, 0, values).expect("write");
        t
    }

    fn read(&mut self, t: &B::Tensor, len: usize) -> Vec<f32> {
        let mut out = vec![0f32; len];
        self.backend.read(t, 0, &mut out).expect("read");
        out
    }

    fn begin(&mut self, tokens: &[u32]) {
        let mut batch = Batch::new();
        batch.push(0, 0, tokens, Outputs::None);
        self.backend.begin(&batch).expect("begin");
    }

    fn close(&self, key: &str, got: &[f32]) {
        self.close_within(key, got, UNIT_TOLERANCE);
    }

    fn close_within(&self, key: &str, got: &[f32], tolerance: f32) {
        let (_, want) = self.golden.f32(key);
        let scale = want.iter().fold(1f32, |m, v| m.max(v.abs()));
        let diff = max_abs_diff(got, &want) / scale;
        assert!(diff <= tolerance, "{key}: off by {diff} of the largest value");
    }

    fn hyper_connections(&mut self) {
        let hp = self.setup.hyper.clone();
        let (n, d) = (hp.streams, hp.hidden);
        let (_, x) = self.golden.f32("hc.in");
        self.begin(&[0, 1, 2]);
        let mut x = self.filled(n * d, &x);
        let (mut h, mut mix) = (self.tensor(d), self.tensor(n + n * n));
        let ones = self.backend.vector("ones", vec![1.0; d]).expect("vector");
        let layer = &self.weights.layers[2];
        self.backend.hc_pre(&layer.hc_attn, &ones, &x, &mut h, &mut mix).expect("hc_pre");
        let mix_values = self.read(&mix, 3 * (n + n * n));
        let (post, comb): (Vec<&[f32]>, Vec<&[f32]>) =
            mix_values.chunks_exact(n + n * n).map(|m| m.split_at(n)).unzip();
        self.close("hc.post", &post.concat());
        self.close("hc.comb", &comb.concat());
        let (_, mut collapsed) = self.golden.f32("hc.collapsed");
        collapsed.chunks_exact_mut(d).for_each(|row| crate::math::rms_norm(row, &[], hp.rms_eps));
        let diff = max_abs_diff(&self.read(&h, 3 * d), &collapsed);
        assert!(diff < UNIT_TOLERANCE, "hc.collapsed, normed: off by {diff}");
        let (_, y) = self.golden.f32("hc.block_out");
        let y = self.filled(d, &y);
        self.backend.hc_post(&y, &mix, &mut x).expect("hc_post");
        let got = self.read(&x, 3 * n * d);
        self.close("hc.streams_out", &got);
    }

    fn compressors(&mut self, mode: &str) {
        let layout = self.setup.layout.clone();
        let (_, h) = self.golden.f32("compressor.in");
        let rows = h.len() / self.setup.hyper.hidden;
        self.begin(&vec![0; rows]);
        let h = self.filled(self.setup.hyper.hidden, &h);
        for (l, name) in [(2, "ratio4"), (3, "ratio128")] {
            let layer = &self.weights.layers[l];
            let compressor = layer.compressor.as_ref().expect("a compressed layer");
            self.backend.compress(layer, compressor, &h).expect("compress");
            let place = layout.layer(l).clone();
            let rows = rows / place.kind.ratio().expect("a compressed layer");
            let got = self.page_rows(place.rows_at, layout.main_row_bytes, rows);
            self.close(&format!("compressor.{name}.{mode}"), &got);
        }
        let layer = &self.weights.layers[2];
        let indexer = layer.indexer.as_ref().expect("an indexed layer");
        let mut selected = self
            .backend
            .tensor(TensorSpec {
                name: "test",
                rows: 300,
                cols: self.setup.hyper.index_topk,
                element: Element::I32,
            })
            .expect("tensor");
        let qr = self
            .backend
            .tensor(TensorSpec {
                name: "test",
                rows: 300,
                cols: self.setup.hyper.q_lora,
                element: Element::F32,
            })
            .expect("tensor");
        self.backend.select_rows(layer, indexer, &h, &qr, &mut selected).expect("select_rows");
        let got = self.page_rows(layout.layer(2).index_at, layout.index_row_bytes, rows / 4);
        self.close(&format!("compressor.indexer.{mode}"), &got);
    }

    /// f32 rows of the session's first page.
    fn page_rows(&mut self, at: usize, row_bytes: usize, rows: usize) -> Vec<f32> {
        let mut page = vec![0u8; self.setup.layout.page_bytes];
        self.backend.read_page(0, &mut page).expect("read_page");
        page[at..at + rows * row_bytes]
            .chunks_exact(4)
            .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
            .collect()
    }

    fn experts(&mut self) {
        let hp = self.setup.hyper.clone();
        let (_, tokens) = self.golden.i32("moe.ids");
        let (_, h) = self.golden.f32("moe.in");
        let (rows, k) = (tokens.len(), hp.experts_used);
        self.begin(&tokens.iter().map(|t| *t as u32).collect::<Vec<_>>());
        let h = self.filled(hp.hidden, &h);
        let (mut experts, mut gates, mut y) = (self.ids(k), self.tensor(k), self.tensor(hp.hidden));
        for l in [1, 4] {
            let layer = &self.weights.layers[l];
            self.backend.route(&layer.router, &h, &mut experts, &mut gates).expect("route");
            self.backend.run_experts(&layer.experts, &h, &experts, &gates, &mut y).expect("run_experts");
            let mut chosen = vec![0i32; rows * k];
            self.backend.read_ids(&experts, 0, &mut chosen).expect("read_ids");
            let got_gates = self.read(&gates, rows * k);
            let (_, want_ids) = self.golden.i32(&format!("moe.{l}.experts"));
            let (_, want_gates) = self.golden.f32(&format!("moe.{l}.weights"));
            for i in 0..rows * k {
                let row = i / k * k;
                let place =
                    want_ids[row..row + k].iter().position(|w| *w == chosen[i]).expect("the same experts");
                assert!((got_gates[i] - want_gates[row + place]).abs() < UNIT_TOLERANCE, "moe.{l}.weights");
            }
            let got = self.read(&y, rows * hp.hidden);
            self.close(&format!("moe.{l}.out"), &got);
        }
    }

    fn attention(&mut self, mode: &str) {
        let hp = self.setup.hyper.clone();
        let ids = &prompt_ids()[..300];
        self.begin(ids);
        let mut x = self.tensor(hp.streams * hp.hidden);
        let table = self.weights.embedding.as_ref().expect("embedding");
        self.backend.embed(table, &mut x).expect("embed");
        let streams = self.read(&x, 300 * hp.streams * hp.hidden);
        let rows: Vec<f32> =
            streams.chunks_exact(hp.streams * hp.hidden).flat_map(|r| &r[..hp.hidden]).copied().collect();
        let h = self.filled(hp.hidden, &rows);
        let (mut qr, mut q, mut kv) =
            (self.tensor(hp.q_lora), self.tensor(hp.q_dim()), self.tensor(hp.head_dim));
        let (mut selected, mut o, mut y) =
            (self.ids(hp.index_topk), self.tensor(hp.q_dim()), self.tensor(hp.hidden));
        for l in [0, 2, 3] {
            let layer = &self.weights.layers[l];
            let b = &mut self.backend;
            b.project_q(layer, &h, &mut qr, &mut q).expect("project_q");
            b.project_kv(layer, &h, &mut kv).expect("project_kv");
            if let Some(c) = &layer.compressor {
                b.compress(layer, c, &h).expect("compress");
            }
            if let Some(i) = &layer.indexer {
                b.select_rows(layer, i, &h, &qr, &mut selected).expect("select_rows");
            }
            let rows = layer.indexer.is_some().then_some(&selected);
            b.attend(layer, &q, &kv, rows, &mut o).expect("attend");
            b.project_output(&layer.attention, &o, &mut y).expect("project_output");
            let all = self.read(&y, 300 * hp.hidden);
            let got: Vec<f32> = [0, 3, 127, 128, 129, 299]
                .iter()
                .flat_map(|p| &all[p * hp.hidden..(p + 1) * hp.hidden])
                .copied()
                .collect();
            let tolerance = if mode == "qat" { ONE_FLIP_TOLERANCE } else { UNIT_TOLERANCE };
            self.close_within(&format!("attention.{l}.{mode}"), &got, tolerance);
        }
    }
}

/// Single operations against `unit.safetensors`, plain and qat.
pub fn units<B: Backend>(new: impl Fn() -> B) {
    Units::new(new(), false).hyper_connections();
    Units::new(new(), false).experts();
    for (qat, mode) in [(false, "plain"), (true, "qat")] {
        Units::new(new(), qat).compressors(mode);
        Units::new(new(), qat).attention(mode);
    }
}
