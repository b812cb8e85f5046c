"""faback as an attention backend of SGLang: `--attention-backend faback`.

SGLang finds this package by its entry point `sglang.srt.plugins` and calls `register` in each of its processes. Nothing
of SGLang is imported before that.
"""

from faback_sglang.registration import register

__version__ = "0.1.0"

__all__ = ["register"]
