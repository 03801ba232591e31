//! Byte-pair merges in the order of their ranks.
//!
//! Our own rather than a crate: the table comes from a file, and the crates at hand assert on tables that they do not
//! like; and they build automata for half a second, where a model that fits a laptop should answer at once.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::hash::{BuildHasherDefault, Hasher};

/// Pairs of token ids are well spread already: one multiplication mixes them (Fibonacci hashing).
#[derive(Default)]
pub struct PairHasher(u64);

impl Hasher for PairHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for b in bytes {
            self.write_u64(u64::from(*b));
        }
    }

    fn write_u64(&mut self, v: u64) {
        let x = (self.0 ^ v).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.0 = x ^ (x >> 29);
    }
}

/// `left << 32 | right` → rank and id of the merged token.
pub type Table = HashMap<u64, Merge, BuildHasherDefault<PairHasher>>;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Merge {
    pub rank: u32,
    pub id: u32,
}

pub fn key(left: u32, right: u32) -> u64 {
    u64::from(left) << 32 | u64::from(right)
}

/// Up to this length looking for the best pair anew each time is faster than a heap.
const SHORT: usize = 24;

/// Merges `symbols` as far as the table goes and appends the result to `out`.
pub fn merge(table: &Table, symbols: &mut Vec<u32>, out: &mut Vec<u32>) {
    if symbols.len() <= SHORT {
        merge_short(table, symbols);
        out.extend_from_slice(symbols);
    } else {
        merge_long(table, symbols, out);
    }
}

fn merge_short(table: &Table, s: &mut Vec<u32>) {
    let mut found: [Option<Merge>; SHORT] = [None; SHORT];
    for i in 1..s.len() {
        found[i - 1] = table.get(&key(s[i - 1], s[i])).copied();
    }
    loop {
        let pairs = s.len().saturating_sub(1);
        let best = (0..pairs).filter_map(|i| found[i].map(|m| (m.rank, i, m.id))).min();
        let Some((_, i, id)) = best else { return };
        s[i] = id;
        s.remove(i + 1);
        found.copy_within(i + 1..pairs, i);
        if i > 0 {
            found[i - 1] = table.get(&key(s[i - 1], id)).copied();
        }
        if i + 1 < s.len() {
            found[i] = table.get(&key(id, s[i + 1])).copied();
        }
    }
}

/// A linked list of symbols and a heap of candidate pairs: `n log n` for any input.
fn merge_long(table: &Table, s: &mut [u32], out: &mut Vec<u32>) {
    let n = s.len();
    // Symbols are joined into their left one; `next` and `prev` skip the joined.
    let mut next: Vec<u32> = (1..=n as u32).collect();
    let mut prev: Vec<u32> = (0..n as u32).map(|i| i.wrapping_sub(1)).collect();
    // A candidate is its rank and its left index in one word: small heaps are fast heaps. Whether it still describes the
    // list is seen by looking its pair up again.
    let pair = |s: &[u32], i: usize, j: usize| table.get(&key(s[i], s[j])).copied();
    let candidate = |m: Merge, i: usize| Reverse(u64::from(m.rank) << 32 | i as u64);
    let start: Vec<_> = (1..n).filter_map(|j| pair(s, j - 1, j).map(|m| candidate(m, j - 1))).collect();
    let mut heap = BinaryHeap::from(start);
    while let Some(Reverse(best)) = heap.pop() {
        let (rank, i) = ((best >> 32) as u32, (best & 0xffff_ffff) as usize);
        let j = next[i] as usize;
        // A joined symbol points to itself.
        if j >= n || j == i {
            continue;
        }
        let Some(m) = pair(s, i, j).filter(|m| m.rank == rank) else { continue };
        s[i] = m.id;
        let after = next[j] as usize;
        next[i] = next[j];
        next[j] = j as u32;
        if after < n {
            prev[after] = i as u32;
            heap.extend(pair(s, i, after).map(|m| candidate(m, i)));
        }
        let before = prev[i] as usize;
        if before < n {
            heap.extend(pair(s, before, i).map(|m| candidate(m, before)));
        }
    }
    let mut i = 0;
    while i < n {
        out.push(s[i]);
        i = next[i] as usize;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Merges by looking for the best pair anew each time: the definition.
    fn plain(table: &Table, s: &mut Vec<u32>) {
        let best = |s: &[u32]| {
            s.windows(2)
                .enumerate()
                .filter_map(|(i, w)| table.get(&key(w[0], w[1])).map(|m| (m.rank, i, m.id)))
                .min()
        };
        while let Some((_, i, id)) = best(s) {
            s[i] = id;
            s.remove(i + 1);
        }
    }

    proptest::proptest! {
        /// Random tables over few symbols, so that merges overlap in every way.
        #[test]
        fn both_ways_are_the_definition(
            merges in proptest::collection::vec((0u32..12, 0u32..12), 1..40),
            text in proptest::collection::vec(0u32..4, 0..80),
        ) {
            let mut table = Table::default();
            for (rank, (a, b)) in merges.iter().enumerate() {
                table.entry(key(*a, *b)).or_insert(Merge { rank: rank as u32, id: 4 + rank as u32 % 8 });
            }
            let mut want = text.clone();
            plain(&table, &mut want);
            let mut long = Vec::new();
            merge_long(&table, &mut text.clone(), &mut long);
            proptest::prop_assert_eq!(&long, &want);
            if text.len() <= SHORT {
                let mut short = text.clone();
                merge_short(&table, &mut short);
                proptest::prop_assert_eq!(&short, &want);
            }
        }
    }
}
