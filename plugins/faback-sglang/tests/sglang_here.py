"""SGLang's own modules on a machine without a GPU. Importing this raises `ImportError` where they are not installed.

One package of its dependencies is stood in for: torchvision, whose wheels want the exact torch that they were built
against, and of which attention uses nothing. Transformers must not see the stand-in, so it is asked before.
"""

import importlib.machinery
import sys
import types
import warnings

from transformers.utils import import_utils

TORCHVISION = ("torchvision", "torchvision.io", "torchvision.transforms", "torchvision.transforms.functional")


class StandIn(types.ModuleType):
    __path__ = ()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def without_torchvision():
    import_utils.is_torchvision_available()
    if hasattr(import_utils, "is_torchvision_v2_available"):
        import_utils.is_torchvision_v2_available()
    for name in TORCHVISION:
        module = StandIn(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        sys.modules.setdefault(name, module)


import sglang  # noqa: E402, F401  before anything is stood in for

without_torchvision()

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # about kernels for GPUs
    from sglang.srt.layers.attention.hybrid_attn_backend import HybridAttnBackend  # noqa: F401
    from sglang.srt.layers.radix_attention import AttentionType, RadixAttention  # noqa: F401
    from sglang.srt.mem_cache.kv_index_translator import KVIndexTranslator  # noqa: F401
    from sglang.srt.mem_cache.memory_pool import (  # noqa: F401
        MHATokenToKVPool,
        MLATokenToKVPool,
        ReqToTokenPool,
    )
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool  # noqa: F401
    from sglang.srt.model_executor.forward_batch_info import (  # noqa: F401
        CaptureHiddenMode,
        ForwardBatch,
        ForwardMode,
    )
    from sglang.srt.model_executor.forward_context import ForwardContext, forward_context  # noqa: F401
    from sglang.srt.runtime_context import get_context  # noqa: F401
    from sglang.srt.speculative.eagle_info import (  # noqa: F401
        EagleDraftExtendInput,
        EagleDraftInput,
        EagleVerifyInput,
    )
    from sglang.srt.speculative.ragged_verify import RaggedVerifyLayout  # noqa: F401
