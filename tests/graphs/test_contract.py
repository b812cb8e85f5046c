"""What capture, replay and reserve promise and refuse."""

import attrs
import pytest
import torch

from faback import (
    AttentionBackend,
    AttentionLayer,
    BackendConfig,
    BatchError,
    CapacityError,
    ForwardBatch,
    NoKernelError,
    Pools,
    SpeculativeConfig,
)
from faback.modes.extend import Extend
from faback.pools import MHAPool
from graphs.test_simulated import registry

NEW = ([2, 3], [1, 4], [5, 0])
LAYER = AttentionLayer(layer_id=0, num_q_heads=2, num_kv_heads=1, head_dim=8)


def backend(**options):
    config = BackendConfig(context_len=32, dtype=torch.float32, **{"kernels": "late reference", **options})
    kv = MHAPool(num_pages=65, layers=[LAYER], dtype=torch.float32)
    for buffer in kv.buffers(LAYER):
        buffer.normal_()
    table = torch.arange(1, 65, dtype=torch.int32).view(2, 32)
    pools = Pools(req_to_token=torch.cat([torch.zeros(1, 32, dtype=torch.int32), table]), kv=kv)
    return AttentionBackend(config, pools, [LAYER], registry=registry(config))


def extend(lens, new, **fields):
    tokens = sum(new)
    return ForwardBatch(
        forward_mode="extend",
        req_pool_indices=torch.arange(1, len(lens) + 1),
        seq_lens=torch.tensor(lens),
        extend_seq_lens=torch.tensor(new),
        out_cache_loc=torch.arange(40, 40 + tokens),
        **fields,
    )


def test_replay_in_place_copies_nothing():
    """The engine's own tensors, changed by the engine: addresses stay, contents are read anew."""
    made, batch = backend(), extend([4, 4], [2, 2])
    plan = made.capture(batch)
    addresses = [t.data_ptr() for t in (batch.seq_lens, plan.steps[0].segment.cu_seqlens_q)]
    batch.seq_lens.copy_(torch.tensor([9, 3]))
    batch.extend_seq_lens.copy_(torch.tensor([3, 1]))
    assert made.replay(batch) is plan
    assert addresses == [t.data_ptr() for t in (batch.seq_lens, plan.steps[0].segment.cu_seqlens_q)]
    assert plan.steps[0].segment.cu_seqlens_q.tolist() == [0, 3, 4]


def test_replay_calls_no_hook_and_allocates_nothing(monkeypatch):
    made = backend()
    made.capture(extend([4, 4], [2, 2]))
    monkeypatch.setattr(Extend, "build", lambda *args: pytest.fail("a builder was called"))
    monkeypatch.setattr("faback.core.graphs.Arena.take", lambda *args: pytest.fail("memory was asked for"))
    made.replay(extend([9, 3], [3, 1]))


def test_the_batch_of_a_replay_stays_as_it_is():
    made, batch = backend(), extend([9, 3], [3, 1])
    made.capture(extend([4, 4], [2, 2]))
    before = [t.clone() for t in (batch.seq_lens, batch.extend_seq_lens, batch.out_cache_loc)]
    made.replay(batch)
    assert all(map(torch.equal, before, (batch.seq_lens, batch.extend_seq_lens, batch.out_cache_loc)))


def test_a_size_that_was_not_captured():
    made = backend()
    made.capture(extend([4, 4], [2, 2]))
    with pytest.raises(BatchError, match="extend of 2 requests, 4 tokens.*got extend of 2 requests, 3 tokens"):
        made.replay(extend([4, 4], [2, 1]))


def test_bounds_are_those_of_the_capture():
    made = backend()
    made.capture(extend([4, 4], [2, 2]), bounds={"seq_lens": 10})
    plan = made.replay(extend([10, 3], [3, 1]))
    known = plan.steps[0].segment.cu_seqlens_q.tolist()
    with pytest.raises(BatchError, match="batch.seq_lens.*at most 10, as captured.*got 11"):
        made.replay(extend([11, 3], [2, 2]))
    assert plan.steps[0].segment.cu_seqlens_q.tolist() == known  # nothing was copied
    assert made.current is None
    with pytest.raises(BatchError, match="bounds"):
        made.capture(extend([4, 4], [2, 2]), bounds={"seq_len": 10})


def test_bounds_come_from_the_configuration():
    plan = backend().capture(extend([4, 4], [2, 2]))
    segment = plan.steps[0].segment
    assert (segment.max_kv_len, segment.max_seqlen_q) == (32, 4)


def test_fields_must_be_those_of_the_capture():
    made, batch = backend(), extend([4, 4], [2, 2])
    made.capture(batch)
    with pytest.raises(BatchError, match="batch.extend_seq_lens"):
        made.replay(attrs.evolve(batch, extend_seq_lens=None))
    with pytest.raises(BatchError, match="batch.positions"):
        made.replay(attrs.evolve(batch, positions=torch.zeros(4, dtype=torch.int64)))


def test_after_reserve_nothing_grows():
    made = backend()
    assert made.reserve([extend([4, 4], [2, 2])]) > 0
    made.capture(extend([4, 4], [2, 2]))
    made.capture(extend([4], [2]))
    one = {"req_pool_indices": torch.ones(3, dtype=torch.int64), "seq_lens": torch.ones(3, dtype=torch.int64)}
    larger = attrs.evolve(extend([4, 4], [2, 2]), extend_seq_lens=torch.ones(3, dtype=torch.int64), **one)
    with pytest.raises(CapacityError, match="cu_seqlens_q.*wanted 4 elements, got 3.*reserve"):
        made.capture(larger)
    assert made.reserve([extend([4], [2])]) == made.reserve([])  # there is room already
    with pytest.raises(CapacityError, match="wanted 4 elements, got 3"):
        made.reserve([larger])


