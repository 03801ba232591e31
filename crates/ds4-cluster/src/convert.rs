//! Between the engine's types and the messages.

use std::sync::Arc;

use bytes::Bytes;
use ds4_engine::{
    Choose, Chosen, Mark, RowResult, Sampling, StageError, StageFault, StageLimits, StateOp, Step, Want,
};
use ds4_model::{BackendError, Batch, LayerSlice, Limits, Numerics, Outputs, RowFormat};

use crate::activation::Format;
use crate::error::ClusterError;
use crate::host::StageAsk;
use crate::wire::{self, FaultKind, row_result, state_op::Op, want};

fn protocol<T>(reason: impl Into<String>) -> Result<T, ClusterError> {
    Err(ClusterError::Protocol(reason.into()))
}

// ---- slices, limits -----------------------------------------------------------------------------------------------

pub fn layers(slice: &LayerSlice) -> wire::Layers {
    wire::Layers {
        first: slice.first as u32,
        end: slice.end as u32,
        total: slice.total as u32,
        head: slice.head,
    }
}

pub fn limits(limits: &StageLimits) -> wire::Limits {
    wire::Limits {
        context: limits.model.context as u64,
        rows: limits.model.rows as u32,
        outputs: limits.model.outputs as u32,
        slots: limits.model.slots as u32,
        pages: limits.model.pages as u32,
        checkpoints: limits.checkpoints as u32,
    }
}

pub fn ask(welcome: &wire::Welcome) -> StageAsk {
    let l = welcome.limits.unwrap_or_default();
    StageAsk {
        limits: StageLimits {
            model: Limits {
                context: l.context as usize,
                rows: l.rows as usize,
                outputs: l.outputs as usize,
                slots: l.slots as usize,
                pages: l.pages as usize,
            },
            checkpoints: l.checkpoints as usize,
        },
        numerics: Numerics { qat: welcome.qat, exact: welcome.exact },
        rows: if welcome.rows_f32 { RowFormat::F32 } else { RowFormat::Packed },
    }
}

// ---- steps --------------------------------------------------------------------------------------------------------

/// The step for the wire, under the cluster's own epoch.
pub fn step_to_wire(step: &Step, epoch: u64) -> wire::Step {
    let batch = &step.batch;
    wire::Step {
        epoch,
        number: 0,
        id: step.id,
        before: step.before.iter().map(op_to_wire).collect(),
        segments: batch
            .segments()
            .iter()
            .zip(&step.marks)
            .map(|(s, mark)| wire::Segment {
                slot: s.slot,
                rows: s.len as u32,
                mark: Some(mark_to_wire(*mark)),
            })
            .collect(),
        tokens: batch.tokens().iter().flat_map(|t| t.to_le_bytes()).collect::<Vec<u8>>().into(),
        wants: batch.outputs().iter().zip(&step.wants).map(|(&row, w)| want_to_wire(row, w)).collect(),
        after: step.after.iter().map(op_to_wire).collect(),
    }
}

pub fn step_from_wire(step: &wire::Step) -> Result<Step, ClusterError> {
    let tokens: Vec<u32> =
        step.tokens.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
    let (mut batch, mut marks, mut row) = (Batch::new(), Vec::new(), 0u32);
    for s in &step.segments {
        let end = row.saturating_add(s.rows);
        let Some(run) = tokens.get(row as usize..end as usize) else {
            return protocol(format!("segments of {end} rows, {} tokens", tokens.len()));
        };
        let mark = mark_from_wire(&s.mark.unwrap_or_default());
        if u32::try_from(mark.pos).is_err() {
            return protocol(format!("a segment at position {}", mark.pos));
        }
        let wanted: Vec<u32> = step.wants.iter().map(|w| w.row).filter(|r| (row..end).contains(r)).collect();
        let outputs = match wanted[..] {
            [] => Outputs::None,
            [last] if last + 1 == end => Outputs::Last,
            _ if wanted.iter().copied().eq(row..end) => Outputs::All,
            _ => return protocol("logits are wanted of neither the last nor all rows of a segment"),
        };
        batch.push(s.slot, mark.pos, run, outputs);
        marks.push(mark);
        row = end;
    }
    if row as usize != tokens.len() || batch.outputs().len() != step.wants.len() {
        return protocol(format!("{} tokens and {} wants for {row} rows", tokens.len(), step.wants.len()));
    }
    let ops = |ops: &[wire::StateOp]| ops.iter().map(op_from_wire).collect::<Result<Vec<_>, _>>();
    Ok(Step {
        id: step.id,
        epoch: step.epoch,
        before: ops(&step.before)?,
        batch,
        marks,
        wants: step.wants.iter().map(want_from_wire).collect::<Result<_, _>>()?,
        after: ops(&step.after)?,
    })
}

fn mark_to_wire(mark: Mark) -> wire::Mark {
    wire::Mark { position: mark.pos as u64, prefix: mark.prefix }
}

