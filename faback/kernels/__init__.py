"""Kernel providers, each a plugin of its own, and the operations that fill metadata and write KV."""
