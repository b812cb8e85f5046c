"""Forward modes and overlays, one per file, each a plugin of its own."""
