"""faback as an attention backend of vLLM: `--attention-backend FABACK`.

vLLM finds `register` by its entry point `vllm.general_plugins`. Nothing here imports vLLM before it is called.
"""

from __future__ import annotations

from faback import FabackError

__version__ = "0.1.0"

__all__ = ["NAME", "register"]

NAME = "FABACK"
"""What vLLM calls the backend."""
PATH = "faback_vllm.backend.FabackAttentionBackend"


def register() -> None:
    """Makes vLLM know the backend as FABACK, and as CUSTOM where nobody else is. Once or more often.

    Raises:
        FabackError: another backend is called FABACK.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if NAME not in AttentionBackendEnum.__members__:
        register_backend(NAME, PATH)
    elif AttentionBackendEnum[NAME].get_path() != PATH:
        got = AttentionBackendEnum[NAME].get_path()
        raise FabackError(f"vLLM's attention backend {NAME}", wanted=PATH, got=got, hint="VLLM_PLUGINS names plugins.")
    if not AttentionBackendEnum.CUSTOM.is_overridden():
        register_backend(AttentionBackendEnum.CUSTOM, PATH)
