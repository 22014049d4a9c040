#!/usr/bin/env bash
# Adds one wrong line to a page of a copy of the documentation, and expects that scripts/docs fails. The copy without it passes.
set -uo pipefail
cd "${BASH_SOURCE[0]%/*}/../.." || exit 2
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
git -c safe.directory='*' ls-files -z --cached --others --exclude-standard | xargs -0 sh -c 'for f; do [ ! -f "$f" ] || printf "%s\0" "$f"; done' sh |
    tar --null -cf - -T - | tar -xf - -C "$copy"
cd "$copy" && git init -q && page=docs/glossary.md && cp "$page" original || exit 2
passed=0 failed=0

# expect STATUS NAME [LINES]: builds with LINES at the end of the page.
expect() {
    local status=0
    { cat original; printf '%b' "${3-}"; } >"$page"
    scripts/docs >log 2>&1 || status=1
    if [ "$status" = "$1" ]; then passed=$((passed + 1)); else failed=$((failed + 1)); echo "FAIL $2"; tail -5 log; fi
}
expect 0 'the pages as they are'
expect 1 'a file that does not exist' '\n[a](none.md)\n'
expect 1 'a file outside docs that does not exist' '\n[a](../none.py)\n'
expect 1 'a reference to a file that does not exist' '\n[a][b]\n\n[b]: none.md\n'
expect 1 'a picture that does not exist' '\n![a](images/none.svg)\n'
expect 1 'an anchor that does not exist' '\n[a](tutorial.md#none)\n'
expect 1 'an anchor that a page outside docs lacks' '\n[a](../ARCHITECTURE.md#none)\n'
expect 1 'an address without a domain' '\n[a](https://host/path)\n'
expect 1 'a list that only the forge shows' '\ntext\n- a\n- b\n'
cp original "$page"
echo '# Page' >docs/unlisted.md
expect 1 'a page that docs/README.md does not list'
echo "$passed passed, $failed failed"
[ "$failed" = 0 ]
