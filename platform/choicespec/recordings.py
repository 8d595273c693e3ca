"""Recordings: what the target says to each prompt of a task, and its hidden states while it says it.

A recording is a folder: a manifest, and chunks of some requests each as safetensors. A token of output takes hidden
size x layers x 2 bytes, and 8 beside; a token of a prompt as much, where prompts' states are kept.

Shapes: T output tokens of a request, P tokens of its prompt, H hidden size.
"""

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from choicespec.errors import RecordingError
from choicespec.records import FinishReason, Request, TargetIdentity
from choicespec.spec.frozen import Frozen
from choicespec.spec.task import TaskSpec

_LARGEST = float(np.finfo(np.float16).max)


class Recorded(NamedTuple):
    """A request with the target's greedy output.

    Attributes:
        output_ids: T tokens.
        margins: (T,) the target's largest logit minus its second largest where it chose each of them.
        hidden_states: for each recorded layer (T, H): its output at the token that was followed by each of them. So row
            t - 1 is what a live loop has at hand when it proposes what comes after the first t tokens.
        prompt_states: for each recorded layer (P - 1, H): its output at the prompt's tokens but the last; empty where
            they were not wanted.
    """

    request: Request
    output_ids: tuple[int, ...]
    finish_reason: FinishReason
    margins: NDArray[np.float32]
    hidden_states: dict[int, NDArray[np.float16]]
    prompt_states: dict[int, NDArray[np.float16]] = {}  # noqa: RUF012  (never written to)


class RecordingManifest(Frozen):
    """What a recording is of. Two recordings with equal manifests hold the same.

    Attributes:
        layers: the decoder layers whose hidden states are kept, counted from 1.
        prompt_states: whether those of the prompts are kept too.
        chunks: the request ids of each chunk.
        request_ids: all of them, in the task's order.
    """

    format: int = 1
    target: TargetIdentity
    task: TaskSpec
    layers: tuple[int, ...]
    prompt_states: bool = False
    chunks: tuple[tuple[str, ...], ...]
    request_ids: tuple[str, ...]


