#!/bin/sh
# RUSTC_WRAPPER for Windows wheels. maturin gives the linker a list of exports with the dotted name of the
# module (PyInit_pyengine._kv), which no symbol has; rustc's own list is right. An option that rustc gives
# anyway takes its place.
for argument in "$@"; do
    shift
    case $argument in
        link-arg=*.def) argument="link-arg=-Wl,--nxcompat" ;;
    esac
    set -- "$@" "$argument"
done
exec "$@"
