"""A small engine that knows by identity who must see what: texts by request row, expectations by the definition."""

from __future__ import annotations

import torch

from faback import AttentionBackend, AttentionLayer, BackendConfig, ForwardBatch, Pools, hookimpl
from faback.builtins import BUILTINS
from faback.core.registry import Registry
from faback.kernels.reference import Reference
from faback.pools import MHAPool, MLAPool, PageAllocator
from faback.testing import oracle_attention
from faback.testing.late import Late, Replayed
from faback.testing.poor import Poor
from faback_block_sparse import GroupPerLayer, Options, own_groups, plugin, sparse_layers
from faback_block_sparse.definition import visible

ROWS, CONTEXT = 6, 192
KV_HEADS, HEADS, DIM = 2, 4, 8
WINDOW = 5


class Kernels:
    @hookimpl
    def faback_kernels(self):
        return [Late(Reference()), Poor()]


def registry(config):
    found = Registry.load(config, BUILTINS, entry_points=[])
    found.register(plugin, "block_sparse")
    found.register(Kernels(), "kernels")
    return found


def layer(layer_id, **fields):
    sizes = {"num_q_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": DIM}
    return AttentionLayer(layer_id=layer_id, **{**sizes, **fields})


def shuffled(allocator, seed):
    """An allocator whose pages come in no order."""
    pages = allocator.alloc_pages(allocator.available_pages).view(-1, allocator.page_size)
    for page in pages[torch.randperm(len(pages), generator=torch.Generator().manual_seed(seed))]:
        allocator.free(page)
    return allocator