def test_sizes_share_their_memory():
    made = backend()
    plans = [made.capture(extend([4] * n, [1] * n)) for n in (2, 1)]
    assert len({plan.steps[0].segment.cu_seqlens_q.data_ptr() for plan in plans}) == 1


def test_memory_apart_is_nobody_elses():
    """Two builders may be up to date at once: what one fills does not undo what the other has filled."""
    made = backend()
    graphs = [made.graphs(made.build, apart=apart) for apart in (False, True, True)]
    for one in graphs:
        one.capture(extend([5, 9], [2, 3]), {})
    offsets = [
        one.replay(extend([7, 3], new)).steps[0].segment.cu_seqlens_q for one, new in zip(graphs, NEW, strict=True)
    ]
    assert [found.tolist() for found in offsets] == [[0, 2, 5], [0, 1, 5], [0, 5, 5]]


def test_measuring_leaves_state_alone():
    config = BackendConfig(context_len=32, dtype=torch.float32, options={"prefill_aware_swa": {}})
    layer = attrs.evolve(LAYER, window=3)
    kv = MHAPool(num_pages=65, layers=[layer], dtype=torch.float32)
    pools = Pools(req_to_token=torch.zeros(3, 32, dtype=torch.int32), kv=kv)
    config = attrs.evolve(config, kernels="late reference")
    made = AttentionBackend(config, pools, [layer], registry=registry(config))
    batch = extend([4, 4], [2, 2])
    made.reserve([batch])
    overlay = next(c.value for c in made._planner.overlays if c.value.key == "prefill_aware_swa")
    assert not overlay._prompts.any()
    made.capture(batch)
    assert overlay._prompts.tolist() == [0, 4, 4]


def test_a_kernel_that_cannot_be_captured_is_not_chosen():
    made = backend(kernels="reference")
    with pytest.raises(NoKernelError, match="graph"):
        made.capture(extend([4, 4], [2, 2]))


def test_a_shorter_mask_fits_into_a_longer_one():
    config = BackendConfig(
        context_len=32,
        dtype=torch.float32,
        kernels="late reference",
        speculative=SpeculativeConfig(topk=2, num_steps=2, num_draft_tokens=2),
    )
    kv = MHAPool(num_pages=65, layers=[LAYER], dtype=torch.float32)
    pools = Pools(req_to_token=torch.arange(64, dtype=torch.int32).view(2, 32), kv=kv)
    made = AttentionBackend(config, pools, [LAYER], registry=registry(config))

    def batch(length, room):
        tree = torch.tensor([[True, False], [True, True]])
        mask = torch.zeros(room, dtype=torch.bool)
        mask[: 2 * (length + 2)] = torch.cat([torch.ones(2, length, dtype=torch.bool), tree], dim=1).flatten()
        one = torch.tensor([1])
        return ForwardBatch(
            forward_mode="target_verify",
            req_pool_indices=one,
            seq_lens=one * length,
            out_cache_loc=torch.tensor([5, 6]),
            custom_mask=mask,
        )

    made.capture(batch(20, 60))
    plan = made.replay(batch(4, 12))
    assert plan.steps[0].segment.tail.mask.tolist() == batch(4, 12).custom_mask.view(2, 6)[:, 4:].tolist()
    with pytest.raises(BatchError, match="custom_mask"):
        made.replay(batch(4, 61))


MOST = {"requests": 256, "context": 1 << 20, "chunk": 8192, "drafts": 8}
"""A large engine's limits, with pages of one token."""


def largest(device="cpu"):
    """The largest batches of several modes; of tensors that only lend their shape."""
    rows, tokens = MOST["requests"], MOST["chunk"]
    per_request, per_token = (torch.ones(n, dtype=torch.int64, device=device) for n in (rows, tokens))
    shared = {"req_pool_indices": per_request, "seq_lens": per_request}
    prompt = {"out_cache_loc": per_token, "extend_seq_lens": per_request}
    tree = {
        "out_cache_loc": torch.ones(rows * MOST["drafts"], dtype=torch.int64, device=device),
        "custom_mask": torch.ones(1, dtype=torch.bool, device=device),
    }
    return [
        ForwardBatch(forward_mode="decode", out_cache_loc=per_request, **shared),
        ForwardBatch(forward_mode="extend", **shared, **prompt),
        ForwardBatch(forward_mode="mixed", **shared, **prompt),
        ForwardBatch(forward_mode="target_verify", **shared, **tree),
    ]


@pytest.mark.parametrize(
    ("kernel", "modes", "most"), [("late reference", 4, 1 << 20), ("poor", 1, 4 * MOST["requests"] * MOST["context"])]
)
def test_memory_is_bounded_by_the_configuration(kernel, modes, most):
    """One table of pages per kind of layer for kernels that read tables: a gigabyte. Next to nothing for the others."""
    speculative = SpeculativeConfig(topk=2, num_steps=3, num_draft_tokens=MOST["drafts"])
    config = BackendConfig(context_len=MOST["context"], dtype=torch.float32, kernels=kernel, speculative=speculative)
    kv = MHAPool(num_pages=4, layers=[LAYER], dtype=torch.float32)
    table = torch.zeros(1, dtype=torch.int32).expand(MOST["requests"] + 1, MOST["context"])
    made = AttentionBackend(config, Pools(req_to_token=table, kv=kv), [LAYER], registry=registry(config))
    assert 0 < made.reserve(largest()[:modes]) <= most + (1 << 16)
