"""What a plan is shown to see is what the oracle says, however it is cut into parts; and it can be drawn."""

from __future__ import annotations

from collections import Counter

import attrs
import pytest
import torch

from faback import AttentionBackend, ConfigError
from faback.cli.check import load_registry
from faback.testing import MODES, OVERLAYS, Options, Scenario, impossible
from faback.testing.drawing import MAX_LINES, draw, save
from faback.testing.pictures import NO_KEY, TWICE, UNSEEN, Block, Mark, Panel, _cells, parts_of, planned


def backend_for(scenario, kernel):
    pools = scenario.pools()
    config = attrs.evolve(scenario.config, kernels=kernel)
    return AttentionBackend(config, pools, scenario.layers, registry=load_registry()), pools


@pytest.mark.parametrize("kernel", ["reference", "poor"])
@pytest.mark.parametrize("mode", MODES)
def test_a_panel_shows_as_many_keys_as_the_oracle(mode, kernel):
    for overlay in OVERLAYS:
        for more in ({}, {"topk": 2}, {"hybrid": True}, {"padded_rows": 1, "padded_tokens": 1}):
            options = Options(mode=mode, overlay=overlay, page_size=4, seed=2, max_len=14, **more)
            if impossible(options) is not None:
                continue
            scenario = Scenario.make(**attrs.asdict(options, recurse=False))
            backend, pools = backend_for(scenario, kernel)
            for step in scenario.steps:
                step.enter(pools)
                for call in step.calls:
                    (panel,) = planned(backend, step.batch, [call.layer])
                    assert not panel.notes and TWICE not in panel.marks
                    shown = [line for block in panel.blocks for line in (block.cells >= 0).sum(1).tolist()]
                    expected = [len(keys) for keys in call.keys][: len(shown)]
                    assert shown == expected, f"{options}, layer {call.layer.layer_id}"
                    if mode in ("decode", "extend", "mixed") and not call.layer.cross:
                        assert positions(panel) == [
                            sorted(key.position for key in keys) for keys in call.keys[: len(shown)]
                        ]
                backend.plan(step.batch)


def positions(panel):
    """Per query, the positions of the keys that are shown."""
    return [
        [int(block.keys[column]) for column, cell in enumerate(cells) if cell >= 0]
        for block in panel.blocks
        for cells in block.cells.tolist()
    ]


def test_what_two_parts_see_and_what_is_nobodys_is_said():
    scenario = Scenario.make(mode="extend", lengths=((2, 3), (0, 2)), page_size=4)
    backend, pools = backend_for(scenario, "reference")
    scenario.steps[0].enter(pools)
    answer, (part,) = parts_of(backend, scenario.steps[0].batch, scenario.layers[0])
    cells, strays = _cells(answer.segment, [part.segment, part.segment])
    assert strays == 0 and set(cells.flatten().tolist()) == {2, UNSEEN, NO_KEY}
    wide = attrs.evolve(part.segment, kv_len=part.segment.kv_len + 1, max_kv_len=part.segment.max_kv_len + 1)
    pools.req_to_token[:] = pools.req_to_token.clamp(0, 3)
    assert _cells(answer.segment, [wide])[1] > 0


def some_panel(queries=3, keys=6, **more):
    cells = torch.full((queries, keys), UNSEEN)
    cells[:, 0] = 0
    block = Block(
        title="request 0",
        queries=tuple(map(str, range(queries))),
        keys=tuple(map(str, range(keys))),
        cells=cells,
        **more,
    )
    return Panel(title="layer 0", marks=(Mark("here", "#"),), blocks=(block,))


def test_text():
    panel = some_panel(queries=1, keys=4, borders=(2,), tail=3)
    assert str(panel) == "layer 0\nrequest 0:\n0  #.|.>.\n# here\n. not seen"
    assert "no queries" in str(attrs.evolve(panel, blocks=()))


def test_the_same_figure_gives_the_same_bytes(tmp_path):
    for suffix in ("svg", "png"):
        paths = [tmp_path / f"{number}.{suffix}" for number in range(2)]
        for path in paths:
            save(draw([some_panel(), some_panel()], "title"), path, "what it is")
        assert paths[0].read_bytes() == paths[1].read_bytes()
        assert b"what it is" in paths[0].read_bytes()


def test_large_pictures_stay_small(tmp_path):
    panel = some_panel(queries=300, keys=5000, borders=tuple(range(1, 5000)))
    save(draw([panel]), tmp_path / "a.svg")
    text = (tmp_path / "a.svg").read_text()
    assert "236 more queries are not drawn" in text and "page borders are not drawn" in text
    assert len(panel.blocks[0].borders) > MAX_LINES and len(text) < 300_000


def test_a_file_stays_as_it_was_where_nothing_can_be_written(tmp_path):
    figure, path = draw([some_panel()]), tmp_path / "a.png"
    path.write_text("mine")
    figure.savefig = lambda *args, **options: 1 / 0
    with pytest.raises(ZeroDivisionError):
        save(figure, path)
    assert path.read_text() == "mine" and Counter(tmp_path.iterdir()) == Counter([path])


@pytest.mark.parametrize("panels", [[], [attrs.evolve(some_panel(), blocks=())]], ids=["none", "empty"])
def test_nothing_is_no_picture(panels):
    with pytest.raises(ConfigError, match="a batch with queries"):
        draw(panels)
