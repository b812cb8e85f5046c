"""Context parallelism and decode context parallelism in real processes, against the same batch in one process.

One set of processes per world size runs every case and writes down what was wrong; the tests read it.
"""

import datetime
import functools
import json
import math
import random
import traceback
from pathlib import Path

import attrs
import pytest
import torch
import torch.distributed as dist

from faback import (
    AttentionBackend,
    AttentionLayer,
    BackendConfig,
    BatchError,
    ConfigError,
    ForwardBatch,
    Pools,
    SpeculativeConfig,
    hookimpl,
)
from faback.builtins import BUILTINS
from faback.core.registry import Registry
from faback.modes.context_parallel import zigzag
from faback.pools import MHAPool, MLAPool, PageAllocator
from faback.testing.poor import Poor

LAYERS = {
    "full": {},
    "window": {"window": 3},
    "chunk": {"chunk": 4},
    "sinks": {"sinks": True, "window": 5},
    "softcap": {"softcap": 1.5},
    "latent": {"latent": True, "num_kv_heads": 1, "head_dim": 6, "v_head_dim": 4},
    "latent_all": {
        "latent": True, "num_kv_heads": 1, "head_dim": 6, "v_head_dim": 4, "window": 4, "sinks": True, "softcap": 2.0
    },
}  # fmt: skip
BATCHES = {
    "one": [(9, 9)],
    "uneven": [(20, 13), (5, 2), (3, 3)],
    "shorter than ranks": [(1, 1), (7, 1), (3, 2)],
    "zero new": [(6, 0), (11, 8), (4, 0)],
    "nothing new": [(6, 0), (4, 0)],
    "prefixes": [(33, 17), (17, 16), (8, 1)],
}
"""(tokens, new ones) per request."""
SIZES = (2, 4)
DRAFTS = 3
MODES = ("decode", "extend", "mixed", "verify", "draft")
PREFILL = [f"prefill/{layer}/{batch}/reference" for layer in LAYERS for batch in BATCHES]
PREFILL += [f"prefill/{layer}/uneven/poor" for layer in ("full", "window", "sinks", "latent")]
SHARDED = [f"sharded/{layer}/{mode}/reference" for layer in LAYERS for mode in MODES]
SHARDED += [f"sharded/{layer}/{mode}/poor" for layer in ("full", "window", "sinks") for mode in ("decode", "extend")]
REFUSED = [f"refused/{what}" for what in ("branches", "tree", "encoder")]
CASES = PREFILL + SHARDED + REFUSED


class PoorPlugin:
    @hookimpl
    def faback_kernels(self):
        return [Poor()]


@functools.cache
def registry():
    """The plugins, loaded once per process."""
    loaded = Registry.load(BackendConfig(context_len=1), BUILTINS, entry_points=[])
    loaded.register(PoorPlugin(), "poor")
    return loaded


class Requests:
    """Requests with keys, values and queries that every rank makes alike.

    Args:
        layer: fields of the layer.
        pairs: (tokens, new ones) per request.
        page: tokens per page.
        shard: (rank, ranks) where the cache holds every ranks-th token only.
    """

    def __init__(self, layer, pairs, page, *, shard=(0, 1), seed=0):
        self.layer = AttentionLayer(**{"layer_id": 0, "num_q_heads": 4, "num_kv_heads": 2, "head_dim": 4, **layer})
        self.lens, self.new = [n for n, _ in pairs], [n for _, n in pairs]
        self.rank, self.ranks = shard
        generator = torch.Generator().manual_seed(seed)

        def noise(count, heads, dim):
            return torch.randn(count, heads, dim, generator=generator)

        heads, dim, v_dim = self.layer.num_kv_heads, self.layer.head_dim, self.layer.v_head_dim
        self.k = [noise(n, heads, dim) for n in self.lens]
        self.v = [k[..., :v_dim] if self.layer.latent else noise(len(k), heads, v_dim) for k in self.k]
        self.q = noise(sum(self.new), 4, dim)
        self.sinks = torch.randn(4, generator=generator) if self.layer.sinks else None
        self.pool = (MLAPool if self.layer.latent else MHAPool)(
            num_pages=60, page_size=page, layers=[self.layer], dtype=torch.float32
        )
        for buffer in self.pool.buffers(self.layer):
            buffer.fill_(math.nan)
        allocator = PageAllocator(60, page)
        allocator.free(allocator.alloc_pages(7)[:page])
        own = [self.mine(range(n)) for n in self.lens]
        slots = allocator.alloc_extend([0] * len(own), [len(t) for t in own]).split([len(t) for t in own])
        self.table = torch.full((9, 40), 1 << 30)
        self.rows = random.Random(seed).sample(range(1, 9), len(pairs))
        self.slots = [torch.zeros(n, dtype=torch.int64) for n in self.lens]
        for row, tokens, found, mine in zip(self.rows, own, slots, self.slots, strict=True):
            mine[tokens] = found
            self.table[row, : len(tokens)] = found
        k_cache, v_cache = self.pool.buffers(self.layer)
        for length, new, mine, k, v in zip(self.lens, self.new, self.slots, self.k, self.v, strict=True):
            old = self.mine(range(length - new))
            k_cache[mine[old]] = k[old]
            if not self.layer.latent:
                v_cache[mine[old]] = v[old]

    def mine(self, tokens):
        """Those tokens that this rank keeps."""
        return [t for t in tokens if t % self.ranks == self.rank]

    def fresh(self):
        """k and v of the new tokens."""
        return tuple(torch.cat([x[len(x) - n :] for x, n in zip(kv, self.new, strict=True)]) for kv in (self.k, self.v))

    def backend(self, kernel, **options):
        sizes = SpeculativeConfig(topk=1, num_steps=DRAFTS, num_draft_tokens=DRAFTS)
        config = BackendConfig(context_len=40, dtype=torch.float32, kernels=kernel, options=options, speculative=sizes)
        return AttentionBackend(config, Pools(req_to_token=self.table, kv=self.pool), [self.layer], registry=registry())

    def batch(self, mode, **fields):
        lens = torch.tensor(self.lens)
        if mode in ("target_verify", "draft_decode"):
            lens = lens - torch.tensor(self.new)
        if mode in ("extend", "mixed", "context_parallel"):
            fields["extend_seq_lens"] = torch.tensor(self.new)
        written = [slots[len(slots) - n :] for slots, n in zip(self.slots, self.new, strict=True)]
        fields = {"out_cache_loc": torch.cat(written), **fields}
        return ForwardBatch(forward_mode=mode, req_pool_indices=torch.tensor(self.rows), seq_lens=lens, **fields)


