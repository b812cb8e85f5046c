"""Lowerings: rewritings of a segment that a kernel cannot do into ones that it can, one per file."""
