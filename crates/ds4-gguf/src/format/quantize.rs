//! Quantisers: f32 values to blocks, with the least squared error that a bounded search finds, weighted by the
//! importance of each column where that is known.
//!
//! All formats follow one plan: a first guess of every group's scale (and minimum), candidates around it each solved by
//! least squares; then the scales themselves become integers under one f16 per block, each group looks at the integers
//! next to its own, and the f16 is solved again for what was chosen. A step that does not lower the error is dropped.

use half::{bf16, f16};

use super::{BlockFormat, iq2_xxs, k_quants, mxfp4, q8_0};
use crate::Result;
use crate::error::Error;

impl BlockFormat {
    /// Appends the blocks of `src` to `dst`. `src` is whole rows of `cols` values, `importance` the weight of each column
    /// (any scale; `None`: all alike). A block whose weights are all zero counts all its values alike.
    pub fn quantize(
        self,
        src: &[f32],
        cols: usize,
        importance: Option<&[f32]>,
        dst: &mut Vec<u8>,
    ) -> Result<()> {
        let bad = |reason: String| Err(Error::Block { format: self.name(), reason });
        let len = self.block_len();
        if cols == 0 || !cols.is_multiple_of(len) || !src.len().is_multiple_of(cols) {
            return bad(format!("{} values in rows of {cols}; a row is whole blocks of {len}", src.len()));
        }
        if let Some(i) = src.iter().position(|x| !x.is_finite()) {
            return bad(format!(
                "row {}, column {}: {} is not a number that can be stored",
                i / cols,
                i % cols,
                src[i]
            ));
        }
        if let Some(w) = importance {
            if w.len() != cols {
                return bad(format!("importance of {} columns for rows of {cols}", w.len()));
            }
            if let Some(i) = w.iter().position(|x| !x.is_finite() || *x < 0.0) {
                return bad(format!("importance of column {i} is {}; expected a number from 0 up", w[i]));
            }
        }
        if self == Self::I32 {
            return bad("integers are not quantised values".into());
        }
        let at = dst.len();
        let blocks = src.len() / len;
        dst.resize(at + blocks * self.block_bytes(), 0);
        let even = vec![1f32; len];
        let mut scaled = vec![0f32; len];
        let mut search = iq2_xxs_search(self);
        for (i, (x, b)) in
            src.chunks_exact(len).zip(dst[at..].chunks_exact_mut(self.block_bytes())).enumerate()
        {
            let weights: &[f32] = match importance {
                None => &even,
                Some(all) => {
                    let w = &all[i * len % cols..][..len];
                    // Around 1, so that sums of squares stay far from the ends of f32.
                    let mean = w.iter().map(|w| f64::from(*w)).sum::<f64>() / len as f64;
                    if mean > 0.0 {
                        scaled.iter_mut().zip(w).for_each(|(s, w)| *s = (f64::from(*w) / mean) as f32);
                        &scaled
                    } else {
                        &even
                    }
                }
            };
            let largest = x.iter().fold(0f32, |m, v| m.max(v.abs()));
            let fits = match self {
                // No f16 scale reaches so far, and the sums below would leave f32's range.
                _ if self.block_len() == k_quants::BLOCK && largest > 1e9 => false,
                Self::F32 => {
                    b.copy_from_slice(&x[0].to_le_bytes());
                    true
                }
                Self::F16 => put_half(b, 0, x[0]),
                Self::BF16 => {
                    let v = bf16::from_f32(x[0]);
                    b.copy_from_slice(&v.to_le_bytes());
                    v.is_finite()
                }
                Self::Q8_0 => q8_0(x, b),
                Self::Q2K => affine::<16, 3, 15>(x, weights, b, pack_q2),
                Self::Q4K => affine::<32, 15, 63>(x, weights, b, pack_q4),
                Self::Q5K => affine::<32, 31, 63>(x, weights, b, pack_q5),
                Self::Q3K => symmetric::<4, 32>(x, weights, b, pack_q3),
                Self::Q6K => symmetric::<32, 128>(x, weights, b, pack_q6),
                Self::IQ2XXS => search.as_mut().is_some_and(|s| s.block(x, weights, b)),
                Self::MXFP4 => mxfp4(x, weights, b),
                Self::I32 => false,
            };
            if !fits {
                return bad(format!(
                    "row {}: {largest:e} is beyond the range of its block's scale",
                    i * len / cols
                ));
            }
        }
        Ok(())
    }
}

