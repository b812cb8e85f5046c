"""Block-sparse attention for faback: a long request's queries see its sink, their neighbours and the best blocks.

The package is a plugin of faback and does nothing until `config.options["block_sparse"]` asks for it.
"""

from faback_block_sparse.layers import GroupPerLayer, own_groups, sparse_layers
from faback_block_sparse.options import NAME, Options
from faback_block_sparse.queries import QueryMemory

__version__ = "0.1.0"

__all__ = ["NAME", "GroupPerLayer", "Options", "QueryMemory", "own_groups", "sparse_layers"]
