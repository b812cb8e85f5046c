"""Builds what is published and looks at it: contents, a wheel from the sdist alone, and faback where Triton is not.

    python tools/check_package.py

Nothing is downloaded: builds use the hatchling that is installed, and other packages are linked.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

from plugin_suites import ROOT, environment, link, needed, quietly

BESIDE = ("SECURITY.md", "README.md", "CHANGELOG.md", "LICENSE", "constraints-dev.txt", "pyproject.toml", "Makefile")
"""What an sdist has besides the package, tests, documents, examples and tools."""

ATTENDS = """
import importlib.util, sys
import torch
import faback
from faback import AttentionBackend, AttentionLayer, BackendConfig, ForwardBatch, Pools
from faback.pools import MHAPool

assert importlib.util.find_spec("triton") is None
layer = AttentionLayer(layer_id=0, num_q_heads=2, num_kv_heads=1, head_dim=8)
kv = MHAPool(num_pages=9, layers=[layer], dtype=torch.float32)
pools = Pools(req_to_token=torch.arange(9, dtype=torch.int32).repeat(2, 1), kv=kv)
backend = AttentionBackend(BackendConfig(context_len=9, dtype=torch.float32), pools, [layer])
rows = torch.tensor([1])
batch = ForwardBatch(
    forward_mode="extend", req_pool_indices=rows, seq_lens=rows * 5, extend_seq_lens=rows * 5,
    out_cache_loc=torch.arange(5),
)
plan = backend.plan(batch)
q, k, v = torch.randn(5, 2, 8), torch.randn(5, 1, 8), torch.randn(5, 1, 8)
wanted = torch.nn.functional.scaled_dot_product_attention(
    *(x.transpose(0, 1)[None] for x in (q, k.expand(5, 2, 8), v.expand(5, 2, 8))), is_causal=True
)
torch.testing.assert_close(backend.forward(q, k, v, layer), wanted[0].transpose(0, 1), atol=1e-5, rtol=0)
broken = [record for record in backend.registry.records if record.status != "loaded"]
assert not broken, broken
print(faback.__file__)
"""


def main() -> int:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        sdist, wheel = built(folder)
        wanted = files_of("faback")
        check("wheel", in_wheel(wheel), wanted)
        check("sdist", {name for name in in_sdist(sdist) if name.startswith("faback/")}, wanted)
        beside = {*BESIDE, *files_of("tests"), *files_of("docs"), *files_of("examples"), *files_of("tools")}
        absent = sorted(beside - in_sdist(sdist))
        if absent:
            raise SystemExit(f"sdist lacks {absent}")
        without_triton(folder, wheel)
    print(f"{sdist.name} and {wheel.name}: {len(wanted)} files of faback each; the wheel attends without Triton")
    return 0


def built(folder: Path) -> tuple[Path, Path]:
    """The sdist, and the wheel that was built from it, which must be the one that is built from the checkout."""
    build = [sys.executable, "-m", "build", "--no-isolation"]
    quietly([*build, "--outdir", folder / "dist", ROOT], folder)
    quietly([*build, "--wheel", "--outdir", folder / "direct", ROOT], folder)
    (sdist,) = folder.glob("dist/*.tar.gz")
    (wheel,), (direct,) = folder.glob("dist/*.whl"), folder.glob("direct/*.whl")
    with zipfile.ZipFile(wheel) as mine, zipfile.ZipFile(direct) as theirs:
        listed = [{item.filename: item.CRC for item in archive.infolist()} for archive in (mine, theirs)]
    if listed[0] != listed[1]:
        differing = sorted(name for name, _ in listed[0].items() ^ listed[1].items())
        raise SystemExit(f"the wheel from the sdist is not the one from the checkout: {differing}")
    return sdist, wheel


def files_of(folder: str) -> set[str]:
    """What git knows in a folder; all that is there where this is no checkout."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", folder]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if listed.returncode == 0:
        return {name for name in listed.stdout.splitlines() if (ROOT / name).exists()}
    paths = (path for path in (ROOT / folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {str(path.relative_to(ROOT)) for path in paths}


def in_wheel(wheel: Path) -> set[str]:
    """What a wheel installs, its metadata apart."""
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def in_sdist(sdist: Path) -> set[str]:
    with tarfile.open(sdist) as archive:
        return {name.partition("/")[2] for name in archive.getnames()}


def check(what: str, found: set[str], wanted: set[str]) -> None:
    if found != wanted:
        raise SystemExit(f"{what}: lacks {sorted(wanted - found)}, has besides {sorted(found - wanted)}")


def without_triton(folder: Path, wheel: Path) -> None:
    """Installs the wheel where nothing is but what it declares, Triton left out, as on systems that have none."""
    path = folder / "environment"
    venv.EnvBuilder(symlinks=True, with_pip=False).create(path)
    python = path / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-index", "--no-deps"]
    quietly([*pip, wheel], folder)
    (site,) = path.glob("lib/python*/site-packages")
    for distribution in needed(["faback"], site):
        if distribution.metadata["Name"] != "triton":
            link(distribution, site)
    where = quietly([python, "-c", ATTENDS], folder).splitlines()[-1]
    if not Path(where).is_relative_to(site):
        raise SystemExit(f"wanted faback from its wheel, got {where}")
    command = subprocess.run([python, "-m", "faback"], cwd=folder, env=environment(), capture_output=True, text=True)
    if command.returncode != 2 or "pip install faback[cli]" not in command.stderr:
        raise SystemExit(f"`python -m faback` without typer: {command.returncode}, {command.stderr}")


if __name__ == "__main__":
    sys.exit(main())
