"""Completions out of a repository that the test makes."""

import ast
import json
from pathlib import Path

import pytest
from choicespec.errors import TaskDataError
from choicespec.runtimes.scripted import ByteTokenizer
from choicespec.spec.task import PythonRepo, TaskSpec
from choicespec.tasks.prompts import Prompts, Task, open_task
from choicespec.tasks.python_repo import PythonRepoTask
from contracts.task_contract import MANY, ROOMY, TaskContract

MODULE = '''"""Module {name}."""

LIMIT = {number}


class Shop{number}:
    """A docstring of several lines,

    which is prose, not code.
    """

    def price_{number}(self, item):
        """The price of an item in module {name}.

        Which is never cut.
        """
        total = item.price * {number}
        if total > LIMIT:
            total -= self.discount
            return total

        return total + {number}


def helper_{number}(first, second):
    both = first + second
    for part in both:
        print(part, {number})
    return both
'''


def write(folder: Path, path: str, text: str) -> None:
    file = folder / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    for number in range(40):
        name = f"part{number % 3}/module_{number}.py"
        write(tmp_path, name, MODULE.format(name=name, number=number))
    return tmp_path


def prompts_of(folder: Path, **changes: object) -> Prompts:
    spec = PythonRepo(folder=str(folder), limit=MANY).model_copy(update=changes)
    return open_task(spec).prompts(ByteTokenizer(), ROOMY)


def files(prompts: Prompts) -> list[str]:
    return [request.request_id.rpartition(":")[0] for request in prompts.requests]


def text(prompt_ids: tuple[int, ...]) -> str:
    return ByteTokenizer().decode(prompt_ids)


class TestPythonRepo(TaskContract):
    """The contract, on a repository of 40 files."""

    @pytest.fixture
    def spec(self, repo: Path) -> TaskSpec:
        return PythonRepo(folder=str(repo))

    @pytest.fixture
    def broken(self, tmp_path: Path) -> Task:
        return PythonRepoTask(PythonRepo(folder=str(tmp_path / "missing")))


def test_prompt_and_completion_are_the_file(repo: Path) -> None:
    """Fails if a cut loses or repeats a character, or lies outside a body or in its docstring."""
    found = prompts_of(repo)
    for request, path in zip(found.requests, files(found), strict=True):
        whole = (repo / path).read_text()
        before = text(request.prompt_ids)
        completion = json.loads(request.reference or "")["completion"]
        assert (before + completion) in whole
        assert whole.startswith(before)
        assert before.count("\n") + 1 == int(request.request_id.rpartition(":")[2])
        functions = [node for node in ast.walk(ast.parse(whole)) if isinstance(node, ast.FunctionDef)]
        place = len(before.splitlines())
        assert any(f.body[ast.get_docstring(f) is not None].lineno <= place <= (f.end_lineno or 0) for f in functions)


def test_splits_share_no_file(repo: Path) -> None:
    """Fails if two functions of a file are split between training and testing."""
    assert not set(files(prompts_of(repo, split="train"))) & set(files(prompts_of(repo, split="test")))


def test_the_repository_is_the_splits_own_files(repo: Path) -> None:
    """Fails if candidates may come from a file of the other split, or a request's own file cannot be passed over."""
    train, test = prompts_of(repo, split="train"), prompts_of(repo, split="test")
    documents = {document.name: document.text for document in test.repository()}
    assert {request.document for request in test.requests} <= set(documents)
    assert not {request.document for request in train.requests} & set(documents)
    assert all((repo / name).read_text() == content for name, content in documents.items())


def test_copies_of_a_file_are_one_file(repo: Path) -> None:
    """Fails if a vendored copy brings a training file into the test split."""
    before = prompts_of(repo, split="train").requests + prompts_of(repo, split="test").requests
    for number in range(40):
        write(repo, f"vendored/copy_{number}.py", (repo / f"part{number % 3}/module_{number}.py").read_text())
    after = prompts_of(repo, split="train").requests + prompts_of(repo, split="test").requests
    assert [request.request_id for request in after] == [request.request_id for request in before]


