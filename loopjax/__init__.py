"""loopjax: looped transformers with memory, in JAX and Flax.

Array names in numeric code end in the letters of their dimensions, one legend
for the whole package:

  B batch            T tokens            S tokens with memory in front
  M memory slots     R loop steps        L layers
  D model width      F MLP width         H query heads
  K head width       V vocabulary        C chunk
"""

__version__ = "0.1.0"
