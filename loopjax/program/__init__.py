"""What is compiled: the model, the train state's layout, the steps."""

from loopjax.program.build import Program as Program
from loopjax.program.build import abstract_batches as abstract_batches
from loopjax.program.build import cache_bytes as cache_bytes
from loopjax.program.build import check_kernels as check_kernels
from loopjax.program.build import check_step as check_step
from loopjax.program.build import have_kernels as have_kernels
from loopjax.program.build import make_program as make_program
from loopjax.program.build import on_mesh as on_mesh
from loopjax.program.state import abstract_model as abstract_model
from loopjax.program.state import initial_state as initial_state
