//! The file `pyengine/_kv`: one shared library with two Python modules that know nothing of each other.
//!
//! maturin puts one library into a wheel. Python finds `pyengine._kv` in it by the file's name, and `pyengine/_cpu.py`
//! finds `pyengine._cpu` (PEP 489, "Multiple modules in one library").
#![forbid(unsafe_code)]

// Linked for the functions `PyInit__cpu` and `PyInit__kv` that they export.
use cpu_py as _;
use kv_py as _;
