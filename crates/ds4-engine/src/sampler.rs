//! From logits to a token. Runs where the output head is, so that a token travels instead of a row of logits; what it
//! draws depends on the request's seed and the token's place alone.

use std::cmp::Ordering;
use std::collections::BinaryHeap;

/// What is wanted of one output row.
#[derive(Clone, Debug, PartialEq)]
pub struct Want {
    pub choose: Choose,
    /// So many most likely tokens with their log-probabilities.
    pub top: usize,
}

#[derive(Clone, Debug, PartialEq)]
pub enum Choose {
    Sample(Sampling),
    /// The log-probability of this token.
    Given(u32),
    /// The whole row of logits.
    Logits,
}

/// How to draw the next token. The filters apply in the order of the fields.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampling {
    /// Added to the logits of these tokens before anything else: bias and penalties.
    pub adjust: Vec<(u32, f32)>,
    /// 0: the most likely token, the lowest id where several are.
    pub temperature: f32,
    /// Only so many most likely tokens; 0: all.
    pub top_k: usize,
    /// Only the most likely tokens that together reach this probability; 1: all.
    pub top_p: f32,
    /// Only tokens at least so probable as this share of the most likely one's probability; 0: all.
    pub min_p: f32,
    pub seed: u64,
    /// Place of the token in its sequence.
    pub place: u64,
}

impl Sampling {
    pub fn greedy() -> Self {
        Sampling { adjust: Vec::new(), temperature: 0.0, top_k: 0, top_p: 1.0, min_p: 0.0, seed: 0, place: 0 }
    }
}

/// The answer to a [`Want`].
#[derive(Clone, Debug, PartialEq)]
pub enum RowResult {
    Token(Chosen),
    Logits(Vec<f32>),
}

/// A token with its log-probability under the model's own distribution (no temperature, filters or adjustments).
#[derive(Clone, Debug, PartialEq)]
pub struct Chosen {
    pub token: u32,
    pub logprob: f32,
    /// The most likely tokens, best first.
    pub top: Vec<(u32, f32)>,
}

