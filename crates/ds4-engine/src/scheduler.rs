//! What runs next: sequences get slots and pages, steps get rows.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use ds4_model::{KvLayout, Outputs, PAGE_TOKENS, PageId, Slot};
use ds4_text::Tokenizer;

use crate::pages::Pages;
use crate::persist::Read;
use crate::prefix::{Checkpoint, PrefixTree, common};
use crate::sequence::{Place, Sequence};
use crate::snapshot::Snapshot;
use crate::stage::{CheckpointId, Mark, StageLimits, StateOp, Step};

/// Tokens between automatic checkpoints; a multiple of [`PAGE_TOKENS`], where no compressor window is unfinished.
pub const CHECKPOINT_TOKENS: usize = 1024;
const _: () = assert!(CHECKPOINT_TOKENS.is_multiple_of(PAGE_TOKENS));
/// Message boundaries nearer than this to the checkpoint before them get none, save the last two.
const BOUNDARY_GAP: usize = 256;
/// A waiting request waits on for a running one that evaluates so many tokens of its prompt.
const SHARED_MIN: usize = 128;

/// The rows of one sequence in a step.
#[derive(Debug)]
pub(crate) struct Work {
    pub key: u64,
    /// Positions.
    pub from: usize,
    pub to: usize,
    pub outputs: WorkOutputs,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WorkOutputs {
    None,
    /// The next token.
    Next,
    /// The log-probability of each following prompt token.
    Prompt,
}

/// A checkpoint that a step saves.
#[derive(Debug)]
pub(crate) struct Save {
    pub tokens: Vec<u32>,
    /// Whether it is worth a file.
    pub to_disk: bool,
}

/// What a step under way is for.
#[derive(Debug, Default)]
pub(crate) struct Plan {
    pub work: Vec<Work>,
    /// Sequences whose checkpoints the step saves. They are in the tree already: steps run in order, so a later one
    /// may load what an earlier one saves.
    pub saves: Vec<Save>,
    /// What its read operations are for.
    pub reads: Vec<Read>,
}

pub(crate) struct Scheduler {
    limits: StageLimits,
    /// Prefill rows beside decode rows.
    quantum: usize,
    /// Stages that decode rows are spread over.
    stages: usize,
    pub pages: Pages,
    pub tree: PrefixTree,
    free_checkpoints: Vec<CheckpointId>,
    free_slots: Vec<Slot>,
    pub waiting: VecDeque<Sequence>,
    /// In order of arrival.
    pub running: Vec<Sequence>,
    /// Operations for the next step, in the order they were decided.
    before: Vec<StateOp>,
    saves: Vec<Save>,
    /// A page was wanted in vain since this was last looked at.
    pub short_of_pages: bool,
}

impl Scheduler {
    pub fn new(limits: StageLimits, quantum: usize, stages: usize) -> Self {
        Scheduler {
            limits,
            quantum,
            stages,
            pages: Pages::new(limits.model.pages),
            tree: PrefixTree::default(),
            free_checkpoints: (0..limits.checkpoints as CheckpointId).rev().collect(),
            free_slots: (0..limits.model.slots as Slot).rev().collect(),
            waiting: VecDeque::new(),
            running: Vec::new(),
            before: Vec::new(),
            saves: Vec::new(),
            short_of_pages: false,
        }
    }

    pub fn checkpoints_used(&self) -> usize {
        self.limits.checkpoints - self.free_checkpoints.len()
    }

    /// Queues a sequence behind those of its priority.
    pub fn enqueue(&mut self, sequence: Sequence) {
        let priority = sequence.request.priority;
        let at = self.waiting.iter().position(|s| s.request.priority < priority);
        self.waiting.insert(at.unwrap_or(self.waiting.len()), sequence);
    }

    /// Gives free slots to waiting sequences. Returns the time that each of those that start now has waited, and the
    /// prompt tokens that it reuses.
    pub fn admit(&mut self, tokenizer: &Tokenizer) -> Vec<(Duration, usize)> {
        let mut started = Vec::new();
        let mut at = 0;
        while at < self.waiting.len() && !self.free_slots.is_empty() {
            if self.waiting[at].awaits.is_some() || self.waits_for_shared(&self.waiting[at]) {
                at += 1;
                continue;
            }
            let Some(mut sequence) = self.waiting.remove(at) else { break };
            if sequence.reads_cache() && sequence.generated() == 0 {
                sequence.tokens = self.tree.adopt(&sequence.tokens, tokenizer);
                sequence.prompt_len = sequence.tokens.len();
            }
            if !self.place(&mut sequence) {
                self.waiting.insert(at, sequence);
                break;
            }
            if sequence.started.is_none() {
                sequence.started = Some(Instant::now());
                started.push((sequence.submitted.elapsed(), sequence.reused.unwrap_or(0)));
            }
            sequence.tell_prefill(sequence.reused.unwrap_or(0));
            self.running.push(sequence);
        }
        self.waiting.iter_mut().enumerate().for_each(|(i, s)| s.tell_ahead(i));
        started
    }

