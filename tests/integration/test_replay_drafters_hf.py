"""What neural drafters draft along recorded outputs, against the live loop: small random networks, whose
drafts depend on every hidden state."""

from collections.abc import Sequence
from typing import NamedTuple

import pytest
from choicespec.decoding.proposer import Proposer
from choicespec.measuring.cost import DrafterCost, ProposerCost
from choicespec.measuring.measure import TrialResult, measure
from choicespec.recordings import RecordingManifest, pack
from choicespec.records import Proposal, Request
from choicespec.replay.drafted import Drafted, drafted_of, shortened
from choicespec.replay.recorded import RecordedPair
from choicespec.replay.simulate import Replay
from choicespec.runtimes.hf import HfRuntime
from choicespec.spec.experiment import TrialSpec
from choicespec.spec.method import Choice, Draft, MethodSpec
from choicespec.spec.runtime import HfRuntimeSpec
from choicespec.spec.task import PythonRepo
from choicespec.tasks.prompts import open_task
from contracts.replay_equality import assert_all_same, costs_of
from integration.job_homes import write_repository
from integration.small_drafters import BLOCK, save_pair
from unit.recorded_table import RISING

NAMES = ("dflash", "dflash2", "mtp")
COST = DrafterCost(tokens=(1,), ms=(ProposerCost(first_ms=1.0, step_ms=1.0),))
COSTS = costs_of(RISING, drafters=dict.fromkeys(NAMES, COST))
METHODS: tuple[MethodSpec, ...] = (
    *(Draft(drafter=name, num_draft_tokens=k) for name in NAMES for k in (2, BLOCK - 1)),
    Choice(block_length=4, drafters=NAMES, min_survival=0.0),
    Choice(block_length=3, drafters=("mtp", "dflash"), gate=(1.5, 0.5), min_survival=0.01),
)


class Noted(NamedTuple):
    """A call of a drafter in the live loop."""

    request: Request
    output_tokens: int
    said: Proposal


class Listener:
    """Notes what a drafter drafts."""

    def __init__(self, drafter: Proposer, noted: list[Noted]) -> None:
        self._drafter, self._noted = drafter, noted

    def begin(self, request: Request) -> None:
        self._request = request
        self._drafter.begin(request)

    def propose(self, token_ids: Sequence[int], limit: int) -> Proposal:
        said = self._drafter.propose(token_ids, limit)
        self._noted.append(Noted(self._request, len(token_ids) - len(self._request.prompt_ids), said))
        return said

    def finish(self, request: Request, output_ids: Sequence[int]) -> None:
        self._drafter.finish(request, output_ids)


class Compared(NamedTuple):
    """A recording with its drafts, and what the live loop did on the same requests."""

    pair: RecordedPair
    task: PythonRepo
    results: list[TrialResult]
    noted: list[Noted]


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Compared:
    """Three short completions."""
    folder = tmp_path_factory.mktemp("pair")
    repo = write_repository(tmp_path_factory.mktemp("repo"), modules=20)
    task = PythonRepo(folder=str(repo), limit=3, max_new_tokens=12)
    runtime_spec, pair_spec = HfRuntimeSpec(threads=2), save_pair(folder)
    pair = RecordedPair(folder / "recordings", runtime_spec, pair_spec)
    prompts = open_task(task).prompts(pair.opened.tokenizer, pair.opened.context_tokens)
    ids = tuple(request.request_id for request in prompts.requests)
    recording = pair.recording(task)
    recording.begin(
        RecordingManifest(target=pair.opened.identity, task=task, layers=(), chunks=(ids,), request_ids=ids)
    )
    recording.add(0, pack(pair.opened.record(prompts.requests, ())))
    outputs = [(one.request, one.output_ids) for one in recording.read()]
    for method in map(pair.longest_draft, NAMES):
        along = pair.opened.draft_along(outputs, method)
        drafted = drafted_of((draft for drafts in along for draft in drafts), method.num_draft_tokens)
        pair.drafted_file(task, method).save(drafted)
    noted: list[Noted] = []
    runtime = HfRuntime(runtime_spec, pair_spec)
    made = runtime._drafter
    runtime._drafter = lambda method: Listener(made(method), noted)  # type: ignore[method-assign]
    runtime.use_step_costs(COSTS.step_costs)
    runtime.use_repository(prompts.repository)
    trials = [TrialSpec(pair=pair_spec, runtime=runtime_spec, task=task, method=method) for method in METHODS]
    results = [event for event in measure(runtime, trials, prompts) if isinstance(event, TrialResult)]
    return Compared(pair, task, results, noted)


def test_every_method_takes_the_steps_of_the_live_loop(compared: Compared) -> None:
    """Fails if a replay verifies more, fewer or other drafts than the live loop did."""
    found = Replay(compared.pair.drafts(compared.task), COSTS).of(METHODS)
    assert_all_same(found, compared.results)


def differing(compared: Compared, drafted: dict[str, Drafted]) -> int:
    """Of the live calls, those at which something else was recorded."""
    proposals = compared.pair.propose(compared.task)
    ids = [request.request_id for request, *_ in compared.pair.recording(compared.task).read()]
    starts = dict(zip(ids, [0, *proposals.ends.tolist()], strict=False))
    recorded = {name: one.proposals(name) for name, one in drafted.items()}
    return sum(
        shortened(recorded[said.source][starts[request.request_id] + count - 1], len(said.token_ids)).token_ids
        != said.token_ids
        for request, count, said in compared.noted
        if said.token_ids
    )


def test_what_was_recorded_is_what_is_drafted(compared: Compared) -> None:
    """Fails if a drafter that takes in the output token by token, or has its longest k, drafts otherwise than in a loop
    that takes in blocks; the planted fault, drafts of the position before, is seen at most calls."""
    drafted = dict(compared.pair._drafted(compared.task))
    assert set(drafted) == set(NAMES)
    assert len(compared.noted) > 100
    assert differing(compared, drafted) == 0
    shifted = {
        name: Drafted(one.token_ids[[0, *range(len(one.token_ids) - 1)]], one[1]) for name, one in drafted.items()
    }
    assert differing(compared, shifted) > len(compared.noted) // 2
