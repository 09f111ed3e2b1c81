//! Snapshots of states in the model: named by all tokens that went into them.

use kv_core::{
    BlockId, EvictedBy, Eviction, Explanation, Extend, Miss, MissReason, Prefill, PrefillRequest,
    StateConfig,
};

use super::{EntryKind, Load, LogicalBlock, Model, PrefixKey, Seq, blocks};

/// A cached snapshot.
#[derive(Clone, Debug)]
pub(super) struct Snapshot {
    pub(super) blocks: Vec<u32>,
    pub(super) is_spare: bool,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Prompt,
    Spare,
    Answer,
}

/// The snapshots that an open plan loads and writes for a sequence: positions and blocks.
#[derive(Clone, Debug)]
pub(crate) struct Work {
    pub(crate) seq: u64,
    last_kept: usize,
    pub(crate) load: Option<(usize, Vec<u32>)>,
    pub(crate) save: Option<(usize, Vec<u32>)>,
    kind: Kind,
}

impl Work {
    pub(super) fn blocks(&self) -> impl Iterator<Item = &u32> {
        let all = self.load.iter().chain(&self.save);
        all.flat_map(|(_, blocks)| blocks)
    }
}

/// A match: its logical blocks, and the position of the state and the snapshot that it continues.
#[derive(Default)]
pub(super) struct Found {
    pub(super) indices: Vec<LogicalBlock>,
    start: usize,
    snapshot: Option<PrefixKey>,
}

impl Model {
    fn config(&self) -> StateConfig {
        self.state.expect("a model with a state")
    }

    /// The prefix whose snapshot has a block.
    pub(super) fn snapshot_of(&self, block: u32) -> Option<PrefixKey> {
        let mut all = self.snapshots.iter();
        let of = all.find(|(_, snapshot)| snapshot.blocks.contains(&block));
        of.map(|(prefix, _)| prefix.clone())
    }

    pub(super) fn is_spare(&self, block: u32) -> bool {
        let mut all = self.snapshots.values();
        all.any(|snapshot| snapshot.is_spare && snapshot.blocks.contains(&block))
    }

    /// The match of a sequence that has not begun, up to its last snapshot, which counts as used now.
    pub(super) fn matched_to_snapshot(&mut self, seq: u64, s: &Seq) -> Vec<LogicalBlock> {
        if s.ahead > 0 {
            return Vec::new();
        }
        let is_ready = |block| self.is_ready(block);
        let limits = (0, s.tokens.len() - 1);
        let found = self.matched_with_state(s.namespace, &s.tokens, 0, 0, is_ready, limits);
        let Some(prefix) = found.snapshot else {
            return Vec::new();
        };
        let matched = self.matched(s.namespace, &s.tokens[..found.start], 0, 0, is_ready);
        if matched.len() * self.block_size < found.start {
            return Vec::new();
        }
        let snapshot = self.snapshots.get_mut(&prefix).expect("cached");
        snapshot.is_spare = false;
        for block in snapshot.blocks.clone() {
            self.unqueue(block);
            self.enqueue_unused([block]);
        }
        self.seqs.get_mut(&seq).expect("live").last_kept = found.start;
        matched
    }

    pub(crate) fn keep_snapshot(&mut self, seq: u64) -> Extend {
        let s = self.seqs[&seq].clone();
        let kept = |blocks: Vec<u32>| Extend::Extended {
            blocks: blocks.into_iter().map(BlockId::from).collect(),
            copies: Vec::new(),
        };
        let prefix = (s.namespace, s.tokens[..s.computed].to_vec());
        let is_registered = s.computed <= s.registered * self.block_size;
        if self.state.is_none() || !is_registered || self.snapshots.contains_key(&prefix) {
            return kept(Vec::new());
        }
        let (needed, available) = (self.config().blocks, self.queue.len());
        if needed > available {
            return Extend::NoRoom { needed, available };
        }
        let blocks = self.take_for_snapshot(false);
        let mut groups = 0..self.groups.len();
        let is_cached = groups.all(|group| self.known(prefix.0, &prefix.1, group).is_some());
        if is_cached {
            self.restore_snapshot(&prefix, &blocks);
            self.seqs.get_mut(&seq).expect("live").last_kept = s.computed;
        }
        self.enqueue_unused(blocks.iter().copied());
        kept(if is_cached { blocks } else { Vec::new() })
    }