def run(requests, backend, batch, q, k, v):
    backend.plan(batch)
    return backend.forward(q, k, v, requests.layer, sinks=requests.sinks, return_lse=True)


def close(got, wanted, atol=2e-5):
    """Unlike `torch.testing.assert_close` it does not import distributed tensors into every process."""
    assert got.shape == wanted.shape
    assert torch.allclose(got, wanted, rtol=0, atol=atol, equal_nan=True), (got - wanted).abs().max()


def prefill(group, layer, name, kernel):
    """Zigzag shares against the whole."""
    rank, ranks = group.rank(), group.size()
    page = 1 if name == "one" else 4
    whole, parts = (Requests(LAYERS[layer], BATCHES[name], page) for _ in range(2))
    out, lse = run(whole, whole.backend("reference"), whole.batch("extend"), whole.q, *whole.fresh())
    share = zigzag(parts.new, rank, ranks)
    live = share >= 0
    padded = torch.where(live, share, 0)
    tensors = [
        torch.where(live[:, None, None], x[padded], math.nan) if len(x) else x for x in (parts.q, *parts.fresh())
    ]
    backend = parts.backend(kernel, context_parallel={"group": group})
    own_out, own_lse = run(parts, backend, parts.batch("context_parallel", num_tokens=len(share)), *tensors)
    close(own_out[live], out[share[live]])
    close(own_lse[live], lse[share[live]])
    assert not own_out[~live].any() and bool((own_lse[~live] == -math.inf).all()), "padding is not zero"
    for mine, other in zip(parts.pool.buffers(parts.layer), whole.pool.buffers(whole.layer), strict=True):
        close(mine[page:], other[page:], atol=0)


