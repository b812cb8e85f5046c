"""Compiles what a provider launches, for a GPU that need not be there.

    with compiling(90) as built:
        provider.run(...)  # on CPU tensors
    assert built[0].spills == 0

Launches go through Triton's own path up to the launch itself, so arguments, specialisation and options are those of a
real run. The kernels' sizes are read from the machine code.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024}
"""Bytes that one block can have, by architecture."""
REGISTER_FILE, WARP = 65536, 32
"""Registers of a multiprocessor, and threads of a warp."""
ATTRIBUTE_REGCOUNT, ATTRIBUTE_FRAME_SIZE = 0x2F, 0x11
"""Entries of a cubin's .nv.info section: registers of a function, and its stack."""


@attrs.frozen
class Built:
    """A compiled kernel.

    Attributes:
        name: of the kernel.
        registers: per thread.
        spills: bytes of stack per thread; a kernel without calls has one only for registers that it ran out of.
        shared: bytes of shared memory per block.
        warps: per block.
        serialized: each asynchronous product (`wgmma`) is waited for before the next, as ptxas has it where registers
            run short; False where there are none.
    """

    name: str
    registers: int
    spills: int
    shared: int
    warps: int
    serialized: bool

    @classmethod
    def of(cls, kernel: Any) -> Built:
        """Reads the sizes off a kernel that Triton compiled."""
        name = kernel.metadata.name
        info = function_info(kernel.asm["cubin"])
        registers, spills = (max(info.get(key, {0: 0}).values()) for key in (ATTRIBUTE_REGCOUNT, ATTRIBUTE_FRAME_SIZE))
        code = kernel.asm["sass"] if "wgmma" in kernel.asm["ptx"] else ""  # to disassemble takes a third of a second
        products, waits = code.count("HGMMA."), code.count("WARPGROUP.DEPBAR.")
        return cls(name, registers, spills, kernel.metadata.shared, kernel.metadata.num_warps, 0 < products <= waits)


class AbsentGPU:
    """What Triton asks of a driver before a launch. Each architecture is a device with a number of its own."""

    def __init__(self, arch: int) -> None:
        self._arch = arch
        self.utils = self

    def get_current_device(self) -> int:
        return self._arch

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._arch, 32)

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": SHARED_MEMORY[self._arch]}


@contextmanager
def compiling(arch: int, cache: Path) -> Iterator[list[Built]]:
    """Inside, launches of Triton kernels compile for sm_`arch` and run nothing; tensors may lie on the CPU.

    Args:
        arch: 80 or 90.
        cache: an empty folder for Triton's files.

    Yields:
        what was compiled, in order.
    """
    built: list[Built] = []
    launch = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        built.append(Built.of(launch(self, *args, grid=grid, warmup=True, **kwargs)))

    driver = triton.runtime.driver
    before = driver._active
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(cache)
        driver.set_active(AbsentGPU(arch))
        JITFunction.run = compile_only
        try:
            yield built
        finally:
            JITFunction.run = launch
            driver._active = before


def function_info(cubin: bytes) -> dict[int, dict[int, int]]:
    """attribute -> symbol -> value, of those entries of the .nv.info section that say one number of one function."""
    found: dict[int, dict[int, int]] = {}
    data = _section(cubin, b".nv.info")
    at = 0
    while at < len(data):
        form, attribute, size = struct.unpack_from("<BBH", data, at)
        at += 4
        if form == 4 and size == 8:
            symbol, value = struct.unpack_from("<II", data, at)
            found.setdefault(attribute, {})[symbol] = value
        at += size if form == 4 else 0
    return found


def _section(elf: bytes, wanted: bytes) -> bytes:
    """The contents of the first section of that name in a 64-bit little-endian ELF file."""
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    entry, count, names = struct.unpack_from("<HHH", elf, 0x3A)
    headers = [struct.unpack_from("<II4Q", elf, table + index * entry) for index in range(count)]
    strings = headers[names][4]
    for name, _, _, _, offset, size in headers:
        if elf[strings + name : elf.index(b"\0", strings + name)] == wanted:
            return elf[offset : offset + size]
    raise AssertionError(f"no section {wanted!r}")