    /// Caches a snapshot that a transfer has filled, unless its prefix has one.
    pub(super) fn restore_snapshot(&mut self, prefix: &PrefixKey, blocks: &[u32]) {
        let snapshot = Snapshot {
            blocks: blocks.to_vec(),
            is_spare: false,
        };
        self.snapshots.entry(prefix.clone()).or_insert(snapshot);
    }

    /// The transfer that is to fill a snapshot after the start of a match, and at most at `cap`.
    fn awaited_snapshot(&self, s: &Seq, found: &Found, cap: usize) -> Option<u64> {
        let cap = cap.min((s.registered + found.indices.len()) * self.block_size);
        let is_awaited = |load: &Load| match &load.snapshot {
            Some((Some((namespace, tokens)), _)) => {
                let is_prefix = *namespace == s.namespace && s.tokens.starts_with(tokens);
                is_prefix && found.start < tokens.len() && tokens.len() <= cap
            }
            _ => false,
        };
        let mut loads = self.loads.iter();
        loads
            .find(|(_, load)| is_awaited(load))
            .map(|(&number, _)| number)
    }

    pub(super) fn drop_snapshot(&mut self, prefix: &PrefixKey) {
        if let Some(snapshot) = self.snapshots.remove(prefix) {
            for &block in &snapshot.blocks {
                self.unqueue(block);
            }
            self.enqueue_unused(snapshot.blocks);
        }
    }

    /// A pin holds the last snapshot of its prefix, too.
    pub(super) fn pin_state(&mut self, pin: usize, namespace: u8, tokens: &[u32]) {
        let prefix = |at: usize| (namespace, tokens[..at].to_vec());
        let mut prefixes = (1..=tokens.len()).rev().map(prefix);
        if let Some(prefix) = prefixes.find(|prefix| self.snapshots.contains_key(prefix)) {
            let snapshot = self.snapshots.get_mut(&prefix).expect("just found");
            snapshot.is_spare = false;
            let blocks = snapshot.blocks.clone();
            blocks.iter().for_each(|&block| self.unqueue(block));
            self.pin_states.insert(pin, blocks);
        }
    }

    /// A snapshot whose last block is not cached in every group cannot be reached.
    pub(super) fn drop_orphans(&mut self) {
        let is_orphan = |prefix: &PrefixKey| {
            let mut groups = 0..self.groups.len();
            !groups.all(|group| self.cached_blocks.contains_key(&(prefix.clone(), group)))
        };
        let orphans: Vec<_> = self.snapshots.keys().filter(|at| is_orphan(at)).collect();
        let orphans: Vec<PrefixKey> = orphans.into_iter().cloned().collect();
        for prefix in orphans {
            self.drop_snapshot(&prefix);
        }
    }

    /// Blocks that spare snapshots may take.
    fn share(&self) -> usize {
        let config = self.config();
        let between = config.cadence.div_ceil(self.block_size).min(config.blocks);
        (self.num_blocks / 8 * between / config.blocks).max(config.blocks)
    }

    fn queued_spares(&self) -> Vec<u32> {
        let spare = |block: &u32| self.is_spare(*block);
        self.queue.iter().copied().filter(spare).collect()
    }

    fn num_free(&self) -> usize {
        let is_free = |block: &&u32| !self.is_cached(**block);
        self.queue.iter().filter(is_free).count()
    }

    fn victim(&self) -> Option<u32> {
        let spares = self.queued_spares();
        let is_regular = |block: &u32| self.is_cached(*block) && !spares.contains(block);
        let regular = self.queue.iter().copied().find(is_regular);
        match regular {
            Some(block) if spares.len() <= self.share() => Some(block),
            _ => spares.first().copied(),
        }
    }