def sharded(group, layer, mode, kernel):
    """A cache shared out against a whole one."""
    for seed, page in ((0, 1), (1, 4)):
        pairs = {
            "decode": [(9, 1), (1, 1), (16, 1), (2, 1)],
            "extend": [(12, 5), (3, 3), (6, 0), (1, 1)],
            "mixed": [(12, 1), (7, 4), (5, 0), (2, 2)],
            "verify": [(3 + DRAFTS, DRAFTS), (DRAFTS, DRAFTS), (11 + DRAFTS, DRAFTS)],
            "draft": [(9, 2), (3, 2), (14, 2)],
        }[mode]
        shard = (group.rank(), group.size())
        whole, parts = (Requests(LAYERS[layer], pairs, page, seed=seed, shard=s) for s in ((0, 1), shard))
        forward_mode = {"verify": "target_verify", "draft": "draft_decode"}.get(mode, mode)
        kept = {"decode_context_parallel": {"group": group}}
        results = []
        for requests, options, used in ((whole, {}, "reference"), (parts, kept, kernel)):
            backend, batch, fresh, q = requests.backend(used, **options), None, requests.fresh(), requests.q
            if mode == "draft":
                # Two of three steps were reserved; step 0 is written by hand and step 1 is under test.
                slots = torch.stack([s[len(s) - 2 :] for s in requests.slots])
                slots = torch.nn.functional.pad(slots, (0, DRAFTS - 2)).flatten()
                for step in range(2):
                    batch = requests.batch("draft_decode", out_cache_loc=slots, draft_step=step, num_tokens=len(pairs))
                    tensors = [x[step::2] for x in (q, *fresh)]
                    results.append(run(requests, backend, batch, *tensors))
                continue
            results.append(run(requests, backend, requests.batch(forward_mode), q, *fresh))
        half = len(results) // 2
        for (out, lse), (own_out, own_lse) in zip(results[:half], results[half:], strict=True):
            close(own_out, out)
            close(own_lse, lse)
        k_cache = parts.pool.buffers(parts.layer)[0]
        held = torch.zeros(len(k_cache), dtype=torch.bool)
        for mine, k in zip(parts.slots, parts.k, strict=True):
            tokens = parts.mine(range(len(k)))
            close(k_cache[mine[tokens]], k[tokens])
            held[mine[tokens]] = True
        held[:page] = True
        assert bool(k_cache[~held].isnan().all()), "a slot of nobody was written"


def refused(group, what):
    """At plan, with a reason."""
    requests = Requests({}, [(9, 2), (4, 2)], 1, shard=(group.rank(), group.size()))
    backend = requests.backend("reference", decode_context_parallel={"group": group})
    if what == "encoder":
        batch = requests.batch("extend", encoder_lens=torch.tensor([1, 0]))
    else:
        sizes = SpeculativeConfig(topk=2, num_steps=1, num_draft_tokens=2)
        config = attrs.evolve(backend.config, speculative=sizes)
        backend = AttentionBackend(config, backend.pools, [requests.layer], registry=registry())
        fields = {"draft_step": 0, "num_tokens": 4}
        if what == "tree":
            fields = {"custom_mask": torch.ones(2 * 9 + 2 * 4, dtype=torch.bool)}
        batch = requests.batch("draft_decode" if what == "branches" else "target_verify", **fields)
    with pytest.raises(BatchError, match="decode context parallel"):
        backend.plan(batch)


def work(rank, size, folder):
    """What a process does: every case, in the same order on each."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store{size}", size)
    timeout = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
    kinds = {"prefill": prefill, "sharded": sharded, "refused": refused}
    complaints = {}
    for case in CASES:
        kind, *arguments = case.split("/")
        try:
            kinds[kind](dist.group.WORLD, *arguments)
        except Exception:  # noqa: BLE001  reported by the test of the case
            complaints[case] = traceback.format_exc()
    Path(f"{folder}/{size}-{rank}.json").write_text(json.dumps(complaints))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def complaints(tmp_path_factory):
    """World size -> complaints of each rank, by case."""
    folder = tmp_path_factory.mktemp("ranks")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[2]))
        # A clean server imports torch once, and each process is a fork of it.
        torch.multiprocessing.get_context("forkserver").set_forkserver_preload(
            ["pytest", "torch.distributed", "faback"]
        )
        for size in SIZES:
            torch.multiprocessing.start_processes(work, (size, str(folder)), nprocs=size, start_method="forkserver")
    read = {size: [folder / f"{size}-{rank}.json" for rank in range(size)] for size in SIZES}
    return {size: [json.loads(path.read_text()) for path in paths] for size, paths in read.items()}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("case", CASES)
def test_ranks_agree_with_one_process(complaints, case, size):
    found = [(rank, of_rank[case]) for rank, of_rank in enumerate(complaints[size]) if case in of_rank]
    assert not found, "\n".join(f"rank {rank}: {text}" for rank, text in found)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_zigzag_gives_each_token_to_one_rank(ranks):
    rng = random.Random(ranks)
    for _ in range(50):
        lens = [rng.choice([0, 1, ranks, 2 * ranks, rng.randint(0, 40)]) for _ in range(rng.randint(0, 4))]
        shares = [zigzag(lens, rank, ranks) for rank in range(ranks)]
        assert len({len(share) for share in shares}) == 1
        tokens = torch.cat(shares)
        assert tokens[tokens >= 0].sort().values.tolist() == list(range(sum(lens)))


def test_zigzag_shares_causal_work_evenly():
    work = [sum(t + 1 for t in zigzag([64], rank, 4).tolist()) for rank in range(4)]
    assert len(set(work)) == 1


@pytest.mark.parametrize("name", ["context_parallel", "decode_context_parallel"])
def test_a_group_is_needed(name):
    with pytest.raises(ConfigError, match="init_process_group"):
        Requests({}, [(1, 1)], 1).backend("reference", **{name: {}})
