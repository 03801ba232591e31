//! Sessions' memory: page pool, frontiers, page tables.

use std::ops::Range;

use ds4_model::backend::{PlanLine, Result, Setup};
use ds4_model::{PageId, Slot};

use crate::failed;

#[derive(Default)]
pub struct State {
    page_bytes: usize,
    frontier_bytes: usize,
    page_count: usize,
    pages: Vec<u8>,
    frontiers: Vec<u8>,
    /// Per slot: the session's pages in order.
    tables: Vec<Vec<PageId>>,
    table_max: usize,
}

impl State {
    pub fn plan(setup: &Setup) -> Vec<PlanLine> {
        let bytes = |n: usize, each: usize| n as u64 * each as u64;
        vec![
            PlanLine {
                name: "key-value pages".into(),
                bytes: bytes(setup.limits.pages, setup.layout.page_bytes),
            },
            PlanLine {
                name: "session frontiers".into(),
                bytes: bytes(setup.limits.slots, setup.layout.frontier_bytes),
            },
        ]
    }

    pub fn new(setup: &Setup) -> Self {
        let (layout, limits) = (&setup.layout, &setup.limits);
        let table_max = ds4_model::KvLayout::pages_for(limits.context);
        State {
            page_bytes: layout.page_bytes,
            frontier_bytes: layout.frontier_bytes,
            page_count: limits.pages,
            pages: vec![0; limits.pages * layout.page_bytes],
            frontiers: vec![0; limits.slots * layout.frontier_bytes],
            tables: (0..limits.slots).map(|_| Vec::with_capacity(table_max)).collect(),
            table_max,
        }
    }

    fn frontier_range(&self, slot: Slot) -> Range<usize> {
        let at = slot as usize * self.frontier_bytes;
        at..at + self.frontier_bytes
    }

    fn page_range(&self, page: PageId) -> Range<usize> {
        let at = page as usize * self.page_bytes;
        at..at + self.page_bytes
    }

    pub fn frontier(&self, slot: Slot) -> &[u8] {
        &self.frontiers[self.frontier_range(slot)]
    }

    pub fn frontier_mut(&mut self, slot: Slot) -> &mut [u8] {
        let r = self.frontier_range(slot);
        &mut self.frontiers[r]
    }

    pub fn page(&self, page: PageId) -> &[u8] {
        &self.pages[self.page_range(page)]
    }

    pub fn page_mut(&mut self, page: PageId) -> &mut [u8] {
        let r = self.page_range(page);
        &mut self.pages[r]
    }

    /// An empty accumulator has weight 0, so zeroed bytes are the empty frontier.
    pub fn reset(&mut self, slot: Slot) {
        self.frontier_mut(slot).fill(0);
        self.tables[slot as usize].clear();
    }

    pub fn set_pages(&mut self, slot: Slot, first: usize, pages: &[PageId]) -> Result<()> {
        let table = &mut self.tables[slot as usize];
        if first > table.len() || first + pages.len() > self.table_max {
            return Err(failed(
                "set_pages",
                format!(
                    "pages {first}..{}: the table has {}, at most {}",
                    first + pages.len(),
                    table.len(),
                    self.table_max
                ),
            ));
        }
        if let Some(p) = pages.iter().find(|&&p| p as usize >= self.page_count) {
            return Err(failed("set_pages", format!("page {p} is outside the pool")));
        }
        table.truncate(first);
        table.extend_from_slice(pages);
        Ok(())
    }

    /// The session's `index`-th page.
    pub fn page_of(&self, slot: Slot, index: usize) -> Result<PageId> {
        let table = &self.tables[slot as usize];
        table.get(index).copied().ok_or_else(|| {
            failed("page table", format!("slot {slot} has {} pages, page {index} is used", table.len()))
        })
    }
}
