"""The README keeps to the truth: its Python code runs."""

import re
from pathlib import Path

import torch

README = Path(__file__).parent.parent / "README.md"
FENCE = re.compile(r"^```python\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)


def test_the_code_runs():
    text = README.read_text()
    found = list(FENCE.finditer(text))
    assert found
    with torch.random.fork_rng():
        torch.manual_seed(0)
        namespace = {"__name__": "readme"}
        for block in found:
            line = text.count("\n", 0, block.start("code"))
            exec(compile("\n" * line + block["code"], str(README), "exec"), namespace)
