//! Validation of open plans: totals, copies, sequences, shared blocks.

use std::collections::{HashMap, HashSet};

use super::journal::Change;
use super::plan::{Entry, Plan, PrefillWork};
use super::state_work::StateWork;
use super::steps::Steps;
use crate::check::ensure;
use crate::ids::BlockId;
use crate::sequence::{PlanSet, Registered, SampleRow, Sequence};
use crate::state::State;
use crate::table::BlockTable;

/// The effects of the open plans on a sequence, oldest first.
#[derive(Default)]
struct Track {
    plans: PlanSet,
    last_plan: u64,
    planned_end: usize,
    pending: u8,
    /// The row that samples the last pending token.
    sample_row: Option<SampleRow>,
    speculating: bool,
}

impl Steps {
    /// How often open plans hold each block.
    pub(crate) fn plan_pins(&self, state: &State) -> HashMap<BlockId, u32> {
        let mut plan_pins = HashMap::new();
        let pinned = self.open.iter().flat_map(|plan| &plan.pinned).copied();
        let of_states = state.state_work.iter().flat_map(StateWork::blocks);
        for block in pinned.chain(of_states) {
            *plan_pins.entry(block).or_default() += 1;
        }
        plan_pins
    }

    /// Recounts the open plans.
    pub(crate) fn check(&self, state: &State) -> Result<(), String> {
        self.check_keys()?;
        ensure(self.spare_entries.is_empty(), || {
            format!("{} entries are in no plan", self.spare_entries.len())
        })?;
        let sequences: HashMap<u32, &Sequence> = state.seqs.enumerate().collect();
        let mut tracks: HashMap<u32, Track> = HashMap::new();
        let mut computing: HashSet<BlockId> = HashSet::new();
        let mut growth: HashMap<u32, usize> = HashMap::new();
        for entry in self.open.iter().flat_map(|plan| &plan.entries) {
            *growth.entry(entry.seq_idx).or_default() += entry.growth();
        }
        for (at, plan) in self.open.iter().enumerate() {
            let serial = plan.key.serial;
            let mut row = 0;
            for entry in &plan.entries {
                let Some(&seq) = sequences.get(&entry.seq_idx) else {
                    return Err(format!("plan {serial} holds a sequence that is gone"));
                };
                let track = tracks
                    .entry(entry.seq_idx)
                    .or_insert_with(|| Track::new(seq));
                track.follow(at == 0, plan, entry, seq)?;
                if entry.samples() {
                    track.sample_row = Some(SampleRow::new(row));
                }
                row += entry.num_samples();
                let to_come = growth.entry(entry.seq_idx).or_default();
                check_extent(state, entry, seq, *to_come)?;
                check_in_place(state, entry, seq.id)?;
                *to_come -= entry.growth();
                let Some(prefill) = entry.prefill() else {
                    continue;
                };
                check_reused(state, entry, prefill, seq)?;
                let table = state.table_of(plan, entry);
                check_shared(state, prefill, &table, seq.id, &computing)?;
                check_preregistered(state, plan, prefill, &table, &mut computing)?;
            }
            check_totals(plan)?;
            self.check_copies(state, plan)?;
        }
        for (block, step) in state.pool.unready() {
            ensure(computing.contains(&block), || {
                format!("{block:?} is to be computed in step {step} by no entry")
            })?;
        }
        for (seq_idx, seq) in state.seqs.enumerate() {
            let track = tracks.remove(&seq_idx).unwrap_or_else(|| Track::new(seq));
            track.check_end(seq)?;
        }
        Ok(())
    }

