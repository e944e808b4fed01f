"""Names of people, cities, universities, subjects and companies."""

from loopjax.data.multihop.words import NAMES


def _pairs(
  starts: str, ends: str, num: int, between: str = ""
) -> tuple[str, ...]:
  """The first `num` pairs; neighbours differ in both parts."""
  first, second = starts.split(), ends.split()
  pairs = [
    start + between + second[(index + shift) % len(second)]
    for shift in range(len(second))
    for index, start in enumerate(first)
  ]
  return tuple(pairs[:num])


# The texts of the tokens of each kind. The numbers of values are from bioS
# (arXiv 2404.05405).
VALUES: dict[str, tuple[str, ...]] = {
  "first name": NAMES[:400],
  "middle name": NAMES[400:800],
  "last name": tuple(name + "son" for name in NAMES[800:1800]),
  "month": (
    "January", "February", "March", "April", "May", "June", "July", "August",
    "September", "October", "November", "December",
  ),
  "day": tuple(str(day) for day in range(1, 29)),
  "year": tuple(str(year) for year in range(1900, 2100)),
  "city": _pairs(
    "Ash Birch Bright Cold Copper Crow East Elm Fair Fox Glen Gold Green High"
    " King Long North Oak Red River Rose Silver South Stone West",
    "bridge brook burg bury dale field ford gate ham haven hill mouth port"
    " stead ton ville",
    200,
  ),
  "university": tuple(
    f"University of {place}"
    for place in _pairs(
      "Alder Amber Arch Bay Bell Black Briar Clear Cliff Deer Dun Eagle Fern"
      " Flint Frost Harrow Hazel Iron Lake Linden Maple Marble Moor Pine Wolf",
      "bank borough cliff cross crest fall grove land mere moor point ridge"
      " side wick wood worth",
      300,
    )
  ),
  "major": _pairs(
    "Applied Comparative Computational Experimental General Historical Modern"
    " Quantitative Social Theoretical",
    "Anthropology Biology Chemistry Economics Geography Linguistics Mathematics"
    " Philosophy Physics Psychology",
    100,
    " ",
  ),
  "employer": _pairs(
    "Aero Agri Astro Bio Cargo Data Delta Electro Euro Geo Hydro Inter Macro"
    " Medi Micro Nano Neuro Omni Opti Poly Quanta Solar Techno Terra Trans"
    " Ultra Vita",
    "com corp dyne gen graph kinetics lab line logic mark matic media metrics"
    " net nova plex scape soft sphere star sys tec tron works",
    263,
  ),
}  # fmt: skip