fn mark_from_wire(mark: &wire::Mark) -> Mark {
    Mark { pos: mark.position as usize, prefix: mark.prefix }
}

fn op_to_wire(op: &StateOp) -> wire::StateOp {
    // The blobs are copied here once; they move only when a snapshot is restored.
    let blob = |bytes: &Arc<[u8]>| Bytes::copy_from_slice(bytes);
    let op = match op {
        StateOp::Reset { slot } => Op::Reset(*slot),
        StateOp::SetPages { slot, first, pages } => {
            Op::SetPages(wire::SetPages { slot: *slot, first: *first as u32, pages: pages.clone() })
        }
        StateOp::CopyPage { from, to } => Op::CopyPage(wire::CopyPage { from: *from, to: *to }),
        StateOp::SaveCheckpoint { slot, id } => Op::Save(wire::Checkpoint { slot: *slot, id: *id }),
        StateOp::LoadCheckpoint { slot, id } => Op::Load(wire::Checkpoint { slot: *slot, id: *id }),
        StateOp::ReadPage { page } => Op::ReadPage(*page),
        StateOp::WritePage { page, bytes } => {
            Op::WritePage(wire::WritePage { page: *page, data: blob(bytes) })
        }
        StateOp::ReadCheckpoint { id } => Op::ReadCheckpoint(*id),
        StateOp::WriteCheckpoint { id, mark, bytes } => Op::WriteCheckpoint(wire::WriteCheckpoint {
            id: *id,
            mark: Some(mark_to_wire(*mark)),
            data: blob(bytes),
        }),
    };
    wire::StateOp { op: Some(op) }
}

fn op_from_wire(op: &wire::StateOp) -> Result<StateOp, ClusterError> {
    Ok(match &op.op {
        Some(Op::Reset(slot)) => StateOp::Reset { slot: *slot },
        Some(Op::SetPages(p)) => {
            StateOp::SetPages { slot: p.slot, first: p.first as usize, pages: p.pages.clone() }
        }
        Some(Op::CopyPage(c)) => StateOp::CopyPage { from: c.from, to: c.to },
        Some(Op::Save(c)) => StateOp::SaveCheckpoint { slot: c.slot, id: c.id },
        Some(Op::Load(c)) => StateOp::LoadCheckpoint { slot: c.slot, id: c.id },
        Some(Op::ReadPage(page)) => StateOp::ReadPage { page: *page },
        Some(Op::WritePage(w)) => StateOp::WritePage { page: w.page, bytes: Arc::from(&w.data[..]) },
        Some(Op::ReadCheckpoint(id)) => StateOp::ReadCheckpoint { id: *id },
        Some(Op::WriteCheckpoint(w)) => StateOp::WriteCheckpoint {
            id: w.id,
            mark: mark_from_wire(&w.mark.unwrap_or_default()),
            bytes: Arc::from(&w.data[..]),
        },
        None => return protocol("an operation on state that this version does not know"),
    })
}

fn want_to_wire(row: u32, want: &Want) -> wire::Want {
    let choose = match &want.choose {
        Choose::Sample(s) => want::Choose::Sample(wire::Sampling {
            adjust_tokens: s.adjust.iter().map(|a| a.0).collect(),
            adjust_by: s.adjust.iter().map(|a| a.1).collect(),
            temperature: s.temperature,
            top_k: s.top_k as u32,
            top_p: s.top_p,
            min_p: s.min_p,
            seed: s.seed,
            place: s.place,
        }),
        Choose::Given(token) => want::Choose::Given(*token),
        Choose::Logits => want::Choose::Logits(wire::Unit {}),
    };
    wire::Want { row, top: want.top as u32, choose: Some(choose) }
}

fn want_from_wire(want: &wire::Want) -> Result<Want, ClusterError> {
    let choose = match &want.choose {
        Some(want::Choose::Sample(s)) if s.adjust_tokens.len() == s.adjust_by.len() => {
            Choose::Sample(Sampling {
                adjust: s.adjust_tokens.iter().copied().zip(s.adjust_by.iter().copied()).collect(),
                temperature: s.temperature,
                top_k: s.top_k as usize,
                top_p: s.top_p,
                min_p: s.min_p,
                seed: s.seed,
                place: s.place,
            })
        }
        Some(want::Choose::Given(token)) => Choose::Given(*token),
        Some(want::Choose::Logits(_)) => Choose::Logits,
        _ => return protocol("a choice of token that this version does not know"),
    };
    Ok(Want { choose, top: want.top as usize })
}

// ---- results ------------------------------------------------------------------------------------------------------

pub fn row_to_wire(row: RowResult) -> wire::RowResult {
    let result = match row {
        RowResult::Token(c) => row_result::Result::Token(wire::Chosen {
            token: c.token,
            logprob: c.logprob,
            top_tokens: c.top.iter().map(|t| t.0).collect(),
            top_logprobs: c.top.iter().map(|t| t.1).collect(),
        }),
        RowResult::Logits(logits) => {
            let width = logits.len();
            row_result::Result::Logits(Format::Bits32.encode(logits, width))
        }
    };
    wire::RowResult { result: Some(result) }
}

