"""loopjax: looped transformers with memory, in JAX and Flax.

Shapes in the docstrings of models and layers use these letters; in
`models/utm/` the names of arrays end in them (`g_BxSxD`):

  B batch            T tokens            S tokens attended to
  D model width      F MLP width         V vocabulary
  H query heads      G key-value heads   d_h, d_k, d_v widths of one head
  K loops            M memory tokens     C chunk

Any other letter, and any letter in tasks and analyses, is defined where it is
used.
"""

__version__ = "0.1.0"
