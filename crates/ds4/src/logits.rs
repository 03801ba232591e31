//! Running tokens through the model without an engine: `ds4 logits`, and the flags that look at numbers.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

use ds4_model::{Backend, Batch, Model, ModelError, Outputs, Setup};

use crate::CliError;
use crate::args::{LogitsArgs, ModelArgs, NumericArgs, ProbeArgs};
use crate::device::{Device, Job, Make};
use crate::open::{self, OpenModel};

pub fn run(args: LogitsArgs) -> Result<(), CliError> {
    let model = open::open(&args.model)?;
    let ids = read_ids(&args.tokens)?;
    let decode_from = args.decode_from.map_or(ids.len(), |n| n as usize);
    let file_error = |source| CliError::File { path: args.out.clone(), source };
    let mut out = BufWriter::new(File::create(&args.out).map_err(file_error)?);
    let pass =
        Pass { model: &model, numerics: &args.numerics, ids: &ids, chunk: args.chunk as usize, decode_from };
    pass.run(&args.model, &mut |_, row| {
        row.iter().try_for_each(|v| out.write_all(&v.to_le_bytes())).map_err(file_error)
    })?;
    out.flush().map_err(file_error)
}

fn read_ids(path: &Path) -> Result<Vec<u32>, CliError> {
    let text = std::fs::read_to_string(path)
        .map_err(|source| CliError::File { path: path.to_path_buf(), source })?;
    let ids = text
        .split_whitespace()
        .map(|w| {
            w.parse().map_err(|_| CliError::Usage(format!("{}: {w:?} is not a token id", path.display())))
        })
        .collect::<Result<Vec<u32>, _>>()?;
    if ids.is_empty() {
        return Err(CliError::Usage(format!("{}: no token ids", path.display())));
    }
    Ok(ids)
}

/// One pass over `ids`: `chunk` tokens a step up to `decode_from`, then one by one.
pub struct Pass<'a> {
    pub model: &'a OpenModel,
    pub numerics: &'a NumericArgs,
    pub ids: &'a [u32],
    pub chunk: usize,
    pub decode_from: usize,
}

/// Hears of every position's logits, in order.
type Rows<'a> = &'a mut dyn FnMut(usize, &[f32]) -> Result<(), CliError>;

impl Pass<'_> {
    pub fn run(&self, device: &ModelArgs, rows: Rows<'_>) -> Result<(), CliError> {
        Device::choose(device, self.model.weight_bytes())?.run(PassJob { pass: self, rows })
    }
}

struct PassJob<'a, 'b> {
    pass: &'a Pass<'a>,
    rows: Rows<'b>,
}

impl Job for PassJob<'_, '_> {
    type Output = ();

    fn run<B: Backend + 'static>(self, make: impl Make<B>) -> Result<(), CliError> {
        let Pass { model, numerics, ids, chunk, decode_from } = *self.pass;
        let chunk = chunk.min(ids.len());
        let setup: Setup = model.setup(numerics, ids.len(), 1, chunk, chunk, 0);
        let (vocab, pages) = (setup.hyper.vocab, setup.limits.pages as u32);
        let mut instance = Model::load(&model.gguf, setup, make()?, &mut |_| ())
            .map_err(|source| CliError::Model { path: model.path.clone(), source })?;
        instance.backend.reset(0).map_err(ModelError::from)?;
        instance.backend.set_pages(0, 0, &(0..pages).collect::<Vec<_>>()).map_err(ModelError::from)?;

        let mut row = vec![0f32; vocab];
        let mut pos = 0;
        while pos < ids.len() {
            let len = if pos < decode_from { chunk.min(decode_from - pos).min(ids.len() - pos) } else { 1 };
            let mut batch = Batch::new();
            batch.push(0, pos, &ids[pos..pos + len], Outputs::All);
            instance.forward(&batch, None)?;
            for i in 0..len {
                instance.logits(i, &mut row)?;
                (self.rows)(pos + i, &row)?;
            }
            pos += len;
        }
        Ok(())
    }
}