    pub(super) fn evict_victim(&mut self) {
        let victim = self.victim().expect("blocks are available");
        match self.snapshot_of(victim) {
            Some(prefix) => self.drop_snapshot(&prefix),
            None => {
                self.unqueue(victim);
                self.evict_block(victim, EvictedBy::Policy(Eviction::Lru));
                self.enqueue_unused([victim]);
            }
        }
    }

    /// The blocks of keys and values among the next `count` that are evicted.
    pub(super) fn evict_with_state(&mut self, count: usize) -> Vec<u32> {
        let (mut left, mut evicted) = (count, Vec::new());
        while left > 0
            && let Some(victim) = self.victim()
        {
            let is_snapshot = self.snapshot_of(victim).is_some();
            self.evict_victim();
            if is_snapshot {
                left = left.saturating_sub(self.config().blocks);
            } else {
                left -= 1;
                self.unqueue(victim);
                evicted.push(victim);
            }
        }
        evicted
    }

    /// As `matched`, where the tokens after a hit continue a snapshot after `base` and at most at `cap`, or the state at
    /// `base`; windows reach back from there.
    pub(super) fn matched_with_state(
        &self,
        namespace: u8,
        tokens: &[u32],
        from: usize,
        replay: usize,
        usable: impl Fn(u32) -> bool,
        (base, cap): (usize, usize),
    ) -> Found {
        let size = self.block_size;
        for indices in (from + 1..=tokens.len() / size).rev() {
            let end = indices * size;
            let cap = cap.min(end.saturating_sub(replay));
            let prefix = |at: usize| (namespace, tokens[..at].to_vec());
            let kept = (base + 1..=cap).rev().map(prefix);
            let snapshot = { kept }.find(|prefix| self.snapshots.contains_key(prefix));
            let start = snapshot.as_ref().map_or(base, |prefix| prefix.1.len());
            let entry = |index: usize, group: usize| {
                let tokens = &tokens[..(index + 1) * size];
                match self.known(namespace, tokens, group) {
                    _ if index < self.first_index_of(group, indices, end - start) => Some(None),
                    Some(block) if usable(block) => Some(Some(block)),
                    _ => None,
                }
            };
            let blocks = |index| {
                (0..self.groups.len())
                    .map(|group| entry(index, group))
                    .collect()
            };
            let hit: Option<Vec<LogicalBlock>> = (from..indices).map(blocks).collect();
            if let Some(indices) = hit {
                return Found {
                    indices,
                    start,
                    snapshot,
                };
            }
        }
        Found {
            start: base,
            ..Found::default()
        }
    }

    pub(super) fn prefill_with_state(&mut self, seq: u64, request: PrefillRequest) -> Prefill {
        let s = self.seqs[&seq].clone();
        let may_match = self.caching && s.read_cache && s.ahead == s.registered * self.block_size;
        let may_match = may_match && !s.is_private;
        let mut found = Found {
            start: s.ahead,
            ..Found::default()
        };
        if may_match {
            let limits = (s.ahead, s.tokens.len() - 1);
            let (from, replay) = (s.registered, request.replay);
            found = self.matched_with_state(s.namespace, &s.tokens, from, replay, |_| true, limits);
        }
        if let Some(transfer) = blocks(&found.indices).find_map(|block| self.loading(block)) {
            return Prefill::Loading { transfer };
        }
        let end = (s.registered + found.indices.len()) * self.block_size;
        let cap = (s.tokens.len() - 1).min(end.saturating_sub(request.replay));
        if may_match && let Some(transfer) = self.awaited_snapshot(&s, &found, cap) {
            return Prefill::Loading { transfer };
        }
        let is_ready = |block| self.is_ready(block);
        if s.ahead == 0 && !blocks(&found.indices).all(is_ready) {
            return Prefill::Computing;
        }
        match self.prefill_after(seq, request, &found) {
            Prefill::NoRoom { .. }
                if !found.indices.is_empty() && (s.ahead > 0 || self.usage().active == 0) =>
            {
                let alone = Found {
                    start: s.ahead,
                    ..Found::default()
                };
                self.prefill_after(seq, request, &alone)
            }
            answer => answer,
        }
    }