def test_files_come_round_by_round(repo: Path) -> None:
    """Fails if a second function of one file is taken before every other file has given one."""
    found = files(prompts_of(repo))
    count = len(set(found))
    assert len(found) == 2 * count  # each file has two functions
    assert found[:count] == found[count:]


def test_files_that_cannot_be_read_are_passed_over(repo: Path) -> None:
    """Fails if one odd file ends the job, or becomes part of a prompt."""
    expected = prompts_of(repo, context_tokens=3000)
    write(repo, "python2.py", "def f():\n    print 'ODD'\n    x = 1\n    y = 2\n    return x\n")
    (repo / "latin.py").write_bytes(
        "# ODD \u00e9\ndef f():\n    a = 1\n    b = 2\n    c = 3\n    return a\n".encode("latin-1")
    )
    (repo / "nul.py").write_bytes(b"x = 1  # ODD \0\n")
    write(repo, "deep.py", "x = " + "(" * 5000 + ")" * 5000 + "  # ODD\n")
    (repo / "dangling.py").symlink_to(repo / "nowhere.py")
    write(repo, ".hidden/secret.py", MODULE.format(name="ODD", number=1))
    write(repo, "venv/pyvenv.cfg", "")
    write(repo, "venv/lib/odd.py", MODULE.format(name="ODD", number=2))
    found = prompts_of(repo, context_tokens=3000)
    assert {r.request_id for r in found.requests} == {r.request_id for r in expected.requests}
    assert not any("ODD" in text(request.prompt_ids) for request in found.requests)


def test_form_feeds_and_windows_newlines_do_not_move_the_cut(tmp_path: Path) -> None:
    """Fails if lines are counted otherwise than Python's parser does."""
    lines = ["# \x0c page", "def f(a):", "    first = a", "    second = a", "    third = a", "    return first", ""]
    for number in range(12):
        (tmp_path / f"f{number}.py").write_bytes("\r\n".join([*lines, f"N = {number}"]).encode())
    for request in prompts_of(tmp_path).requests:
        assert text(request.prompt_ids).partition("def f(a):\n    first")[1]


def test_more_context_brings_other_files_of_the_split(repo: Path) -> None:
    """Fails if a prompt is filled with anything but whole lines of other files of its split, each named."""
    own_split = set(files(prompts_of(repo)))
    for request in prompts_of(repo, context_tokens=4000).requests:
        before = text(request.prompt_ids)
        named = [line.removeprefix("# file: ") for line in before.splitlines() if line.startswith("# file: ")]
        own = request.request_id.rpartition(":")[0]
        assert named[-1] == own
        assert len(named) == len(set(named)) > 1
        assert set(named) <= own_split
        assert before.startswith("# file: ")
        sections = before.split("# file: ")[1:]
        for section in sections:
            path, _, body = section.partition("\n")
            assert body in (repo / path).read_text()


def test_less_context_keeps_the_nearest_lines(repo: Path) -> None:
    """Fails if the end of the prompt is cut, or its first line is half a line."""
    whole = {request.request_id: text(request.prompt_ids) for request in prompts_of(repo).requests}
    for request in prompts_of(repo, context_tokens=120).requests:
        before = text(request.prompt_ids)
        full = whole[request.request_id]
        assert full.endswith(before)
        assert before == full or full[-len(before) - 1] == "\n"


def test_the_standard_library_is_the_default() -> None:
    """Fails if its own tests, or other people's packages, pass for real code."""
    found = files(open_task(PythonRepo(limit=30)).prompts(ByteTokenizer(), ROOMY))
    assert len(set(found)) == 30
    assert not any({"test", "tests", "site-packages", "idlelib"} & set(Path(path).parts) for path in found)


def test_a_folder_without_functions_says_so(tmp_path: Path) -> None:
    """Fails if a wrong folder ends in a run over nothing."""
    for number in range(20):
        write(tmp_path, f"f{number}.py", f"x = {number}\n")
    with pytest.raises(TaskDataError, match="has a function body of 4 lines; name a folder with more Python in it"):
        open_task(PythonRepo(folder=str(tmp_path))).check()
