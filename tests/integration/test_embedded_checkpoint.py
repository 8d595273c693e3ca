"""The embedded default's conversion: once, and never half."""

from pathlib import Path

import pytest
from choicespec.runtimes import checkpoints


def test_a_crash_midway_leaves_nothing_half_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of the final name is taken for whole by every later run, so it must not appear before it is."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    convert = checkpoints._convert

    def crash(gguf: Path, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoints, "_convert", crash)
    with pytest.raises(KeyboardInterrupt):
        checkpoints.locate("smollm2", None)
    assert list((tmp_path / "choicespec").iterdir()) == []

    monkeypatch.setattr(checkpoints, "_convert", convert)
    folder = Path(checkpoints.locate("smollm2", None))
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {file.name for file in folder.iterdir()}
    modified = (folder / "model.safetensors").stat().st_mtime_ns
    assert checkpoints.locate("smollm2", None) == str(folder)
    assert (folder / "model.safetensors").stat().st_mtime_ns == modified
