//! One step's rows: runs of consecutive positions of several sessions, prefill and decode mixed.

use crate::error::ModelError;

/// Place of a session's frontier on the device: below [`Limits::slots`].
pub type Slot = u32;

/// Index of a page in the device's pool.
pub type PageId = u32;

/// What a model instance is sized for. Nothing is allocated after it is loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Positions of one session.
    pub context: usize,
    /// Rows of one step.
    pub rows: usize,
    /// Rows of one step whose logits are wanted.
    pub outputs: usize,
    /// Frontiers on the device.
    pub slots: usize,
    /// Pages in the pool.
    pub pages: usize,
}

/// Consecutive positions `pos..pos + len` of the session in `slot`, as rows `row..row + len` of the batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    pub slot: Slot,
    pub pos: usize,
    pub row: usize,
    pub len: usize,
}

/// A ragged batch. A single decode row is the batch of one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Batch {
    tokens: Vec<u32>,
    segments: Vec<Segment>,
    outputs: Vec<u32>,
}

impl Batch {
    pub fn new() -> Self {
        Self::default()
    }

    /// The batch of one run of tokens, with logits for its last row.
    pub fn single(slot: Slot, pos: usize, tokens: &[u32]) -> Self {
        let mut b = Self::new();
        b.push(slot, pos, tokens, Outputs::Last);
        b
    }

    /// Appends `tokens` of the session in `slot`, the first at position `pos`.
    pub fn push(&mut self, slot: Slot, pos: usize, tokens: &[u32], outputs: Outputs) {
        let row = self.tokens.len();
        self.tokens.extend_from_slice(tokens);
        self.segments.push(Segment { slot, pos, row, len: tokens.len() });
        let end = self.tokens.len();
        match outputs {
            Outputs::None => {}
            Outputs::Last => self.outputs.push(end as u32 - 1),
            Outputs::All => self.outputs.extend(row as u32..end as u32),
        }
    }

    pub fn clear(&mut self) {
        self.tokens.clear();
        self.segments.clear();
        self.outputs.clear();
    }

    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    pub fn segments(&self) -> &[Segment] {
        &self.segments
    }

    /// Rows whose logits are wanted, ascending.
    pub fn outputs(&self) -> &[u32] {
        &self.outputs
    }

    /// Position of every row.
    pub fn positions(&self) -> impl Iterator<Item = usize> + '_ {
        self.segments.iter().flat_map(|s| s.pos..s.pos + s.len)
    }

    /// Checks the batch against what the instance is sized for, so that no operation needs to.
    pub fn check(&self, limits: &Limits, vocab: usize) -> Result<(), ModelError> {
        let fail = |reason: String| Err(ModelError::Batch(reason));
        if self.is_empty() || self.len() > limits.rows {
            return fail(format!("{} rows, this instance takes 1 to {}", self.len(), limits.rows));
        }
        if self.outputs.len() > limits.outputs {
            return fail(format!(
                "{} rows of logits, this instance gives {}",
                self.outputs.len(),
                limits.outputs
            ));
        }
        if let Some(t) = self.tokens.iter().find(|&&t| t as usize >= vocab) {
            return fail(format!("token id {t}, the vocabulary has {vocab}"));
        }
        for (i, s) in self.segments.iter().enumerate() {
            if s.len == 0 {
                return fail(format!("segment {i} has no rows"));
            }
            if s.slot as usize >= limits.slots {
                return fail(format!("slot {}, this instance has {}", s.slot, limits.slots));
            }
            if s.pos + s.len > limits.context {
                return fail(format!("positions up to {}, the context is {}", s.pos + s.len, limits.context));
            }
            if self.segments[..i].iter().any(|o| o.slot == s.slot) {
                return fail(format!("slot {} appears twice", s.slot));
            }
        }
        Ok(())
    }
}

/// Which rows of a run give logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outputs {
    None,
    Last,
    All,
}
