"""Kits for authors of plugins: subclass one in a test file, point at your object, and pytest has its tests.

    class TestStreaming(OverlayConformance):
        plugin = faback_streaming_llm.overlay
        options = {"streaming-llm": {"sinks": 2, "window": 5}}

        def sees(self, query, key, layer):
            return key.position < 2 or key.position >= query.position - 5

Everything runs on a CPU, against an oracle that knows tokens by identity, with all that no request owns poisoned:
planned anew, and captured on nothing and then replayed; on a kernel that can do everything, and on one that can do
nothing and is served through lowerings.

A failure names the smallest scenario that fails, prints who saw what in it, and leaves a picture beside pytest's
`tmp_path`, or in the folder that the environment variable FABACK_PICTURES names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import attrs
import pytest
import torch

from faback.builtins import BUILTINS
from faback.core.backend import AttentionBackend
from faback.core.batch import ForwardBatch
from faback.core.config import BackendConfig
from faback.core.errors import BatchError, FabackError
from faback.core.hooks import hookimpl
from faback.core.kernel import KernelProvider
from faback.core.layer import AttentionLayer
from faback.core.pools import Pools
from faback.core.registry import Registry
from faback.kernels.reference import Reference
from faback.testing.checks import EQUAL, REFUSED, CellResult, MakeBackend
from faback.testing.failures import Build, Runs, report, temporary
from faback.testing.late import Late, Replayed
from faback.testing.options import MODES, OVERLAYS, Options, impossible
from faback.testing.poor import Poor
from faback.testing.rejudged import rejudged
from faback.testing.scenario import Scenario
from faback.testing.visibility import Token

EVERYTHING, NOTHING = f"late {Reference.name}", Poor.name
WAYS: Mapping[str, tuple[str, bool]] = MappingProxyType(
    {
        "native": (EVERYTHING, False),
        "lowered": (NOTHING, False),
        "native, replayed": (EVERYTHING, True),
        "lowered, replayed": (NOTHING, True),
    }
)
"""Name -> kernel, and whether plans are captured and replayed."""
LAYOUTS: tuple[Mapping[str, Any], ...] = (
    MappingProxyType({"page_size": 1, "batch_size": 1}),
    MappingProxyType({"page_size": 4, "padded_rows": 2}),
    MappingProxyType({"page_size": 16, "sinks": True}),
)
"""The smallest first, so that what fails first is small."""
VARIANTS: tuple[Mapping[str, Any], ...] = (
    MappingProxyType({}),
    MappingProxyType({"dtype": torch.bfloat16, "sinks": True, "head_dim": 16}),
    MappingProxyType({"dtype": torch.float16, "padded_rows": 2, "padded_tokens": 3, "head_dim": 64}),
    MappingProxyType({"softcap": True, "scale": 0.4}),
    MappingProxyType({"dtype": torch.bfloat16, "kv_dtype": torch.float8_e4m3fn, "kv_scales": True}),
    MappingProxyType({"head_dim": 24, "v_head_dim": 16, "num_q_heads": 6, "num_kv_heads": 1}),
    MappingProxyType({"topk": 2, "dtype": torch.bfloat16}),
    MappingProxyType({"hybrid": True, "dtype": torch.bfloat16, "head_dim": 16}),
    MappingProxyType({"strided_rows": True}),
)
"""What a kernel may or may not do."""


class _Kit:
    """What the kits share.

    Attributes:
        plugin: the object, or module, with the hooks.
        options: of the configuration: those that switch it on.
        entry_point: its name, where that is what its options are found under.
    """

    plugin: ClassVar[Any]
    entry_point: ClassVar[str] = "under test"
    options: ClassVar[Mapping[str, Mapping[str, Any]]] = MappingProxyType({})
    _folders: pytest.TempPathFactory | None = None

    @pytest.fixture(autouse=True)
    def _pictures_beside_tmp_path(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        self._folders = tmp_path_factory

    def expect(self, cell: Options, build: Build, runs: Runs) -> None:
        """Fails where a scenario is not as it must be: with the smallest that fails, who saw what, and a picture.

        Args:
            cell: options of the scenario.
            build: makes it of options.
            runs: how it is run.
        """
        said = report(cell, build, runs, temporary if self._folders is None else self._new_folder)
        assert not said, said

    def _new_folder(self) -> Path:
        assert self._folders is not None
        return self._folders.mktemp("pictures")

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """One test per cell and way, where a test asks for them."""
        if "cell" in metafunc.fixturenames:
            cells = list(self.cells())
            metafunc.parametrize("cell", cells, ids=[str(cell).removeprefix("Scenario.make") for cell in cells])
        if "way" in metafunc.fixturenames:
            metafunc.parametrize("way", WAYS)

    def cells(self) -> Iterable[Options]:
        """Scenarios that are run, smallest first."""
        raise NotImplementedError

    def made(self, way: str, options: Mapping[str, Mapping[str, Any]] | None = None) -> MakeBackend:
        """Backends with the plugin."""
        kernel, replayed = WAYS[way]
        chosen = self.options if options is None else options

        def make(config: BackendConfig, pools: Pools, layers: tuple[AttentionLayer, ...]) -> Any:
            config = attrs.evolve(config, kernels=kernel, checks=True, options={**config.options, **chosen})
            registry = Registry.load(config, BUILTINS, entry_points=[])
            registry.register(self.plugin, self.entry_point)
            registry.register(_Kernels(), "kernels of the kit")
            made = (Replayed if replayed else AttentionBackend)(config, pools, layers, registry=registry)
            _sound(registry)
            return made

        return make


class OverlayConformance(_Kit):
    """For an overlay that narrows what layers see, in every mode.

    Attributes:
        modes, overlays: of the kit's scenarios: whole models, of which the plugin varies the layers that it wants.
        bad_options: settings that must be refused.
    """

    modes: ClassVar[Sequence[str]] = MODES
    overlays: ClassVar[Sequence[str]] = ("full",)
    bad_options: ClassVar[Sequence[Mapping[str, Mapping[str, Any]]]] = ()

    def sees(self, query: Token, key: Token, layer: AttentionLayer) -> bool:
        """Whether a query still sees a key that the plain layer shows it."""
        raise NotImplementedError

    def cells(self) -> Iterable[Options]:
        for layout in LAYOUTS:
            for mode in self.modes:
                for overlay in self.overlays:
                    for more in ({}, {"topk": 2}):
                        options = Options(mode=mode, overlay=overlay, **{**layout, **more})
                        if impossible(options) is None:
                            yield options

    def test_it_sees_what_it_must(self, cell: Options, way: str) -> None:
        """Outputs, log-sum-exps and written keys are the oracle's."""
        self.expect(cell, lambda options: rejudged(_scenario(options), self.sees), Runs(self.made(way)))

    def test_it_does_something(self) -> None:
        """Or the test above would pass without the plugin."""
        changed = [cell for cell in self.cells() if not _same(_scenario(cell), self.sees)]
        assert changed, "`sees` is true of everything: no scenario of the kit is varied"

    def test_nobody_asked(self, way: str) -> None:
        """Without its options the plugin changes nothing."""
        for cell in list(self.cells())[:12]:
            self.expect(cell, _scenario, Runs(self.made(way, options={})))

    def test_bad_options_are_refused(self) -> None:
        """With an error that says what was wanted."""
        scenario = _scenario(next(iter(self.cells())))
        for options in self.bad_options:
            with pytest.raises(FabackError, match="wanted"):
                self.made("native", options)(scenario.config, scenario.pools(), scenario.layers)


