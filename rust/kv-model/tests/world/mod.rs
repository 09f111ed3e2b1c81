//! The block manager, driven by the actions of the model.

use std::collections::BTreeSet;
use std::fmt::Debug;

use kv_core::{
    BlockManager, BlockState, Config, Pin, PlanHandle, PoolUsage, Prefill, Reserve, SeqHandle,
    SeqKey, Transfer,
};
use kv_model::{Action, Answer, BlockLife, Bounds, NUM_SEQUENCES, Remapping, State, Tokens};

/// A difference.
type Outcome = Result<(), String>;

fn same<T: PartialEq + Debug>(what: &str, manager: T, model: T) -> Outcome {
    if manager == model {
        return Ok(());
    }
    Err(format!(
        "{what}: {manager:?} of the manager, {model:?} of the model"
    ))
}

/// The manager, and what its caller holds.
pub(crate) struct World {
    manager: BlockManager,
    sequences: [Option<SeqHandle>; NUM_SEQUENCES],
    /// Freed ones that a step still has.
    dropped: [Option<u64>; NUM_SEQUENCES],
    plans: Vec<PlanHandle>,
    pin: Option<Pin>,
    transfer: Option<Transfer>,
}

impl World {
    pub(crate) fn new(bounds: Bounds) -> Self {
        let config = Config {
            partial_reuse: false,
            ..Config::new(bounds.num_blocks, bounds.block_size)
        };
        Self {
            manager: BlockManager::new(config).expect("a small pool"),
            sequences: [const { None }; NUM_SEQUENCES],
            dropped: [None; NUM_SEQUENCES],
            plans: Vec::new(),
            pin: None,
            transfer: None,
        }
    }

    fn key(&self, seq: usize) -> SeqKey {
        let handle = self.sequences[seq].as_ref();
        handle.expect("a live sequence").key()
    }

    /// Does what the model did; its answer must be the same.
    pub(crate) fn apply(&mut self, action: Action, answer: &Answer) -> Outcome {
        let refused = |error: kv_core::Error| format!("{action:?} is refused: {error}");
        match action {
            Action::Create { seq, prompt } => {
                let tokens = prompt.iter().collect();
                let handle = self.manager.sequence(tokens, b"", true);
                self.sequences[seq] = Some(handle.map_err(refused)?);
                self.dropped[seq] = None;
            }
            Action::BeginStep => {
                let plan = self.manager.begin_step(64).map_err(refused)?;
                self.plans.push(plan);
            }
            Action::Prefill { seq, max_tokens } => {
                return self.prefill(seq, max_tokens, answer).map_err(refused)?;
            }
            Action::Decode { seq } => {
                let (key, plan) = (self.key(seq), self.newest().key());
                let rejected = self.manager.decode(plan, &[key], 0).map_err(refused)?;
                let is_rejected = matches!(answer, Answer::NoRoom { .. });
                return same("rejected decodes", rejected.len(), usize::from(is_rejected));
            }
            Action::Commit { sampled } => return self.commit(sampled, answer).map_err(refused)?,
            Action::Rollback => {
                let plan = self.plans.pop().expect("an open step");
                self.manager.rollback(plan.key()).map_err(refused)?;
            }
            Action::Free { seq } => {
                let handle = self.sequences[seq].take().expect("a live sequence");
                self.dropped[seq] = Some(handle.id());
                drop(handle);
            }
            Action::Reset { seq } => self.manager.reset(self.key(seq)).map_err(refused)?,
            Action::Pin { seq } => {
                self.pin = Some(self.manager.pin(self.key(seq)).map_err(refused)?);
            }
            Action::MatchPrefix { tokens } => {
                let tokens: Vec<u32> = tokens.iter().collect();
                let pin = self.manager.match_prefix(&tokens, b"");
                self.pin = Some(pin.map_err(refused)?);
            }
            Action::Attach { seq } => {
                let key = self.key(seq);
                let pin = self.pin.as_ref().expect("a pin");
                self.manager.attach(key, pin).map_err(refused)?;
            }
            Action::Unpin => self.pin = None,
            Action::Evict => drop(self.manager.evict(1)),
            Action::Reserve { seq } => return self.reserve(seq, answer).map_err(refused)?,
            Action::Complete { blocks } => {
                let transfer = self.transfer.take().expect("an open transfer");
                let reused = self
                    .manager
                    .complete(transfer.key(), blocks)
                    .map_err(refused)?;
                return same("reused tokens", &Answer::Reused(reused), answer);
            }
        }
        Ok(())
    }

    fn newest(&self) -> &PlanHandle {
        self.plans.last().expect("an open step")
    }

    fn prefill(
        &mut self,
        seq: usize,
        max_tokens: usize,
        answer: &Answer,
    ) -> Result<Outcome, kv_core::Error> {
        let (key, plan) = (self.key(seq), self.newest().key());
        let planned = match self.manager.prefill(plan, key, max_tokens, None)? {
            Prefill::Planned {
                cached_tokens,
                tokens,
                samples,
            } => Answer::Planned {
                cached_tokens,
                tokens,
                samples,
            },
            Prefill::NoRoom { needed, available } => Answer::NoRoom { needed, available },
            Prefill::Loading { .. } => Answer::Loading,
            other => return Ok(Err(format!("a prefill is answered {other:?}"))),
        };
        Ok(same("the answer to a prefill", &planned, answer))
    }

