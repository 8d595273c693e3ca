"""Write what was measured as a page and as Markdown: ``python -m jobs.report``.

From the results folder, or with --mlflow from the runs that MLflow keeps.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from choicespec.errors import ChoiceSpecError
from choicespec.reports.collected import collect
from choicespec.reports.content import Report, report_of
from choicespec.reports.markdown import render_markdown
from choicespec.reports.page import render_page
from choicespec.reports.words import LANGUAGES
from choicespec.tracking.connection import tracking_uri
from choicespec.tracking.runs import download_results

from jobs.terminal import home, say


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the job; 0 when the report is written, 2 when what was asked is wrong."""
    args = _parse(arguments)
    try:
        report = _from_mlflow(args.experiments) if args.mlflow else _read(home() / "results", args.experiments)
    except ChoiceSpecError as error:
        say(f"error: {error}", "red")
        return 2
    args.output.mkdir(parents=True, exist_ok=True)
    pages = {"report.html": render_page(report)}
    pages |= {f"report.{language}.md": render_markdown(report, language) for language in LANGUAGES}
    for name, content in pages.items():
        (args.output / name).write_text(content, encoding="utf-8")
        say(f"wrote {args.output / name}")
    for line in report.unreadable:
        say(f"left out: {line}", "yellow")
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="jobs.report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("experiments", nargs="*", help="names of experiments (default: all that are kept)")
    parser.add_argument("--mlflow", action="store_true", help="read the runs of MLflow instead of the results folder")
    parser.add_argument("--output", type=Path, default=home() / "report", help="a folder (default: report)")
    return parser.parse_args(arguments)


def _read(folder: Path, experiments: Sequence[str]) -> Report:
    return report_of(collect(folder, experiments))


def _from_mlflow(experiments: Sequence[str]) -> Report:
    with TemporaryDirectory() as folder:
        download_results(tracking_uri(home()), experiments, Path(folder))
        return _read(Path(folder), experiments)


if __name__ == "__main__":
    sys.exit(main())
