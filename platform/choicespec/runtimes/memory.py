"""What a method holds in memory: of objects that share a process, and of a process of its own."""

import gc
import sys
from collections.abc import Iterable
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np

_CODE = (type, ModuleType, FunctionType, BuiltinFunctionType, CodeType)  # the program's, whatever it decodes


def held_bytes(roots: Iterable[object], apart: Iterable[object]) -> int:
    """The bytes of objects and of all that they refer to, each counted once: tensors, arrays and Python's own.

    Tensors that share their storage, and views of one array, are counted as one. A tensor on a GPU counts as any other.

    Args:
        roots: such as a target and a proposer.
        apart: not counted, and not looked into.
    """
    seen = {id(one) for one in apart}
    storages: set[int] = set()
    total, waiting = 0, list(roots)
    while waiting:
        one = waiting.pop()
        if id(one) in seen or isinstance(one, _CODE):
            continue
        seen.add(id(one))
        total += sys.getsizeof(one) + _storage_bytes(one, storages)
        waiting += gc.get_referents(one)
        if isinstance(one, np.ndarray | memoryview):  # the collector does not know what they are views of
            waiting.append(one.base if isinstance(one, np.ndarray) else one.obj)
    return total


def _storage_bytes(one: Any, storages: set[int]) -> int:
    """Of a tensor whose storage was not counted yet; no torch is imported for it."""
    if not hasattr(type(one), "untyped_storage"):
        return 0
    storage = one.untyped_storage()
    if storage.data_ptr() in storages:
        return 0
    storages.add(storage.data_ptr())
    return int(storage.nbytes())


def peak_resident_bytes(process_id: int) -> int:
    """The most memory that a process has had; pages of files that it maps are among it. Linux only."""
    lines = Path(f"/proc/{process_id}/status").read_text(encoding="utf-8").splitlines()
    [peak] = [line for line in lines if line.startswith("VmHWM:")]
    return 1024 * int(peak.split()[1])
