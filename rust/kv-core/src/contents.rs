//! What is known, apart from the blocks that hold it: contents in runs.
//!
//! A content is a parent content, `block_size` tokens, and the blocks that hold it now, one per layer
//! group. Contents that follow each other stand in one [`Run`], as an edge of a radix tree does:
//!
//! ```text
//!   root  --[ row 1 | row 2 | row 3 ]      a run: its rows' tokens, its rows' blocks
//!                        \--[ row 3 | row 4 ]   a child hangs behind any row
//! ```
//!
//! The index finds a run by what it hangs behind and its first row. Nothing is a match before its
//! tokens were compared under the very parent that the walk stands on: the hash only says where to look. A
//! run is as long as its last row needs: until a block holds it, or a child hangs behind it. So the
//! block of a row in the middle may go first without orphaning what follows.
//!
//! Names are for the outside world: they are computed when somebody asks, once.

#[path = "contents/check.rs"]
mod check;
#[path = "contents/index.rs"]
mod index;
#[path = "contents/nearest.rs"]
mod nearest;

use std::collections::{HashMap, TryReserveError};
use std::sync::Arc;

use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::events::Event;
use crate::hash::ContentHasher;
use crate::ids::{BlockId, RunId};
use crate::names::Names;
use crate::snapshot::SnapshotNode;
use index::Index;

/// Names that are gone and still in the set: no call has more of them to take out than that, and its own.
const MOST_GONE: usize = 1_024;

/// A place among the contents: behind so many rows of a run. It stands for the content of the last of
/// these rows; behind no row, for the root of a namespace.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub(crate) struct Spot {
    pub(crate) run: RunId,
    pub(crate) rows: u32,
}

impl Spot {
    pub(crate) const NONE: Self = Self {
        run: RunId::NONE,
        rows: 0,
    };

    #[inline]
    pub(crate) fn some(self) -> Option<Self> {
        (self.run != RunId::NONE).then_some(self)
    }

    #[inline]
    fn row(self) -> usize {
        self.rows as usize - 1
    }
}

/// Contents that follow each other. That of a namespace has no rows.
struct Run {
    /// What it hangs behind; nothing if it is the root of a namespace.
    parent: Spot,
    tokens: Vec<u32>,
    /// Row-major, one per layer group.
    blocks: Vec<BlockId>,
    /// Of the leading rows, so many as somebody `asked` for. Where another content has the name they end:
    /// that row and those after it have none.
    names: Vec<u128>,
    asked: u32,
    /// What hangs behind its rows, in their order.
    children: Vec<Behind>,
    /// The child that was made or followed last: the first guess. May be stale.
    latest: RunId,
    /// Of the runs that hang behind the same spot the one made before it, and the one made after it.
    older: RunId,
    newer: RunId,
    /// Sequences under a root.
    sequences: u32,
    /// The name of a root.
    namespace: Option<Arc<[u8]>>,
    lives: bool,
}

/// How much hangs behind so many rows of a run, and the run of it that was made last.
struct Behind {
    rows: u32,
    count: u32,
    newest: RunId,
}

const VACANT: Run = Run {
    parent: Spot::NONE,
    tokens: Vec::new(),
    blocks: Vec::new(),
    names: Vec::new(),
    asked: 0,
    children: Vec::new(),
    latest: RunId::NONE,
    older: RunId::NONE,
    newer: RunId::NONE,
    sequences: 0,
    namespace: None,
    lives: false,
};

impl Run {
    /// The rows behind which the last child hangs.
    fn last_child(&self) -> u32 {
        self.children.last().map_or(0, |behind| behind.rows)
    }

    fn has_child(&self, rows: u32) -> bool {
        self.behind(rows).is_ok()
    }

    /// Where it is kept what hangs behind so many rows, or would be.
    #[inline]
    fn behind(&self, rows: u32) -> Result<usize, usize> {
        self.children
            .binary_search_by_key(&rows, |behind| behind.rows)
    }
}

/// Contents, and the ways to them.
pub(crate) struct Contents {
    block_size: usize,
    groups: usize,
    hasher: ContentHasher,
    runs: Vec<Run>,
    vacant: Vec<RunId>,
    /// Runs, by what they hang behind and their first row.
    index: Index,
    namespaces: HashMap<Arc<[u8]>, RunId>,
    /// The names that contents have, and those that have `gone` since one was given.
    named: Names,
    gone: Vec<u128>,
    rows: usize,
    /// A content that stays, whatever becomes of what else keeps it.
    kept: Spot,
    /// Blocks hashed so far, and those of them whose name another content had.
    pub(crate) hashed: u64,
    pub(crate) collisions: u64,
}

