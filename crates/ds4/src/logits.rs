//! `ds4 logits`: what the model computes, for comparison with other programs.

use std::fs::File;
use std::io::{BufWriter, Write};

use ds4_model::{Backend, Batch, KvLayout, LayerSlice, Limits, Model, Outputs, Setup};

use crate::args::LogitsArgs;
use crate::device::{Job, dispatch};
use crate::open::{self, OpenModel};
use crate::{CliError, args::ModelArgs};

pub fn run(args: LogitsArgs) -> Result<(), CliError> {
    let model = open::open(&args.model)?;
    let ids = read_ids(&args)?;
    let flags: ModelArgs = args.model.clone();
    dispatch(&flags, Logits { args, model, ids })
}

fn read_ids(args: &LogitsArgs) -> Result<Vec<u32>, CliError> {
    let text = std::fs::read_to_string(&args.tokens)
        .map_err(|source| CliError::File { path: args.tokens.clone(), source })?;
    let ids = text
        .split_whitespace()
        .map(|w| {
            w.parse()
                .map_err(|_| CliError::Usage(format!("{}: {w:?} is not a token id", args.tokens.display())))
        })
        .collect::<Result<Vec<u32>, _>>()?;
    if ids.is_empty() {
        return Err(CliError::Usage(format!("{}: no token ids", args.tokens.display())));
    }
    Ok(ids)
}

struct Logits {
    args: LogitsArgs,
    model: OpenModel,
    ids: Vec<u32>,
}

impl Job for Logits {
    type Output = ();

    fn run<B: Backend + 'static>(self, backend: B) -> Result<(), CliError> {
        let Logits { args, model, ids } = self;
        let (numerics, format) = open::numerics(&args.numerics);
        let slice = LayerSlice::whole(model.hyper.layers.len());
        let chunk = (args.chunk as usize).min(ids.len());
        let pages = KvLayout::pages_for(ids.len());
        let setup = Setup {
            layout: KvLayout::new(&model.hyper, slice, format),
            limits: Limits { context: ids.len(), rows: chunk, outputs: chunk, slots: 1, pages },
            hyper: model.hyper,
            numerics,
        };
        let vocab = setup.hyper.vocab;
        let mut instance = Model::load(&model.gguf, setup, backend, &mut |_| ())
            .map_err(|source| CliError::Model { path: model.path, source })?;
        let page_ids: Vec<u32> = (0..pages as u32).collect();
        instance.backend.reset(0).map_err(ds4_model::ModelError::from)?;
        instance.backend.set_pages(0, 0, &page_ids).map_err(ds4_model::ModelError::from)?;

        let file_error = |source| CliError::File { path: args.out.clone(), source };
        let mut out = BufWriter::new(File::create(&args.out).map_err(file_error)?);
        let decode_from = args.decode_from.map_or(ids.len(), |n| n as usize);
        let mut logits = vec![0f32; chunk * vocab];
        let mut pos = 0;
        while pos < ids.len() {
            let len = if pos < decode_from { chunk.min(decode_from - pos).min(ids.len() - pos) } else { 1 };
            let mut batch = Batch::new();
            batch.push(0, pos, &ids[pos..pos + len], Outputs::All);
            instance.forward(&batch, None)?;
            instance.logits(0, &mut logits[..len * vocab])?;
            for v in &logits[..len * vocab] {
                out.write_all(&v.to_le_bytes()).map_err(file_error)?;
            }
            pos += len;
        }
        out.flush().map_err(file_error)
    }
}
