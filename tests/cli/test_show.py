import json
import re
import sys
from importlib import metadata
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from xml.etree import ElementTree

import pytest

from cli import stubs
from faback.testing import MODES, OVERLAYS, Options, impossible

ROOT = Path(__file__).parents[2]


def tool(name):
    spec = spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


draw_docs = tool("draw_docs")


@pytest.fixture
def show(faback_cli):
    """Runs `faback show` on the reference kernel."""

    def run(*args):
        kernel = () if "--kernel" in args else ("--kernel", "reference")
        return faback_cli("show", *args, *kernel)

    return run


def panels(show, *args):
    result = show("--json", *args)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_a_decode_sees_all_of_its_request(show):
    (panel,) = panels(show, "--lengths", "6,3+1")
    assert panel["title"] == "layer 0: full attention" and panel["marks"] == ["decode (faback) on reference"]
    assert [request["cells"] for request in panel["requests"]] == [[[0] * 6], [[0] * 4]]
    assert [request["queries"] for request in panel["requests"]] == [["5"], ["3"]]
    assert [request["borders"] for request in panel["requests"]] == [[4], []]


def test_layers_of_other_kinds_have_panels_of_their_own(show):
    full, sliding = panels(show, "--mode", "extend", "--window", 1, "--lengths", "1+3")
    assert full["requests"][0]["cells"] == [[0, 0, -1, -1], [0, 0, 0, -1], [0, 0, 0, 0]]
    assert sliding["title"] == "layer 1: window 1\nsliding_window (faback)"
    assert sliding["requests"][0]["cells"] == [[0, 0, -1, -1], [-1, 0, 0, -1], [-1, -1, 0, 0]]


def test_parts_are_told_apart_and_tails_are_marked(show):
    args = ("--mode", "target_verify", "--topk", 2, "--lengths", "5", "--draft-tokens", 3)
    (whole,), (cut,) = panels(show, *args), panels(show, *args, "--kernel", "poor")
    assert [mark.partition(" (faback) ")[2] for mark in cut["marks"]] == [
        "cascade 1, query_rows on poor",
        "cascade 2, compact on poor",
    ]
    (one,), (two,) = whole["requests"], cut["requests"]
    assert one["tail"] == two["tail"] == 5
    assert all(line[:5] == [0] * 5 and 1 not in line[:5] for line in two["cells"])
    assert [[min(cell, 0) for cell in line] for line in two["cells"]] == one["cells"]
    assert all(set(line[5:]) <= {-1, 1} for line in two["cells"])


def test_drafts_that_continue_the_text_are_marked_too(show):
    (panel,) = panels(show, "--mode", "target_verify", "--lengths", "5", "--draft-tokens", 3)
    assert panel["requests"][0]["tail"] == 5


def test_encoder_and_text(show):
    args = ("--encoder-lengths", "3,5", "--lengths", "4,2", "--window", 1)
    text, cross, sliding = panels(show, *args)
    assert cross["axis"] == "encoder token" and text["axis"] == "key position"
    assert [len(request["keys"]) for request in cross["requests"]] == [3, 5]
    assert [request["queries"] for request in cross["requests"]] == [["3"], ["1"]]
    assert sliding["requests"][0]["cells"] == [[-1, -1, 0, 0]]
    assert text["requests"][0]["borders"] == [1]  # three encoder tokens share the first page


@pytest.mark.parametrize("kernel", ["reference", "poor"])
@pytest.mark.parametrize("mode", MODES)
def test_every_scenario_can_be_shown(show, mode, kernel):
    for overlay in OVERLAYS:
        for more in ([], ["--topk", 2], ["--hybrid"]):
            fields = {"topk": 2} if "--topk" in more else {"hybrid": True} if more else {}
            if impossible(Options(mode=mode, overlay=overlay, **fields)) is not None:
                continue
            found = panels(show, "--mode", mode, "--overlay", overlay, "--kernel", kernel, "--seed", 1, *more)
            for panel in found:
                assert not panel["notes"] and "seen twice" not in panel["marks"]


