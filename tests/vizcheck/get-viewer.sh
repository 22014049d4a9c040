#!/bin/sh
# Downloads an original MemoryViz.js (PyTorch 2.6.0) into memtrace's cache folder, or to $1, and prints its path. PyPI's
# wheels leave the file out; Debian's source package has it. Needs apt on Debian or Ubuntu with Debian's keyring, but
# not root.
set -eu

VERSION=2.6.0+dfsg-7
SHA256=313cf4c0e971055e37da051763f042ed149fc5e56ad4a598edadf03b2da71ee5
KEYRING=/usr/share/keyrings/debian-archive-keyring.gpg

out=${1:-${MEMTRACE_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/memtrace}/viewer/MemoryViz.js}
if [ -e "$out" ]; then
  echo "$out"
  exit 0
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/lists/partial" "$work/archives/partial" "$(dirname "$out")"
# The mirror that this machine's apt uses; trixie's sources come from it.
mirror=$(apt-get indextargets --format '$(REPO_URI)' | grep -v security | head -n 1)
echo "deb-src [signed-by=$KEYRING] ${mirror:?no apt mirror found} trixie main" >"$work/sources"

apt() {
  apt-get -qq -o Dir::Etc::sourcelist="$work/sources" -o Dir::Etc::sourceparts=- \
    -o Dir::State::lists="$work/lists" -o Dir::Cache="$work" -o APT::Sandbox::User="$(id -un)" "$@"
}
cd "$work"
apt update >&2
apt source --download-only "pytorch=$VERSION" >&2
tar -xJOf pytorch_*.orig.tar.xz --wildcards '*/torch/utils/viz/MemoryViz.js' >viewer.js
echo "$SHA256  viewer.js" | sha256sum --check --quiet >&2
mv viewer.js "$out.$$"
mv "$out.$$" "$out"
echo "$out"
