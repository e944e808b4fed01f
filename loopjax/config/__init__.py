"""From a config file to checked settings.

What config files and the rest of the package call; presets are in
`config.presets`, the sections run and eval in `config.settings`.
"""

from loopjax.config.overrides import WorkdirOf as WorkdirOf
from loopjax.config.overrides import axis as axis
from loopjax.config.overrides import by_user as by_user
from loopjax.config.overrides import make as make
from loopjax.config.overrides import override as override
from loopjax.config.overrides import product as product
from loopjax.config.overrides import set_by_user as set_by_user
from loopjax.config.overrides import to_dict as to_dict
from loopjax.config.resolve import MAX_LOOPS as MAX_LOOPS
from loopjax.config.resolve import check_config as check_config
from loopjax.config.resolve import check_loops as check_loops
from loopjax.config.resolve import check_scored as check_scored
from loopjax.config.resolve import config_of_run as config_of_run
from loopjax.config.resolve import of_record as of_record
from loopjax.config.resolve import of_run as of_run
from loopjax.config.resolve import record as record
from loopjax.config.resolve import resolve as resolve
from loopjax.config.settings import Settings as Settings
