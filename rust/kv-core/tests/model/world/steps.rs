//! Operations on open steps: planning, the device's inputs, the end.

use std::collections::HashMap;

use kv_core::{
    Error, IntArray, Miss, MissReason, PlanKey, Prefill, PrefillRequest, SeqHandle, SharedI64,
    StateCopy, StepArrays,
};
use proptest::prelude::*;
use proptest::test_runner::TestCaseError;

use super::super::sharing;
use super::{Inputs, Op, ROWS, Row, Step, TOKENS, WIDTH, World};

/// The call must be refused with this error.
macro_rules! refused {
    ($call:expr, $error:pat) => {{
        let answer = $call;
        prop_assert!(
            matches!(answer, $error),
            "{} was not refused",
            stringify!($call)
        );
    }};
}

impl World {
    pub(super) fn apply_step(&mut self, op: &Op) -> Result<(), TestCaseError> {
        if let Op::Decoding(seed) = *op {
            return self.decoding(seed);
        }
        let plans = matches!(op, Op::Prefill(..) | Op::Decode(..) | Op::Speculate(..));
        let is_launched = |step: &Step| step.launched.is_some();
        if plans && self.steps.len() < 2 && self.steps.back().is_none_or(is_launched) {
            self.begin(63)?; // or most operations would find nothing to do
        }
        let plan = match (op, self.steps.back()) {
            (Op::Begin(budget), _) => return self.begin(*budget),
            (_, None) => return Ok(()),
            (_, Some(step)) => step.handle.key(),
        };
        let planning = self
            .steps
            .back()
            .is_some_and(|step| step.launched.is_none());
        match *op {
            Op::Prefill(seq, request) if planning => {
                if let Some(i) = Self::pick(&self.handles, seq) {
                    self.prefill(plan, i, request)?;
                }
            }
            Op::Decode(mask, lookahead) if planning => self.decode(plan, mask, lookahead)?,
            Op::Speculate(i, drafts) if planning => {
                if let Some(i) = Self::pick(&self.handles, i) {
                    self.speculate(plan, i, drafts)?;
                }
            }
            Op::Draft(mask, drafts) if planning => self.draft(plan, mask, drafts)?,
            Op::Cancel(i) if planning => self.cancel(plan, i)?,
            Op::Launch if planning => self.launch(self.steps.len() - 1)?,
            Op::Commit(seed) => self.commit(seed)?,
            Op::WrongCommit => self.wrong_commit()?,
            Op::Rollback => {
                if let (Some(oldest), 2) = (self.steps.front(), self.steps.len()) {
                    let oldest = oldest.handle.key();
                    refused!(self.manager.rollback(oldest), Err(Error::PlanOrder { .. }));
                    refused!(self.manager.commit(plan, &[]), Err(Error::PlanOrder { .. }));
                    refused!(
                        self.manager.decode(oldest, &[], 0),
                        Err(Error::PlanOrder { .. })
                    );
                }
                self.manager.rollback(plan).expect("the newest");
                refused!(self.manager.rollback(plan), Err(Error::PlanClosed { .. }));
                self.rolled_back();
            }
            Op::DropPlan(oldest) => {
                // The steps planned on top of a lost one go with it.
                let lost = if oldest { 0 } else { self.steps.len() - 1 };
                let kept: Vec<Step> = self.steps.drain(lost..).collect();
                for mut step in kept.into_iter().rev() {
                    step.rows.clear();
                    self.steps.push_back(step);
                    self.rolled_back();
                }
            }
            _ => {}
        }
        Ok(())
    }

    fn begin(&mut self, budget: usize) -> Result<(), TestCaseError> {
        if self.steps.len() == 2 {
            refused!(self.manager.begin_step(1), Err(Error::PlanOpen { .. }));
            return Ok(());
        }
        if self
            .steps
            .back()
            .is_some_and(|step| step.launched.is_none())
        {
            // As a rule its inputs are taken now; they may be taken later too.
            if !budget.is_multiple_of(4) {
                self.launch(0)?;
            }
        }
        let handle = self.manager.begin_step(budget).expect("less than two open");
        self.steps.push_back(Step {
            handle,
            rows: Vec::new(),
            decodes: Vec::new(),
            drafts: HashMap::new(),
            launched: None,
        });
        self.model.begin(budget);
        Ok(())
    }