    /// The first position after the start at which the state is kept, and why.
    fn next_cut(&self, s: &Seq, found: &Found, end: usize) -> Option<(usize, Kind)> {
        let (size, config) = (self.block_size, self.config());
        let last = (s.tokens.len() - 1) / size * size;
        let cached = (s.registered + found.indices.len()) * size;
        let mut cadence = config.cadence.div_ceil(size) * size;
        while cadence > 0 && last / cadence > self.share() / config.blocks {
            cadence *= 2;
        }
        let last_kept = match found.snapshot {
            Some(_) => found.start,
            None => s.last_kept,
        };
        (found.start + 1..=end).find_map(|at| {
            let is_apart = at >= last_kept + config.min_tokens;
            let is_kept = is_apart && (at == last || at == cached.min(last));
            if s.wanted.contains(&at) || is_kept {
                return Some((at, Kind::Prompt));
            }
            let is_spare = is_apart && cadence > 0 && at % cadence == 0;
            is_spare.then_some((at, Kind::Spare))
        })
    }

    fn prefill_after(&mut self, seq: u64, request: PrefillRequest, found: &Found) -> Prefill {
        let (size, s) = (self.block_size, self.seqs[&seq].clone());
        let PrefillRequest {
            max_tokens,
            spare_blocks,
            ..
        } = request;
        let (start, matched) = (found.start, &found.indices);
        let all = s.tokens.len();
        let fits = start + max_tokens.min(self.budget());
        let end = match fits / size * size {
            _ if fits >= all => all,
            boundary if boundary > start => boundary,
            _ => fits,
        };
        let replay = match matched.len() {
            0 => 0,
            indices => (s.registered + indices) * size - start,
        };
        let indices = s.table.len() + matched.len();
        let loaded = found
            .snapshot
            .as_ref()
            .map(|at| self.snapshots[at].blocks.clone());
        let reused = blocks(matched).chain(loaded.iter().flatten().copied());
        let revived = reused.filter(|block| self.queue.contains(block)).count();
        let copies = match matched.is_empty() {
            true => self.must_copy(seq, start).len(),
            false => 0,
        };
        let needed = |end: usize| {
            let now = end.div_ceil(size).saturating_sub(indices);
            let come = |group| match spare_blocks {
                None => now,
                Some(_) => self
                    .blocks_to_come(&s, matched, group, max_tokens, replay)
                    .max(now),
            };
            let new: usize = (0..self.groups.len()).map(come).sum();
            revived + new + copies + spare_blocks.unwrap_or(0)
        };
        let available = self.queue.len();
        let cut = if self.caching && !s.is_private {
            self.next_cut(&s, found, end)
        } else {
            None
        };
        let cut = cut.filter(|cut| needed(cut.0) + self.config().blocks <= available);
        let end = cut.map_or(end, |cut| cut.0);
        let needed = needed(end);
        if needed > available {
            return Prefill::NoRoom { needed, available };
        }
        let load = match (&found.snapshot, loaded) {
            (Some(at), Some(blocks)) => {
                self.snapshots.get_mut(at).expect("cached").is_spare = false;
                blocks.iter().for_each(|&block| self.unqueue(block));
                Some((start, blocks))
            }
            _ => (start == 0).then(|| (0, Vec::new())),
        };
        let is_load = load.is_some();
        self.newest().works.push(Work {
            seq,
            last_kept: s.last_kept,
            load,
            save: None,
            kind: Kind::Prompt,
        });
        let kind = EntryKind::Prefill { replay };
        self.push(seq, (matched, &[]), start, end - start, kind);
        if is_load {
            self.seqs.get_mut(&seq).expect("live").last_kept = start;
        }
        if let Some((at, kind)) = cut {
            let blocks = self.take_for_snapshot(kind == Kind::Spare);
            let work = self.newest().works.last_mut().expect("just pushed");
            (work.save, work.kind) = (Some((at, blocks)), kind);
            self.seqs.get_mut(&seq).expect("live").last_kept = at;
        }
        if !is_load && cut.is_none() {
            self.newest().works.pop();
        }
        Prefill::Planned {
            cached_tokens: start - s.ahead,
            tokens: end - start,
            samples: end == all,
        }
    }

