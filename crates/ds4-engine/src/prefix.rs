//! The prefix tree: which token sequences have a checkpoint, so that a prompt continues from the longest of them.
//!
//! A radix tree over token ids. Every node ends an edge of ids; a node may hold the checkpoint of the sequence that leads
//! to it. A checkpoint alone is enough to continue: it names the pages of all rows before it.

use std::collections::HashMap;

use ds4_model::PageId;
use ds4_text::{TokenKind, Tokenizer};

use crate::stage::{CheckpointId, Mark};

/// A kept frontier, and the pages of the rows before it (each held once).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Checkpoint {
    pub id: CheckpointId,
    pub mark: Mark,
    pub pages: Vec<PageId>,
}

#[derive(Debug)]
struct Node {
    /// Ids from the parent's end to this node's.
    edge: Vec<u32>,
    /// Length of the whole sequence.
    end: usize,
    parent: usize,
    /// By the first id of their edges.
    children: HashMap<u32, usize>,
    checkpoint: Option<Checkpoint>,
    /// When it was last used, on the tree's clock.
    used: u64,
    hits: u32,
}

const ROOT: usize = 0;

#[derive(Debug)]
pub struct PrefixTree {
    nodes: Vec<Option<Node>>,
    vacant: Vec<usize>,
    clock: u64,
    checkpoints: usize,
}

impl Default for PrefixTree {
    fn default() -> Self {
        let root = Node {
            edge: Vec::new(),
            end: 0,
            parent: ROOT,
            children: HashMap::new(),
            checkpoint: None,
            used: 0,
            hits: 0,
        };
        PrefixTree { nodes: vec![Some(root)], vacant: Vec::new(), clock: 0, checkpoints: 0 }
    }
}

/// Where a walk along a token sequence ended.
struct Walk {
    /// The deepest node that is a prefix of the sequence.
    node: usize,
    /// Ids of the edge below it that match as well, and that child.
    within: Option<(usize, usize)>,
}

impl PrefixTree {
    /// Checkpoints held.
    pub fn len(&self) -> usize {
        self.checkpoints
    }

    pub fn is_empty(&self) -> bool {
        self.checkpoints == 0
    }

    fn node(&self, at: usize) -> &Node {
        self.nodes[at].as_ref().unwrap_or_else(|| unreachable!("node {at} is linked but vacant"))
    }

    fn node_mut(&mut self, at: usize) -> &mut Node {
        self.nodes[at].as_mut().unwrap_or_else(|| unreachable!("node {at} is linked but vacant"))
    }

    fn walk(&self, tokens: &[u32]) -> Walk {
        let mut node = ROOT;
        loop {
            let rest = &tokens[self.node(node).end..];
            let Some(&child) = rest.first().and_then(|t| self.node(node).children.get(t)) else {
                return Walk { node, within: None };
            };
            let edge = &self.node(child).edge;
            let same = common(edge, rest);
            if same < edge.len() {
                return Walk { node, within: Some((child, same)) };
            }
            node = child;
        }
    }

    /// The longest checkpoint of a prefix of `tokens` that has at most `limit` ids.
    fn longest_node(&self, tokens: &[u32], limit: usize) -> Option<usize> {
        let mut at = self.walk(&tokens[..limit.min(tokens.len())]).node;
        loop {
            if self.node(at).checkpoint.is_some() {
                return Some(at);
            }
            if at == ROOT {
                return None;
            }
            at = self.node(at).parent;
        }
    }

    /// Ids that [`PrefixTree::longest`] would reuse, without counting as a use.
    pub fn reusable(&self, tokens: &[u32], limit: usize) -> usize {
        self.longest_node(tokens, limit).map_or(0, |at| self.node(at).end)
    }

    /// The longest checkpoint of a prefix of `tokens` that has at most `limit` ids.
    pub fn longest(&mut self, tokens: &[u32], limit: usize) -> Option<&Checkpoint> {
        let at = self.longest_node(tokens, limit)?;
        self.clock += 1;
        let clock = self.clock;
        let node = self.node_mut(at);
        node.used = clock;
        node.hits += 1;
        node.checkpoint.as_ref()
    }

    fn exact(&self, tokens: &[u32]) -> Option<usize> {
        let Walk { node, within: None } = self.walk(tokens) else { return None };
        (self.node(node).end == tokens.len() && self.node(node).checkpoint.is_some()).then_some(node)
    }

    /// The checkpoint of exactly `tokens`.
    pub fn get(&self, tokens: &[u32]) -> Option<&Checkpoint> {
        self.node(self.exact(tokens)?).checkpoint.as_ref()
    }