    fn prefill(
        &mut self,
        plan: PlanKey,
        i: usize,
        request: PrefillRequest,
    ) -> Result<(), TestCaseError> {
        let (key, id) = (self.handles[i].key(), self.handles[i].id());
        let known = self.manager.view(key).expect("live");
        let pending = known.num_pending_tokens > 0 || self.speculates(id);
        let left = known.tokens.len().saturating_sub(known.num_planned_tokens);
        let (is_first, read_cache) = match self.model.seqs.get(&id) {
            Some(seq) => (seq.ahead == 0 && request.replay == 0, seq.read_cache),
            None => (false, false),
        };
        let seq = self.model.seqs.get(&id);
        let (namespace, switch) = seq.map_or((0, None), |seq| (seq.namespace, seq.switch));
        let prompt = known.tokens.to_vec();
        let is_explained = self.is_explained() && is_first;
        let miss = match is_explained && read_cache {
            true => self.explain(namespace, switch, &prompt)?,
            false => Some(Miss {
                position: 0,
                reason: MissReason::ReadsDisabled,
            }),
        };
        let answer = self.manager.prefill_again(plan, key, request);
        if self.in_newest(id) || pending {
            prop_assert_eq!(answer, Err(Error::InPlan { sequence: id }));
            return Ok(());
        }
        if left == 0 {
            prop_assert_eq!(answer, Err(Error::NothingToCompute { sequence: id }));
            return Ok(());
        }
        if self.exact {
            prop_assert_eq!(&answer, &self.model.prefill(id, request));
        }
        prop_assert!(answer.is_ok(), "{:?}", answer);
        if matches!(answer, Ok(Prefill::Planned { .. })) {
            let recorded = self.manager.view(key).expect("live").miss;
            prop_assert!(
                !is_explained || recorded == miss.as_ref(),
                "{recorded:?}, not {miss:?}"
            );
            self.steps.back_mut().expect("open").rows.push(id);
        }
        *self.counts.entry("computing_prefills").or_default() +=
            u64::from(answer == Ok(Prefill::Computing));
        if let Ok(Prefill::Loading { transfer }) = answer {
            let mut loads = self.loads.iter();
            prop_assert!(loads.any(|load| load.transfer.key().serial() == transfer));
            *self.counts.entry("waiting_prefills").or_default() += 1;
        }
        Ok(())
    }

    fn cancel(&mut self, plan: PlanKey, i: usize) -> Result<(), TestCaseError> {
        // Mostly one that is in the plan: the first ones have others that share with them.
        let rows = &self.steps.back().expect("open").rows;
        let planned = Self::pick(rows, i / 4).map(|at| rows[at]);
        let known = |id| self.handles.iter().position(|handle| handle.id() == id);
        let chosen = planned.filter(|_| !i.is_multiple_of(4)).and_then(known);
        let Some(i) = chosen.or(Self::pick(&self.handles, i)) else {
            return Ok(());
        };
        let (key, id) = (self.handles[i].key(), self.handles[i].id());
        let answer = self.manager.cancel(plan, key).ok();
        prop_assert_eq!(answer.is_some(), self.in_newest(id));
        if self.exact {
            prop_assert_eq!(&answer, &self.model.cancel(id));
        }
        let step = self.steps.back_mut().expect("open");
        for id in answer.iter().flat_map(|others| others.iter().chain([&id])) {
            step.rows.retain(|planned| planned != id);
            step.drafts.remove(id);
            step.decodes.retain(|planned| planned != id);
        }
        Ok(())
    }

