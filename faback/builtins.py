"""The built-in plugins: modules with hooks, loaded before any entry point."""

BUILTINS: tuple[str, ...] = (
    "faback.modes.decode",
    "faback.modes.extend",
    "faback.modes.idle",
    "faback.modes.sliding_window",
    "faback.kernels.torch_ops",
    "faback.kernels.reference",
)
