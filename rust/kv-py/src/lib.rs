//! `pyengine._kv`: the block manager for Python, the KV store, and guesses at what comes next.
//! Thin: conversions, the lock, the errors.
#![deny(unsafe_code)]

mod answers;
mod batch;
mod bounded;
mod buffers;
mod errors;
mod events;
mod explanation;
mod exported;
mod guarded;
mod items;
mod kv_blocks;
mod lists;
mod locked;
mod manager;
mod memory;
mod numbers;
mod opened_store;
mod pin;
mod plan;
mod prefixes;
mod replica_index;
mod sequence;
mod snapshot;
mod store;
mod stored_prefix;
mod suffix_index;
mod switch;
mod tokens;
mod trace;
mod trace_player;
mod transfer;

use pyo3::prelude::*;

/// The KV-cache block manager and the KV store, written in Rust.
#[pymodule(gil_used = false)]
fn _kv(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    forks::count_forks()?;
    errors::add_to(module)?;
    module.add_class::<manager::BlockManager>()?;
    module.add_class::<sequence::Sequence>()?;
    module.add_class::<pin::Pin>()?;
    module.add_class::<transfer::Transfer>()?;
    module.add_class::<transfer::Evicted>()?;
    module.add_class::<plan::StepPlan>()?;
    module.add_class::<buffers::StepBuffers>()?;
    module.add_class::<prefixes::SharedPrefixes>()?;
    module.add_class::<events::Stored>()?;
    module.add_class::<events::Removed>()?;
    module.add_class::<events::Cleared>()?;
    module.add_class::<events::Lost>()?;
    module.add_class::<explanation::Explanation>()?;
    module.add_class::<answers::PoolUsage>()?;
    module.add_class::<answers::Stats>()?;
    module.add_class::<answers::Remapping>()?;
    module.add_class::<answers::Prefilled>()?;
    module.add_class::<answers::Extended>()?;
    module.add_class::<answers::NoRoom>()?;
    module.add_class::<answers::NoBudget>()?;
    module.add_class::<answers::Loading>()?;
    module.add_class::<answers::Computing>()?;
    module.add_class::<answers::StateUsage>()?;
    module.add_class::<store::KVStore>()?;
    module.add_class::<stored_prefix::StoredPrefix>()?;
    module.add_class::<kv_blocks::KVBlocks>()?;
    module.add_class::<replica_index::ReplicaIndex>()?;
    module.add_class::<suffix_index::SuffixIndex>()?;
    module.add_class::<snapshot::PoolSnapshot>()?;
    module.add_class::<trace::ReplayReport>()?;
    module.add_class::<trace::Divergence>()?;
    module.add_class::<trace_player::TracePlayer>()?;
    module.add_class::<trace_player::ReplayedOperation>()?;
    module.add_class::<trace_player::ReplayedSequence>()?;
    module.add_class::<trace_player::BlockChange>()?;
    module.add_function(wrap_pyfunction!(store::kv_fingerprint, module)?)?;
    module.add_function(wrap_pyfunction!(trace::replay, module)?)
}