    fn wrong_commit(&mut self) -> Result<(), TestCaseError> {
        let oldest = self.steps.front().expect("open").handle.key();
        let samples = self.manager.plan_view(oldest).expect("open").num_samples;
        let wrong = vec![0; samples + 1];
        let answer = self.manager.commit(oldest, &wrong);
        // A step reads its copies when it is launched, and nothing is planned into it afterwards.
        let is_launched = self.steps.front().expect("open").launched.is_some();
        let copies = self.model.plans.first().map_or(0, |plan| plan.copies.len());
        match answer {
            Err(Error::SampleCount { .. }) => {
                prop_assert!(is_launched || !self.exact || copies == 0)
            }
            Err(Error::CopiesNotRead { copies: unread, .. }) => {
                prop_assert!(!is_launched);
                prop_assert!(!self.exact || copies == unread);
            }
            answer => prop_assert!(false, "a wrong commit was answered {answer:?}"),
        }
        Ok(())
    }

    /// The newest step was rolled back, by a call or by losing its handle.
    fn rolled_back(&mut self) {
        drop(self.steps.pop_back());
        if self.exact {
            self.model.roll_back();
        }
    }

    fn speculate(&mut self, plan: PlanKey, i: usize, drafts: usize) -> Result<(), TestCaseError> {
        let (key, id) = (self.handles[i].key(), self.handles[i].id());
        let view = self.manager.view(key).expect("live");
        let ready = view.tokens.len() == view.num_planned_tokens + 1
            && view.num_pending_tokens == 0
            && !self.in_newest(id)
            && !self.speculates(id);
        let drafts: Vec<u32> = (0..drafts as u32).map(|at| (at + id as u32) % 3).collect();
        let answer = self.manager.speculate(plan, key, &drafts);
        prop_assert_eq!(answer.is_ok(), ready);
        let Ok(answer) = answer else { return Ok(()) };
        if self.exact {
            prop_assert_eq!(answer, self.model.speculate(id, drafts.clone()));
        }
        if matches!(answer, Prefill::Planned { .. }) {
            let step = self.steps.back_mut().expect("open");
            step.rows.push(id);
            if drafts.is_empty() {
                step.decodes.push(id); // that is what it is
            } else {
                step.drafts.insert(id, drafts);
            }
        }
        Ok(())
    }

    /// Drafts for some decodes of the newest step, as far as blocks and budget allow.
    fn draft(&mut self, plan: PlanKey, mask: u8, max_drafts: usize) -> Result<(), TestCaseError> {
        let step = self.steps.back().expect("open");
        let holding = |id: u64| {
            self.steps
                .iter()
                .filter(|step| step.rows.contains(&id))
                .count()
        };
        let valid = |id: u64| {
            let drafts = step.drafts.contains_key(&id);
            step.decodes.contains(&id) && !drafts && holding(id) == 1
        };
        let all = self.handles.iter().enumerate();
        let chosen = all.filter(|(i, handle)| {
            // Some that cannot have drafts, to see that misuse changes nothing.
            (mask >> (i % 8)) & 1 == 1 && (mask < 16 || valid(handle.id()))
        });
        let chosen: Vec<_> = chosen
            .map(|(_, handle)| (handle.key(), handle.id()))
            .collect();
        let keys: Vec<_> = chosen.iter().map(|chosen| chosen.0).collect();
        let drafts = |id: u64| -> Vec<u32> {
            let count = (id as usize + max_drafts) % 4;
            (0..count as u32).map(|at| (at + id as u32) % 3).collect()
        };
        let all: Vec<Vec<u32>> = chosen.iter().map(|chosen| drafts(chosen.1)).collect();
        let counts: Vec<usize> = all.iter().map(Vec::len).collect();
        let answer = self.manager.draft(plan, &keys, &all.concat(), &counts);
        let expected = chosen.iter().all(|chosen| valid(chosen.1));
        prop_assert_eq!(answer.is_ok(), expected, "{:?}", answer);
        refused!(
            self.manager.draft(plan, &[], &[1], &[]),
            Err(Error::DraftCount { .. })
        );
        let Ok(taken) = answer else { return Ok(()) };
        for ((&(_, id), mut drafts), count) in chosen.iter().zip(all).zip(taken) {
            if self.exact {
                prop_assert_eq!(count, self.model.draft(id, drafts.clone()));
            }
            drafts.truncate(count);
            if count > 0 {
                let step = self.steps.back_mut().expect("open");
                step.drafts.insert(id, drafts);
            }
        }
        Ok(())
    }

