"""What is counted as memory that a method holds, and what a search makes of it."""

import os
from types import SimpleNamespace

import numpy as np
import pytest
from choicespec.errors import SpecError
from choicespec.measuring.objectives import front
from choicespec.records import Request
from choicespec.runtimes.memory import held_bytes, peak_resident_bytes
from choicespec.runtimes.scripted import ScriptedRuntime
from choicespec.spec.method import Autoregressive, Choice, MethodSpec
from choicespec.spec.pair import PairSpec, TargetSpec
from choicespec.spec.runtime import ScriptedRuntimeSpec
from unit.searches import parsed

_LARGE = 1 << 20


def test_what_several_refer_to_counts_once() -> None:
    """Fails if a store that two proposers share, or a view into an array, is counted again."""
    array = np.zeros(_LARGE, np.uint8)
    found = held_bytes(
        [SimpleNamespace(a=array, b=[array[5:], memoryview(array[:9].data)]), {"again": array}], apart=()
    )
    assert _LARGE < found < 1.01 * _LARGE


def test_bytes_behind_a_view_count() -> None:
    """Fails if an index that keeps its text as bytes, and shows it as numbers, weighs nothing."""
    assert held_bytes([np.frombuffer(bytes(_LARGE), np.uint32)], apart=()) > _LARGE


def test_what_is_apart_is_not_looked_into() -> None:
    """Fails if a proposer's weight includes the runtime that it asks, or everything that the program has loaded."""
    runtime = SimpleNamespace(held=bytes(_LARGE))
    proposer = SimpleNamespace(encode=runtime.__eq__, code=lambda: runtime, module=np)
    assert held_bytes([proposer], apart=[runtime]) < 10_000


def test_a_method_holds_what_it_has_learnt() -> None:
    """Fails if a proposer's store of earlier outputs is forgotten, or plain decoding is charged for it."""
    runtime = ScriptedRuntime(ScriptedRuntimeSpec(), PairSpec(target=TargetSpec(model="none")))
    before: dict[MethodSpec, int] = {}
    after: dict[MethodSpec, int] = {}
    for method in (Autoregressive(), Choice()):
        for kept, requests in ((before, 1), (after, 30)):
            for number in range(requests):
                runtime.generate(Request(f"r{number}", tuple(b"f(x=12"), 60), method)
            kept[method] = runtime.memory_bytes(method)
    assert after[Autoregressive()] < before[Autoregressive()] + 1000
    assert after[Choice()] > before[Choice()] + 4 * 30 * 50
    assert before[Choice()] > before[Autoregressive()]


def test_a_process_has_had_what_it_has() -> None:
    """Fails if the unit of the system's table is mistaken."""
    peak = peak_resident_bytes(os.getpid())
    filled = np.ones(64 * _LARGE, np.uint8)
    assert filled.nbytes < peak_resident_bytes(os.getpid()) < peak + 4 * filled.nbytes


@pytest.mark.parametrize(
    ("worths", "unbeaten"),
    [
        ([(1.0, -5.0), (2.0, -6.0), (0.5, -7.0)], [0, 1]),
        ([(1.0, -5.0), (1.0, -5.0)], [0, 1]),
        ([(1.0, -5.0, 3.0), (1.0, -5.0, 2.0)], [0]),
    ],
)
def test_the_front_holds_what_no_other_beats(worths: list[tuple[float, ...]], unbeaten: list[int]) -> None:
    """Fails if one objective hides a setting that is better in another, or of equal ones both vanish."""
    assert front(worths) == unbeaten


def test_memory_that_cannot_be_told_is_no_objective() -> None:
    """Fails if a search of hours ends with a front of unknown figures."""
    memory = ("decode_tokens_per_s", "memory_bytes")
    assert parsed(objectives=memory).search is not None
    with pytest.raises(SpecError, match=r"takes in memory on 'hf' with gpus=0 cannot be told; leave memory_bytes out"):
        parsed(objectives=memory, default="peer")
    with pytest.raises(SpecError, match=r"on 'vllm' with gpus=1 cannot be told"):
        parsed(objectives=memory, runtime="engine", pair="on_gpu")
