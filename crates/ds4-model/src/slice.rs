//! The contiguous layers that one process owns.

use std::fmt;
use std::ops::Range;

use crate::error::ModelError;

/// Layers `first..end` of a model with `total` layers. The first slice also embeds, the last may own the output head.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LayerSlice {
    pub first: usize,
    pub end: usize,
    pub total: usize,
    /// Whether this process turns streams into logits.
    pub head: bool,
}

impl LayerSlice {
    pub fn whole(total: usize) -> Self {
        LayerSlice { first: 0, end: total, total, head: true }
    }

    /// `A:B` (both included) or `A:output` (to the last layer, with the output head), as in `--layers`.
    pub fn parse(text: &str, total: usize) -> Result<Self, ModelError> {
        let bad = |reason: String| ModelError::Slice { asked: text.to_string(), reason };
        let form = || bad("expected A:B (both included) or A:output".into());
        let (a, b) = text.split_once(':').ok_or_else(form)?;
        let first: usize = a.trim().parse().map_err(|_| form())?;
        let (end, head) = match b.trim() {
            "output" => (total, true),
            last => (last.parse::<usize>().map_err(|_| form())?.saturating_add(1), false),
        };
        if first >= end {
            return Err(bad("the first layer is after the last".into()));
        }
        if end > total {
            return Err(bad(format!("the model has layers 0 to {}", total.saturating_sub(1))));
        }
        Ok(LayerSlice { first, end, total, head })
    }

    pub fn layers(&self) -> Range<usize> {
        self.first..self.end
    }

    pub fn len(&self) -> usize {
        self.end - self.first
    }

    pub fn is_empty(&self) -> bool {
        self.first == self.end
    }

    /// Whether this slice starts from token ids.
    pub fn embeds(&self) -> bool {
        self.first == 0
    }
}

impl fmt::Display for LayerSlice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.head {
            write!(f, "{}:output", self.first)
        } else {
            write!(f, "{}:{}", self.first, self.end.saturating_sub(1))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parse_and_print_agree() {
        for text in ["0:22", "23:output", "5:5", "0:output"] {
            let s = LayerSlice::parse(text, 43).unwrap();
            assert_eq!(s.to_string(), text);
        }
        assert_eq!(LayerSlice::parse("0:42", 43).unwrap().len(), 43);
        assert!(!LayerSlice::parse("0:42", 43).unwrap().head);
    }

    #[test]
    fn refuses_with_the_reason() {
        for (text, word) in
            [("7", "A:B"), ("a:b", "A:B"), ("9:3", "after"), ("0:43", "0 to 42"), ("43:output", "after")]
        {
            let e = LayerSlice::parse(text, 43).unwrap_err().to_string();
            assert!(e.contains(word) && e.contains(text), "{e}");
        }
    }
}