    /// Whether a running sequence is evaluating a good part of this one's prompt.
    fn waits_for_shared(&self, sequence: &Sequence) -> bool {
        if !sequence.reads_cache() {
            return false;
        }
        let limit = sequence.tokens.len() - 1;
        let shared = |r: &Sequence| {
            let place = r.place.as_ref().filter(|_| r.request.cache)?;
            let same = common(&r.tokens, &sequence.tokens).min(r.prompt_len - 1).min(limit);
            (place.at.pos < same).then_some(same)
        };
        let shared = self.running.iter().filter_map(shared).max().unwrap_or(0);
        shared >= SHARED_MIN && shared >= self.tree.reusable(&sequence.tokens, limit) + SHARED_MIN
    }

    /// Sets a sequence up in a slot, from the longest checkpoint of its tokens. `false`: no room yet.
    fn place(&mut self, sequence: &mut Sequence) -> bool {
        let Some(slot) = self.free_slots.pop() else { return false };
        let limit = sequence.tokens.len() - 1;
        let found =
            if sequence.reads_cache() { self.tree.longest(&sequence.tokens, limit).cloned() } else { None };
        let mut at = Mark::default();
        let mut pages = Vec::new();
        if let Some(c) = found {
            // The last page may have rows of others behind ours: this sequence writes into a copy.
            pages.extend_from_slice(&c.pages);
            self.pages.hold(&pages);
            if !c.mark.pos.is_multiple_of(PAGE_TOKENS) {
                let Some(copy) = self.take_page() else {
                    self.pages.release(&pages);
                    self.free_slots.push(slot);
                    return false;
                };
                let last = pages.len() - 1;
                let from = std::mem::replace(&mut pages[last], copy);
                self.before.push(StateOp::CopyPage { from, to: copy });
                self.pages.release(&[from]);
            }
            self.before.push(StateOp::LoadCheckpoint { slot, id: c.id });
            at = c.mark;
        } else {
            self.before.push(StateOp::Reset { slot });
        }
        if !pages.is_empty() {
            self.before.push(StateOp::SetPages { slot, first: 0, pages: pages.clone() });
        }
        sequence.reused.get_or_insert(at.pos.min(sequence.request.prompt.len()));
        sequence.place = Some(Place { slot, pages, at, settled: at.pos });
        true
    }

    /// A page, at the cost of the checkpoints that are worth least.
    fn take_page(&mut self) -> Option<PageId> {
        loop {
            if let Some(page) = self.pages.take() {
                return Some(page);
            }
            let Some(evicted) = self.tree.evict() else {
                self.short_of_pages = true;
                return None;
            };
            self.drop_checkpoint(evicted);
        }
    }

    fn take_checkpoint(&mut self) -> Option<CheckpointId> {
        if self.free_checkpoints.is_empty() {
            let evicted = self.tree.evict()?;
            self.drop_checkpoint(evicted);
        }
        self.free_checkpoints.pop()
    }

    fn drop_checkpoint(&mut self, checkpoint: Checkpoint) {
        self.pages.release(&checkpoint.pages);
        self.free_checkpoints.push(checkpoint.id);
    }

    /// Whether operations wait for a step to ride in.
    pub fn has_operations(&self) -> bool {
        !self.before.is_empty()
    }

    /// Whether a step could be made at once.
    pub fn has_work(&self) -> bool {
        let startable = !self.free_slots.is_empty() && self.waiting.iter().any(|s| s.awaits.is_none());
        let ready = |s: &Sequence| rows_left(s) > 1 || (rows_left(s) == 1 && s.has_room());
        self.has_operations() || startable || self.running.iter().any(ready)
    }

    /// The next step, if there is anything to do. `in_flight`: steps that are under way.
    pub fn schedule(&mut self, in_flight: usize) -> Option<(Step, Plan)> {
        let mut step = Step::default();
        let mut plan = Plan::default();
        let rows_max = self.limits.model.rows;

        let decoding = self.running.iter().filter(|s| rows_left(s) <= 1).count();
        // A step without decode rows would hold up the sequences that wait for the one under way.
        if decoding > 0 && in_flight >= self.stages {
            return None;
        }
        let spread = decoding.div_ceil(self.stages);
        let ready = |s: &Sequence| rows_left(s) == 1 && s.has_room();
        let decode: Vec<usize> =
            (0..self.running.len()).filter(|&i| ready(&self.running[i])).take(spread.min(rows_max)).collect();
        for &i in &decode {
            self.push_rows(i, 1, &mut step, &mut plan);
        }

        let filling: Vec<usize> =
            (0..self.running.len()).filter(|&i| rows_left(&self.running[i]) > 1).collect();
        let left = rows_max - step.batch.len();
        let mut quantum = if decoding > 0 { left.min(self.quantum) } else { left };
        for (n, &i) in filling.iter().enumerate() {
            let share = quantum.div_ceil(filling.len() - n);
            quantum -= self.push_rows(i, share, &mut step, &mut plan);
        }

        // Operations that were decided for others go along; alone they make a step of their own.
        step.before = std::mem::take(&mut self.before);
        plan.saves.append(&mut self.saves);
        let idle = step.batch.is_empty() && step.before.is_empty() && step.after.is_empty();
        (!idle).then_some((step, plan))
    }

