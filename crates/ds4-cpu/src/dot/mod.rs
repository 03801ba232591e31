//! Inner products of weight rows with activation rows: f32 for exact mode, and weight blocks against 8-bit activations.
//!
//! `portable` is the readable truth; `avx2` computes the same sums with vectors. Which one runs is decided once, when the
//! backend starts. A function takes `N` activation rows at once, so that a weight block is unpacked once for all of
//! them; every row's sum is formed in the same order for any `N`.

#[cfg(target_arch = "x86_64")]
mod avx2;
mod portable;

use ds4_gguf::BlockFormat;

use crate::quant::{Activations, Quantised};

/// Activation rows that one call takes.
pub const TILE: usize = 4;

/// The kernels of one instruction set.
#[derive(Clone, Copy)]
pub struct Kernels {
    pub name: &'static str,
    pub f32: fn(&[f32], &[f32]) -> f32,
    /// `y += w x`, element by element.
    pub axpy: fn(&mut [f32], f32, &[f32]),
    one: Blocks<1>,
    tile: Blocks<TILE>,
}

type Dot<const N: usize> = fn(&[u8], [Quantised<'_>; N]) -> [f32; N];

#[derive(Clone, Copy)]
struct Blocks<const N: usize> {
    q8_0: Dot<N>,
    q2_k: Dot<N>,
    q4_k: Dot<N>,
    iq2_xxs: Dot<N>,
}

impl<const N: usize> Blocks<N> {
    fn of(&self, format: BlockFormat) -> Option<Dot<N>> {
        Some(match format {
            BlockFormat::Q8_0 => self.q8_0,
            BlockFormat::Q2K => self.q2_k,
            BlockFormat::Q4K => self.q4_k,
            BlockFormat::IQ2XXS => self.iq2_xxs,
            _ => return None,
        })
    }
}

impl Kernels {
    pub const PORTABLE: Kernels = Kernels {
        name: "portable",
        f32: portable::f32,
        axpy: portable::axpy,
        one: portable::blocks(),
        tile: portable::blocks(),
    };

    /// The best that this machine has.
    pub fn detect() -> Self {
        #[cfg(target_arch = "x86_64")]
        if std::arch::is_x86_feature_detected!("avx2") && std::arch::is_x86_feature_detected!("fma") {
            return avx2::KERNELS;
        }
        Self::PORTABLE
    }

    /// The 8-bit kernels of a format: for one activation row, and for [`TILE`] of them.
    pub fn blocks(&self, format: BlockFormat) -> Option<(Dot<1>, Dot<TILE>)> {
        Some((self.one.of(format)?, self.tile.of(format)?))
    }

    /// How activations have to be quantised for a format; `None`: its products take f32.
    pub fn activations(format: BlockFormat) -> Option<Activations> {
        match format {
            BlockFormat::Q8_0 => Some(Activations::Blocks32),
            BlockFormat::Q2K | BlockFormat::Q4K | BlockFormat::IQ2XXS => Some(Activations::Blocks256),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ds4_testdata::Rng;

    const FORMATS: [BlockFormat; 4] =
        [BlockFormat::Q8_0, BlockFormat::Q2K, BlockFormat::Q4K, BlockFormat::IQ2XXS];

    /// Random blocks with legal scales. In both halves every code occurs.
    fn blocks(format: BlockFormat, cols: usize, rng: &mut Rng) -> Vec<u8> {
        let mut bytes: Vec<u8> = (0..format.row_bytes(cols as u64)).map(|_| rng.next_u64() as u8).collect();
        let scales: &[usize] = match format {
            BlockFormat::Q2K => &[80, 82],
            BlockFormat::Q4K => &[0, 2],
            _ => &[0],
        };
        for block in bytes.chunks_exact_mut(format.block_bytes()) {
            for at in scales {
                let d = half::f16::from_f32(0.01 + rng.unit().abs());
                block[*at..at + 2].copy_from_slice(&d.to_le_bytes());
            }
        }
        bytes
    }

    /// Against the exact product of the dequantised weights with the dequantised activations.
    #[test]
    fn every_kernel_is_the_product_of_what_was_quantised() {
        let mut rng = Rng(5);
        for kernels in [Kernels::PORTABLE, Kernels::detect()] {
            for format in FORMATS {
                for (cols, scale) in [(256, 1.0), (1024, 1e-3), (768, 1e4), (256, 0.0)] {
                    let w = blocks(format, cols, &mut rng);
                    let mut weights = vec![0f32; cols];
                    format.dequantize(&w, &mut weights).unwrap();
                    let kind = Kernels::activations(format).unwrap();
                    let mut buffer = crate::quant::Buffer::default();
                    buffer.fill(kind, cols, TILE, |_| (0..cols).map(|_| rng.normal() * scale).collect());
                    let (one, tile) = kernels.blocks(format).unwrap();
                    let got = tile(&w, std::array::from_fn(|i| buffer.row(i)));
                    for (i, got) in got.iter().enumerate() {
                        let x = buffer.row(i).dequantize();
                        let want: f64 = x.iter().zip(&weights).map(|(a, b)| f64::from(a * b)).sum();
                        let size: f64 = x.iter().zip(&weights).map(|(a, b)| f64::from((a * b).abs())).sum();
                        assert!(
                            (f64::from(*got) - want).abs() <= 1e-5 * size,
                            "{} {format:?} {cols}: {got} is not {want} (of {size})",
                            kernels.name
                        );
                        assert_eq!(
                            one(&w, [buffer.row(i)])[0].to_bits(),
                            got.to_bits(),
                            "one row as in a tile"
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn f32_products() {
        let mut rng = Rng(6);
        for n in [0, 1, 31, 32, 33, 100, 4096] {
            let a: Vec<f32> = (0..n).map(|_| rng.normal()).collect();
            let b: Vec<f32> = (0..n).map(|_| rng.normal()).collect();
            let want: f64 = a.iter().zip(&b).map(|(x, y)| f64::from(*x) * f64::from(*y)).sum();
            for k in [Kernels::PORTABLE, Kernels::detect()] {
                assert!((f64::from((k.f32)(&a, &b)) - want).abs() < 1e-4 * (n as f64 + 1.0).sqrt());
            }
        }
    }
}
