"""A small decoder whose attention is somebody else's: for engines to serve and for tests to run densely."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from faback import AttentionLayer

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""attend(layer, q, k, v) -> out, each [tokens, heads, dim]."""


class Model(nn.Module):
    """A decoder with grouped queries, rotary positions and, in odd layers, a sliding window."""

    def __init__(self, vocab: int = 97, layers: int = 4, heads: int = 4, kv_heads: int = 2, dim: int = 16) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.dim = heads, kv_heads, dim
        width = heads * dim
        self.embed, self.head = nn.Embedding(vocab, width), nn.Linear(width, vocab, bias=False)
        self.qkv = nn.ModuleList(nn.Linear(width, (heads + 2 * kv_heads) * dim, bias=False) for _ in range(layers))
        self.out = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))
        self.attention = [
            AttentionLayer(
                layer_id=i, num_q_heads=heads, num_kv_heads=kv_heads, head_dim=dim, window=11 if i % 2 else None
            )
            for i in range(layers)
        ]

    def forward(self, attend: Attend, ids: Tensor, positions: Tensor) -> Tensor:
        """ids, positions [tokens] -> logits [tokens, vocab]."""
        x = self.embed(ids)
        half = self.dim // 2
        angles = positions[:, None, None] * 100.0 ** (-torch.arange(half, device=x.device) / half)
        turn = torch.polar(torch.ones_like(angles), angles)
        for i, (qkv, out) in enumerate(zip(self.qkv, self.out, strict=True)):
            heads = qkv(nn.functional.rms_norm(x, x.shape[-1:])).view(len(ids), -1, self.dim)
            q, k, v = heads.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
            q, k = (
                torch.view_as_real(torch.view_as_complex(h.unflatten(2, (half, 2))) * turn).flatten(2) for h in (q, k)
            )
            x = x + out(attend(i, q, k, v).flatten(1))
        return self.head(nn.functional.rms_norm(x, x.shape[-1:]))
