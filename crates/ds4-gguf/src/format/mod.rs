//! Block formats: how a row of values is laid out, and what it means. One module per family; layouts from ggml
//! (`ggml-common.h`), little-endian.

pub mod iq2_xxs;
pub mod k_quants;
pub mod mxfp4;
pub mod q8_0;
mod quantize;

use half::{bf16, f16};

use crate::Result;
use crate::error::Error;

/// How a tensor's values are stored. A row is a whole number of blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BlockFormat {
    F32,
    F16,
    BF16,
    I32,
    Q8_0,
    Q2K,
    Q3K,
    Q4K,
    Q5K,
    Q6K,
    IQ2XXS,
    MXFP4,
}

impl BlockFormat {
    pub const ALL: [BlockFormat; 12] = [
        Self::F32,
        Self::F16,
        Self::BF16,
        Self::I32,
        Self::Q8_0,
        Self::Q2K,
        Self::Q3K,
        Self::Q4K,
        Self::Q5K,
        Self::Q6K,
        Self::IQ2XXS,
        Self::MXFP4,
    ];

    /// For messages.
    pub const SUPPORTED: &'static str = "F32 0, F16 1, Q8_0 8, Q2_K 10, Q3_K 11, Q4_K 12, Q5_K 13, Q6_K 14, IQ2_XXS 16, I32 26, BF16 30, MXFP4 39";

    /// Type number in the file, name, values per block, bytes per block.
    const fn facts(self) -> (u32, &'static str, usize, usize) {
        match self {
            Self::F32 => (0, "F32", 1, 4),
            Self::F16 => (1, "F16", 1, 2),
            Self::BF16 => (30, "BF16", 1, 2),
            Self::I32 => (26, "I32", 1, 4),
            Self::Q8_0 => (8, "Q8_0", q8_0::BLOCK, q8_0::BYTES),
            Self::Q2K => (10, "Q2_K", k_quants::BLOCK, k_quants::q2::BYTES),
            Self::Q3K => (11, "Q3_K", k_quants::BLOCK, k_quants::q3::BYTES),
            Self::Q4K => (12, "Q4_K", k_quants::BLOCK, k_quants::q4::BYTES),
            Self::Q5K => (13, "Q5_K", k_quants::BLOCK, k_quants::q5::BYTES),
            Self::Q6K => (14, "Q6_K", k_quants::BLOCK, k_quants::q6::BYTES),
            Self::IQ2XXS => (16, "IQ2_XXS", iq2_xxs::BLOCK, iq2_xxs::BYTES),
            Self::MXFP4 => (39, "MXFP4", mxfp4::BLOCK, mxfp4::BYTES),
        }
    }

    pub fn from_type_number(number: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|f| f.type_number() == number)
    }

    /// Names of ggml types that exist and are not supported here, for messages.
    pub fn foreign_name(number: u32) -> Option<&'static str> {
        Some(match number {
            2 => "Q4_0",
            3 => "Q4_1",
            6 => "Q5_0",
            7 => "Q5_1",
            9 => "Q8_1",
            15 => "Q8_K",
            17 => "IQ2_XS",
            18 => "IQ3_XXS",
            19 => "IQ1_S",
            20 => "IQ4_NL",
            21 => "IQ3_S",
            22 => "IQ2_S",
            23 => "IQ4_XS",
            24 => "I8",
            25 => "I16",
            27 => "I64",
            28 => "F64",
            29 => "IQ1_M",
            34 => "TQ1_0",
            35 => "TQ2_0",
            40 => "NVFP4",
            _ => return None,
        })
    }

    pub const fn type_number(self) -> u32 {
        self.facts().0
    }

    pub const fn name(self) -> &'static str {
        self.facts().1
    }

    /// Values per block.
    pub const fn block_len(self) -> usize {
        self.facts().2
    }

    /// Bytes per block.
    pub const fn block_bytes(self) -> usize {
        self.facts().3
    }

    /// Bytes of a row of `cols` values, a multiple of the block.
    pub const fn row_bytes(self, cols: u64) -> u64 {
        cols / self.block_len() as u64 * self.block_bytes() as u64
    }

    /// Turns whole blocks into f32, exactly. `dst` holds as many values as `src` has.
    pub fn dequantize(self, src: &[u8], dst: &mut [f32]) -> Result<()> {
        let (len, bytes) = (self.block_len(), self.block_bytes());
        if !src.len().is_multiple_of(bytes) || src.len() / bytes * len != dst.len() {
            return Err(Error::Block {
                format: self.name(),
                reason: format!(
                    "{} bytes for {} values; {bytes} bytes hold {len} values",
                    src.len(),
                    dst.len()
                ),
            });
        }
        let blocks = src.chunks_exact(bytes).zip(dst.chunks_exact_mut(len));
        match self {
            Self::F32 => blocks.for_each(|(b, x)| x[0] = f32::from_le_bytes([b[0], b[1], b[2], b[3]])),
            Self::F16 => blocks.for_each(|(b, x)| x[0] = half(b, 0)),
            Self::BF16 => blocks.for_each(|(b, x)| x[0] = bf16::from_le_bytes([b[0], b[1]]).to_f32()),
            Self::I32 => {
                return Err(Error::Block {
                    format: self.name(),
                    reason: "integers are not quantised values".into(),
                });
            }
            Self::Q8_0 => blocks.for_each(|(b, x)| q8_0::dequantize(b, x)),
            Self::Q2K => blocks.for_each(|(b, x)| k_quants::q2::dequantize(b, x)),
            Self::Q3K => blocks.for_each(|(b, x)| k_quants::q3::dequantize(b, x)),
            Self::Q4K => blocks.for_each(|(b, x)| k_quants::q4::dequantize(b, x)),
            Self::Q5K => blocks.for_each(|(b, x)| k_quants::q5::dequantize(b, x)),
            Self::Q6K => blocks.for_each(|(b, x)| k_quants::q6::dequantize(b, x)),
            Self::IQ2XXS => blocks.for_each(|(b, x)| iq2_xxs::dequantize(b, x)),
            Self::MXFP4 => blocks.for_each(|(b, x)| mxfp4::dequantize(b, x)),
        }
        Ok(())
    }
}

/// The f16 at byte `at`.
pub(crate) fn half(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}
