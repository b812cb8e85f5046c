"""faback: a modular paged flash-attention backend for LLM inference engines."""
