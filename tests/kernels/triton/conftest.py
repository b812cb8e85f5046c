import numpy as np
import pytest

from kernels.triton.interpreter import INTERPRETING, hasten


@pytest.fixture(scope="session", autouse=True)
def hastened():
    """Makes the interpreter bearable, and quiet about infinities; nothing where kernels are compiled."""
    if not INTERPRETING:
        yield
        return
    with pytest.MonkeyPatch.context() as patch, np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        hasten(patch)
        yield
