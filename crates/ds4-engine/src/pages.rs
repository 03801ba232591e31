//! The pool of key-value pages: which are free, and how many hold each of the others.

use ds4_model::PageId;

/// Reference counts of all pages. A page is written by the session that allocated it alone; everyone else only reads
/// the rows that were there when they took it.
#[derive(Debug)]
pub struct Pages {
    refs: Vec<u32>,
    /// How often each page was handed out: what was known of its content holds for one of them.
    generations: Vec<u32>,
    free: Vec<PageId>,
}

impl Pages {
    pub fn new(count: usize) -> Self {
        // The lowest numbers are handed out first.
        Pages {
            refs: vec![0; count],
            generations: vec![0; count],
            free: (0..count as PageId).rev().collect(),
        }
    }

    pub fn total(&self) -> usize {
        self.refs.len()
    }

    pub fn used(&self) -> usize {
        self.refs.len() - self.free.len()
    }

    /// A page of one's own, while there is one.
    pub fn take(&mut self) -> Option<PageId> {
        let page = self.free.pop()?;
        self.refs[page as usize] = 1;
        self.generations[page as usize] = self.generations[page as usize].wrapping_add(1);
        Some(page)
    }

    pub fn generation(&self, page: PageId) -> u32 {
        self.generations[page as usize]
    }

    /// One more holder of each page.
    pub fn hold(&mut self, pages: &[PageId]) {
        for &p in pages {
            debug_assert!(self.refs[p as usize] > 0, "page {p} is free");
            self.refs[p as usize] += 1;
        }
    }

    /// One holder less; pages without holders are free.
    pub fn release(&mut self, pages: &[PageId]) {
        for &p in pages {
            let refs = &mut self.refs[p as usize];
            debug_assert!(*refs > 0, "page {p} is released twice");
            *refs -= 1;
            if *refs == 0 {
                self.free.push(p);
            }
        }
    }
}