class Engine:
    """Requests of random numbers, everything that belongs to nobody NaN.

    Args:
        settings: of the plugin.
        page: tokens per page.
        kernel: "reference" or "poor".
        graphs: replay captured plans instead of planning.
        layers: all in one pool; two alike unless given.
        apart: each layer chooses for itself.
        dtype: of queries, keys and values.
        device: where the backend runs; the engine itself stays on the CPU.
        more: fields of the configuration; `kv_dtype` of the pool, with which outputs are not compared, since it rounds.
    """

    def __init__(
        self,
        settings,
        *,
        page=1,
        kernel="reference",
        graphs=False,
        layers=None,
        apart=False,
        seed=0,
        dtype=torch.float32,
        device="cpu",
        **more,
    ):
        self.options, self.page = Options(**settings), page
        self.coarse, self.dtype, self.device = "kv_dtype" in more, dtype, torch.device(device)
        given = layers or [layer(0), layer(1)]
        pages = 3 * CONTEXT // page + 4
        pool = MLAPool if given[0].latent else MHAPool
        stored = more.pop("kv_dtype", dtype)
        self.kv = pool(num_pages=pages, page_size=page, layers=given, dtype=stored, device=self.device)
        for one in given:
            for buffer in self.kv.buffers(one):
                buffer.fill_(torch.nan)
        self.layers = list(own_groups(given)) if apart else given
        used = GroupPerLayer(self.kv) if apart else self.kv
        self.allocator = shuffled(PageAllocator(pages, page), seed)
        self.table = torch.full((ROWS + 1, CONTEXT), 1 << 30)
        kernel = "late reference" if graphs and kernel == "reference" else kernel
        config = BackendConfig(
            context_len=CONTEXT, dtype=dtype, kernels=kernel, options={"block_sparse": settings}, **more
        )
        self.pools = Pools(req_to_token=self.table.to(self.device), kv=used)
        if graphs:
            self.runner = Replayed(config, self.pools, self.layers, registry(config))
            self.backend = self.runner.backend
        else:
            self.runner = self.backend = AttentionBackend(config, self.pools, self.layers, registry=registry(config))
        self.sparse = sparse_layers(self.layers, used)
        self.memory = self.backend.modes["block_sparse_decode"].value.memory
        for summaries in self.memory.kinds.values():
            summaries.bounds.fill_(torch.nan)
        self.generator = torch.Generator().manual_seed(seed)
        self.text = {row: {one.layer_id: ([], []) for one in self.layers} for row in range(1, ROWS + 1)}
        self.length = dict.fromkeys(range(1, ROWS + 1), 0)
        self.known = dict.fromkeys(range(1, ROWS + 1), 0)

    def noise(self, *shape):
        return torch.randn(shape, generator=self.generator)

    def keys(self, row, layer_id):
        return torch.stack(self.text[row][layer_id][0])

    def admit(self, row, new):
        """Slots for new tokens."""
        start = self.length[row]
        last = self.table[[row], start - 1]
        slots = self.allocator.alloc_extend([start], [start + new], last_slots=last)
        self.table[row, start : start + new] = slots
        self.length[row] += new
        return slots

    def free(self, row, *, release=True):
        """Ends a request; its memory becomes NaN and its pages go to whoever comes next."""
        slots = self.table[row, : self.length[row]].clone()
        for one in self.layers:
            for buffer in self.pools.kv.buffers(one):
                buffer[slots] = torch.nan
        self.allocator.free(slots)
        self.table[row] = 1 << 30
        self.forget(row, 0)
        if release:
            self.known[row] = 0
            self.backend.release(torch.tensor([row]))

    def forget(self, row, length):
        """Drops the last tokens of a request but leaves its pages: the same slots are used again."""
        for k, v in self.text[row].values():
            del k[length:], v[length:]
        self.length[row] = length

    def step(self, work, *, mode=None, plain=False, padded_rows=0, padded_tokens=0, query=None, keys=None):
        """One pass. Checks every layer, and that nothing of the batch has changed.

        Args:
            work: (row, new tokens) per request.
            mode: "extend" or "decode"; decode if every request brings one token.
            plain: faback's own mode of that name.
            query: summaries [layers, bs, HEADS, DIM]; random unless given.
            keys: (row, layer_id, position) -> key that is not random.
        """
        new = [count for _, count in work]
        mode = mode or ("decode" if set(new) == {1} else "extend")
        slots = [self.admit(row, count) for row, count in work]
        rows = [row for row, _ in work] + [0] * padded_rows
        decode = mode == "decode"
        pad = padded_rows if decode else padded_tokens
        fields = {
            "req_pool_indices": torch.tensor(rows, dtype=torch.int64),
            "seq_lens": torch.tensor([self.length[row] for row, _ in work] + [7] * padded_rows, dtype=torch.int32),
            "out_cache_loc": torch.cat([*slots, torch.zeros(pad, dtype=torch.int64)]),
        }
        if not decode:
            fields["extend_seq_lens"] = torch.tensor(new + [0] * padded_rows, dtype=torch.int64)
        if query is None:
            query = self.noise(len(self.sparse), len(work), HEADS, self.sparse[0].head_dim)
        padding = torch.full((len(self.sparse), padded_rows, *query.shape[2:]), torch.nan)
        extras = {"query_summary": torch.cat([query, padding], dim=1)}
        name, extras = (mode, {}) if plain else (f"block_sparse_{mode}", extras)
        self.pools.req_to_token.copy_(self.table)
        fields, extras = ({key: value.to(self.device) for key, value in some.items()} for some in (fields, extras))
        batch = ForwardBatch(forward_mode=name, extras=extras, **fields)
        given = {**fields, **extras, "table": self.pools.req_to_token}
        before = {key: value.clone() for key, value in given.items()}
        self.runner.plan(batch)
        masks = {} if plain else self.masks(work, query, decode)
        results = [self.attend(one, work, pad, masks, keys or {}) for one in self.layers]
        for key, value in given.items():
            torch.testing.assert_close(value, before[key], rtol=0, atol=0, equal_nan=True, msg=f"{key} changed")
        return batch, results

    def masks(self, work, query, decode):
        """bool [new, tokens] per block-sparse kind of layers and request; brings `known` up to date."""
        found = {}
        for index, (row, new) in enumerate(work):
            self.known[row] = self.reached(row, new) if decode else self.length[row] - new
            for kind, summaries in self.memory.kinds.items():
                ids = [one.layer_id for one in summaries.layers]
                unknown = torch.full((kind.num_kv_heads, kind.head_dim), torch.nan)
                # The keys of this pass do not exist yet: nobody may look at them.
                texts = [torch.stack([*self.text[row][i][0], *[unknown] * new]) for i in ids]
                places = [next(p for p, one in enumerate(self.sparse) if one.layer_id == i) for i in ids]
                queries = [query[p, index].repeat_interleave(HEADS // query.shape[2], 0) for p in places]
                sizes = {"new": new, "known": self.known[row], "options": self.options, "page": self.page}
                found[kind, row] = visible(texts, queries, scale=kind.scale, **sizes)
        return found

    def reached(self, row, new):
        """Tokens that have summaries after a plan."""
        cached, limit = self.length[row] - new, self.options.catch_up
        if limit is None:
            return cached
        first = min(self.known[row], cached) // self.page
        return min(cached, (first + (limit + self.page - 2) // self.page + 1) * self.page)

    def attend(self, one, work, pad, masks, keys):
        """Writes and attends in one layer, and compares; returns the output."""
        total = sum(new for _, new in work)
        q = self.noise(total, HEADS, one.head_dim).to(self.dtype)
        k, v = (self.noise(total, one.num_kv_heads, dim).to(self.dtype) for dim in (one.head_dim, one.v_head_dim))
        token = 0
        for row, new in work:
            for position in range(self.length[row] - new, self.length[row]):
                k[token] = keys.get((row, one.layer_id, position), k[token])
                fresh_v = k[..., : one.v_head_dim] if one.latent else v
                for store, fresh in zip(self.text[row][one.layer_id], (k, fresh_v), strict=True):
                    store.append(fresh[token].float())
                token += 1
        sinks = self.noise(HEADS).to(self.device) if one.sinks else None
        given = [torch.cat([x, x.new_full((pad, *x.shape[1:]), torch.nan)]).to(self.device) for x in (q, k, v)]
        results = [found.cpu() for found in self.runner.forward(*given, one, sinks=sinks, return_lse=True)]
        token = 0
        for row, new in () if self.coarse else work:
            mine, values = (torch.stack(stored) for stored in self.text[row][one.layer_id])
            positions = torch.arange(self.length[row])
            own = positions[self.length[row] - new :, None]
            seen = masks.get((one.kind, row))
            if seen is None:
                seen = positions <= own if one.window is None else (positions <= own) & (positions >= own - one.window)
            scores = {"scale": one.scale, "softcap": one.softcap, "sinks": None if sinks is None else sinks.cpu()}
            near = {"atol": 2e-5, "rtol": 1e-6} if self.dtype == torch.float32 else {"atol": 0.02, "rtol": 0}
            wanted = oracle_attention(q[token : token + new], mine, values, seen, **scores)
            for got, right in zip(results, wanted, strict=True):
                got = got[token : token + new].double()
                torch.testing.assert_close(got, right, **near, msg=lambda m, row=row: f"row {row}: {m}")
            token += new
        out, lse = results
        assert lse[total:].eq(-torch.inf).all()
        assert not out[total:].any(), "padding is not 0"
        return out
