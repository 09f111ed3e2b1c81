"""From a scheduled step to sampled tokens: input buffers, forward pass, CUDA graphs, sampler."""