impl Contents {
    /// For about so many of them.
    pub(crate) fn new(
        usual_len: usize,
        block_size: usize,
        groups: usize,
        hasher: ContentHasher,
    ) -> Self {
        Self {
            block_size,
            groups,
            hasher,
            runs: Vec::new(),
            vacant: Vec::new(),
            index: Index::new(usual_len),
            namespaces: HashMap::new(),
            named: Names::new(usual_len),
            gone: Vec::new(),
            rows: 0,
            kept: Spot::NONE,
            hashed: 0,
            collisions: 0,
        }
    }

    /// Contents will be named: takes the memory for that now.
    pub(crate) fn prepare_names(&mut self) -> Result<(), TryReserveError> {
        self.named.prepare()
    }

    /// Bytes per block of the pool.
    pub(crate) fn bytes_per_block(block_size: usize) -> usize {
        size_of::<BlockId>() + block_size * size_of::<u32>()
    }

    pub(crate) fn groups(&self) -> usize {
        self.groups
    }

    pub(crate) fn hasher(&self) -> &ContentHasher {
        &self.hasher
    }

    #[inline]
    fn run(&self, run: RunId) -> &Run {
        &self.runs[run.at()]
    }

    #[inline]
    fn run_mut(&mut self, run: RunId) -> &mut Run {
        &mut self.runs[run.at()]
    }

    /// The root of `namespace`, if anything lives under it.
    pub(crate) fn root(&self, namespace: &[u8]) -> Option<Spot> {
        let run = *self.namespaces.get(namespace)?;
        Some(Spot { run, rows: 0 })
    }

    /// The root of `namespace` for one sequence more, made if need be.
    pub(crate) fn hold_root(&mut self, namespace: &[u8]) -> Spot {
        let run = match self.namespaces.get(namespace) {
            Some(&run) => run,
            None => {
                let name: Arc<[u8]> = namespace.into();
                let run = self.new_run(Run {
                    namespace: Some(Arc::clone(&name)),
                    ..VACANT
                });
                self.namespaces.insert(name, run);
                run
            }
        };
        let root = Spot { run, rows: 0 };
        self.share_root(root);
        root
    }

    /// One sequence more under a root.
    pub(crate) fn share_root(&mut self, root: Spot) {
        self.run_mut(root.run).sequences += 1;
    }

    /// One sequence less under a root.
    pub(crate) fn release_root(&mut self, root: Spot) {
        self.run_mut(root.run).sequences -= 1;
        self.shorten(root.run);
    }

    /// Rows that have so many blocks. Nothing is divided by the one group that most pools have.
    #[inline]
    fn rows_of(&self, blocks: usize) -> usize {
        match self.groups {
            1 => blocks,
            groups => blocks / groups,
        }
    }

    fn new_run(&mut self, run: Run) -> RunId {
        let run = Run { lives: true, ..run };
        match self.vacant.pop() {
            Some(slot) => {
                self.runs[slot.at()] = run;
                slot
            }
            None => {
                self.runs.push(run);
                RunId::new(self.runs.len() - 1)
            }
        }
    }

    /// Where to look for the run that hangs behind `parent` with this first row.
    fn index_hash(&self, parent: Spot, tokens: &[u32]) -> u32 {
        let seed =
            (u64::from(parent.run.get()) << 32 | u64::from(parent.rows)) ^ self.hasher.seed();
        let hash = xxh3_64_with_seed(bytemuck::cast_slice(tokens), seed);
        self.hasher.index_bits(hash) as u32
    }

    /// The content that follows `spot` with exactly these tokens, one row of them.
    #[inline]
    pub(crate) fn next(&mut self, spot: Spot, tokens: &[u32]) -> Option<Spot> {
        debug_assert_eq!(tokens.len(), self.block_size);
        let run = self.run(spot.run);
        let at = spot.rows as usize * self.block_size;
        let rows = spot.rows + 1;
        if run.tokens.get(at..at + self.block_size) == Some(tokens) {
            return Some(Spot { rows, ..spot });
        }
        let child = self.child(spot, tokens)?;
        Some(Spot {
            run: child,
            rows: 1,
        })
    }

