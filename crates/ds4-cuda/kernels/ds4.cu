// All kernels of the CUDA backend as one module; `cargo xtask kernels` compiles it for every architecture.
#include "attention.cuh"
#include "flash.cuh"
#include "gemm.cuh"
#include "integer.cuh"
#include "matmul.cuh"
#include "streams.cuh"
