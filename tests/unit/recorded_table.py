"""A table model's outputs, recorded, and what the measuring loop does with methods on the same requests."""

import json
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

import numpy as np
from choicespec.candidates.request import RequestCandidates
from choicespec.candidates.sources import Store
from choicespec.decoding.step_cost import StepCosts
from choicespec.measuring.measure import TrialResult, measure
from choicespec.recordings import Recorded
from choicespec.records import Document, Request
from choicespec.replay.proposals import Proposals, collect
from choicespec.replay.ranking import Ranking
from choicespec.runtimes.scripted import ByteTokenizer, ScriptedRuntime
from choicespec.spec.experiment import TrialSpec
from choicespec.spec.method import Autoregressive, MethodSpec
from choicespec.spec.pair import PairSpec, TargetSpec
from choicespec.spec.runtime import ScriptedRuntimeSpec
from choicespec.spec.task import ToolCall
from choicespec.tasks.prompts import Prompts

PAIR, SPEC = PairSpec(target=TargetSpec(model="none")), ScriptedRuntimeSpec()
_TOOL = json.dumps({"name": "f", "parameters": {"type": "object", "properties": {"x": {}, "y": {}}}})
REQUESTS = (
    Request("short", tuple(b"f(x=12"), 3, tools=(_TOOL,)),
    Request("one", tuple(b"f(x="), 1),
    *(Request(f"r{x}", tuple(f'f(x={x}, y="'.encode()), 40, document="a.py" * (x == 14)) for x in range(12, 17)),
    Request("end", tuple(b'f(x=38, y="3"); f(x=39, '), 40, tools=(_TOOL,)),
    Request("stop", tuple(b"say f(x=20"), 40, stop=('"; ', "x=22")),
    Request("strange", tuple(b"never seen, " * 9), 25),
)
_DOCUMENTS = (Document("a.py", 'f(x=14, y="0"); f(x=15, y="1")'), Document("b.py", 'f(x=16, y="9"); g(x=1)'))
PROMPTS = Prompts(REQUESTS, (), lambda: _DOCUMENTS)
RISING = StepCosts((1, 2, 3, 9, 17, 64), (1.0, 1.1, 1.3, 2.4, 4.0, 16.0))


class Recording(NamedTuple):
    """Outputs, and what the candidate sets and prompt lookup say along them."""

    recorded: list[Recorded]
    proposals: Proposals

    @property
    def ranking(self) -> Ranking:
        return Ranking(self.proposals, self.recorded, _no_scorer)


def _no_scorer() -> NoReturn:
    raise AssertionError("no method here scores")


def record(requests: Sequence[Request] = REQUESTS) -> Recording:
    """Greedy outputs, by plain decoding, and what is proposed along them."""
    runtime = ScriptedRuntime(SPEC, PAIR)
    recorded = []
    for request in requests:
        found = runtime.generate(request, Autoregressive())
        margins = np.zeros(len(found.output_ids), np.float32)
        recorded.append(Recorded(request, found.output_ids, found.finish_reason, margins, {}))
    repository = Store(10_000)
    for document in _DOCUMENTS:
        repository.add(list(document.text.encode()), name=document.name)
    return Recording(recorded, collect(recorded, RequestCandidates(8, 16, ByteTokenizer().encode, repository)))


def live(runtime: ScriptedRuntime, methods: Sequence[MethodSpec]) -> list[TrialResult]:
    """What the measuring loop finds, warm-up and learning from earlier requests included."""
    runtime.use_step_costs(RISING)
    runtime.use_repository(PROMPTS.repository)
    trials = [TrialSpec(pair=PAIR, runtime=SPEC, task=ToolCall(), method=method) for method in methods]
    return [event for event in measure(runtime, trials, PROMPTS) if isinstance(event, TrialResult)]