    pub fn contains(&self, tokens: &[u32]) -> bool {
        self.exact(tokens).is_some()
    }

    /// Takes out the checkpoint of exactly `tokens`.
    pub fn remove(&mut self, tokens: &[u32]) -> Option<Checkpoint> {
        self.take(self.exact(tokens)?)
    }

    /// Adds the checkpoint of `tokens` (not empty). Returns the one that it takes the place of.
    pub fn insert(&mut self, tokens: &[u32], checkpoint: Checkpoint) -> Option<Checkpoint> {
        debug_assert_eq!(tokens.len(), checkpoint.mark.pos);
        let at = self.make(tokens);
        self.clock += 1;
        let clock = self.clock;
        let node = self.node_mut(at);
        node.used = clock;
        let old = node.checkpoint.replace(checkpoint);
        if old.is_none() {
            self.checkpoints += 1;
        }
        old
    }

    /// The node of exactly `tokens`.
    fn make(&mut self, tokens: &[u32]) -> usize {
        let walk = self.walk(tokens);
        let mut at = walk.node;
        if let Some((child, same)) = walk.within {
            at = self.split(child, same);
        }
        let end = self.node(at).end;
        if end == tokens.len() {
            return at;
        }
        self.add(at, tokens[end..].to_vec(), tokens.len())
    }

    fn add(&mut self, parent: usize, edge: Vec<u32>, end: usize) -> usize {
        let first = edge[0];
        let node =
            Node { edge, end, parent, children: HashMap::new(), checkpoint: None, used: self.clock, hits: 0 };
        let at = match self.vacant.pop() {
            Some(at) => {
                self.nodes[at] = Some(node);
                at
            }
            None => {
                self.nodes.push(Some(node));
                self.nodes.len() - 1
            }
        };
        self.node_mut(parent).children.insert(first, at);
        at
    }

    /// Puts a node after the first `same` ids of `child`'s edge.
    fn split(&mut self, child: usize, same: usize) -> usize {
        let (parent, start) = (self.node(child).parent, self.node(child).end - self.node(child).edge.len());
        let tail = self.node_mut(child).edge.split_off(same);
        let head = std::mem::replace(&mut self.node_mut(child).edge, tail);
        let middle = self.add(parent, head, start + same);
        let first = self.node(child).edge[0];
        self.node_mut(middle).children.insert(first, child);
        self.node_mut(child).parent = middle;
        middle
    }

    /// Takes out the checkpoint that is worth least: few tokens saved, long unused, never hit.
    pub fn evict(&mut self) -> Option<Checkpoint> {
        let worth = |at: usize, node: &Node| {
            let saved = node.end - self.checkpoint_above(at);
            let age = self.clock - node.used + 1;
            saved as f64 * f64::from(1 + node.hits) / age as f64
        };
        let least = self
            .nodes
            .iter()
            .enumerate()
            .filter_map(|(at, n)| n.as_ref().map(|n| (at, n)))
            .filter(|(_, n)| n.checkpoint.is_some())
            .map(|(at, n)| (at, worth(at, n)))
            .min_by(|a, b| a.1.total_cmp(&b.1))?
            .0;
        self.take(least)
    }

    /// Length of the longest checkpoint of a shorter prefix of the node.
    fn checkpoint_above(&self, mut at: usize) -> usize {
        while at != ROOT {
            at = self.node(at).parent;
            if self.node(at).checkpoint.is_some() {
                return self.node(at).end;
            }
        }
        0
    }

    fn take(&mut self, mut at: usize) -> Option<Checkpoint> {
        let checkpoint = self.node_mut(at).checkpoint.take()?;
        self.checkpoints -= 1;
        // Nodes that lead nowhere go too.
        while at != ROOT && self.node(at).checkpoint.is_none() && self.node(at).children.is_empty() {
            let (parent, first) = (self.node(at).parent, self.node(at).edge[0]);
            self.node_mut(parent).children.remove(&first);
            self.nodes[at] = None;
            self.vacant.push(at);
            at = parent;
        }
        Some(checkpoint)
    }

    /// Takes out every checkpoint.
    pub fn clear(&mut self) -> Vec<Checkpoint> {
        let old = std::mem::take(self);
        old.nodes.into_iter().flatten().filter_map(|n| n.checkpoint).collect()
    }

