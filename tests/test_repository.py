"""The repository's own promises: links that lead somewhere, variables that are documented, a version below 0.9."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("gateway", "backends", "kernels", "scheduler", "loadtest")
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
VARIABLE = re.compile(r"\bONEPASS_[A-Z_]*[A-Z]\b")


@pytest.mark.parametrize("page", PAGES, ids=[p.name for p in PAGES])
def test_relative_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
        if "://" not in target and not target.startswith("mailto:"):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_variable_is_documented_and_every_documented_one_exists() -> None:
    code = "\n".join(p.read_text() for package in PACKAGES for p in (ROOT / package).rglob("*.py"))
    documented = "\n".join(page.read_text() for page in PAGES)
    read, told = set(VARIABLE.findall(code)), set(VARIABLE.findall(documented))
    assert read - told == set(), "read but not documented"
    assert told - read == set(), "documented but not read"


def test_transformers_never_takes_our_kernels_for_the_hubs() -> None:
    """It imports the hub's package of that name if the installed version fits, which starts at 0.9."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert tuple(map(int, version.split(".")[:2])) < (0, 9)


def test_what_ships_names_every_package() -> None:
    include = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]["include"]
    assert sorted(include) == sorted(f"{package}*" for package in PACKAGES)
