// All kernels of the CUDA backend as one module; `cargo xtask kernels` compiles it for every architecture.
#include "attention.cuh"
#include "matmul.cuh"
#include "streams.cuh"
