"""The test kit: an independent judge for attention backends.

    for result in run_scenario(Scenario.make(mode="decode", overlay="window", page_size=16, seed=7)):
        assert result.status == "equal", result

`Scenario.make` lays tokens with identities out in a simulated engine, poisons everything unused and asks the oracle
what must come out; `run_scenario` runs a backend on it. `faback.testing.strategies` has hypothesis strategies.
"""

from faback.testing.checks import CellResult, outputs, run_scenario, wrong
from faback.testing.options import MODES, OVERLAYS, Options, impossible
from faback.testing.oracle import World, oracle_attention, visibility_matrix
from faback.testing.poison import poison_, poisoned
from faback.testing.scenario import LayerCall, Scenario, Step
from faback.testing.visibility import Facts, Token, sees

__all__ = [
    "MODES",
    "OVERLAYS",
    "CellResult",
    "Facts",
    "LayerCall",
    "Options",
    "Scenario",
    "Step",
    "Token",
    "World",
    "impossible",
    "oracle_attention",
    "outputs",
    "poison_",
    "poisoned",
    "run_scenario",
    "sees",
    "visibility_matrix",
    "wrong",
]
