//! Answers of the manager: frozen values.

use kv_core::{
    BlockId, BlockState, Extend, Prefill, Remapping as CoreRemapping, Stats as CoreStats,
};
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// The number of blocks in each state; `free + evictable + active + pinned + loading == num_blocks`.
#[pyclass(frozen, eq, module = "pyengine._kv")]
#[derive(PartialEq)]
pub(crate) struct PoolUsage(pub(crate) kv_core::PoolUsage);

#[pymethods]
impl PoolUsage {
    /// Blocks that are neither referenced nor cached.
    #[getter]
    fn free(&self) -> usize {
        self.0.free
    }

    /// Cached blocks without a reference; they can be matched, and are evicted least recently used first.
    #[getter]
    fn evictable(&self) -> usize {
        self.0.evictable
    }

    /// Blocks in the tables of live sequences.
    #[getter]
    fn active(&self) -> usize {
        self.0.active
    }

    /// Blocks referenced only by pins, open steps and transfers.
    #[getter]
    fn pinned(&self) -> usize {
        self.0.pinned
    }

    /// Blocks that transfers will fill.
    #[getter]
    fn loading(&self) -> usize {
        self.0.loading
    }

    /// Blocks that can be allocated: free + evictable.
    #[getter]
    fn available(&self) -> usize {
        self.0.available()
    }

    /// Number of blocks in the pool.
    #[getter]
    fn num_blocks(&self) -> usize {
        self.0.num_blocks()
    }

    fn __repr__(&self) -> String {
        let kv_core::PoolUsage {
            free,
            evictable,
            active,
            pinned,
            loading,
        } = self.0;
        let held = format!("active={active}, pinned={pinned}, loading={loading}");
        format!("PoolUsage(free={free}, evictable={evictable}, {held})")
    }
}

/// The name of a block's state.
pub(crate) fn state_name(state: BlockState) -> &'static str {
    match state {
        BlockState::Free => "free",
        BlockState::Evictable => "evictable",
        BlockState::Active => "active",
        BlockState::Pinned => "pinned",
        BlockState::Loading => "loading",
    }
}

macro_rules! stats {
    ($($name:ident),* $(,)?) => {
        /// Monotonic counters since the manager was created.
        #[pyclass(frozen, module = "pyengine._kv")]
        pub(crate) struct Stats(pub(crate) CoreStats);

        #[pymethods]
        impl Stats {
            $(
                #[getter]
                fn $name(&self) -> u64 {
                    self.0.$name
                }
            )*

            /// Every counter by its name.
            fn as_dict<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
                let dict = PyDict::new(py);
                for (name, count) in self.0.each() {
                    dict.set_item(name, count)?;
                }
                Ok(dict)
            }

            fn __repr__(&self) -> String {
                let counters: Vec<_> = self.0.each().map(|(name, count)| format!("{name}={count}")).collect();
                format!("Stats({})", counters.join(", "))
            }
        }
    };
}

stats!(
    prompt_tokens,
    cached_tokens,
    computed_tokens,
    hit_blocks,
    in_flight_blocks,
    already_cached_blocks,
    rematches,
    partial_hits,
    partial_tokens,
    allocated_blocks,
    registered_blocks,
    evicted_blocks,
    discarded_blocks,
    slid_blocks,
    merged_blocks,
    taken_over_blocks,
    copied_blocks,
    draft_tokens,
    accepted_draft_tokens,
    collisions,
    hashed_blocks,
    committed_steps,
    rolled_back_steps,
    reserved_blocks,
    restored_blocks,
    restored_tokens,
    failed_transfers,
    saved_snapshots,
    loaded_snapshots,
    merged_snapshots,
    evicted_snapshots,
    replayed_tokens,
);

