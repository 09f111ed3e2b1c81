#!/bin/sh
# Builds a Python for musl in the folder $1 from Debian's sources, with the modules that NumPy and pyengine need.
# Needs Debian or Ubuntu with musl-tools, but not root: nothing is installed.
set -eu
root=$1
test -x "$root/python" && exit 0
command -v musl-gcc > /dev/null || { echo "musl-gcc was not found: apt-get install musl-tools"; exit 1; }
state=$(mktemp -d)
trap 'rm -rf "$state"' EXIT
mkdir -p "$state/lists/partial" "$state/include" "$root"
echo "deb-src http://deb.debian.org/debian bookworm main" > "$state/sources"
apt() {
    apt-get -q -o Dir::State::lists="$state/lists" -o Dir::Etc::sourcelist="$state/sources" -o Dir::Etc::sourceparts=- \
        "$@" > "$state/log" 2>&1 || { cat "$state/log"; exit 1; }
}
apt update
(cd "$state" && apt source --download-only python3.11)
tar -x --strip-components 1 -C "$root" -f "$state"/python3.11_*.orig.tar.gz
for name in linux asm-generic x86_64-linux-gnu/asm; do # the kernel's headers, which musl-gcc lacks
    ln -s "/usr/include/$name" "$state/include/"
done
cd "$root"
sed -i 's/MULTIARCH=$($CC --print-multiarch.*/MULTIARCH=""/' configure # musl-gcc answers like gcc
cat > Modules/Setup.local << END
*static*
_bisect _bisectmodule.c
_blake2 _blake2/blake2module.c _blake2/blake2b_impl.c _blake2/blake2s_impl.c
_contextvars _contextvarsmodule.c
_csv _csv.c
_datetime _datetimemodule.c
_heapq _heapqmodule.c
_json _json.c
_md5 md5module.c
_opcode _opcode.c
_pickle _pickle.c
_posixsubprocess _posixsubprocess.c
_queue _queuemodule.c
_random _randommodule.c
_sha1 sha1module.c
_sha256 sha256module.c
_sha3 _sha3/sha3module.c
_sha512 sha512module.c
_socket socketmodule.c
_struct _struct.c
array arraymodule.c
binascii binascii.c
fcntl fcntlmodule.c
math mathmodule.c
mmap mmapmodule.c
select selectmodule.c
END
CC=musl-gcc PKG_CONFIG=false CPPFLAGS="-I$state/include" OPT=-O1 ./configure -q --build=x86_64-linux-musl > "$state/log" 2>&1 &&
    make -s -j2 python >> "$state/log" 2>&1 || { tail -n 30 "$state/log"; exit 1; }
