//! The HTTP APIs: OpenAI chat, completions, Responses, Anthropic messages.
