"""The interfaces of model families and tasks.

A family is a record, `Family`: a part that is None is what it cannot do. A task
is a module, which the type checker compares with the protocol `Task` in
`loopjax.data`. Both are held by name, in `loopjax.models.MODELS` and
`loopjax.data.TASKS`, which import a module when it is first read. A parameter
that takes the family's or task's own `Config` or `Model` has the type Any here.
"""

from loopjax.protocols.families import AnyTeacher as AnyTeacher
from loopjax.protocols.families import Dataclass as Dataclass
from loopjax.protocols.families import Exits as Exits
from loopjax.protocols.families import Family as Family
from loopjax.protocols.families import HasPlaces as HasPlaces
from loopjax.protocols.families import HasSpan as HasSpan
from loopjax.protocols.families import MakeModel as MakeModel
from loopjax.protocols.families import Model as Model
from loopjax.protocols.families import ModelConfig as ModelConfig
from loopjax.protocols.families import Reading as Reading
from loopjax.protocols.families import Start as Start
from loopjax.protocols.families import Teacher as Teacher
from loopjax.protocols.registry import Registry as Registry
from loopjax.protocols.tasks import Task as Task
