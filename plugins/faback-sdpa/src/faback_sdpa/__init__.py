"""A faback kernel on PyTorch's `scaled_dot_product_attention`: `BackendConfig(kernels="sdpa")`."""

from faback_sdpa.kernel import NAME, Sdpa
from faback_sdpa.ranking import Ranking

__version__ = "0.1.0"

__all__ = ["NAME", "Ranking", "Sdpa"]
