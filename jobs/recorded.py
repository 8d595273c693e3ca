"""The recordings of a job that trains: where each task's lies, and how what is missing of it is made."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

from choicespec.cluster.connect import on_cluster
from choicespec.cluster.recording import Wanted, draft, record
from choicespec.errors import RecordingError
from choicespec.recordings import RecordingFolder
from choicespec.records import Proposal
from choicespec.replay.drafted import DraftedFile
from choicespec.runtimes.hf import HfRuntime
from choicespec.spec.method import Draft
from choicespec.spec.pair import PairSpec
from choicespec.spec.runtime import HfRuntimeSpec
from choicespec.spec.task import TaskSpec
from choicespec.tasks.prompts import open_task

from jobs.terminal import ProgressLines


class RecordedTasks:
    """What is recorded of one pair.

    Args:
        folder: that the recordings lie in.
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
        folder: Path,
        runtime: HfRuntimeSpec,
        opened: HfRuntime,
        pair: PairSpec,
        layers: tuple[int, ...],
        batch_size: int,
        drafts: Sequence[Draft] = (),
        prompt_states: bool = False,
    ) -> None:
        self.opened, self.drafters = opened, tuple(method.drafter for method in drafts)
        self._folder, self._runtime, self._pair, self._layers = folder, runtime, pair, layers
        self._batch_size, self._drafts, self._prompt_states = batch_size, drafts, prompt_states

    def record(self, task: TaskSpec) -> None:
        """Record what is missing of a task, and of the drafts along it; within a Ray session."""
        folder = self.of(task)
        wanted = Wanted(self._pair, self._runtime, task, self._layers, folder, self._prompt_states)
        prompts = open_task(task).prompts(self.opened.tokenizer, self.opened.context_tokens)
        record(wanted, prompts, self.opened, self._batch_size, ProgressLines(), can_grow=on_cluster())
        files = {method: self._drafted_file(task, method) for method in self._drafts}
        draft(wanted, files, self._batch_size, ProgressLines())

    def of(self, task: TaskSpec) -> RecordingFolder:
        """Where a task's recording lies: another target, task or set of layers has another place."""
        parts = [self.opened.identity.model_dump_json(), task.model_dump_json(), str(self._layers)]
        name = digest(*parts, *(["prompt states"] if self._prompt_states else []))
        return RecordingFolder(self._folder / f"{task.kind}-{task.split}-{name}")

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