    /// The run that hangs behind `spot` and begins with this row. The latest one is compared before
    /// anything is hashed.
    fn child(&mut self, spot: Spot, tokens: &[u32]) -> Option<RunId> {
        let run = self.run(spot.run);
        if !run.has_child(spot.rows) {
            return None;
        }
        let latest = run.latest;
        if latest != RunId::NONE && self.begins(latest, spot, tokens) {
            return Some(latest);
        }
        self.hashed += 1;
        let hash = self.index_hash(spot, tokens);
        let begins = |run| self.begins(run, spot, tokens);
        let child = self.index.find(hash, begins)?;
        self.run_mut(spot.run).latest = child;
        Some(child)
    }

    /// Whether a run hangs behind `parent` and begins with this row.
    #[inline]
    fn begins(&self, run: RunId, parent: Spot, tokens: &[u32]) -> bool {
        let run = self.run(run);
        run.lives && run.parent == parent && run.tokens.get(..self.block_size) == Some(tokens)
    }

    /// Goes on from `spot` as far as contents have these tokens and the blocks that hold them are `usable`,
    /// which are added to `blocks`. Where there is one layer group.
    pub(crate) fn follow(
        &mut self,
        mut spot: Spot,
        mut tokens: &[u32],
        blocks: &mut Vec<BlockId>,
        usable: impl Fn(BlockId) -> bool,
    ) -> Spot {
        let size = self.block_size;
        let usable = |block| block != BlockId::NONE && usable(block);
        while tokens.len() >= size {
            let run = self.run(spot.run);
            let from = spot.rows as usize;
            let there = run.blocks.get(from..).unwrap_or_default();
            let most = there.len().min(tokens.len() / size);
            let known = &run.tokens[from * size..][..most * size];
            let equal = equal_rows(known, &tokens[..most * size], size);
            let followed = leading(&there[..equal], usable);
            blocks.extend_from_slice(&there[..followed]);
            spot.rows += followed as u32;
            tokens = &tokens[followed * size..];
            if followed < equal || tokens.len() < size {
                break;
            }
            let Some(child) = self.child(spot, &tokens[..size]) else {
                break;
            };
            if !usable(self.run(child).blocks[0]) {
                break;
            }
            spot = Spot {
                run: child,
                rows: 0,
            };
        }
        spot
    }

    /// New contents that follow `spot`, of which nothing has the first row yet, in these blocks,
    /// row-major. The last of them.
    pub(crate) fn append(&mut self, spot: Spot, tokens: &[u32], blocks: &[BlockId]) -> Spot {
        let rows = self.rows_of(blocks.len()) as u32;
        debug_assert_eq!(tokens.len(), rows as usize * self.block_size);
        self.rows += rows as usize;
        let run = self.run_mut(spot.run);
        let is_end = run.namespace.is_none()
            && spot.rows as usize * self.block_size == self.runs[spot.run.at()].tokens.len();
        if is_end {
            let run = self.run_mut(spot.run);
            run.tokens.extend_from_slice(tokens);
            run.blocks.extend_from_slice(blocks);
            let rows = spot.rows + rows;
            return Spot { rows, ..spot };
        }
        let hash = self.index_hash(spot, &tokens[..self.block_size]);
        self.hashed += 1;
        let child = self.new_run(Run {
            parent: spot,
            tokens: tokens.to_vec(),
            blocks: blocks.to_vec(),
            ..VACANT
        });
        self.index.insert(hash, child);
        self.link(spot, child);
        self.run_mut(spot.run).latest = child;
        Spot { run: child, rows }
    }

    /// A content stays while blocks are taken, which may evict what else keeps it; `Spot::NONE` for none, once
    /// it has a block again.
    pub(crate) fn keep(&mut self, content: Spot) {
        self.kept = content;
    }

    /// Something more hangs behind `spot`.
    #[cfg(test)]
    fn hang(&mut self, spot: Spot) {
        self.hang_behind(spot).count += 1;
    }