/// Frozen values with an attribute for each field, which show themselves as they would be called.
macro_rules! values {
    ($($(#[$doc:meta])* $name:ident { $($(#[$what:meta])* $field:ident: $type:ty),* $(,)? })*) => {
        $(
            $(#[$doc])*
            #[pyclass(frozen, get_all, module = "pyengine._kv")]
            pub(crate) struct $name {
                $($(#[$what])* pub(crate) $field: $type,)*
            }

            #[pymethods]
            impl $name {
                fn __repr__(&self) -> String {
                    let fields: &[String] = &[$(
                        format!("{}={}", stringify!($field), $crate::answers::shown(&self.$field))
                    ),*];
                    format!("{}({})", stringify!($name), fields.join(", "))
                }
            }
        )*
    };
}

pub(crate) use values;

/// A field's value in Python's words.
pub(crate) fn shown(value: &impl std::fmt::Debug) -> String {
    match format!("{value:?}").as_str() {
        "true" => "True".into(),
        "false" => "False".into(),
        other => other.into(),
    }
}

values! {
    /// A table entry that a commit changed to the block that already held the same prefix.
    Remapping {
        /// `Sequence.id`.
        sequence_id: u64,
        /// The layer group whose table it is in.
        group: usize,
        /// The index in that table.
        index: usize,
        /// The duplicate, which was released.
        old_block: u32,
        /// The block that already held the prefix.
        new_block: u32,
    }

    /// Snapshots of states; their blocks are also counted by `PoolUsage`.
    StateUsage {
        /// Number of cached snapshots.
        snapshots: usize,
        /// Number of their blocks.
        blocks: usize,
        /// Of these, evictable blocks of snapshots kept only in case a later request diverges there.
        spare_blocks: usize,
        /// Number of blocks into which open steps write snapshots.
        pending_blocks: usize,
    }

    /// The tokens were planned.
    Prefilled {
        /// Number of tokens that this call reused from the cache; they are neither charged nor computed.
        num_cached_tokens: usize,
        /// Number of tokens to compute, which were charged to the budget.
        num_tokens: usize,
        /// True if the step computes the last known token, so that its logits give the next one.
        samples: bool,
    }

    /// The slots are reserved.
    Extended {
        /// Ids of the new blocks at the end of each table: one list per layer group.
        blocks: Vec<Vec<u32>>,
        /// Blocks to copy before any block is written, as (source, destination): the partial block of a fork.
        copies: Vec<(u32, u32)>,
    }

    /// There are too few blocks; nothing was changed.
    NoRoom {
        /// Number of blocks needed: new ones, matched evictable ones, and the reserve.
        needed: usize,
        /// Number of blocks that are free or evictable.
        available: usize,
    }

    /// The token budget (or `max_tokens`) is used up; nothing was changed.
    NoBudget {}

    /// An open step computes tokens of this sequence, and its state would be computed once more; nothing was changed. Call
    /// again once the step is committed.
    Computing {}

    /// A transfer will fill blocks that the call would reuse; nothing was changed. Call again after it has ended.
    Loading {
        /// `Transfer.id`.
        transfer: u64,
    }
}

impl From<kv_core::StateUsage> for StateUsage {
    fn from(usage: kv_core::StateUsage) -> Self {
        Self {
            snapshots: usage.snapshots,
            blocks: usage.blocks,
            spare_blocks: usage.spare_blocks,
            pending_blocks: usage.pending_blocks,
        }
    }
}

impl From<CoreRemapping> for Remapping {
    fn from(remapping: CoreRemapping) -> Self {
        Self {
            sequence_id: remapping.sequence,
            group: remapping.group,
            index: remapping.index,
            old_block: remapping.old_block.get(),
            new_block: remapping.new_block.get(),
        }
    }
}

/// An answer to `prefill` as the Python object of its kind.
pub(crate) fn prefill_answer(py: Python<'_>, answer: Prefill) -> PyResult<Py<PyAny>> {
    Ok(match answer {
        Prefill::Planned {
            cached_tokens,
            tokens,
            samples,
        } => {
            let planned = Prefilled {
                num_cached_tokens: cached_tokens,
                num_tokens: tokens,
                samples,
            };
            Py::new(py, planned)?.into_any()
        }
        Prefill::NoRoom { needed, available } => {
            Py::new(py, NoRoom { needed, available })?.into_any()
        }
        Prefill::Computing => Py::new(py, Computing {})?.into_any(),
        Prefill::NoBudget => Py::new(py, NoBudget {})?.into_any(),
        Prefill::Loading { transfer } => Py::new(py, Loading { transfer })?.into_any(),
    })
}

/// An answer to `extend` as the Python object of its kind.
pub(crate) fn extend_answer(py: Python<'_>, answer: Extend, groups: usize) -> PyResult<Py<PyAny>> {
    Ok(match answer {
        Extend::Extended { blocks, copies } => {
            let table = |group| blocks.iter().skip(group).step_by(groups);
            let ids = |group| table(group).map(|block| block.get()).collect();
            let pair = |(from, to): (BlockId, BlockId)| (from.get(), to.get());
            let extended = Extended {
                blocks: (0..groups).map(ids).collect(),
                copies: copies.into_iter().map(pair).collect(),
            };
            Py::new(py, extended)?.into_any()
        }
        Extend::NoRoom { needed, available } => {
            Py::new(py, NoRoom { needed, available })?.into_any()
        }
    })
}
