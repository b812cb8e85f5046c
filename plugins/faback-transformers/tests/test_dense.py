"""`attn_implementation="faback"` without a generator: outputs and tokens are those of Transformers' own attention."""

from __future__ import annotations

import gc
from inspect import signature

import pytest
import torch
from tiny_models import DENSE, MODELS, PROMPTS, t5
from transformers import AttentionInterface, DynamicCache
from transformers.masking_utils import create_chunked_causal_mask

from faback import BatchError, FabackError
from faback_transformers import register
from faback_transformers.dense import DenseAttention
from faback_transformers.registration import Attention

NEW = 10
DECODERS = [*MODELS, "llama4"]
EAGER = ("gemma2", "gpt_oss")
"""`sdpa` knows neither softcap nor sinks."""


RIGHT = [name for name in DECODERS if name != "gemma2"]
PADDED = [*((name, "left") for name in DECODERS), *((name, "right") for name in RIGHT)]
"""A padded query behind a prompt may see nothing in its window, and `generate` reads the next token off it: `eager`
takes the mean of everything then, where others take zeros."""


def reference(name):
    return "eager" if name in EAGER else "sdpa"


def padded(side="left", prompts=PROMPTS):
    """Token ids and attention mask [prompts, longest]."""
    longest = max(map(len, prompts))
    rows = [(list(prompt), [0] * (longest - len(prompt))) for prompt in prompts]
    ids = [pad + prompt if side == "left" else prompt + pad for prompt, pad in rows]
    mask = [
        [0] * len(pad) + [1] * len(prompt) if side == "left" else [1] * len(prompt) + [0] * len(pad)
        for prompt, pad in rows
    ]
    return torch.tensor(ids), torch.tensor(mask)


def by(model, implementation, **inputs):
    model.set_attn_implementation(implementation)
    with torch.inference_mode():
        return model(**inputs)[0]


def generated(model, implementation, ids, mask, **options):
    model.set_attn_implementation(implementation)
    model.generation_config.eos_token_id = None
    sizes = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    return model.generate(ids, attention_mask=mask, **sizes, **options)[:, -NEW:].tolist()


def inputs_of(name, ids, mask):
    if name == "bart":
        return {"input_ids": ids.flip(0), "attention_mask": mask.flip(0), "decoder_input_ids": ids}
    if name != "whisper":
        return {"input_ids": ids, "attention_mask": mask}
    sound = torch.randn(len(ids), 8, 40, generator=torch.Generator().manual_seed(0))
    return {"input_features": sound, "decoder_input_ids": ids[:, :40], "decoder_attention_mask": mask[:, :40]}


class Watched(DenseAttention):
    """Keeps the rules that it found and the plans that it made."""

    def __init__(self, *args):
        super().__init__(*args)
        self.calls, self.sights, self.plans = 0, [], []

    def attend(self, *args):
        self.calls += 1
        return super().attend(*args)

    def _sight(self, *args):
        sight = super()._sight(*args)
        self.sights.append(sight)
        return sight

    def _server(self, *args):
        server = super()._server(*args)
        if not hasattr(server.backend, "watched"):
            server.backend.watched, plan = True, server.backend.plan
            server.backend.plan = lambda batch: self.plans.append(batch) or plan(batch)
        return server


@pytest.fixture
def watched():
    """What serves "faback" during a test."""
    attention = Attention()
    attention._dense = Watched()
    AttentionInterface.register("faback", attention)
    yield attention._dense
    register()


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", DENSE)
def test_outputs_equal_transformers(models, watched, name, side):
    ids, mask = padded(side)
    inputs = inputs_of(name, ids, mask)
    wanted = by(models(name), reference(name), **inputs)
    found = by(models(name), "faback", **inputs)
    live = mask[:, : found.shape[1]].bool()
    torch.testing.assert_close(found[live], wanted[live], rtol=1e-4, atol=1e-4)
    assert watched.calls and all(sight.seen is None for sight in watched.sights), "a rule that was not recognised"
    with_padding = {(s.causal, s.window, s.chunk) for s in watched.sights}
    kinds = len(with_padding) + (name in ("whisper", "bart"))  # whose encoder and cross-attention may share a rule
    assert len(watched.plans) <= kinds, "one plan per rule and pass"


