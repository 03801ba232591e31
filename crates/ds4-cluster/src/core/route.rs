//! From the slices that are there to a route over all layers, or to the words for what is missing.

use ds4_model::LayerSlice;

/// Indices into `slices` that cover `span` from its first layer to its last (and to the output head, where it owns
/// that), in order; every layer once. Earlier entries are preferred.
pub fn assemble(slices: &[LayerSlice], span: &LayerSlice) -> Result<Vec<usize>, String> {
    let mut path = Vec::new();
    if extend(slices, span, span.first, &mut path) { Ok(path) } else { Err(missing(slices, span)) }
}

fn extend(slices: &[LayerSlice], span: &LayerSlice, from: usize, path: &mut Vec<usize>) -> bool {
    if from == span.end {
        return true;
    }
    for (i, s) in slices.iter().enumerate() {
        let ends_well = s.end < span.end || (s.end == span.end && s.head == span.head);
        if s.first == from && !s.is_empty() && ends_well {
            path.push(i);
            if extend(slices, span, s.end, path) {
                return true;
            }
            path.pop();
        }
    }
    false
}

fn missing(slices: &[LayerSlice], span: &LayerSlice) -> String {
    let covered = |layer: usize| slices.iter().any(|s| s.layers().contains(&layer));
    let mut parts = Vec::new();
    let mut layer = span.first;
    while layer < span.end {
        if covered(layer) {
            layer += 1;
            continue;
        }
        let first = layer;
        while layer < span.end && !covered(layer) {
            layer += 1;
        }
        parts.push(if layer - first == 1 {
            format!("layer {first}")
        } else {
            format!("layers {first} to {}", layer - 1)
        });
    }
    if span.head && !slices.iter().any(|s| s.head) {
        parts.push("the output head".into());
    }
    if parts.is_empty() {
        let have: Vec<String> = slices.iter().map(ToString::to_string).collect();
        return format!("a joint in {span}: the slices {} do not follow each other", have.join(", "));
    }
    parts.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slices(texts: &[&str]) -> Vec<LayerSlice> {
        texts.iter().map(|t| LayerSlice::parse(t, 6).expect("slice")).collect()
    }

    #[test]
    fn joins_slices_in_any_order() {
        for (texts, route) in [
            (&["0:output"][..], &[0][..]),
            (&["0:2", "3:output"], &[0, 1]),
            (&["3:output", "0:2"], &[1, 0]),
            (&["2:3", "0:1", "4:output"], &[1, 0, 2]),
            (&["0:2", "0:1", "2:output"], &[1, 2]),
            (&["0:2", "3:5", "3:output", "3:output"], &[0, 2]),
        ] {
            assert_eq!(assemble(&slices(texts), &LayerSlice::whole(6)).as_deref(), Ok(route), "{texts:?}");
        }
    }

    #[test]
    fn covers_a_span_and_no_more() {
        let span = LayerSlice::parse("0:1", 6).expect("slice");
        assert_eq!(assemble(&slices(&["0:output", "0:0", "1:1"]), &span), Ok(vec![1, 2]));
        assert_eq!(
            assemble(&slices(&["0:output"]), &span),
            Err("a joint in 0:1: the slices 0:output do not follow each other".into())
        );
    }

    #[test]
    fn names_what_is_missing() {
        for (texts, words) in [
            (&[][..], "layers 0 to 5, the output head"),
            (&["0:2"], "layers 3 to 5, the output head"),
            (&["0:2", "4:output"], "layer 3"),
            (&["0:2", "3:5"], "the output head"),
            (&["0:3", "2:output"], "a joint in 0:output: the slices 0:3, 2:output do not follow each other"),
        ] {
            assert_eq!(assemble(&slices(texts), &LayerSlice::whole(6)), Err(words.into()), "{texts:?}");
        }
    }
}
