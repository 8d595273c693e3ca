"""Completions of real Python files, cut inside function bodies."""

import ast
import hashlib
import json
import os
import random
import re
import sysconfig
import warnings
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from choicespec.errors import TaskDataError
from choicespec.records import Document, Request
from choicespec.spec.task import PythonRepo
from choicespec.tasks.context import Window
from choicespec.tasks.prompts import Prompts, gather, take_split
from choicespec.tasks.tokenizer import Tokenizer

LEAST_BODY_LINES = 4  # a shorter body leaves nothing to complete
MOST_CHARS_PER_TOKEN = 8  # real code has 3 to 4; more than this is never gathered around a cut
_SAMPLE_CHARS = 4000

_NEVER = {"__pycache__", "site-packages", "dist-packages", "node_modules"}
_NOT_STDLIB = {"test", "tests", "idlelib", "idle_test", "lib2to3", "turtledemo", "pydoc_data", "_bundled"}


class _Source(NamedTuple):
    """A Python file that parses.

    Attributes:
        path: relative to the repository, with slashes.
        bodies: first and last line (1-based) of each function's statements, its docstring left out.
    """

    path: str
    lines: tuple[str, ...]
    bodies: tuple[tuple[int, int], ...]


class _Cut(NamedTuple):
    """A place inside a function body.

    Attributes:
        line: 1-based, of the cut.
        before: the lines before that line.
        opening: that line's text before the cut.
        completion: the rest of the body.
    """

    line: int
    before: tuple[str, ...]
    opening: str
    completion: str


class _Line(NamedTuple):
    """A line of surrounding material, and the file it comes from."""

    text: str
    path: str


class PythonRepoTask:
    """Real Python files as prompts, fitted with their own text and with other files of their split."""

    def __init__(self, spec: PythonRepo) -> None:
        self._spec = spec
        self._root = Path(spec.folder or sysconfig.get_paths()["stdlib"]).expanduser()
        self._parsed: dict[Path, _Source | None] = {}

    def check(self) -> None:
        """Looks for one function to complete. See ``Task.check``."""
        if not any(source.bodies for source in self._sources(self._files)):
            raise TaskDataError(
                f"task.folder {self._root}: no file of split {self._spec.split!r} parses and has a function body of "
                f"{LEAST_BODY_LINES} lines; name a folder with more Python in it, or another split"
            )

    def prompts(self, tokenizer: Tokenizer, context_limit_tokens: int) -> Prompts:
        """See ``Task.prompts``."""
        window = Window(self._spec, context_limit_tokens)
        attempts = (self._attempt(source, body, tokenizer, window) for source, body in self._bodies())
        return gather(attempts, self._spec)._replace(repository=self._documents)

    def _documents(self) -> Iterator[Document]:
        """The split's files: what the other split holds stays unseen."""
        return (Document(source.path, "".join(source.lines)) for source in self._sources(self._files))

    def _bodies(self) -> Iterator[tuple[_Source, tuple[int, int]]]:
        """A function of each file; then, round by round, a further one of each file that has more."""
        waiting: list[tuple[_Source, list[tuple[int, int]]]] = []
        for source in self._sources(self._files):
            bodies = list(source.bodies)
            self._random(source.path).shuffle(bodies)
            if bodies:
                yield source, bodies.pop()
                waiting.append((source, bodies))
        while waiting := [(source, bodies) for source, bodies in waiting if bodies]:
            for source, bodies in waiting:
                yield source, bodies.pop()

    def _attempt(self, source: _Source, body: tuple[int, int], tokenizer: Tokenizer, window: Window) -> Request | str:
        cut = _cut(source, body, self._random(source.path, *body))
        request_id = f"{source.path}:{cut.line}"
        own = "".join(cut.before) + cut.opening
        surroundings: list[_Line] = []
        sizes: list[float] = []
        if window.fills:
            surroundings = list(self._surroundings(source, cut, window.most_tokens * MOST_CHARS_PER_TOKEN))
            sample = own[-_SAMPLE_CHARS:]
            tokens_per_char = len(tokenizer.encode(sample)) / len(sample)
            sizes = list(accumulate(len(line.text) * tokens_per_char for line in surroundings))

        def select(budget: int) -> list[_Line]:
            return surroundings[: bisect_right(sizes, budget)]

        def render(nearest: Sequence[_Line]) -> list[int]:
            lines = [line.text for line in reversed(nearest)]
            earliest = nearest[-1].path if nearest else source.path
            if earliest != source.path and not lines[0].startswith(_header(earliest)):
                lines.insert(0, _header(earliest))  # its own was cut off
            return tokenizer.encode("".join(lines) + cut.opening if window.fills else own)

        reference = json.dumps({"completion": cut.completion})
        return window.request(request_id, select, render, reference, document=source.path)

    def _surroundings(self, source: _Source, cut: _Cut, most_chars: int) -> Iterator[_Line]:
        """The lines before a cut, nearest first: the file's own, then those of other files of the split."""
        yield from (_Line(text, source.path) for text in reversed(cut.before))
        yield _Line(_header(source.path), source.path)
        chars = sum(map(len, cut.before))
        files = [path for path in self._files if self._relative(path) != source.path]
        self._random(source.path, cut.line).shuffle(files)
        for other in self._sources(files):
            if chars > most_chars:
                return
            yield from (_Line(text, other.path) for text in reversed(other.lines))
            yield _Line(_header(other.path), other.path)
            chars += sum(map(len, other.lines))

    @cached_property
    def _files(self) -> list[Path]:
        """The split's files in the seed's order. Grouped by content: a copy of a file is the same file."""
        if not self._root.is_dir():
            raise TaskDataError(f"task.folder {self._root}: not a folder; give a folder that holds Python files")
        stdlib = _NOT_STDLIB if self._spec.folder is None else set()
        first: dict[str, Path] = {}
        for path in _python_files(self._root, _NEVER | stdlib):
            first.setdefault(hashlib.sha256(path.read_bytes()).hexdigest(), path)
        digests = {path: digest for digest, path in first.items()}
        return take_split(digests, self._spec, digests.__getitem__, self._relative)

    def _sources(self, files: Sequence[Path]) -> Iterator[_Source]:
        """Files that parse, each read only when it is reached."""
        for path in files:
            if path not in self._parsed:
                self._parsed[path] = _parse(path, self._relative(path))
            source = self._parsed[path]
            if source is not None:
                yield source

    def _relative(self, path: Path) -> str:
        return path.relative_to(self._root).as_posix()

    def _random(self, *key: object) -> random.Random:
        return random.Random(f"{self._spec.seed}:{key}")


