"""`faback explain`: which kernel a layer would get in a batch, who contributed what, and why not the others."""

from __future__ import annotations

from typing import Annotated, Any

import attrs
import torch
import typer

from faback.cli.output import AsJson, DeviceName, main_console, parse_device, parse_dtype, print_json
from faback.core.backend import AttentionBackend
from faback.core.batch import ForwardBatch
from faback.core.config import BackendConfig, SpeculativeConfig
from faback.core.contracts import Mode
from faback.core.errors import ConfigError
from faback.core.explain import Explanation
from faback.core.layer import AttentionLayer, LayerKind
from faback.core.pools import Pools
from faback.core.registry import Registry
from faback.core.segment import Segment


@attrs.frozen(kw_only=True)
class Question:
    """What is asked about.

    Attributes:
        mode: the forward mode.
        layer: the attention layer.
        dtype: of q and of the output.
        kv_dtype: storage dtype of keys and values.
        page_size: tokens per page.
        batch: number of requests.
        ctx: tokens of each request.
        new_tokens: new tokens of each request, in modes that take several.
        encoder_len: encoder tokens of each request, 0 without an encoder.
        kernel: "auto", or the kernel that is pinned.
        speculative: sizes of speculation.
        deterministic: ask for results that do not depend on the rest of the batch.
    """

    mode: str
    layer: AttentionLayer
    dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype = torch.bfloat16
    page_size: int = 16
    batch: int = 4
    ctx: int = 1000
    new_tokens: int = 16
    encoder_len: int = 0
    kernel: str = "auto"
    speculative: SpeculativeConfig = attrs.field(factory=lambda: speculation(topk=1, draft_tokens=4))
    deterministic: bool = False


@attrs.frozen(eq=False)
class SketchPool:
    """A pool of the right shapes that holds one number, so that a question about a large one costs no memory."""

    page_size: int
    num_slots: int
    kv_dtype: torch.dtype
    device: torch.device

    def buffers(self, layer: AttentionLayer) -> tuple[torch.Tensor, torch.Tensor]:
        """Key and value storage in shape only."""
        number = torch.zeros(1, dtype=self.kv_dtype, device=self.device)
        heads = layer.num_kv_heads
        return (
            number.expand(self.num_slots, heads, layer.head_dim),
            number.expand(self.num_slots, heads, layer.v_head_dim),
        )

    def dtype(self, kind: LayerKind) -> torch.dtype:
        """Storage dtype, the same for all kinds."""
        return self.kv_dtype

    def slot_map(self, group: str) -> torch.Tensor | None:
        """None: there is one group."""
        return None


def command(
    mode: Annotated[str, typer.Option(help="Forward mode; `faback modes` lists them.")] = "decode",
    heads: Annotated[str, typer.Option(help="Query heads, or QUERY/KV heads.")] = "32/8",
    head_dim: Annotated[str, typer.Option(help="Head dim, or K/V head dims.")] = "128",
    dtype: Annotated[str, typer.Option(help="Of q and of the output.")] = "bfloat16",
    kv_dtype: Annotated[str | None, typer.Option(help="Storage of keys and values (default: as --dtype).")] = None,
    page_size: Annotated[int, typer.Option(min=1, help="Tokens per page.")] = 16,
    window: Annotated[int | None, typer.Option(min=0, help="Sliding window: tokens seen to the left.")] = None,
    chunk: Annotated[int | None, typer.Option(min=1, help="Local attention: tokens per chunk.")] = None,
    softcap: Annotated[float, typer.Option(min=0, help="Cap on the scores.")] = 0.0,
    sinks: Annotated[bool, typer.Option("--sinks", help="A sink logit per head.")] = False,
    kv_scales: Annotated[bool, typer.Option("--kv-scales", help="Stored keys and values are scaled.")] = False,
    latent: Annotated[bool, typer.Option("--latent", help="Latent attention (MLA), absorbed.")] = False,
    cross: Annotated[bool, typer.Option("--cross", help="Cross-attention to the encoder.")] = False,
    bidirectional: Annotated[bool, typer.Option("--bidirectional", help="An encoder-only layer.")] = False,
    encoder_len: Annotated[int, typer.Option(min=0, help="Encoder tokens of each request.")] = 0,
    batch: Annotated[int, typer.Option(min=1, help="Requests.")] = 4,
    ctx: Annotated[int, typer.Option(min=1, help="Tokens of each request, the new ones included.")] = 1000,
    new_tokens: Annotated[int, typer.Option(min=1, help="New tokens per request, where several are.")] = 16,
    topk: Annotated[int, typer.Option(min=1, help="Speculation: branches.")] = 1,
    draft_tokens: Annotated[int, typer.Option(min=1, help="Speculation: steps, and tokens to verify.")] = 4,
    kernel: Annotated[str, typer.Option(help="A kernel's name, or auto.")] = "auto",
    deterministic: Annotated[bool, typer.Option("--deterministic", help="Results independent of the batch.")] = False,
    device: DeviceName = None,
    as_json: AsJson = False,
) -> None:
    """Explain which kernel a layer would get in a batch, who contributed what, and why not the others."""
    rules = {"window": window, "chunk": chunk, "softcap": softcap, "sinks": sinks, "latent": latent}
    rules |= {"cross": cross, "causal": not bidirectional}
    question = Question(
        mode=mode,
        layer=describe_layer(heads, head_dim, kv_scales, rules),
        dtype=parse_dtype("--dtype", dtype),
        kv_dtype=parse_dtype("--kv-dtype", kv_dtype or dtype),
        page_size=page_size,
        batch=batch,
        ctx=ctx,
        new_tokens=min(new_tokens, ctx),
        encoder_len=encoder_len,
        kernel=kernel,
        speculative=speculation(topk, draft_tokens),
        deterministic=deterministic,
    )
    answer = ask(question, parse_device(device))
    if as_json:
        print_json(as_data(answer))
    else:
        main_console().print(str(answer), markup=False, highlight=False)


