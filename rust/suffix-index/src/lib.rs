//! Draft tokens from earlier text: the tokens that followed a sequence's suffix where it occurred before, in
//! the sequence itself and in finished ones of its namespace (suffix decoding, prompt lookup).
//!
//! Sequences grow token by token and finish. The output of a finished one goes into an archive of bounded
//! size, which forgets its oldest tokens first. A draft follows the occurrences of the longest suffix: each of
//! its tokens is the most frequent continuation.
//!
//! Occurrences are found by hash chains, as in LZ77 (Ziv and Lempel, 1977): the last position of each
//! n-gram of [`MIN_MATCH`] tokens, and from each position the previous one. A draft compares [`MAX_MATCHES`]
//! positions at most, so its time does not depend on the size of the index.
//!
#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]
#![deny(missing_docs)]

mod suffix_index;
mod token_log;

pub use suffix_index::SuffixIndex;
pub use token_log::{Draft, MAX_MATCH, MAX_MATCHES, MIN_MATCH};