def test_text_without_a_file(show):
    result = show("--mode", "extend", "--lengths", "3+3")
    assert result.stdout.splitlines() == [
        "layer 0: full attention",
        "request 0:",
        "3  ####|..",
        "4  ####|#.",
        "5  ####|##",
        "# extend (faback) on reference",
        ". not seen",
    ]


def test_a_plugin_is_named(show, monkeypatch):
    from faback_streaming_llm import overlay

    stubs.install(monkeypatch, stubs.Point("streaming-llm", overlay))
    settings = 'streaming-llm={"sinks": 1, "window": 2}'
    (panel,) = panels(show, "--lengths", "6", "--set", settings)
    assert panel["title"].endswith("streaming-llm (streaming-llm-dist)")
    assert panel["requests"][0]["cells"] == [[0, -1, -1, 0, 0, 0]]


def test_pictures_are_what_their_names_say(show, tmp_path):
    png, svg = tmp_path / "a.png", tmp_path / "a.svg"
    for path in (png, svg):
        result = show(path, "--mode", "mixed", "--lengths", "3+1,2+5")
        assert result.exit_code == 0 and str(path) in result.stdout
    assert png.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    root = ElementTree.parse(svg).getroot()
    words = " ".join(text.text or "" for text in root.iter("{http://www.w3.org/2000/svg}text"))
    for said in ("mixed, page size 4", "request 1", "query position", "key position", "page border", "not seen"):
        assert said in words
    assert sorted(tmp_path.iterdir()) == [png, svg]


def test_many_queries_are_cut_and_the_picture_says_so(show, tmp_path):
    path = tmp_path / "a.svg"
    assert show(path, "--mode", "extend", "--lengths", "0+9,0+7", "--max-queries", 11).exit_code == 0
    assert "5 more queries are not drawn" in path.read_text()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["a.gif"], ".png or .svg"),
        (["missing/a.svg"], "a place to write to"),
        (["--mode", "bogus"], "bogus"),
        (["--overlay", "bogus"], "bogus"),
        (["--overlay", "full", "--window", 3], "--window: wanted overlay window"),
        (["--chunk", 3, "--overlay", "window"], "--chunk"),
        (["--topk", 2], "only speculation has branches"),
        (["--lengths", "1+2+3"], "CACHED+NEW"),
        (["--lengths", "many"], "--lengths"),
        (["--encoder-lengths", "3", "--lengths", "4,5"], "1 requests"),
        (["--set", "x={"], "NAME=JSON"),
        (["--set", "x=3"], "JSON object"),
        (["--set", "bogus={}"], "bogus"),
        (["--kernel", "bogus"], "bogus"),
        (["a.svg", "--mode", "extend", "--lengths", "4+0"], "a batch with queries"),
    ],
)
def test_errors_are_one_message_and_leave_nothing_behind(show, monkeypatch, tmp_path, flags, words):
    monkeypatch.chdir(tmp_path)
    result = show(*flags)
    assert result.exit_code == 2
    assert words in result.stderr and "Traceback" not in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_without_matplotlib_the_extra_is_named(show, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = show(tmp_path / "a.svg")
    assert result.exit_code == 2 and "faback[docs]" in result.stderr
    assert show().exit_code == 0


# ---- the pictures of the documentation


@pytest.mark.parametrize("name", draw_docs.PICTURES)
def test_pictures_of_the_docs_are_up_to_date(name, tmp_path):
    there, now = draw_docs.FOLDER / f"{name}.svg", draw_docs.draw(name, tmp_path)
    assert there.stat().st_size < 150_000
    hint = "tools/draw_docs.py draws the pictures anew"
    assert digest(there) == digest(now), hint
    if metadata.version("matplotlib") == pinned("matplotlib"):
        assert there.read_bytes() == now.read_bytes(), hint


def test_no_picture_is_left_over():
    assert {path.stem for path in draw_docs.FOLDER.iterdir()} == set(draw_docs.PICTURES)


def digest(path):
    """Of the data that were drawn."""
    return re.search(r"sha256 (\w{64})", path.read_text())[1]


def pinned(name):
    return re.search(rf"^{name}==(\S+)", (ROOT / "constraints-dev.txt").read_text(), re.MULTILINE)[1]
