"""Read-outs and states after every loop of one pass."""

import jax
import jax.numpy as jnp
import model_examples as examples
import numpy as np
from test_families import SPEC, config_of
from tests_support import crossing

from loopjax.losses import tokens as token_losses
from loopjax.models import MODELS, every_loop

TOKENS = jax.random.randint(jax.random.key(1), (3, 8), 0, 21)
TARGETS = jnp.roll(TOKENS, -1, axis=1)
READ_OUT = [
  ("looped", {"num_loops": 3}),
  ("recurrent", {"num_loops": 3, "state": "normal"}),
  ("recurrent", {"num_loops": 3, "update": "gate", "loop_norm": "final_only"}),
  ("disco", {"num_loops": 3, "loop_norm": "final_only"}),
  ("plt", {"num_loops": 3}),
  ("ponderlm", {"num_loops": 3}),
  ("transformer", {"num_loops": 3}),
]


@crossing(
  ("name", "changes"),
  READ_OUT,
  ids=[f"{n}-{'-'.join(c)}" for n, c in READ_OUT],
  manual=[READ_OUT[1], READ_OUT[5]],  # Another state; disco with another input.
)
def test_a_read_out_is_that_of_a_run_of_so_many_loops(name, changes):
  family, config = MODELS[name], config_of(name, **changes)
  params = examples.params_of(family, config, SPEC)

  def run(params, targets=None, **call):
    model = examples.merged(family, config, SPEC, params)
    return model(TOKENS, targets=targets, **call)

  asked = {"num_loops": 3, "trace": ("hidden",)}
  trace = jax.jit(lambda x: run(x, TARGETS, **asked).trace)(params)
  assert family.reads_out_every_loop(config)
  assert {"loss", "prediction", *every_loop.STATE} < trace.keys()
  for loops in (1, 2, 3):
    logits = run(params, num_loops=loops).logits
    expected = token_losses.token_cross_entropy(logits, TARGETS)
    np.testing.assert_allclose(trace["loss"][loops - 1], expected, atol=2e-5)
    np.testing.assert_array_equal(
      trace["prediction"][loops - 1], jnp.argmax(logits, axis=-1)
    )
  found = every_loop.state(*trace["hidden"][:2])
  for key in ("hidden_norm", "token_correlation"):
    np.testing.assert_allclose(trace[key][1], found[key], rtol=1e-4)


def test_families_that_read_out_are_those_of_the_test():
  """A damped loop depends on how many there are."""
  named = {name for name, _ in READ_OUT}
  features = {n for n, x in MODELS.items() if x.reads_out_every_loop}
  assert named == features
  damped = config_of("recurrent", update="damped")
  assert not MODELS["recurrent"].reads_out_every_loop(damped)


def test_statistics_of_a_state_by_hand():
  before = jnp.array([[[3.0, 0.0], [0.0, 4.0]], [[1.0, 1.0], [1.0, 1.0]]])
  after = jnp.array([[[3.0, 4.0], [0.0, 4.0]], [[2.0, 2.0], [4.0, 4.0]]])
  found = every_loop.state(before, after)
  np.testing.assert_allclose(found["hidden_norm"], [4.5, 18**0.5], rtol=1e-6)
  # |after - before| / |after|: 4/5 and 0; 1/2 and 3/4.
  np.testing.assert_allclose(found["relative_change"], [0.4, 0.625], rtol=1e-5)
  middle = np.array([1.5, 4.0]) / np.hypot(1.5, 4.0)
  cosines = [middle @ [0.6, 0.8], middle[1]]
  np.testing.assert_allclose(
    found["token_correlation"], [np.mean(cosines), 1.0], rtol=1e-5
  )
