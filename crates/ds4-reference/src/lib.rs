//! The clear f32 backend that is the specification, and the conformance suite that every backend runs.