class ModeConformance(_Kit):
    """For a forward mode with a key of its own.

    Attributes:
        mode: its key.
        needs: fields of the batch, or of its extras, without which it must be refused.
    """

    mode: ClassVar[str]
    needs: ClassVar[Sequence[str]] = ()

    def scenario(self, cell: Options) -> Scenario:
        """A built-in mode's scenario made one of this mode: `taken_over`, perhaps with extras, perhaps `rejudged`."""
        raise NotImplementedError

    def cells(self) -> Iterable[Options]:
        for layout in LAYOUTS:
            yield Options(mode="extend", **layout)

    def test_it_sees_what_it_must(self, cell: Options, way: str) -> None:
        """Outputs, log-sum-exps and written keys are the oracle's."""
        self.expect(cell, self.scenario, Runs(self.made(way)))

    def test_what_it_needs_is_asked_for(self) -> None:
        """A batch without a needed field is refused by name."""
        for name in self.needs:
            scenario = self.scenario(next(iter(self.cells())))
            backend = self.made("native")(scenario.config, scenario.pools(), scenario.layers)
            batch = next(step.batch for step in scenario.steps if step.batch.forward_mode == self.mode)
            with pytest.raises(BatchError, match=name):
                backend.plan(_without(batch, name))


class KernelConformance(_Kit):
    """For a kernel provider: what its capabilities claim is right, everything else is refused with reasons.

    Attributes:
        kernel: its name.
        device: where it runs.
        unreached: features that it may claim although no scenario asks for them: parts of what was lowered, and keys
            that are shared out over ranks.
    """

    kernel: ClassVar[str]
    device: ClassVar[str] = "cpu"
    unreached: ClassVar[frozenset[str]] = frozenset({"dense_table", "block_table", "tail_only", "sharded"})

    def cells(self) -> Iterable[Options]:
        for number, variant in enumerate(VARIANTS):
            for mode in MODES:
                for overlay in OVERLAYS:
                    options = Options(
                        mode=mode, overlay=overlay, seed=number, page_size=(1, 4, 16)[number % 3], **variant
                    )
                    if impossible(options) is None:
                        yield options

    def made(self, way: str = "", options: Mapping[str, Mapping[str, Any]] | None = None) -> MakeBackend:
        """Backends with the kernel pinned; replayed where the way says so."""

        def make(config: BackendConfig, pools: Pools, layers: tuple[AttentionLayer, ...]) -> Any:
            config = attrs.evolve(config, kernels=self.kernel, options={**config.options, **(options or self.options)})
            registry = Registry.load(config, BUILTINS, entry_points=[])
            registry.register(self.plugin, self.entry_point)
            _sound(registry)
            return (Replayed if way == "replayed" else AttentionBackend)(config, pools, layers, registry=registry)

        return make

    def provider(self) -> KernelProvider:
        """The kernel as a backend finds it."""
        scenario = Scenario.make(mode="decode")
        config = attrs.evolve(scenario.config, options=self.options)
        registry = Registry.load(config, BUILTINS, entry_points=[])
        registry.register(self.plugin, self.entry_point)
        found = [c.value for c in registry.kernels(torch.device(self.device)) if c.value.name == self.kernel]
        assert found, f"the plugin brings no kernel {self.kernel!r}"
        return found[0]

    def test_equal_or_refused(self, cell: Options) -> None:
        """Never wrong; a refusal says why."""
        self.expect(cell, _scenario, self.runs(self.made(), lambda r: r.status == REFUSED and self.kernel in r.reason))

    def test_replayed_where_it_can_be_captured(self, cell: Options) -> None:
        """Host integers of a capture on nothing, lengths of the replay."""
        if not self.claims("graph"):
            return
        self.expect(cell, _scenario, self.runs(self.made("replayed"), lambda result: result.status == REFUSED))

    def test_every_claim_is_kept(self) -> None:
        """Each feature of the capabilities is served natively somewhere: a claim that nothing reaches is not tested."""
        claimed = set(self.provider().capabilities(torch.device(self.device)).features)
        missing = claimed - self.unreached - {"deterministic", "graph", "lse"} - self.served()
        assert not missing, f"claimed, but never served: {sorted(missing)}. Add cells, or claim less."

    def runs(self, make: MakeBackend, refused: Callable[[CellResult], bool]) -> Runs:
        """Runs in which some refusals are as they must be."""
        fails = lambda result: result.status != EQUAL and not refused(result)  # noqa: E731
        return Runs(make, self.device, self.claims("lse"), fails)

    def claims(self, feature: str) -> bool:
        """Whether the capabilities name a feature."""
        return feature in self.provider().capabilities(torch.device(self.device)).features

    def served(self) -> set[str]:
        """Features of the requests that the kernel itself serves in the kit's scenarios."""
        found: set[str] = set()
        for cell in self.cells():
            scenario = _scenario(cell).to(self.device)
            try:
                backend = self.made()(scenario.config, scenario.pools(), scenario.layers)
            except FabackError:
                continue
            for step in scenario.steps:
                for layer in scenario.layers:
                    found |= _natively(backend, step.batch, layer)
        return found


