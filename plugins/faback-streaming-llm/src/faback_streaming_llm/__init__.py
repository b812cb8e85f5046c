"""StreamingLLM for faback: full-attention layers see the first tokens of a request and a sliding window.

The package is a plugin of faback and does nothing until `config.options["streaming-llm"]` asks for it.
"""

from faback_streaming_llm.overlay import NAME, StreamingLLM

__version__ = "0.1.0"

__all__ = ["NAME", "StreamingLLM"]
