//! Sessions, pages, prefix tree, scheduler, sampler, grammar and snapshots over Stages.