    fn decode(&mut self, plan: PlanKey, mask: u8, lookahead: usize) -> Result<(), TestCaseError> {
        let ready = |handle: &&SeqHandle| {
            let view = self.manager.view(handle.key()).expect("live");
            let known = view.tokens.len() + view.num_pending_tokens;
            !self.in_newest(handle.id())
                && !self.speculates(handle.id())
                && known == view.num_planned_tokens + 1
        };
        // Some that cannot decode, to see that misuse changes nothing.
        let all = self.handles.iter().enumerate();
        let chosen: Vec<&SeqHandle> = match mask {
            0..8 => all
                .filter(|(i, _)| (mask >> (i % 3)) & 1 == 1)
                .map(|(_, handle)| handle)
                .collect(),
            _ => all
                .filter(|(i, _)| (mask >> (i % 8)) & 1 == 1)
                .map(|(_, handle)| handle)
                .filter(ready)
                .collect(),
        };
        let valid = chosen.iter().all(ready);
        let keys: Vec<_> = chosen.iter().map(|handle| handle.key()).collect();
        let ids: Vec<_> = chosen.iter().map(|handle| handle.id()).collect();
        let answer = self.manager.decode(plan, &keys, lookahead);
        prop_assert_eq!(answer.is_ok(), valid, "{:?}", answer);
        let Ok(rejected) = answer else { return Ok(()) };
        if self.exact {
            let fit: Vec<bool> = ids
                .iter()
                .map(|&id| self.model.decode(id, lookahead))
                .collect();
            let expected: Vec<usize> = (0..fit.len()).filter(|&i| !fit[i]).collect();
            prop_assert_eq!(&rejected, &expected);
        }
        let fits = (0..ids.len())
            .filter(|i| !rejected.contains(i))
            .map(|i| ids[i]);
        let fits: Vec<u64> = fits.collect();
        if self.exact {
            self.model.plan_decode_states(&fits, true);
        }
        let step = self.steps.back_mut().expect("open");
        step.decodes.extend(&fits);
        step.rows.extend(fits);
        Ok(())
    }

    fn decoding(&mut self, seed: u8) -> Result<(), TestCaseError> {
        for seed in seed..seed.saturating_add(4) {
            while !self.steps.is_empty() {
                self.commit(seed)?;
            }
            self.begin(64)?;
            let plan = self.steps.back().expect("open").handle.key();
            self.decode(plan, u8::MAX, 0)?;
            self.compare()?;
        }
        Ok(())
    }

