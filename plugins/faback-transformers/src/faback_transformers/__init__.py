"""faback for Transformers: continuous batching in pages for decoder-only models, and plain attention for any model.

Importing the package registers the attention implementation "faback".
"""

from faback_transformers.attention import NAME, PACKED, AttentionContext, PagedContext, attending
from faback_transformers.continuous import continuous_batching
from faback_transformers.drafting import Drafter, PromptLookup
from faback_transformers.generator import PagedGenerator
from faback_transformers.layers import layers_of
from faback_transformers.registration import register
from faback_transformers.requests import Completion, Event, Sampling
from faback_transformers.stats import Stats

__version__ = "0.1.0"

__all__ = [
    "NAME",
    "PACKED",
    "AttentionContext",
    "Completion",
    "Drafter",
    "Event",
    "PagedContext",
    "PagedGenerator",
    "PromptLookup",
    "Sampling",
    "Stats",
    "attending",
    "continuous_batching",
    "layers_of",
    "register",
]

register()
