//! From the slices that are there to a route over all layers, or to the words for what is missing.

use ds4_model::LayerSlice;

/// Indices into `slices` that cover layer 0 to the output head, in order; every layer once. Earlier entries are
/// preferred, so that a spare worker does not displace one that is in use.
pub fn assemble(slices: &[LayerSlice], total: usize) -> Result<Vec<usize>, String> {
    let mut path = Vec::new();
    if extend(slices, total, 0, &mut path) { Ok(path) } else { Err(missing(slices, total)) }
}

fn extend(slices: &[LayerSlice], total: usize, from: usize, path: &mut Vec<usize>) -> bool {
    if from == total && path.last().is_some_and(|&i| slices[i].head) {
        return true;
    }
    for (i, s) in slices.iter().enumerate() {
        // The last slice must own the head; one without it leads nowhere.
        if s.first == from && !s.is_empty() && (s.end < total || s.head) {
            path.push(i);
            if extend(slices, total, s.end, path) {
                return true;
            }
            path.pop();
        }
    }
    false
}

fn missing(slices: &[LayerSlice], total: usize) -> String {
    let covered = |layer: usize| slices.iter().any(|s| s.layers().contains(&layer));
    let mut parts = Vec::new();
    let mut layer = 0;
    while layer < total {
        if covered(layer) {
            layer += 1;
            continue;
        }
        let first = layer;
        while layer < total && !covered(layer) {
            layer += 1;
        }
        parts.push(if layer - first == 1 {
            format!("layer {first}")
        } else {
            format!("layers {first} to {}", layer - 1)
        });
    }
    if !slices.iter().any(|s| s.head) {
        parts.push("the output head".into());
    }
    if parts.is_empty() {
        let have: Vec<String> = slices.iter().map(ToString::to_string).collect();
        return format!("slices do not join end to end: {}", have.join(", "));
    }
    format!("missing {}", parts.join(", "))
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
            assert_eq!(assemble(&slices(texts), 6).as_deref(), Ok(route), "{texts:?}");
        }
    }

    #[test]
    fn names_what_is_missing() {
        for (texts, words) in [
            (&[][..], "missing layers 0 to 5, the output head"),
            (&["0:2"], "missing layers 3 to 5, the output head"),
            (&["0:2", "4:output"], "missing layer 3"),
            (&["0:2", "3:5"], "missing the output head"),
            (&["0:3", "2:output"], "slices do not join end to end: 0:3, 2:output"),
        ] {
            assert_eq!(assemble(&slices(texts), 6), Err(words.into()), "{texts:?}");
        }
    }
}