def taken_over(scenario: Scenario, mode: str, **fields: Any) -> Scenario:
    """The scenario with its batches in another mode, and fields of them replaced."""
    steps = [attrs.evolve(s, batch=attrs.evolve(s.batch, forward_mode=mode, **fields)) for s in scenario.steps]
    return attrs.evolve(scenario, steps=tuple(steps))


class _Kernels:
    """Everything natively, late enough to be captured, and hardly anything."""

    @hookimpl
    def faback_kernels(self) -> list[KernelProvider]:
        return [Late(Reference()), Poor()]


def _sound(registry: Registry) -> None:
    """Raises where a plugin broke when it was asked what it brings, which the registry only makes a note of."""
    broken = [record.problem for record in registry.records if record.status == "broken"]
    if broken:
        raise RuntimeError(broken[0])


def _scenario(options: Options) -> Scenario:
    return Scenario.make(**attrs.asdict(options, recurse=False))


def _same(scenario: Scenario, sees: Any) -> bool:
    """Whether a rule takes nothing away."""
    return all(
        query is None or all(sees(query, key, call.layer) for key in keys)
        for step in scenario.steps
        for call in step.calls
        for query, keys in zip(step.queries, call.keys, strict=True)
    )


def _without(batch: ForwardBatch, name: str) -> ForwardBatch:
    if name in batch.extras:
        return attrs.evolve(batch, extras={n: value for n, value in batch.extras.items() if n != name})
    gone: dict[str, Any] = {name: None}
    return attrs.evolve(batch, num_tokens=batch.num_tokens, **gone)


def _natively(backend: Any, batch: ForwardBatch, layer: AttentionLayer) -> set[str]:
    """Features of the requests at the leaves of a layer's routes."""
    try:
        leaves = list(backend.explain(batch, layer).routes)
    except FabackError:
        return set()
    found = set[str]()
    while leaves:
        route = leaves.pop()
        leaves += route.parts
        if route.kernel is not None:
            found |= route.request.features
    return found