/// Writes the nearest f16; `false` where it would be infinite.
fn put_half(b: &mut [u8], at: usize, v: f32) -> bool {
    let h = f16::from_f32(v);
    b[at..at + 2].copy_from_slice(&h.to_le_bytes());
    h.is_finite()
}

fn nearest_half(v: f32) -> f32 {
    f16::from_f32(v).to_f32()
}

/// The nearest integer of a value well inside 2^22, without a call.
#[inline(always)]
fn nearest(v: f32) -> f32 {
    const SHIFT: f32 = 12_582_912.0;
    (v + SHIFT) - SHIFT
}

fn q8_0(x: &[f32], b: &mut [u8]) -> bool {
    let d = x.iter().fold(0f32, |m, v| m.max(v.abs())) / 127.0;
    let inverse = if d > 0.0 { 1.0 / d } else { 0.0 };
    // Where 1/d overflows, d is zero as f16 too.
    let inverse = if inverse.is_finite() { inverse } else { 0.0 };
    for (q, x) in b[2..2 + q8_0::BLOCK].iter_mut().zip(x) {
        *q = (x * inverse).round().clamp(-127.0, 127.0) as i8 as u8;
    }
    put_half(b, 0, d)
}

/// Every scale near the largest value's exponent; what came from MXFP4 comes out the same.
fn mxfp4(x: &[f32], w: &[f32], b: &mut [u8]) -> bool {
    let largest = x.iter().fold(0f32, |m, v| m.max(v.abs()));
    // The largest code is 6 = 1.5 * 2^2.
    let base = if largest > 0.0 { (f64::from(largest).log2().floor() as i32) + 127 - 2 } else { 0 };
    let mut best = (f64::INFINITY, 0u8);
    for e in [base, base + 1, base - 1] {
        let e = e.clamp(0, 254) as u8;
        let inverse = 0.5 / f64::from(mxfp4::half_scale(e));
        let error: f64 = x
            .iter()
            .zip(w)
            .map(|(x, w)| {
                let v = f64::from(*x) * inverse;
                let back = f64::from(mxfp4::DOUBLED[code(v) as usize]) * 0.5;
                f64::from(*w) * ((v - back) / inverse).powi(2)
            })
            .sum();
        if error < best.0 {
            best = (error, e);
        }
    }
    let inverse = 0.5 / f64::from(mxfp4::half_scale(best.1));
    b[0] = best.1;
    for j in 0..mxfp4::BLOCK / 2 {
        b[1 + j] = code(f64::from(x[j]) * inverse) | code(f64::from(x[j + 16]) * inverse) << 4;
    }
    true
}

/// The nearest E2M1 code; ties go to the even one, as the model's own rounding does.
fn code(v: f64) -> u8 {
    let a = v.abs();
    let code = match a {
        _ if a <= 0.25 => 0,
        _ if a < 0.75 => 1,
        _ if a <= 1.25 => 2,
        _ if a < 1.75 => 3,
        _ if a <= 2.5 => 4,
        _ if a < 3.5 => 5,
        _ if a <= 5.0 => 6,
        _ => 7,
    };
    if v < 0.0 && code > 0 { code | 8 } else { code }
}

/// What a block of `GROUPS <= 16` groups came to: `x = d*s*q - dmin*m` (symmetric formats: `m = 0`).
struct Chosen {
    d: f32,
    dmin: f32,
    scales: [i32; 16],
    mins: [i32; 16],
    q: [i8; k_quants::BLOCK],
}

/// Scales between 1/12 and 12 steps off the plain one, finest where the best is likely.
const STEPS: usize = 21;

/// `q` of a group for a given scale and minimum, and the error.
#[inline(always)]
fn round_affine(x: &[f32], w: &[f32], s: f32, m: f32, top: f32, q: &mut [i8]) -> f32 {
    let inverse = if s > 0.0 { 1.0 / s } else { 0.0 };
    let mut error = 0f32;
    for ((x, w), q) in x.iter().zip(w).zip(q) {
        let v = nearest(((x + m) * inverse).clamp(0.0, top));
        let e = s * v - m - x;
        error += w * e * e;
        *q = v as i8;
    }
    error
}

