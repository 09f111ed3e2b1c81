//! Open plans: what they add up to, what they say of their sequences, what they compute for whom.

use std::collections::{HashMap, HashSet};

use super::ensure;
use crate::ids::{BlockId, NodeIdx};
use crate::manager::BlockManager;
use crate::plan::{Entry, Plan};
use crate::sequence::Sequence;

/// What the open plans say of one sequence, oldest first.
#[derive(Default)]
struct Track {
    planned: u8,
    last_plan: u64,
    ahead: usize,
    pending: usize,
    /// The row that samples the last pending token.
    sample_row: Option<usize>,
    speculating: bool,
}

impl BlockManager {
    pub(super) fn check_plans(&self) -> Result<(), String> {
        self.check_keys()?;
        let sequences: HashMap<u32, &Sequence> = self.sequences.iter_slots().collect();
        let mut tracks: HashMap<u32, Track> = HashMap::new();
        let mut computing: HashSet<BlockId> = HashSet::new();
        for plan in &self.open {
            let serial = plan.key.serial;
            let mut row = 0;
            for entry in &plan.entries {
                let Some(&seq) = sequences.get(&entry.slot) else {
                    return Err(format!("plan {serial} holds a sequence that is gone"));
                };
                let track = tracks.entry(entry.slot).or_insert_with(|| Track {
                    ahead: seq.computed,
                    ..Track::default()
                });
                track.follow(self.is_oldest(plan), serial, entry, seq)?;
                if entry.samples {
                    track.sample_row = Some(row);
                }
                row += entry.rows();
                self.check_extent(entry, seq)?;
                self.check_adopted(entry, seq)?;
                self.check_shared(plan, entry, seq, &computing)?;
                self.check_announced(plan, entry, seq, &mut computing)?;
            }
            self.check_totals(plan)?;
            self.check_copies(plan, &sequences)?;
        }
        self.check_unready(&computing)?;
        for (slot, seq) in self.sequences.iter_slots() {
            let track = tracks.remove(&slot).unwrap_or_else(|| Track {
                ahead: seq.computed,
                ..Track::default()
            });
            track.check_end(seq)?;
        }
        Ok(())
    }

    fn is_oldest(&self, plan: &Plan) -> bool {
        self.open.first().is_some_and(|first| first.key == plan.key)
    }

    /// At most two plans, this manager's, in the order of their numbers.
    fn check_keys(&self) -> Result<(), String> {
        let mut last = 0;
        for plan in &self.open {
            let (key, serial) = (plan.key, plan.key.serial);
            ensure(key.manager == self.shared.manager, || {
                format!("{key:?} is another manager's")
            })?;
            ensure(last < serial && serial <= self.plans, || {
                let plans = self.plans;
                format!("plan {serial} follows plan {last} of {plans}")
            })?;
            last = serial;
        }
        let open = self.open.len();
        ensure(open <= 2, || format!("{open} plans are open"))
    }

    fn check_totals(&self, plan: &Plan) -> Result<(), String> {
        let (serial, entries) = (plan.key.serial, plan.entries.iter());
        let tokens: usize = entries.clone().map(|entry| entry.len).sum();
        let samples: usize = entries.map(Entry::rows).sum();
        let (num_tokens, num_samples) = (plan.num_tokens, plan.num_samples);
        ensure((tokens, samples) == (num_tokens, num_samples), || {
            format!(
                "plan {serial} has {num_tokens} tokens and {num_samples} samples, \
                 counted {tokens} and {samples}"
            )
        })
    }

    /// Each copy is an entry's, to a block of its table, from one that the plan holds.
    fn check_copies(&self, plan: &Plan, sequences: &HashMap<u32, &Sequence>) -> Result<(), String> {
        let serial = plan.key.serial;
        let mut counted = 0;
        for entry in &plan.entries {
            let (seq, row) = (sequences[&entry.slot], entry.start / self.config.block_size);
            for &(at, source) in &entry.more().copied {
                let id = seq.id;
                ensure(at / self.groups.len() == row, || {
                    format!("sequence {id} copies entry {at} to write in row {row}")
                })?;
                let copy = (source, seq.table[at]);
                ensure(plan.copies.contains(&copy), || {
                    format!("sequence {id}: plan {serial} does not copy {copy:?}")
                })?;
                ensure(plan.fenced.contains(&source), || {
                    format!("plan {serial} copies {source:?} and does not hold it")
                })?;
                counted += 1;
            }
        }
        let copies = plan.copies.len();
        ensure(copies == counted, || {
            format!("plan {serial} copies {copies} blocks, counted {counted}")
        })
    }

