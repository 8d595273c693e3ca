"""The folder ``platform`` shares its name with a module of the standard library."""

import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_platform_is_no_package() -> None:
    """Fails if somebody adds the file that would let the folder hide the standard library's module."""
    assert not (ROOT / "platform" / "__init__.py").exists()


def test_the_standard_librarys_platform_is_imported() -> None:
    """Fails if, in a process that starts in the checkout, ``import platform`` finds the folder."""
    command = [sys.executable, "-c", "import platform; print(platform.__file__)"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert Path(found.stdout.strip()) == Path(sysconfig.get_paths()["stdlib"], "platform.py")
