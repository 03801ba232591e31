//! Worker threads for a decode token's hundreds of small parallel regions: they spin for a moment before they sleep, so
//! that a region costs well under a microsecond while work keeps coming, and nothing while there is none.

use std::cell::UnsafeCell;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long a worker looks for the next region before it sleeps.
const SPIN: Duration = Duration::from_micros(50);

type Job = *const (dyn Fn(usize) + Sync);

struct Shared {
    /// Counts regions; odd and even alike are just numbers.
    round: AtomicU64,
    job: UnsafeCell<Option<Job>>,
    /// Workers that have not finished the current region.
    busy: AtomicUsize,
    panicked: AtomicBool,
    stop: AtomicBool,
    sleeping: Mutex<usize>,
    wake: Condvar,
}

// SAFETY: `job` is written by the pool's owner only while no worker is busy, before `round` is raised (release), and
// read by workers after they have seen the new round (acquire).
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

pub struct Pool {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

impl Pool {
    /// `threads` in all, the caller's included.
    pub fn new(threads: usize) -> std::io::Result<Self> {
        let shared = Arc::new(Shared {
            round: AtomicU64::new(0),
            job: UnsafeCell::new(None),
            busy: AtomicUsize::new(0),
            panicked: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            sleeping: Mutex::new(0),
            wake: Condvar::new(),
        });
        let mut pool = Pool { shared, threads: Vec::new() };
        for worker in 1..threads.max(1) {
            let shared = pool.shared.clone();
            let thread = std::thread::Builder::new()
                .name(format!("cpu {worker}"))
                .spawn(move || work(&shared, worker))?;
            pool.threads.push(thread);
        }
        Ok(pool)
    }

    pub fn threads(&self) -> usize {
        self.threads.len() + 1
    }

    /// Runs `job(worker)` once on every thread, the caller's included, and waits for all.
    pub fn run(&mut self, job: &(dyn Fn(usize) + Sync)) {
        if self.threads.is_empty() {
            return job(0);
        }
        let s = &self.shared;
        // SAFETY: the lifetime is stretched only until this function returns, and it returns only after every worker has
        // finished with the job (`busy` is 0), also if the caller's own part panics (`Finish`). Nobody else writes.
        unsafe {
            let job: Job = std::mem::transmute::<*const (dyn Fn(usize) + Sync + '_), Job>(job);
            *s.job.get() = Some(job);
        }
        s.busy.store(self.threads.len(), Ordering::Relaxed);
        s.round.fetch_add(1, Ordering::SeqCst);
        // A worker registers as sleeping and looks at the round once more under the same lock.
        if *s.sleeping.lock().unwrap_or_else(PoisonError::into_inner) > 0 {
            s.wake.notify_all();
        }
        let finish = Finish(s);
        job(0);
        drop(finish);
        assert!(!s.panicked.swap(false, Ordering::Relaxed), "a worker thread panicked");
    }

    /// `f(range)` over `0..n` in contiguous parts, one a thread.
    pub fn split(&mut self, n: usize, f: impl Fn(usize, Range<usize>) + Sync) {
        let threads = self.threads().min(n);
        if threads <= 1 {
            return f(0, 0..n);
        }
        self.run(&|worker| {
            if worker < threads {
                f(worker, n * worker / threads..n * (worker + 1) / threads);
            }
        });
    }

    /// `f(i)` for every `i` in `0..n`, taken one by one as threads become free.
    pub fn each(&mut self, n: usize, f: impl Fn(usize, usize) + Sync) {
        if n <= 1 || self.threads.is_empty() {
            return (0..n).for_each(|i| f(0, i));
        }
        let next = AtomicUsize::new(0);
        self.run(&|worker| {
            loop {
                let i = next.fetch_add(1, Ordering::Relaxed);
                if i >= n {
                    return;
                }
                f(worker, i);
            }
        });
    }
}

/// Waits for the workers, whatever happens to the caller's part.
struct Finish<'a>(&'a Shared);

impl Drop for Finish<'_> {
    fn drop(&mut self) {
        let mut spins = 0u32;
        while self.0.busy.load(Ordering::Acquire) > 0 {
            spins += 1;
            // Parts are of equal size, so the wait is short, unless the system runs others on our cores.
            if spins > 1000 { std::thread::yield_now() } else { std::hint::spin_loop() }
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        self.shared.round.fetch_add(1, Ordering::SeqCst);
        drop(self.shared.sleeping.lock().unwrap_or_else(PoisonError::into_inner));
        self.shared.wake.notify_all();
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

fn work(s: &Shared, worker: usize) {
    let mut seen = 0;
    loop {
        seen = next_round(s, seen);
        if s.stop.load(Ordering::SeqCst) {
            return;
        }
        // SAFETY: the round has risen, so the job is set, and it stays until `busy` is 0.
        let job = unsafe { (*s.job.get()).map(|j| &*j) };
        if let Some(job) = job
            && std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| job(worker))).is_err()
        {
            s.panicked.store(true, Ordering::Relaxed);
        }
        s.busy.fetch_sub(1, Ordering::Release);
    }
}

/// Waits until the round is another than `seen`: spinning first, then asleep.
fn next_round(s: &Shared, seen: u64) -> u64 {
    let started = Instant::now();
    loop {
        for _ in 0..256 {
            let round = s.round.load(Ordering::Acquire);
            if round != seen {
                return round;
            }
            std::hint::spin_loop();
        }
        if started.elapsed() > SPIN {
            break;
        }
    }
    let mut sleeping = s.sleeping.lock().unwrap_or_else(PoisonError::into_inner);
    *sleeping += 1;
    while s.round.load(Ordering::SeqCst) == seen {
        sleeping = s.wake.wait(sleeping).unwrap_or_else(PoisonError::into_inner);
    }
    *sleeping -= 1;
    s.round.load(Ordering::Acquire)
}

/// A buffer that threads write disjoint parts of.
pub struct Parts<'a, T> {
    at: *mut T,
    len: usize,
    marker: std::marker::PhantomData<&'a mut [T]>,
}

