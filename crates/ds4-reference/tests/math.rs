//! The scalar building blocks against `unit.safetensors`.

use ds4_gguf::Gguf;
use ds4_model::{HyperParams, LayerKind, rounding};
use ds4_reference::math;
use ds4_testdata::{Goldens, max_abs_diff};

#[test]
fn roundings_are_exact() {
    let golden = Goldens::open("unit.safetensors");
    for (name, round) in
        [("fp8_round", rounding::fp8_round as fn(&mut [f32])), ("fp4_round", rounding::fp4_round)]
    {
        let (_, mut x) = golden.f32(&format!("{name}.in"));
        let (_, want) = golden.f32(&format!("{name}.out"));
        round(&mut x);
        assert_eq!(x, want, "{name}");
    }
}

#[test]
fn hadamard() {
    let golden = Goldens::open("unit.safetensors");
    let (_, mut x) = golden.f32("hadamard.in");
    x.chunks_exact_mut(128).for_each(rounding::hadamard);
    assert!(max_abs_diff(&x, &golden.f32("hadamard.out").1) < 1e-6);
    rounding::fp4_round(&mut x);
    assert_eq!(x, golden.f32("hadamard_fp4.out").1);
}

#[test]
fn rope_of_both_kinds_and_back() {
    let gguf = Gguf::open(&ds4_testdata::tiny_model()).unwrap();
    let hp = HyperParams::from_metadata(gguf.metadata()).unwrap();
    let golden = Goldens::open("unit.safetensors");
    for (name, kind) in [("main", LayerKind::Window), ("compress", LayerKind::Pooled)] {
        let freqs = hp.rope_freqs(kind);
        assert!(max_abs_diff(&freqs, &golden.f32(&format!("rope.{name}.inv_freq")).1) < 1e-7);
        let (_, pos) = golden.i32(&format!("rope.{name}.pos"));
        for (out, inverse) in [("out", false), ("inverse_out", true)] {
            let (_, mut x) = golden.f32(&format!("rope.{name}.in"));
            for (row, p) in x.chunks_exact_mut(hp.head_dim).zip(&pos) {
                math::rope_tail(row, *p as usize, &freqs, inverse);
            }
            // At position 65,535 one ulp of the frequency is 4e-3 of a turn's radian.
            let (_, want) = golden.f32(&format!("rope.{name}.{out}"));
            let near = 5 * hp.head_dim;
            assert!(max_abs_diff(&x[..near], &want[..near]) < 2e-4, "{name}.{out}");
            assert!(max_abs_diff(&x[near..], &want[near..]) < 2e-2, "{name}.{out} far");
        }
    }
}

#[test]
fn swiglu() {
    let golden = Goldens::open("unit.safetensors");
    let (_, gate) = golden.f32("swiglu.gate");
    let (_, up) = golden.f32("swiglu.up");
    let got: Vec<f32> = gate.iter().zip(&up).map(|(g, u)| math::swiglu(*g, *u, 7.0)).collect();
    assert!(max_abs_diff(&got, &golden.f32("swiglu.out").1) < 2e-5);
}