    /// Replaces ids of `tokens` by ids that the tree knows, where they spell the same bytes: a client renders the
    /// history anew, and its text may tokenise differently where an answer was sampled. Control tokens only match
    /// themselves.
    pub fn adopt(&self, tokens: &[u32], tokenizer: &Tokenizer) -> Vec<u32> {
        let mut out = tokens.to_vec();
        for _ in 0..SEAMS_MAX {
            // Follow the ids as far as they match, then the bytes.
            let walk = self.walk(&out);
            let (node, at) = walk.within.unwrap_or((walk.node, self.node(walk.node).edge.len()));
            let matched = self.node(node).end - self.node(node).edge.len() + at;
            let Some((ids, theirs)) = self.spelled(node, at, &out[matched..], tokenizer) else { break };
            out.splice(matched..matched + theirs, ids);
        }
        out
    }

    /// From `at` ids into the edge of `node` on: known ids that spell the same bytes as the first ids of `rest`, up to
    /// the first place where both end a token; and how many of `rest` those are.
    fn spelled(
        &self,
        node: usize,
        at: usize,
        rest: &[u32],
        tokenizer: &Tokenizer,
    ) -> Option<(Vec<u32>, usize)> {
        let bytes = |t: u32| match tokenizer.kind(t) {
            TokenKind::Control => &[],
            _ => tokenizer.token_bytes(t),
        };
        // Depth first over the few branches there are.
        let mut open = vec![Seam { node, at, ..Seam::default() }];
        while let Some(seam) = open.pop() {
            if !seam.ids.is_empty() && seam.ahead.is_empty() {
                return Some((seam.ids, seam.theirs));
            }
            if seam.ids.len() >= SEAM_TOKENS_MAX {
                continue;
            }
            let nexts: Vec<(usize, usize)> = match seam.at < self.node(seam.node).edge.len() {
                true => vec![(seam.node, seam.at)],
                false => self.node(seam.node).children.values().map(|&child| (child, 0)).collect(),
            };
            for (node, at) in nexts {
                let id = self.node(node).edge[at];
                let mut next = Seam { node, at: at + 1, ..seam.clone() };
                next.ids.push(id);
                next.ahead.extend_from_slice(bytes(id));
                if !bytes(id).is_empty() && next.catch_up(rest, &bytes) {
                    open.push(next);
                }
            }
        }
        None
    }
}

/// Re-tokenised stretches of one prompt, and tokens of one of them.
const SEAMS_MAX: usize = 256;
const SEAM_TOKENS_MAX: usize = 64;

/// A walk along known ids whose bytes agree with a prompt's.
#[derive(Clone, Default)]
struct Seam {
    node: usize,
    at: usize,
    ids: Vec<u32>,
    /// The prompt's ids that are spelled so far.
    theirs: usize,
    /// Bytes of `ids` beyond those.
    ahead: Vec<u8>,
}

impl Seam {
    /// Takes the prompt's ids that the bytes ahead spell. `false`: they spell something else.
    fn catch_up<'t>(&mut self, rest: &[u32], bytes: &impl Fn(u32) -> &'t [u8]) -> bool {
        while !self.ahead.is_empty() {
            let next = rest.get(self.theirs).map_or(&[][..], |&t| bytes(t));
            if next.is_empty() {
                return false;
            }
            if !self.ahead.starts_with(next) {
                return next.starts_with(&self.ahead);
            }
            self.ahead.drain(..next.len());
            self.theirs += 1;
        }
        true
    }
}

