"""Provenance: the revision of the checkout that contains the running code."""

import pathlib
import subprocess

import pytest

import loopjax
from loopjax.run import provenance


def git(folder, *arguments):
  named = ("-c", "user.name=Test", "-c", "user.email=test@example.com")
  return subprocess.run(
    ["git", *named, *arguments],
    cwd=folder, capture_output=True, text=True, check=True,
  ).stdout.strip()  # fmt: skip


def test_the_revision_is_of_the_checkout_around_the_package(tmp_path):
  package = tmp_path / "project" / "loopjax"
  package.mkdir(parents=True)
  assert provenance.revision_of(package) == ""
  git(package.parent, "init", "-q")
  (package / "file.py").write_text("x = 1\n")
  git(package.parent, "add", ".")
  git(package.parent, "commit", "-q", "-m", "first")
  commit = git(package.parent, "rev-parse", "HEAD")[:12]
  assert provenance.revision_of(package) == commit
  (package / "file.py").write_text("x = 2\n")
  assert provenance.revision_of(package) == f"{commit}-dirty"


def test_a_commit_has_landed_if_head_has_it(tmp_path):
  package = tmp_path / "project" / "loopjax"
  package.mkdir(parents=True)
  assert provenance.has_landed("abc", package) is None
  git(package.parent, "init", "-q", "-b", "main")
  for text in ("1", "2"):
    (package / "file.py").write_text(text)
    git(package.parent, "add", ".")
    git(package.parent, "commit", "-q", "-m", text)
  first, second = git(package.parent, "rev-list", "--reverse", "main").split()
  for commit in (first, second, first[:12]):
    assert provenance.has_landed(commit, package) is True
  for other in ("", f"{second[:12]}-dirty", "0123456789ab"):
    assert provenance.has_landed(other, package) is False
  git(package.parent, "checkout", "-q", first)
  assert provenance.has_landed(second, package) is False


def test_a_package_inside_another_checkout_has_none(tmp_path):
  package = tmp_path / "other" / "site-packages" / "loopjax"
  package.mkdir(parents=True)
  git(tmp_path / "other", "init", "-q")
  (package / "file.py").write_text("x = 1\n")
  git(tmp_path / "other", "add", ".")
  git(tmp_path / "other", "commit", "-q", "-m", "first")
  assert provenance.revision_of(package) == ""


def test_a_run_records_the_revision_of_this_package(monkeypatch):
  asked = []
  monkeypatch.setattr(
    provenance, "revision_of", lambda package: asked.append(package) or "abc"
  )
  assert provenance.environment()["revision"] == "abc"
  assert asked == [pathlib.Path(loopjax.__file__).parent]


@pytest.mark.parametrize(
  ("words", "expected"),
  [
    (
      ["/usr/bin/python3", "/home/me/.venv/bin/loopjax", "train", "--a=b c"],
      "loopjax train '--a=b c'",
    ),
    (["python", "-m", "loopjax.main", "--x"], "python -m loopjax.main --x"),
    (["python3.11"], "python"),
  ],
)
def test_a_command_has_no_path_of_this_machine(words, expected):
  assert provenance.command_of(words) == expected
