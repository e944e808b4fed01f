# shellcheck shell=bash
# Sourced by the launch scripts.
#
# Exit statuses of a run, and of a script, are `ExitStatus` of loopjax/errors.py;
# tests/launch compares them.

DRY_RUN=${DRY_RUN:-0} # 1: print the commands, do nothing.
MAX_RESTARTS=${MAX_RESTARTS:-100}

fail() {
  echo "error: $*" >&2
  exit 2
}

# need VARIABLE WHAT: the variable must be set.
need() {
  [[ -n ${!1:-} ]] || fail "$1 is missing: $2"
}

# need_number VARIABLE: the variable must be a whole number of at least 1.
need_number() {
  [[ ${!1} =~ ^[1-9][0-9]*$ ]] || fail "$1=${!1} is not a whole number of at least 1"
}

# need_flags FLAGS ARGUMENTS: the arguments must be flags and include these. The
# scripts and the hosts work in other folders than the caller.
need_flags() {
  local argument flag flags=$1
  shift
  for argument; do
    [[ $argument == --* ]] || fail "$argument is not a flag; flags begin with --"
    [[ ! $argument =~ ^--workdir=[^/~] ]] ||
      fail "$argument is not an absolute path, which all hosts share"
  done
  for flag in $flags; do
    [[ " $*" == *" $flag="* ]] || fail "$flag=... is missing"
  done
}

# Prints words, quoted for a shell.
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

# Runs or prints a command.
run() {
  if [[ $DRY_RUN == 1 ]]; then
    quoted "$@"
  else
    "$@"
  fi
}

# Whether to restart a run with this exit status. Above 128 a signal ended it: JAX
# kills a process that waits for a lost one. 255 is a lost connection.
again() {
  (($1 == 4 || $1 == 5 || $1 > 128))
}

# The exit status of a run of several processes, which has failed with status $1;
# their own are the lines of standard input that are numbers. The least is the
# cause: the others lost that process, and end with 5 or by a signal.
cause() {
  local line least=256
  while read -r line; do
    [[ $line =~ ^[1-9][0-9]*$ ]] && ((line < least)) && least=$line
  done
  echo $((least < 256 ? least : $1))
}

need_number MAX_RESTARTS
