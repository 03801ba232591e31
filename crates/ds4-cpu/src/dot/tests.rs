use super::*;
use crate::quant::Buffer;
use ds4_testdata::Rng;

const FORMATS: [BlockFormat; 8] = [
    BlockFormat::Q8_0,
    BlockFormat::MXFP4,
    BlockFormat::Q2K,
    BlockFormat::Q3K,
    BlockFormat::Q4K,
    BlockFormat::Q5K,
    BlockFormat::Q6K,
    BlockFormat::IQ2XXS,
];

/// Random blocks with legal scales of about `size`. Every code occurs.
fn blocks(format: BlockFormat, cols: usize, size: f32, rng: &mut Rng) -> Vec<u8> {
    let mut bytes: Vec<u8> = (0..format.row_bytes(cols as u64)).map(|_| rng.next_u64() as u8).collect();
    let scales: &[usize] = match format {
        BlockFormat::Q2K => &[80, 82],
        BlockFormat::Q3K => &[108],
        BlockFormat::Q4K | BlockFormat::Q5K => &[0, 2],
        BlockFormat::Q6K => &[208],
        _ => &[0],
    };
    for block in bytes.chunks_exact_mut(format.block_bytes()) {
        if format == BlockFormat::MXFP4 {
            block[0] = 120 + block[0] % 12;
            continue;
        }
        for at in scales {
            let d = half::f16::from_f32(size * (0.01 + rng.unit().abs()));
            block[*at..at + 2].copy_from_slice(&d.to_le_bytes());
        }
    }
    bytes
}

/// All codes at the ends of their range, with the largest scales that the format has.
fn extremes(format: BlockFormat, cols: usize, fill: u8) -> Vec<u8> {
    let mut bytes = vec![fill; format.row_bytes(cols as u64) as usize];
    let at = match format {
        BlockFormat::Q2K => 80,
        BlockFormat::Q3K => 108,
        BlockFormat::Q6K => 208,
        _ => 0,
    };
    for block in bytes.chunks_exact_mut(format.block_bytes()) {
        match format {
            BlockFormat::MXFP4 => block[0] = 130,
            BlockFormat::Q8_0 | BlockFormat::IQ2XXS | BlockFormat::Q3K | BlockFormat::Q6K => {
                block[at..at + 2].copy_from_slice(&half::f16::from_f32(60000.0).to_le_bytes())
            }
            _ => {
                block[at..at + 2].copy_from_slice(&half::f16::from_f32(60000.0).to_le_bytes());
                block[at + 2..at + 4].copy_from_slice(&half::f16::from_f32(-60000.0).to_le_bytes());
            }
        }
    }
    bytes
}

fn quantised(format: BlockFormat, cols: usize, rows: usize, x: impl FnMut(usize) -> Vec<f32>) -> Buffer {
    let mut buffer = Buffer::default();
    let Some(kind) = Kernels::activations(format) else { return buffer };
    buffer.fill(kind, cols, rows, x);
    buffer
}

#[test]
fn a_row_is_the_product_of_what_was_quantised() {
    let mut rng = Rng(5);
    for format in FORMATS {
        for (cols, scale) in [(256, 1.0), (1024, 1e-3), (768, 1e4), (256, 0.0), (4352, 1.0), (8192, 1.0)] {
            let w = blocks(format, cols, 1.0, &mut rng);
            let mut weights = vec![0f32; cols];
            format.dequantize(&w, &mut weights).unwrap();
            let x = quantised(format, cols, 1, |_| (0..cols).map(|_| rng.normal() * scale).collect());
            let values = x.row(0).dequantize();
            let terms = || values.iter().zip(&weights).map(|(a, b)| f64::from(*a) * f64::from(*b));
            let (want, size): (f64, f64) = (terms().sum(), terms().map(f64::abs).sum());
            for kernels in Kernels::all() {
                let got = (kernels.row)(format, &w, x.row(0));
                assert!(
                    (f64::from(got) - want).abs() <= 1e-5 * size,
                    "{} {format:?} {cols}: {got} is not {want} (of {size})",
                    kernels.name
                );
            }
        }
    }
}

