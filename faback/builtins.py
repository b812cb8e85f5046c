"""The built-in plugins: modules with hooks, loaded before any entry point."""

BUILTINS: tuple[str, ...] = (
    "faback.modes.decode",
    "faback.modes.draft_decode",
    "faback.modes.draft_extend",
    "faback.modes.embedding",
    "faback.modes.encoder_decoder",
    "faback.modes.encoder_only",
    "faback.modes.extend",
    "faback.modes.hybrid_pool",
    "faback.modes.idle",
    "faback.modes.local_attention",
    "faback.modes.prefill_aware_swa",
    "faback.modes.sliding_window",
    "faback.modes.target_verify",
    "faback.kernels.torch_ops",
    "faback.kernels.reference",
)