def skip_what_transformers_cannot(name, cache):
    """5.17 passes an argument to the masks of chunked layers that they do not take."""
    chunked = signature(create_chunked_causal_mask).parameters
    if (name, cache) == ("llama4", "static") and "block_sequence_ids" not in chunked:
        pytest.skip("this version of Transformers makes no masks for chunked layers with a static cache")


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize(("name", "side"), PADDED)
def test_tokens_equal_transformers(models, name, side, cache):
    """Prompts padded on the right leave holes between keys, which only a mask can tell."""
    skip_what_transformers_cannot(name, cache)
    ids, mask = padded(side)
    options = {"cache_implementation": "static"} if cache == "static" else {}
    wanted = generated(models(name), reference(name), ids, mask, **options)
    assert generated(models(name), "faback", ids, mask, **options) == wanted
    assert len({token for tokens in wanted for token in tokens}) > 10, "the test's model repeats itself"


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["whisper", "bart"])
def test_encoder_decoder_tokens(models, name, cache):
    model, (ids, mask) = models(name), padded("right", PROMPTS[:3])
    sound = torch.randn(3, 8, 40, generator=torch.Generator().manual_seed(1))
    given = {"inputs": ids, "attention_mask": mask} if name == "bart" else {"input_features": sound}
    start = torch.tensor([[1, 7, 9]] * 3)
    options = {"cache_implementation": "static"} if cache == "static" else {}
    tokens = {}
    for implementation in ("sdpa", "faback"):
        model.set_attn_implementation(implementation)
        sizes = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False}
        made = model.generate(**given, decoder_input_ids=start, **sizes, **options)
        tokens[implementation] = made.tolist()
    assert tokens["faback"] == tokens["sdpa"]
    assert len(set(map(tuple, tokens["sdpa"]))) == 3, "the test's model does not listen"


@pytest.mark.parametrize(("name", "masks"), [("llama", 1), ("gemma3", 2), ("gpt_oss", 2), ("llama4", 2)])
def test_layers_share_plans(models, watched, name, masks):
    """Also where layers with different masks take turns."""
    ids, mask = padded()
    generated(models(name), "faback", ids, mask)
    assert len(watched.plans) <= masks * NEW < watched.calls


def test_self_and_cross_attention_share_plans(models, watched):
    model, sound = models("whisper"), torch.randn(3, 8, 40, generator=torch.Generator().manual_seed(1))
    model.set_attn_implementation("faback")
    model.generate(sound, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False)
    assert watched.calls == 2 + 2 * 2 * NEW
    assert len(watched.plans) <= NEW + 3, (
        "the encoder's, one of cross-attention to one and to several queries, and one a pass"
    )


@pytest.mark.parametrize("name", ["llama", "gemma3", "llama4", "gpt_oss"])
def test_a_pass_of_several_tokens_behind_a_cache(models, name):
    ids, mask = padded()
    logits = {}
    for implementation in (reference(name), "faback"):
        cache = DynamicCache(config=models(name).config)
        parts = [
            by(models(name), implementation, input_ids=part, attention_mask=mask[:, :end], past_key_values=cache)
            for part, end in ((ids[:, :30], 30), (ids[:, 30:36], 36), (ids[:, 36:], 40))
        ]
        logits[implementation] = torch.cat(parts, 1)[mask.bool()]
    wanted, found = logits.values()
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_masks_that_follow_no_rule(models, watched, name):
    """Several texts in one row, told by their positions; and a mask of the user's own."""
    ids, model = torch.tensor([PROMPTS[1], PROMPTS[1][::-1]]), models(name)
    positions = torch.tensor([[*range(17), *range(23)], [*range(40)]])
    packed = {"input_ids": ids, "position_ids": positions, "use_cache": False}
    wanted = by(model, reference(name), **packed)
    torch.testing.assert_close(by(model, "faback", **packed), wanted, rtol=1e-4, atol=1e-4)
    if name != "gpt_oss":  # which does not look at positions
        assert any(sight.seen is not None for sight in watched.sights)
    own = torch.rand((2, 1, 40, 40), generator=torch.Generator().manual_seed(2)) < 0.4
    own |= torch.eye(40, dtype=torch.bool)
    asked = {"full_attention": own, "sliding_attention": own} if name != "llama" else own
    added = torch.zeros(own.shape).masked_fill(~own, torch.finfo(torch.float32).min)
    for_eager = {"full_attention": added, "sliding_attention": added} if name != "llama" else own
    wanted = by(model, reference(name), input_ids=ids, attention_mask=for_eager)
    watched.sights.clear()
    found = by(model, "faback", input_ids=ids, attention_mask=asked)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    assert all(sight.seen is not None for sight in watched.sights)