    /// It has blocks for all that it computes, and could be taken back.
    fn check_extent(&self, entry: &Entry, seq: &Sequence) -> Result<(), String> {
        let (id, groups, block_size) = (seq.id, self.groups.len(), self.config.block_size);
        let (len, before) = (seq.table.len(), &entry.before);
        let fits = (entry.start + entry.len).div_ceil(block_size) * groups <= len;
        ensure(fits && before.table_len <= len, || {
            format!("sequence {id} is planned without blocks")
        })?;
        let held = before.ahead.div_ceil(block_size) * groups <= before.table_len;
        ensure(held && before.table_len.is_multiple_of(groups), || {
            let (ahead, entries) = (before.ahead, before.table_len);
            format!("sequence {id} was at {ahead} with {entries} table entries")
        })?;
        let (more, stood) = (entry.more(), before.chain.blocks);
        let from = stood + more.matched;
        ensure(entry.write_from == from * block_size, || {
            let write = entry.write_from;
            format!("sequence {id} writes from {write}, has blocks of {from} rows")
        })?;
        let announces_from = if more.prefill { from } else { 0 };
        ensure(more.announce_from == announces_from, || {
            let from = more.announce_from;
            format!("sequence {id} announces from row {from}, not {announces_from}")
        })?;
        let rows = from * groups..(from + more.announced) * groups;
        let new = |at: &usize| rows.contains(at) && *at >= before.table_len;
        let present = &more.present;
        ensure(present.is_sorted() && present.iter().all(new), || {
            format!("sequence {id} has {present:?} present of {rows:?}")
        })?;
        self.check_path(entry, seq)
    }

    /// The sequence stands where the entry led it or further down, on a path through where it stood
    /// before.
    fn check_path(&self, entry: &Entry, seq: &Sequence) -> Result<(), String> {
        let (id, more, stands) = (seq.id, entry.more(), seq.chain);
        if more.matched + more.announced == 0 {
            return Ok(());
        }
        let (stood, led) = (entry.before.chain, more.announce_from + more.announced);
        ensure(led <= stands.blocks, || {
            let row = stands.blocks;
            format!("sequence {id} was led to row {led}, stands on {row}")
        })?;
        let mut path = std::iter::successors(Some(stands.tip), |&node| self.tree.parent(node));
        let tip = path.nth(stands.blocks - stood.blocks);
        ensure(tip == Some(stood.tip), || {
            let before = stood.tip;
            format!("sequence {id} stood on {before:?}, its path leads through {tip:?}")
        })
    }

    /// What it took from the cache, if it is a prefill.
    fn check_adopted(&self, entry: &Entry, seq: &Sequence) -> Result<(), String> {
        let (id, start, more) = (seq.id, entry.start, entry.more());
        let end = entry.write_from.min(seq.tokens.len() - 1);
        let fits = match more.matched {
            0 => more.adopted == 0,
            _ => start == end,
        };
        ensure(fits, || {
            let (tokens, rows) = (more.adopted, more.matched);
            format!("sequence {id} starts at {start} with {tokens} tokens of {rows} rows adopted")
        })?;
        let (blocks, in_flight) = (more.matched_blocks, more.in_flight);
        let most = more.matched * self.groups.len();
        ensure(
            blocks <= most && in_flight <= blocks + more.present.len(),
            || format!("sequence {id} adopted {blocks} blocks of {most}, {in_flight} in flight"),
        )?;
        let may_announce = more.prefill && self.config.in_flight_sharing;
        ensure(may_announce || more.announced == 0, || {
            format!("sequence {id} announces what it must not")
        })?;
        let may_adopt = more.prefill && seq.read_cache;
        ensure(may_adopt || more.matched == 0, || {
            format!("sequence {id} adopts what it must not")
        })?;
        ensure(!more.prefill || more.drafts.is_empty(), || {
            format!("sequence {id} drafts in its prompt")
        })
    }

