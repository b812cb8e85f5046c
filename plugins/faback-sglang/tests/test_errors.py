"""What an engine can get wrong, told in SGLang's names: cheap checks always, those that read the device when asked."""

import pytest
import torch

sg = pytest.importorskip("sglang_here", exc_type=ImportError, reason="SGLang's modules are not importable here")

from rounds import DRAFTS, STEPS, drafting, verification  # noqa: E402
from world import World, batch, index  # noqa: E402

from faback import BatchError, ConfigError, FabackError  # noqa: E402
from faback_sglang.multi_step import FabackMultiStepBackend  # noqa: E402


def extending(world, **changed):
    """An extend of two texts, 4 and 3 new tokens behind 2 and 0; fields may be changed."""
    texts = [world.text(6), world.text(3)]
    slots = [*texts[0].slots[2:6], *texts[1].slots[:3]]
    fb = batch(
        sg.ForwardMode.EXTEND, texts, [6, 3], slots, extend_num_tokens=7, extend_seq_lens=index([4, 3]),
        extend_seq_lens_cpu=[4, 3], extend_prefix_lens=index([2, 0]), extend_prefix_lens_cpu=[2, 0],
        extend_start_loc=index([0, 4]),
    )  # fmt: skip
    for name, value in changed.items():
        setattr(fb, name, value)
    return fb


ALWAYS = {
    "missing slots": ({"out_cache_loc": None}, "forward_batch.out_cache_loc: wanted slots in mode EXTEND"),
    "missing rows": ({"req_pool_indices": None}, "forward_batch.req_pool_indices: wanted 2 values"),
    "missing lengths": ({"extend_seq_lens": None}, "forward_batch.extend_seq_lens: wanted 2 values in mode EXTEND"),
    "fewer lengths": ({"seq_lens": index([6])}, r"forward_batch.seq_lens: wanted a tensor of 2 entries .* got \[1\]"),
    "fewer slots": ({"out_cache_loc": index([1, 2])}, r"forward_batch.out_cache_loc: wanted a tensor of 7 entries"),
    "a sum that is not": ({"extend_num_tokens": 8}, "forward_batch.extend_num_tokens: wanted 7, .* got 8"),
    "lengths of floats": ({"seq_lens": torch.ones(2)}, "forward_batch.seq_lens: wanted an int32 or int64 tensor"),
    "a host copy elsewhere": ({"seq_lens_cpu": torch.ones(2, dtype=torch.int64, device="meta")}, "seq_lens_cpu"),
    "beyond the row": ({"seq_lens": index([97, 3])}, None),
    "another device": ({"req_pool_indices": index([1, 2]).to("meta")}, "forward_batch.req_pool_indices: .* like the"),
    "a mask of the encoder": (
        {"cross_attention_custom_mask": torch.ones(3)},
        "forward_batch.cross_attention_custom_mask: wanted None",
    ),
    "items apart": ({"multi_item_delimiter_indices": [index([1])]}, "forward_batch.multi_item_delimiter_indices"),
    "another mode": (
        {"forward_mode": sg.ForwardMode.DLLM_EXTEND},
        "forward_batch.forward_mode: wanted one of .*, got DLLM_EXTEND",
    ),
}


@pytest.mark.usefixtures("served")
@pytest.mark.parametrize("fault", ALWAYS)
def test_caught_always(fault):
    changed, message = ALWAYS[fault]
    if fault == "beyond the row":
        changed, message = {**changed, "seq_lens_cpu": index([97, 3])}, "forward_batch.seq_lens: wanted at most 96"
    world = World([{}])
    backend = world.backend()
    with pytest.raises(BatchError, match=message):
        backend.init_forward_metadata(extending(world, **changed))
    with pytest.raises(BatchError, match="init_forward_metadata"):
        backend.attend(None, None, None, None)


