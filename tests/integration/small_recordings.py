"""Recordings of few requests, made on the spot."""

from choicespec.recordings import RecordingManifest, pack
from choicespec.replay.recorded import RecordedPair
from choicespec.spec.task import TaskSpec
from choicespec.tasks.prompts import Prompts, open_task


def record_whole(pair: RecordedPair, task: TaskSpec) -> Prompts:
    """The task's prompts, once all that a replay of the pair reads is recorded of them, as one chunk."""
    prompts = open_task(task).prompts(pair.opened.tokenizer, pair.opened.context_tokens)
    ids = tuple(request.request_id for request in prompts.requests)
    recording = pair.recording(task)
    recording.begin(
        RecordingManifest(
            target=pair.opened.identity,
            task=task,
            layers=pair.layers,
            prompt_states=pair.prompt_states,
            chunks=(ids,),
            request_ids=ids,
        )
    )
    recording.add(0, pack(pair.opened.record(prompts.requests, pair.layers, pair.prompt_states)))
    return prompts
