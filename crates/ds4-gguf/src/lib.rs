//! GGUF container (reader over a memory map, writer) and ggml block formats: layout, exact dequantise, quantise.
