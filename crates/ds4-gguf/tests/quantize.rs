//! The quantisers: what they lose is bounded, importance moves it where it matters, and what cannot be stored is refused.

use ds4_gguf::{BlockFormat, Error};
use proptest::prelude::*;

/// Every format that holds numbers, and the largest share of the values' energy that it may lose on Gaussian values.
const FORMATS: [(BlockFormat, f64); 11] = [
    (BlockFormat::F32, 0.0),
    (BlockFormat::F16, 1e-7),
    (BlockFormat::BF16, 6e-6),
    (BlockFormat::Q8_0, 3.5e-5),
    (BlockFormat::Q6K, 3.5e-4),
    (BlockFormat::Q5K, 1.3e-3),
    (BlockFormat::Q4K, 5.2e-3),
    (BlockFormat::Q3K, 2.3e-2),
    (BlockFormat::Q2K, 7.0e-2),
    (BlockFormat::IQ2XXS, 1.15e-1),
    (BlockFormat::MXFP4, 1.35e-2),
];

fn round_trip(format: BlockFormat, x: &[f32], cols: usize, importance: Option<&[f32]>) -> Vec<f32> {
    let mut blocks = Vec::new();
    format.quantize(x, cols, importance, &mut blocks).unwrap();
    assert_eq!(blocks.len() as u64, format.row_bytes(cols as u64) * (x.len() / cols) as u64);
    let mut back = vec![0f32; x.len()];
    format.dequantize(&blocks, &mut back).unwrap();
    back
}

fn loss(x: &[f32], back: &[f32], w: impl Fn(usize) -> f64) -> f64 {
    let sum = |f: &dyn Fn(usize) -> f64| (0..x.len()).map(|i| w(i) * f(i)).sum::<f64>();
    sum(&|i| f64::from(x[i] - back[i]).powi(2)) / sum(&|i| f64::from(x[i]).powi(2))
}

/// Gaussian values from a fixed seed (Box-Muller over a linear congruential generator).
fn gaussian(n: usize, mut seed: u64) -> Vec<f32> {
    let mut uniform = || {
        seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        ((seed >> 11) as f64 + 0.5) / (1u64 << 53) as f64
    };
    (0..n)
        .map(|_| ((-2.0 * uniform().ln()).sqrt() * (uniform() * std::f64::consts::TAU).cos()) as f32)
        .collect()
}

#[test]
fn gaussian_values_lose_no_more_than_they_must() {
    let x = gaussian(256 * 64, 7);
    for (format, most) in FORMATS {
        let lost = loss(&x, &round_trip(format, &x, 256, None), |_| 1.0);
        println!("{:8} {lost:.3e}", format.name());
        assert!(lost <= most, "{}: lost {lost:.3e}, at most {most:.3e}", format.name());
    }
}

#[test]
fn importance_moves_the_error_to_the_other_columns() {
    let x = gaussian(512 * 16, 3);
    let importance: Vec<f32> = (0..512).map(|c| if c % 8 == 0 { 50.0 } else { 1.0 }).collect();
    let weight = |i: usize| f64::from(importance[i % 512]);
    for (format, _) in FORMATS {
        if matches!(format, BlockFormat::F32 | BlockFormat::F16 | BlockFormat::BF16 | BlockFormat::Q8_0) {
            continue;
        }
        let with = loss(&x, &round_trip(format, &x, 512, Some(&importance)), weight);
        let without = loss(&x, &round_trip(format, &x, 512, None), weight);
        // MXFP4 has nothing to choose but the power of two.
        let most = if format == BlockFormat::MXFP4 { 0.98 } else { 0.95 };
        assert!(with < most * without, "{}: {with:.3e} with, {without:.3e} without", format.name());
        // Its scale does not matter, and nothing is divided by zero.
        let tiny: Vec<f32> = importance.iter().map(|w| w * 1e-20).collect();
        assert_eq!(round_trip(format, &x, 512, Some(&tiny)), round_trip(format, &x, 512, Some(&importance)));
        round_trip(format, &x, 512, Some(&vec![0.0; 512]));
    }
}

