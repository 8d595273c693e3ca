"""Is the target now where it was at the place that a candidate is copied from?

A candidate that occurs in the request's own text began there after some tokens, as it would begin now. The hidden
states of those tokens are compared with the ones here, a pair a cosine: states that are alike tend to be followed
alike. The state of the anchor is not there before it has passed the target, so that each side begins a token earlier.

Shapes: T tokens of a text, M source layers, H numbers of a hidden state, S = M * H, the states of all source layers
side by side; P positions, N candidates, C cosines of a candidate, F features of it.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from choicespec.decoding.tap import Tap
from choicespec.recordings import Recorded

OFFSETS = (0, 1, 2, 4, 8)  # tokens before the last one that has a state; what precedes further back tells little more
_LEAST_DEVIATION = 1e-3
_LEAST_NORM = 1e-6
_BELOW_ANY = -2.0  # cosines are -1 or more
_OFFSETS_O = np.array(OFFSETS)

UnitsOf = Callable[[NDArray[np.int64]], NDArray[np.float32]]  # numbers of tokens (...,) to their states (..., M, H)

Cosines = Callable[[NDArray[np.int32]], NDArray[np.float32]]  # ages (N,) to cosines (N, C)


class StateScale(NamedTuple):
    """What states are standardised by, so that no few large numbers of theirs decide all cosines."""

    mean_S: NDArray[np.float32]
    deviation_S: NDArray[np.float32]


def num_source_features(num_layers: int) -> int:
    """F: every cosine, as it is and less the largest of the set, and whether the candidate has a source at all."""
    return 2 * num_layers * len(OFFSETS) + 1 if num_layers else 0


def scale_of(recorded: Iterable[Recorded], layers: Sequence[int]) -> StateScale:
    """The mean and the deviation over the tokens of some texts."""
    states_TS = np.concatenate([_of_text(one, layers) for one in recorded]).astype(np.float32)
    return StateScale(states_TS.mean(axis=0), states_TS.std(axis=0) + _LEAST_DEVIATION)


def source_features(cosines_PNC: NDArray[np.float32], ages_PN: NDArray[np.int32]) -> NDArray[np.float32]:
    """(P, N, F) of whole sets; 0 for a candidate without a source, which the largest of a set leaves out.

    Args:
        cosines_PNC: of ``cosines_at`` or ``cosines_along``.
        ages_PN: see ``SetArrays.own_ages``.
    """
    there_PN1 = (ages_PN > 0)[..., None]
    largest_P1C = np.where(there_PN1, cosines_PNC, _BELOW_ANY).max(axis=1, keepdims=True)
    less_PNC = np.where(there_PN1, cosines_PNC - largest_P1C, 0)
    return np.concatenate([cosines_PNC, there_PN1, less_PNC], axis=-1, dtype=np.float32)


def cosines_at(units_of: UnitsOf, ages_N: NDArray[np.int32], known: int) -> NDArray[np.float32]:
    """(N, C) cosines at one position, layer by layer; 0 without a source, and where a text does not reach so far back
    or a state is missing, which is not a number.

    Args:
        units_of: the states of the text's tokens, as ``_units`` makes them; the anchor's is not asked for.
        ages_N: tokens from where each candidate begins in the text to its end; 0 is nowhere.
        known: tokens of the text, the anchor included.
    """
    there = np.flatnonzero(ages_N)
    here_O = known - 2 - _OFFSETS_O
    source_NO = here_O - ages_N[there, None]
    units = units_of(np.concatenate([here_O[None], source_NO]).clip(min=0))
    own_OMH, other_NOMH = units[0], units[1:]
    cosines_NMO = np.einsum("nomh,omh->nmo", other_NOMH, own_OMH) * (source_NO >= 0)[:, None]
    found_NC = np.zeros((len(ages_N), own_OMH.shape[1] * len(OFFSETS)), np.float32)
    found_NC[there] = np.nan_to_num(cosines_NMO).reshape(len(there), found_NC.shape[1])
    return found_NC


def cosines_along(
    one: Recorded, ages_PN: NDArray[np.int32], layers: Sequence[int], scale: StateScale
) -> NDArray[np.float32]:
    """(P, N, C) cosines at every position of a recorded output at which a live loop could stand.

    Args:
        one: with the states of the source layers, the prompt's too.
        ages_PN: of the candidates there.
        layers: the source layers.
        scale: of the scorer.
    """
    units_TMH = _units(_of_text(one, layers), len(layers), scale)
    first = len(one.request.prompt_ids) + 1
    found_PNC = np.zeros((*ages_PN.shape, len(layers) * len(OFFSETS)), np.float32)
    for position, ages_N in enumerate(ages_PN):
        found_PNC[position] = cosines_at(units_TMH.__getitem__, ages_N, first + position)
    return found_PNC


class TextStates:
    """The states of one text's tokens, while it grows.

    All stay where and as the target computed them, for any may be asked for; few are at each step, and only these are
    made comparable.

    Args:
        num_layers: how many source layers there are.
        scale: of the scorer.
    """

    def __init__(self, num_layers: int, scale: StateScale) -> None:
        self._num_layers, self._scale = num_layers, scale
        self._states_TS = torch.empty(0, len(scale.mean_S))
        self._length = 0

    def put(self, first: int, states_TS: torch.Tensor) -> None:
        """Take in the states of the tokens from the ``first`` on; of tokens before that, some may never have come. What
        is there of later ones was of drafts that were rejected."""
        with torch.inference_mode():
            end = first + len(states_TS)
            if end > len(self._states_TS):
                grown_TS = states_TS.new_empty(2 * end, states_TS.shape[1])
                grown_TS[: self._length] = self._states_TS[: self._length]
                self._states_TS = grown_TS
            self._states_TS[self._length : first] = torch.nan
            self._states_TS[first:end] = states_TS
        self._length = end

    def cosines(self, ages_N: NDArray[np.int32], known: int) -> NDArray[np.float32]:
        """(N, C) see ``cosines_at``."""
        self.put(known - 1, self._states_TS[:0])
        return cosines_at(self._units_of, ages_N, known)

    def _units_of(self, tokens: NDArray[np.int64]) -> NDArray[np.float32]:
        with torch.inference_mode():
            states = self._states_TS[torch.from_numpy(tokens).to(self._states_TS.device)].float().cpu().numpy()
        return _units(states, self._num_layers, self._scale)


class TappedText:
    """The states of the text that a target decodes, a request after the other.

    Args:
        tap: of the source layers.
        num_layers, scale: see ``TextStates``.
    """

    def __init__(self, tap: Tap, num_layers: int, scale: StateScale) -> None:
        self._tap, self._states = tap, TextStates(num_layers, scale)
        self._end = self._text = 0

    def cosines(self, ages_N: NDArray[np.int32]) -> NDArray[np.float32]:
        """(N, C) where the target stands; steps at which nobody asked are caught up with."""
        if self._tap.texts != self._text:
            self._text, self._end = self._tap.texts, 0
        if self._tap.waiting:
            states_TS = self._tap.read()
            self._states.put(self._end, states_TS)
            self._end += len(states_TS)
        return self._states.cosines(ages_N, self._end + 1)


def _of_text(one: Recorded, layers: Sequence[int]) -> NDArray[np.float16]:
    """(T, S) of the tokens of prompt and output but the last."""
    texts = [np.concatenate([one.prompt_states[layer], one.hidden_states[layer]]) for layer in layers]
    return np.concatenate(texts, axis=1)


def _units(states: NDArray[np.floating], num_layers: int, scale: StateScale) -> NDArray[np.float32]:
    """(..., M, H) of (..., S) standardised, and of length 1 in each layer."""
    units = states.astype(np.float32)  # a copy, and the only one: a step makes tens of thousands of numbers comparable
    units -= scale.mean_S
    units /= scale.deviation_S
    units = units.reshape(*states.shape[:-1], num_layers, len(scale.mean_S) // num_layers)
    norms = np.sqrt(np.einsum("...h,...h->...", units, units))
    units /= norms[..., None] + _LEAST_NORM
    return units
