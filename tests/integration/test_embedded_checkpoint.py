"""The embedded default's conversion: once, and never half."""

from pathlib import Path

import pytest
from choicespec.runtimes import checkpoints


def test_a_crash_midway_leaves_nothing_half_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of the final name is taken for whole by every later run, so it must not appear before it is.

    What a conversion writes is what all tests of the embedded default run on; here it is a few bytes.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def crash(gguf: Path, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoints, "_convert", crash)
    with pytest.raises(KeyboardInterrupt):
        checkpoints.locate("smollm2", None)
    assert list((tmp_path / "choicespec").iterdir()) == []

    def convert(gguf: Path, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(gguf.read_bytes()[:4])

    monkeypatch.setattr(checkpoints, "_convert", convert)
    folder = Path(checkpoints.locate("smollm2", None))
    assert (folder / "model.safetensors").read_bytes() == b"GGUF"
    modified = (folder / "model.safetensors").stat().st_mtime_ns
    assert checkpoints.locate("smollm2", None) == str(folder)
    assert (folder / "model.safetensors").stat().st_mtime_ns == modified
