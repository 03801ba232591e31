//! The container: what is written reads back the same, and no bytes make the reader panic.

use ds4_gguf::{BlockFormat, Gguf, GgufWriter, Metadata, NewTensor, Value};
use proptest::prelude::*;

/// A file as the writer makes it, with its tensors' bytes.
fn write(metadata: &Metadata, tensors: &[(NewTensor, Vec<u8>)]) -> Vec<u8> {
    let table: Vec<NewTensor> = tensors.iter().map(|(t, _)| t.clone()).collect();
    let mut w = GgufWriter::new(Vec::new(), metadata, &table).unwrap();
    for (t, bytes) in tensors {
        w.tensor(&t.name, bytes).unwrap();
    }
    w.finish().unwrap()
}

fn value() -> impl Strategy<Value = Value> {
    let float = || (-1e30f32..1e30).prop_map(f64::from);
    prop_oneof![
        any::<u64>().prop_map(Value::U64),
        any::<i64>().prop_map(Value::I64),
        float().prop_map(Value::F64),
        any::<bool>().prop_map(Value::Bool),
        ".{0,12}".prop_map(Value::String),
        prop::collection::vec(any::<i64>(), 0..5).prop_map(Value::Integers),
        prop::collection::vec(float(), 0..5).prop_map(Value::Floats),
        prop::collection::vec(any::<bool>(), 0..5).prop_map(Value::Bools),
        prop::collection::vec(".{0,6}", 0..5).prop_map(Value::Strings),
    ]
}

fn tensor() -> impl Strategy<Value = (BlockFormat, Vec<u64>, u8)> {
    (
        prop::sample::select(BlockFormat::ALL.to_vec()),
        1u64..3,
        prop::collection::vec(0u64..4, 0..3),
        any::<u8>(),
    )
        .prop_map(|(format, blocks, rest, fill)| {
            let mut shape = vec![blocks * format.block_len() as u64];
            shape.extend(rest);
            (format, shape, fill)
        })
}

prop_compose! {
    fn file()(
        values in prop::collection::vec(value(), 0..6),
        tensors in prop::collection::vec(tensor(), 0..6),
        alignment in prop::option::of(prop::sample::select(vec![1u64, 8, 32, 256])),
    ) -> (Metadata, Vec<(NewTensor, Vec<u8>)>) {
        let mut metadata = Metadata::default();
        if let Some(a) = alignment {
            metadata.insert("general.alignment", Value::U64(a));
        }
        for (i, v) in values.into_iter().enumerate() {
            metadata.insert(format!("key.{i}"), v);
        }
        let tensors = tensors.into_iter().enumerate().map(|(i, (format, shape, fill))| {
            let bytes = format.row_bytes(shape[0]) * shape[1..].iter().product::<u64>();
            (NewTensor { name: format!("t{i}"), format, shape }, vec![fill; bytes as usize])
        }).collect();
        (metadata, tensors)
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn what_is_written_reads_back((metadata, tensors) in file()) {
        let bytes = write(&metadata, &tensors);
        let gguf = Gguf::from_bytes("written", bytes.clone()).unwrap();
        prop_assert_eq!(gguf.metadata(), &metadata);
        prop_assert_eq!(gguf.tensors().len(), tensors.len());
        for (t, data) in &tensors {
            let read = gguf.tensor(&t.name).unwrap();
            prop_assert_eq!((read.format, &read.shape), (t.format, &t.shape));
            prop_assert_eq!(gguf.data(read), data.as_slice());
        }
        // A copy of a copy is the same file.
        prop_assert_eq!(write(gguf.metadata(), &tensors), bytes);
    }

    /// Any change of any bytes, and any cut: an error or a file all of whose tensors can be read.
    #[test]
    fn damaged_bytes_are_refused_or_read(
        (metadata, tensors) in file(),
        edits in prop::collection::vec((any::<prop::sample::Index>(), prop_oneof![
            any::<u64>(), Just(u64::MAX), Just(1 << 63), Just(0), Just(u64::from(u32::MAX)), Just(i64::MAX as u64),
        ], 1usize..=8), 1..4),
        cut in prop::option::of(any::<prop::sample::Index>()),
    ) {
        let mut bytes = write(&metadata, &tensors);
        for (at, with, n) in edits {
            let at = at.index(bytes.len());
            let n = n.min(bytes.len() - at);
            bytes[at..at + n].copy_from_slice(&with.to_le_bytes()[..n]);
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        read_everything(bytes);
    }

    #[test]
    fn any_bytes_are_refused_or_read(tail in prop::collection::vec(any::<u8>(), 0..200), version in 1u32..5) {
        let mut bytes = b"GGUF".to_vec();
        bytes.extend(version.to_le_bytes());
        bytes.extend(tail);
        read_everything(bytes);
    }
}

fn read_everything(bytes: Vec<u8>) {
    let total = bytes.len() as u64;
    let Ok(gguf) = Gguf::from_bytes("damaged", bytes) else { return };
    for t in gguf.tensors() {
        assert_eq!(gguf.data(t).len() as u64, t.byte_len());
        assert!(t.offset() + t.byte_len() <= total, "{} lies outside the file", t.name);
    }
}

/// A copied file keeps the width of every number: other readers want `u32` where the original had it.
#[test]
fn a_copy_of_a_real_file_is_the_same_bytes() {
    let path = ds4_testdata::path("tiny-q2q4.gguf");
    let original = std::fs::read(&path).unwrap();
    let gguf = Gguf::open(&path).unwrap();
    let tensors: Vec<_> = gguf
        .tensors()
        .map(|t| {
            let new = NewTensor { name: t.name.clone(), format: t.format, shape: t.shape.clone() };
            (new, gguf.data(t).to_vec())
        })
        .collect();
    let copy = write(gguf.metadata(), &tensors);
    assert_eq!(copy.len(), original.len());
    let differs = copy.iter().zip(&original).position(|(a, b)| a != b);
    assert_eq!(differs, None, "first different byte");
}

#[test]
fn tensors_out_of_order_or_of_another_size_are_refused() {
    let t = |name: &str| NewTensor { name: name.into(), format: BlockFormat::F32, shape: vec![2] };
    let start = || GgufWriter::new(Vec::new(), &Metadata::default(), &[t("a"), t("b")]).unwrap();
    assert!(start().tensor("b", &[0; 8]).unwrap_err().to_string().contains("a comes next"));
    assert!(start().tensor("a", &[0; 9]).unwrap_err().to_string().contains("9 bytes"));
    assert!(start().tensor("a", &[0; 7]).unwrap_err().to_string().contains("missing"));
    assert!(start().finish().err().unwrap().to_string().contains("never written"));
    let twice = GgufWriter::new(Vec::new(), &Metadata::default(), &[t("a"), t("a")]);
    assert!(twice.err().unwrap().to_string().contains("twice"));
}