    /// Snapshots are those of entries: loaded where they begin, and written where they end, to blocks that are not cached.
    pub(crate) fn check_states(&self, state: &State) -> Result<(), String> {
        for work in &state.state_work {
            let serial = work.plan;
            let mut plans = self.open.iter();
            let plan = plans.find(|plan| plan.key.serial == serial);
            let mut entries = plan.iter().flat_map(|plan| &plan.entries);
            let Some(entry) = entries.find(|entry| entry.seq_idx == work.seq_idx) else {
                return Err(format!(
                    "plan {serial} has states of a sequence without an entry"
                ));
            };
            let (start, end) = (entry.start, entry.end());
            if let Some((position, _)) = &work.load {
                ensure(*position == start, || {
                    format!(
                        "plan {serial} loads a state of {position} tokens, it begins at {start}"
                    )
                })?;
            }
            let Some(save) = &work.save else { continue };
            let position = save.cut.position;
            ensure(position == end, || {
                format!("plan {serial} saves a state of {position} tokens, it ends at {end}")
            })?;
            let mut blocks = save.blocks.iter();
            let cached = blocks.find(|&&block| state.pool.cached_info(block).is_some());
            ensure(cached.is_none(), || {
                format!("plan {serial} saves a state to {cached:?}, which is cached")
            })?;
        }
        Ok(())
    }

    /// Each copy is an entry's, to a block of its table, from one that the plan holds.
    fn check_copies(&self, state: &State, plan: &Plan) -> Result<(), String> {
        let serial = plan.key.serial;
        let mut counted = 0;
        for entry in &plan.entries {
            let (seq, index) = (
                state.seqs.at(entry.seq_idx),
                state.groups.index_of(entry.start),
            );
            let table = state.table_of(plan, entry);
            for (copied, group, source) in entry.copied() {
                let id = seq.id;
                ensure(copied == index, || {
                    format!("sequence {id} copies block {copied} to write in block {index}")
                })?;
                let copy = table.get(group, index);
                ensure(
                    copy.is_some_and(|copy| plan.copies().contains(&(source, copy))),
                    || format!("sequence {id}: plan {serial} does not copy {source:?} to {copy:?}"),
                )?;
                ensure(plan.pinned.contains(&source), || {
                    format!("plan {serial} copies {source:?} and does not hold it")
                })?;
                counted += 1;
            }
            counted += check_copied_partly(state, plan, entry, &table)?;
        }
        let copies = plan.copies().len();
        ensure(copies == counted, || {
            format!("plan {serial} copies {copies} blocks, counted {counted}")
        })
    }

    /// At most two plans, this manager's, in the order of their numbers.
    fn check_keys(&self) -> Result<(), String> {
        let mut last = 0;
        for plan in &self.open {
            let (key, serial) = (plan.key, plan.key.serial);
            ensure(key.manager == self.manager, || {
                format!("{key:?} is another manager's")
            })?;
            ensure(last < serial && serial <= self.num_begun, || {
                let plans = self.num_begun;
                format!("plan {serial} follows plan {last} of {plans}")
            })?;
            last = serial;
        }
        let bit = self.open.iter().map(|plan| plan.bit.0);
        ensure(
            bit.clone().sum::<u8>() == bit.fold(0, |all, bit| all | bit),
            || "two plans have one bit".into(),
        )?;
        let open = self.open.len();
        ensure(open <= 2, || format!("{open} plans are open"))
    }
}

fn check_totals(plan: &Plan) -> Result<(), String> {
    let (serial, entries) = (plan.key.serial, plan.entries.iter());
    let tokens: usize = entries.clone().map(Entry::len).sum();
    let samples: usize = entries.map(Entry::num_samples).sum();
    let plain = plan
        .entries
        .iter()
        .take_while(|entry| entry.details.is_none());
    let (decodes, plain) = (plan.decodes, plain.count());
    ensure(decodes <= plain, || {
        format!("plan {serial} begins with {decodes} decodes, counted {plain}")
    })?;
    let (num_tokens, num_samples) = (plan.num_tokens, plan.num_samples);
    ensure((tokens, samples) == (num_tokens, num_samples), || {
        format!(
            "plan {serial} has {num_tokens} tokens and {num_samples} samples, \
             counted {tokens} and {samples}"
        )
    })
}

