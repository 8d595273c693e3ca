"""What neural drafters draft along recorded outputs, against the live loop: small random networks, whose
drafts depend on every hidden state."""

from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
from choicespec.decoding.proposer import Proposer
from choicespec.measuring.cost import DrafterCost, ProposerCost
from choicespec.measuring.measure import TrialResult, measure
from choicespec.records import Proposal, Request, TargetIdentity
from choicespec.replay.drafted import Drafted, drafted_of, shortened
from choicespec.replay.ranking import Ranking
from choicespec.replay.recorded import RecordedPair
from choicespec.replay.simulate import Replay
from choicespec.runtimes.hf import HfRuntime
from choicespec.scorer.files import Scorer, ScorerManifest, save_scorer
from choicespec.scorer.model import ScorerNet
from choicespec.spec.experiment import TrialSpec
from choicespec.spec.method import Choice, Draft, MethodSpec
from choicespec.spec.pair import PairSpec, ScorerSpec
from choicespec.spec.runtime import HfRuntimeSpec
from choicespec.spec.task import PythonRepo
from contracts.replay_equality import assert_all_same, costs_of
from integration.job_homes import write_repository
from integration.small_drafters import BLOCK, save_pair
from integration.small_recordings import record_whole
from unit.recorded_table import RISING

NAMES = ("dflash", "dflash2", "mtp")
COST = DrafterCost(tokens=(1,), ms=(ProposerCost(first_ms=1.0, step_ms=1.0),))
COSTS = costs_of(RISING, drafters=dict.fromkeys(NAMES, COST))
METHODS: tuple[MethodSpec, ...] = (
    *(Draft(drafter=name, num_draft_tokens=k) for name in NAMES for k in (2, BLOCK - 1)),
    Choice(block_length=4, drafters=NAMES, min_survival=0.0),
    Choice(block_length=3, drafters=("mtp", "dflash"), gate=(1.5, 0.5), min_survival=0.01),
    Choice(block_length=6, drafters=("dflash",), min_survival=0.0),  # more than it was trained for
    *(Choice(block_length=L, selection="scorer", drafters=NAMES, min_survival=0.0) for L in (4, 6)),
    Choice(block_length=6, selection="scorer", drafters=("mtp", "dflash"), gate=(4.0, 2.5), min_survival=0.01),
)
SCORER_LAYERS = (2, 3)


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


def union_scorer(target: TargetIdentity, pair: PairSpec, source_layers: tuple[int, ...]) -> Scorer:
    """Random weights, large enough for drafts to be judged better and worse than candidates."""
    embedding_size = target.hidden_size
    manifest = ScorerManifest(
        target=target,
        layers=SCORER_LAYERS,
        source_layers=source_layers,
        block_length=8,
        drafters={name: pair.drafters[name] for name in NAMES},
        embedding_size=embedding_size,
        width=64,
        trained_on={},
        held_out=(),
    )
    torch.manual_seed(2)
    net = ScorerNet(manifest.shape, lambda token_ids: torch.zeros(*token_ids.shape, embedding_size))
    for parameter in net.prior.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return Scorer(net, manifest)


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Compared:
    """Three short completions, by a scorer that reads the states at candidates' sources too."""
    folder = tmp_path_factory.mktemp("pair")
    repo = write_repository(tmp_path_factory.mktemp("repo"), modules=20)
    task = PythonRepo(folder=str(repo), limit=3, max_new_tokens=12)
    runtime_spec, pair_spec = HfRuntimeSpec(threads=2), save_pair(folder)
    save_scorer(folder / "scorer", union_scorer(HfRuntime(runtime_spec, pair_spec).identity, pair_spec, (1, 3)))
    pair_spec = pair_spec.model_copy(update={"scorer": ScorerSpec(folder=str(folder / "scorer"))})
    pair = RecordedPair(folder / "recordings", runtime_spec, pair_spec)
    prompts = record_whole(pair, task)
    outputs = [(one.request, one.output_ids) for one in pair.recording(task).read()]
    methods = [pair.longest_draft(name) for name in NAMES]
    for method, along in zip(methods, zip(*pair.opened.draft_along(outputs, methods), strict=True), strict=True):
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


@pytest.mark.parametrize("fault", ["positions", "drafters"])
def test_drafts_that_are_judged_otherwise_are_caught(
    compared: Compared, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """Fails if the equality above says nothing about what the scorer makes of drafts: its verdicts on another position,
    or on another drafter, are planted."""
    judged = Ranking.judged

    def planted(ranking: Ranking, drafter: str, drafted: Drafted, block_length: int) -> list[list[float]] | None:
        if fault == "drafters":
            drafter = NAMES[NAMES.index(drafter) - 1]
            return judged(ranking, drafter, drafted, block_length)
        found = judged(ranking, drafter, drafted, block_length)
        assert found is not None
        return [[0.0] * len(row) for row in found]

    monkeypatch.setattr(Ranking, "judged", planted)
    with pytest.raises(AssertionError, match="choice scorer"):
        assert_all_same(Replay(compared.pair.drafts(compared.task), COSTS).of(METHODS), compared.results)


def test_unions_are_of_drafts_that_the_scorer_prefers_here_and_there(compared: Compared) -> None:
    """Fails if the scorer's unions are all of one source, so that their equality is that of other methods."""
    sources = {
        step.source
        for result in compared.results
        if isinstance(result.trial.method, Choice) and result.trial.method.selection == "scorer"
        for trace in result.traces
        for step in trace.steps
        if step.proposed
    }
    assert len(sources) >= 3
    assert sources & {*NAMES}


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
