import pytest
from typer.testing import CliRunner

from cli import stubs


@pytest.fixture
def faback_cli(monkeypatch):
    """Runs the command line in this process, with no plugin installed but the built-in ones."""
    from faback.cli import build_app

    monkeypatch.delenv("FABACK_DISABLE_PLUGINS", raising=False)
    monkeypatch.setenv("COLUMNS", "300")
    stubs.install(monkeypatch)
    runner = CliRunner()

    def run(*args):
        return runner.invoke(build_app(), [str(arg) for arg in args])

    return run