pub fn row_from_wire(row: &wire::RowResult) -> Result<RowResult, ClusterError> {
    Ok(match &row.result {
        Some(row_result::Result::Token(c)) if c.top_tokens.len() == c.top_logprobs.len() => {
            RowResult::Token(Chosen {
                token: c.token,
                logprob: c.logprob,
                top: c.top_tokens.iter().copied().zip(c.top_logprobs.iter().copied()).collect(),
            })
        }
        Some(row_result::Result::Logits(bytes)) => {
            let mut logits = vec![0f32; bytes.len() / 4];
            Format::Bits32.decode(bytes, logits.len().max(1), &mut logits)?;
            RowResult::Logits(logits)
        }
        _ => return protocol("a result that this version does not know"),
    })
}

/// `rows` rows of `width` values out of pieces.
pub fn hidden_from_wire(
    pieces: &[Bytes],
    format: Format,
    rows: usize,
    width: usize,
) -> Result<Vec<f32>, ClusterError> {
    let mut hidden = vec![0f32; rows * width];
    let (row_bytes, mut at) = (format.row_bytes(width).max(1), 0);
    for piece in pieces {
        let end = at + piece.len() / row_bytes * width;
        let Some(out) = hidden.get_mut(at..end) else {
            return protocol(format!("more than {rows} rows of activations"));
        };
        format.decode(piece, width, out)?;
        at = end;
    }
    if at != hidden.len() {
        return protocol(format!("{} rows of activations, expected {rows}", at / width.max(1)));
    }
    Ok(hidden)
}

// ---- faults -------------------------------------------------------------------------------------------------------

pub fn fault_to_wire(error: &StageError) -> Box<wire::Fault> {
    Box::new(to_wire(&error.fault))
}

fn to_wire(fault: &StageFault) -> wire::Fault {
    let of = |kind: FaultKind| wire::Fault { kind: kind.into(), ..Default::default() };
    let details = |kind, details: &str| wire::Fault { details: details.to_string(), ..of(kind) };
    match fault {
        StageFault::Backend(b) => match b {
            BackendError::OutOfMemory { device, what, needed, available } => wire::Fault {
                device: device.clone(),
                what: what.clone(),
                needed: *needed,
                available: *available,
                ..of(FaultKind::OutOfMemory)
            },
            BackendError::DeviceLost { device, what, reason } => wire::Fault {
                device: device.clone(),
                what: what.clone(),
                ..details(FaultKind::DeviceLost, reason)
            },
            BackendError::NotFinite { device, what } => {
                wire::Fault { device: device.clone(), what: what.clone(), ..of(FaultKind::NotFinite) }
            }
            BackendError::Unsupported { device, what, reason } => wire::Fault {
                device: device.clone(),
                what: what.clone(),
                ..details(FaultKind::Unsupported, reason)
            },
            BackendError::Failed { device, what, reason } => wire::Fault {
                device: device.clone(),
                what: what.clone(),
                ..details(FaultKind::Failed, reason)
            },
        },
        StageFault::OutOfStep { slot, found, expected } => wire::Fault {
            slot: *slot,
            found: Some(mark_to_wire(*found)),
            expected: Some(mark_to_wire(*expected)),
            ..of(FaultKind::OutOfStep)
        },
        StageFault::Step(reason) => details(FaultKind::Step, reason),
        StageFault::Load(reason) => details(FaultKind::Load, reason),
        other => details(FaultKind::Step, &other.to_string()),
    }
}

pub fn fault_from_wire(fault: &wire::Fault) -> StageFault {
    let (device, what, reason) = (fault.device.clone(), fault.what.clone(), fault.details.clone());
    match fault.kind() {
        FaultKind::OutOfMemory => {
            BackendError::OutOfMemory { device, what, needed: fault.needed, available: fault.available }
                .into()
        }
        FaultKind::DeviceLost => BackendError::DeviceLost { device, what, reason }.into(),
        FaultKind::NotFinite => BackendError::NotFinite { device, what }.into(),
        FaultKind::Unsupported => BackendError::Unsupported { device, what, reason }.into(),
        FaultKind::Failed => BackendError::Failed { device, what, reason }.into(),
        FaultKind::OutOfStep => StageFault::OutOfStep {
            slot: fault.slot,
            found: mark_from_wire(&fault.found.unwrap_or_default()),
            expected: mark_from_wire(&fault.expected.unwrap_or_default()),
        },
        FaultKind::Load => StageFault::Load(reason),
        FaultKind::NextLost => StageFault::Unreachable { silent: std::time::Duration::ZERO, reason },
        FaultKind::Step | FaultKind::Unknown => StageFault::Step(reason),
    }
}

/// A message that this node cannot make sense of, as the fault that goes back.
pub fn protocol_fault(e: &ClusterError) -> Box<wire::Fault> {
    Box::new(to_wire(&StageFault::Step(e.to_string())))
}
