#!/usr/bin/env bash
# On a machine with an NVIDIA card: the goldens, every operation by itself, and the bench, as one log.
# usage: bench/gpu.sh SUITE MODEL [CONTEXT...]   (SUITE: target/release/examples/suite of ds4-cuda)
set -euo pipefail
suite=$1 model=$2
shift 2
nvidia-smi --query-gpu=name,driver_version,memory.used --format=csv,noheader
"$suite" goldens
"$suite" ops "$model" 1 64
"$suite" bench "$model" "${@:-2048}"
