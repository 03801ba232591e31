//! The CUDA backend: kernels compiled ahead, driver API loaded at run time.
