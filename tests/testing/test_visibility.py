"""Who sees whom, written out by hand for every mode and overlay. 1 = sees; rows are queries, columns keys."""

from __future__ import annotations

import pytest

from faback import AttentionLayer
from faback.testing import Facts, Token, visibility_matrix
from faback.testing.visibility import DRAFT, ENCODER

TEXT = [Token(0, position) for position in range(6)]
ENCODED = [Token(0, index, ENCODER) for index in range(2)]


def layer(**fields):
    return AttentionLayer(layer_id=0, num_q_heads=1, num_kv_heads=1, head_dim=4, **fields)


def table(queries, keys, rule, facts=None, **fields):
    matrix = visibility_matrix(queries, keys, layer(**fields), facts or Facts(), rule)
    return ["".join("1" if seen else "." for seen in row) for row in matrix.tolist()]


def drafted(position, branch=0, step=0):
    return Token(0, position, DRAFT, branch=branch, step=step)


def test_decode():
    assert table(TEXT[5:], TEXT, "decode") == ["111111"]


@pytest.mark.parametrize("rule", ["extend", "mixed", "draft_extend", "embedding"])
def test_extend(rule):
    assert table(TEXT[3:], TEXT, rule) == ["1111..", "11111.", "111111"]


def test_requests_do_not_see_each_other():
    assert table(TEXT[5:], [Token(1, 0), Token(0, 0)], "decode") == [".1"]


def test_draft_chain():
    """Committed 0 1 2, drafts at 3 4 5; text behind the committed length is a later pass and unseen."""
    chain = [drafted(3 + step, step=step) for step in range(3)]
    assert table(chain, [*TEXT[:4], *chain], "draft_chain", Facts(committed=3)) == ["111.1..", "111.11.", "111.111"]


def test_draft_branches():
    """Two branches of two steps each behind two committed tokens: never another branch."""
    keys = [*TEXT[:2], *(drafted(2 + step, branch, step) for branch in range(2) for step in range(2))]
    queries = [drafted(3, 0, 1), drafted(3, 1, 1), drafted(2, 1, 0)]
    assert table(queries, keys, "draft_branches", Facts(committed=2)) == ["1111..", "11..11", "11..1."]


def test_draft_branches_have_windows_of_their_own():
    keys = [*TEXT[:3], *(drafted(3 + step, branch, step) for branch in range(2) for step in range(2))]
    facts = Facts(committed=3)
    assert table([drafted(4, 1, 1)], keys, "draft_branches", facts, window=2) == ["..1..11"]
    assert table([drafted(4, 1, 1)], keys, "draft_branches", facts, chunk=4) == ["......1"]


def test_verify_chain():
    chain = [drafted(2 + node, node, node) for node in range(3)]
    assert table(chain, [*TEXT[:2], *chain], "verify_chain", Facts(committed=2)) == ["111..", "1111.", "11111"]
    assert table(chain, [*TEXT[:2], *chain], "verify_chain", Facts(committed=2), window=1) == [
        ".11..",
        "..11.",
        "...11",
    ]


def test_verify_tree():
    """Node 1 is the root, 0 and 2 are its children: the mask alone decides, on both sides of the diagonal."""
    tree = ((True, True, False), (False, True, False), (False, True, True))
    nodes = [drafted(3, 0, 1), drafted(2, 1, 0), drafted(3, 2, 1)]
    keys, facts = [*TEXT[:2], *nodes], Facts(committed=2, tree=tree)
    assert table(nodes, keys, "verify_tree", facts) == ["1111.", "11.1.", "11.11"]
    assert table(nodes, keys, "verify_tree", facts, window=1) == ["..11.", ".1.1.", "...11"]
    assert table(nodes, keys, "verify_tree", facts, chunk=3) == ["..1..", "11.1.", "....1"]


def test_sliding_window():
    assert table(TEXT, TEXT, "extend", window=2) == ["1.....", "11....", "111...", ".111..", "..111.", "...111"]
    assert table(TEXT[5:], TEXT, "decode", window=0) == [".....1"]


def test_bidirectional():
    assert table(TEXT[:1], TEXT, "embedding", causal=False) == ["111111"]
    assert table(TEXT[2:4], TEXT, "embedding", causal=False, window=1) == [".111..", "..111."]


def test_local():
    assert table(TEXT, TEXT, "extend", chunk=3) == ["1.....", "11....", "111...", "...1..", "...11.", "...111"]


def test_prefill_aware():
    """Prompt 0 1, window 2: two tokens with the query, or three if inclusive, and the prompt."""
    assert table(TEXT[4:], TEXT, "decode", Facts(prompt=2), window=2) == ["11.11.", "11..11"]
    assert table(TEXT[4:], TEXT, "decode", Facts(prompt=2, inclusive=True), window=2) == ["11111.", "11.111"]
    assert table(TEXT[2:3], TEXT, "decode", Facts(prompt=2), window=2) == ["111..."]
    assert table(TEXT[5:], TEXT, "decode", Facts(prompt=2)) == ["111111"], "full layers are unaffected"
    assert table(TEXT[4:], TEXT, "extend", Facts(), window=2) == ["..111.", "...111"], "prompts use the plain window"


def test_encoder_decoder():
    keys = [*ENCODED, *TEXT]
    assert table(TEXT[2:4], keys, "extend") == ["..111...", "..1111.."]
    assert table(TEXT[2:4], keys, "extend", cross=True) == ["11......", "11......"]
    assert table(TEXT[2:4], keys, "extend", window=1) == ["...11...", "....11.."]
    nodes = [drafted(2, 0, 0), drafted(3, 1, 1)]
    facts = Facts(committed=2, tree=((True, False), (True, True)))
    assert table(nodes, [*ENCODED, *TEXT[:2], *nodes], "verify_tree", facts, cross=True, window=0) == [
        "11....",
        "11....",
    ]


def test_padding_sees_nothing():
    assert table([None, TEXT[0]], TEXT, "decode") == ["......", "1....."]
