//! Whether two files hold the same slice of the same model.

use ds4_gguf::Gguf;
use ds4_model::{HyperParams, LayerSlice, weights};

/// First bytes of every tensor that count: they tell two quantisations by different importance matrices apart, and
/// page in next to nothing.
const SAMPLE_BYTES: usize = 64;

/// Hash over the model's metadata (not the tokenizer's, which only the coordinator uses) and, for the tensors of
/// `slice`: name, shape, format and first bytes.
pub fn fingerprint(gguf: &Gguf, hyper: &HyperParams, slice: &LayerSlice) -> [u8; 32] {
    let mut hash = blake3::Hasher::new();
    let mut field = |bytes: &[u8]| {
        hash.update(&(bytes.len() as u64).to_le_bytes());
        hash.update(bytes);
    };
    let mut settings: Vec<_> = gguf
        .metadata()
        .iter()
        .filter(|(key, _)| !key.starts_with("tokenizer.") && !key.starts_with("general."))
        .collect();
    settings.sort_by_key(|(key, _)| *key);
    for (key, value) in settings {
        field(key.as_bytes());
        field(format!("{value:?}").as_bytes());
    }
    for need in weights::needs(hyper, slice) {
        let Some(tensor) = gguf.tensor(&need.name) else { continue };
        field(tensor.name.as_bytes());
        field(tensor.format.name().as_bytes());
        field(format!("{:?}", tensor.shape).as_bytes());
        let data = gguf.data(tensor);
        field(&data[..data.len().min(SAMPLE_BYTES)]);
    }
    *hash.finalize().as_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_and_files_have_their_own() {
        let path = ds4_testdata::tiny_model();
        let gguf = Gguf::open(&path).expect("tiny model");
        let hyper = HyperParams::from_metadata(gguf.metadata()).expect("hyper-parameters");
        let of = |gguf: &Gguf, text: &str| {
            fingerprint(gguf, &hyper, &LayerSlice::parse(text, hyper.layers.len()).expect("slice"))
        };
        assert_eq!(of(&gguf, "0:2"), of(&Gguf::open(&path).expect("again"), "0:2"));
        assert_ne!(of(&gguf, "0:2"), of(&gguf, "0:3"));
        assert_ne!(of(&gguf, "3:5"), of(&gguf, "3:output"));
        // Another quantisation of one tensor of layer 4 shows in the slices that hold it, and only there.
        let mut bytes = std::fs::read(&path).expect("file");
        let tensor = gguf.tensors().find(|t| t.name.starts_with("blk.4.")).expect("a tensor of layer 4");
        bytes[tensor.offset() as usize] ^= 1;
        let other = Gguf::from_bytes("other", bytes).expect("still a model");
        assert_ne!(of(&gguf, "3:output"), of(&other, "3:output"));
        assert_eq!(of(&gguf, "0:3"), of(&other, "0:3"));
    }
}