    /// What it shares is there, or computed by an entry before it.
    fn check_shared(
        &self,
        plan: &Plan,
        entry: &Entry,
        seq: &Sequence,
        computing: &HashSet<BlockId>,
    ) -> Result<(), String> {
        let (id, mut counted) = (seq.id, 0);
        let table = self.table_of(plan, entry);
        for at in entry.more().shared(self.groups.len()) {
            let Some(block) = table.get(at).and_then(|block| block.some()) else {
                continue;
            };
            if self.is_ready(block) {
                continue;
            }
            ensure(computing.contains(&block), || {
                format!("sequence {id} shares {block:?}, which no entry before it computes")
            })?;
            counted += 1;
        }
        let in_flight = entry.more().in_flight;
        ensure(counted <= in_flight, || {
            format!("sequence {id} shares {in_flight} blocks in flight, counted {counted}")
        })
    }

    /// Contents that it computes for all carry the plan's number.
    fn check_announced(
        &self,
        plan: &Plan,
        entry: &Entry,
        seq: &Sequence,
        computing: &mut HashSet<BlockId>,
    ) -> Result<(), String> {
        let table = self.table_of(plan, entry);
        for at in entry.more().announced(self.groups.len()) {
            let id = seq.id;
            let block = table[at].some();
            let Some(block) = block.filter(|block| self.blocks[block.at()].node != NodeIdx::NONE)
            else {
                return Err(format!(
                    "sequence {id} announces entry {at} without content"
                ));
            };
            let (step, plan_step) = (self.blocks[block.at()].step, plan.step());
            ensure(step == plan_step, || {
                format!("sequence {id} announces {block:?} of step {step} in step {plan_step}")
            })?;
            ensure(computing.insert(block), || {
                format!("{block:?} is announced twice")
            })?;
        }
        Ok(())
    }

    /// No other content is still to be computed.
    fn check_unready(&self, computing: &HashSet<BlockId>) -> Result<(), String> {
        for (index, block) in self.blocks.iter().enumerate() {
            let id = BlockId::new(index);
            let known = block.node == NodeIdx::NONE || self.is_ready(id);
            ensure(known || computing.contains(&id), || {
                format!("{id:?} is to be computed in step {} by nobody", block.step)
            })?;
        }
        Ok(())
    }
}

impl Track {
    /// An entry more, which must begin where the one before it ends.
    fn follow(
        &mut self,
        oldest: bool,
        serial: u64,
        entry: &Entry,
        seq: &Sequence,
    ) -> Result<(), String> {
        let id = seq.id;
        ensure(self.last_plan < serial && !self.speculating, || {
            format!("sequence {id} is twice in plan {serial}, or after its drafts")
        })?;
        let (from, start, at) = (entry.before.ahead, entry.start, self.ahead);
        ensure(
            from == at && start == from + entry.more().adopted && entry.len > 0,
            || format!("sequence {id} is planned from {from}, begins at {start}, stands at {at}"),
        )?;
        self.ahead = start + entry.len;
        let (end, drafts) = (self.ahead, entry.more().drafts.len());
        let known = seq.tokens.len() + self.pending + drafts;
        ensure(end <= known && entry.samples == (end == known), || {
            let samples = if entry.samples {
                "samples"
            } else {
                "does not sample"
            };
            format!("sequence {id} ends at {end} of {known} tokens and {samples}")
        })?;
        // Once the plan before is closed, the row that it sampled means nothing any more.
        ensure(oldest || entry.pending_row == self.sample_row, || {
            let (row, sampled) = (entry.pending_row, self.sample_row);
            format!("sequence {id} computes row {row:?}, row {sampled:?} samples it")
        })?;
        self.planned += 1;
        self.last_plan = serial;
        self.pending += usize::from(entry.samples);
        self.speculating = drafts > 0;
        Ok(())
    }

    fn check_end(&self, seq: &Sequence) -> Result<(), String> {
        let id = seq.id;
        let says = (seq.planned, seq.pending, seq.last_plan);
        let counted = (self.planned, self.pending, self.last_plan);
        ensure(says == counted, || {
            format!(
                "sequence {id}: {says:?} plans, pending tokens and last plan, counted {counted:?}"
            )
        })?;
        ensure(seq.ahead == self.ahead, || {
            let (ahead, plans) = (seq.ahead, self.ahead);
            format!("sequence {id} is at {ahead}, its plans lead to {plans}")
        })?;
        ensure(seq.speculating == self.speculating, || {
            format!("sequence {id} speculates: {}", seq.speculating)
        })?;
        let sampled = self.sample_row.is_none_or(|row| row == seq.sample_row);
        ensure(sampled, || {
            let (says, row) = (seq.sample_row, self.sample_row);
            format!("sequence {id} has sample row {says}, counted {row:?}")
        })
    }
}
