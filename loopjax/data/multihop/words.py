"""Names of people and of relations between them."""

_STARTS = (
  "Al", "An", "Ar", "Bel", "Ber", "Bran", "Cal", "Car", "Cor", "Dar", "Del",
  "Dor", "El", "Em", "Er", "Fal", "Fen", "Fin", "Gal", "Gar", "Gwen", "Hal",
  "Har", "Hel", "Il", "Is", "Jan", "Jor", "Jul", "Kal", "Kar", "Kel", "Lan",
  "Lor", "Lu", "Mal", "Mar", "Mel", "Nal", "Nor", "Ol", "Or", "Pal", "Per",
  "Quin", "Ral", "Ren", "Ros", "Sal", "Sel", "Sor", "Tal", "Tor", "Ul", "Val",
  "Ver", "Wal", "Wil", "Yor", "Zel",
)  # fmt: skip
_ENDS = (
  "a", "an", "ana", "anne", "ar", "ard", "as", "ea", "ek", "ela", "ella", "en",
  "ena", "er", "eth", "ia", "ian", "ic", "ida", "iel", "ik", "ila", "in", "ina",
  "ira", "is", "ita", "ix", "o", "ola", "on", "ona", "or", "ora", "os", "otta",
  "ric", "us", "wen", "yn",
)  # fmt: skip

# No start is a prefix of another: all names differ. Neighbours differ in both
# start and end.
NAMES = tuple(
  start + _ENDS[(index + shift) % len(_ENDS)]
  for shift in range(len(_ENDS))
  for index, start in enumerate(_STARTS)
)

RELATIONS = (
  "teacher", "wife", "boss", "mentor", "doctor", "neighbour", "landlord",
  "tenant", "coach", "lawyer", "barber", "dentist", "cousin", "uncle", "aunt",
  "nephew", "niece", "brother", "sister", "father", "mother", "son", "daughter",
  "husband", "friend", "rival", "partner", "colleague", "assistant",
  "secretary", "tutor", "student", "apprentice", "client", "patient", "nurse",
  "driver", "gardener", "tailor", "baker", "banker", "editor", "publisher",
  "agent", "manager", "trainer", "guide", "host", "guest", "sponsor",
)  # fmt: skip
