"""The page in a real browser, in front of a replica in this process."""

from collections.abc import Iterator

import pytest
from choicespec.serving.endpoints import digest
from choicespec.serving.replica import Replica
from choicespec.serving.source import Versioned
from choicespec.spec.serving import LimitsSpec
from integration.chromium import NAMES, Page, find_chromium, open_page
from integration.local_api import serving, table_champion

_CHOICE = {"kind": "choice", "min_survival": 0.0}
_ANSWERS = "[...document.querySelectorAll('.answer')]"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """The page of a model with a token."""
    path = find_chromium()
    assert path is not None, f"the page is tested in a Chromium; install one, under one of the names {', '.join(NAMES)}"
    replica = Replica(Versioned(table_champion(method=_CHOICE), "3"), LimitsSpec())
    with (
        serving({"table": replica}, token_digest=digest("right")) as address,
        open_page(path, tmp_path_factory.mktemp("profile"), address) as page,
    ):
        yield page


def test_a_person_decodes_a_prompt(page: Page) -> None:
    """Fails if the page cannot be used without its developer: token, prompt, colours, rates, comparison."""
    page.wait_for("document.getElementById('error').textContent !== ''")
    assert "bearer token" in page.run("document.getElementById('error').textContent")
    page.run("document.getElementById('token').value = 'right'")
    page.run("document.getElementById('ask').value = 'count, please'")
    page.run("document.getElementById('most').value = '150'")
    page.run("document.getElementById('send').click()")
    finished = f"{_ANSWERS}.every((answer) => answer.dataset.finished)"
    page.wait_for(f"{finished} || document.getElementById('error').textContent !== ''")
    assert page.run("document.getElementById('error').textContent") == ""
    assert "champion 3" in page.run("document.getElementById('served').textContent")
    champion, plain = page.run(f"{_ANSWERS}.map((answer) => answer.querySelector('.text').textContent)")
    assert champion == plain
    assert champion
    colours = page.run("[...document.querySelectorAll('#champion .piece')].map((piece) => piece.className)")
    assert {"piece prompt", "piece target"} <= set(colours)
    assert set(page.run("[...document.querySelectorAll('#plain .piece')].map((p) => p.className)")) == {"piece target"}
    background = "getComputedStyle(document.querySelector('#champion .prompt')).backgroundColor"
    assert page.run(background) != "rgba(0, 0, 0, 0)"
    rates = page.run(f"{_ANSWERS}.map((answer) => answer.querySelector('.rate').textContent)")
    assert all("tokens/s" in rate and f"{len(champion) - 1} tokens" in rate for rate in rates)


def test_nothing_is_loaded_from_elsewhere(page: Page) -> None:
    """Fails if the page needs another server, and so an internet."""
    names = page.run("performance.getEntriesByType('resource').map((entry) => entry.name)")
    origin = page.run("location.origin")
    assert names
    assert all(name.startswith((origin, "data:")) for name in names)


def test_an_error_is_shown(page: Page) -> None:
    """Fails if a person waits for an answer that was refused."""
    page.run("document.getElementById('most').value = '100000'")
    page.run("document.getElementById('send').click()")
    page.wait_for("document.getElementById('error').textContent !== ''")
    assert "at most 1024 are decoded" in page.run("document.getElementById('error').textContent")
