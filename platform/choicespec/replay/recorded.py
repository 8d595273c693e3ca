"""Where a pair's recordings, proposals and costs lie, and what a replay reads of them."""

import hashlib
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path

from choicespec.candidates.request import RequestCandidates, repository_of
from choicespec.errors import RecordingError, ScorerError
from choicespec.measuring.cost import Costs, load_costs
from choicespec.measuring.measure import warm_up
from choicespec.recordings import Recorded, RecordingFolder, RecordingManifest
from choicespec.records import TargetIdentity
from choicespec.replay.drafted import Drafted, DraftedFile
from choicespec.replay.drafts import RecordedDrafts
from choicespec.replay.proposals import RECORDED_BLOCK, Proposals, collect, load_proposals, save_proposals
from choicespec.replay.ranking import Ranking
from choicespec.runtimes.hf import HfRuntime
from choicespec.runtimes.pair_parts import as_trained, drafter_refusal, scorer_of
from choicespec.scorer.files import Scorer, ScorerManifest, find_scorer, load_scorer
from choicespec.spec.method import Draft
from choicespec.spec.pair import PairSpec
from choicespec.spec.runtime import HfRuntimeSpec
from choicespec.spec.task import TaskSpec
from choicespec.tasks.prompts import open_task

_RECORD = "record it with: python -m jobs.record EXPERIMENT"


class RecordedPair:
    """One pair's recordings below a folder. Only the tokenizer, and the embedding where a scorer reads it, are loaded.

    Raises:
        CheckpointError: there is no such target.
    """

    def __init__(self, folder: Path, runtime: HfRuntimeSpec, pair: PairSpec) -> None:
        self.runtime, self.pair = runtime, pair
        self.opened = HfRuntime(runtime, pair)
        self._folder = folder

    @cached_property
    def scorer(self) -> ScorerManifest | None:
        """What the pair's scorer is for; None where it has none that fits."""
        try:
            return scorer_of(self.pair)
        except ScorerError:
            return None

    @property
    def layers(self) -> tuple[int, ...]:
        """The decoder layers that are recorded: those that the scorer reads."""
        if self.scorer is None:
            return ()
        return tuple(dict.fromkeys((*self.scorer.layers, *self.scorer.source_layers)))

    @property
    def prompt_states(self) -> bool:
        """Whether the prompts' states are recorded too: where the scorer reads those at a candidate's source."""
        return self.scorer is not None and bool(self.scorer.source_layers)

    def recording(self, task: TaskSpec) -> RecordingFolder:
        """The folder of a task's recording, whether it is there or not."""
        what = [self.pair.target.model_dump_json(), task.model_dump_json(), str(self.layers)]
        if self.prompt_states:  # recordings without them keep the place that they have
            what.append("prompt_states")
        return RecordingFolder(self._folder / f"{task.kind}-{task.split}-{_digest(*what)}")

    @property
    def costs_file(self) -> Path:
        """Where the costs of this pair on this runtime are kept."""
        what = (self.pair.model_dump_json(), self.runtime.model_dump_json())
        return self._folder / f"costs-{_digest(*what)}.json"

    def costs(self) -> Costs:
        """The pair's costs.

        Raises:
            RecordingError: they have not been measured.
        """
        return load_costs(self.costs_file)

    def propose(self, task: TaskSpec) -> Proposals:
        """What is proposed along a task's recorded outputs; drawn where it is not kept.

        Raises:
            RecordingError: the task has not been recorded.
        """
        folder, manifest = self._checked(task)
        kept = load_proposals(folder.path, manifest)
        if kept is not None:
            return kept
        proposals = self._collect(task, folder.read(()))
        save_proposals(folder.path, manifest, proposals)
        return proposals

    def longest_draft(self, name: str) -> Draft:
        """One of the pair's drafters with the k that is recorded, of which shorter drafts are the beginnings.

        Raises:
            CheckpointError: the drafter is missing, of a kind that does not run here, or for another target.
        """
        return as_trained(self.pair, Draft(drafter=name, num_draft_tokens=RECORDED_BLOCK))

    def drafted_file(self, task: TaskSpec, method: Draft) -> DraftedFile:
        """Where what a drafter drafts along a task's recording is kept.

        Raises:
            RecordingError: the task has not been recorded, or of another target.
        """
        folder, manifest = self._checked(task)
        return DraftedFile(folder.path, manifest, self.pair.drafters[method.drafter], method.num_draft_tokens)

    def drafts(self, task: TaskSpec) -> RecordedDrafts:
        """A task's recording as a replay wants it.

        Raises:
            RecordingError: the task has not been recorded, or of another target.
        """
        folder, _ = self._checked(task)
        proposals, recorded = self.propose(task), folder.read()
        ranking = Ranking(proposals, recorded, self._load_scorer)
        drafted = dict(self._drafted(task))
        return RecordedDrafts(proposals, ranking, drafted, self._warm_up(task, recorded[0]) if drafted else None)

    def _drafted(self, task: TaskSpec) -> Iterator[tuple[str, Drafted]]:
        """By name, what is kept of the pair's drafters."""
        for name in self.pair.drafters:
            if drafter_refusal(self.pair, Draft(drafter=name)) is None:
                kept = self.drafted_file(task, self.longest_draft(name)).load()
                if kept is not None:
                    yield name, kept

    def _warm_up(self, task: TaskSpec, first: Recorded) -> RecordedDrafts:
        """What a live loop decodes before the first request."""
        request = warm_up(first.request)
        count = len(first.output_ids[: request.max_new_tokens])
        states = {layer: found[:count] for layer, found in first.hidden_states.items()}
        recorded = first._replace(
            request=request,
            output_ids=first.output_ids[:count],
            margins=first.margins[:count],
            hidden_states=states,
        )
        proposals = self._collect(task, [recorded])
        return RecordedDrafts(proposals, Ranking(proposals, [recorded], self._load_scorer))

    def _collect(self, task: TaskSpec, recorded: Sequence[Recorded]) -> Proposals:
        prompts = open_task(task).prompts(self.opened.tokenizer, self.opened.context_tokens)
        encode = self.opened.tokenizer.encode
        return collect(
            recorded, RequestCandidates(RECORDED_BLOCK, 1, encode, repository_of(prompts.repository(), encode))
        )

    def _checked(self, task: TaskSpec) -> tuple[RecordingFolder, RecordingManifest]:
        folder = self.recording(task)
        if not folder.path.is_dir():
            raise RecordingError(f"{task.label} ({task.split}) of {self.pair.label} is not recorded; {_RECORD}")
        manifest = folder.manifest()
        _check_target(folder.path, manifest.target, self.opened.identity)
        return folder, manifest

    def _load_scorer(self) -> Scorer:
        """The pair's scorer on the embedding alone.

        Raises:
            ScorerError: it is missing or broken, or for another target.
        """
        manifest = scorer_of(self.pair)
        embedding = self.opened.input_embedding()
        folder = find_scorer(self.pair.scorer, self.opened.identity)
        return load_scorer(folder, manifest, lambda token_ids: embedding[token_ids])


def _check_target(path: Path, recorded: TargetIdentity, target: TargetIdentity) -> None:
    for name in TargetIdentity.model_fields:
        own, other = getattr(recorded, name), getattr(target, name)
        if own != other:
            raise RecordingError(
                f"{path} was recorded of a target with {name} {own}, but this one has {other}; move it away, and "
                f"{_RECORD}"
            )


def _digest(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]
