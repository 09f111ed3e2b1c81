//! An index of the cached blocks of replicas, for cache-aware routing.
//!
//! A block is identified by its chained hash of 128 bits, which covers the whole prefix up to it. For each
//! hash there is one set of replicas, a bit each: a prompt is looked up once for all of them, in time
//! linear in its blocks. *Cached* blocks follow from KV events. *Pending* blocks are those of requests
//! that were routed to a replica and have not finished: it has them, or will have them soon.
//!
#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]
#![deny(missing_docs)]

mod hash_table;
mod replica_index;

pub use hash_table::BlockHash;
pub use replica_index::{Change, MAX_REPLICAS, ReplicaIndex};