/// Best scale and minimum of a group: `x = s*q - m`, `q` in `0..=top`, `s, m >= 0`.
fn fit_affine(x: &[f32], w: &[f32], top: f32) -> (f32, f32) {
    let low = x.iter().copied().fold(0f32, f32::min);
    let high = x.iter().copied().fold(low, f32::max);
    if high <= low {
        return (0.0, -low);
    }
    let (mut sw, mut swx) = (0f32, 0f32);
    for (x, w) in x.iter().zip(w) {
        sw += w;
        swx += w * x;
    }
    let mut best = (f32::INFINITY, 0.0, 0.0);
    for step in 0..STEPS {
        // From a range a quarter of a step too wide to one that cuts the ends off by a good step.
        let inverse = (top - 0.4 + 0.1 * step as f32 * (1.0 + top / 15.0)) / (high - low);
        let (mut s, mut m) = (1.0 / inverse, -low);
        if !s.is_finite() || !inverse.is_finite() {
            continue;
        }
        for _ in 0..2 {
            let inverse = 1.0 / s;
            let (mut sq, mut sqq, mut sqx) = (0f32, 0f32, 0f32);
            for (x, w) in x.iter().zip(w) {
                let v = nearest(((x + m) * inverse).clamp(0.0, top));
                sq += w * v;
                sqq += w * v * v;
                sqx += w * v * x;
            }
            let det = sw * sqq - sq * sq;
            let (mut s1, mut m1) = (s, m);
            if det > 0.0 {
                s1 = (sw * sqx - sq * swx) / det;
                m1 = (sq * sqx - sqq * swx) / det;
            }
            if m1 < 0.0 || det <= 0.0 {
                m1 = if det <= 0.0 { m } else { 0.0 };
                s1 = if sqq > 0.0 { (sqx + m1 * sq) / sqq } else { s };
            }
            if !(s1 > 0.0 && s1.is_finite() && m1.is_finite()) {
                break;
            }
            (s, m) = (s1, m1);
            let inverse = 1.0 / s;
            let mut error = 0f32;
            for (x, w) in x.iter().zip(w) {
                let v = nearest(((x + m) * inverse).clamp(0.0, top));
                let e = s * v - m - x;
                error += w * e * e;
            }
            if error < best.0 {
                best = (error, s, m);
            }
        }
    }
    if best.0.is_finite() { (best.1, best.2) } else { ((high - low) / top, -low) }
}