def test_masks_with_numbers_are_left_to_torch(models):
    ids, _ = padded(prompts=PROMPTS[1:2])
    bias = torch.randn((1, 6, 40, 40), generator=torch.Generator().manual_seed(3))
    asked = {"input_ids": ids, "attention_mask": bias}
    torch.testing.assert_close(by(models("llama"), "faback", **asked), by(models("llama"), "sdpa", **asked))
    bias = bias[:, :4]
    asked = {"input_ids": ids, "attention_mask": {"full_attention": bias, "sliding_attention": bias}}
    for name, option in (("gemma2", "softcap"), ("gpt_oss", "s_aux")):
        with pytest.raises(BatchError, match=f"{option}.*eager"):
            by(models(name), "faback", **asked)


class Layer(torch.nn.Module):
    is_causal = True


def called(attention, q, k, v, mask=None, **options):
    return attention(Layer(), q, k, v, mask, **options)[0]


def drawn(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("layout", ["cache", "projection", "one of each", "expanded", "sliced"])
@pytest.mark.parametrize("rows", [1, 3])
def test_keys_in_any_layout(layout, rows):
    """What caches and projections hand over is read in place where that is possible, and copied elsewhere."""
    q, k, v = drawn(rows, 6, 5, 8), drawn(rows, 2, 9, 8), drawn(rows, 2, 9, 4)
    mask = torch.ones((rows, 1, 5, 9), dtype=torch.bool).tril(4)
    mask[-1, :, :, :2] = False
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    if layout == "projection":
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    elif layout == "one of each":
        v = v.transpose(1, 2).contiguous().transpose(1, 2)
    elif layout == "expanded":
        k, v = k[:1].expand(rows, -1, -1, -1), v[:1].expand(rows, -1, -1, -1)
        wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    elif layout == "sliced":
        k = torch.cat([k, torch.full_like(k, torch.nan)], 2)[:, :, :9]
        v = torch.cat([v, torch.full_like(v, torch.nan)], 3)[..., :4]
    torch.testing.assert_close(called(Attention(), q, k, v, mask), wanted.transpose(1, 2), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(1, 1, 5, 9), (3, 1, 1, 9), (1, 1, 1, 9), (3, 6, 5, 9), (1, 6, 5, 9)])
