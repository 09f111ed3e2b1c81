//! The validator's part that sees open plans: what they add up to, what they say of their sequences,
//! what they compute for whom.

use std::collections::{HashMap, HashSet};

use super::plan::{Entry, Extra, Plan};
use super::{State, Steps};
use crate::check::ensure;
use crate::ids::BlockId;
use crate::sequence::{SampleRow, Seats, Sequence};
use crate::table::BlockTable;

/// What the open plans say of one sequence, oldest first.
#[derive(Default)]
struct Track {
    plans: Seats,
    last_plan: u64,
    planned_end: usize,
    pending: u8,
    /// The row that samples the last pending token.
    sample_row: Option<SampleRow>,
    speculating: bool,
}

impl Steps {
    /// How often open plans hold each block.
    pub(crate) fn fences(&self) -> HashMap<BlockId, u32> {
        let mut fences = HashMap::new();
        for block in self.open.iter().flat_map(|plan| &plan.fenced) {
            *fences.entry(*block).or_default() += 1;
        }
        fences
    }

    /// Recounts the open plans.
    pub(crate) fn check(&self, state: &State) -> Result<(), String> {
        self.check_keys()?;
        ensure(self.spare_entries.is_empty(), || {
            format!("{} entries are in no plan", self.spare_entries.len())
        })?;
        let sequences: HashMap<u32, &Sequence> = state.seqs.iter_slots().collect();
        let mut tracks: HashMap<u32, Track> = HashMap::new();
        let mut computing: HashSet<BlockId> = HashSet::new();
        let mut growth: HashMap<u32, usize> = HashMap::new();
        for entry in self.open.iter().flat_map(|plan| &plan.entries) {
            *growth.entry(entry.slot).or_default() += entry.growth();
        }
        for (at, plan) in self.open.iter().enumerate() {
            let serial = plan.key.serial;
            let mut row = 0;
            for entry in &plan.entries {
                let Some(&seq) = sequences.get(&entry.slot) else {
                    return Err(format!("plan {serial} holds a sequence that is gone"));
                };
                let track = tracks.entry(entry.slot).or_insert_with(|| Track::new(seq));
                track.follow(at == 0, plan, entry, seq)?;
                if entry.samples() {
                    track.sample_row = Some(SampleRow::new(row));
                }
                row += entry.rows();
                let to_come = growth.entry(entry.slot).or_default();
                check_extent(state, entry, seq, *to_come)?;
                check_in_place(state, entry, seq.id)?;
                *to_come -= entry.growth();
                let Some(extra) = &entry.extra else { continue };
                check_reused(state, entry, extra, seq)?;
                let table = self.table_of(state, plan, entry);
                check_shared(state, extra, &table, seq.id, &computing)?;
                check_announced(state, plan, extra, &table, &mut computing)?;
            }
            check_totals(plan)?;
            self.check_copies(state, plan)?;
        }
        for (block, step) in state.pool.unready() {
            ensure(computing.contains(&block), || {
                format!("{block:?} is to be computed in step {step} by nobody")
            })?;
        }
        for (slot, seq) in state.seqs.iter_slots() {
            let track = tracks.remove(&slot).unwrap_or_else(|| Track::new(seq));
            track.check_end(seq)?;
        }
        Ok(())
    }

