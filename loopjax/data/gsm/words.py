"""Three themes, each with words for the items counted and for their places."""

import typing


class Theme(typing.NamedTuple):
  """Words of a theme.

  Attributes:
    everything: the word for all items together.
    items: 40 kinds of items.
    places: 64 names of places.
  """

  everything: str
  items: tuple[str, ...]
  places: tuple[str, ...]


def _compounds(starts: str, ends: str) -> tuple[str, ...]:
  return tuple(start + end for start in starts.split() for end in ends.split())


_HARBOURS = Theme(
  "goods",
  (
    "anchors", "bales", "barrels", "beams", "bells", "bricks", "buckets",
    "buoys", "cables", "candles", "carpets", "casks", "chains", "chests",
    "compasses", "crates", "drums", "engines", "flags", "hammers", "hooks",
    "kegs", "ladders", "lanterns", "masts", "nets", "oars", "pipes", "planks",
    "pulleys", "ropes", "rudders", "sacks", "sails", "saws", "shovels", "tents",
    "tiles", "whistles", "winches",
  ),
  _compounds(
    "Gull Tern Cod Foam Tide Salt Keel Mast",
    "wick haven mole quay ness port cove strand",
  ),
)  # fmt: skip

_LIBRARIES = Theme(
  "books",
  (
    "almanacs", "annuals", "atlases", "ballads", "catalogues", "chronicles",
    "codices", "comics", "cookbooks", "diaries", "dictionaries", "digests",
    "dramas", "elegies", "epics", "essays", "fables", "folios", "gazettes",
    "glossaries", "grammars", "guidebooks", "handbooks", "hymnals", "journals",
    "ledgers", "legends", "letters", "manuals", "manuscripts", "memoirs",
    "monographs", "novels", "pamphlets", "psalters", "romances", "sagas",
    "satires", "scrolls", "sonnets",
  ),
  _compounds(
    "Ink Quill Vellum Page Script Lore Verse Rune",
    "hall court gate house keep yard tower loft",
  ),
)  # fmt: skip

_ORCHARDS = Theme(
  "fruits",
  (
    "apples", "apricots", "bananas", "brambles", "cherries", "cranberries",
    "currants", "damsons", "dates", "elderberries", "figs", "gooseberries",
    "grapefruits", "grapes", "guavas", "kiwis", "kumquats", "lemons", "limes",
    "lychees", "mandarins", "mangoes", "medlars", "melons", "mulberries",
    "nectarines", "olives", "oranges", "papayas", "peaches", "pears",
    "persimmons", "plums", "pomegranates", "pomelos", "quinces", "raspberries",
    "satsumas", "strawberries", "tangerines",
  ),
  _compounds(
    "Bee Dew Sun Moss Fern Lark Clover Thistle",
    "field dale croft hill brook mead dell grove",
  ),
)  # fmt: skip

THEMES = (_HARBOURS, _LIBRARIES, _ORCHARDS)
NUM_ITEMS, NUM_PLACES = 40, 64
