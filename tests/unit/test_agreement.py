"""Plain decoding on one runtime beside another: what counts as the same."""

from choicespec.records import Trace
from choicespec.reports.agreement import agreement_table, agreements
from choicespec.spec.experiment import TrialSpec
from choicespec.spec.method import Autoregressive, MethodSpec, Ngram
from choicespec.spec.pair import PairSpec, TargetSpec
from choicespec.spec.runtime import HfRuntimeSpec, RuntimeSpec, VllmRuntimeSpec
from choicespec.spec.task import ToolCall

PLAIN = Autoregressive()


def trial(runtime: RuntimeSpec, method: MethodSpec = PLAIN, model: str = "tiny", limit: int = 3) -> TrialSpec:
    pair = PairSpec(target=TargetSpec(model=model))
    return TrialSpec(pair=pair, runtime=runtime, task=ToolCall(limit=limit), method=method)


def outputs(**by_request: tuple[int, ...]) -> list[Trace]:
    return [Trace(name, 4, ids, 1, "length", 1.0, 1.0, ()) for name, ids in by_request.items()]


HF, VLLM = trial(HfRuntimeSpec()), trial(VllmRuntimeSpec())


def test_outputs_are_compared_request_by_request() -> None:
    """Fails if order matters, or if an output that another continues passes for the same."""
    expected = outputs(a=(1, 2, 3), b=(4, 5, 6), c=(7, 8, 9))
    found = outputs(c=(7, 8), b=(4, 5, 6), a=(1, 0, 3))
    (one,) = agreements({HF: expected, VLLM: found})
    assert (one.one, one.other) == (HF, VLLM)
    assert (one.match.value, one.match.n) == (1 / 3, 3)
    assert one.parted_at == (1, 2)


def test_only_plain_decoding_of_one_target_on_one_task_is_compared() -> None:
    """Fails if a method, another target or another task passes for a runtime that says something else."""
    same = outputs(a=(1, 2))
    others = [trial(VllmRuntimeSpec(), method=Ngram()), trial(VllmRuntimeSpec(), model="other")]
    found = agreements({HF: same, **dict.fromkeys([*others, trial(VllmRuntimeSpec(), limit=2)], same)})
    assert found == []
    assert agreement_table(found) is None


def test_the_table_says_where_outputs_part() -> None:
    """Fails if a reader cannot tell an early difference, which is a fault, from a late tie."""
    table = agreement_table(agreements({HF: outputs(a=(1, 2), b=(3, 4)), VLLM: outputs(a=(1, 2), b=(3, 5))}))
    assert table is not None
    cells = [str(cell) for column in table.columns for cell in column.cells]
    assert cells[1:3] == ["hf, float32", "vllm, float32"]
    assert cells[-2:] == ["2", "1"]
