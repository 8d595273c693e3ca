"""A job submitted to a cluster: the snapshot of the checkout runs, not what the nodes have installed."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from time import monotonic

import pytest
import requests
from choicespec.cluster.connect import ADDRESS_VARIABLE
from choicespec.tracking.connection import URI_VARIABLE
from integration.processes import DEADLINE_S, await_from, free_port

from jobs.terminal import HOME_VARIABLE

ROOT = Path(__file__).parents[2]
RAY = Path(sys.executable).with_name("ray")
_MOST_SNAPSHOT_BYTES = 30_000_000  # of which 18 million are the drafters that ship
_FOREIGN = (ADDRESS_VARIABLE, URI_VARIABLE)  # a cluster or a server of the caller's
_ENVIRONMENT = {k: v for k, v in os.environ.items() if k not in _FOREIGN} | {"RAY_AUTH_MODE": "disabled"}
_LOOK = """
import jobs, choicespec, json, os, pathlib, platform
size = sum(file.stat().st_size for file in pathlib.Path().rglob("*") if file.is_file())
print("seen:" + json.dumps([platform.__file__, choicespec.__file__, os.getcwd(), size]))
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the job's results and its MLflow database lie."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def head(home: Path) -> Iterator[str]:
    """The address of a cluster of one node, started by ``ray start`` and ended by its own id."""
    folder = tempfile.mkdtemp(prefix="ray-")  # short, because sockets lie in it
    address = f"http://127.0.0.1:{free_port()}"
    command = [str(RAY), "start", "--head", "--block", "--port=0", "--num-cpus=2", "--node-ip-address=127.0.0.1"]
    command += ["--dashboard-host=127.0.0.1", f"--dashboard-port={address.rsplit(':', 1)[1]}"]
    command += [f"--dashboard-agent-listen-port={free_port()}", f"--ray-client-server-port={free_port()}"]
    command += [f"--temp-dir={folder}", "--disable-usage-stats"]
    path = f"{RAY.parent}:{os.environ['PATH']}"  # where an entrypoint's `python` is found
    environment = _ENVIRONMENT | {"PATH": path, HOME_VARIABLE: str(home)}
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        await_from(process, lambda: _answers(address))
        yield address
    finally:
        process.terminate()
        process.wait(DEADLINE_S)
        shutil.rmtree(folder, ignore_errors=True)


def _answers(address: str) -> bool:
    try:
        return requests.get(f"{address}/api/version", timeout=5).ok
    except requests.ConnectionError:
        return False


def _submit(address: str, *entrypoint: str) -> str:
    """The output of a job; it is submitted again for as long as the cluster is still starting."""
    command = [str(RAY), "job", "submit", "--address", address, "--working-dir", ".", "--", *entrypoint]
    deadline = monotonic() + DEADLINE_S
    while True:
        found = subprocess.run(command, cwd=ROOT, env=_ENVIRONMENT, capture_output=True, text=True, timeout=DEADLINE_S)
        if found.returncode == 0:
            return found.stdout
        output = found.stdout + found.stderr
        assert "No available agent" in output, output
        assert monotonic() < deadline, output


def test_the_snapshot_runs(head: str, home: Path) -> None:
    """Fails if a job runs the code that the nodes have installed, finds the folder ``platform`` for the module, takes a
    virtual environment along, or loses its results with the snapshot."""
    output = _submit(head, "bash", "-c", f"python -c {shlex.quote(_LOOK)} && python -m jobs.bench scripted")
    seen = re.search(r"^seen:(.*)$", output, re.MULTILINE)
    assert seen is not None, output
    module, package, snapshot, content_bytes = json.loads(seen[1])
    assert Path(module) == Path(sysconfig.get_paths()["stdlib"], "platform.py")
    assert snapshot != str(ROOT)
    assert Path(package).is_relative_to(snapshot)
    assert content_bytes < _MOST_SNAPSHOT_BYTES
    assert "speed-up" in output
    assert "ngram k=8" in output
    assert len(list((home / "results" / "scripted").glob("*/measurement.json"))) == 2
    assert (home / "mlflow.db").is_file()