    /// Hands a step's inputs to the device: from now on it is what it is.
    fn launch(&mut self, at: usize) -> Result<(), TestCaseError> {
        let a = &self.arrays;
        let arrays = StepArrays {
            input_ids: IntArray::I64(&a.ids),
            positions: IntArray::I32(&a.positions),
            slot_mapping: IntArray::I64(&a.slots),
            slots_width: TOKENS,
            query_start_loc: IntArray::I32(&a.starts),
            seq_lens: IntArray::I32(&a.lens),
            block_tables: IntArray::I32(&a.tables),
            table_rows: ROWS,
            table_width: WIDTH,
            logits_indices: IntArray::I64(&a.logits),
        };
        let step = &self.steps[at];
        let plan = step.handle.key();
        let size = self.model.block_size;
        self.sharing.fills += 1;
        if self.sharing.fills.is_multiple_of(5) {
            let filled = self.manager.fill(plan, &arrays, &mut self.rows);
            filled.expect("the arrays are large enough");
        } else {
            for at in 0..self.sharing.prefixes.len() {
                let (limits, shared) = &mut self.sharing.prefixes[at];
                let before = shared.version();
                let filled = self
                    .manager
                    .fill_shared(plan, &arrays, &mut self.rows, shared);
                filled.expect("the arrays are large enough");
                let view = self.manager.plan_view(plan).expect("open");
                let group = at / 2;
                // Blocks before all positions that a row computes; a window moves on.
                let leading = |row: usize| -> Vec<usize> {
                    let first = a.positions[a.starts[row].get() as usize].get() as usize;
                    let num_blocks = match self.model.groups[group] {
                        None => (first + 1) / size,
                        Some(_) => 0,
                    };
                    let table = &a.tables[(group * ROWS + row) * WIDTH..][..num_blocks];
                    table.iter().map(|block| block.get() as usize).collect()
                };
                let tables: Vec<_> = (0..view.num_sequences).map(leading).collect();
                sharing::compare(shared, &tables, *limits)?;
                self.sharing.num_prefixes += shared.prefixes().len() as u64;
                let unchanged = shared.version() == before && !shared.prefixes().is_empty();
                self.sharing.num_unchanged += u64::from(unchanged);
            }
        }
        let loads = self.manager.state_loads(plan).expect("open");
        let saves = self.manager.state_saves(plan).expect("open");
        let copies = self.manager.copies(plan).expect("open");
        if self.exact {
            let copies: Vec<_> = copies
                .iter()
                .map(|(from, to)| (from.get(), to.get()))
                .collect();
            prop_assert_eq!(&copies, &self.model.plans[at].copies);
        }
        let copies = copies.iter();
        if self.exact {
            let numbers = |all: &[StateCopy]| -> Vec<_> {
                let of = |copy: &StateCopy| {
                    let blocks = copy.blocks.iter().map(|block| block.get());
                    (copy.sequence, copy.position, blocks.collect::<Vec<_>>())
                };
                all.iter().map(of).collect()
            };
            let works = &self.model.plans[at].works;
            let load = works
                .iter()
                .filter_map(|of| Some((of.seq, of.load.clone()?)));
            let load: Vec<_> = load.map(|(seq, (at, blocks))| (seq, at, blocks)).collect();
            prop_assert_eq!(numbers(&loads), load);
            let save = works
                .iter()
                .filter_map(|of| Some((of.seq, of.save.clone()?)));
            let save: Vec<_> = save.map(|(seq, (at, blocks))| (seq, at, blocks)).collect();
            prop_assert_eq!(numbers(&saves), save);
        }
        let copies = copies
            .map(|(from, to)| (from.get() as usize, to.get() as usize))
            .collect();
        let view = self.manager.plan_view(plan).expect("open");
        let groups = self.model.groups.len();
        let row = |row: usize| {
            let span = a.starts[row].get() as usize..a.starts[row + 1].get() as usize;
            let len = a.lens[row].get() as usize;
            let logits = a.logits[..view.num_samples].iter();
            let table = |group: usize| {
                let table = &a.tables[(group * ROWS + row) * WIDTH..][..len.div_ceil(size)];
                table.iter().map(|block| block.get() as usize).collect()
            };
            let slots = |group: usize| {
                let slots = &a.slots[group * TOKENS..][span.clone()];
                slots.iter().map(SharedI64::get).collect()
            };
            Row {
                first: a.positions[span.start].get() as usize,
                ids: a.ids[span.clone()].iter().map(SharedI64::get).collect(),
                slots: (0..groups).map(slots).collect(),
                tables: (0..groups).map(table).collect(),
                samples: logits
                    .filter(|at| span.contains(&(at.get() as usize)))
                    .count(),
            }
        };
        let rows = (0..view.num_sequences).map(row).collect();
        self.steps[at].launched = Some(Inputs {
            copies,
            loads,
            saves,
            rows,
        });
        Ok(())
    }