/// Q2_K, Q4_K, Q5_K: groups of `LEN`, values `0..=TOP`, scales and minima `0..=SMAX`.
fn affine<const LEN: usize, const TOP: i32, const SMAX: i32>(
    x: &[f32],
    w: &[f32],
    b: &mut [u8],
    pack: fn(&Chosen, &mut [u8]),
) -> bool {
    let (groups, top, smax) = (k_quants::BLOCK / LEN, TOP as f32, SMAX as f32);
    let mut fits = [(0f32, 0f32); 16];
    for (g, fit) in fits[..groups].iter_mut().enumerate() {
        *fit = fit_affine(&x[g * LEN..][..LEN], &w[g * LEN..][..LEN], top);
    }
    let largest = |of: fn(&(f32, f32)) -> f32| fits[..groups].iter().map(of).fold(0f32, f32::max);
    let (d0, dmin0) = (largest(|f| f.0) / smax, largest(|f| f.1) / smax);
    if !nearest_half(d0).is_finite() || !nearest_half(dmin0).is_finite() {
        return false;
    }
    let mut best: Option<(f32, Chosen)> = None;
    // A largest scale that does not get the largest integer leaves room above it, which seldom pays, but a finer grid below does.
    for shrink in [1.0, 0.96, 0.92, 1.04] {
        let (mut d, mut dmin) = (nearest_half(d0 * shrink), nearest_half(dmin0 * shrink));
        for _ in 0..3 {
            if !(d.is_finite() && dmin.is_finite()) {
                break;
            }
            let mut c = Chosen { d, dmin, scales: [0; 16], mins: [0; 16], q: [0; 256] };
            let mut error = 0f32;
            for g in 0..groups {
                let (x, w) = (&x[g * LEN..][..LEN], &w[g * LEN..][..LEN]);
                let near = |v: f32, d: f32| if d > 0.0 { nearest((v / d).min(smax)) as i32 } else { 0 };
                let (s0, m0) = (near(fits[g].0, d), near(fits[g].1, dmin));
                let mut least = f32::INFINITY;
                let mut q = [0i8; 32];
                for s in (s0 - 1).max(0)..=(s0 + 1).min(SMAX) {
                    for m in (m0 - 1).max(0)..=(m0 + 1).min(SMAX) {
                        let e = round_affine(x, w, d * s as f32, dmin * m as f32, top, &mut q[..LEN]);
                        if e < least {
                            least = e;
                            (c.scales[g], c.mins[g]) = (s, m);
                            c.q[g * LEN..][..LEN].copy_from_slice(&q[..LEN]);
                        }
                    }
                }
                error += least;
            }
            // The two f16, solved for these integers: minimise sum w (d*a - dmin*m - x)^2 with a = s*q.
            let (mut aa, mut am, mut mm, mut ax, mut mx) = (0f64, 0f64, 0f64, 0f64, 0f64);
            for i in 0..k_quants::BLOCK {
                let (g, w, x) = (i / LEN, f64::from(w[i]), f64::from(x[i]));
                let (a, m) = (f64::from(c.scales[g] * i32::from(c.q[i])), f64::from(c.mins[g]));
                aa += w * a * a;
                am += w * a * m;
                mm += w * m * m;
                ax += w * a * x;
                mx += w * m * x;
            }
            let det = aa * mm - am * am;
            let next = if det > 0.0 {
                ((ax * mm - am * mx) / det, (am * ax - aa * mx) / det)
            } else if aa > 0.0 {
                ((ax + f64::from(dmin) * am) / aa, f64::from(dmin))
            } else {
                (f64::from(d), f64::from(dmin))
            };
            if best.as_ref().is_none_or(|(e, _)| error < *e) {
                best = Some((error, c));
            }
            if next.0 < 0.0 || next.1 < 0.0 {
                break;
            }
            (d, dmin) = (nearest_half(next.0 as f32), nearest_half(next.1 as f32));
        }
    }
    let Some((_, c)) = best else { return false };
    pack(&c, b);
    true
}

/// Best scale of a group: `x = s*q`, `q` in `-n..n`; negative where that puts the largest value at `-n`.
fn fit_symmetric(x: &[f32], w: &[f32], n: f32) -> f32 {
    let peak = x.iter().copied().fold(0f32, |m, v| if v.abs() > m.abs() { v } else { m });
    if peak == 0.0 {
        return 0.0;
    }
    let mut best = (f32::INFINITY, 0.0);
    for step in 0..STEPS {
        for sign in [-1.0, 1.0] {
            let inverse = sign * (n - 1.0 + 0.1 * step as f32) / peak;
            if !inverse.is_finite() {
                continue;
            }
            let (mut qq, mut qx) = (0f32, 0f32);
            for (x, w) in x.iter().zip(w) {
                let v = nearest((x * inverse).clamp(-n, n - 1.0));
                qq += w * v * v;
                qx += w * v * x;
            }
            if qq <= 0.0 {
                continue;
            }
            let s = qx / qq;
            let error = round_symmetric(x, w, s, n, &mut [0; 16]);
            if error < best.0 {
                best = (error, s);
            }
        }
    }
    best.1
}

#[inline(always)]
fn round_symmetric(x: &[f32], w: &[f32], s: f32, n: f32, q: &mut [i8]) -> f32 {
    let inverse = if s != 0.0 { 1.0 / s } else { 0.0 };
    let mut error = 0f32;
    for ((x, w), q) in x.iter().zip(w).zip(q) {
        let v = nearest((x * inverse).clamp(-n, n - 1.0));
        let e = s * v - x;
        error += w * e * e;
        *q = v as i8;
    }
    error
}

