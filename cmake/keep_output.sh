#!/bin/sh
# Runs a compiler and keeps what it says in OBJECT.log, so that a later build that compiles less still has it all. Shows
# what is not just ptxas's account of each kernel.
object=
previous=
for word in "$@"; do
    [ "$previous" = -o ] && object=$word
    previous=$word
done
[ -n "$object" ] || exec "$@"
"$@" >"$object.log" 2>&1
status=$?
grep -vE '^ptxas info|^ +[0-9]+ bytes stack frame' "$object.log" >&2
exit $status