/// Ids that both begin with.
pub fn common(a: &[u32], b: &[u32]) -> usize {
    a.iter().zip(b).take_while(|(x, y)| x == y).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checkpoint(tokens: &[u32], id: CheckpointId) -> Checkpoint {
        Checkpoint { id, mark: Mark::default().extend(tokens), pages: Vec::new() }
    }

    fn add(tree: &mut PrefixTree, tokens: &[u32], id: CheckpointId) {
        assert_eq!(tree.insert(tokens, checkpoint(tokens, id)), None);
    }

    #[test]
    fn the_longest_prefix_is_found_and_no_longer_than_asked() {
        let mut t = PrefixTree::default();
        add(&mut t, &[1, 2, 3, 4, 5], 0);
        add(&mut t, &[1, 2, 3], 1);
        add(&mut t, &[1, 2, 7], 2);
        let mut find = |tokens: &[u32], limit| t.longest(tokens, limit).map(|c| c.id);
        assert_eq!(find(&[1, 2, 3, 4, 5, 6], 6), Some(0));
        assert_eq!(find(&[1, 2, 3, 4, 5], 4), Some(1));
        assert_eq!(find(&[1, 2, 3, 9], 4), Some(1));
        assert_eq!(find(&[1, 2, 7, 7], 4), Some(2));
        assert_eq!(find(&[1, 2], 2), None);
        assert_eq!(find(&[2], 1), None);
        // The same tokens again take the place of the old.
        assert_eq!(t.insert(&[1, 2, 3], checkpoint(&[1, 2, 3], 9)).map(|c| c.id), Some(1));
        assert_eq!(t.len(), 3);
    }

    #[test]
    fn what_is_worth_least_goes_first_and_leaves_no_nodes() {
        let mut t = PrefixTree::default();
        let long: Vec<u32> = (0..2000).collect();
        add(&mut t, &long[..1000], 0);
        add(&mut t, &long[..1010], 1);
        add(&mut t, &long[..2000], 2);
        for _ in 0..3 {
            t.longest(&long, 1005);
        }
        // Ten rows beyond the one before, never used.
        assert_eq!(t.evict().map(|c| c.id), Some(1));
        assert_eq!(t.evict().map(|c| c.id), Some(2));
        assert_eq!(t.evict().map(|c| c.id), Some(0));
        assert_eq!(t.evict(), None);
        assert_eq!(t.nodes.iter().flatten().count(), 1);
    }

    #[test]
    fn random_trees_agree_with_a_list() {
        let mut rng = ds4_testdata::Rng(5);
        let mut t = PrefixTree::default();
        let mut list: Vec<(Vec<u32>, CheckpointId)> = Vec::new();
        let sequence = |rng: &mut ds4_testdata::Rng| -> Vec<u32> {
            (0..1 + rng.below(9)).map(|_| rng.below(3) as u32).collect()
        };
        for id in 0..4000 {
            let tokens = sequence(&mut rng);
            match rng.below(4) {
                0 if !list.is_empty() => {
                    let (tokens, id) = list.swap_remove(rng.below(list.len()));
                    assert_eq!(t.remove(&tokens).map(|c| c.id), Some(id));
                }
                1 => {
                    if let Some(c) = t.evict() {
                        list.retain(|(_, id)| *id != c.id);
                    }
                }
                _ => {
                    t.insert(&tokens, checkpoint(&tokens, id));
                    list.retain(|(known, _)| *known != tokens);
                    list.push((tokens, id));
                }
            }
            assert_eq!(t.len(), list.len());
            let ask = sequence(&mut rng);
            let limit = rng.below(ask.len() + 1);
            let want = list
                .iter()
                .filter(|(k, _)| k.len() <= limit && ask.starts_with(k))
                .max_by_key(|(k, _)| k.len());
            assert_eq!(t.longest(&ask, limit).map(|c| c.id), want.map(|w| w.1));
        }
    }

    #[test]
    fn a_history_that_tokenises_differently_keeps_the_sampled_tokens() {
        let gguf = ds4_gguf::Gguf::open(&ds4_testdata::tiny_model()).unwrap();
        let tk = Tokenizer::from_gguf(gguf.metadata()).unwrap();
        let text = "the compressed model keeps a window";
        let canonical = tk.encode(text);
        // As a model may have sampled it: byte by byte in the middle.
        let at = (1..canonical.len()).find(|&i| tk.token_bytes(canonical[i]).len() > 1).unwrap();
        let middle: Vec<u32> = tk
            .token_bytes(canonical[at])
            .iter()
            .map(|b| (0..tk.len() as u32).find(|&t| tk.token_bytes(t) == [*b]).unwrap())
            .collect();
        assert!(middle.len() > 1, "{canonical:?}");
        let sampled = [&canonical[..at], &middle, &canonical[at + 1..]].concat();
        let mut t = PrefixTree::default();
        add(&mut t, &sampled, 0);
        let next = [&canonical[..], &tk.encode(" and more")].concat();
        let adopted = t.adopt(&next, &tk);
        assert_eq!(tk.decode(&adopted), tk.decode(&next));
        assert!(adopted.starts_with(&sampled));
        assert_eq!(t.longest(&adopted, adopted.len() - 1).map(|c| c.id), Some(0));
        // Other text stays as it is.
        let other = tk.encode("the compressed modell");
        assert_eq!(tk.decode(&t.adopt(&other, &tk)), tk.decode(&other));
        // A control token is never taken for the text that spells it.
        let eos = tk.special(ds4_text::chat::EOS).unwrap();
        let mut t = PrefixTree::default();
        add(&mut t, &[canonical[0], eos, canonical[1]], 0);
        let spelled = [&canonical[..1], &tk.encode(ds4_text::chat::EOS), &canonical[1..]].concat();
        assert_eq!(t.adopt(&spelled, &tk), spelled);
    }
}
