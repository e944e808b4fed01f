"""Reports of non-finite numbers."""

import runpy

import jax.numpy as jnp

from loopjax.train import loop


def test_a_frame_is_the_projects_only_if_it_is_in_the_package(tmp_path):
  """For any names of parent directories."""
  package = tmp_path / "loopjax" / "src" / "loopjax"
  other = tmp_path / "loopjax" / "lib" / "site-packages" / "loopjax_tools"
  for directory in (package, other):
    directory.mkdir(parents=True)
  (other / "a.py").write_text("def fail():\n  raise FloatingPointError\n")
  (package / "b.py").write_text("def call(function):\n  function()\n")
  fail = runpy.run_path(str(other / "a.py"))["fail"]
  call = runpy.run_path(str(package / "b.py"))["call"]
  try:
    call(fail)
  except FloatingPointError as error:
    assert loop.origin(error, package) == f" at {package / 'b.py'}:2"
    assert loop.origin(error, tmp_path / "elsewhere") == ""


def test_the_first_bad_operation_is_found():
  def function(x, y):
    return jnp.log(x) + y

  said = loop.find_nan(function, jnp.float32(-1), jnp.float32(1))
  assert "encountered in log" in said
  fine = loop.find_nan(function, jnp.float32(1), jnp.float32(1))
  assert fine.startswith("non-finite in the compiled step, but not")
