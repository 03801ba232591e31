//! Tokenizer, chat encoder and streaming output parser of DeepSeek V4.
