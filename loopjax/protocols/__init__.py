"""The interfaces of model families and tasks: what others use of a module.

Families and tasks are modules, held by name in `loopjax.models.MODELS` and
`loopjax.data.TASKS`, which import a module when it is first read, and where the
type checker compares each module with its protocol. A parameter that takes the
module's own `Config` or `Model` has the type Any here. A feature that only some
families have is a protocol of its own, such as `LearnsFromTeacher`: a family
implements it by defining the function.
"""

from loopjax.protocols.families import AnyTeacher as AnyTeacher
from loopjax.protocols.families import CausalFamily as CausalFamily
from loopjax.protocols.families import Dataclass as Dataclass
from loopjax.protocols.families import Family as Family
from loopjax.protocols.families import MakeModel as MakeModel
from loopjax.protocols.families import Model as Model
from loopjax.protocols.families import ModelConfig as ModelConfig
from loopjax.protocols.features import AdvancesRows as AdvancesRows
from loopjax.protocols.features import CarriesState as CarriesState
from loopjax.protocols.features import ExitsEarly as ExitsEarly
from loopjax.protocols.features import Halting as Halting
from loopjax.protocols.features import HaltsByMass as HaltsByMass
from loopjax.protocols.features import HasGateRate as HasGateRate
from loopjax.protocols.features import HasPlaces as HasPlaces
from loopjax.protocols.features import HasSchedule as HasSchedule
from loopjax.protocols.features import HasSpan as HasSpan
from loopjax.protocols.features import LearnsFromTeacher as LearnsFromTeacher
from loopjax.protocols.features import LeavesUntrained as LeavesUntrained
from loopjax.protocols.features import Measured as Measured
from loopjax.protocols.features import MemoryTokens as MemoryTokens
from loopjax.protocols.features import ReadsByChunk as ReadsByChunk
from loopjax.protocols.features import ReadsOutEveryLoop as ReadsOutEveryLoop
from loopjax.protocols.features import Resumes as Resumes
from loopjax.protocols.features import StacksLayers as StacksLayers
from loopjax.protocols.features import Teacher as Teacher
from loopjax.protocols.registry import Registry as Registry
from loopjax.protocols.tasks import Task as Task