class RecordingFolder:
    """A recording on disk; a chunk is there as a whole or not at all."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def begin(self, manifest: RecordingManifest) -> list[int]:
        """Start a recording, or go on with it; returns the chunks that are missing.

        Raises:
            RecordingError: the folder holds another recording.
        """
        if self.begun:
            if self.manifest() != manifest:
                raise RecordingError(f"{self.path} holds a recording of something else; move it away")
        elif any(self.path.glob("chunk-*.safetensors")):
            raise RecordingError(f"{self.path} holds chunks without a manifest that says of what; move it away")
        else:
            self.path.mkdir(parents=True, exist_ok=True)
            _write(self.path / "manifest.json", manifest.model_dump_json(indent=1).encode())
        return [index for index in range(len(manifest.chunks)) if not self._chunk(index).exists()]

    def add(self, index: int, chunk: bytes) -> None:
        """Keep a chunk, as ``pack`` made it."""
        _write(self._chunk(index), chunk)

    @property
    def begun(self) -> bool:
        """Whether there is a manifest."""
        return (self.path / "manifest.json").exists()

    def manifest(self) -> RecordingManifest:
        """What the recording is of.

        Raises:
            RecordingError: there is none, or it cannot be read.
        """
        path = self.path / "manifest.json"
        try:
            return RecordingManifest.model_validate_json(path.read_bytes())
        except OSError as error:
            raise RecordingError(f"no recording in {self.path}: {error.strerror}; record it first") from None
        except ValidationError as error:
            raise RecordingError(f"{path} is not a recording's manifest of this version: {error}") from None

    def read(self, layers: Sequence[int] | None = None) -> list[Recorded]:
        """Every request, in the task's order.

        Args:
            layers: those whose states are read, at the outputs alone; None reads all that is kept.

        Raises:
            RecordingError: a chunk is missing or broken.
        """
        manifest = self.manifest()
        if layers is not None:
            manifest = manifest.model_copy(update={"layers": tuple(layers), "prompt_states": False})
        recorded = {one.request.request_id: one for one in self._each(manifest)}
        return [recorded[request_id] for request_id in manifest.request_ids]

    def walk(self, layers: Sequence[int]) -> Iterator[Recorded]:
        """Every request as the chunks hold them, of which one is in memory at a time, with the states of some layers at
        prompt and output.

        Raises:
            RecordingError: a chunk is missing or broken, or the prompts' states were not recorded.
        """
        return self._each(self.manifest().model_copy(update={"layers": tuple(layers), "prompt_states": True}))

    def _each(self, manifest: RecordingManifest) -> Iterator[Recorded]:
        for index in range(len(manifest.chunks)):
            yield from self.read_chunk(index, manifest)

    def read_chunk(self, index: int, manifest: RecordingManifest) -> list[Recorded]:
        """The requests of one chunk.

        Raises:
            RecordingError: it is missing or broken, or another recording's.
        """
        chunk = unpack(self._chunk(index), manifest.layers, manifest.prompt_states)
        if {one.request.request_id for one in chunk} != set(manifest.chunks[index]):
            raise _broken(self._chunk(index), "the manifest names other requests")
        return chunk

    def _chunk(self, index: int) -> Path:
        return self.path / f"chunk-{index:05}.safetensors"


def pack(recorded: Sequence[Recorded]) -> bytes:
    """Requests as one safetensors file."""
    tensors: dict[str, NDArray[np.generic]] = {
        "prompt_ids": np.concatenate([np.array(one.request.prompt_ids, np.int32) for one in recorded]),
        "output_ids": np.concatenate([np.array(one.output_ids, np.int32) for one in recorded]),
        "margins": np.concatenate([one.margins for one in recorded]),
    }
    for layer in recorded[0].hidden_states:
        tensors[f"hidden.{layer}"] = np.concatenate([one.hidden_states[layer] for one in recorded])
    for layer in recorded[0].prompt_states:
        tensors[f"prompt_states.{layer}"] = np.concatenate([one.prompt_states[layer] for one in recorded])
    rows = [
        {
            **one.request._asdict(),
            "prompt_ids": len(one.request.prompt_ids),
            "output_ids": len(one.output_ids),
            "finish_reason": one.finish_reason,
        }
        for one in recorded
    ]
    return save(tensors, metadata={"requests": json.dumps(rows)})


def unpack(path: Path, layers: Sequence[int], prompt_states: bool = False) -> list[Recorded]:
    """The requests of a file that ``pack`` made.

    Raises:
        RecordingError: the file is missing or broken.
    """
    try:
        with safe_open(path, framework="numpy") as file:
            rows = json.loads(file.metadata()["requests"])
            prompts, outputs, margins = (file.get_tensor(name) for name in ("prompt_ids", "output_ids", "margins"))
            hidden = {layer: file.get_tensor(f"hidden.{layer}") for layer in layers}
            of_prompts = {layer: file.get_tensor(f"prompt_states.{layer}") for layer in layers if prompt_states}
        return _requests(rows, prompts, outputs, margins, hidden, of_prompts)
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise _broken(path, str(error)) from None


def _broken(path: Path, why: str) -> RecordingError:
    return RecordingError(f"{path}: a missing or broken chunk ({why}); delete it and record again")


def _requests(
    rows: list[dict[str, Any]],
    prompts: NDArray[np.int32],
    outputs: NDArray[np.int32],
    margins: NDArray[np.float32],
    hidden: dict[int, NDArray[np.float16]],
    of_prompts: dict[int, NDArray[np.float16]],
) -> list[Recorded]:
    """What ``pack`` laid end to end, request by request."""
    found = []
    prompt_at = output_at = 0
    for index, row in enumerate(rows):
        prompt = slice(prompt_at, prompt_at := prompt_at + row["prompt_ids"])
        output = slice(output_at, output_at := output_at + row.pop("output_ids"))
        finish_reason = row.pop("finish_reason")
        listed = {name: tuple(row[name]) for name in ("stop", "tools")}
        found.append(
            Recorded(
                Request(**{**row, **listed, "prompt_ids": tuple(prompts[prompt].tolist())}),
                tuple(outputs[output].tolist()),
                finish_reason,
                margins[output],
                {layer: states[output] for layer, states in hidden.items()},
                {layer: states[prompt.start - index : prompt.stop - index - 1] for layer, states in of_prompts.items()},
            )
        )
    return found


def as_stored(hidden_states: NDArray[np.float32]) -> NDArray[np.float16]:
    """Hidden states as a recording keeps them; what exceeds float16 becomes its largest number."""
    return hidden_states.clip(-_LARGEST, _LARGEST).astype(np.float16)


def _write(path: Path, content: bytes) -> None:
    partial = path.with_suffix(".partial")
    partial.write_bytes(content)
    os.replace(partial, path)