/// A file that was Q8_0, MXFP4 or a float loses nothing when it is written so again; the others next to nothing.
#[test]
fn a_second_pass_changes_little() {
    let x = gaussian(256 * 32, 11);
    for (format, _) in FORMATS {
        let once = round_trip(format, &x, 256, None);
        let twice = round_trip(format, &once, 256, None);
        let exact = matches!(
            format,
            BlockFormat::F32 | BlockFormat::F16 | BlockFormat::BF16 | BlockFormat::Q8_0 | BlockFormat::MXFP4
        );
        let (first, second) = (loss(&x, &once, |_| 1.0), loss(&once, &twice, |_| 1.0));
        println!("{:8} {first:.3e} then {second:.3e}", format.name());
        if exact {
            assert_eq!(once, twice, "{}", format.name());
        } else {
            assert!(second < 0.25 * first, "{}: {first:.3e}, then {second:.3e}", format.name());
        }
    }
}

#[test]
fn what_cannot_be_stored_is_refused_by_name() {
    for (format, _) in FORMATS {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut x = vec![1f32; 512];
            x[300] = bad;
            let e = format.quantize(&x, 256, None, &mut Vec::new()).unwrap_err().to_string();
            assert!(e.contains(format.name()) && e.contains("row 1, column 44"), "{e}");
        }
        let e = format.quantize(&[1.0; 256], 256, Some(&[1.0; 255]), &mut Vec::new()).unwrap_err();
        assert!(e.to_string().contains("importance of 255 columns"), "{e}");
        let e = format.quantize(&[1.0; 256], 256, Some(&[-1.0; 256]), &mut Vec::new()).unwrap_err();
        assert!(e.to_string().contains("importance of column 0"), "{e}");
    }
    assert!(matches!(
        BlockFormat::Q4K.quantize(&[0.0; 100], 100, None, &mut Vec::new()),
        Err(Error::Block { .. })
    ));
    assert!(BlockFormat::I32.quantize(&[0.0; 4], 4, None, &mut Vec::new()).is_err());
    // Scales are f16: what is beyond them is an error, not an infinity in the file.
    for format in
        [BlockFormat::F16, BlockFormat::Q8_0, BlockFormat::Q2K, BlockFormat::Q6K, BlockFormat::IQ2XXS]
    {
        let e = format.quantize(&[3e38; 256], 256, None, &mut Vec::new()).unwrap_err().to_string();
        assert!(e.contains("3e38"), "{}: {e}", format.name());
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// Any finite values, of any size that an f16 scale reaches: a result that is finite, never larger than its block's
    /// values allow, and never worse than storing nothing.
    #[test]
    fn any_values_come_back_near(
        values in prop::collection::vec(prop_oneof![4 => -1f32..1.0, 1 => -30f32..30.0, 1 => Just(0f32), 1 => -1e-6f32..1e-6], 256),
        exponent in -12i32..12,
        importance in prop::option::of(prop::collection::vec(prop_oneof![0f32..1.0, Just(0f32), 0f32..1e6], 256)),
    ) {
        let x: Vec<f32> = values.iter().map(|v| v * 2f32.powi(exponent)).collect();
        let top = x.iter().fold(0f32, |m, v| m.max(v.abs()));
        for (format, _) in FORMATS {
            let back = round_trip(format, &x, 256, importance.as_deref());
            let whole = |i: usize| importance.as_ref().map_or(1.0, |w| f64::from(w[i]));
            let energy: f64 = (0..256).map(|i| whole(i) * f64::from(x[i]).powi(2)).sum();
            let lost: f64 = (0..256).map(|i| whole(i) * f64::from(x[i] - back[i]).powi(2)).sum();
            // Below the smallest f16 scale a value may vanish, and a minimum may be off by a step of it.
            let floor: f64 = (0..256).map(|i| whole(i) * 1e-10).sum();
            prop_assert!(lost <= energy * 1.02 + floor, "{}: lost {lost} of {energy}", format.name());
            for (i, b) in back.iter().enumerate() {
                prop_assert!(b.is_finite() && b.abs() <= 2.0 * top + 1e-4, "{}[{i}]: {b} of {top}", format.name());
            }
        }
    }
}