    /// Adds up to `rows` rows of a running sequence. Returns how many.
    fn push_rows(&mut self, index: usize, rows: usize, step: &mut Step, plan: &mut Plan) -> usize {
        let outputs_left = self.limits.model.outputs - step.batch.outputs().len();
        let sequence = &self.running[index];
        let Some(place) = &sequence.place else { return 0 };
        let from = place.at.pos;
        let next = from + 1 == sequence.tokens.len();
        let scored = sequence.request.prompt_logprobs && !next && from + 1 < sequence.prompt_len;
        let outputs = match (next, scored) {
            (true, _) => WorkOutputs::Next,
            (_, true) => WorkOutputs::Prompt,
            _ => WorkOutputs::None,
        };
        let to = match outputs {
            WorkOutputs::Next => from + outputs_left.min(1),
            WorkOutputs::Prompt => self.next_cut(sequence, from).min(from + rows.min(outputs_left)),
            WorkOutputs::None => self.next_cut(sequence, from).min(from + rows),
        };
        if to == from || !self.grow(index, to) {
            return 0;
        }
        let sequence = &mut self.running[index];
        let tokens = &sequence.tokens[from..to];
        let Some(place) = &mut sequence.place else { return 0 };
        step.marks.push(place.at);
        let asked = match outputs {
            WorkOutputs::None => Outputs::None,
            WorkOutputs::Next => Outputs::Last,
            WorkOutputs::Prompt => Outputs::All,
        };
        step.batch.push(place.slot, from, tokens, asked);
        place.at = place.at.extend(tokens);
        match outputs {
            WorkOutputs::None => {}
            WorkOutputs::Next => {
                let want = sequence.want_next();
                step.wants.push(want);
            }
            WorkOutputs::Prompt => step.wants.extend((from..to).map(|pos| sequence.want_given(pos))),
        }
        plan.work.push(Work { key: sequence.key, from, to, outputs });
        if self.is_cut(&self.running[index], to)
            && let Some((op, tokens)) = self.save(index)
        {
            // The end of a prompt is soon followed by the end of its answer.
            let to_disk = to + 1 != self.running[index].prompt_len;
            step.after.push(op);
            plan.saves.push(Save { tokens, to_disk });
        }
        to - from
    }

    /// Gives the sequence pages for its first `end` positions. `false`: none are left.
    fn grow(&mut self, index: usize, end: usize) -> bool {
        let Some(place) = &self.running[index].place else { return false };
        let (slot, first) = (place.slot, place.pages.len());
        let mut fresh = Vec::new();
        for _ in first..KvLayout::pages_for(end) {
            let Some(page) = self.take_page() else {
                self.pages.release(&fresh);
                return false;
            };
            fresh.push(page);
        }
        if !fresh.is_empty() {
            if let Some(place) = &mut self.running[index].place {
                place.pages.extend_from_slice(&fresh);
            }
            self.before.push(StateOp::SetPages { slot, first, pages: fresh });
        }
        true
    }

    /// Where evaluation from `from` on must stop at the latest: the next checkpoint, or before the last row.
    fn next_cut(&self, sequence: &Sequence, from: usize) -> usize {
        let last = sequence.tokens.len() - 1;
        if !sequence.request.cache {
            return last;
        }
        let regular = (from / CHECKPOINT_TOKENS + 1) * CHECKPOINT_TOKENS;
        let boundary = sequence.cuts.iter().copied().find(|&b| b > from).unwrap_or(last);
        regular.min(boundary).min(last)
    }

    fn is_cut(&self, sequence: &Sequence, at: usize) -> bool {
        sequence.request.cache
            && (at + 1 == sequence.prompt_len
                || at.is_multiple_of(CHECKPOINT_TOKENS)
                || sequence.cuts.contains(&at))
    }

