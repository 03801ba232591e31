//! What a node's stage remembers, as positions and hashes of token ids: enough to know that it is in step.

use std::collections::HashMap;

use crate::wire;
use crate::wire::state_op::Op;

/// Position and hash of a session's token ids.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Mark {
    pub position: u32,
    pub prefix: u64,
}

/// Marks of every slot and checkpoint of one node.
#[derive(Debug, Default)]
pub struct Ledger {
    /// `None`: the slot's memory is not what any token sequence gives, since a step failed half way.
    slots: HashMap<u32, Option<Mark>>,
    checkpoints: HashMap<u64, Mark>,
}

impl Ledger {
    /// Takes the step into the books. `Err` says what is out of step; then nothing may run.
    pub fn apply(&mut self, step: &wire::Step) -> Result<(), String> {
        self.operations(&step.before)?;
        let mut tokens = step.tokens.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]));
        for s in &step.segments {
            let found = self.slot(s.slot)?;
            let asked = Mark { position: s.position, prefix: s.prefix };
            if found != asked {
                return Err(format!(
                    "slot {}: the step continues position {} with hash {:016x}, this node is at position {} with hash {:016x}",
                    s.slot, asked.position, asked.prefix, found.position, found.prefix
                ));
            }
            let rows = s.rows as usize;
            let prefix = hash(found.prefix, tokens.by_ref().take(rows));
            self.slots.insert(s.slot, Some(Mark { position: s.position + s.rows, prefix }));
        }
        self.operations(&step.after)
    }

    /// The step's slots are no longer known: it failed on the device.
    pub fn spoil(&mut self, step: &wire::Step) {
        for s in &step.segments {
            self.slots.insert(s.slot, None);
        }
        for op in step.before.iter().chain(&step.after) {
            match &op.op {
                Some(Op::Reset(slot)) => drop(self.slots.insert(*slot, None)),
                Some(Op::Load(c)) => drop(self.slots.insert(c.slot, None)),
                Some(Op::Save(c)) => drop(self.checkpoints.remove(&c.number)),
                _ => {}
            }
        }
    }

    /// Numbers of the checkpoints that are held, ascending.
    pub fn checkpoints(&self) -> Vec<u64> {
        let mut held: Vec<u64> = self.checkpoints.keys().copied().collect();
        held.sort_unstable();
        held
    }

    fn slot(&self, slot: u32) -> Result<Mark, String> {
        self.slots.get(&slot).copied().unwrap_or_default().ok_or_else(|| {
            format!("slot {slot}: its last step failed here; it must be reset or loaded first")
        })
    }

    fn operations(&mut self, ops: &[wire::StateOp]) -> Result<(), String> {
        for op in ops {
            match &op.op {
                Some(Op::Reset(slot)) => drop(self.slots.insert(*slot, Some(Mark::default()))),
                Some(Op::Save(c)) => drop(self.checkpoints.insert(c.number, self.slot(c.slot)?)),
                Some(Op::Load(c)) => {
                    let mark = self.checkpoints.get(&c.number);
                    let mark = mark.ok_or_else(|| format!("checkpoint {}: not held here", c.number))?;
                    self.slots.insert(c.slot, Some(*mark));
                }
                Some(Op::Discard(number)) => drop(self.checkpoints.remove(number)),
                Some(Op::SetPages(_) | Op::CopyPage(_)) => {}
                None => return Err("an operation on state that this version does not know".into()),
            }
        }
        Ok(())
    }
}

/// The hash of a prefix grown by `tokens`, one at a time: it depends on every id and its position. The mixing is
/// SplitMix64 (Steele, Lea, Flood 2014); it guards against faults, not against forgery.
pub fn hash(prefix: u64, tokens: impl Iterator<Item = u32>) -> u64 {
    tokens.fold(prefix, |h, token| {
        let mut z = (h ^ u64::from(token)).wrapping_add(0x9e37_79b9_7f4a_7c15);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    })
}
