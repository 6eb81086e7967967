# Run a compiler (after the first argument), keep what it reports in OBJECT.txt, and show it only if it fails.
report=$1.txt
shift
"$@" > "$report" 2>&1 || { cat "$report"; exit 1; }
