"""What the header of a GGUF file says. The package ``gguf`` takes seconds over a large vocabulary; this does not."""

import mmap
import struct
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from gguf import GGUFValueType, LlamaFileType

from choicespec.errors import CheckpointError

_OLDEST_VERSION = 2  # the first with 64-bit counts
_NUMBERS = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT64: "d",
}


class GgufHeader(NamedTuple):
    """Metadata and the tensors' shapes.

    Attributes:
        path: the file.
        metadata: values by key; strings as bytes, arrays as tuples.
        shapes: of each tensor by name, in GGUF's order: the fastest dimension first.
    """

    path: Path
    metadata: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]

    @property
    def architecture(self) -> str:
        """The model family, by llama.cpp's name."""
        return self.text("general.architecture")

    @property
    def file_type(self) -> str:
        """What most of the weights are stored as, such as ``Q4_1``; ``unknown`` where the file does not say."""
        number = self.metadata.get("general.file_type")
        if number not in set(LlamaFileType):
            return "unknown"
        return LlamaFileType(number).name.removeprefix("MOSTLY_").removeprefix("ALL_")

    @property
    def context_tokens(self) -> int:
        """The context that the model was trained for."""
        return self.number("context_length")

    @property
    def hidden_size(self) -> int:
        """Numbers of a hidden state."""
        return self.number("embedding_length")

    @property
    def nextn_layers(self) -> int:
        """Layers that predict further tokens (MTP); ``num_layers`` leaves them out."""
        return int(self.metadata.get(f"{self.architecture}.nextn_predict_layers", 0))

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return self.number("block_count") - self.nextn_layers

    @property
    def vocabulary(self) -> tuple[bytes, ...]:
        """The tokens, by id.

        Raises:
            CheckpointError: the file has none.
        """
        tokens: tuple[bytes, ...] = self._known("tokenizer.ggml.tokens")
        return tokens

    def number(self, name: str) -> int:
        """A count that the architecture needs.

        Raises:
            CheckpointError: the header lacks it.
        """
        return int(self._known(f"{self.architecture}.{name}"))

    def text(self, key: str) -> str:
        """A string.

        Raises:
            CheckpointError: the header lacks it.
        """
        found: bytes = self._known(key)
        return found.decode(errors="replace")

    def _known(self, key: str) -> Any:
        if key not in self.metadata:
            raise CheckpointError(f"{self.path}: its header has no {key}; give a whole GGUF of a language model")
        return self.metadata[key]


def read_header(path: Path) -> GgufHeader:
    """Read a file's header.

    Raises:
        CheckpointError: the file is missing, or no GGUF.
    """
    try:
        stat = path.stat()
        return _read_unchanged(path, stat.st_mtime_ns, stat.st_size)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}; give the path of a .gguf file") from None
    except (ValueError, struct.error):
        raise CheckpointError(
            f"{path} is not a GGUF file of version {_OLDEST_VERSION} or later, or is cut off"
        ) from None


@lru_cache(maxsize=32)
def _read_unchanged(path: Path, modified_ns: int, size: int) -> GgufHeader:
    del modified_ns, size  # they are there for the cache: a file that has changed is read again
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        cursor = _Cursor(content)
        magic, version, num_tensors, num_keys = cursor.take("4sIQQ")
        if magic != b"GGUF" or not _OLDEST_VERSION <= version < 1 << 16:  # beyond: the other byte order
            raise ValueError("no GGUF")
        metadata = {}
        for _ in range(num_keys):
            key = cursor.string().decode()
            metadata[key] = cursor.value(*cursor.take("I"))
        shapes = {}
        for _ in range(num_tensors):
            name = cursor.string().decode()
            (dimensions,) = cursor.take("I")
            shapes[name] = cursor.take(f"{dimensions}Q")
            cursor.take("IQ")  # type and place
    return GgufHeader(path, metadata, shapes)


class _Cursor:
    """Reads little-endian values one after the other."""

    def __init__(self, content: mmap.mmap) -> None:
        self._content, self._position = content, 0

    def take(self, layout: str) -> tuple[Any, ...]:
        found = struct.unpack_from(f"<{layout}", self._content, self._position)
        self._position += struct.calcsize(f"<{layout}")
        return found

    def string(self) -> bytes:
        (length,) = self.take("Q")
        start = self._position
        self._position += length
        return self._content[start : self._position]

    def value(self, kind: int) -> Any:
        if kind == GGUFValueType.STRING:
            return self.string()
        if kind != GGUFValueType.ARRAY:
            return self.take(_NUMBERS[GGUFValueType(kind)])[0]
        item, length = self.take("IQ")
        if item in _NUMBERS:
            return self.take(f"{length}{_NUMBERS[item]}")
        return tuple(self.value(item) for _ in range(length))