/// Q3_K, Q6_K: groups of 16, values `-N..N`, scales `-SMAX..SMAX`.
fn symmetric<const N: i32, const SMAX: i32>(
    x: &[f32],
    w: &[f32],
    b: &mut [u8],
    pack: fn(&Chosen, &mut [u8]),
) -> bool {
    const LEN: usize = 16;
    let mut fits = [0f32; 16];
    for (g, fit) in fits.iter_mut().enumerate() {
        *fit = fit_symmetric(&x[g * LEN..][..LEN], &w[g * LEN..][..LEN], N as f32);
    }
    // The largest scale gets the integer of largest magnitude, -SMAX.
    let peak = fits.iter().copied().fold(0f32, |m, v| if v.abs() > m.abs() { v } else { m });
    let d0 = -peak / SMAX as f32;
    if !nearest_half(d0).is_finite() {
        return false;
    }
    let mut best: Option<(f32, Chosen)> = None;
    for shrink in [1.0, 0.96, 1.04, -1.0] {
        let mut d = nearest_half(d0 * shrink);
        for _ in 0..3 {
            if !d.is_finite() {
                break;
            }
            let mut c = Chosen { d, dmin: 0.0, scales: [0; 16], mins: [0; 16], q: [0; 256] };
            let (mut error, mut aa, mut ax) = (0f32, 0f64, 0f64);
            for (g, fit) in fits.iter().enumerate() {
                let (x, w) = (&x[g * LEN..][..LEN], &w[g * LEN..][..LEN]);
                let s0 = if d != 0.0 { nearest((fit / d).clamp(-4e3, 4e3)) as i32 } else { 0 };
                let mut least = f32::INFINITY;
                let mut q = [0i8; LEN];
                for s in [s0, s0 - 1, s0 + 1] {
                    let s = s.clamp(-SMAX, SMAX - 1);
                    let e = round_symmetric(x, w, d * s as f32, N as f32, &mut q);
                    if e < least {
                        least = e;
                        c.scales[g] = s;
                        c.q[g * LEN..][..LEN].copy_from_slice(&q);
                    }
                }
                error += least;
                for (i, x) in x.iter().enumerate() {
                    let a = f64::from(c.scales[g] * i32::from(c.q[g * LEN + i]));
                    aa += f64::from(w[i]) * a * a;
                    ax += f64::from(w[i]) * a * f64::from(*x);
                }
            }
            if best.as_ref().is_none_or(|(e, _)| error < *e) {
                best = Some((error, c));
            }
            if aa <= 0.0 {
                break;
            }
            d = nearest_half((ax / aa) as f32);
        }
    }
    let Some((_, c)) = best else { return false };
    pack(&c, b);
    true
}

fn pack_q2(c: &Chosen, b: &mut [u8]) {
    use k_quants::q2::*;
    for g in 0..16 {
        b[SCALES + g] = (c.scales[g] | c.mins[g] << 4) as u8;
    }
    for (e, q) in c.q.iter().enumerate() {
        b[QUANTS + 32 * (e / 128) + e % 32] |= (*q as u8) << (2 * (e % 128 / 32));
    }
    put_half(b, D, c.d);
    put_half(b, DMIN, c.dmin);
}

/// The 12 bytes that [`k_quants::scale_min`] reads.
fn pack_scale_min(c: &Chosen, sc: &mut [u8]) {
    for j in 0..8 {
        let (s, m) = (c.scales[j] as u8, c.mins[j] as u8);
        if j < 4 {
            sc[j] |= s;
            sc[j + 4] |= m;
        } else {
            sc[j + 4] = (s & 15) | (m & 15) << 4;
            sc[j - 4] |= (s >> 4) << 6;
            sc[j] |= (m >> 4) << 6;
        }
    }
}

fn pack_q4(c: &Chosen, b: &mut [u8]) {
    use k_quants::q4::*;
    pack_scale_min(c, &mut b[SCALES..QUANTS]);
    for (e, q) in c.q.iter().enumerate() {
        b[QUANTS + 32 * (e / 64) + e % 32] |= (*q as u8) << (4 * (e / 32 % 2));
    }
    put_half(b, D, c.d);
    put_half(b, DMIN, c.dmin);
}

fn pack_q5(c: &Chosen, b: &mut [u8]) {
    use k_quants::q5::*;
    pack_scale_min(c, &mut b[SCALES..HIGH]);
    for (e, q) in c.q.iter().enumerate() {
        b[QUANTS + 32 * (e / 64) + e % 32] |= (*q as u8 & 15) << (4 * (e / 32 % 2));
        b[HIGH + e % 32] |= (*q as u8 >> 4) << (e / 32);
    }
    put_half(b, D, c.d);
    put_half(b, DMIN, c.dmin);
}

