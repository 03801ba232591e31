//! Share of the values' energy that each format loses: `quantize_error VALUES.f32 COLS [IMPORTANCE.f32]`. For comparing
//! quantisers on the same values; both files are little-endian f32.

use ds4_gguf::BlockFormat;

fn floats(path: &str) -> Result<Vec<f32>, Box<dyn std::error::Error>> {
    let bytes = std::fs::read(path).map_err(|e| format!("{path}: {e}"))?;
    Ok(bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect())
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [values, cols, importance @ ..] = args.as_slice() else {
        return Err("usage: quantize_error VALUES.f32 COLS [IMPORTANCE.f32]".into());
    };
    let (x, cols) = (floats(values)?, cols.parse::<usize>()?);
    let importance = importance.first().map(|p| floats(p)).transpose()?;
    for format in BlockFormat::ALL {
        if format == BlockFormat::I32 || !cols.is_multiple_of(format.block_len()) {
            continue;
        }
        let start = std::time::Instant::now();
        let mut blocks = Vec::new();
        format.quantize(&x, cols, importance.as_deref(), &mut blocks)?;
        let seconds = start.elapsed().as_secs_f64();
        let mut back = vec![0f32; x.len()];
        format.dequantize(&blocks, &mut back)?;
        let (mut lost, mut all) = (0f64, 0f64);
        for (i, (x, b)) in x.iter().zip(&back).enumerate() {
            let w = importance.as_ref().map_or(1.0, |w| f64::from(w[i % cols]));
            lost += w * f64::from(x - b).powi(2);
            all += w * f64::from(*x).powi(2);
        }
        println!("{:8} {:.4e}  {:.2} M values/s", format.name(), lost / all, x.len() as f64 / seconds / 1e6);
    }
    Ok(())
}
