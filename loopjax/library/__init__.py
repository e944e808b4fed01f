"""From Python: `loopjax.load`, `build`, `loss`, `save`, `datasets`.

`dynamics` is about a model's loops, `run_sweep` and `table` about many runs.

A `Model` is a pytree whose leaves are its parameters: `jax.grad`, `jax.vmap`,
`jax.tree` and Optax accept it. Everything here calls the same functions as the
commands; `docs/library.md` is the tutorial.
"""

from loopjax.library.dynamics import dynamics as dynamics
from loopjax.library.functions import build as build
from loopjax.library.functions import check_family as check_family
from loopjax.library.functions import datasets as datasets
from loopjax.library.functions import load as load
from loopjax.library.functions import loss as loss
from loopjax.library.functions import save as save
from loopjax.library.model import Model as Model
from loopjax.library.sweeps import run_sweep as run_sweep
from loopjax.library.sweeps import table as table
