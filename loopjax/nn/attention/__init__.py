"""Attention: the layer, its cache, and implementations of the products."""

from loopjax.nn.attention.layer import Attention as Attention
from loopjax.nn.attention.layer import Metadata as Metadata
from loopjax.nn.attention.layer import make_metadata as make_metadata
from loopjax.nn.attention.layer import places_in as places_in
