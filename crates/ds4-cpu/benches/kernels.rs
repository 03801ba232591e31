//! `cargo bench -p ds4-cpu`: every kernel on one core, beside what the core can do, measured in the same run: memory that
//! is read once (GB/s), and multiply-adds of 8-bit integers (GOP/s, two operations each).

use std::hint::black_box;
use std::time::Instant;

use ds4_cpu::dot::{Kernels, PANEL_ROWS, TILE_TOKENS, TileScratch};
use ds4_cpu::quant::{Buffer, quantise};
use ds4_gguf::BlockFormat;

const COLS: usize = 4096;
/// Bytes of weights that a decode run reads: more than any cache holds.
const WEIGHTS: usize = 1 << 30;

/// Median seconds of five runs.
fn median(mut f: impl FnMut()) -> f64 {
    let mut times: Vec<f64> = (0..5)
        .map(|_| {
            let start = Instant::now();
            f();
            start.elapsed().as_secs_f64()
        })
        .collect();
    times.sort_by(f64::total_cmp);
    times[2]
}

fn main() {
    let memory: Vec<u8> =
        (0..WEIGHTS / 8).flat_map(|i| (i as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes()).collect();
    let read = median(|| {
        let sum = memory.chunks_exact(64).fold([0u64; 8], |mut sum, c| {
            for (s, c) in sum.iter_mut().zip(c.chunks_exact(8)) {
                *s ^= u64::from_le_bytes([c[0], c[1], c[2], c[3], c[4], c[5], c[6], c[7]]);
            }
            sum
        });
        black_box(sum);
    });
    println!("memory read, one core: {:.1} GB/s", WEIGHTS as f64 / read / 1e9);
    let x: Vec<f32> = (0..COLS * TILE_TOKENS).map(|i| (i % 251) as f32 - 125.0).collect();
    for kernels in Kernels::all() {
        println!("\n{}", kernels.name);
        for format in BlockFormat::ALL {
            let Some(kind) = Kernels::activations(format) else { continue };
            let mut buffer = Buffer::with_capacity(x.len());
            buffer.shape(kind, COLS);
            let (s, g) = (COLS / kind.block(), COLS / 16);
            for i in 0..TILE_TOKENS {
                quantise(
                    kind.block(),
                    &x[i * COLS..(i + 1) * COLS],
                    &mut buffer.q[i * COLS..(i + 1) * COLS],
                    &mut buffer.scales[i * s..(i + 1) * s],
                    &mut buffer.sums[i * g..(i + 1) * g],
                );
            }
            let row_bytes = format.row_bytes(COLS as u64) as usize;
            let portable = kernels.name == "portable";
            let bytes = if portable { WEIGHTS / 64 } else { WEIGHTS } / row_bytes * row_bytes;
            let decode = median(|| {
                for w in memory[..bytes].chunks_exact(row_bytes) {
                    black_box((kernels.row)(format, w, buffer.row(0)));
                }
            });
            let small = &memory[..row_bytes * 16];
            let cached = median(|| {
                for _ in 0..if portable { 4 } else { 64 } {
                    for w in small.chunks_exact(row_bytes) {
                        black_box((kernels.row)(format, w, buffer.row(0)));
                    }
                }
            }) / if portable { 4.0 } else { 64.0 };
            print!(
                "{:8} one row: {:6.2} GB/s from memory ({:3.0} % of its limit), {:6.2} from cache",
                format.name(),
                bytes as f64 / decode / 1e9,
                100.0 * bytes as f64 * read / decode / WEIGHTS as f64,
                small.len() as f64 / cached / 1e9,
            );
            if let Some(tiles) = kernels.tiles {
                let mut scratch = TileScratch::with_cols(COLS);
                let rows: Vec<_> = (0..TILE_TOKENS).map(|i| buffer.row(i)).collect();
                (tiles.pack)(&mut scratch.packed, 0, &rows);
                let weights: Vec<&[u8]> = small.chunks_exact(row_bytes).take(PANEL_ROWS).collect();
                let unpack = median(|| {
                    (0..100).for_each(|_| (tiles.unpack)(format, &weights, COLS, &mut scratch.panel));
                }) / 100.0;
                let mut out = [[0f32; TILE_TOKENS]; PANEL_ROWS];
                let multiply = median(|| {
                    for _ in 0..100 {
                        (tiles.multiply)(format, COLS, &scratch.panel, &scratch.packed, 0, &mut out);
                    }
                    black_box(&out);
                }) / 100.0;
                let operations = (2 * COLS * PANEL_ROWS * TILE_TOKENS) as f64;
                print!(
                    "; tiles: {:5.0} GOP/s, unpacking costs {:.2} tiles",
                    operations / multiply / 1e9,
                    unpack / multiply
                );
            }
            println!();
        }
    }
}
