//! DeepSeek V4: hyper-parameters, typed weights, key-value layout, memory plan, the Backend trait and the forward pass over it.