/// The copy sources of a partial match are copied, ready, and agree with the sequence. Returns how many they are.
fn check_copied_partly(
    state: &State,
    plan: &Plan,
    entry: &Entry,
    table: &BlockTable,
) -> Result<usize, String> {
    let seq = state.seqs.at(entry.seq_idx);
    let (id, serial) = (seq.id, plan.key.serial);
    let Some(prefill) = entry.prefill() else {
        return Ok(0);
    };
    if prefill.copy_sources.is_empty() {
        let tokens = prefill.copied_tokens;
        ensure(tokens == 0, || {
            format!("sequence {id} has {tokens} copied tokens without a source")
        })?;
        return Ok(0);
    }
    let index = prefill.preregister_from;
    let tokens = prefill.copied_tokens;
    let begins = index * state.groups.block_size();
    let pool = &state.pool;
    for (group, &source) in prefill.copy_sources.iter().enumerate() {
        let copy = table.get(group, index);
        let copied = copy.is_some_and(|copy| plan.copies().contains(&(source, copy)));
        ensure(copied && plan.pinned.contains(&source), || {
            format!("sequence {id}: plan {serial} does not copy or pin {source:?}, its source")
        })?;
        let agrees = pool.cached_info(source).is_some_and(|(cached, of, _)| {
            let known = &pool.tree().tokens(cached)[..tokens];
            of == group && seq.tokens[begins..].starts_with(known)
        });
        ensure(agrees && pool.is_ready(source), || {
            format!("sequence {id} copies {tokens} tokens that {source:?} has not")
        })?;
    }
    Ok(prefill.copy_sources.len())
}

/// It writes in a block that no other sequence holds, unless they share the logical block that it fills.
fn check_in_place(state: &State, entry: &Entry, id: u64) -> Result<(), String> {
    if entry.start.is_multiple_of(state.groups.block_size()) {
        return Ok(());
    }
    let mut blocks = state.first_written(entry);
    let pool = &state.pool;
    let shared = blocks.find(|&block| pool.seq_refs(block) > 1 && pool.cached_at(block).is_none());
    ensure(shared.is_none(), || {
        format!("sequence {id} writes in {shared:?}, which others hold")
    })
}

/// It has blocks for all positions that it computes, and can be undone: its table had `growth` logical blocks fewer.
fn check_extent(state: &State, entry: &Entry, seq: &Sequence, growth: usize) -> Result<(), String> {
    let (id, end) = (seq.id, seq.table.end());
    let before = end.saturating_sub(growth);
    let fits = state.groups.end_of(entry.end()) <= end && growth <= end;
    ensure(fits, || format!("sequence {id} is planned without blocks"))?;
    let from = entry.start - entry.reused_tokens();
    ensure(state.groups.end_of(from) <= before, || {
        format!("sequence {id} was at {from} with {before} logical blocks")
    })?;
    let Some(prefill) = entry.prefill() else {
        return Ok(());
    };
    let saved = registered_before(entry);
    let matched_end = saved.map_or(prefill.preregister_from, |saved| {
        saved.end() + prefill.matched_indices
    });
    let block_size = state.groups.block_size();
    let write = entry.write_from(block_size);
    ensure(
        write == matched_end * block_size + prefill.copied_tokens,
        || format!("sequence {id} writes from {write}, has {matched_end} logical blocks"),
    )?;
    ensure(prefill.preregister_from == matched_end, || {
        let from = prefill.preregister_from;
        format!("sequence {id} preregisters from block {from}, not {matched_end}")
    })?;
    let groups = state.groups.len();
    let entries = matched_end * groups..(matched_end + prefill.preregistered) * groups;
    let new = |at: &usize| entries.contains(at) && *at >= before * groups;
    let cached = &prefill.already_cached;
    ensure(cached.is_sorted() && cached.iter().all(new), || {
        format!("sequence {id} has {cached:?} cached already of {entries:?}")
    })?;
    saved.map_or(Ok(()), |saved| check_path(state, prefill, seq, saved))
}

/// The registered prefix that the sequence of a prefill had before, if it changed it.
fn registered_before(entry: &Entry) -> Option<Registered> {
    entry.changes().find_map(|change| match change {
        Change::Matched { before, .. } | Change::Preregistered { before } => Some(*before),
        _ => None,
    })
}

/// The sequence's registered prefix ends where the entry's does or later, on a path through the one that it had before.
fn check_path(
    state: &State,
    prefill: &PrefillWork,
    seq: &Sequence,
    saved: Registered,
) -> Result<(), String> {
    let (id, registered) = (seq.id, seq.registered);
    let end = prefill.preregister_from + prefill.preregistered;
    ensure(end <= registered.end(), || {
        let all = registered.end();
        format!("sequence {id} has {end} blocks registered by its plan, {all} in all")
    })?;
    let last = state
        .pool
        .tree()
        .ancestor(registered.last, registered.end() - saved.end());
    ensure(last == saved.last, || {
        let before = saved.last;
        format!("sequence {id} was at {before:?}, its path leads through {last:?}")
    })
}

