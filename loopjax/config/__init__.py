"""From a config file to checked settings.

What config files and the rest of the package call; presets are in
`config.presets`, the sections run and eval in `config.run_config`.
"""

from loopjax.config.settings import MAX_LOOPS as MAX_LOOPS
from loopjax.config.settings import Settings as Settings
from loopjax.config.settings import WorkdirOf as WorkdirOf
from loopjax.config.settings import axis as axis
from loopjax.config.settings import check_key as check_key
from loopjax.config.settings import check_loops as check_loops
from loopjax.config.settings import make as make
from loopjax.config.settings import of_run as of_run
from loopjax.config.settings import override as override
from loopjax.config.settings import product as product
from loopjax.config.settings import resolve as resolve
from loopjax.config.settings import to_dict as to_dict
