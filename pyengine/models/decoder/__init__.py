"""Decoders: a family is a row of a table, a layer is written once.

`loading` goes from a folder to a `DecoderSpec` and a `Decoder`; `families` is the table; a kernel
set (`kernels`) does the arithmetic of a device.
"""
