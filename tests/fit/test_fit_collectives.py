"""Collectives, each as often as it runs."""

import fit_examples
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from loopjax.fit import counts, hlo


def traffic(text):
  return counts.collectives(hlo.parse(text))


def test_loops_multiply_and_starts_do_not_count():
  got = traffic(fit_examples.NESTED)
  # 2 x 3 all-reduces of [4, 16] float32; 2 all-gathers of a pair in the outer
  # loop and one of [32, 16] float32 outside.
  assert got.executions == {"all-reduce": 6, "all-gather": 3}
  assert got.num_bytes == {
    "all-reduce": 6 * 256,
    "all-gather": 2 * (8 * 4 * 16 * 2 + 8 * 4) + 32 * 16 * 4,
  }
  assert got.unknown == ()


def test_what_libtpu_spreads_over_fusions_counts_once():
  got = traffic(fit_examples.FUSED)
  assert got.executions == {
    "all-gather": 1,
    "reduce-scatter": 1,
    "all-to-all": 1,
  }
  assert got.num_bytes == {
    "all-gather": 8 * 16 * 4,
    "reduce-scatter": 2 * 16 * 4,
    "all-to-all": 2 * 16 * 4,
  }


def test_a_loop_of_unknown_length_counts_once_and_is_named():
  constants = {"start": "constant(0)", "step": "constant(1)"}
  known = traffic(fit_examples.counted_loop(**constants, end="constant(18)"))
  assert known == ({"collective-permute": 18}, {"collective-permute": 576}, ())
  unknown = traffic(fit_examples.counted_loop(**constants, end="parameter(1)"))
  assert unknown.executions == {"collective-permute": 1}
  assert unknown.unknown == ("jit(f)/while",)


def test_a_real_program_as_counted_by_hand():
  mesh = Mesh(np.array(jax.devices()), ("x",))

  def inner(c, _):
    return jax.lax.psum(jnp.cos(c), "x"), None

  def f(x):
    def outer(c, _):
      c, _ = jax.lax.scan(inner, c, None, length=3)
      # Times the device's shard: XLA knows that every device has the sum.
      gathered = jax.lax.all_gather(c * x, "x")
      return gathered[::3].max(0), None

    y, _ = jax.lax.scan(outer, x, None, length=5)
    ring = [(i, (i + 1) % 8) for i in range(8)]
    return jax.lax.ppermute(x * y, "x", ring)

  sharded = jax.shard_map(
    f, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False
  )
  x = jax.ShapeDtypeStruct(
    (8 * 4, 16), jnp.float32, sharding=NamedSharding(mesh, P("x"))
  )
  got = traffic(jax.jit(sharded).lower(x).compile().as_text())
  one = 4 * 16 * 4  # Bytes of a device's shard.
  assert got.executions == {
    "all-reduce": 15,
    "all-gather": 5,
    "collective-permute": 1,
  }
  assert got.num_bytes == {
    "all-reduce": 15 * one,
    "all-gather": 5 * 8 * one,
    "collective-permute": one,
  }