    /// Runs the oldest step on the simulated KV cache, then commits it.
    fn commit(&mut self, seed: u8) -> Result<(), TestCaseError> {
        for at in 0..self.steps.len() {
            // The second step may be on its way already, with tokens that are still pending.
            if self.steps[at].launched.is_none() && (at == 0 || seed.is_multiple_of(2)) {
                self.launch(at)?;
            }
        }
        self.run_step()?;
        let step = self.steps.front().expect("open");
        let inputs = step.launched.as_ref().expect("launched");
        let accept = |(row, id): (&Row, &u64)| {
            let drafts = step.drafts.get(id).cloned();
            let mut tokens = drafts.unwrap_or_default();
            let sum = usize::from(seed) + *id as usize;
            prop_assert_eq!(row.samples, tokens.len() + 1);
            tokens.truncate(sum % (tokens.len() + 1));
            tokens.push(sum as u32 % 3);
            Ok(tokens)
        };
        let sampling = inputs
            .rows
            .iter()
            .zip(&step.rows)
            .filter(|(row, _)| row.samples > 0);
        let samples: Vec<(u64, usize)> = sampling
            .clone()
            .map(|(row, id)| (*id, row.samples))
            .collect();
        let accepted: Vec<Vec<u32>> = sampling.map(accept).collect::<Result<_, _>>()?;
        for (row, id) in inputs.rows.iter().zip(&step.rows) {
            // As many states as there are drafts; the one after the last accepted one remains.
            let rejected = samples.iter().position(|(of, _)| of == id);
            let rejected = rejected.map_or(0, |at| row.samples - accepted[at].len());
            if let Some(state) = self.running.get_mut(id) {
                state.truncate(row.first + row.ids.len() - rejected);
            }
        }
        let plan = step.handle.key();
        let tokens = accepted.concat();
        let counts: Vec<usize> = accepted.iter().map(Vec::len).collect();
        self.refuse_wrong_commits(plan, &tokens, &counts)?;
        let remappings = if counts.iter().all(|&count| count == 1) {
            self.manager.commit(plan, &tokens)
        } else {
            self.manager.commit_accepted(plan, &tokens, &counts)
        };
        let remappings = remappings.expect("the oldest");
        refused!(
            self.manager.commit(plan, &[]),
            Err(Error::PlanClosed { .. })
        );
        self.sampled.clear();
        for ((id, rows), tokens) in samples.iter().zip(&accepted) {
            self.sampled.resize(self.sampled.len() + rows, tokens[0]);
            if !self.exact {
                let seq = self.model.seqs.get_mut(id).expect("planned");
                seq.extend(tokens);
            }
        }
        drop(self.steps.pop_front());
        if self.exact {
            prop_assert_eq!(remappings, self.model.commit(&accepted));
        }
        Ok(())
    }

    fn refuse_wrong_commits(
        &mut self,
        plan: PlanKey,
        tokens: &[u32],
        counts: &[usize],
    ) -> Result<(), TestCaseError> {
        let more = [tokens, &[0; 9]].concat();
        for at in 0..counts.len() {
            let mut wrong = counts.to_vec();
            wrong[at] += 9; // more than any number of drafts
            let answer = self.manager.commit_accepted(plan, &more, &wrong);
            refused!(answer, Err(Error::Accepted { .. }));
        }
        let counts = [counts, &[1]].concat();
        let answer = self.manager.commit_accepted(plan, &more, &counts);
        refused!(answer, Err(Error::SampleCount { .. }));
        Ok(())
    }