    /// Each copy is an entry's, to a block of its table, from one that the plan holds.
    fn check_copies(&self, state: &State, plan: &Plan) -> Result<(), String> {
        let (serial, groups) = (plan.key.serial, state.groups.len());
        let mut counted = 0;
        for entry in &plan.entries {
            let (seq, row) = (state.seqs.at(entry.slot), state.groups.row_of(entry.start));
            let table = self.table_of(state, plan, entry);
            for &(place, source) in entry.extra.iter().flat_map(|extra| &extra.copied) {
                let id = seq.id;
                ensure(place / groups == row, || {
                    format!("sequence {id} copies entry {place} to write in row {row}")
                })?;
                let copy = table.get(place % groups, row);
                ensure(
                    copy.is_some_and(|copy| plan.copies().contains(&(source, copy))),
                    || format!("sequence {id}: plan {serial} does not copy {source:?} to {copy:?}"),
                )?;
                ensure(plan.fenced.contains(&source), || {
                    format!("plan {serial} copies {source:?} and does not hold it")
                })?;
                counted += 1;
            }
            counted += check_lent(state, plan, entry, &table)?;
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
            ensure(last < serial && serial <= self.made, || {
                let plans = self.made;
                format!("plan {serial} follows plan {last} of {plans}")
            })?;
            last = serial;
        }
        let seats = self.open.iter().map(|plan| plan.seat.0);
        ensure(
            seats.clone().sum::<u8>() == seats.fold(0, |all, seat| all | seat),
            || "two plans have one seat".into(),
        )?;
        let open = self.open.len();
        ensure(open <= 2, || format!("{open} plans are open"))
    }
}

