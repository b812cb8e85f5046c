"""Times attention kernels on one layer, each figure beside its check.

    python benchmarks/kernels.py --kernels triton --out benchmarks/results/h200-attention.json

A Llama-3-8B layer (32 query heads, 8 KV heads, dim 128, bf16), random pages, CUDA graph replays, median.
FlashAttention 3 (`flash_attn_interface`), where it is installed, is timed in the same run, in turn, on the same cache.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from cases import CASES, Case

from faback import AttentionBackend, AttentionLayer, BackendConfig, ForwardBatch, Pools, SpeculativeConfig
from faback.pools import MHAPool

HEADS, KV_HEADS, DIM = 32, 8, 128
COPY_TB_S = 4.2
DEVICE = torch.device("cuda")


class Problem:
    """One case laid out on the GPU: pools with random pages, a batch, q, k, v, and a backend for any kernel."""

    def __init__(self, case: Case) -> None:
        self.case = case
        page, total = case.page_size, [cached + new for cached, new in case.lens]
        pages = [-(-n // page) for n in total]
        order = (torch.randperm(sum(pages)) + 1).tolist()
        table = torch.zeros(len(total) + 1, max(total), dtype=torch.int32)
        within, at = torch.arange(page), 0
        for row, count in enumerate(pages, 1):
            slots = (torch.tensor(order[at : at + count])[:, None] * page + within).flatten()
            table[row, : total[row - 1]] = slots[: total[row - 1]]
            at += count
        dtype = torch.float8_e4m3fn if case.fp8 else torch.bfloat16
        scales = {"k_scale": 0.5, "v_scale": 0.25} if case.fp8 else {}
        self.layer = AttentionLayer(
            layer_id=0, num_q_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM, window=case.window, **scales
        )
        self.kv = MHAPool(num_pages=sum(pages) + 1, page_size=page, layers=[self.layer], dtype=dtype, device=DEVICE)
        for buffer in self.kv.buffers(self.layer):
            buffer.copy_(torch.randn(buffer.shape, dtype=torch.bfloat16, device=DEVICE))
        self.pools = Pools(req_to_token=table.to(DEVICE), kv=self.kv)
        self.tokens = sum(new for _, new in case.lens)
        self.q = torch.randn(self.tokens, HEADS, DIM, dtype=torch.bfloat16, device=DEVICE)
        self.out = torch.empty_like(self.q)
        self.batch = self._batch(table)

    def _batch(self, table: torch.Tensor) -> ForwardBatch:
        case, rows = self.case, len(self.case.lens)
        cached = torch.tensor([c for c, _ in case.lens])
        new = torch.tensor([n for _, n in case.lens])
        slots = [table[row, c : c + n] for row, (c, n) in enumerate(case.lens, 1)]
        lens = cached if case.tree else cached + new
        fields: dict[str, Any] = {"custom_mask": self._mask()} if case.tree else {}
        if case.mode == "extend":
            fields |= {"extend_seq_lens": new.to(DEVICE), "extend_seq_lens_cpu": new}
        return ForwardBatch(
            forward_mode=case.mode,
            req_pool_indices=torch.arange(1, rows + 1, dtype=torch.int32, device=DEVICE),
            seq_lens=lens.to(DEVICE),
            seq_lens_cpu=lens,
            out_cache_loc=torch.cat(slots).to(DEVICE),
            **fields,
        )

    def _mask(self) -> torch.Tensor:
        """A random tree per request: each node sees its ancestors and itself."""
        blocks = []
        for cached, drafts in self.case.lens:
            tree = torch.eye(drafts, dtype=torch.bool)
            for node in range(1, drafts):
                tree[node] |= tree[int(torch.randint(0, node, ()))]
            blocks.append(torch.cat([torch.ones(drafts, cached, dtype=torch.bool), tree], dim=1).flatten())
        return torch.cat(blocks).to(DEVICE)

    def backend(self, kernel: str) -> AttentionBackend:
        """A backend pinned to a kernel, with the batch planned."""
        drafts = max(new for _, new in self.case.lens)
        speculative = SpeculativeConfig(topk=4, num_steps=4, num_draft_tokens=drafts) if self.case.tree else None
        longest = self.pools.req_to_token.shape[1]
        config = BackendConfig(context_len=longest, kernels=kernel, speculative=speculative)
        backend = AttentionBackend(config, self.pools, [self.layer])
        backend.plan(self.batch)
        return backend

    def run(self, backend: AttentionBackend) -> Callable[[], Any]:
        """The attention of one layer, keys already written."""
        return lambda: backend.forward(self.q, None, None, self.layer, out=self.out, save_kv_cache=False)

    def floor_us(self) -> float:
        """Live KV bytes over copy bandwidth."""
        size = 1 if self.case.fp8 else 2
        reach = [c + n if self.case.window is None else min(c + n, self.case.window + n) for c, n in self.case.lens]
        return sum(reach) * KV_HEADS * DIM * 2 * size / COPY_TB_S / 1e6

    def check(self, backend: AttentionBackend) -> float:
        """Relative error of some rows against the reference in float32."""
        self.out.fill_(float("nan"))
        self.run(backend)()
        picked = sorted({0, len(self.case.lens) - 1})
        worst = 0.0
        begin = [0]
        for _, new in self.case.lens:
            begin.append(begin[-1] + new)
        assert not self.out.isnan().any(), "rows that were not written"
        k, v = self.kv.buffers(self.layer)
        for row in picked:
            cached, new = self.case.lens[row]
            last = min(new, 256)
            slots = self.pools.req_to_token[row + 1, : cached + new].long()
            keys, values = (x[slots].float() for x in (k, v))
            if self.case.fp8:
                keys, values = keys * 0.5, values * 0.25
            span = slice(begin[row] + new - last, begin[row] + new)
            seen = self._visible(row, cached, new, last)
            q = self.q[span].float().view(last, KV_HEADS, -1, DIM)
            scores = torch.einsum("qhgd,khd->hgqk", q, keys) * self.layer.scale
            weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
            expected = torch.einsum("hgqk,khd->qhgd", weights, values).reshape(last, HEADS, DIM)
            got = self.out[span].float()
            worst = max(worst, float((got - expected).norm() / expected.norm()))
        return worst

    def _visible(self, row: int, cached: int, new: int, last: int) -> torch.Tensor:
        if self.case.tree:
            start = sum(n * (c + n) for c, n in self.case.lens[:row])
            assert self.batch.custom_mask is not None
            block = self.batch.custom_mask[start : start + new * (cached + new)].view(new, cached + new)
            return block[new - last :]
        p = torch.arange(cached + new - last, cached + new, device=DEVICE)[:, None]
        t = torch.arange(cached + new, device=DEVICE)
        seen = t <= p
        return seen if self.case.window is None else seen & (t >= p - self.case.window)


def time_us(call: Callable[[], Any], repeats: int = 30) -> float:
    """Median time of a CUDA graph replay."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for _ in range(5):
        graph.replay()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start, end in events:
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    times = sorted(start.elapsed_time(end) * 1000 for start, end in events)
    return times[len(times) // 2]


def fa3(problem: Problem) -> Callable[[], Any] | None:
    """FlashAttention 3 on the same cache, where it can: no trees."""
    if find_spec("flash_attn_interface") is None or problem.case.tree:
        return None
    from flash_attn_interface import flash_attn_with_kvcache

    case, page = problem.case, problem.case.page_size
    k, v = (x.view(-1, page, KV_HEADS, DIM) for x in problem.kv.buffers(problem.layer))
    total = torch.tensor([c + n for c, n in case.lens], dtype=torch.int32, device=DEVICE)
    table = (problem.pools.req_to_token[1:, ::page] // page).to(torch.int32).contiguous()
    new = torch.tensor([0, *(n for _, n in case.lens)], dtype=torch.int32, device=DEVICE).cumsum(0, dtype=torch.int32)
    q, extra = problem.q, {}
    if case.fp8:
        q = q.to(torch.float8_e4m3fn)
        ones = torch.ones(len(case.lens), KV_HEADS, device=DEVICE)
        extra = {"q_descale": ones, "k_descale": ones * 0.5, "v_descale": ones * 0.25}
    window = (-1, -1) if case.window is None else (case.window, 0)
    longest = max(n for _, n in case.lens)

    def call() -> Any:
        return flash_attn_with_kvcache(
            q, k, v, cache_seqlens=total, page_table=table, cu_seqlens_q=new, max_seqlen_q=longest, causal=True,
            window_size=window, softmax_scale=problem.layer.scale, **extra,
        )  # fmt: skip

    return call


def measure(case: Case, kernels: Sequence[str]) -> dict[str, Any]:
    """All kernels on one case, in turn."""
    torch.manual_seed(0)
    problem = Problem(case)
    row: dict[str, Any] = {"case": case.name, "floor_us": problem.floor_us(), "target_us": case.target_us}
    rival = fa3(problem)
    if rival is not None:
        row["fa3_us"] = time_us(rival)
    for kernel in kernels:
        backend = problem.backend(kernel)
        row[f"{kernel}_error"] = problem.check(backend)
        row[f"{kernel}_us"] = time_us(problem.run(backend))
    return row


def commit() -> str:
    """The commit that is measured, as far as it is known here."""
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def main() -> None:
    """Measures and writes JSON; prints a line per case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kernels", default="triton")
    parser.add_argument("--only", default="")
    parser.add_argument("--commit", default=None)
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    kernels = args.kernels.split(",")
    rows = []
    for case in CASES:
        if args.only not in case.name:
            continue
        began = time.perf_counter()
        try:
            row = measure(case, kernels)
        except Exception as error:  # noqa: BLE001  a case that fails is a result, the others go on
            row = {"case": case.name, "failed": repr(error)[:300]}
        rows.append(row)
        took = time.perf_counter() - began
        print(
            " ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items()), f"({took:.0f} s)"
        )
    report = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": args.commit or commit(),
        "rows": rows,
    }
    if args.out is not None:
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
