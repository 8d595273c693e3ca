"""Recorded outputs as sequences that a drafter learns from, read a chunk at a time: no recording need fit into memory.

Shapes: N tokens of a prompt with its output, H hidden size.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from choicespec.recordings import Recorded, RecordingFolder, RecordingManifest

_LEAST = 1e-3  # of a deviation


class TokenSequence(NamedTuple):
    """A prompt with its output.

    Attributes:
        token_ids_N: both.
        prompt_tokens: those of the prompt; the token after them is the first that a live loop has for an anchor.
        states: for each layer (N - 1, H): its output at every token but the last.
    """

    token_ids_N: torch.Tensor
    prompt_tokens: int
    states: dict[int, torch.Tensor]

    @property
    def anchors(self) -> torch.Tensor:
        """The places at which a live loop may stand: all tokens of the output but the last."""
        return torch.arange(self.prompt_tokens, len(self.token_ids_N) - 1)


class Recordings:
    """Several recordings with the prompts' hidden states, as numbered chunks of sequences."""

    def __init__(self, folders: Sequence[RecordingFolder]) -> None:
        self._chunks: list[tuple[RecordingFolder, int, RecordingManifest]] = []
        for folder in folders:
            manifest = folder.manifest()
            self._chunks += [(folder, index, manifest) for index in range(len(manifest.chunks))]

    def __len__(self) -> int:
        return len(self._chunks)

    def __getitem__(self, number: int) -> list[TokenSequence]:
        folder, index, manifest = self._chunks[number]
        return [_sequence(one) for one in folder.read_chunk(index, manifest)]

    def __iter__(self) -> Iterator[list[TokenSequence]]:
        return (self[number] for number in range(len(self)))

    def texts(self) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
        """Each prompt and its output, read without the states."""
        for folder, index, manifest in self._chunks:
            for one in folder.read_chunk(index, manifest.model_copy(update={"layers": ()})):
                yield one.request.prompt_ids, one.output_ids

    @property
    def num_sequences(self) -> int:
        """Of all chunks."""
        return sum(len(manifest.chunks[index]) for _, index, manifest in self._chunks)


def _sequence(recorded: Recorded) -> TokenSequence:
    prompt_ids = recorded.request.prompt_ids
    states = {
        layer: torch.from_numpy(np.concatenate([recorded.prompt_states[layer], of_output]).astype(np.float32))
        for layer, of_output in recorded.hidden_states.items()
    }
    return TokenSequence(torch.tensor((*prompt_ids, *recorded.output_ids)), len(prompt_ids), states)


def deviation(recordings: Recordings, layers: Sequence[int]) -> torch.Tensor:
    """The (F,) standard deviation of each number of some layers' states side by side, in the first chunk."""
    sequences = recordings[0]
    return torch.cat([torch.cat([one.states[layer] for one in sequences]).std(dim=0) for layer in layers]) + _LEAST


def most_frequent(recordings: Recordings, vocab_size: int, size: int) -> torch.Tensor:
    """The (size,) ids, ascending, that outputs have most often; then prompts, which outputs copy from."""
    in_outputs, in_prompts = np.zeros(vocab_size), np.zeros(vocab_size)
    for prompt_ids, output_ids in recordings.texts():
        in_outputs += np.bincount(output_ids, minlength=vocab_size)
        in_prompts += np.bincount(prompt_ids, minlength=vocab_size)
    order = np.lexsort((-in_prompts, -in_outputs))[:size]
    return torch.from_numpy(np.sort(order))
