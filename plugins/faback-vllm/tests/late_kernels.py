"""Kernels that can be captured on a CPU, as a module that faback loads by name."""

from faback import hookimpl
from faback.kernels.reference import Reference
from faback.testing.late import Late
from faback.testing.poor import Poor

NAMES = ("late reference", "poor")


@hookimpl
def faback_kernels(device):
    return [Late(Reference()), Poor()]