/// Every instruction set, one row or a tile: the same bits; on random blocks and at the ends of all ranges.
#[test]
fn every_instruction_set_and_tile_gives_the_same_bits() {
    let mut rng = Rng(7);
    for format in FORMATS {
        for (case, cols) in [(0, 256), (1, 4096), (2, 4096 + 256), (3, 512), (4, 512), (5, 512)] {
            let tokens = 21;
            let x = quantised(format, cols, tokens, |t| {
                (0..cols)
                    .map(|i| match case {
                        3 => 1.0,
                        4 => -1.0,
                        5 => [1.0, -1.0][(i + t) % 2],
                        _ => rng.normal(),
                    })
                    .collect()
            });
            let w: Vec<Vec<u8>> = (0..PANEL_ROWS)
                .map(|r| match case {
                    3.. => extremes(format, cols, [0xff, 0x00, 0x7f, 0x80, 0x88, 0x77, 0x55, 0xaa][r]),
                    _ => blocks(format, cols, 0.01, &mut rng),
                })
                .collect();
            let want: Vec<Vec<u32>> = w
                .iter()
                .map(|w| {
                    (0..tokens).map(|t| (portable::KERNELS.row)(format, w, x.row(t)).to_bits()).collect()
                })
                .collect();
            for kernels in Kernels::all() {
                for (w, want) in w.iter().zip(&want) {
                    for (t, want) in want.iter().enumerate() {
                        let got = (kernels.row)(format, w, x.row(t));
                        let same = got.to_bits() == *want || (got.is_nan() && f32::from_bits(*want).is_nan());
                        assert!(
                            same,
                            "{} {format:?} case {case}: {got} is not {}",
                            kernels.name,
                            f32::from_bits(*want)
                        );
                    }
                }
                let Some(tiles) = kernels.tiles else { continue };
                let mut scratch = TileScratch::with_cols(cols);
                let rows: Vec<_> = (0..tokens).map(|t| x.row(t)).collect();
                for (t, rows) in rows.chunks(TILE_TOKENS).enumerate() {
                    (tiles.pack)(&mut scratch.packed, t, rows);
                }
                let refs: Vec<&[u8]> = w.iter().map(Vec::as_slice).collect();
                (tiles.unpack)(format, &refs, cols, &mut scratch.panel);
                let mut out = [[0f32; TILE_TOKENS]; PANEL_ROWS];
                for t in 0..tokens.div_ceil(TILE_TOKENS) {
                    (tiles.multiply)(format, cols, &scratch.panel, &scratch.packed, t, &mut out);
                    for (r, out) in out.iter().enumerate() {
                        for (i, got) in out.iter().enumerate().take(tokens - TILE_TOKENS * t) {
                            let want = f32::from_bits(want[r][TILE_TOKENS * t + i]);
                            let same = got.to_bits() == want.to_bits() || (got.is_nan() && want.is_nan());
                            assert!(
                                same,
                                "{} {format:?} case {case}, tile: {got} is not {want}",
                                kernels.name
                            );
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn f32_products() {
    let mut rng = Rng(6);
    for n in [0, 1, 31, 32, 33, 100, 4096] {
        let mut random = || -> Vec<f32> { (0..n).map(|_| rng.normal()).collect() };
        let (w, x): ([Vec<f32>; F32_ROWS], [Vec<f32>; F32_TOKENS]) =
            (std::array::from_fn(|_| random()), std::array::from_fn(|_| random()));
        for k in Kernels::all() {
            let tile = (k.f32_tile)(w.each_ref().map(|w| &w[..]), x.each_ref().map(|x| &x[..]));
            for (w, tile) in w.iter().zip(tile) {
                for (x, got) in x.iter().zip(tile) {
                    let want: f64 = w.iter().zip(x).map(|(x, y)| f64::from(*x) * f64::from(*y)).sum();
                    assert!((f64::from(got) - want).abs() < 1e-4 * (n as f64 + 1.0).sqrt());
                    assert_eq!(got.to_bits(), (k.f32)(x, w).to_bits(), "{} {n}", k.name);
                }
            }
        }
    }
}

#[test]
fn weighted_sums_do_not_depend_on_the_heads_beside_them() {
    let mut rng = Rng(8);
    for (heads, n, d) in [(1, 3, 64), (4, 7, 128), (6, 5, 100), (9, 130, 512)] {
        let stride = n + 3;
        let p: Vec<f32> = (0..heads * stride).map(|_| rng.unit()).collect();
        let v: Vec<f32> = (0..n * d).map(|_| rng.normal()).collect();
        for k in Kernels::all() {
            let mut all = vec![0f32; heads * d];
            (k.weighted)(&p, stride, &v, d, &mut all);
            for h in 0..heads {
                let mut one = vec![0f32; d];
                (k.weighted)(&p[h * stride..h * stride + n], n, &v, d, &mut one);
                for (i, (a, b)) in all[h * d..].iter().zip(&one).enumerate() {
                    assert_eq!(a.to_bits(), b.to_bits(), "{}", k.name);
                    let want: f64 =
                        (0..n).map(|r| f64::from(p[h * stride + r]) * f64::from(v[r * d + i])).sum();
                    assert!((f64::from(*a) - want).abs() < 1e-3, "{} {a} {want}", k.name);
                }
            }
        }
    }
}

#[test]
fn exponentials() {
    for k in Kernels::all() {
        let mut x: Vec<f32> = (0..9000).map(|i| -0.01 * i as f32).collect();
        let want: Vec<f64> = x.iter().map(|x| f64::from(*x).exp()).collect();
        let sum = (k.exp)(&mut x, 0.0);
        for (x, want) in x.iter().zip(&want) {
            assert!((f64::from(*x) - want).abs() <= 3e-7 * want + 1e-37, "{}: {x} is not {want}", k.name);
        }
        assert!((f64::from(sum) / want.iter().sum::<f64>() - 1.0).abs() < 1e-5);
        assert!({
            let mut x = [f32::NAN; 3];
            (k.exp)(&mut x, 0.0).is_nan()
        });
    }
}

#[test]
fn swiglu_is_the_references() {
    let mut rng = Rng(9);
    for clamp in [0.0, 10.0] {
        let a: Vec<f32> = (0..500).map(|_| 8.0 * rng.normal()).collect();
        let b: Vec<f32> = (0..500).map(|_| 8.0 * rng.normal()).collect();
        for k in Kernels::all() {
            let mut got = a.clone();
            (k.swiglu)(&mut got, &b, clamp, 0.7);
            for ((a, b), got) in a.iter().zip(&b).zip(got) {
                let want = ds4_reference::math::swiglu(*a, *b, clamp) * 0.7;
                assert!((got - want).abs() <= 1e-6 * want.abs() + 1e-30, "{}: {got} is not {want}", k.name);
            }
        }
    }
}
