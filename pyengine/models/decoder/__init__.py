"""Decoders: a family is a row of a table, a layer is written once.

| file | what |
|---|---|
| `spec` | what a model is, as frozen data |
| `settings`, `rotary_settings` | read a configuration; every key is accounted for |
| `families` | the table: from a configuration to a spec, and the names of tensors |
| `names`, `checkpoint`, `weights` | a layer's weights in files; every tensor is accounted for |
| `decoder`, `layers` | the forward pass |
| `kernels` | the operations that layers ask for; `torch_kernels` and `cpu_kernels` have them |
| `rotary` | frequencies and angles |
| `loading` | from a folder to a spec, and to a decoder |
"""