def test_masks_that_are_broadcast(shape):
    q, k, v = drawn(3, 6, 5, 8), drawn(3, 2, 9, 8), drawn(3, 2, 9, 4)
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(4)) < 0.5
    mask[..., 0] = True
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    torch.testing.assert_close(called(Attention(), q, k, v, mask), wanted.transpose(1, 2), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("queries", [1, 5, 9, 12])
@pytest.mark.parametrize("causal", [True, False])
def test_no_mask_means_what_it_means_to_sdpa(queries, causal):
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    q, k, v = drawn(2, 6, queries, 8), drawn(2, 6, 9, 8), drawn(2, 6, 9, 8)
    wanted = sdpa_attention_forward(Layer(), q, k, v, None, is_causal=causal)[0]
    torch.testing.assert_close(called(Attention(), q, k, v, is_causal=causal), wanted, rtol=1e-5, atol=1e-5)


def test_a_kernel_can_be_named(models):
    ids, mask = padded()
    try:
        register(kernels="reference")
        generated(models("llama"), "faback", ids, mask)
        register(kernels="nobody")
        with pytest.raises(FabackError, match="nobody"):
            generated(models("llama"), "faback", ids, mask)
    finally:
        register()


def test_nothing_is_kept_of_a_pass(models, watched):
    ids, mask = padded("right")
    generated(models("gemma3"), "faback", ids, mask)
    gc.collect()
    assert len(watched._sights) == 0, "masks live on"
    assert len(watched._servers) < 8


def test_what_would_be_ignored_is_refused(models):
    model, (ids, mask) = models("llama"), padded()
    model.set_attn_implementation("faback")
    with pytest.raises(FabackError, match=r"gradients.*no_grad.*sdpa"):
        model(input_ids=ids, attention_mask=mask)
    training = DENSE["bert"]().train()
    training.set_attn_implementation("faback")
    with torch.no_grad(), pytest.raises(FabackError, match=r"dropout.*eval"):
        training(input_ids=ids)
    biased = t5("faback").eval()
    with torch.no_grad(), pytest.raises(FabackError, match=r"position_bias.*sdpa"):
        biased(input_ids=ids, decoder_input_ids=ids)
    x = drawn(2, 2, 3, 4)
    for options, message in (
        ({"dropout": 0.1}, "dropout.*eval"),
        ({"position_bias": x}, "position_bias.*sdpa"),
        ({"output_attentions": True}, "output_attentions.*eager"),
        ({"mask": torch.ones((2, 1, 3, 5), dtype=torch.bool)}, "attention_mask"),
        ({"mask": torch.ones((2, 3), dtype=torch.bool)}, "attention_mask"),
    ):
        with pytest.raises(FabackError, match=message):
            called(Attention(), x, x, x, **options)
    with pytest.raises(BatchError, match="as many keys as values"):
        called(Attention(), x, x, x[:, :, :2])
    with pytest.raises(FabackError, match="dtype"):
        called(Attention(), x.double(), x.double(), x.double())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize(("name", "side"), PADDED)
def test_on_a_gpu(models, name, side, cache):
    skip_what_transformers_cannot(name, cache)
    ids, mask = padded(side)
    options = {"cache_implementation": "static", "disable_compile": True} if cache == "static" else {}
    model = models(name)
    wanted = generated(model, reference(name), ids, mask, **options)
    model.to("cuda")
    try:
        found = generated(model, "faback", ids.cuda(), mask.cuda(), **options)
    finally:
        model.to("cpu")
    assert found == wanted


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("name", DENSE)
def test_outputs_on_a_gpu_in_half_precision(models, name):
    """bfloat16 outputs lie as near to those of float32 as the ones of Transformers' own attention."""
    ids, mask = padded()
    inputs, model = inputs_of(name, ids, mask), models(name)
    live = mask[:, : by(model, reference(name), **inputs).shape[1]].bool()
    exact = by(model, reference(name), **inputs)[live]
    moved = {k: x.to("cuda", torch.bfloat16 if x.is_floating_point() else None) for k, x in inputs.items()}
    try:
        model.to("cuda", torch.bfloat16)
        found, theirs = (by(model, x, **moved)[live.cuda()].float().cpu() for x in ("faback", reference(name)))
    finally:
        model.to("cpu", torch.float32)
    error, usual = ((x - exact).abs().mean() for x in (found, theirs))
    assert error <= 1.5 * usual + 1e-3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_compiled_model_breaks_its_graph_at_attention(models):
    """`generate` compiles decoding with a static cache by itself."""
    ids, mask = padded()
    model = models("llama")
    wanted = generated(model, "sdpa", ids, mask)
    model.to("cuda")
    try:
        found = generated(model, "faback", ids.cuda(), mask.cuda(), cache_implementation="static")
    finally:
        model.to("cpu")
    assert found == wanted


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_recording_is_refused():
    """Before anything of it reads the device, which would end in an error of CUDA's."""
    x = drawn(2, 2, 3, 64).to("cuda", torch.float16)
    with pytest.raises(FabackError, match="recording"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        called(Attention(), x, x, x)
    assert called(Attention(), x, x, x).shape == (2, 3, 2, 64)
