"""The recordings of a job that trains: where each task's lies, and how what is missing of it is made."""

import hashlib
from collections.abc import Sequence

from choicespec.cluster.connect import on_cluster
from choicespec.cluster.recording import Wanted, draft, record
from choicespec.errors import RecordingError
from choicespec.recordings import Recorded, RecordingFolder, RecordingManifest
from choicespec.records import Proposal
from choicespec.replay.drafted import DraftedFile
from choicespec.runtimes.hf import HfRuntime
from choicespec.spec.method import Draft
from choicespec.spec.pair import PairSpec
from choicespec.spec.runtime import HfRuntimeSpec
from choicespec.spec.task import TaskSpec
from choicespec.tasks.prompts import open_task

from jobs.terminal import ProgressLines, home


class RecordedTasks:
    """What is recorded of one pair, for all experiments: what one has recorded another reads.

    Args:
        runtime: records.
        opened: the same with the pair, without its weights.
        pair: what is recorded.
        layers: the decoder layers whose hidden states are kept.
        batch_size: requests recorded together.
        drafts: the drafters whose drafts are recorded along the outputs.
        prompt_states: whether the prompts' hidden states are kept as well.
    """

    def __init__(
        self,
        runtime: HfRuntimeSpec,
        opened: HfRuntime,
        pair: PairSpec,
        layers: tuple[int, ...],
        batch_size: int,
        drafts: Sequence[Draft] = (),
        prompt_states: bool = False,
    ) -> None:
        self.opened, self.drafters = opened, tuple(method.drafter for method in drafts)
        self._runtime, self._pair, self._layers = runtime, pair, layers
        self._batch_size, self._drafts, self._prompt_states = batch_size, drafts, prompt_states

    def record(self, task: TaskSpec) -> None:
        """Record what is missing of a task, and of the drafts along it; within a Ray session."""
        folder, what, batch_size = self.of(task), (self._layers, self._prompt_states), self._batch_size
        if folder.begun:
            begun = folder.manifest()
            what, batch_size = (begun.layers, begun.prompt_states), max(map(len, begun.chunks))
        wanted = Wanted(self._pair, self._runtime, task, what[0], folder, what[1])
        prompts = open_task(task).prompts(self.opened.tokenizer, self.opened.context_tokens)
        record(wanted, prompts, self.opened, batch_size, ProgressLines(), can_grow=on_cluster())
        files = {method: self._drafted_file(task, method) for method in self._drafts}
        draft(wanted, files, self._batch_size, ProgressLines())

    def of(self, task: TaskSpec) -> RecordingFolder:
        """Where a task's recording lies: one that is begun and has all that is wanted, or else a place for a new one.

        Another target or task has another place.
        """
        root = home() / "results" / "recordings"
        name = f"{task.kind}-{task.split}-{digest(self.opened.identity.model_dump_json(), task.model_dump_json())}"
        for folder in map(RecordingFolder, sorted(root.glob(f"{name}-*"))):
            if folder.begun and self._is_in(folder.manifest()):
                return folder
        return RecordingFolder(root / f"{name}-{digest(str(self._layers), str(self._prompt_states))}")

    def _is_in(self, manifest: RecordingManifest) -> bool:
        """Whether a recording has all that is wanted."""
        return set(self._layers) <= set(manifest.layers) and manifest.prompt_states >= self._prompt_states

    def read(self, task: TaskSpec) -> list[Recorded]:
        """What is recorded of a task, in its order, with the states of the wanted layers at the outputs alone."""
        return self.of(task).read(self._layers)

    def drafted(self, task: TaskSpec) -> dict[str, list[Proposal]]:
        """What each drafter drafts along a recorded task, position after position.

        Raises:
            RecordingError: it has not been recorded.
        """
        found = {}
        for method in self._drafts:
            file = self._drafted_file(task, method)
            drafted = file.load()
            if drafted is None:
                raise RecordingError(f"no drafts of {method.drafter!r} in {file.path}; record again")
            found[method.drafter] = drafted.proposals(method.drafter)
        return found

    def _drafted_file(self, task: TaskSpec, method: Draft) -> DraftedFile:
        folder, drafter = self.of(task), self._pair.drafters[method.drafter]
        return DraftedFile(folder.path, folder.manifest(), drafter, method.num_draft_tokens)


def train_split(task: TaskSpec, limit: int) -> TaskSpec:
    """What a task whose ``test`` split is held out is trained on."""
    return task.model_copy(update={"split": "train", "limit": limit})


def digest(*parts: str) -> str:
    """12 hex digits that name what the parts describe."""
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]
