//! Kernels compiled ahead, one image per architecture; `cargo xtask kernels` makes them.

use std::io::Read;

/// Architecture, and the zstd-compressed cubin. An `a` target runs on that architecture alone.
type Cubin = (u32, &'static [u8]);

const CUBINS: [Cubin; 7] = [
    (80, include_bytes!("../artefacts/sm_80.cubin.zst")),
    (86, include_bytes!("../artefacts/sm_86.cubin.zst")),
    (89, include_bytes!("../artefacts/sm_89.cubin.zst")),
    (90, include_bytes!("../artefacts/sm_90a.cubin.zst")),
    (100, include_bytes!("../artefacts/sm_100.cubin.zst")),
    (120, include_bytes!("../artefacts/sm_120.cubin.zst")),
    (121, include_bytes!("../artefacts/sm_121a.cubin.zst")),
];

/// For newer cards: the driver compiles it at start.
const PTX: &[u8] = include_bytes!("../artefacts/compute_80.ptx.zst");

/// Image for a card of capability `major.minor`, ending in a zero byte as PTX must.
pub fn image(major: u32, minor: u32) -> Result<Vec<u8>, String> {
    let sm = major * 10 + minor;
    // Within a major version a card runs what was built for a smaller minor one; 90a and 121a are for their own card.
    let cubin = CUBINS
        .iter()
        .filter(|(built, _)| {
            built / 10 == major && *built <= sm && (!matches!(built, 90 | 121) || *built == sm)
        })
        .max_by_key(|(built, _)| *built);
    let packed = match cubin {
        Some((_, bytes)) => bytes,
        None if sm >= 80 => PTX,
        None => return Err("compute capability 8.0 or newer is needed".into()),
    };
    let mut image = Vec::new();
    let mut decoder = ruzstd::decoding::StreamingDecoder::new(packed).map_err(|e| e.to_string())?;
    decoder.read_to_end(&mut image).map_err(|e| e.to_string())?;
    image.push(0);
    Ok(image)
}
