//! Every block format against what the `gguf` package dequantises, bit for bit.

use ds4_gguf::BlockFormat;
use ds4_testdata::Goldens;

#[test]
fn dequantize_is_bit_exact() {
    let golden = Goldens::open("quant_blocks.safetensors");
    let mut checked = 0;
    for format in BlockFormat::ALL {
        for prefix in ["", "random."] {
            let key = format!("{prefix}{}", format.name());
            if !golden.names().contains(&format!("{key}.raw")) {
                continue;
            }
            let raw: Vec<u8> = golden.i32(&format!("{key}.raw")).1.iter().map(|b| *b as u8).collect();
            let (_, want) = golden.f32(&format!("{key}.f32"));
            let mut got = vec![0f32; want.len()];
            format.dequantize(&raw, &mut got).unwrap();
            for (i, (g, w)) in got.iter().zip(&want).enumerate() {
                assert!(g == w || (g.is_nan() && w.is_nan()), "{key}[{i}]: {g} is not {w}");
            }
            checked += 1;
        }
    }
    assert_eq!(checked, 18, "every format was there");
}
