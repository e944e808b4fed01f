# shellcheck shell=bash
# What the launch scripts share; they source it.
#
# Exit statuses of a run: 0 done, 2 a mistake of the user's, 3 diverged,
# 4 stopped and saved, 5 another process was lost. Of a script: the same.

DRY_RUN=${DRY_RUN:-0} # 1: print what would be done, do nothing.
MAX_RESTARTS=${MAX_RESTARTS:-100}

fail() {
  echo "error: $*" >&2
  exit 2
}

# need VARIABLE WHAT: the variable must be set.
need() {
  [[ -n ${!1:-} ]] || fail "$1 is missing: $2"
}

# need_number VARIABLE: it must be a whole number from 1.
need_number() {
  [[ ${!1} =~ ^[1-9][0-9]*$ ]] || fail "$1=${!1} is not a whole number of at least 1"
}

# need_flags FLAGS ARGUMENTS: the arguments are flags, and these among them.
need_flags() {
  local argument flag flags=$1
  shift
  for argument; do
    [[ $argument == --* ]] || fail "$argument is not a flag; flags begin with --"
  done
  for flag in $flags; do
    [[ " $*" == *" $flag="* ]] || fail "$flag=... is missing"
  done
}

# Prints words so that a shell reads them back as they are.
quoted() {
  local word words="" quote="'" escaped="'\\''"
  for word; do
    if [[ ! $word =~ ^[A-Za-z0-9_./:=,@%+-]+$ ]]; then
      word="'${word//$quote/$escaped}'"
    fi
    words+="${words:+ }$word"
  done
  printf '%s\n' "$words"
}

# Does what it is given, or prints it.
run() {
  if [[ $DRY_RUN == 1 ]]; then
    quoted "$@"
  else
    "$@"
  fi
}

# Whether a run that ended so may be started again. Above 128 a signal ended it:
# JAX kills a process that waits for one that is gone. 255 is a lost connection.
again() {
  (($1 == 4 || $1 == 5 || $1 > 128))
}

need_number MAX_RESTARTS