/// The cached tokens and blocks that a prefill reuses.
fn check_reused(
    state: &State,
    entry: &Entry,
    prefill: &PrefillWork,
    seq: &Sequence,
) -> Result<(), String> {
    let (id, start) = (seq.id, entry.start);
    let written = entry.write_from(state.groups.block_size());
    let again = written.saturating_sub(prefill.replay);
    let end = again.min(seq.tokens.len() - 1);
    let fits = match prefill.matched_indices + prefill.copied_tokens {
        0 => prefill.reused_tokens == 0,
        _ => start == end,
    };
    ensure(fits, || {
        let (tokens, matched) = (prefill.reused_tokens, prefill.matched_indices);
        format!("sequence {id} starts at {start} with {tokens} tokens of {matched} blocks reused")
    })?;
    let (blocks, in_flight) = (prefill.matched_blocks, prefill.in_flight);
    let max_blocks = prefill.matched_indices * state.groups.len();
    ensure(
        blocks <= max_blocks && in_flight <= blocks + prefill.already_cached.len(),
        || format!("sequence {id} reused {blocks} blocks of {max_blocks}, {in_flight} in flight"),
    )?;
    ensure(state.sharing || prefill.preregistered == 0, || {
        format!("sequence {id} preregisters what it must not")
    })?;
    let reuses = prefill.matched_indices + prefill.copy_sources.len() > 0;
    ensure(seq.read_cache || !reuses, || {
        format!("sequence {id} reuses what it must not")
    })
}

/// Blocks that it shares are ready, or computed by an earlier entry.
fn check_shared(
    state: &State,
    prefill: &PrefillWork,
    table: &BlockTable,
    id: u64,
    computing: &HashSet<BlockId>,
) -> Result<(), String> {
    let (groups, mut counted) = (state.groups.len(), 0);
    for at in prefill.shared(groups) {
        let Some(block) = table.get(at % groups, at / groups) else {
            continue;
        };
        if state.pool.is_ready(block) {
            continue;
        }
        ensure(computing.contains(&block), || {
            format!("sequence {id} shares {block:?}, which no entry before it computes")
        })?;
        counted += 1;
    }
    let in_flight = prefill.in_flight;
    ensure(counted <= in_flight, || {
        format!("sequence {id} shares {in_flight} blocks in flight, counted {counted}")
    })
}

/// Blocks that it preregistered carry the plan's number.
fn check_preregistered(
    state: &State,
    plan: &Plan,
    prefill: &PrefillWork,
    table: &BlockTable,
    computing: &mut HashSet<BlockId>,
) -> Result<(), String> {
    let groups = state.groups.len();
    for at in prefill.preregistered(groups) {
        let block = table.get(at % groups, at / groups);
        let cached = block.and_then(|block| Some((block, state.pool.cached_info(block)?)));
        let Some((block, (_, _, step))) = cached else {
            let serial = plan.key.serial;
            return Err(format!(
                "plan {serial} preregisters entry {at}, which is not cached"
            ));
        };
        ensure(step == plan.step(), || {
            let plan_step = plan.step();
            format!("{block:?} of step {step} is preregistered in step {plan_step}")
        })?;
        ensure(computing.insert(block), || {
            format!("{block:?} is preregistered twice")
        })?;
    }
    Ok(())
}

impl Track {
    /// A sequence in no plan.
    fn new(seq: &Sequence) -> Self {
        Self {
            planned_end: seq.computed,
            ..Self::default()
        }
    }

