//! The activation roundings that the model was trained with (qat): FP8 E4M3 and FP4 E2M1 with power-of-two scales,
//! and the Hadamard rotation in front of the latter. Source: the kernels of the official inference code.

/// Elements that share one FP8 scale.
pub const FP8_BLOCK: usize = 64;
/// Elements that share one FP4 scale.
pub const FP4_BLOCK: usize = 32;

const FP8_MAX: f32 = 448.0;
const FP4_MAX: f32 = 6.0;

/// Exponent `e` such that `2^e` is the smallest power of two not below `amax / top`.
///
/// Read from the bits of the quotient, so it is exact: a zero mantissa is a power of two itself.
#[inline]
fn scale_exponent(amax: f32, top: f32) -> i32 {
    let bits = (amax / top).to_bits();
    (bits >> 23) as i32 - 127 + i32::from(bits & 0x007f_ffff != 0)
}

#[inline]
fn amax(x: &[f32], floor: f32) -> f32 {
    x.iter().fold(floor, |m, v| m.max(v.abs()))
}

/// `2^e` for the normal range.
#[inline]
pub fn exp2i(e: i32) -> f32 {
    f32::from_bits(((e + 127) as u32) << 23)
}

/// E4M3 code of `v` (already scaled into ±448): nearest, ties to the even code.
#[inline]
pub fn e4m3_encode(v: f32) -> u8 {
    let sign = ((v.to_bits() >> 31) as u8) << 7;
    let a = v.abs().min(FP8_MAX);
    // Below 2^-6 the grid is even in steps of 2^-9; above, three mantissa bits. Adding and taking away a large power of
    // two rounds to nearest even at the bit that is wanted.
    if a < exp2i(-6) {
        let q = (a * exp2i(9) + 8_388_608.0) - 8_388_608.0;
        return sign | q as u8;
    }
    let bits = a.to_bits();
    let rounded = bits + 0x0007_ffff + ((bits >> 20) & 1);
    let code = (rounded >> 20) - ((127 - 7) << 3);
    sign | (code.min(0x7e) as u8)
}

/// Value of an E4M3 code; the two NaN codes do not occur in what `e4m3_encode` writes.
#[inline(always)]
pub fn e4m3_decode(code: u8) -> f32 {
    let (e, m) = ((code >> 3) & 15, code & 7);
    let a = if e == 0 {
        m as f32 * exp2i(-9)
    } else {
        f32::from_bits(((e as u32 + 120) << 23) | ((m as u32) << 20))
    };
    if code & 0x80 != 0 { -a } else { a }
}

const E2M1: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

/// E2M1 code (four bits) of `v` (already scaled into ±6): nearest, ties to the even code.
#[inline]
pub fn e2m1_encode(v: f32) -> u8 {
    let a = v.abs();
    // Midpoints between neighbours; where the lower neighbour has an odd code, a tie goes up.
    let code = u8::from(a > 0.25)
        + u8::from(a >= 0.75)
        + u8::from(a > 1.25)
        + u8::from(a >= 1.75)
        + u8::from(a > 2.5)
        + u8::from(a >= 3.5)
        + u8::from(a > 5.0);
    code | (u8::from(v.is_sign_negative()) << 3)
}

#[inline(always)]
pub fn e2m1_decode(code: u8) -> f32 {
    let a = E2M1[(code & 7) as usize];
    if code & 8 != 0 { -a } else { a }
}

/// FP8 codes of one block and its scale's exponent, biased as E8M0.
pub fn fp8_encode_block(x: &[f32], codes: &mut [u8]) -> u8 {
    let e = scale_exponent(amax(x, 1e-4), FP8_MAX);
    let inv = exp2i(-e);
    for (c, v) in codes.iter_mut().zip(x) {
        *c = e4m3_encode(v * inv);
    }
    (e + 127) as u8
}