fn pack_q3(c: &Chosen, b: &mut [u8]) {
    use k_quants::q3::*;
    for j in 0..16 {
        let s = (c.scales[j] + 32) as u8;
        b[SCALES + j % 8] |= (s & 15) << (4 * (j / 8));
        b[SCALES + 8 + j % 4] |= (s >> 4) << (2 * (j / 4));
    }
    for (e, q) in c.q.iter().enumerate() {
        let q = (q + 4) as u8;
        b[QUANTS + 32 * (e / 128) + e % 32] |= (q & 3) << (2 * (e % 128 / 32));
        b[HIGH + e % 32] |= (q >> 2) << (e / 32);
    }
    put_half(b, D, c.d);
}

fn pack_q6(c: &Chosen, b: &mut [u8]) {
    use k_quants::q6::*;
    for (g, s) in c.scales.iter().enumerate() {
        b[SCALES + g] = *s as i8 as u8;
    }
    for (e, q) in c.q.iter().enumerate() {
        let q = (i32::from(*q) + 32) as u8;
        let (h, k, l) = (e / 128, e % 128 / 32, e % 32);
        b[LOW + 64 * h + 32 * (k & 1) + l] |= (q & 15) << (4 * (k / 2));
        b[HIGH + 32 * h + l] |= (q >> 4) << (2 * k);
    }
    put_half(b, D, c.d);
}

/// Vectors of 8 in a block of IQ2_XXS.
const VECTORS: usize = iq2_xxs::BLOCK / 8;

/// The search for IQ2_XXS. With `a` a vector's magnitudes, `w` its weights and `g` a row of the table, the error at scale
/// `c` is `sum w a^2 - 2 c (sum w a g) + c^2 (sum w g^2)`; the two sums do not depend on the scale, so that all 256 rows
/// are tried at every scale for three operations each.
struct Search {
    /// The table by element: `[8][256]`.
    grid: Box<[[f32; 256]; 8]>,
    /// `sum w a g` per vector and row.
    with_x: Box<[[f32; 256]; VECTORS]>,
    /// `sum w g^2`
    with_g: Box<[[f32; 256]; VECTORS]>,
}

fn iq2_xxs_search(format: BlockFormat) -> Option<Search> {
    (format == BlockFormat::IQ2XXS).then(|| {
        let mut grid = Box::new([[0f32; 256]; 8]);
        for (row, bytes) in iq2_xxs::GRID.iter().enumerate() {
            for (k, m) in bytes.to_le_bytes().into_iter().enumerate() {
                grid[k][row] = f32::from(m);
            }
        }
        Search { grid, with_x: Box::new([[0.0; 256]; VECTORS]), with_g: Box::new([[0.0; 256]; VECTORS]) }
    })
}

impl Search {
    /// The best row of a vector at scale `c`: (row, error without its constant part).
    fn row(&self, v: usize, c: f32) -> (u8, f32) {
        let (wx, wg) = (&self.with_x[v], &self.with_g[v]);
        let mut errors = [0f32; 256];
        for ((e, x), g) in errors.iter_mut().zip(wx).zip(wg) {
            *e = c * (c * g - 2.0 * x);
        }
        let least = errors.iter().copied().fold(f32::INFINITY, f32::min);
        (errors.iter().position(|e| *e == least).unwrap_or(0) as u8, least)
    }

    /// The same for a group of four vectors.
    fn group(&self, g: usize, c: f32) -> ([u8; 4], f32) {
        let mut rows = [0; 4];
        let mut error = 0.0;
        for (k, row) in rows.iter_mut().enumerate() {
            let (r, e) = self.row(4 * g + k, c);
            *row = r;
            error += e;
        }
        (rows, error)
    }

