//! One call of attention: its arrays and options, and the tasks that it is divided into.

use std::f32::consts::LOG2_E;
use std::ops::Range;

use crate::step::{CacheShape, PART, Run, Step};
use crate::stored::Cached;
use crate::write::Rows;

/// Floats of a query's state before its sums: a score that the others are measured against, and the sum of
/// `2 ^ (score - reference)`. The sum of the values, so weighted, follows.
pub(crate) const HEADER: usize = 2;

/// Floats of partial states before they are merged, about: long prefills over long contexts would
/// need a gigabyte.
const MAX_STATES: usize = 4 << 20;

/// Rows of a run that are divided among threads as soon as they are more than a thread's share.
const FEW_ROWS: usize = 16;

/// Floats of the state of one query.
pub(crate) fn state_len(dim_v: usize) -> usize {
    HEADER + dim_v
}

/// The arrays and options of a call.
pub(crate) struct Job<'a, E> {
    pub(crate) step: &'a Step,
    pub(crate) shape: CacheShape,
    pub(crate) cached: Cached<'a, E>,
    pub(crate) query: Rows<'a, E>,
    pub(crate) heads: usize,
    pub(crate) group: usize,
    pub(crate) scaling: f32,
    pub(crate) softcap: Option<f32>,
    pub(crate) window: Option<usize>,
    pub(crate) first_key: usize,
    pub(crate) sinks: Option<&'a [f32]>,
    /// Multiplications of a run of few rows beyond which each of its parts is a task.
    pub(crate) most_products: usize,
}

impl<E> Job<'_, E> {
    /// The first position that a row at `position` sees.
    #[inline(always)]
    pub(crate) fn low(&self, position: usize) -> usize {
        let low = self
            .window
            .map_or(0, |window| (position + 1).saturating_sub(window));
        low.max(self.first_key.min(position))
    }

    /// Whether every row sees all positions up to its own.
    pub(crate) fn sees_all(&self) -> bool {
        self.window.is_none() && self.first_key == 0
    }

    /// The parts that the rows of a run see, by number.
    pub(crate) fn parts(&self, run: &Run) -> Range<usize> {
        self.low(run.position) / PART..(run.position + run.count).div_ceil(PART)
    }

    /// The parts that are separate tasks: their states are kept until the run is completed.
    pub(crate) fn parts_apart(&self, run: &Run) -> Range<usize> {
        let parts = self.parts(run);
        // The states of many rows are large: they are divided later.
        let times = if run.count > FEW_ROWS { 2 } else { 1 };
        let end = match self.products(run) > self.most_products.saturating_mul(times) {
            true => parts.end,
            false => self.shared_end(run),
        };
        parts.start..end.max(parts.start)
    }

    /// The first part that the run does not share with others. No part is shared if rows see only some positions: a
    /// window moves with every token.
    fn shared_end(&self, run: &Run) -> usize {
        if self.sees_all() { run.shared_parts } else { 0 }
    }

    /// The empty state of a query head.
    #[inline(always)]
    pub(crate) fn nothing(&self, head: usize) -> [f32; 2] {
        match self.sinks {
            Some(sinks) => [sinks[head] * LOG2_E, 1.0],
            None => [f32::NEG_INFINITY, 0.0],
        }
    }

    /// Floats of the states of one row in a part.
    pub(crate) fn per_row(&self) -> usize {
        self.heads * state_len(self.shape.dim_v)
    }

    /// Floats of a run's states in the parts that are separate tasks.
    pub(crate) fn size(&self, run: &Run) -> usize {
        self.parts_apart(run).len() * run.count * self.per_row()
    }

    /// The runs from `first` on of one pass, at least one, and the floats of their states.
    pub(crate) fn slab(&self, first: usize) -> (Range<usize>, usize) {
        let (mut end, mut size) = (first, 0);
        for run in &self.step.runs[first..] {
            let more = self.size(run);
            if end > first && size + more > MAX_STATES {
                break;
            }
            (end, size) = (end + 1, size + more);
        }
        (first..end, size)
    }

    /// Multiplications of a run beyond the parts that it shares, about.
    pub(crate) fn products(&self, run: &Run) -> usize {
        let first = self.low(run.position).max(self.shared_end(run) * PART);
        let seen = run.count * (run.position + run.count).saturating_sub(first);
        seen.saturating_mul(self.per_key())
    }

    /// Multiplications of a row with a key and its value.
    pub(crate) fn per_key(&self) -> usize {
        self.heads * (self.shape.dim_k + self.shape.dim_v)
    }
}

/// A run over one part: the run, and the position of its state.
pub(crate) type Member<'a> = (usize, &'a mut [f32]);

/// A unit of work for a thread.
pub(crate) enum Task<'a, 'b, E> {
    /// Runs over one part whose keys they share; mostly one.
    Part {
        part: usize,
        members: &'b mut [Member<'a>],
    },
    /// The rest of a run, with the states of its first parts, and the position of its rows.
    Rest {
        run: &'b Run,
        states: &'b [f32],
        out: &'b mut [E],
    },
}

impl<E> Task<'_, '_, E> {
    /// Whether it is [`Task::Rest`].
    pub(crate) fn is_rest(&self) -> bool {
        matches!(self, Self::Rest { .. })
    }
}
