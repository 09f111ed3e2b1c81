"""Decoders: a family is a row of a table, a layer is written once.

| file | what |
|---|---|
| `spec`, `recurrent` | what a model is, as frozen data; mixers that keep a state |
| `settings`, `rotary_settings` | read a configuration; every key is accounted for |
| `families` | the table: from a configuration to a spec, and the names of tensors |
| `names`, `checkpoint`, `weights` | a layer's weights in files; every tensor is accounted for |
| `decoder`, `layers`, `recurrent_layers` | the forward pass |
| `kernels` | the operations that layers ask for; `torch_kernels` and `cpu_kernels` have them |
| `torch_states`, `cpu_states` | those of recurrent layers |
| `rotary` | frequencies and angles |
| `loading` | from a folder to a spec, and to a decoder |
"""
