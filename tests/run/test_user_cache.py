"""Cache entries are complete or are recreated."""

import concurrent.futures
import importlib
import os
import pathlib
import signal
import subprocess
import sys
import threading

import pytest

from loopjax.errors import UserError
from loopjax.run import user_cache


@pytest.fixture(autouse=True)
def kind(tmp_path, monkeypatch):
  """A cache directory apart from the user's."""
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
  return tmp_path / "loopjax" / "kind"


def write(folder):
  (folder / "words").write_text("one two")
  (folder / "numbers").write_bytes(bytes(range(256)))


def fail(_):
  raise AssertionError("it is there already")


def test_the_place_is_that_of_the_system(monkeypatch):
  monkeypatch.setenv("HOME", "/home/me")
  monkeypatch.setenv("XDG_CACHE_HOME", "/scratch/me")
  assert user_cache.directory("x") == pathlib.Path("/scratch/me/loopjax/x")
  for unset in (
    lambda: monkeypatch.setenv("XDG_CACHE_HOME", ""),
    lambda: monkeypatch.delenv("XDG_CACHE_HOME"),
  ):
    unset()
    assert str(user_cache.directory("x")) == "/home/me/.cache/loopjax/x"


def test_variables_of_jax_go_before_the_compilation_cache_of_the_user(
  monkeypatch, tmp_path
):
  set_to = {}
  monkeypatch.setattr(user_cache.jax.config, "update", set_to.__setitem__)
  monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "/elsewhere")
  monkeypatch.delenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS")
  user_cache.keep_compiled()
  assert set_to == {"jax_persistent_cache_min_compile_time_secs": 0.5}
  monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
  user_cache.keep_compiled()
  place = str(tmp_path / "loopjax" / "compilation")
  assert set_to["jax_compilation_cache_dir"] == place


@pytest.mark.parametrize(
  ("name", "words"),
  [
    ("generate", ("run", "--prompt=a")),
    ("serve", ("run",)),
    ("analysis.multihop", ("run",)),
    ("play", ("run",)),
  ],
)
def test_commands_that_compile_keep_it(name, words, monkeypatch):
  """Before they read a model."""
  command = importlib.import_module(f"loopjax.{name}.__main__")

  def kept():
    raise ZeroDivisionError

  monkeypatch.setattr(user_cache, "keep_compiled", kept)
  with pytest.raises(ZeroDivisionError):
    command.main(words)


def test_an_entry_is_written_once():
  first = user_cache.entry("kind", "a", write)
  assert (first / "words").read_text() == "one two"
  assert user_cache.entry("kind", "a", fail) == first
  with pytest.raises(AssertionError):
    user_cache.entry("kind", "b", fail)


def test_what_is_large_is_read_once_a_process(monkeypatch):
  """Every split of a corpus asks for its entry."""
  path, read = user_cache.entry("kind", "c", write), []
  file_of = open

  def spied(file, *arguments, **options):
    read.append(file)
    return file_of(file, *arguments, **options)

  monkeypatch.setattr(user_cache, "open", spied, raising=False)
  for _ in range(3):
    assert user_cache.entry("kind", "c", fail) == path
  assert sorted(read) == [path / "numbers", path / "words"]


@pytest.mark.parametrize(
  "damage",
  [
    lambda entry: (entry / "words").write_text("one twO"),
    lambda entry: (entry / "numbers").write_bytes(bytes(range(255))),
    lambda entry: (entry / "words").unlink(),
    lambda entry: (entry / "checksums.json").unlink(),
    lambda entry: (entry / "checksums.json").write_text('{"words'),
    lambda entry: (
      (entry.with_name(".a.partial") / "words").mkdir(parents=True)
      or (entry / "words").unlink()
    ),
  ],
  ids=["other", "cut off", "missing", "no sums", "half of them", "and a rest"],
)
def test_what_is_damaged_is_made_anew(damage, kind, capsys):
  entry = user_cache.entry("kind", "a", write)
  damage(entry)
  assert user_cache.entry("kind", "a", write) == entry
  assert (entry / "words").read_text() == "one two"
  said = capsys.readouterr().out
  assert f"{entry}: incomplete or damaged; rebuilding it\n" in said
  assert sorted(file.name for file in kind.iterdir()) == [".a.lock", "a"]
  user_cache.entry("kind", "a", fail)


def test_a_writer_that_is_killed_leaves_nothing_that_counts(kind):
  code = (
    "import os, signal\n"
    "from loopjax.run import user_cache\n"
    "def write(folder):\n"
    "  (folder / 'words').write_text('one')\n"
    "  os.kill(os.getpid(), signal.SIGKILL)\n"
    "user_cache.entry('kind', 'a', write)\n"
  )
  root = pathlib.Path(__file__).parent.parent
  killed = subprocess.run([sys.executable, "-c", code], cwd=root, timeout=60)
  assert killed.returncode == -signal.SIGKILL
  assert (kind / ".a.partial").exists() and not (kind / "a").exists()
  entry = user_cache.entry("kind", "a", write)
  assert (entry / "words").read_text() == "one two"
  assert not (kind / ".a.partial").exists()


@pytest.mark.parametrize("error", [KeyboardInterrupt, UserError, ValueError])
def test_a_writer_that_fails_leaves_nothing(error, kind):
  def half(folder):
    write(folder)
    raise error("not now")

  with pytest.raises(error, match="not now"):
    user_cache.entry("kind", "a", half)
  assert [file.name for file in kind.iterdir()] == [".a.lock"]


def test_a_full_disk_is_one_line(kind):
  def full(folder):
    write(folder)
    pathlib.Path("/dev/full").write_text("more", encoding="utf-8")

  with pytest.raises(UserError) as caught:
    user_cache.entry("kind", "a", full)
  message = str(caught.value)
  assert message.startswith(f"{kind / 'a'}: cannot be written (No space left")
  assert "XDG_CACHE_HOME" in message and "\n" not in message
  assert [file.name for file in kind.iterdir()] == [".a.lock"]


def test_a_place_that_cannot_be_written_is_one_line(kind):
  kind.parent.write_text("a file where a directory should be")
  with pytest.raises(UserError, match="XDG_CACHE_HOME"):
    user_cache.entry("kind", "a", write)


def test_a_user_without_a_home_is_one_line(monkeypatch):
  """As of a container that runs as any number."""

  def home():
    raise RuntimeError("Could not determine home directory.")

  monkeypatch.delenv("XDG_CACHE_HOME")
  monkeypatch.setattr(pathlib.Path, "home", home)
  with pytest.raises(UserError, match="^this user has no home.*XDG_CACHE_HOME"):
    user_cache.keep_compiled()


def test_what_is_whole_needs_no_lock(kind):
  """It may be in a read-only directory."""
  entry = user_cache.entry("kind", "a", write)
  lock = kind / ".a.lock"
  lock.unlink()
  user_cache.entry("kind", "a", fail)
  assert not lock.exists()
  assert os.listdir(kind) == [entry.name]


def test_of_several_one_writes_and_the_others_wait():
  began, calls = threading.Event(), []

  def slow(folder):
    calls.append(folder)
    began.wait(0.5)  # No other process enters.
    write(folder)

  with concurrent.futures.ThreadPoolExecutor(4) as pool:
    tasks = [pool.submit(user_cache.entry, "kind", "a", slow) for _ in range(4)]
    entries = {task.result() for task in tasks}
  assert len(entries) == len(calls) == 1
