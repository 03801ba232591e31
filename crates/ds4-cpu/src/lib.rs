//! The CPU backend: block dot products per instruction set, worker pool.
