//! Q8_0: an f16 scale and 32 signed bytes. `x = d q`.

use super::half;

pub const BLOCK: usize = 32;
pub const BYTES: usize = 34;

pub fn dequantize(b: &[u8], x: &mut [f32]) {
    let d = half(b, 0);
    for (x, q) in x.iter_mut().zip(&b[2..]) {
        *x = d * (*q as i8) as f32;
    }
}