CHECKED = {
    "prefixes that do not add up": (
        {"extend_prefix_lens": index([3, 0])},
        r"forward_batch.extend_prefix_lens: wanted seq_lens \[6, 3\] without extend_seq_lens \[4, 3\], got \[3, 0\]",
    ),
    "offsets that are no sums": (
        {"extend_start_loc": index([0, 3])},
        r"forward_batch.extend_start_loc: wanted \[0, 4\], .* got \[0, 3\]",
    ),
    "slots outside": (
        {"out_cache_loc": index([1, 2, 3, 4, 5, 6, 64])},
        "forward_batch.out_cache_loc: wanted slots from 0 to 63, got 1 to 64",
    ),
}


@pytest.mark.usefixtures("served")
@pytest.mark.parametrize("fault", CHECKED)
def test_caught_in_checked_mode(fault, monkeypatch):
    changed, message = CHECKED[fault]
    world = World([{}])
    world.backend().init_forward_metadata(extending(world, **changed))
    monkeypatch.setenv("FABACK_CHECK", "1")
    with pytest.raises(BatchError, match=message):
        world.backend().init_forward_metadata(extending(world, **changed))


@pytest.mark.usefixtures("served")
def test_a_right_batch_passes_in_checked_mode(monkeypatch):
    monkeypatch.setenv("FABACK_CHECK", "1")
    world = World([{}])
    world.backend().init_forward_metadata(extending(world))


def test_speculation(topk):
    world = World([{}], draft=True)
    backend = world.backend()
    fb, _ = verification(world, [world.text(3)], topk)
    fb.spec_info.draft_token_num = DRAFTS + 1
    with pytest.raises(BatchError, match="forward_batch.spec_info.draft_token_num: wanted at most 5"):
        backend.init_forward_metadata(fb)
    fb.spec_info = None
    with pytest.raises(BatchError, match="forward_batch.spec_info"):
        backend.init_forward_metadata(fb)
    fb, _ = verification(world, [world.text(3)], topk)
    fb.spec_info.custom_mask = fb.spec_info.custom_mask.int()
    if topk > 1:
        with pytest.raises(BatchError, match="forward_batch.spec_info.custom_mask: wanted torch.bool"):
            backend.init_forward_metadata(fb)
    drafts = FabackMultiStepBackend(world.runner, topk, STEPS)
    fb, _ = drafting(world, [world.text(3)], topk)
    with pytest.raises(BatchError, match="forward_batch.spec_info: wanted None when decoding"):
        backend.init_forward_metadata(fb)
    fb.out_cache_loc = fb.out_cache_loc[:-1]
    with pytest.raises(BatchError, match="forward_batch.out_cache_loc: .* speculative_num_steps 3"):
        drafts.init_forward_metadata(fb)


@pytest.mark.usefixtures("served")
def test_verification_without_speculation():
    world = World([{}])
    with pytest.raises(BatchError, match="server_args.speculative_num_draft_tokens"):
        world.backend().init_forward_metadata(verification(world, [world.text(3)], 1)[0])


@pytest.mark.usefixtures("served")
def test_arguments_of_a_layer():
    world = World([{}, {}])
    backend, fb = world.backend(), extending(world)
    backend.init_forward_metadata(fb)
    attn = world.model[0].attn
    q, k = torch.zeros(7, 64), torch.zeros(7, 2, 16)

    def call(layer=attn, q=q, **options):
        return backend.forward(q, k, k, layer, fb, **options)

    with pytest.raises(BatchError, match="rel_bias of layer 0: wanted None"):
        call(rel_bias=torch.zeros(1))
    call(rel_bias=None)
    with pytest.raises(BatchError, match="sinks of layer 0: wanted no sinks"):
        call(sinks=torch.zeros(4))
    stranger = sg.RadixAttention(num_heads=4, head_dim=16, scaling=1.0, num_kv_heads=2, layer_id=7)
    with pytest.raises(BatchError, match="layer: wanted an attention layer of the runner's model, got 7"):
        call(stranger)
    with pytest.raises(BatchError, match="q"):
        call(q=torch.zeros(7, 48))
    with pytest.raises(BatchError, match="7 tokens"):
        call(q=torch.zeros(6, 64))


