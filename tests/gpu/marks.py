"""Marks of tests that need a GPU."""

import pytest
import torch

on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
