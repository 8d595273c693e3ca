"""What a measurement was made with: versions, device, threads, revision."""

import platform
import subprocess
from functools import cache
from importlib import metadata
from pathlib import Path

import choicespec
from choicespec.records import Environment
from choicespec.runtimes.runtime import Runtime
from choicespec.spec.experiment import TrialSpec

_PACKAGES = ("torch", "transformers", "ray", "numpy", "tokenizers")


def capture(runtime: Runtime, trial: TrialSpec) -> Environment:
    """Describe this process for a trial's measurement."""
    return Environment(
        choicespec=choicespec.__version__,
        git_revision=git_revision(),
        python=platform.python_version(),
        packages={name: version for name in _PACKAGES if (version := _version(name)) is not None},
        runtime_build=runtime.build,
        device=runtime.device,
        cpu=_cpu_name(),
        threads=trial.runtime.threads,
        dtype=runtime.precision,
        engine=runtime.engine_settings(trial.method),
    )


@cache
def git_revision() -> str:
    """The revision of the source, ``-dirty`` appended where it has been edited; ``unknown`` outside a checkout."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        found = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return found.stdout.strip()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


@cache
def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]}, {len(names)} cores" if names else platform.machine()