/// The flags that look at a prompt's numbers. `true` if one of them was given.
pub fn probe(
    model: &OpenModel,
    device: &ModelArgs,
    numerics: &NumericArgs,
    args: &ProbeArgs,
    prompt: Option<&[u32]>,
) -> Result<bool, CliError> {
    let tokenizer = model.tokenizer()?;
    let show = |id: u32| String::from_utf8_lossy(tokenizer.token_bytes(id)).escape_debug().to_string();
    let need = |flag: &str| {
        prompt.ok_or_else(|| CliError::Usage(format!("{flag} needs a prompt: -p TEXT or --prompt-file FILE")))
    };
    let mut out = std::io::stdout().lock();
    let chunk = Device::choose(device, model.weight_bytes())?.chunk(device);
    if args.dump_tokens {
        for (i, id) in need("--dump-tokens")?.iter().enumerate() {
            writeln!(out, "{i}\t{id}\t{}", show(*id))?;
        }
    }
    if args.dump_logits.is_some() || args.dump_logprobs {
        let ids = need("--dump-logits and --dump-logprobs")?;
        let mut last = Vec::new();
        let pass = Pass { model, numerics, ids, chunk, decode_from: ids.len() };
        pass.run(device, &mut |pos, row| {
            if pos + 1 == ids.len() {
                last = row.to_vec();
            }
            Ok(())
        })?;
        if let Some(path) = &args.dump_logits {
            let bytes: Vec<u8> = last.iter().flat_map(|v| v.to_le_bytes()).collect();
            std::fs::write(path, bytes).map_err(|source| CliError::File { path: path.clone(), source })?;
        }
        if args.dump_logprobs {
            let total = log_sum_exp(&last);
            let mut order: Vec<u32> = (0..last.len() as u32).collect();
            order.sort_by(|a, b| last[*b as usize].total_cmp(&last[*a as usize]).then(a.cmp(b)));
            for id in order.into_iter().take(args.logprobs_top_k as usize) {
                writeln!(out, "{:.6}\t{id}\t{}", f64::from(last[id as usize]) - total, show(id))?;
            }
        }
    }
    if let Some(path) = &args.perplexity_file {
        let text =
            std::fs::read_to_string(path).map_err(|source| CliError::File { path: path.clone(), source })?;
        let bos = tokenizer.special(ds4_text::chat::BOS);
        let ids: Vec<u32> = bos.into_iter().chain(tokenizer.encode(&text)).collect();
        if ids.len() < 2 {
            return Err(CliError::Usage(format!("{}: too short for a perplexity", path.display())));
        }
        let mut loss = 0.0;
        let pass = Pass { model, numerics, ids: &ids, chunk, decode_from: ids.len() };
        pass.run(device, &mut |pos, row| {
            if let Some(next) = ids.get(pos + 1) {
                loss += log_sum_exp(row) - f64::from(row[*next as usize]);
            }
            Ok(())
        })?;
        let n = ids.len() - 1;
        writeln!(out, "perplexity {:.4} over {n} tokens", (loss / n as f64).exp())?;
    }
    if let Some(n) = args.decode_consistency {
        let ids = need("--decode-consistency")?;
        let first = ids.len().saturating_sub(n as usize);
        let whole = rows_from(
            &Pass { model, numerics, ids, chunk: ids.len(), decode_from: ids.len() },
            device,
            first,
        )?;
        let single =
            rows_from(&Pass { model, numerics, ids, chunk: ids.len(), decode_from: first }, device, first)?;
        let (mut worst, mut equal) = (0f32, 0);
        for (a, b) in whole.iter().zip(&single) {
            worst = a.iter().zip(b).fold(worst, |m, (x, y)| m.max((x - y).abs()));
            equal += usize::from(a == b);
        }
        writeln!(out, "{equal} of {} positions bit-equal, largest difference {worst:e}", whole.len())?;
    }
    Ok(args.dump_tokens
        || args.dump_logits.is_some()
        || args.dump_logprobs
        || args.perplexity_file.is_some()
        || args.decode_consistency.is_some())
}

fn rows_from(pass: &Pass<'_>, device: &ModelArgs, first: usize) -> Result<Vec<Vec<f32>>, CliError> {
    let mut rows = Vec::new();
    pass.run(device, &mut |pos, row| {
        if pos >= first {
            rows.push(row.to_vec());
        }
        Ok(())
    })?;
    Ok(rows)
}

fn log_sum_exp(row: &[f32]) -> f64 {
    let max = f64::from(row.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    max + row.iter().map(|v| (f64::from(*v) - max).exp()).sum::<f64>().ln()
}
