"""Recorded tasks as datasets for a scorer: built once, then read by layer and by split."""

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, cached_property
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from choicespec.recordings import Recorded
from choicespec.scorer.examples import Examples, SetArrays, with_drafts_of, with_sources
from choicespec.scorer.fit import Dataset, joined
from choicespec.scorer.source_states import StateScale, cosines_along, num_source_features, source_features

SplitBy = Literal["prompt", "function"]


class RecordedTask(NamedTuple):
    """A task's recorded requests and the examples made of them, with the drafts of these drafters."""

    recorded: Sequence[Recorded]
    examples: Examples
    drafters: tuple[str, ...] = ()

    def dataset(self, layers: Sequence[int], drafters: Sequence[str] = (), sources: bool = False) -> Dataset:
        """The examples with the drafts of some drafters, perhaps with the features of their sources, and the hidden
        states of some layers side by side."""
        states = [np.concatenate([one.hidden_states[layer] for one in self.recorded]) for layer in layers]
        examples = with_drafts_of(self.examples, self.drafters, drafters, sources)
        return Dataset(examples, np.concatenate(states, axis=1))


class Corpus:
    """What a scorer is fitted to, and what it is judged by.

    Args:
        train: by task.
        test: by task; no prompt of it is in ``train``.
        scale: what all their features of sources were made with; None where there are none.
    """

    def __init__(
        self, train: Mapping[str, RecordedTask], test: Mapping[str, RecordedTask], scale: StateScale | None = None
    ) -> None:
        self._train, self.test, self.scale = train, test, scale

    @cached_property
    def _held_out_functions(self) -> frozenset[str]:
        """Of all tasks: what one task is fitted to must not be what another is judged by."""
        return frozenset().union(*(functions(task.recorded) for task in self.test.values()))

    def training_set(
        self, layers: Sequence[int], split_by: SplitBy, drafters: Sequence[str] = (), sources: bool = False
    ) -> Dataset:
        """All tasks' train prompts, with the drafts of some drafters; see ``RecordedTask.dataset``.

        With the split by function, prompts are left out on which a function of a held-out prompt is on offer: BFCL
        repeats functions over prompts.
        """
        datasets = []
        for task in self._train.values():
            examples, hidden_RH = task.dataset(layers, drafters, sources)
            if split_by == "function":
                kept = [not functions([one]) & self._held_out_functions for one in task.recorded]
                examples = positions_of(examples, np.array(kept)[examples.requests])
            datasets.append(Dataset(examples, hidden_RH))
        return joined(datasets)

    def train_prompts(self, split_by: SplitBy) -> dict[str, int]:
        """How many train prompts of each task are used."""
        counts = {}
        for name, task in self._train.items():
            known = self._held_out_functions if split_by == "function" else frozenset()
            counts[name] = sum(not functions([one]) & known for one in task.recorded)
        return counts


def compared_with_sources(
    examples: Examples,
    requests: Sequence[str],
    recorded: Iterable[Recorded],
    layers: Sequence[int],
    scale: StateScale,
) -> Examples:
    """Examples with the features of their candidates' sources.

    Args:
        examples: of recorded outputs.
        requests: the ids of the recorded requests, in the examples' order.
        recorded: the same in any order, with the states of the source layers, the prompts' too; one is held at a time.
        layers: the source layers.
        scale: of the scorer.
    """
    ages_PN = examples.sets.own_ages
    number_of = {request_id: number for number, request_id in enumerate(requests)}
    sources_PNF = np.zeros((*ages_PN.shape, num_source_features(len(layers))), np.float32)
    for one in recorded:
        own = examples.requests == number_of[one.request.request_id]
        sources_PNF[own] = source_features(cosines_along(one, ages_PN[own], layers, scale), ages_PN[own])
    return with_sources(examples, sources_PNF)


def functions(recorded: Sequence[Recorded]) -> frozenset[str]:
    """The names of the functions on offer."""
    return frozenset(_name(tool) for one in recorded for tool in one.request.tools)


def positions_of(examples: Examples, chosen_P: NDArray[np.bool_]) -> Examples:
    """Some positions."""
    return Examples(
        SetArrays._make(array[chosen_P] for array in examples.sets),
        examples.accepted[chosen_P],
        examples.anchors[chosen_P],
        examples.rows[chosen_P],
        examples.requests[chosen_P],
    )


@cache
def _name(tool: str) -> str:
    function = json.loads(tool)
    return str(function.get("function", function)["name"])