#[inline(always)]
pub fn fp8_decode_block(codes: &[u8], scale: u8, x: &mut [f32]) {
    let s = exp2i(scale as i32 - 127);
    for (v, c) in x.iter_mut().zip(codes) {
        *v = e4m3_decode(*c) * s;
    }
}

/// FP4 codes of one block, two per byte (even element low), and its scale's exponent, biased as E8M0.
pub fn fp4_encode_block(x: &[f32], codes: &mut [u8]) -> u8 {
    let e = scale_exponent(amax(x, FP4_MAX * f32::MIN_POSITIVE), FP4_MAX);
    let scaled = |v: f32| v / exp2i(e);
    for (c, v) in codes.iter_mut().zip(x.chunks_exact(2)) {
        *c = e2m1_encode(scaled(v[0])) | (e2m1_encode(scaled(v[1])) << 4);
    }
    (e + 127) as u8
}

#[inline(always)]
pub fn fp4_decode_block(codes: &[u8], scale: u8, x: &mut [f32]) {
    let s = exp2i(scale as i32 - 127);
    for (v, c) in x.chunks_exact_mut(2).zip(codes) {
        v[0] = e2m1_decode(c & 15) * s;
        v[1] = e2m1_decode(c >> 4) * s;
    }
}

/// Rounds in place to what FP8 storage gives back. `x.len()` is a multiple of [`FP8_BLOCK`].
pub fn fp8_round(x: &mut [f32]) {
    let mut codes = [0u8; FP8_BLOCK];
    for block in x.chunks_exact_mut(FP8_BLOCK) {
        let s = fp8_encode_block(block, &mut codes);
        fp8_decode_block(&codes, s, block);
    }
}

/// Rounds in place to what FP4 storage gives back. `x.len()` is a multiple of [`FP4_BLOCK`].
pub fn fp4_round(x: &mut [f32]) {
    let mut codes = [0u8; FP4_BLOCK / 2];
    for block in x.chunks_exact_mut(FP4_BLOCK) {
        let s = fp4_encode_block(block, &mut codes);
        fp4_decode_block(&codes, s, block);
    }
}

/// Orthogonal Hadamard transform in natural order. `x.len()` is a power of two.
pub fn hadamard(x: &mut [f32]) {
    let n = x.len();
    let mut half = 1;
    while half < n {
        for block in x.chunks_exact_mut(2 * half) {
            let (lo, hi) = block.split_at_mut(half);
            for (a, b) in lo.iter_mut().zip(hi) {
                (*a, *b) = (*a + *b, *a - *b);
            }
        }
        half *= 2;
    }
    let scale = (n as f32).powf(-0.5);
    for v in x {
        *v *= scale;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_survives_the_round_trip() {
        for code in (0u8..=0xff).filter(|c| c & 0x7f != 0x7f) {
            assert_eq!(e4m3_encode(e4m3_decode(code)), code, "{code:#x}");
        }
        for code in 0u8..16 {
            assert_eq!(e2m1_encode(e2m1_decode(code)), code);
        }
    }

    #[test]
    fn ties_go_to_the_even_code() {
        for code in 0u8..0x7e {
            let mid = (e4m3_decode(code) + e4m3_decode(code + 1)) / 2.0;
            assert_eq!(e4m3_encode(mid) & 1, 0, "{code:#x}");
        }
        for code in 0u8..7 {
            let mid = (e2m1_decode(code) + e2m1_decode(code + 1)) / 2.0;
            assert_eq!(e2m1_encode(mid) & 1, 0, "{code}");
        }
    }

    #[test]
    fn hadamard_is_its_own_inverse() {
        let x: Vec<f32> = (0..128).map(|i| (i as f32 * 0.37).sin()).collect();
        let mut y = x.clone();
        hadamard(&mut y);
        hadamard(&mut y);
        for (a, b) in x.iter().zip(&y) {
            assert!((a - b).abs() < 1e-6);
        }
    }
}