    /// Blocks of a group that a sequence takes until all its tokens are computed.
    fn blocks_to_come(
        &self,
        s: &Seq,
        matched: &[LogicalBlock],
        group: usize,
        max_tokens: usize,
        replay: usize,
    ) -> usize {
        let size = self.block_size;
        let all = s.tokens.len().div_ceil(size);
        let Some(window) = self.groups[group] else {
            return all.saturating_sub(s.table.len() + matched.len());
        };
        let reach = window.div_ceil(size) + (max_tokens + 2 * size - 2) / size;
        let unseen = match matched.len() {
            0 => 0,
            indices => self.first_index_of(group, s.registered + indices, replay),
        };
        let (registered, reserved) = s.table.split_at(s.registered);
        let held = registered.iter().chain(matched).chain(reserved);
        let held = held.skip(unseen).filter(|blocks| blocks[group].is_some());
        reach.min(all).saturating_sub(held.count())
    }

    fn take_for_snapshot(&mut self, is_spare: bool) -> Vec<u32> {
        let count = self.config().blocks;
        while is_spare && self.num_free() < count {
            let spares = self.queued_spares();
            match spares.first() {
                Some(&oldest) if spares.len() + count > self.share() => {
                    let prefix = self.snapshot_of(oldest).expect("a spare snapshot");
                    self.drop_snapshot(&prefix);
                }
                _ => break,
            }
        }
        (0..count).map(|_| self.allocate()).collect()
    }

    /// Plans the states of decodes that were just planned.
    pub(crate) fn plan_decode_states(&mut self, decodes: &[u64], saves: bool) {
        let Some(config) = self.state else { return };
        let interval = config.min_tokens.max(1).div_ceil(self.block_size) * self.block_size;
        let reserve = decodes.len() * self.groups.len();
        for &seq in decodes {
            let entries = &self.newest().entries;
            let entry = entries
                .iter()
                .find(|entry| entry.seq == seq)
                .expect("planned");
            let (start, end) = (entry.start, entry.start + 1);
            let last_kept = self.seqs[&seq].last_kept;
            let is_apart = end >= last_kept + config.min_tokens && end % interval == 0;
            let has_room = self.queue.len() >= config.blocks + reserve;
            let registers = self.caching && !self.seqs[&seq].is_private;
            let is_kept = saves && is_apart && registers && has_room;
            let save = is_kept.then(|| (end, self.take_for_snapshot(false)));
            if is_kept {
                self.seqs.get_mut(&seq).expect("live").last_kept = end;
            }
            if is_kept || start == 0 {
                self.newest().works.push(Work {
                    seq,
                    last_kept,
                    load: (start == 0).then(|| (0, Vec::new())),
                    save,
                    kind: Kind::Answer,
                });
            }
        }
    }

    pub(super) fn drop_save(&mut self, seq: u64) {
        let works = &mut self.newest().works;
        let Some(work) = works.iter_mut().find(|work| work.seq == seq) else {
            return;
        };
        let (last_kept, save) = (work.last_kept, work.save.take());
        self.seqs.get_mut(&seq).expect("live").last_kept = last_kept;
        for block in save.into_iter().flat_map(|(_, blocks)| blocks) {
            self.enqueue_unused([block]);
        }
    }

