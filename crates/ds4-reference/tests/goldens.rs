//! The reference backend against the goldens.

use ds4_reference::Reference;
use ds4_reference::goldens::{self, chunked, prefill_then_decode};

#[test]
fn units() {
    goldens::units(Reference::default);
}

#[test]
fn trace() {
    goldens::trace(Reference::default);
}

#[test]
fn qat_logits() {
    goldens::qat_logits(Reference::default);
}

#[test]
fn plain_logits_in_chunks() {
    let plans: Vec<_> = [700, 1, 3, 64, 127, 128, 130, 257].map(|chunk| chunked(700, chunk)).into();
    goldens::plain_logits(Reference::default, &plans, true);
}

#[test]
fn plain_logits_decoding_one_by_one() {
    let plans: Vec<_> = [1, 5, 127, 128, 129, 300].map(|first| prefill_then_decode(700, first)).into();
    goldens::plain_logits(Reference::default, &plans, true);
}

#[test]
fn a_model_of_odd_shapes() {
    let plans = [chunked(270, 270), chunked(270, 7), prefill_then_decode(270, 130)];
    goldens::odd_logits(Reference::default, &plans, true);
}
