//! From flags to an open model file, and to what an instance of it is sized for.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use ds4_gguf::Gguf;
use ds4_model::{HyperParams, KvLayout, LayerSlice, Limits, Numerics, RowFormat, Setup};
use ds4_text::Tokenizer;

use crate::CliError;
use crate::args::{KvChoice, ModelArgs, NumericArgs};

/// The file that runs when none is named and it lies in the current folder.
const DEFAULT_FILE: &str = "ds4flash.gguf";

/// The model that ships with the program; `tools/nano` made it.
static SHIPPED: &[u8] = include_bytes!("../../../models/nano.gguf");
/// What to know about it before reading its answers.
const SHIPPED_NOTE: &str = "no model named (-m FILE): running ds4-nano, which ships with the program. It has 29 million \
     parameters: it shows that everything works, and knows little.";

/// Longest context that is taken without being asked for.
const CONTEXT_DEFAULT: u64 = 32 * 1024;

pub struct OpenModel {
    pub gguf: Gguf,
    pub hyper: HyperParams,
    /// For messages.
    pub path: PathBuf,
    /// For people who did not name a model.
    pub note: Option<&'static str>,
}

pub fn open(args: &ModelArgs) -> Result<OpenModel, CliError> {
    let (path, gguf, note) = match &args.model {
        Some(path) => (path.clone(), Gguf::open(path), None),
        None if Path::new(DEFAULT_FILE).exists() => {
            (DEFAULT_FILE.into(), Gguf::open(Path::new(DEFAULT_FILE)), None)
        }
        None => ("shipped model".into(), Gguf::from_static("shipped model", SHIPPED), Some(SHIPPED_NOTE)),
    };
    let gguf = gguf.map_err(|source| CliError::Gguf { path: path.clone(), source })?;
    let hyper = HyperParams::from_metadata(gguf.metadata())
        .map_err(|source| CliError::Model { path: path.clone(), source })?;
    Ok(OpenModel { gguf, hyper, path, note })
}

impl OpenModel {
    pub fn tokenizer(&self) -> Result<Arc<Tokenizer>, CliError> {
        let tokenizer = Tokenizer::from_gguf(self.gguf.metadata())
            .map_err(|source| CliError::Tokenizer { path: self.path.clone(), source })?;
        Ok(Arc::new(tokenizer))
    }

    /// Bytes of all tensors.
    pub fn weight_bytes(&self) -> u64 {
        self.gguf.tensors().map(|t| t.byte_len()).sum()
    }

    /// Tokens of a conversation that the flags ask for.
    pub fn context(&self, args: &ModelArgs) -> usize {
        args.ctx.map_or(self.hyper.context.min(CONTEXT_DEFAULT) as usize, |c| c as usize)
    }

    /// An instance of the whole model for `sessions` conversations; `spare` pages are for what is kept beside them.
    pub fn setup(
        &self,
        numerics: &NumericArgs,
        context: usize,
        sessions: usize,
        rows: usize,
        outputs: usize,
        spare: usize,
    ) -> Setup {
        let (numerics, format) = numeric_mode(numerics);
        let slice = LayerSlice::whole(self.hyper.layers.len());
        Setup {
            hyper: self.hyper.clone(),
            layout: KvLayout::new(&self.hyper, slice, format),
            limits: Limits {
                context,
                rows,
                outputs,
                slots: sessions,
                pages: sessions * KvLayout::pages_for(context) + spare,
            },
            numerics,
        }
    }
}

/// Numeric mode and row format that the flags ask for.
pub fn numeric_mode(args: &NumericArgs) -> (Numerics, RowFormat) {
    let numerics = Numerics { qat: !args.plain, exact: args.exact };
    let format = match args.kv {
        Some(KvChoice::F32) => RowFormat::F32,
        Some(KvChoice::Packed) => RowFormat::Packed,
        None if args.plain => RowFormat::F32,
        None => RowFormat::Packed,
    };
    (numerics, format)
}