    pub(super) fn undo_work(&mut self, seq: u64) {
        let works = &mut self.newest().works;
        let Some(at) = works.iter().position(|work| work.seq == seq) else {
            return;
        };
        let work = works.remove(at);
        self.seqs.get_mut(&seq).expect("live").last_kept = work.last_kept;
        for &block in work.blocks() {
            self.enqueue_unused([block]);
        }
    }

    /// The snapshots of the oldest plan are written.
    pub(super) fn close_works(&mut self) {
        while !self.plans[0].works.is_empty() {
            let work = self.plans[0].works[0].clone();
            if let Some((at, blocks)) = &work.save {
                self.store_snapshot(&work, *at, blocks);
            }
            self.plans[0].works.remove(0);
            for &block in work.blocks() {
                self.enqueue_unused([block]);
            }
        }
    }

    fn store_snapshot(&mut self, work: &Work, at: usize, blocks: &[u32]) {
        let s = self.seqs[&work.seq].clone();
        let prefix = |at: usize| (s.namespace, s.tokens[..at].to_vec());
        let mut groups = 0..self.groups.len();
        let is_cached =
            groups.all(|group| self.known(s.namespace, &s.tokens[..at], group).is_some());
        let is_registered = at <= s.registered * self.block_size;
        if !is_registered || !is_cached || self.snapshots.contains_key(&prefix(at)) {
            return;
        }
        let snapshot = Snapshot {
            blocks: blocks.to_vec(),
            is_spare: work.kind == Kind::Spare,
        };
        self.snapshots.insert(prefix(at), snapshot);
        if work.kind != Kind::Answer {
            return;
        }
        if s.answer > 0
            && let Some(before) = self.snapshots.get(&prefix(s.answer))
            && before.blocks.iter().all(|block| self.queue.contains(block))
        {
            self.drop_snapshot(&prefix(s.answer));
        }
        self.seqs.get_mut(&work.seq).expect("live").answer = at;
    }

    /// The snapshots of what a sequence has left are as recent as its blocks.
    pub(super) fn touch(&mut self, s: &Seq) {
        if self.state.is_none() {
            return;
        }
        let kept = s.kept_indices.unwrap_or(s.registered).min(s.registered);
        for index in (1..=kept).rev() {
            let prefix = (s.namespace, s.tokens[..index * self.block_size].to_vec());
            let Some(snapshot) = self.snapshots.get(&prefix).filter(|of| !of.is_spare) else {
                continue;
            };
            let blocks = snapshot.blocks.clone();
            if blocks.iter().all(|block| self.queue.contains(block)) {
                blocks.iter().for_each(|&block| self.unqueue(block));
                self.enqueue_unused(blocks);
            }
        }
    }

    pub(super) fn explain_with_state(&self, namespace: u8, tokens: &[u32]) -> Explanation {
        let (size, limits) = (self.block_size, (0, tokens.len() - 1));
        let is_ready = |block| self.is_ready(block);
        let ready = self.matched_with_state(namespace, tokens, 0, 0, is_ready, limits);
        let found = self.matched_with_state(namespace, tokens, 0, 0, |_| true, limits);
        let is_loading = blocks(&found.indices).any(|block| self.loading(block).is_some());
        let (indices, cached_to) = (found.indices.len(), found.indices.len() * size);
        let last = (tokens.len() - 1) / size * size;
        let (position, reason) = if is_loading {
            (ready.indices.len() * size, Some(MissReason::Loading))
        } else if !blocks(&found.indices).all(is_ready) {
            (ready.indices.len() * size, Some(MissReason::NotYetComputed))
        } else if found.start < cached_to.min(last) {
            (found.start, Some(MissReason::NoSnapshot { cached_to }))
        } else if tokens.len() >= cached_to + size {
            (cached_to, Some(self.why(namespace, tokens, indices)))
        } else if tokens.len() < size {
            (0, Some(MissReason::BelowOneBlock))
        } else {
            (0, None)
        };
        Explanation {
            num_pool_tokens: ready.start,
            miss: reason.map(|reason| Miss { position, reason }),
            ..Explanation::default()
        }
    }
}