def changed_runner(world, **fields):
    for name, value in fields.items():
        setattr(world.runner, name, value)
    return world


REFUSED_SERVERS = {
    "a layout by heads": (lambda w: setattr(w.pool, "kv_cache_layout", "hnd"), "kv_cache_layout: wanted 'nhd'"),
    "an integer pool": (lambda w: setattr(w.pool, "dtype", torch.int8), "server_args.kv_cache_dtype"),
    "scales in the pool": (lambda w: changed_runner(w, kv_cache_dtype_str="mxfp8"), "server_args.kv_cache_dtype"),
    "virtual slots": (
        lambda w: setattr(w.runner.kv_index_translator, "is_translating", True),
        "kv_index_translator: .*--enable-unified-memory",
    ),
    "other heads": (
        lambda w: setattr(w.model[0].attn, "tp_k_head_num", 1) or setattr(w.model[0].attn, "tp_v_head_num", 1),
        "model_runner.token_to_kv_pool.get_kv_buffer of layer 0",
    ),
    "a temperature by length": (lambda w: setattr(w.model[0].attn, "xai_temperature_len", 8), "xai_temperature_len"),
    "a cap by another curve": (lambda w: setattr(w.model[0].attn, "logit_capping_method", "x"), "logit_capping_method"),
    "another dtype": (lambda w: changed_runner(w, dtype=torch.float64), "model_runner.dtype"),
}


@pytest.mark.usefixtures("served")
@pytest.mark.parametrize("fault", REFUSED_SERVERS)
def test_servers_that_are_refused(fault):
    change, message = REFUSED_SERVERS[fault]
    world = World([{}])
    change(world)
    with pytest.raises(ConfigError, match=message):
        world.backend()


@pytest.mark.usefixtures("served")
def test_kernels_that_there_are_not(monkeypatch):
    monkeypatch.setenv("FABACK_SGLANG_KERNELS", "imaginary")
    with pytest.raises(FabackError, match="imaginary"):
        World([{}]).backend()


@pytest.mark.usefixtures("served")
def test_a_hybrid_pool_without_its_map():
    world = World([{}, {"sliding_window_size": 4}], hybrid=True)
    world.pool.full_to_swa_index_mapping = None
    with pytest.raises(ConfigError, match="model_runner.token_to_kv_pool.full_to_swa_index_mapping"):
        world.backend().init_forward_metadata(extending(world_without_map(world)))


def world_without_map(world):
    """Slots are handed out without looking at the map."""
    world.hybrid = False
    return world


@pytest.mark.usefixtures("served")
def test_latents_with_a_scale():
    layer = {"num_kv_heads": 1, "head_dim": 24, "v_head_dim": 16}
    world = World([layer], mla=(16, 8), dtype=torch.float8_e4m3fn)
    world.model[0].attn.k_scale_float = 0.5
    with pytest.raises(ConfigError, match=r"k_scale_float of MLA layer 0: wanted None or 1.0, got 0.5"):
        world.backend()


def test_sequences_shared_by_ranks():
    with (
        sg.get_context().override_server_args(),
        sg.get_context().parallel.override(attn_cp_size=2, tp_size=2, attn_tp_size=1, moe_ep_size=2),
        pytest.raises(ConfigError, match="server_args.attn_cp_size: wanted 1, got 2"),
    ):
        World([{}]).backend()


def test_a_prefill_aware_window_among_mixed_chunks():
    with sg.get_context().override_server_args(enable_mixed_chunk=True):
        world = changed_runner(World([{"sliding_window_size": 4}]), prefill_aware_swa=True)
        with pytest.raises(ConfigError, match="server_args.enable_mixed_chunk"):
            world.backend()


@pytest.mark.usefixtures("served")
def test_errors_keep_their_kind_and_parts():
    world = World([{}])
    with pytest.raises(BatchError) as caught:
        world.backend().init_forward_metadata(extending(world, seq_lens=torch.ones(2)))
    error = caught.value
    assert (error.what, error.got) == ("forward_batch.seq_lens", torch.float32)
    assert error.__cause__.what == "batch.seq_lens"
