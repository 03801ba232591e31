//! MXFP4: an E8M0 scale and 32 E2M1 codes; element `j` in the low nibble of byte `j`, element `j + 16` in the high one.

pub const BLOCK: usize = 32;
pub const BYTES: usize = 17;

/// Twice the values of the codes, which are integers.
pub const DOUBLED: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// `2^(e - 128)`: half of the E8M0 scale, to go with [`DOUBLED`].
pub fn half_scale(e: u8) -> f32 {
    match e {
        // Below the normal range: 2^-128 and 2^-127 as subnormals.
        0 => f32::from_bits(0x0020_0000),
        1 => f32::from_bits(0x0040_0000),
        _ => f32::from_bits((e as u32 - 1) << 23),
    }
}

pub fn dequantize(b: &[u8], x: &mut [f32]) {
    let d = half_scale(b[0]);
    let (low, high) = x.split_at_mut(BLOCK / 2);
    for ((low, high), q) in low.iter_mut().zip(high).zip(&b[1..]) {
        *low = d * DOUBLED[(q & 15) as usize] as f32;
        *high = d * DOUBLED[(q >> 4) as usize] as f32;
    }
}
