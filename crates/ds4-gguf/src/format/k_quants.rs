//! The K-quants: super-blocks of 256 values, in groups with scales of their own.

/// Values per super-block, in all of them.
pub const BLOCK: usize = 256;

/// Six-bit scale and minimum of group `j` (of 8), as Q4_K and Q5_K pack them into 12 bytes.
pub fn scale_min(sc: &[u8], j: usize) -> (u8, u8) {
    if j < 4 {
        (sc[j] & 63, sc[j + 4] & 63)
    } else {
        ((sc[j + 4] & 15) | (sc[j - 4] >> 6) << 4, (sc[j + 4] >> 4) | (sc[j] >> 6) << 4)
    }
}

/// Q2_K: 2-bit values, 4-bit scale and minimum per 16. `x = d*s*q - dmin*m`.
pub mod q2 {
    use crate::format::half;

    pub const BYTES: usize = 84;
    /// Scales (low nibbles) and minima (high nibbles).
    pub const SCALES: usize = 0;
    pub const QUANTS: usize = 16;
    pub const D: usize = 80;
    pub const DMIN: usize = 82;

    pub fn dequantize(b: &[u8], x: &mut [f32]) {
        let (d, dmin) = (half(b, D), half(b, DMIN));
        for (g, x) in x.chunks_exact_mut(16).enumerate() {
            // Group g of 16: a quarter of the bits of 16 bytes.
            let (at, shift) = (QUANTS + 32 * (g / 8) + 16 * (g % 2), 2 * (g % 8 / 2));
            let s = b[SCALES + g];
            let (scale, min) = (d * (s & 15) as f32, dmin * (s >> 4) as f32);
            for (x, q) in x.iter_mut().zip(&b[at..at + 16]) {
                *x = scale * (q >> shift & 3) as f32 - min;
            }
        }
    }
}

/// Q3_K: 3-bit values, 6-bit signed scale per 16. `x = d*s*q`.
pub mod q3 {
    use crate::format::half;

    pub const BYTES: usize = 110;
    /// Third bits.
    pub const HIGH: usize = 0;
    /// Low two bits.
    pub const QUANTS: usize = 32;
    pub const SCALES: usize = 96;
    pub const D: usize = 108;

    /// Scale of group `j` (of 16), in -32..32.
    pub fn scale(sc: &[u8], j: usize) -> i8 {
        let low = if j < 8 { sc[j] & 15 } else { sc[j - 8] >> 4 };
        let high = sc[8 + j % 4] >> (2 * (j / 4)) & 3;
        (low | high << 4) as i8 - 32
    }

    pub fn dequantize(b: &[u8], x: &mut [f32]) {
        let d = half(b, D);
        for (e, x) in x.iter_mut().enumerate() {
            let low = b[QUANTS + 32 * (e / 128) + e % 32] >> (2 * ((e % 128) / 32)) & 3;
            let bit = b[HIGH + e % 32] >> (e / 32) & 1;
            let q = (low + 4 * bit) as i8 - 4;
            *x = d * scale(&b[SCALES..], e / 16) as f32 * q as f32;
        }
    }
}

/// Q4_K: 4-bit values, 6-bit scale and minimum per 32. `x = d*s*q - dmin*m`.
pub mod q4 {
    use super::scale_min;
    use crate::format::half;

    pub const BYTES: usize = 144;
    pub const D: usize = 0;
    pub const DMIN: usize = 2;
    pub const SCALES: usize = 4;
    pub const QUANTS: usize = 16;

    pub fn dequantize(b: &[u8], x: &mut [f32]) {
        let (d, dmin) = (half(b, D), half(b, DMIN));
        for (g, x) in x.chunks_exact_mut(32).enumerate() {
            let (at, shift) = (QUANTS + 32 * (g / 2), 4 * (g % 2));
            let (s, m) = scale_min(&b[SCALES..], g);
            let (scale, min) = (d * s as f32, dmin * m as f32);
            for (x, q) in x.iter_mut().zip(&b[at..at + 32]) {
                *x = scale * (q >> shift & 15) as f32 - min;
            }
        }
    }
}

/// Q5_K: as Q4_K with a fifth bit.
pub mod q5 {
    use super::scale_min;
    use crate::format::half;

    pub const BYTES: usize = 176;
    pub const D: usize = 0;
    pub const DMIN: usize = 2;
    pub const SCALES: usize = 4;
    /// Fifth bits.
    pub const HIGH: usize = 16;
    pub const QUANTS: usize = 48;

    pub fn dequantize(b: &[u8], x: &mut [f32]) {
        let (d, dmin) = (half(b, D), half(b, DMIN));
        for (e, x) in x.iter_mut().enumerate() {
            let byte = b[QUANTS + 32 * (e / 64) + e % 32];
            let low = if (e / 32).is_multiple_of(2) { byte & 15 } else { byte >> 4 };
            let q = low + 16 * (b[HIGH + e % 32] >> (e / 32) & 1);
            let (s, m) = scale_min(&b[SCALES..], e / 32);
            *x = d * s as f32 * q as f32 - dmin * m as f32;
        }
    }
}

/// Q6_K: 6-bit values, signed byte scale per 16. `x = d*s*(q - 32)`.
pub mod q6 {
    use crate::format::half;

    pub const BYTES: usize = 210;
    /// Low four bits.
    pub const LOW: usize = 0;
    /// Upper two bits.
    pub const HIGH: usize = 128;
    pub const SCALES: usize = 192;
    pub const D: usize = 208;

    pub fn dequantize(b: &[u8], x: &mut [f32]) {
        let d = half(b, D);
        for (e, x) in x.iter_mut().enumerate() {
            let (h, k, l) = (e / 128, (e % 128) / 32, e % 32);
            let byte = b[LOW + 64 * h + 32 * (k & 1) + l];
            let low = if k < 2 { byte & 15 } else { byte >> 4 };
            let high = b[HIGH + 32 * h + l] >> (2 * k) & 3;
            *x = d * (b[SCALES + e / 16] as i8) as f32 * ((low | high << 4) as i32 - 32) as f32;
        }
    }
}
