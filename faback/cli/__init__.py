"""The command line: one command per file, put together here.

Typer and rich are an extra of the package, so nothing is imported from them before `main` has seen that they are there.
"""

import sys
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import typer

NEEDED = ("typer", "rich")


def main() -> None:
    """Runs the command line on `sys.argv`; the entry point of the script `faback`."""
    missing = [name for name in NEEDED if not _importable(name)]
    if missing:
        print(f"faback: the command line needs {' and '.join(missing)}: pip install faback[cli]", file=sys.stderr)
        raise SystemExit(2)
    build_app()(prog_name="faback")


def build_app() -> "typer.Typer":
    """The application with all its commands."""
    import typer

    from faback.cli import bench, check, doctor, explain, modes, new_plugin, show, tune
    from faback.cli.output import Commands

    app = typer.Typer(
        cls=Commands,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        help="faback: a modular paged flash-attention backend for LLM inference engines.",
    )
    for name, module in (
        ("doctor", doctor),
        ("modes", modes),
        ("explain", explain),
        ("show", show),
        ("check", check),
        ("bench", bench),
        ("tune", tune),
        ("new-plugin", new_plugin),
    ):
        app.command(name)(module.command)
    anything = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
    app.command("demo", context_settings=anything)(_demo())
    return app


def _demo() -> Callable[..., None]:
    """A command that imports the demonstration only when it is run, and hands all its arguments over."""
    import typer

    def demo(ctx: typer.Context) -> None:
        """Serve a real language model through faback and compare it with Transformers' own attention."""
        alone = typer.Typer(add_completion=False)
        alone.command("demo")(import_module("faback.cli.demo").demo)
        code = typer.main.get_command(alone).main(ctx.args, prog_name="faback demo", standalone_mode=False)
        if code:
            raise typer.Exit(code)

    return demo


def _importable(name: str) -> bool:
    try:
        import_module(name)
    except ModuleNotFoundError:
        return False
    return True
