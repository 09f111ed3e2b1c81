#!/bin/sh
# RUSTC_WRAPPER for Windows wheels. maturin passes the linker a list of exports with the module's dotted name
# (PyInit_pyengine._kv), which is no symbol. rustc's own list is right, so this replaces maturin's by an option
# that rustc passes anyway.
for argument in "$@"; do
    shift
    case $argument in
        link-arg=*.def) argument="link-arg=-Wl,--nxcompat" ;;
    esac
    set -- "$@" "$argument"
done
exec "$@"