fn check_totals(plan: &Plan) -> Result<(), String> {
    let (serial, entries) = (plan.key.serial, plan.entries.iter());
    let tokens: usize = entries.clone().map(Entry::len).sum();
    let samples: usize = entries.map(Entry::rows).sum();
    let plain = plan.entries.iter().take_while(|it| it.extra.is_none());
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

/// What lends it the tokens before it begins is copied whole, is there, and begins as the sequence goes
/// on. How many copies that are.
fn check_lent(
    state: &State,
    plan: &Plan,
    entry: &Entry,
    table: &BlockTable,
) -> Result<usize, String> {
    let seq = state.seqs.at(entry.slot);
    let (id, serial) = (seq.id, plan.key.serial);
    let Some(extra) = entry.extra.as_ref().filter(|extra| !extra.lent.is_empty()) else {
        let tokens = entry.extra.as_ref().map_or(0, |extra| extra.lent_tokens);
        ensure(tokens == 0, || {
            format!("sequence {id} has {tokens} tokens that no block lends")
        })?;
        return Ok(0);
    };
    let (row, tokens) = (extra.stood.rows() + extra.matched, extra.lent_tokens);
    let begins = row * state.groups.block_size();
    let pool = &state.pool;
    for (group, &source) in extra.lent.iter().enumerate() {
        let copy = table.get(group, row);
        let copied = copy.is_some_and(|copy| plan.copies().contains(&(source, copy)));
        ensure(copied && plan.fenced.contains(&source), || {
            format!("sequence {id}: plan {serial} does not copy or hold {source:?}, which lends")
        })?;
        let lends = pool.content_of(source).is_some_and(|(content, of, _)| {
            let known = &pool.contents.tokens(content)[..tokens];
            of == group && seq.tokens[begins..].starts_with(known)
        });
        ensure(lends && pool.is_ready(source), || {
            format!("sequence {id} is lent {tokens} tokens that {source:?} has not")
        })?;
    }
    Ok(extra.lent.len())
}

/// It goes on in a block that no other sequence holds, but for those that share what makes it full.
fn check_in_place(state: &State, entry: &Entry, id: u64) -> Result<(), String> {
    if entry.start.is_multiple_of(state.groups.block_size()) {
        return Ok(());
    }
    let mut blocks = state.begins_in(entry);
    let pool = &state.pool;
    let shared = blocks.find(|&it| pool.seq_refs(it) > 1 && pool.content(it).is_none());
    ensure(shared.is_none(), || {
        format!("sequence {id} writes in {shared:?}, which others hold")
    })
}

/// It has blocks for all that it computes, and could be taken back: its table has had `growth` rows fewer.
fn check_extent(state: &State, entry: &Entry, seq: &Sequence, growth: usize) -> Result<(), String> {
    let (id, rows) = (seq.id, seq.table.rows());
    let before = rows.saturating_sub(growth);
    let fits = state.groups.rows(entry.end()) <= rows && growth <= rows;
    ensure(fits, || format!("sequence {id} is planned without blocks"))?;
    let from = entry.start - entry.reused_tokens();
    ensure(state.groups.rows(from) <= before, || {
        format!("sequence {id} was at {from} with {before} rows")
    })?;
    let Some(extra) = &entry.extra else {
        return Ok(());
    };
    let stood = extra.stood.rows() + extra.matched;
    let block_size = state.groups.block_size();
    let write = entry.write_from(block_size);
    ensure(write == stood * block_size + extra.lent_tokens, || {
        format!("sequence {id} writes from {write}, has blocks of {stood} rows")
    })?;
    let announces_from = if extra.prefill { stood } else { 0 };
    ensure(extra.announce_from == announces_from, || {
        let from = extra.announce_from;
        format!("sequence {id} announces from row {from}, not {announces_from}")
    })?;
    let groups = state.groups.len();
    let places = stood * groups..(stood + extra.announced) * groups;
    let new = |at: &usize| places.contains(at) && *at >= before * groups;
    let present = &extra.present;
    ensure(present.is_sorted() && present.iter().all(new), || {
        format!("sequence {id} has {present:?} present of {places:?}")
    })?;
    check_path(state, extra, seq)
}

/// The sequence stands where the entry led it or further down, on a path through where it stood
/// before.
fn check_path(state: &State, extra: &Extra, seq: &Sequence) -> Result<(), String> {
    let (id, stands, stood) = (seq.id, seq.registered, extra.stood);
    if extra.matched + extra.announced == 0 {
        return Ok(());
    }
    let led = extra.announce_from + extra.announced;
    ensure(led <= stands.rows(), || {
        let row = stands.rows();
        format!("sequence {id} was led to row {led}, stands on {row}")
    })?;
    let tip = state
        .pool
        .contents
        .back(stands.tip, stands.rows() - stood.rows());
    ensure(tip == stood.tip, || {
        let before = stood.tip;
        format!("sequence {id} stood on {before:?}, its path leads through {tip:?}")
    })
}

/// What it took from the cache, if it is a prefill.
fn check_reused(state: &State, entry: &Entry, extra: &Extra, seq: &Sequence) -> Result<(), String> {
    let (id, start) = (seq.id, entry.start);
    let written = entry.write_from(state.groups.block_size());
    let again = written.saturating_sub(extra.replay);
    let end = again.min(seq.tokens.len() - 1);
    let fits = match extra.matched + extra.lent_tokens {
        0 => extra.reused_tokens == 0,
        _ => start == end,
    };
    ensure(fits, || {
        let (tokens, rows) = (extra.reused_tokens, extra.matched);
        format!("sequence {id} starts at {start} with {tokens} tokens of {rows} rows reused")
    })?;
    let (blocks, in_flight) = (extra.matched_blocks, extra.in_flight);
    let most = extra.matched * state.groups.len();
    ensure(
        blocks <= most && in_flight <= blocks + extra.present.len(),
        || format!("sequence {id} reused {blocks} blocks of {most}, {in_flight} in flight"),
    )?;
    let may_announce = extra.prefill && state.sharing;
    ensure(may_announce || extra.announced == 0, || {
        format!("sequence {id} announces what it must not")
    })?;
    let may_reuse = extra.prefill && seq.read_cache;
    ensure(may_reuse || extra.matched + extra.lent.len() == 0, || {
        format!("sequence {id} reuses what it must not")
    })?;
    ensure(!extra.prefill || extra.drafts.is_empty(), || {
        format!("sequence {id} drafts in its prompt")
    })
}

/// What it shares is there, or computed by an entry before it.
fn check_shared(
    state: &State,
    extra: &Extra,
    table: &BlockTable,
    id: u64,
    computing: &HashSet<BlockId>,
) -> Result<(), String> {
    let (groups, mut counted) = (state.groups.len(), 0);
    for place in extra.shared(groups) {
        let Some(block) = table.get(place % groups, place / groups) else {
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
    let in_flight = extra.in_flight;
    ensure(counted <= in_flight, || {
        format!("sequence {id} shares {in_flight} blocks in flight, counted {counted}")
    })
}

/// Contents that it computes for all carry the plan's number.
fn check_announced(
    state: &State,
    plan: &Plan,
    extra: &Extra,
    table: &BlockTable,
    computing: &mut HashSet<BlockId>,
) -> Result<(), String> {
    let groups = state.groups.len();
    for place in extra.announced(groups) {
        let block = table.get(place % groups, place / groups);
        let content = block.and_then(|block| Some((block, state.pool.content_of(block)?)));
        let Some((block, (_, _, step))) = content else {
            let serial = plan.key.serial;
            return Err(format!(
                "plan {serial} announces entry {place} without content"
            ));
        };
        ensure(step == plan.step(), || {
            let plan_step = plan.step();
            format!("{block:?} of step {step} is announced in step {plan_step}")
        })?;
        ensure(computing.insert(block), || {
            format!("{block:?} is announced twice")
        })?;
    }
    Ok(())
}

impl Track {
    /// A sequence that no plan has moved.
    fn new(seq: &Sequence) -> Self {
        Self {
            planned_end: seq.computed,
            ..Self::default()
        }
    }

    /// An entry more, which must begin where the one before it ends.
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
            || format!("sequence {id} begins at {start}, stands at {at}"),
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
        // Once the plan before is closed, the row that it sampled means nothing any more.
        let pending_row = entry.pending_row;
        ensure(oldest || pending_row == self.sample_row, || {
            let sampled = self.sample_row;
            format!("sequence {id} computes row {pending_row:?}, row {sampled:?} samples it")
        })?;
        self.plans = self.plans.with(plan.seat);
        self.last_plan = serial;
        self.pending += u8::from(entry.samples());
        self.speculating = drafts > 0;
        Ok(())
    }

    fn check_end(&self, seq: &Sequence) -> Result<(), String> {
        let id = seq.id;
        let (says, counted) = ((seq.plans, seq.pending), (self.plans, self.pending));
        ensure(says == counted, || {
            format!("sequence {id}: {says:?} plans and pending tokens, counted {counted:?}")
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
            let (says, row) = (seq.sample_row, self.sample_row);
            format!("sequence {id} has sample row {says:?}, counted {row:?}")
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::scene::*;

    const OLDER: usize = 0;
    const NEWER: usize = 1;

    fn plan(s: &mut Scene, plan: usize) -> &mut Plan {
        &mut s.manager.steps.open[plan]
    }

    fn entry(s: &mut Scene, at: usize, slot: u32) -> &mut Entry {
        let mut entries = plan(s, at).entries.iter_mut();
        entries.find(|entry| entry.slot == slot).expect("planned")
    }

    fn extra(s: &mut Scene, at: usize, slot: u32) -> &mut Extra {
        let extra = entry(s, at, slot).extra.as_mut();
        extra.expect("more than a decode")
    }

    const PLANS: &[Case] = &[
        ("is another manager's", |s| plan(s, OLDER).key.manager += 1),
        ("plan 0 follows plan 0 of", |s| {
            plan(s, OLDER).key.serial = 0
        }),
        ("follows plan 12 of 12", |s| plan(s, OLDER).key.serial = 12),
        ("plan 12 follows plan 11 of 11", |s| {
            s.manager.steps.made = 11
        }),
        ("plan 12 begins with 99 decodes, counted", |s| {
            plan(s, NEWER).decodes = 99
        }),
        ("two plans have one seat", |s| {
            plan(s, NEWER).seat = plan(s, OLDER).seat
        }),
        ("1 entries are in no plan", |s| {
            let entry = plan(s, NEWER).entries.pop().expect("one");
            s.manager.steps.spare_entries.push(entry);
        }),
        ("plan 11 holds a sequence that is gone", |s| {
            entry(s, OLDER, LEFT).slot = 99
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
        ("sequence 4 copies entry 2 to write in row 2", |s| {
            extra(s, NEWER, CHILD).copied[0].0 = 2;
        }),
        ("sequence 4: plan 12 does not copy", |s| {
            plan(s, NEWER).copies_mut()[0].1 = BlockId::from(0);
        }),
        ("and does not hold it", |s| {
            let (source, _) = plan(s, NEWER).copies()[0];
            plan(s, NEWER).fenced.retain(|block| *block != source);
        }),
        ("plan 12 copies 5 blocks, counted 4", |s| {
            let copy = plan(s, NEWER).copies()[0];
            plan(s, NEWER).add_copies([copy]);
        }),
        ("sequence 17: plan 12 does not copy or hold", |s| {
            extra(s, NEWER, BORROWER).lent[1] = BlockId::from(0);
        }),
        ("sequence 17: plan 12 does not copy or hold", |s| {
            let source = extra(s, NEWER, BORROWER).lent[0];
            plan(s, NEWER).fenced.retain(|block| *block != source);
        }),
        ("sequence 17 is lent 1 tokens that BlockId(", |s| {
            s.seq(BORROWER).tokens[3] += 1;
        }),
        ("sequence 17 has 1 tokens that no block lends", |s| {
            extra(s, NEWER, BORROWER).lent.clear();
        }),
        ("is to be computed in step 12 by nobody", |s| {
            extra(s, NEWER, LONG).announced -= 1;
        }),
    ];

    const ENTRIES: &[Case] = &[
        ("sequence 9 is planned without blocks", |s| {
            entry(s, NEWER, LONG).new_rows = 99
        }),
        ("sequence 3 writes in Some(BlockId(", |s| {
            entry(s, NEWER, CHILD).slot = PARENT;
        }),
        ("sequence 9 was at 6 with 1 rows", |s| {
            entry(s, OLDER, LONG).new_rows -= 1;
            entry(s, NEWER, LONG).new_rows += 1;
        }),
        ("sequence 9 writes from 12, has blocks of 3 rows", |s| {
            entry(s, NEWER, LONG).rows_there = 4;
        }),
        ("sequence 9 announces from row 2, not 3", |s| {
            extra(s, NEWER, LONG).announce_from = 2;
        }),
        ("sequence 9 was led to row 6, stands on 5", |s| {
            extra(s, NEWER, LONG).announced = 3
        }),
        ("sequence 9 stood on", |s| {
            let tip = s.seq(REST).registered.tip;
            extra(s, NEWER, LONG).stood.tip = tip;
        }),
        ("sequence 9 has [5] present of 6..10", |s| {
            extra(s, NEWER, LONG).present = vec![5]
        }),
        (
            "sequence 16 starts at 1 with 1 tokens of 0 rows reused",
            |s| {
                let entry = entry(s, OLDER, LEFT);
                entry.start = 1;
                let extra = extra(s, OLDER, LEFT);
                (extra.len, extra.reused_tokens) = (extra.len - 1, 1);
            },
        ),
        ("sequence 9 reused 3 blocks of 2", |s| {
            extra(s, NEWER, LONG).matched_blocks = 3
        }),
        ("sequence 9 announces what it must not", |s| {
            s.manager.state.sharing = false
        }),
        ("sequence 14 reuses what it must not", |s| {
            s.seq(FULL).read_cache = false
        }),
        ("sequence 10 shares", |s| plan(s, OLDER).entries.swap(0, 1)),
        ("plan 11 announces entry 1 without content", |s| {
            extra(s, NEWER, LONG).unseen.clear(); // the newer plan has it
        }),
        ("is twice in plan 12, or after its drafts", |s| {
            let slot = entry(s, NEWER, TALK).slot;
            entry(s, NEWER, BRIEF).slot = slot;
        }),
        ("sequence 9 begins at 10, stands at 6", |s| {
            entry(s, NEWER, LONG).start = 10
        }),
        ("and does not sample", |s| {
            extra(s, NEWER, DRAFTY).samples = false
        }),
        ("computes row Some(9), row", |s| {
            entry(s, NEWER, TALK).pending_row = Some(SampleRow::new(9))
        }),
        ("plans and pending tokens, counted", |s| {
            s.seq(TALK).plans = Seats::FIRST
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
    }
}
