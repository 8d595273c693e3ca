"""Methods over transformers' own generate: what is divided by what."""

import pytest
from choicespec.records import Trace
from choicespec.reports.peers import over_peers, peer_table
from choicespec.spec.experiment import TrialSpec
from choicespec.spec.method import Autoregressive, MethodSpec, Ngram, TransformersGenerate
from choicespec.spec.pair import PairSpec, TargetSpec
from choicespec.spec.runtime import HfRuntimeSpec
from choicespec.spec.task import ToolCall
from pydantic import ValidationError

DYNAMIC, STATIC = TransformersGenerate(), TransformersGenerate(cache="static")


def trial(method: MethodSpec, limit: int = 3) -> TrialSpec:
    pair = PairSpec(target=TargetSpec(model="tiny"))
    return TrialSpec(pair=pair, runtime=HfRuntimeSpec(), task=ToolCall(limit=limit), method=method)


def traces(**decode_ms: float) -> list[Trace]:
    """One of 10 decoded tokens for each request."""
    return [Trace(name, 4, tuple(range(11)), 1, "length", 1.0, ms, ()) for name, ms in decode_ms.items()]


def test_rates_are_divided_request_by_request() -> None:
    """Fails if the ratio is turned round, if order matters, or if a request that one of them lacks is counted."""
    found = over_peers({trial(Ngram()): traces(a=10, b=20), trial(DYNAMIC): traces(b=50, a=10, c=999)})
    ratios = {(one.trial.method.label, one.peer.label): one.ratio for one in found}
    (ratio,) = ratios.values()
    assert ratio.value == pytest.approx(2.0)
    assert ratio.n == 2


def test_each_method_stands_over_each_peer_without_drafts() -> None:
    """Fails if transformers' prompt lookup passes for a baseline, or if trials of different tasks are compared."""
    peers = [DYNAMIC, STATIC, TransformersGenerate(prompt_lookup_num_tokens=4)]
    methods: list[MethodSpec] = [Autoregressive(), *peers]
    here = {trial(method): traces(a=10) for method in methods}
    found = over_peers({**here, trial(Ngram(), limit=2): traces(a=10)})
    assert {one.peer for one in found} == {DYNAMIC, STATIC}
    assert len(found) == 2 * 3
    assert all(one.trial in here for one in found)


def test_the_table_names_both() -> None:
    """Fails if a reader cannot tell which cache a method was compared with."""
    table = peer_table(over_peers({trial(Ngram()): traces(a=10), trial(STATIC): traces(a=20)}))
    assert table is not None
    cells = [str(cell) for column in table.columns for cell in column.cells]
    assert cells[2:] == ["ngram k=8", "transformers generate static", "2.00 [2.00, 2.00]", "1"]
    assert peer_table([]) is None


def test_the_static_cache_and_drafts_exclude_each_other() -> None:
    """Fails if transformers refuses only once weights are loaded; or if the older peers lose their identity."""
    with pytest.raises(ValidationError, match="leave one of them out"):
        TransformersGenerate(cache="static", prompt_lookup_num_tokens=4)
    assert DYNAMIC.model_dump() == {"kind": "transformers_generate", "prompt_lookup_num_tokens": None}
    assert trial(DYNAMIC).fingerprint() != trial(STATIC).fingerprint()
