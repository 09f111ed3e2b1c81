//! Attention over a paged KV cache on the CPU, in float32 or bfloat16, and what a step computes beside it: rotary
//! embeddings, norms, activations, linear layers by weights in floats ([`PackedWeight`]) or in few bits ([`QuantizedWeight`]),
//! recurrent layers ([`Attention::gated_delta`], [`Attention::mamba2`], [`Attention::short_conv`]), and the choice of tokens
//! by their logits ([`Draws`]).
//!
//! For decodes, prefills and whatever a step has of both: keys and values are read where they lie, through
//! the block table, once for all the query heads that share them. The softmax is computed online (Milakov
//! and Gimelshein, 2018, arXiv:1805.02867); long contexts are cut into parts that threads share and that
//! are merged at the end (Flash-Decoding, Dao et al., 2023).
//!
//! # The contract in short
//!
//! * **A row depends on itself alone.** Where tiles and parts begin depends on positions only, so the
//!   bits of a row are the same in every batch and with any number of threads.
//! * **A lane is a key, or an element of a value.** The keys of a tile are transposed once for all rows that read them: the
//!   query heads that share a KV head, drafts, and all sequences that stand on the same blocks. Rows take turns, so a
//!   single one fills the vectors. Sums have 16 lanes at every level of instructions.
//! * **One source, four builds.** The arithmetic in float32 is compiled for AVX-512, for AVX2 with FMA, for NEON and for
//!   whatever the target has, chosen when it runs ([`Isa`]): all give the same bits.
//! * **bfloat16 is float32 that was rounded**: the bits are those of float32 over the same numbers, rounded
//!   once at the end. Not so where AVX-512 BF16 or AMX multiply bfloat16 itself: there the weights are rounded before
//!   they meet the values, as torch and flash-attn do, and values have to be finite. In linear layers each of its
//!   products is rounded as that instruction does, but for AVX-512 BF16 on Intel's processors, where float32 is faster.
//!   With AMX, sums take 32 inputs at a time, even and odd ones apart, and the bias last, for a single row too; denormal
//!   numbers are zeros there.
//! * **A cache of 8-bit integers stays one.** Where bfloat16 is multiplied itself, queries and weights meet it as 16-bit
//!   integers with a scale, whose products are added up exactly. Elsewhere the bits are those of a cache of its floats.
//! * **Quantised weights keep their bits.** Each 32 numbers of a row are rounded to integers of 8 bits, and products with
//!   the codes are added up as integers. All builds give the same bits there, too; rounding the rows is the only error
//!   beyond float32's, about half a per cent for normally distributed rows. With AMX, tiles multiply many rows and vectors
//!   few, with the same bits.
//! * **A shared block is read once.** Parts of the cache that several sequences have in common are scored for
//!   all of them while they are in the processor's cache ([`Step::share`]).
//! * **A state depends on its sequence alone.** Recurrent layers compute tokens one after another, so a state and the
//!   outputs have the same bits however the sequence is cut into steps ([`StateStep`]). A lane is an output: nothing is
//!   added up across lanes.
//! * **Nothing is trusted.** Every array is checked against every other; what does not fit is an
//!   [`Error`] that names the value, and nothing has been written then.
//!
//! ```
//! use cpu_kernels::{Attention, CacheShape, Options, Query, Rows, Sequences, Step};
//!
//! // A cache of two blocks of two positions, one KV head of dimension 1.
//! let shape = CacheShape { num_blocks: 2, block_size: 2, kv_heads: 1, dim_k: 1, dim_v: 1 };
//! let (keys, values) = (vec![0.0; 4], vec![1.0, 2.0, 3.0, 9.0]);
//! // One new token, the third of its sequence, whose first block is block 0.
//! let sequences = Sequences { starts: &[0, 1], lens: &[3], tables: &[0, 1], width: 2 };
//! let step = Step::new(&sequences, 2, 2)?;
//! let (query, mut out) = ([5.0, 5.0], [0.0; 2]);
//! let query = Query { rows: Rows::new(&query, 1, 2, 2)?, heads: 2 };
//! let options = Options { scaling: 1.0, window: None, first_key: 0, softcap: None, sinks: None };
//! Attention::new(1)?.attend(&step, &shape, &keys, &values, query, &options, &mut out)?;
//! assert_eq!(out, [2.0, 2.0]); // equal scores: the mean of 1, 2 and 3
//! # Ok::<(), cpu_kernels::Error>(())
//! ```
#![deny(unsafe_code)]
#![allow(clippy::needless_range_loop)] // lanes of several arrays go side by side, by their index

