//! The CPU backend against the goldens, and against itself: threads, chunks and company change no bit.

use ds4_cpu::Cpu;
use ds4_gguf::Gguf;
use ds4_model::{
    Batch, HyperParams, KvLayout, LayerSlice, Limits, Model, Numerics, Outputs, RowFormat, Setup,
};
use ds4_reference::goldens::{self, chunked, compare_distributions, prefill_then_decode};
use ds4_testdata::{npy_f32, prompt_ids};

fn cpu() -> Cpu {
    Cpu::new(2).unwrap()
}

#[test]
fn units() {
    goldens::units(cpu);
}

#[test]
fn trace() {
    goldens::trace(cpu);
}

#[test]
fn qat_logits() {
    goldens::qat_logits(cpu);
}

#[test]
fn plain_logits() {
    let mut plans: Vec<_> = [700, 1, 3, 64, 127, 128, 130, 257].map(|chunk| chunked(700, chunk)).into();
    plans.extend([1, 5, 127, 128, 129, 300].map(|first| prefill_then_decode(700, first)));
    goldens::plain_logits(cpu, &plans, true);
}

#[test]
fn a_model_of_odd_shapes() {
    goldens::odd_logits(cpu, &[chunked(270, 270), chunked(270, 7), prefill_then_decode(270, 130)], true);
}

fn model(threads: usize, numerics: Numerics, rows: usize) -> Model<Cpu> {
    let gguf = Gguf::open(&ds4_testdata::tiny_model()).unwrap();
    let hyper = HyperParams::from_metadata(gguf.metadata()).unwrap();
    let slice = LayerSlice::whole(hyper.layers.len());
    let format = if numerics.qat { RowFormat::Packed } else { RowFormat::F32 };
    let setup = Setup {
        layout: KvLayout::new(&hyper, slice, format),
        limits: Limits { context: 700, rows, outputs: rows, slots: 3, pages: 3 * KvLayout::pages_for(700) },
        hyper,
        numerics,
    };
    let mut m = Model::load(&gguf, setup.clone(), Cpu::new(threads).unwrap(), &mut |_| ()).unwrap();
    (0..3).for_each(|slot| goldens::open_session(&mut m.backend, &setup, slot));
    m
}

const MODES: [Numerics; 2] = [Numerics::PLAIN_EXACT, Numerics::QAT];

#[test]
fn threads_and_chunks_change_no_bit() {
    let ids = &prompt_ids()[..300];
    for numerics in MODES {
        let want = goldens::logits(&mut model(1, numerics, 300), ids, &[300]);
        for (threads, steps) in
            [(2, chunked(300, 300)), (3, chunked(300, 37)), (2, prefill_then_decode(300, 120))]
        {
            let got = goldens::logits(&mut model(threads, numerics, 300), ids, &steps);
            assert!(got == want, "{threads} threads, {numerics:?}");
        }
    }
}

#[test]
fn company_in_the_batch_changes_no_bit() {
    let ids = prompt_ids();
    for numerics in MODES {
        let want = goldens::logits(&mut model(2, numerics, 200), &ids[..200], &chunked(200, 50));
        let mut m = model(2, numerics, 200);
        let vocab = m.setup().hyper.vocab;
        let mut got = vec![0f32; 200 * vocab];
        for step in 0..4 {
            let (pos, mut batch) = (50 * step, Batch::new());
            batch.push(1, 7 * step, &ids[300 + 7 * step..307 + 7 * step], Outputs::Last);
            batch.push(0, pos, &ids[pos..pos + 50], Outputs::All);
            batch.push(2, step, &ids[500 + step..501 + step], Outputs::Last);
            m.forward(&batch, None).unwrap();
            m.logits(1, &mut got[pos * vocab..(pos + 50) * vocab]).unwrap();
        }
        assert!(got == want, "{numerics:?}");
    }
}

/// 8-bit activations on a random model: as far from the exact numbers as another program's (KL 0.043, same best token
/// 0.869 for llama.cpp's CPU path on this file).
#[test]
fn fast_mode_is_as_near_as_quantised_activations_get() {
    let ids = prompt_ids();
    let (_, want) = npy_f32("logits_plain.npy");
    let numerics = Numerics { qat: false, exact: false };
    let got = goldens::logits(&mut model(2, numerics, 700), &ids, &[700]);
    let (kl, same) = compare_distributions(&got, &want, 512);
    assert!(kl < 0.06 && same > 0.85, "KL {kl}, same best token {same}");
}
