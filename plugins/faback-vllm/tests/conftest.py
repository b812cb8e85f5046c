"""vLLM's modules, real or stand-ins, are there before any test imports the plugin's."""

import vllm_here

assert vllm_here