    /// Adds an entry, which must begin where the one before it ends.
    fn follow(
        &mut self,
        oldest: bool,
        plan: &Plan,
        entry: &Entry,
        seq: &Sequence,
    ) -> Result<(), String> {
        let (id, serial) = (seq.id, plan.key.serial);
        ensure(self.last_plan < serial && !self.speculating, || {
            format!("sequence {id} is twice in plan {serial}, or after its drafts")
        })?;
        let (start, at) = (entry.start, self.planned_end);
        ensure(
            start == at + entry.reused_tokens() && entry.len() > 0,
            || format!("sequence {id} begins at {start}, is planned to {at}"),
        )?;
        self.planned_end = entry.end();
        let (end, drafts) = (self.planned_end, entry.drafts().len());
        let known = seq.tokens.len() + usize::from(self.pending) + drafts;
        ensure(end <= known && entry.samples() == (end == known), || {
            let samples = if entry.samples() {
                "samples"
            } else {
                "does not sample"
            };
            format!("sequence {id} ends at {end} of {known} tokens and {samples}")
        })?;
        // Rows of a closed plan are invalid.
        let pending_row = entry.pending_row;
        ensure(oldest || pending_row == self.sample_row, || {
            let sampled = self.sample_row;
            format!("sequence {id} computes row {pending_row:?}, row {sampled:?} samples it")
        })?;
        self.plans = self.plans.with(plan.bit);
        self.last_plan = serial;
        self.pending += u8::from(entry.samples());
        self.speculating = drafts > 0;
        Ok(())
    }

