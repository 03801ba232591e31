//! From flags to an open model file.

use std::path::{Path, PathBuf};

use ds4_gguf::Gguf;
use ds4_model::{HyperParams, Numerics, RowFormat};

use crate::CliError;
use crate::args::{KvChoice, ModelArgs, NumericArgs};

/// The file that runs when none is named and it lies in the current folder.
const DEFAULT_FILE: &str = "ds4flash.gguf";

/// The model that ships with the program.
static SHIPPED: &[u8] = include_bytes!("../../../testdata/tiny-q2q4.gguf");

pub struct OpenModel {
    pub gguf: Gguf,
    pub hyper: HyperParams,
    /// For messages.
    pub path: PathBuf,
}

pub fn open(args: &ModelArgs) -> Result<OpenModel, CliError> {
    let (path, gguf) = match &args.model {
        Some(path) => (path.clone(), Gguf::open(path)),
        None if Path::new(DEFAULT_FILE).exists() => {
            (DEFAULT_FILE.into(), Gguf::open(Path::new(DEFAULT_FILE)))
        }
        None => ("shipped model".into(), Gguf::from_static("shipped model", SHIPPED)),
    };
    let gguf = gguf.map_err(|source| CliError::Gguf { path: path.clone(), source })?;
    let hyper = HyperParams::from_metadata(gguf.metadata())
        .map_err(|source| CliError::Model { path: path.clone(), source })?;
    Ok(OpenModel { gguf, hyper, path })
}

/// Numeric mode and row format that the flags ask for.
pub fn numerics(args: &NumericArgs) -> (Numerics, RowFormat) {
    let numerics = Numerics { qat: !args.plain, exact: args.exact };
    let format = match args.kv {
        Some(KvChoice::F32) => RowFormat::F32,
        Some(KvChoice::Packed) => RowFormat::Packed,
        None if args.plain => RowFormat::F32,
        None => RowFormat::Packed,
    };
    (numerics, format)
}