def ask(question: Question, device: torch.device, registry: Registry | None = None) -> Explanation:
    """Builds a backend for the question, on pools without contents, and asks it.

    Args:
        question: what is asked about.
        device: where it would run.
        registry: plugins; the built-in and the installed ones unless given.

    Raises:
        FabackError: whatever the backend would raise; a `NoKernelError` lists all reasons.
    """
    spec = question.speculative
    longest = question.encoder_len + question.ctx + spec.topk * max(spec.num_steps, spec.num_draft_tokens)
    longest = -(-longest // question.page_size) * question.page_size
    table = torch.zeros(1, dtype=torch.int32, device=device).expand(question.batch + 1, longest)
    pool = SketchPool(question.page_size, (question.batch + 1) * longest, question.kv_dtype, device)
    config = BackendConfig(
        context_len=longest,
        dtype=question.dtype,
        kernels=question.kernel,
        speculative=spec,
        deterministic=question.deterministic,
    )
    backend = AttentionBackend(config, Pools(req_to_token=table, kv=pool), [question.layer], registry=registry)
    mode = backend.modes.get(question.mode)
    return backend.explain(_batch(question, mode.value if mode is not None else None, device), question.layer)


def describe_layer(heads: str, head_dim: str, kv_scales: bool, rules: dict[str, Any]) -> AttentionLayer:
    """The layer that the options describe.

    Args:
        heads: "32/8", or "8" for as many key heads.
        head_dim: "128", or "192/128" for different ones of k and v.
        kv_scales: stored keys and values have scales.
        rules: other fields of the layer.
    """
    q_heads, kv_heads = parse_pair("--heads", heads)
    k_dim, v_dim = parse_pair("--head-dim", head_dim)
    scale = 1.0 if kv_scales else None
    rules = rules | {"num_q_heads": q_heads, "num_kv_heads": kv_heads, "head_dim": k_dim, "v_head_dim": v_dim}
    return AttentionLayer(layer_id=0, k_scale=scale, v_scale=scale, **rules)


def speculation(topk: int, draft_tokens: int) -> SpeculativeConfig:
    """Sizes of speculation, as many draft steps as tokens to verify."""
    return SpeculativeConfig(topk=topk, num_steps=draft_tokens, num_draft_tokens=draft_tokens)


def parse_pair(option: str, text: str) -> tuple[int, int]:
    """Two numbers with a slash between them, or one for both.

    Raises:
        ConfigError: neither.
    """
    first, slash, second = text.partition("/")
    try:
        return int(first), int(second if slash else first)
    except ValueError as error:
        raise ConfigError(option, wanted="N or N/M", got=repr(text)) from error


def as_data(answer: Explanation) -> dict[str, Any]:
    """An explanation as plain data, for JSON."""
    return {
        "mode": answer.mode,
        "overlays": list(answer.overlays),
        "segment": segment_data(answer.segment),
        "kernel": answer.kernel,
        "requests": [str(route.request) for route in answer.routes],
        "measured": list(answer.evidence),
        "rejections": [attrs.asdict(reason) for reason in answer.rejections],
        "absent": answer.absent,
    }


def segment_data(segment: Segment) -> dict[str, Any]:
    """What a segment is on the host, as plain data."""
    rule = segment.visibility
    return {
        "rows": segment.rows,
        "max_seqlen_q": segment.max_seqlen_q,
        "max_kv_len": segment.max_kv_len,
        "causal": rule.causal,
        "window": list(rule.window),
        "chunk": rule.chunk,
        "features": sorted(segment.features()),
    }


def _batch(question: Question, mode: Mode | None, device: torch.device) -> ForwardBatch:
    """A batch of equal requests with every field that a mode may want."""
    spec, size = question.speculative, question.batch
    needs = () if mode is None else mode.needs

    def each(value: int) -> torch.Tensor:
        return torch.full((size,), value, dtype=torch.int32, device=device)

    per_request = 1
    if "draft_step" in needs:
        per_request = spec.topk * spec.num_steps
    elif "extend_seq_lens" in needs:
        per_request = question.new_tokens
    elif question.mode == "target_verify":
        per_request = spec.num_draft_tokens
    mask_size = size * spec.num_draft_tokens * (question.ctx + spec.num_draft_tokens)
    return ForwardBatch(
        forward_mode=question.mode,
        req_pool_indices=torch.arange(1, size + 1, dtype=torch.int32, device=device),
        seq_lens=each(question.ctx),
        seq_lens_cpu=each(question.ctx).cpu(),
        out_cache_loc=torch.zeros(size * per_request, dtype=torch.int32, device=device),
        extend_seq_lens=each(question.new_tokens),
        extend_seq_lens_cpu=each(question.new_tokens).cpu(),
        extend_prefix_lens=each(question.ctx - question.new_tokens),
        encoder_lens=each(question.encoder_len) if question.encoder_len or question.layer.cross else None,
        draft_step=spec.num_steps - 1,
        custom_mask=torch.ones(1, dtype=torch.bool, device=device).expand(mask_size),
    )