    fn run_step(&mut self) -> Result<(), TestCaseError> {
        let size = self.model.block_size;
        let step = self.steps.front().expect("open");
        let inputs = step.launched.as_ref().expect("launched");
        for &(from, to) in &inputs.copies {
            for offset in 0..size {
                self.kv[to * size + offset] = self.kv[from * size + offset].clone();
            }
        }
        for &(_, to) in &inputs.copies {
            self.states[to] = None;
        }
        self.run_states()?;
        let step = self.steps.front().expect("open");
        let inputs = step.launched.as_ref().expect("launched");
        for (row, id) in inputs.rows.iter().zip(&step.rows) {
            let all = self.all_tokens(step, *id);
            for (at, position) in (row.first..row.first + row.ids.len()).enumerate() {
                let token = match row.ids[at] {
                    pending @ ..0 => {
                        *self.counts.entry("pending_tokens").or_default() += 1;
                        self.sampled[(-1 - pending) as usize]
                    }
                    token => token as u32,
                };
                prop_assert_eq!(
                    token,
                    all[position] & 0xff,
                    "sequence {} position {}",
                    id,
                    position
                );
                for (slots, table) in row.slots.iter().zip(&row.tables) {
                    let slot = table[position / size] * size + position % size;
                    match slots[at] {
                        -1 => {
                            prop_assert!(self.kv[slot].is_some(), "slot {} was never written", slot)
                        }
                        given => {
                            prop_assert_eq!(given as usize, slot);
                            self.states[slot / size] = None;
                            self.kv[slot] = Some(self.model.kv_of(*id, &all[..=position]));
                        }
                    }
                }
            }
        }
        // As on a GPU: everything is written before anything is read.
        for (row, id) in inputs.rows.iter().zip(&step.rows) {
            self.read_row(row, *id, &self.all_tokens(step, *id))?;
        }
        for StateCopy {
            sequence,
            position,
            blocks,
        } in &inputs.saves
        {
            let state = &self.running[sequence];
            prop_assert_eq!(state.len(), *position, "sequence {}", sequence);
            let namespace = self.model.seqs[sequence].namespace;
            for (part, block) in blocks.iter().enumerate() {
                let block = block.get() as usize;
                self.states[block] = Some(((namespace, state.clone()), part));
                self.kv[block * size..][..size].fill(None);
            }
        }
        Ok(())
    }

    /// Each row's running state adds its tokens, from where it is or from a snapshot.
    fn run_states(&mut self) -> Result<(), TestCaseError> {
        if self.model.state.is_none() {
            return Ok(());
        }
        let step = self.steps.front().expect("open");
        let inputs = step.launched.as_ref().expect("launched");
        for StateCopy {
            sequence,
            position,
            blocks,
        } in &inputs.loads
        {
            let seq = &self.model.seqs[sequence];
            let state = self.model.kv_of(*sequence, &seq.tokens[..*position]);
            for (part, block) in blocks.iter().enumerate() {
                let read = self.states[block.get() as usize].as_ref();
                let expected = (state.clone(), part);
                prop_assert_eq!(read, Some(&expected), "sequence {}", sequence);
            }
            prop_assert_eq!(blocks.is_empty(), *position == 0);
            self.running.insert(*sequence, state.1);
        }
        for (row, id) in inputs.rows.iter().zip(&step.rows) {
            let all = self.model.kv_of(*id, &self.all_tokens(step, *id)).1;
            let state = self.running.get(id).map(Vec::as_slice);
            prop_assert_eq!(state, Some(&all[..row.first]), "sequence {}", id);
            let end = row.first + row.ids.len();
            self.running.insert(*id, all[..end].to_vec());
        }
        Ok(())
    }

    /// A row's tokens read the right KV: everything before them, or their window of it.
    fn read_row(&self, row: &Row, id: u64, all: &[u32]) -> Result<(), TestCaseError> {
        let size = self.model.block_size;
        for (table, window) in row.tables.iter().zip(&self.model.groups) {
            let first = window.map_or(0, |window| (row.first + 1).saturating_sub(window));
            for position in first..row.first + row.ids.len() {
                let slot = table[position / size] * size + position % size;
                let expected = Some(self.model.kv_of(id, &all[..=position]));
                let read = self.kv.get(slot).and_then(Option::as_ref);
                prop_assert_eq!(
                    read,
                    expected.as_ref(),
                    "sequence {} position {}",
                    id,
                    position
                );
            }
            // Released entries read as the null block.
            for &block in &table[..first / size] {
                prop_assert!(block * size <= self.kv.len());
            }
        }
        Ok(())
    }

    /// The tokens of a sequence, and its drafts in the step.
    fn all_tokens(&self, step: &Step, id: u64) -> Vec<u32> {
        let drafts = step.drafts.get(&id).map_or(&[][..], Vec::as_slice);
        let seq = &self.model.seqs[&id];
        [&seq.tokens[..], &seq.marked(drafts)].concat()
    }
}