def repository_documents(folder: str) -> Iterator[Document]:
    """Every Python file of a repository that parses, to propose from.

    Raises:
        TaskDataError: no such folder.
    """
    root = Path(folder).expanduser()
    if not root.is_dir():
        raise TaskDataError(f"repository {folder}: not a folder; give a folder that holds Python files")
    for path in _python_files(root, _NEVER):
        source = _parse(path, path.relative_to(root).as_posix())
        if source is not None:
            yield Document(source.path, "".join(source.lines))


def _python_files(root: Path, passed_over: set[str]) -> Iterator[Path]:
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(name for name in subfolders if name not in passed_over and not name.startswith("."))
        if "pyvenv.cfg" in names:
            subfolders.clear()  # a virtual environment: other people's code
            continue
        yield from (
            Path(folder, name) for name in sorted(names) if name.endswith(".py") and Path(folder, name).is_file()
        )


def _parse(path: Path, relative: str) -> _Source | None:
    """The file's text and functions; None where it is not UTF-8 or does not parse."""
    try:
        text = path.read_text(encoding="utf-8-sig")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes are that file's affair
            bodies = tuple(_bodies(ast.parse(text)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # the last two: nested too deeply
        return None
    # not splitlines(), which splits at form feeds too, where Python's grammar does not
    lines = tuple(line + "\n" for line in text.removesuffix("\n").split("\n"))
    return _Source(relative, lines, bodies)


def _bodies(node: ast.AST) -> Iterator[tuple[int, int]]:
    """Of functions that no other function holds: so no two bodies share a line."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            statements = child.body[1:] if ast.get_docstring(child, clean=False) is not None else child.body
            if statements and child.end_lineno and child.end_lineno - statements[0].lineno + 1 >= LEAST_BODY_LINES:
                yield statements[0].lineno, child.end_lineno
        elif isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
            yield from _bodies(child)


def _cut(source: _Source, body: tuple[int, int], dice: random.Random) -> _Cut:
    """A cut after a word in the first half of a body.

    Tokenizers never join a word's end with what follows, so the text before the cut has the tokens that it has in the
    whole file: the cut is at one of the file's own token boundaries.
    """
    first, last = body
    text = "".join(source.lines[first - 1 : last])
    ends = [word.end() for word in re.finditer(r"\w+", text)]
    position = dice.choice(ends[: (len(ends) + 1) // 2])
    line = first + text.count("\n", 0, position)
    opening = text[text.rfind("\n", 0, position) + 1 : position]
    return _Cut(line, source.lines[: line - 1], opening, text[position:])


def _header(path: str) -> str:
    return f"# file: {path}\n"