// SAFETY: access goes through `slice`, whose callers promise that parts taken at the same time do not overlap.
unsafe impl<T: Send> Send for Parts<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for Parts<'_, T> {}

impl<'a, T> Parts<'a, T> {
    pub fn new(buffer: &'a mut [T]) -> Self {
        Parts { at: buffer.as_mut_ptr(), len: buffer.len(), marker: std::marker::PhantomData }
    }

    /// # Safety
    /// No two parts that are in use at the same time overlap.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn slice(&self, range: Range<usize>) -> &mut [T] {
        assert!(range.start <= range.end && range.end <= self.len);
        // SAFETY: inside the buffer (checked), not aliased (the caller's promise).
        unsafe { std::slice::from_raw_parts_mut(self.at.add(range.start), range.end - range.start) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_index_once_whatever_the_threads() {
        for threads in [1, 2, 3, 7] {
            let mut pool = Pool::new(threads).unwrap();
            for n in [0, 1, 2, 5, 1000] {
                let counts: Vec<AtomicUsize> = (0..n).map(|_| AtomicUsize::new(0)).collect();
                pool.split(n, |_, r| {
                    r.for_each(|i| {
                        counts[i].fetch_add(1, Ordering::Relaxed);
                    })
                });
                pool.each(n, |_, i| {
                    counts[i].fetch_add(1, Ordering::Relaxed);
                });
                assert!(counts.iter().all(|c| c.load(Ordering::Relaxed) == 2));
            }
        }
    }

    #[test]
    fn workers_sleep_and_wake() {
        let mut pool = Pool::new(3).unwrap();
        for pause in [0, 1, 5] {
            std::thread::sleep(Duration::from_millis(pause));
            let hits = AtomicUsize::new(0);
            pool.run(&|_| {
                hits.fetch_add(1, Ordering::Relaxed);
            });
            assert_eq!(hits.load(Ordering::Relaxed), 3);
        }
    }
}
