"""faback's own kit for modes: where the choice of blocks is no choice, block-sparse passes are known token by token."""

from __future__ import annotations

import attrs
import pytest
import torch

from faback.testing.conformance import LAYOUTS, ModeConformance, taken_over
from faback.testing.options import Options
from faback.testing.rejudged import rejudged
from faback.testing.scenario import Scenario
from faback_block_sparse import plugin

EVERYTHING = {"block_size": 16, "top_k": 1000}
NEAR = {"block_size": 16, "top_k": 0, "local_blocks": 2, "recent": "local"}
LENGTHS = ((70, 20), (3, 60), (50, 9), (0, 1))
PLAIN = {"block_sparse_extend": "extend", "block_sparse_decode": "decode"}


class Kit(ModeConformance):
    """Long enough requests that blocks are left out."""

    plugin, entry_point = plugin, "block_sparse"
    options, needs = {"block_sparse": EVERYTHING}, ("query_summary",)

    def cells(self):
        for layout in LAYOUTS:
            requests = LENGTHS[: layout.get("batch_size")]
            yield Options(mode=PLAIN[self.mode], lengths=requests, **layout)

    def scenario(self, cell):
        made = Scenario.make(**attrs.asdict(cell, recurse=False))
        steps = []
        for step in made.steps:
            batch = step.batch
            draw = torch.Generator().manual_seed(batch.bs)
            query = torch.randn(batch.bs, 1, made.layers[0].head_dim, generator=draw)
            steps.append(attrs.evolve(step, batch=attrs.evolve(batch, extras={"query_summary": query})))
        return taken_over(attrs.evolve(made, steps=tuple(steps)), self.mode)


class NearKit(Kit):
    """Nothing is chosen: the first block, and the local ones."""

    options = {"block_sparse": NEAR}  # noqa: RUF012

    def scenario(self, cell):
        return rejudged(super().scenario(cell), self.sees)

    def sees(self, query, key, layer):
        size = NEAR["block_size"]
        block = key.position // size
        return block == 0 or block > query.position // size - NEAR["local_blocks"]


class TestExtendSeesEverything(Kit):
    mode = "block_sparse_extend"


class TestDecodeSeesEverything(Kit):
    mode = "block_sparse_decode"


class TestExtendSeesWhatIsNear(NearKit):
    mode = "block_sparse_extend"


class TestDecodeSeesWhatIsNear(NearKit):
    mode = "block_sparse_decode"


@pytest.mark.parametrize("kit", [TestExtendSeesWhatIsNear, TestDecodeSeesWhatIsNear])
def test_blocks_are_left_out_and_missed(kit, tmp_path, monkeypatch):
    monkeypatch.setenv("FABACK_PICTURES", str(tmp_path))
    made = kit()
    made.sees = lambda query, key, layer: True
    with pytest.raises(AssertionError, match="must see"):
        for cell in made.cells():
            made.test_it_sees_what_it_must(cell, "native")
