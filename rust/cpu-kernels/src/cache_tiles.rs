//! The keys and values of a part of the cache, tile by tile.

use std::ops::Range;

use crate::element::Element;
use crate::job::Job;
use crate::lanes::fetch;
use crate::step::{PART, TILE};
use crate::stored::{Cached, Heads, SCALE};

/// Where the keys and values of a part lie, `TILE` positions at a time.
pub(crate) struct Tiles<'t, E> {
    job: &'t Job<'t, E>,
    blocks: &'t [u32],
    kv_head: usize,
    /// Positions of the part that any row sees.
    seen: Range<usize>,
    /// The end of what is brought into the processor's cache.
    fetched: usize,
    /// Where the first tile begins.
    pub(crate) start: usize,
    /// Of all positions from `start` on; beside `seen`, the nearest of those in it.
    slots: [usize; PART],
}

impl<'t, E> Tiles<'t, E> {
    #[inline(always)]
    pub(crate) fn of(
        job: &'t Job<'t, E>,
        blocks: &'t [u32],
        seen: &Range<usize>,
        kv_head: usize,
        part: usize,
    ) -> Self {
        let in_part = seen.start.max(part * PART)..seen.end.min((part + 1) * PART);
        let mut tiles = Self {
            job,
            blocks,
            kv_head,
            start: in_part.start / TILE * TILE, // parts begin with a tile
            seen: in_part,
            // Of runs that share the part, others may go on for longer than the one whose blocks these are.
            fetched: seen.end.min(blocks.len() * job.shape.block_size),
            slots: [0; PART],
        };
        if part == seen.start / PART && kv_head == 0 {
            tiles.fetch(kv_head, tiles.start);
        }
        find_slots(job, blocks, tiles.start, &tiles.seen, &mut tiles.slots);
        tiles
    }

    #[inline(always)]
    pub(crate) fn len(&self) -> usize {
        (self.seen.end - self.start).div_ceil(TILE)
    }

    /// Where tile `number` begins.
    #[inline(always)]
    pub(crate) fn start_of(&self, number: usize) -> usize {
        self.start + number * TILE
    }

    /// Positions of tile `number` that any row sees, counted from its first. What is beside these repeats others.
    #[inline(always)]
    pub(crate) fn near(&self, number: usize) -> Range<usize> {
        let start = self.start_of(number);
        let seen = self.seen.start.max(start)..self.seen.end.min(start + TILE);
        seen.start - start..seen.end - start
    }

    /// Whether the cache holds floats.
    #[inline(always)]
    pub(crate) fn are_floats(&self) -> bool
    where
        E: Element,
    {
        matches!(self.job.cached, Cached::Computed { .. }) && E::in_place(&[]).is_some()
    }

    #[inline(always)]
    pub(crate) fn keys(&self, number: usize) -> Heads<'t, E> {
        let (numbers, dim) = (self.heads(number), self.job.shape.dim_k);
        match self.job.cached {
            Cached::Computed { keys, .. } => Heads::computed(keys, numbers, dim),
            Cached::Int8 { keys, .. } => Heads::int8(keys, numbers, dim),
        }
    }

    #[inline(always)]
    pub(crate) fn values(&self, number: usize) -> Heads<'t, E> {
        let (numbers, dim) = (self.heads(number), self.job.shape.dim_v);
        match self.job.cached {
            Cached::Computed { values, .. } => Heads::computed(values, numbers, dim),
            Cached::Int8 { values, .. } => Heads::int8(values, numbers, dim),
        }
    }

    #[inline(always)]
    fn heads(&self, number: usize) -> [usize; TILE] {
        let slots: &[usize; TILE] = self.slots[number * TILE..]
            .first_chunk()
            .expect("TILE divides PART");
        let mut heads = *slots;
        for head in &mut heads {
            *head = *head * self.job.shape.kv_heads + self.kv_head;
        }
        heads
    }

    /// Asks for what comes after tile `number`: in the part, then for the next head.
    #[inline(always)]
    pub(crate) fn fetch_after(&self, number: usize) {
        let next = self.kv_head + 1;
        if number + 1 < self.len() {
            self.fetch(self.kv_head, self.start_of(number + 1));
        } else if next < self.job.shape.kv_heads {
            self.fetch(next, self.start);
        } else {
            self.fetch(0, self.start_of(number + 1));
        }
    }

    #[inline(always)]
    fn fetch(&self, kv_head: usize, start: usize) {
        if start < self.fetched {
            let positions = self.seen.start.max(start)..self.fetched.min(start + TILE);
            fetch_positions(self.job, self.blocks, kv_head, positions);
        }
    }
}

/// Where keys stand in the cache, from position `first` on; beside `seen`, the nearest of those in it.
#[inline(always)]
fn find_slots<E>(
    job: &Job<'_, E>,
    blocks: &[u32],
    first: usize,
    seen: &Range<usize>,
    slots: &mut [usize; PART],
) {
    let size = job.shape.block_size;
    let mut position = seen.start;
    while position < seen.end {
        let count = (size - position % size).min(seen.end - position);
        let slot = blocks[position / size] as usize * size + position % size;
        for (at, target) in slots[position - first..][..count].iter_mut().enumerate() {
            *target = slot + at;
        }
        position += count;
    }
    let (begin, end) = (seen.start - first, seen.end - first);
    let (lowest, highest) = (slots[begin], slots[end - 1]);
    slots[..begin].fill(lowest);
    slots[end..end.next_multiple_of(TILE)].fill(highest);
}

/// Asks for the keys and values at these positions to be brought into the cache: blocks lie anywhere, and no processor
/// guesses where the next one is.
#[inline(always)]
fn fetch_positions<E>(job: &Job<'_, E>, blocks: &[u32], kv_head: usize, positions: Range<usize>) {
    let (size, shape) = (job.shape.block_size, &job.shape);
    let mut position = positions.start;
    while position < positions.end {
        let count = (size - position % size).min(positions.end - position);
        let slot = blocks[position / size] as usize * size + position % size;
        let heads = (slot..slot + count).map(|slot| slot * shape.kv_heads + kv_head);
        match job.cached {
            Cached::Computed { keys, values } => {
                for head in heads {
                    fetch(&keys[head * shape.dim_k..][..shape.dim_k]);
                    fetch(&values[head * shape.dim_v..][..shape.dim_v]);
                }
            }
            Cached::Int8 { keys, values } => {
                let (dim_k, dim_v) = (shape.dim_k + SCALE, shape.dim_v + SCALE);
                for head in heads {
                    fetch(&keys[head * dim_k..][..dim_k]);
                    fetch(&values[head * dim_v..][..dim_v]);
                }
            }
        }
        position += count;
    }
}