    fn block(&mut self, x: &[f32], w: &[f32], b: &mut [u8]) -> bool {
        let largest = x.iter().fold(0f32, |m, v| m.max(v.abs()));
        if largest == 0.0 {
            return true;
        }
        // In units of the largest, so that no sum leaves f32's range.
        let mut signs = [0u8; VECTORS];
        for v in 0..VECTORS {
            let (x, w) = (&x[8 * v..][..8], &w[8 * v..][..8]);
            let mut a = [0f32; 8];
            for (k, a) in a.iter_mut().enumerate() {
                *a = x[k].abs() / largest;
                signs[v] |= u8::from(x[k] < 0.0) << k;
            }
            // The format keeps seven signs and makes the number of negatives even: one that costs least gives way.
            if signs[v].count_ones() % 2 == 1 {
                let cost = |k: &usize| w[*k] * a[*k] * a[*k];
                let least = (0..8).min_by(|i, j| cost(i).total_cmp(&cost(j))).unwrap_or(0);
                signs[v] ^= 1 << least;
                a[least] = -a[least];
            }
            let (wx, wg) = (&mut self.with_x[v], &mut self.with_g[v]);
            *wx = [0.0; 256];
            *wg = [0.0; 256];
            for k in 0..8 {
                let (wa, wk) = (w[k] * a[k], w[k]);
                for ((wx, wg), g) in wx.iter_mut().zip(wg.iter_mut()).zip(&self.grid[k]) {
                    *wx += wa * g;
                    *wg += wk * g * g;
                }
            }
        }
        // Each group's best scale, freely.
        let mut free = [0f32; 8];
        for (g, free) in free.iter_mut().enumerate() {
            let peak = x[32 * g..][..32].iter().fold(0f32, |m, v| m.max(v.abs())) / largest;
            let mut best = 0f32;
            for step in 0..12 {
                let mut c = peak / 43.0 * (0.5 + 0.06 * step as f32);
                if c <= 0.0 {
                    break;
                }
                let (rows, _) = self.group(g, c);
                let (mut wx, mut wg) = (0f32, 0f32);
                for (k, r) in rows.iter().enumerate() {
                    wx += self.with_x[4 * g + k][*r as usize];
                    wg += self.with_g[4 * g + k][*r as usize];
                }
                if wg > 0.0 && wx > 0.0 {
                    c = wx / wg;
                }
                let (_, error) = self.group(g, c);
                if error < best {
                    best = error;
                    *free = c;
                }
            }
        }
        // c = d (0.5 + s) / 4, s in 0..16.
        let top = free.iter().copied().fold(0f32, f32::max);
        let factor = |s: u32| (0.5 + s as f32) * 0.25;
        let mut best = (f32::INFINITY, 0f32, [0u32; 8], [[0u8; 4]; 8]);
        for shrink in [1.0, 0.92, 1.06] {
            let mut d = top * shrink / factor(15);
            for _ in 0..3 {
                let stored = nearest_half(d * largest);
                if !stored.is_finite() {
                    break;
                }
                d = stored / largest;
                let (mut scales, mut rows) = ([0u32; 8], [[0u8; 4]; 8]);
                let (mut error, mut ax, mut aa) = (0f32, 0f64, 0f64);
                for g in 0..8 {
                    let s0 =
                        if d > 0.0 { nearest((free[g] * 4.0 / d - 0.5).clamp(0.0, 15.0)) as u32 } else { 0 };
                    let mut least = f32::INFINITY;
                    for s in s0.saturating_sub(1)..=(s0 + 1).min(15) {
                        let (r, e) = self.group(g, d * factor(s));
                        if e < least {
                            (least, scales[g], rows[g]) = (e, s, r);
                        }
                    }
                    error += least;
                    let f = f64::from(factor(scales[g]));
                    for (k, r) in rows[g].iter().enumerate() {
                        ax += f * f64::from(self.with_x[4 * g + k][*r as usize]);
                        aa += f * f * f64::from(self.with_g[4 * g + k][*r as usize]);
                    }
                }
                if error < best.0 {
                    best = (error, stored, scales, rows);
                }
                if aa <= 0.0 || ax <= 0.0 {
                    break;
                }
                d = (ax / aa) as f32;
            }
        }
        let (error, stored, scales, rows) = best;
        if !error.is_finite() {
            return false;
        }
        put_half(b, iq2_xxs::D, stored);
        for (g, out) in b[iq2_xxs::GROUPS..].chunks_exact_mut(8).enumerate() {
            out[..4].copy_from_slice(&rows[g]);
            let codes = (0..4).fold(0u32, |c, k| c | u32::from(signs[4 * g + k] & 127) << (7 * k));
            out[4..].copy_from_slice(&(codes | scales[g] << 28).to_le_bytes());
        }
        true
    }
}