    fn hang_behind(&mut self, spot: Spot) -> &mut Behind {
        let run = self.run_mut(spot.run);
        let at = run.behind(spot.rows).unwrap_or_else(|at| {
            let nothing = Behind {
                rows: spot.rows,
                count: 0,
                newest: RunId::NONE,
            };
            run.children.insert(at, nothing);
            at
        });
        &mut run.children[at]
    }

    fn loosen(&mut self, spot: Spot) {
        let run = self.run_mut(spot.run);
        if let Ok(at) = run.behind(spot.rows) {
            run.children[at].count -= 1;
            if run.children[at].count == 0 {
                run.children.remove(at);
            }
        }
    }

    /// Forgets the last rows of a run that nothing needs any more, and what ends with them. It may have
    /// ended with another one.
    pub(crate) fn shorten(&mut self, run: RunId) {
        let mut at = run;
        loop {
            let (size, groups) = (self.block_size, self.groups);
            let rows = self.rows_of(self.run(at).blocks.len());
            let run = &mut self.runs[at.at()];
            if !run.lives {
                return;
            }
            if run.namespace.is_some() {
                if run.sequences == 0 && run.children.is_empty() {
                    self.end_namespace(at);
                }
                return;
            }
            // What has a child stays with it: only the rows behind that are looked at, and those that are
            // looked at in vain go. So each costs once, however often a long node is shortened.
            let keep = match at == self.kept.run {
                true => run.last_child().max(self.kept.rows) as usize,
                false => run.last_child() as usize,
            };
            let behind = &run.blocks[keep * groups..];
            let held = behind.iter().rposition(|&block| block != BlockId::NONE);
            let keep = held.map_or(keep, |at| keep + at / groups + 1);
            self.rows -= rows - keep;
            if keep > 0 {
                run.tokens.truncate(keep * size);
                run.blocks.truncate(keep * groups);
                fit(&mut run.tokens);
                fit(&mut run.blocks);
                self.forget_names(at, keep);
                return;
            }
            self.forget_names(at, 0);
            let run = &self.runs[at.at()];
            let parent = run.parent;
            let hash = self.index_hash(parent, &run.tokens[..size]);
            self.index.remove(hash, at);
            self.unlink(at);
            self.runs[at.at()] = VACANT;
            self.vacant.push(at);
            self.loosen(parent);
            at = parent.run;
        }
    }

    /// Nobody is to add to this run soon: of the room for more it keeps a quarter of its length.
    pub(crate) fn rest(&mut self, run: RunId) {
        let run = self.run_mut(run);
        if run.tokens.capacity() / 5 > run.tokens.len() / 4 {
            run.tokens.shrink_to(run.tokens.len() / 4 * 5);
            run.blocks.shrink_to(run.blocks.len() / 4 * 5);
        }
    }

    fn end_namespace(&mut self, root: RunId) {
        if let Some(name) = self.run_mut(root).namespace.take() {
            self.namespaces.remove(&name);
        }
        self.runs[root.at()] = VACANT;
        self.vacant.push(root);
    }

    fn forget_names(&mut self, run: RunId, keep: usize) {
        let run = &mut self.runs[run.at()];
        run.asked = run.asked.min(keep as u32);
        self.gone
            .extend(run.names.drain(keep.min(run.names.len())..));
        if self.gone.len() > MOST_GONE {
            self.remove_gone();
        }
    }

    fn remove_gone(&mut self) {
        self.named.remove_all(&self.gone);
        self.gone.clear();
    }

    /// The block that holds the content for a layer group.
    #[inline]
    pub(crate) fn block(&self, spot: Spot, group: usize) -> Option<BlockId> {
        self.run(spot.run).blocks[spot.row() * self.groups + group].some()
    }

