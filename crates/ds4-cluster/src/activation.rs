//! Activations on the wire: rows of f32, f16, or 8 bits with one f32 scale per 128 values. Little-endian.

use bytes::{BufMut, Bytes, BytesMut};
use half::f16;

use crate::error::ClusterError;

#[cfg(target_endian = "big")]
compile_error!("activations travel as little-endian f32 straight from memory");

/// Values that share a scale in [`Format::Bits8`].
pub const BLOCK: usize = 128;

/// How activations travel. f32 gives the same logits as one machine, bit for bit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Format {
    Bits8,
    Bits16,
    Bits32,
}

impl Format {
    pub const ALL: [Format; 3] = [Format::Bits8, Format::Bits16, Format::Bits32];

    pub fn from_bits(bits: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|f| f.bits() == bits)
    }

    pub fn bits(self) -> u32 {
        match self {
            Self::Bits8 => 8,
            Self::Bits16 => 16,
            Self::Bits32 => 32,
        }
    }

    /// Bytes of one row of `width` values.
    pub fn row_bytes(self, width: usize) -> usize {
        match self {
            Self::Bits8 => width + width.div_ceil(BLOCK) * 4,
            Self::Bits16 => width * 2,
            Self::Bits32 => width * 4,
        }
    }

    /// The rows of `width` values in `rows`, for the wire. f32 rows are handed over as they are, without a copy.
    pub fn encode(self, rows: Vec<f32>, width: usize) -> Bytes {
        match self {
            Self::Bits32 => Bytes::from_owner(Floats(rows)),
            Self::Bits16 => {
                let mut out = BytesMut::with_capacity(rows.len() * 2);
                rows.iter().for_each(|&v| out.put_u16_le(f16::from_f32(v).to_bits()));
                out.freeze()
            }
            Self::Bits8 => {
                let mut out = BytesMut::with_capacity(rows.len() / width.max(1) * self.row_bytes(width));
                rows.chunks(width.max(1))
                    .for_each(|row| row.chunks(BLOCK).for_each(|b| encode_block(b, &mut out)));
                out.freeze()
            }
        }
    }

    /// Whole rows of `width` values, as many as `out` holds.
    pub fn decode(self, bytes: &[u8], width: usize, out: &mut [f32]) -> Result<(), ClusterError> {
        let rows = out.len() / width.max(1);
        let expected = rows * self.row_bytes(width);
        if bytes.len() != expected {
            return Err(ClusterError::Protocol(format!(
                "{} bytes of activations, {rows} rows of {width} values in {} bits are {expected}",
                bytes.len(),
                self.bits()
            )));
        }
        match self {
            Self::Bits32 => bytemuck::cast_slice_mut::<f32, u8>(out).copy_from_slice(bytes),
            Self::Bits16 => {
                for (v, b) in out.iter_mut().zip(bytes.chunks_exact(2)) {
                    *v = f16::from_le_bytes([b[0], b[1]]).to_f32();
                }
            }
            Self::Bits8 => {
                let mut rest = bytes;
                for row in out.chunks_mut(width.max(1)) {
                    for block in row.chunks_mut(BLOCK) {
                        rest = decode_block(rest, block);
                    }
                }
            }
        }
        Ok(())
    }
}

/// Scale, then codes in -127..=127. What is not finite makes the whole block so, and is found where it is looked for.
fn encode_block(block: &[f32], out: &mut BytesMut) {
    let max = block.iter().fold(0f32, |m, v| m.max(v.abs()));
    let scale = if block.iter().all(|v| v.is_finite()) { max / 127.0 } else { f32::NAN };
    out.put_f32_le(scale);
    let inverse = if scale > 0.0 { 1.0 / scale } else { 0.0 };
    block.iter().for_each(|v| out.put_i8((v * inverse).round().clamp(-127.0, 127.0) as i8));
}

/// Decodes into `block`; the caller has checked the length. Returns what follows.
fn decode_block<'a>(bytes: &'a [u8], block: &mut [f32]) -> &'a [u8] {
    let (scale, rest) = bytes.split_at(4);
    let scale = f32::from_le_bytes([scale[0], scale[1], scale[2], scale[3]]);
    let (codes, rest) = rest.split_at(block.len());
    for (v, &c) in block.iter_mut().zip(codes) {
        *v = f32::from(c as i8) * scale;
    }
    rest
}

/// A buffer of f32 that the network stack reads as bytes.
struct Floats(Vec<f32>);

impl AsRef<[u8]> for Floats {
    fn as_ref(&self) -> &[u8] {
        bytemuck::cast_slice(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(width: usize) -> Vec<f32> {
        (0..3 * width).map(|i| ((i * 37 % 101) as f32 - 50.0) / 7.0).collect()
    }

    #[test]
    fn each_format_comes_back_within_its_precision() {
        for width in [1, 127, 128, 300] {
            for (format, tolerance) in [(Format::Bits32, 0.0), (Format::Bits16, 4e-3), (Format::Bits8, 3e-2)]
            {
                let sent = rows(width);
                let bytes = format.encode(sent.clone(), width);
                assert_eq!(bytes.len(), 3 * format.row_bytes(width));
                let mut got = vec![0f32; sent.len()];
                format.decode(&bytes, width, &mut got).expect("decodes");
                for (a, b) in sent.iter().zip(&got) {
                    assert!((a - b).abs() <= tolerance, "{format:?} width {width}: {a} came back as {b}");
                }
            }
        }
    }

    #[test]
    fn f32_rows_are_not_copied() {
        let sent = rows(64);
        let at = sent.as_ptr() as usize;
        assert_eq!(Format::Bits32.encode(sent, 64).as_ptr() as usize, at);
    }

    #[test]
    fn what_is_not_finite_stays_so() {
        for format in Format::ALL {
            let mut sent = rows(256);
            sent[130] = f32::NAN;
            let mut got = vec![0f32; sent.len()];
            format.decode(&format.encode(sent, 256), 256, &mut got).expect("decodes");
            assert!(got[130].is_nan() && got[0].is_finite(), "{format:?}");
        }
    }

    #[test]
    fn a_wrong_length_is_refused_by_name() {
        let mut out = vec![0f32; 128];
        let e = Format::Bits16.decode(&[0; 255], 128, &mut out).expect_err("one byte short").to_string();
        assert!(e.contains("255") && e.contains("256"), "{e}");
    }
}