    fn check_end(&self, seq: &Sequence) -> Result<(), String> {
        let id = seq.id;
        let (recorded, counted) = ((seq.plans, seq.pending), (self.plans, self.pending));
        ensure(recorded == counted, || {
            format!("sequence {id}: {recorded:?} plans and pending tokens, counted {counted:?}")
        })?;
        ensure(seq.planned_end == self.planned_end, || {
            let (end, plans) = (seq.planned_end, self.planned_end);
            format!("sequence {id} is planned to {end}, its plans lead to {plans}")
        })?;
        ensure(seq.speculating == self.speculating, || {
            format!("sequence {id} speculates: {}", seq.speculating)
        })?;
        let sampled = self.sample_row.is_none_or(|row| row == seq.sample_row);
        ensure(sampled, || {
            let (recorded, row) = (seq.sample_row, self.sample_row);
            format!("sequence {id} has sample row {recorded:?}, counted {row:?}")
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::plan::{Details, Work};
    use super::*;
    use crate::check::scene::*;

    const OLDER: usize = 0;
    const NEWER: usize = 1;

    fn plan(s: &mut Scene, plan: usize) -> &mut Plan {
        &mut s.manager.state.steps.open[plan]
    }

    fn entry(s: &mut Scene, at: usize, seq_idx: u32) -> &mut Entry {
        let mut entries = plan(s, at).entries.iter_mut();
        entries
            .find(|entry| entry.seq_idx == seq_idx)
            .expect("planned")
    }

    fn details(s: &mut Scene, at: usize, seq_idx: u32) -> &mut Details {
        let details = entry(s, at, seq_idx).details.as_mut();
        details.expect("more than a decode")
    }

    fn prefill(s: &mut Scene, at: usize, seq_idx: u32) -> &mut PrefillWork {
        match &mut details(s, at, seq_idx).work {
            Work::Prefill(prefill) => prefill,
            _ => panic!("no prefill"),
        }
    }

    fn slid(s: &mut Scene, at: usize, seq_idx: u32) -> &mut Vec<(usize, BlockId)> {
        let mut journal = details(s, at, seq_idx).journal.iter_mut();
        let slid = journal.find_map(|change| match change {
            Change::Matched { slid, .. } => Some(slid),
            _ => None,
        });
        slid.expect("a match")
    }

    fn copied_index(s: &mut Scene, at: usize, seq_idx: u32) -> &mut usize {
        let mut journal = details(s, at, seq_idx).journal.iter_mut();
        let index = journal.find_map(|change| match change {
            Change::Copied { index, .. } => Some(index),
            _ => None,
        });
        index.expect("a copy")
    }

    const PLANS: &[Case] = &[
        ("is another manager's", |s| plan(s, OLDER).key.manager += 1),
        ("plan 0 follows plan 0 of", |s| {
            plan(s, OLDER).key.serial = 0
        }),
        ("follows plan 12 of 12", |s| plan(s, OLDER).key.serial = 12),
        ("plan 12 follows plan 11 of 11", |s| {
            s.manager.state.steps.num_begun = 11
        }),
        ("plan 12 begins with 99 decodes, counted", |s| {
            plan(s, NEWER).decodes = 99
        }),
        ("two plans have one bit", |s| {
            plan(s, NEWER).bit = plan(s, OLDER).bit
        }),
        ("1 entries are in no plan", |s| {
            let entry = plan(s, NEWER).entries.pop().expect("one");
            s.manager.state.steps.spare_entries.push(entry);
        }),
        ("plan 11 holds a sequence that is gone", |s| {
            entry(s, OLDER, LEFT).seq_idx = 99
        }),
        (
            "plan 11 has 17 tokens and 3 samples, counted 16 and 3",
            |s| {
                plan(s, OLDER).num_tokens = 17;
            },
        ),
        (
            "plan 11 has 16 tokens and 4 samples, counted 16 and 3",
            |s| {
                plan(s, OLDER).num_samples = 4;
            },
        ),
        ("sequence 4 copies block 1 to write in block 2", |s| {
            *copied_index(s, NEWER, CHILD) = 1;
        }),
        ("sequence 4: plan 12 does not copy", |s| {
            plan(s, NEWER).copies_mut()[0].1 = BlockId::from(0);
        }),
        ("and does not hold it", |s| {
            let (source, _) = plan(s, NEWER).copies()[0];
            plan(s, NEWER).pinned.retain(|block| *block != source);
        }),
        ("plan 12 copies 5 blocks, counted 4", |s| {
            let copy = plan(s, NEWER).copies()[0];
            plan(s, NEWER).add_copies([copy]);
        }),
        ("sequence 17: plan 12 does not copy or pin", |s| {
            prefill(s, NEWER, BORROWER).copy_sources[1] = BlockId::from(0);
        }),
        ("sequence 17: plan 12 does not copy or pin", |s| {
            let source = prefill(s, NEWER, BORROWER).copy_sources[0];
            plan(s, NEWER).pinned.retain(|block| *block != source);
        }),
        ("sequence 17 copies 1 tokens that BlockId(", |s| {
            s.seq(BORROWER).tokens[3] += 1;
        }),
        ("sequence 17 has 1 copied tokens without a source", |s| {
            prefill(s, NEWER, BORROWER).copy_sources.clear();
        }),
        ("is to be computed in step 12 by no entry", |s| {
            prefill(s, NEWER, LONG).preregistered -= 1;
        }),
    ];

    const ENTRIES: &[Case] = &[
        ("sequence 9 is planned without blocks", |s| {
            entry(s, NEWER, LONG).new_indices = 99
        }),
        ("sequence 3 writes in Some(BlockId(", |s| {
            entry(s, NEWER, CHILD).seq_idx = PARENT;
        }),
        ("sequence 9 was at 6 with 1 logical blocks", |s| {
            entry(s, OLDER, LONG).new_indices -= 1;
            entry(s, NEWER, LONG).new_indices += 1;
        }),
        ("sequence 9 writes from 12, has 3 logical blocks", |s| {
            entry(s, NEWER, LONG).indices_written = 4;
        }),
        ("sequence 9 preregisters from block 2, not 3", |s| {
            prefill(s, NEWER, LONG).preregister_from = 2;
        }),
        (
            "sequence 9 has 6 blocks registered by its plan, 5 in all",
            |s| prefill(s, NEWER, LONG).preregistered = 3,
        ),
        ("sequence 9 was at Node", |s| {
            let last = s.seq(REST).registered.last;
            let mut journal = details(s, NEWER, LONG).journal.iter_mut();
            match journal.next() {
                Some(Change::Matched { before, .. }) => before.last = last,
                _ => panic!("no match"),
            }
        }),
        ("sequence 9 has [5] cached already of 6..10", |s| {
            prefill(s, NEWER, LONG).already_cached = vec![5]
        }),
        (
            "sequence 16 starts at 1 with 1 tokens of 0 blocks reused",
            |s| {
                let entry = entry(s, OLDER, LEFT);
                entry.start = 1;
                details(s, OLDER, LEFT).len -= 1;
                prefill(s, OLDER, LEFT).reused_tokens = 1;
            },
        ),
        ("sequence 9 reused 3 blocks of 2", |s| {
            prefill(s, NEWER, LONG).matched_blocks = 3
        }),
        ("sequence 9 preregisters what it must not", |s| {
            s.manager.state.sharing = false
        }),
        ("sequence 14 reuses what it must not", |s| {
            s.seq(FULL).read_cache = false
        }),
        ("sequence 10 shares", |s| plan(s, OLDER).entries.swap(0, 1)),
        ("plan 11 preregisters entry 1, which is not cached", |s| {
            slid(s, NEWER, LONG).clear(); // the newer plan has it
        }),
        ("is twice in plan 12, or after its drafts", |s| {
            let seq_idx = entry(s, NEWER, TALK).seq_idx;
            entry(s, NEWER, BRIEF).seq_idx = seq_idx;
        }),
        ("sequence 9 begins at 10, is planned to 6", |s| {
            entry(s, NEWER, LONG).start = 10
        }),
        ("and does not sample", |s| {
            details(s, NEWER, DRAFTY).samples = false
        }),
        ("computes row Some(9), row", |s| {
            entry(s, NEWER, TALK).pending_row = Some(SampleRow::new(9))
        }),
        ("plans and pending tokens, counted", |s| {
            s.seq(TALK).plans = PlanSet::FIRST
        }),
        ("sequence 11 is planned to 5, its plans lead to 6", |s| {
            s.seq(TALK).planned_end = 5
        }),
        ("sequence 13 speculates: false", |s| {
            s.seq(DRAFTY).speculating = false
        }),
        ("sequence 11 has sample row 9, counted Some(", |s| {
            s.seq(TALK).sample_row = SampleRow::new(9)
        }),
    ];

    #[test]
    fn each_of_them_is_named() {
        each_is_named(scene, PLANS);
        each_is_named(scene, ENTRIES);
        each_is_named(recurrent, STATES);
    }

    /// The sequence in the plan loads a state of 8 tokens and saves one of 12.
    const STATES: &[Case] = &[
        ("has states of a sequence without an entry", |s| {
            s.manager.state.state_work[0].seq_idx = 99;
        }),
        ("has states of a sequence without an entry", |s| {
            s.manager.state.state_work[0].plan = 99;
        }),
        ("loads a state of 4 tokens, it begins at 8", |s| {
            s.manager.state.state_work[0].load.as_mut().expect("one").0 = 4;
        }),
        ("saves a state of 13 tokens, it ends at 12", |s| {
            save(s).cut.position = 13;
        }),
        ("saves a state to Some(BlockId(", |s| {
            let (_, loaded) = s.manager.state.state_work[0].load.clone().expect("one");
            save(s).blocks[0] = loaded[0];
        }),
        ("plan_pins: 1 }, counted Counts", |s| {
            save(s).blocks.pop();
        }),
        ("is not in Some(BlockId(0))", |s| {
            let pool = &mut s.manager.state.pool;
            let blocks = pool.cached_snapshots_mut().values_mut().next();
            blocks.expect("two")[1] = BlockId::from(0);
        }),
        ("outlives a block of its prefix", |s| {
            let cached = s.manager.state.pool.cached_snapshots_mut();
            let (mut position, blocks) = cached.pop_first().expect("two");
            position.offset = 99;
            cached.insert(position, blocks);
        }),
        ("is of group 1", |s| {
            s.manager.state.pool.cached_snapshots_mut().pop_last();
        }),
        ("of a snapshot, which is not its own", |s| {
            let open = s.manager.state.transfers.open.values_mut().next();
            let snapshot = open.expect("one").snapshot.as_mut();
            snapshot.expect("one").blocks[1] = BlockId::from(0);
        }),
        ("fills a snapshot after a block that is not cached", |s| {
            let open = s.manager.state.transfers.open.values_mut().next();
            let snapshot = open.expect("one").snapshot.as_mut();
            snapshot.expect("one").position.offset += 99;
        }),
    ];

    fn save(scene: &mut Scene) -> &mut super::super::state_work::Save {
        let save = scene.manager.state.state_work[0].save.as_mut();
        save.expect("one")
    }
}
