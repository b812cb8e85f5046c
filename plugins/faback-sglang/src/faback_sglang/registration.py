"""What SGLang calls when it loads its plugins, before it reads its arguments."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

NAME = "faback"
DRAFT_FACTORY = "sglang.srt.speculative.draft_utils.DraftBackendFactory._create_backend"


def register() -> None:
    """Makes "faback" one of SGLang's attention backends, for the target and the draft model.

    Some models run only with backends that SGLang knows by name. `FABACK_SGLANG_AS=fa3` serves such a name, too: with
    `--attention-backend fa3` they then run on faback.
    """
    from sglang.srt.arg_groups import choices
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for known, add in (
        (choices.ATTENTION_BACKEND_CHOICES, choices.add_attention_backend_choices),
        (choices.DRAFT_ATTENTION_BACKEND_CHOICES, choices.add_draft_attention_backend_choices),
        (choices.DETERMINISTIC_ATTENTION_BACKEND_CHOICES, choices.add_deterministic_attention_backend_choices),
        (
            choices.RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND,
            choices.add_radix_supported_deterministic_attention_backend_choices,
        ),
    ):
        if NAME not in known:
            add([NAME])
    if NAME not in choices.CHUNKED_PREFIX_CACHE_SUPPORTED_ATTENTION_BACKENDS:
        choices.add_chunked_prefix_cache_attention_backend(NAME)
    for name in names():
        register_attention_backend(name)(make_backend)
    HookRegistry.register(DRAFT_FACTORY, add_draft_backends, HookType.BEFORE)


def names() -> tuple[str, ...]:
    """The names of SGLang's backends that faback serves."""
    others = os.environ.get("FABACK_SGLANG_AS", "").split(",")
    return (NAME, *sorted({name.strip() for name in others} - {"", NAME}))


def make_backend(model_runner: Any) -> Any:
    """SGLang's factory of an attention backend."""
    from faback_sglang.backend import FabackBackend

    return FabackBackend(model_runner)


def add_draft_backends(
    factory: Any,
    backend_name: str,
    backend_map: MutableMapping[str, Callable[[], Any]],
    error_template: str,
    stamps_children: bool = False,
) -> None:
    """Runs before `DraftBackendFactory._create_backend`, whose map of backends has no extension point.

    Args:
        factory: the factory.
        backend_map: makers by name, each returning (name, backend); ours are put in.
        stamps_children: a backend for all steps of drafting is wanted; else one for the draft model's extends.
        backend_name, error_template: not looked at.
    """
    from faback_sglang.multi_step import FabackMultiStepBackend

    def drafting() -> tuple[str, Any]:
        steps = factory.speculative_num_steps
        return NAME, FabackMultiStepBackend(factory.draft_model_runner, factory.topk, steps)

    def extending() -> tuple[str, Any]:
        return NAME, make_backend(factory.draft_model_runner)

    made: Mapping[str, Callable[[], Any]] = dict.fromkeys(names(), drafting if stamps_children else extending)
    backend_map.update(made)