    /// Keeps the sequence's state as of its last scheduled row, unless that is kept already.
    fn save(&mut self, index: usize) -> Option<(StateOp, Vec<u32>)> {
        let sequence = &self.running[index];
        let mark = sequence.place.as_ref()?.at;
        if mark.pos == 0 || self.tree.contains(&sequence.tokens[..mark.pos]) {
            return None;
        }
        let id = self.take_checkpoint()?;
        let sequence = &self.running[index];
        let place = sequence.place.as_ref()?;
        let pages = place.pages[..KvLayout::pages_for(mark.pos)].to_vec();
        self.pages.hold(&pages);
        let tokens = sequence.tokens[..mark.pos].to_vec();
        let op = StateOp::SaveCheckpoint { slot: place.slot, id };
        if let Some(old) = self.tree.insert(&tokens, Checkpoint { id, mark, pages }) {
            self.drop_checkpoint(old);
        }
        Some((op, tokens))
    }

    /// Takes a sequence out of its slot. Its state is kept for the next request, where `keep` and the request say so.
    pub fn remove(&mut self, index: usize, keep: bool) -> Sequence {
        if keep
            && self.running[index].request.cache
            && let Some((op, tokens)) = self.save(index)
        {
            self.before.push(op);
            self.saves.push(Save { tokens, to_disk: true });
        }
        let mut sequence = self.running.remove(index);
        self.displace(&mut sequence);
        sequence
    }

    fn displace(&mut self, sequence: &mut Sequence) {
        if let Some(place) = sequence.place.take() {
            self.pages.release(&place.pages);
            self.free_slots.push(place.slot);
        }
    }

    /// Steps were lost: their checkpoints are not good, and every running sequence starts over from one that is, in
    /// front of the queue.
    pub fn abandon(&mut self, plans: impl IntoIterator<Item = Plan>) {
        let lost: Vec<_> = plans.into_iter().flat_map(|p| p.saves).chain(self.saves.drain(..)).collect();
        for Save { tokens, .. } in lost {
            if let Some(c) = self.tree.remove(&tokens) {
                self.drop_checkpoint(c);
            }
        }
        self.before.clear();
        for mut sequence in std::mem::take(&mut self.running).into_iter().rev() {
            self.displace(&mut sequence);
            sequence.replays += 1;
            self.waiting.push_front(sequence);
        }
    }

    /// Puts a snapshot into the stages and the tree. Full pages that are there already are shared.
    pub fn restore(&mut self, snapshot: Snapshot) {
        let tokens = snapshot.tokens();
        if self.tree.contains(&tokens) {
            return;
        }
        let near = self.tree.longest(&tokens, tokens.len());
        let mut pages: Vec<PageId> =
            near.map_or(Vec::new(), |c| c.pages[..c.mark.pos / PAGE_TOKENS].to_vec());
        self.pages.hold(&pages);
        let Some(id) = self.take_checkpoint() else { return self.pages.release(&pages) };
        let known = pages.len();
        let last = Some(snapshot.last_page).filter(|p| !p.is_empty());
        let rows = snapshot.pages.into_iter().map(|p| p.rows).chain(last).skip(known);
        let mut writes = Vec::new();
        for bytes in rows {
            let Some(page) = self.take_page() else {
                self.free_checkpoints.push(id);
                return self.pages.release(&pages);
            };
            pages.push(page);
            writes.push(StateOp::WritePage { page, bytes: bytes.into() });
        }
        self.before.append(&mut writes);
        let mark = snapshot.mark;
        self.before.push(StateOp::WriteCheckpoint { id, mark, bytes: snapshot.frontier.into() });
        if let Some(old) = self.tree.insert(&tokens, Checkpoint { id, mark, pages }) {
            self.drop_checkpoint(old);
        }
        self.saves.push(Save { tokens, to_disk: false });
    }

    /// The stages remember nothing.
    pub fn forget(&mut self) {
        for checkpoint in self.tree.clear() {
            self.drop_checkpoint(checkpoint);
        }
    }
}

/// Rows that the sequence still needs for its next token and that are not under way.
fn rows_left(sequence: &Sequence) -> usize {
    sequence.place.as_ref().map_or(0, |p| sequence.tokens.len() - p.at.pos)
}

/// The message boundaries of a prompt that get checkpoints.
pub(crate) fn choose_cuts(boundaries: &[usize], prompt_len: usize) -> Vec<usize> {
    let inner: Vec<usize> = boundaries.iter().copied().filter(|&b| b > 0 && b < prompt_len).collect();
    let mut cuts: Vec<usize> = Vec::new();
    for (i, &b) in inner.iter().enumerate() {
        let before = cuts.last().copied().unwrap_or(0).max(b / CHECKPOINT_TOKENS * CHECKPOINT_TOKENS);
        if b - before >= BOUNDARY_GAP || i + 2 >= inner.len() {
            cuts.push(b);
        }
    }
    cuts.dedup();
    cuts
}