mod activation;
mod adapters;
#[cfg(target_arch = "x86_64")]
#[allow(unsafe_code)] // instructions that Rust has no name for
mod amx;
#[cfg(all(target_arch = "x86_64", feature = "modelled-tiles"))]
#[allow(unsafe_code)] // memory is read and written as tiles
mod amx_model;
mod attention;
#[cfg(target_arch = "x86_64")]
#[allow(unsafe_code)] // memory is read and written as vectors
mod bf16;
#[cfg(target_arch = "x86_64")]
#[allow(unsafe_code)] // memory is read as vectors
mod bf16_dots;
#[cfg(target_arch = "x86_64")]
#[allow(unsafe_code)] // memory is read and written as vectors
mod bf16_fma;
mod builds;
mod cache_tiles;
mod choice;
mod dispatch;
#[allow(unsafe_code)] // parts of an array, for several threads
mod divided;
mod dots;
mod draw;
mod element;
mod error;
mod exponential;
mod float8_weight;
mod floats;
mod gated_delta;
mod gated_norm;
#[cfg(target_arch = "x86_64")]
#[allow(unsafe_code)] // memory is read and written as vectors
mod int8;
mod isa;
mod job;
mod kernel;
#[allow(unsafe_code)] // scores are read and written as vectors
mod key_lanes;
mod lanes;
mod linear;
mod linear_task;
mod lines;
mod logits;
mod logprobs;
mod mamba;
mod norm;
#[allow(unsafe_code)] // a function of C is called
mod openmp;
mod packed_weight;
mod parts;
#[allow(unsafe_code)] // other threads work with what the caller borrows
mod pool;
mod product;
mod quantise;
mod quantized_format;
mod quantized_linear;
mod quantized_panels;
mod quantized_product;
mod quantized_rows;
#[cfg(target_arch = "x86_64")]
#[allow(unsafe_code)] // instructions that Rust has no name for
mod quantized_tiles;
mod quantized_weight;
#[allow(unsafe_code)] // other threads work with what the caller borrows
mod region;
mod rotation;
mod rows;
mod short_conv;
mod softmax;
mod softplus;
mod state_tile;
mod states;
mod step;
mod stored;
mod threads;
#[cfg(target_arch = "x86_64")]
#[allow(unsafe_code)] // instructions that Rust has no name for
mod tile_product;
#[cfg(target_arch = "x86_64")]
mod tile_shapes;
#[cfg(target_arch = "x86_64")]
#[allow(unsafe_code)] // instructions that Rust has no name for
mod tiles;
#[allow(unsafe_code)] // memory that weights divide among them
mod weight_memory;
mod write;

pub use activation::Activation;
pub use adapters::{AdapterMatrices, Adapters};
pub use attention::{Attention, Options, Query};
pub use dispatch::Attend;
pub use draw::Draws;
pub use element::Element;
pub use error::Error;
pub use gated_delta::{DeltaLayer, DeltaRows, DeltaShape, KeySharing};
pub use gated_norm::{GateFunction, GatedNorm};
pub use isa::Isa;
pub use logprobs::{Logprobs, Reported};
pub use mamba::{Mamba2Shape, MambaRows, MambaWeights};
pub use packed_weight::PackedWeight;
pub use pool::limit_threads;
pub use quantized_format::QuantizedFormat;
pub use quantized_weight::QuantizedWeight;
pub use rotation::{HeadNorm, Layout, NewRows, Order, Rotation};
pub use rows::{Gate, Map, Norm};
pub use short_conv::{ConvRows, ShortConv};
pub use states::StateStep;
pub use step::{CacheShape, Sequences, SharedPrefixes, Step};
pub use stored::Stored;
pub use write::{CacheArrays, Rows};
