"""A whole run: data, restore, training loop, evaluation, summary."""

from loopjax.train.procedure import SPLITS as SPLITS
from loopjax.train.procedure import Extras as Extras
from loopjax.train.procedure import Scored as Scored
from loopjax.train.procedure import make_datasets as make_datasets
from loopjax.train.procedure import run as run
