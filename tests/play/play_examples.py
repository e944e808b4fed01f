"""What a page contains."""

import json
import re


def data_of(text):
  """The data embedded in a page."""
  return json.loads(re.search(r"const data = (.*);\n", text)[1])
