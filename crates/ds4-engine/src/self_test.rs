//! Before "ready": the stages compute what they should, or the engine refuses to serve.

use std::time::Duration;

use ds4_model::{Batch, Outputs, PageId};

use crate::pipeline::Pipeline;
use crate::sampler::{Choose, Chosen, RowResult, Sampling, Want};
use crate::stage::{Mark, StageError, StageFault, StateOp, Step};

/// Likely tokens that are compared.
const TOP: usize = 8;
/// Positions of the built-in check: past two windows of ratio 4.
const TOKENS: usize = 24;

/// A short sequence and what comes after it.
#[derive(Clone, Debug, PartialEq)]
pub struct SelfTest {
    /// At most one step's rows and one page.
    pub tokens: Vec<u32>,
    /// Tokens with their log-probabilities as a trusted program gives them; may be empty.
    pub expected: Vec<(u32, f32)>,
    /// Largest difference of log-probabilities: between expected and found, and between the sequence evaluated at once
    /// and row by row.
    pub tolerance: f32,
}

impl SelfTest {
    /// Without stored vectors: the sequence at once and row by row must agree, and be finite.
    pub fn consistency(vocab: usize) -> Self {
        let tokens = (0..TOKENS).map(|i| ((i * 7919 + 13) % vocab.max(1)) as u32).collect();
        SelfTest { tokens, expected: Vec::new(), tolerance: 0.25 }
    }

    /// Runs on idle stages; what slot 0 and page 0 held is lost.
    pub(crate) fn run(&self, pipeline: &mut Pipeline, limit: Duration) -> Result<(), StageError> {
        let rows = pipeline.infos()[0].limits.model.rows.max(1);
        let at_once = self.evaluate(pipeline, rows, limit)?;
        let by_row = self.evaluate(pipeline, 1, limit)?;
        let wrong = |reason: String| {
            let what = format!("self-test: {reason}; this device computes wrong, nothing is served");
            Err(StageError { stage: "pipeline".into(), fault: StageFault::Load(what) })
        };
        for (other, name) in [(&by_row.top, "row by row"), (&self.expected, "expected")] {
            for &(token, want) in other {
                // A token far down may fall off the list.
                let Some(&(_, found)) = at_once.top.iter().find(|t| t.0 == token) else {
                    let least = at_once.top.last().map_or(f32::INFINITY, |t| t.1);
                    if want > least + self.tolerance {
                        return wrong(format!(
                            "token {token} has log-probability {want} {name}, found below {least}"
                        ));
                    }
                    continue;
                };
                let difference = (found - want).abs();
                if difference.is_nan() || difference > self.tolerance {
                    return wrong(format!("token {token} has log-probability {want} {name}, found {found}"));
                }
            }
        }
        Ok(())
    }

    fn evaluate(&self, pipeline: &mut Pipeline, rows: usize, limit: Duration) -> Result<Chosen, StageError> {
        let pages: Vec<PageId> = vec![0];
        let mut mark = Mark::default();
        let mut last = None;
        for tokens in self.tokens.chunks(rows) {
            let mut step = Step { marks: vec![mark], ..Step::default() };
            if mark.pos == 0 {
                step.before.push(StateOp::Reset { slot: 0 });
                step.before.push(StateOp::SetPages { slot: 0, first: 0, pages: pages.clone() });
            }
            let mut batch = Batch::new();
            batch.push(0, mark.pos, tokens, Outputs::Last);
            step.batch = batch;
            step.wants = vec![Want { choose: Choose::Sample(Sampling::greedy()), top: TOP }];
            mark = mark.extend(tokens);
            pipeline.submit(step)?;
            last = pipeline.collect(limit).map_err(|(_, e)| e)?.rows.pop();
        }
        match last {
            Some(RowResult::Token(chosen)) => Ok(chosen),
            _ => {
                let fault = StageFault::Step("no token came back from the self-test".into());
                Err(StageError { stage: "pipeline".into(), fault })
            }
        }
    }
}