/// SplitMix64's output function on its next state (Steele, Lea, Flood 2014).
pub fn split_mix(x: u64) -> u64 {
    let mut z = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// A candidate, ordered by logit, then towards the lower id.
#[derive(Clone, Copy, PartialEq)]
struct Candidate {
    logit: f32,
    token: u32,
}

impl Eq for Candidate {}

impl PartialOrd for Candidate {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Candidate {
    fn cmp(&self, other: &Self) -> Ordering {
        self.logit.total_cmp(&other.logit).then(other.token.cmp(&self.token))
    }
}

/// Scratch for one row at a time; allocates nothing once it has seen the vocabulary.
#[derive(Default)]
pub struct Sampler {
    adjusted: Vec<f32>,
    candidates: Vec<Candidate>,
    kept: Vec<Candidate>,
}

impl Sampler {
    /// Room for rows of `vocab` logits.
    pub fn new(vocab: usize) -> Self {
        Sampler {
            adjusted: Vec::with_capacity(vocab),
            candidates: Vec::with_capacity(vocab),
            kept: Vec::with_capacity(vocab),
        }
    }

    /// Answers `want` from a row of finite logits.
    pub fn answer(&mut self, logits: &[f32], want: &Want) -> RowResult {
        let token = match &want.choose {
            Choose::Logits => return RowResult::Logits(logits.to_vec()),
            Choose::Given(token) => *token,
            Choose::Sample(s) => self.sample(logits, s, None),
        };
        RowResult::Token(self.describe(logits, token, want.top))
    }

    /// The token's log-probability and the `top` best, all under the unchanged distribution.
    pub fn describe(&mut self, logits: &[f32], token: u32, top: usize) -> Chosen {
        let norm = log_sum_exp(logits);
        let logprob =
            |t: u32| logits.get(t as usize).map_or(f32::NEG_INFINITY, |&l| (f64::from(l) - norm) as f32);
        let mut best = Vec::new();
        if top > 0 {
            let mut heap = self.heap(logits, None);
            best.extend(std::iter::from_fn(|| heap.pop()).take(top).map(|c| (c.token, logprob(c.token))));
            self.candidates = heap.into_vec();
        }
        Chosen { token, logprob: logprob(token), top: best }
    }

    /// Draws a token among those that `allowed` (if any; one bit per id, 32 to a word) permits.
    pub fn sample(&mut self, logits: &[f32], s: &Sampling, allowed: Option<&[u32]>) -> u32 {
        let mut adjusted = std::mem::take(&mut self.adjusted);
        adjusted.clear();
        adjusted.extend_from_slice(logits);
        for &(token, delta) in &s.adjust {
            if let Some(l) = adjusted.get_mut(token as usize) {
                *l += delta;
            }
        }
        let token =
            if s.temperature <= 0.0 { best(&adjusted, allowed) } else { self.draw(&adjusted, s, allowed) };
        self.adjusted = adjusted;
        token
    }

    fn draw(&mut self, logits: &[f32], s: &Sampling, allowed: Option<&[u32]>) -> u32 {
        // Best first, lazily: few candidates are ever popped.
        let mut heap = self.heap(logits, allowed);
        let Some(first) = heap.peek().copied() else { return best(logits, allowed) };
        let weight = |c: &Candidate| (f64::from(c.logit - first.logit) / f64::from(s.temperature)).exp();
        let mut kept = std::mem::take(&mut self.kept);
        kept.clear();
        let count = if s.top_k == 0 { heap.len() } else { s.top_k.min(heap.len()) };
        // top_p is a share of what top_k left.
        let total: f64 = match count == heap.len() {
            true => heap.iter().map(&weight).sum(),
            false => {
                kept.extend(std::iter::from_fn(|| heap.pop()).take(count));
                let sum = kept.iter().map(&weight).sum();
                heap.extend(kept.drain(..));
                sum
            }
        };
        let mut sum = 0.0;
        while kept.len() < count {
            let Some(c) = heap.pop() else { break };
            let w = weight(&c);
            if !kept.is_empty() && (sum >= f64::from(s.top_p) * total || w < f64::from(s.min_p)) {
                break;
            }
            sum += w;
            kept.push(c);
        }
        let unit = (split_mix(split_mix(s.seed) ^ s.place) >> 11) as f64 / (1u64 << 53) as f64;
        let mut left = unit * sum;
        let mut token = first.token;
        for c in &kept {
            token = c.token;
            left -= weight(c);
            if left < 0.0 {
                break;
            }
        }
        self.kept = kept;
        self.candidates = heap.into_vec();
        token
    }

    fn heap(&mut self, logits: &[f32], allowed: Option<&[u32]>) -> BinaryHeap<Candidate> {
        let mut all = std::mem::take(&mut self.candidates);
        all.clear();
        let candidates = logits.iter().enumerate().map(|(i, &logit)| Candidate { logit, token: i as u32 });
        all.extend(candidates.filter(|c| permits(allowed, c.token)));
        BinaryHeap::from(all)
    }
}

fn permits(allowed: Option<&[u32]>, token: u32) -> bool {
    allowed.is_none_or(|bits| bits.get(token as usize / 32).is_some_and(|w| w >> (token % 32) & 1 == 1))
}

fn best(logits: &[f32], allowed: Option<&[u32]>) -> u32 {
    let candidates = logits.iter().enumerate().map(|(i, &logit)| Candidate { logit, token: i as u32 });
    candidates.filter(|c| permits(allowed, c.token)).max().map_or(0, |c| c.token)
}

fn log_sum_exp(logits: &[f32]) -> f64 {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|&l| f64::from(l - max).exp()).sum();
    f64::from(max) + sum.ln()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sampling(temperature: f32) -> Sampling {
        Sampling { temperature, seed: 7, ..Sampling::greedy() }
    }

    #[test]
    fn greedy_takes_the_lowest_of_equals() {
        let mut s = Sampler::new(4);
        assert_eq!(s.sample(&[1.0, 3.0, 3.0, 2.0], &Sampling::greedy(), None), 1);
        assert_eq!(s.sample(&[1.0, 3.0, 3.0, 2.0], &Sampling::greedy(), Some(&[0b1100])), 2);
        let biased = Sampling { adjust: vec![(0, 5.0)], ..Sampling::greedy() };
        assert_eq!(s.sample(&[1.0, 3.0, 3.0, 2.0], &biased, None), 0);
    }

    #[test]
    fn draws_follow_the_distribution() {
        let logits: Vec<f32> = [0.5f32, 0.25, 0.125, 0.125].iter().map(|p| p.ln()).collect();
        let mut s = Sampler::new(4);
        let mut counts = [0u32; 4];
        let n = 40_000;
        for place in 0..n {
            counts[s.sample(&logits, &Sampling { place, ..sampling(1.0) }, None) as usize] += 1;
        }
        for (count, p) in counts.iter().zip([0.5, 0.25, 0.125, 0.125]) {
            let share = f64::from(*count) / n as f64;
            // Five standard deviations of the widest share.
            assert!((share - p).abs() < 0.0125, "{counts:?}");
        }
    }

    #[test]
    fn filters_keep_what_they_say() {
        let logits: Vec<f32> = [0.5f32, 0.25, 0.125, 0.125].iter().map(|p| p.ln()).collect();
        let mut s = Sampler::new(4);
        let mut seen = |f: &dyn Fn(&mut Sampling)| {
            let mut seen = [false; 4];
            for place in 0..500 {
                let mut how = Sampling { place, ..sampling(1.0) };
                f(&mut how);
                seen[s.sample(&logits, &how, None) as usize] = true;
            }
            seen
        };
        assert_eq!(seen(&|_| ()), [true; 4]);
        assert_eq!(seen(&|h| h.top_k = 1), [true, false, false, false]);
        assert_eq!(seen(&|h| h.top_k = 3), [true, true, true, false]);
        assert_eq!(seen(&|h| h.top_p = 0.5), [true, false, false, false]);
        assert_eq!(seen(&|h| h.top_p = 0.6), [true, true, false, false]);
        assert_eq!(seen(&|h| h.min_p = 0.4), [true, true, false, false]);
        // Of the two that top_k leaves, the first alone reaches 0.6 (0.5 of 0.75).
        assert_eq!(seen(&|h| (h.top_k, h.top_p) = (2, 0.6)), [true, false, false, false]);
    }

    #[test]
    fn log_probabilities_are_the_models() {
        let mut s = Sampler::new(3);
        let logits = [2f32, 1.0, 0.0];
        let want = Want { choose: Choose::Given(2), top: 2 };
        let RowResult::Token(c) = s.answer(&logits, &want) else { panic!() };
        let sum: f64 = logits.iter().map(|&l| f64::from(l).exp()).sum();
        assert!((f64::from(c.logprob) + sum.ln()).abs() < 1e-6);
        assert_eq!(c.top.iter().map(|t| t.0).collect::<Vec<_>>(), [0, 1]);
    }
}
