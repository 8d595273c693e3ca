"""What a neural drafter drafts at every position of recorded outputs, kept beside the recording.

Shapes: P positions, K tokens of the longest draft.
"""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

import choicespec
from choicespec.errors import RecordingError
from choicespec.recordings import RecordingManifest
from choicespec.records import Proposal
from choicespec.spec.pair import DrafterSpec

_NO_TOKEN = -1


class Drafted(NamedTuple):
    """One drafter's longest drafts; a shorter one is the beginning of the longest.

    Attributes:
        token_ids: (P, K) padded.
        probabilities: (P, K) the drafter's own, of each token given those before; NaN where it has none.
    """

    token_ids: NDArray[np.int32]
    probabilities: NDArray[np.float64]

    def proposals(self, source: str) -> list[Proposal]:
        """The longest draft of each position."""
        ids, probabilities = self.token_ids.tolist(), self.probabilities.tolist()
        sure = not np.isnan(self.probabilities[self.token_ids != _NO_TOKEN]).any()
        return [
            Proposal(tuple(tokens[:count]), source, tuple(own[:count]) if sure else ())
            for tokens, own, count in zip(ids, probabilities, self.lengths.tolist(), strict=True)
        ]

    def accepted(self, following_PK: NDArray[np.int32]) -> NDArray[np.int16]:
        """(P,) tokens of each draft that the target goes on to say."""
        longest = min(self.token_ids.shape[1], following_PK.shape[1])
        drafted_PK = self.token_ids[:, :longest]
        right_PK = (drafted_PK != _NO_TOKEN) & (drafted_PK == following_PK[:, :longest])
        found: NDArray[np.int16] = right_PK.cumprod(axis=1).sum(axis=1).astype(np.int16)
        return found

    @property
    def longest(self) -> int:
        """K, what the drafter was asked for."""
        return int(self.token_ids.shape[1])

    @property
    def lengths(self) -> NDArray[np.int16]:
        """(P,) tokens of each draft."""
        found: NDArray[np.int16] = (self.token_ids != _NO_TOKEN).sum(axis=1).astype(np.int16)
        return found


def shortened(draft: Proposal, limit: int) -> Proposal:
    """The draft of the same drafter where it is asked for fewer tokens."""
    return draft._replace(token_ids=draft.token_ids[:limit], probabilities=draft.probabilities[:limit])


def drafted_of(drafts: Iterable[Proposal], longest: int) -> Drafted:
    """Drafts of at most ``longest`` tokens, request after request, position after position."""
    rows = list(drafts)
    found = Drafted(np.full((len(rows), longest), _NO_TOKEN, np.int32), np.full((len(rows), longest), np.nan))
    for row, one in enumerate(rows):
        found.token_ids[row, : len(one.token_ids)] = one.token_ids
        found.probabilities[row, : len(one.probabilities)] = one.probabilities
    return found


class DraftedFile:
    """Where one drafter's drafts along one recording are kept.

    Args:
        folder: of the recording.
        manifest: of the recording.
        drafter: as the pair has it; one that was trained anew is another.
        longest: K.
    """

    def __init__(self, folder: Path, manifest: RecordingManifest, drafter: DrafterSpec, longest: int) -> None:
        parts = (choicespec.__version__, manifest.model_dump_json(), drafter.model_dump_json(), longest)
        self._of = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
        self.path = folder / f"drafts-{drafter.kind}-{self._of[:12]}.safetensors"

    def save(self, drafted: Drafted) -> None:
        """Keep them."""
        self._write(self.path, drafted)

    def load(self) -> Drafted | None:
        """What was kept; None where nothing was, or not all."""
        return self._read(self.path)

    def save_chunk(self, index: int, drafted: Drafted) -> None:
        """Keep a part of them."""
        self._write(self._chunk(index), drafted)

    def load_chunk(self, index: int) -> Drafted | None:
        """A part that was kept; None where it was not."""
        return self._read(self._chunk(index))

    def join_chunks(self, count: int) -> None:
        """Make one file of all parts.

        Raises:
            RecordingError: one of them is gone.
        """
        chunks = [chunk for chunk in map(self.load_chunk, range(count)) if chunk is not None]
        if len(chunks) < count:
            raise RecordingError(f"{self.path}: {count - len(chunks)} of {count} chunks are gone; record again")
        self.save(Drafted._make(map(np.concatenate, zip(*chunks, strict=True))))
        for index in range(count):
            self._chunk(index).unlink()

    def _chunk(self, index: int) -> Path:
        return self.path.with_suffix(f".chunk-{index:05}")

    def _write(self, path: Path, drafted: Drafted) -> None:
        partial = path.with_suffix(".partial")
        save_file(drafted._asdict(), partial, metadata={"of": self._of})
        partial.replace(path)

    def _read(self, path: Path) -> Drafted | None:
        try:
            with safe_open(path, framework="numpy") as file:
                if file.metadata().get("of") != self._of:
                    return None
                return Drafted(**{name: file.get_tensor(name) for name in Drafted._fields})
        except (OSError, SafetensorError):
            return None