    fn reserve(&mut self, seq: usize, answer: &Answer) -> Result<Outcome, kv_core::Error> {
        let key = self.key(seq);
        let num_tokens = self.manager.view(key)?.tokens.len();
        let reserved = match self.manager.reserve(key, num_tokens)? {
            Reserve::Reserved(transfer) => {
                let blocks = transfer
                    .blocks()
                    .iter()
                    .map(|loading| loading.block.get() as u8);
                let blocks = Answer::Reserved(blocks.collect());
                self.transfer = Some(transfer);
                blocks
            }
            Reserve::NoRoom { needed, available } => Answer::NoRoom { needed, available },
            other => return Ok(Err(format!("a reservation is answered {other:?}"))),
        };
        Ok(same("the answer to a reservation", &reserved, answer))
    }

    fn commit(&mut self, sampled: Tokens, answer: &Answer) -> Result<Outcome, kv_core::Error> {
        let plan = self.plans.remove(0);
        let ids: [Option<u64>; NUM_SEQUENCES] = std::array::from_fn(|seq| {
            let live = self.sequences[seq].as_ref().map(SeqHandle::id);
            live.or(self.dropped[seq])
        });
        let sampled: Vec<u32> = sampled.iter().collect();
        let remappings = self.manager.commit(plan.key(), &sampled)?.into_iter();
        let remappings = remappings.map(|of| Remapping {
            seq: ids
                .iter()
                .position(|id| *id == Some(of.sequence))
                .unwrap_or(NUM_SEQUENCES),
            index: of.index,
            old_block: of.old_block.get() as u8,
            new_block: of.new_block.get() as u8,
        });
        let merged = Answer::Merged(remappings.collect());
        Ok(same("remappings", &merged, answer))
    }

    /// Compares everything that can be observed.
    pub(crate) fn compare(&mut self, state: &State, life: &BlockLife) -> Outcome {
        self.manager.drain_deferred();
        self.manager.check()?;
        same("usage", self.manager.usage(), usage(state))?;
        let queued = self.manager.queued().into_iter();
        let queued: Vec<u8> = queued.map(|block| block.get() as u8).collect();
        let queue = [&state.pool.free[..], &state.pool.evictable].concat();
        same("the free queue", queued, queue)?;
        for (id, block) in (0..).zip(&state.pool.blocks) {
            let refs = (self.manager.refs(id), self.manager.seq_refs(id));
            let counted = (Ok(block.refs().into()), Ok(block.seq_refs.into()));
            same(&format!("references of block {id}"), refs, counted)?;
            let is_evictable = self.manager.state(id) == Ok(BlockState::Evictable);
            let of_model = block.refs() == 0 && block.cached.is_some();
            same(&format!("block {id} is evictable"), is_evictable, of_model)?;
        }
        for (seq, sequence) in state.live().filter(|(_, sequence)| !sequence.dropped) {
            let view = self.manager.view(self.key(seq));
            let view = view.map_err(|error| error.to_string())?;
            let table: Vec<u8> = view
                .table(0)
                .flatten()
                .map(|block| block.get() as u8)
                .collect();
            same(&format!("table of sequence {seq}"), &table, &sequence.table)?;
            let tokens: Vec<u32> = sequence.tokens.iter().collect();
            same("its tokens", view.tokens, &tokens)?;
            let (computed, planned) = (view.num_computed_tokens, view.num_planned_tokens);
            let progress = (
                computed,
                planned,
                view.num_pending_tokens,
                view.num_registered_blocks,
            );
            let (computed, planned) = (sequence.computed, sequence.planned);
            let of_model = (computed, planned, sequence.pending, sequence.registered);
            same("its progress", progress, of_model)?;
        }
        same(
            "cached prefixes",
            self.cached(),
            self.cached_in(state, life),
        )
    }

    fn cached(&mut self) -> BTreeSet<u128> {
        self.manager.cached_hashes().into_iter().collect()
    }

    /// The hashes of the prefixes that are cached in the model.
    fn cached_in(&self, state: &State, life: &BlockLife) -> BTreeSet<u128> {
        let hasher = self.manager.hasher();
        let is_ready = |block: &&kv_model::Block| block.is_ready();
        let prefixes = state
            .pool
            .blocks
            .iter()
            .filter(is_ready)
            .filter_map(|of| of.cached);
        let hash = |prefix: Tokens| {
            let tokens: Vec<u32> = prefix.iter().collect();
            let blocks = tokens.chunks(life.bounds.block_size);
            blocks.fold(hasher.root(b""), |parent, block| {
                hasher.child(parent, block)
            })
        };
        prefixes.map(hash).collect()
    }
}

/// Blocks by state.
fn usage(state: &State) -> PoolUsage {
    let (free, evictable) = (state.pool.free.len(), state.pool.evictable.len());
    let active = state
        .pool
        .blocks
        .iter()
        .filter(|block| block.seq_refs > 0)
        .count();
    let loading = state
        .pool
        .blocks
        .iter()
        .filter(|block| block.is_loading)
        .count();
    PoolUsage {
        free,
        evictable,
        active,
        pinned: state.pool.blocks.len() - free - evictable - active - loading,
        loading,
    }
}
