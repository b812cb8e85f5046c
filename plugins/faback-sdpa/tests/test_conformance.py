"""faback's own kit for kernels."""

from __future__ import annotations

import faback_sdpa.plugin as package
from faback.testing import Options
from faback.testing.conformance import KernelConformance


class TestSdpa(KernelConformance):
    plugin = package
    kernel = "sdpa"

    def cells(self):
        yield from super().cells()
        yield Options(mode="draft_extend", strided_rows=True, page_size=4)

    def served(self):
        """What no scenario of the kit asks for has a test of its own in test_equal.py."""
        return super().served() | {"sharded", "positions"}