    /// The blocks that hold the content, in the order of their groups.
    #[inline]
    pub(crate) fn blocks(&self, spot: Spot) -> impl Iterator<Item = BlockId> + '_ {
        let at = spot.row() * self.groups;
        let blocks = &self.run(spot.run).blocks[at..at + self.groups];
        blocks.iter().filter_map(|block| block.some())
    }

    /// Whether another block holds a content that has just lost one.
    #[inline]
    pub(crate) fn is_held(&self, spot: Spot) -> bool {
        self.groups > 1 && self.blocks(spot).next().is_some()
    }

    /// Moves the content of a group to another block, or gives it one again.
    #[inline]
    pub(crate) fn set_block(&mut self, spot: Spot, group: usize, block: BlockId) {
        let at = spot.row() * self.groups + group;
        self.run_mut(spot.run).blocks[at] = block;
    }

    /// The content loses a group's block. It lives on if it has others, or something follows it.
    pub(crate) fn clear_block(&mut self, spot: Spot, group: usize) {
        self.empty_block(spot, group);
        let run = self.run(spot.run);
        if spot.rows as usize * self.groups == run.blocks.len() {
            self.shorten(spot.run);
        }
    }

    /// The same; the caller shortens the run afterwards.
    #[inline(always)] // every content that goes comes here
    pub(crate) fn empty_block(&mut self, spot: Spot, group: usize) {
        let at = spot.row() * self.groups + group;
        self.run_mut(spot.run).blocks[at] = BlockId::NONE;
    }

    /// What a run hangs behind; nothing if it is the root of a namespace.
    #[inline]
    pub(crate) fn hangs_behind(&self, run: RunId) -> Option<Spot> {
        self.run(run).parent.some()
    }

    /// The content before this one; none before a root.
    #[inline]
    pub(crate) fn parent(&self, spot: Spot) -> Option<Spot> {
        match spot.rows {
            0 => None,
            1 => Some(self.run(spot.run).parent),
            rows => Some(Spot {
                rows: rows - 1,
                ..spot
            }),
        }
    }

    /// The content `rows` rows before this one.
    pub(crate) fn back(&self, mut spot: Spot, mut rows: usize) -> Spot {
        while rows >= spot.rows as usize && rows > 0 {
            rows -= spot.rows as usize;
            spot = self.run(spot.run).parent;
        }
        spot.rows -= rows as u32;
        spot
    }

    /// Whether `tokens`, whole rows of them, lead from `root` to `spot`.
    pub(crate) fn leads_to(&self, root: Spot, mut tokens: &[u32], mut spot: Spot) -> bool {
        while spot.rows > 0 {
            let run = self.run(spot.run);
            let known = &run.tokens[..spot.rows as usize * self.block_size];
            let Some(rest) = tokens.strip_suffix(known) else {
                return false;
            };
            tokens = rest;
            spot = run.parent;
        }
        spot == root && tokens.is_empty()
    }

    #[inline]
    pub(crate) fn tokens(&self, spot: Spot) -> &[u32] {
        &self.run(spot.run).tokens[spot.row() * self.block_size..][..self.block_size]
    }

    /// The content's name for the outside world, none if another one has it.
    pub(crate) fn name(&mut self, spot: Spot) -> Option<u128> {
        let run = self.run(spot.run);
        if (1..=run.asked).contains(&spot.rows) {
            return run.names.get(spot.row()).copied();
        }
        // The runs on the way to what has a name already.
        let mut way = vec![spot];
        let mut at = spot.run;
        while self.run(at).asked == 0 && self.run(at).namespace.is_none() {
            let parent = self.run(at).parent;
            way.push(parent);
            at = parent.run;
        }
        let mut name = None;
        while let Some(at) = way.pop() {
            name = self.name_in(at, name);
        }
        name
    }

    /// The names that the rows `first` to `last` of a run have, from 1, which were asked for before.
    pub(crate) fn names(&self, run: RunId, first: u32, last: u32) -> &[u128] {
        let Run { names, asked, .. } = self.run(run);
        debug_assert!(last <= *asked);
        let end = names.len().min(last as usize);
        names.get(first as usize - 1..end).unwrap_or_default()
    }

    /// Names a run's leading rows up to `spot`, given the name of what it hangs behind.
    fn name_in(&mut self, spot: Spot, parent: Option<u128>) -> Option<u128> {
        self.remove_gone();
        let run = &mut self.runs[spot.run.at()];
        if let Some(namespace) = &run.namespace {
            return Some(self.hasher.root(namespace));
        }
        let known = run.asked as usize;
        let before = match known {
            0 => parent,
            _ => run.names.get(known - 1).copied(),
        };
        run.asked = run.asked.max(spot.rows);
        let mut before = before?;
        let new = &run.tokens[known * self.block_size..run.asked as usize * self.block_size];
        let hashes = new.chunks_exact(self.block_size).map(|tokens| {
            before = self.hasher.child(before, tokens);
            before
        });
        run.names.extend(hashes);
        let new = &run.names[known..];
        self.hashed += new.len() as u64;
        let distinct = self.named.add_leading(new);
        self.collisions += u64::from(distinct < new.len());
        run.names.truncate(known + distinct);
        run.names.get(spot.row()).copied()
    }

    /// Adds to `events` that the `rows` contents up to `end` are stored, as far as they have names.
    pub(crate) fn tell(&mut self, mut end: Spot, mut rows: usize, events: &mut Vec<Event>) {
        let mut way = Vec::new();
        while rows > 0 {
            let in_run = rows.min(end.rows as usize);
            way.push((end, in_run));
            rows -= in_run;
            end = self.run(end.run).parent;
        }
        for (end, rows) in way.into_iter().rev() {
            events.extend(self.tell_run(end, rows));
        }
    }

    /// The same, all of them in one run.
    fn tell_run(&mut self, end: Spot, rows: usize) -> Option<Event> {
        self.name(end);
        let first = end.rows as usize - rows;
        let parent = match (first, self.run(end.run).parent) {
            (0, Spot { rows: 0, .. }) => None,
            (0, behind) => self.name(behind),
            _ => self.run(end.run).names.get(first - 1).copied(),
        };
        let run = self.run(end.run);
        let last = run.names.len().min(end.rows as usize);
        let hashes = run.names.get(first..last).filter(|some| !some.is_empty())?;
        Some(Event::Stored {
            hashes: hashes.to_vec(),
            parent,
            tokens: run.tokens[first * self.block_size..last * self.block_size].to_vec(),
            namespace: self.namespace(end),
        })
    }

    fn namespace(&self, mut spot: Spot) -> Arc<[u8]> {
        loop {
            let run = self.run(spot.run);
            match &run.namespace {
                Some(name) => return Arc::clone(name),
                None => spot = run.parent,
            }
        }
    }

    /// Every content that a block holds.
    pub(crate) fn held(&self) -> impl Iterator<Item = Spot> + '_ {
        let runs = self.runs.iter().enumerate();
        runs.flat_map(move |(slot, run)| {
            let rows = run.blocks.chunks_exact(self.groups).zip(1_u32..);
            rows.filter_map(move |(blocks, rows)| {
                let is_held = blocks.iter().any(|&block| block != BlockId::NONE);
                is_held.then_some(Spot {
                    run: RunId::new(slot),
                    rows,
                })
            })
        })
    }

    /// The live nodes, and the number of each by its slot: 0 for vacant slots.
    pub(crate) fn snapshot(&self) -> (Vec<SnapshotNode>, Vec<u32>) {
        let lives = self.runs.iter().scan(0, |count, run| {
            *count += u32::from(run.lives);
            Some(*count * u32::from(run.lives))
        });
        let numbers: Vec<u32> = lives.collect();
        let living = self.runs.iter().filter(|run| run.lives);
        let node = |run: &Run| SnapshotNode {
            parent: run.parent.some().map_or(0, |spot| numbers[spot.run.at()]),
            parent_index: run.parent.rows,
            len: (run.blocks.len() / self.groups) as u32,
            namespace: run.namespace.clone(),
        };
        (living.map(node).collect(), numbers)
    }

    /// Contents that live, and namespaces.
    pub(crate) fn len(&self) -> usize {
        self.rows + self.namespaces.len()
    }
}

/// How many leading rows are equal. Both have the same length.
#[inline]
fn equal_rows(known: &[u32], tokens: &[u32], block_size: usize) -> usize {
    if known == tokens {
        return known.len() / block_size;
    }
    let rows = known
        .chunks_exact(block_size)
        .zip(tokens.chunks_exact(block_size));
    rows.take_while(|(known, tokens)| known == tokens).count()
}

/// How many leading blocks are usable. As a rule all of them are: a loop without branches.
#[inline]
fn leading(blocks: &[BlockId], usable: impl Fn(BlockId) -> bool) -> usize {
    match blocks.iter().fold(true, |all, &block| all & usable(block)) {
        true => blocks.len(),
        false => blocks.iter().take_while(|&&block| usable(block)).count(),
    }
}

/// Gives back the memory of what a run has forgotten, once that is most of it.
#[inline]
fn fit<T>(vec: &mut Vec<T>) {
    if vec.capacity() / 4 > vec.len() + 16 {
        vec.shrink_to(2 * vec.len());
    }
}
