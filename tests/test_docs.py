"""Every code block of README.md and docs/ works."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import tensorplay

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def blocks(page: Path) -> list[tuple[str, str]]:
    """(language, text) of each code block."""
    return BLOCK.findall(page.read_text())


def test_pages_exist() -> None:
    assert len(PAGES) >= 2
    assert blocks(PAGES[0])


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_languages(page: Path) -> None:
    assert {language for language, _ in blocks(page)} <= {"python", "text", "sh"}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_python_blocks_print_what_is_shown(page: Path, tmp_path: Path) -> None:
    """All Python blocks of a page are one script; the text blocks are what it prints."""
    found = blocks(page)
    script = tmp_path / "page.py"
    script.write_text("\n".join(text for language, text in found if language == "python"))
    done = subprocess.run(
        [sys.executable, str(script)],
        env=os.environ | {"PYTHONPATH": str(Path(tensorplay.__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "".join(text for language, text in found if language == "text")


def test_commands_install_and_run() -> None:
    """One command line runs the main job, one the tests, each in an environment of its own."""
    lines = [text.strip() for language, text in blocks(PAGES[0]) if language == "sh"]
    steps = [[step.strip() for step in line.split("&&")] for line in lines]
    assert [s[0] for s in steps] == ["python3 -m venv .venv"] * 2
    assert [s[1] for s in steps] == [".venv/bin/pip install .", ".venv/bin/pip install '.[test]'"]
    assert [s[2] for s in steps] == [
        ".venv/bin/python examples/train_gpt.py",
        ".venv/bin/python -m pytest",
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / target).exists(), target
