//! Log-probabilities of tokens, their ranks, and the most probable tokens.

use std::f32::consts::LOG2_E;

use crate::attention::Attention;
use crate::builds::{InEachBuild, best_build};
use crate::draw::{Memory, check_indices, check_logits};
use crate::element::Element;
use crate::error::Error;
use crate::lanes::exp2;
use crate::logits::key;
use crate::step::same_length;

/// Exponentials that are added up side by side.
const LANES: usize = 16;

/// Exponentials whose sums are float32; those of blocks are added up in float64.
const BLOCK: usize = 2048;

/// Tokens whose log-probabilities are reported, in rows of logits: arrays of one length.
#[derive(Clone, Copy, Debug)]
pub struct Reported<'a> {
    /// Rows of the logits.
    pub rows: &'a [i64],
    /// A token of each.
    pub token_ids: &'a [i64],
    /// How many of the most probable tokens are reported beside it.
    pub counts: &'a [i64],
}

/// What is reported: `logprobs` and `ranks` of the tokens; `top_ids` and `top_logprobs` one row after the other.
#[derive(Debug)]
pub struct Logprobs<'a> {
    /// `[rows]`.
    pub logprobs: &'a mut [f32],
    /// `[rows]`; 1 is the most probable token, and equal ones rank by id.
    pub ranks: &'a mut [i64],
    /// As many as all counts together.
    pub top_ids: &'a mut [i64],
    /// As many.
    pub top_logprobs: &'a mut [f32],
}

impl Attention {
    /// Writes the log-probabilities of `reported`, those of `logits` `[rows, vocab_size]`.
    ///
    /// A row's have the same bits in every batch, with any number of threads, at every level.
    ///
    /// # Errors
    ///
    /// Rows, tokens or counts that there are not, or arrays that do not fit each other: nothing is written then.
    pub fn logprobs<E: Element>(
        &self,
        logits: &[E],
        vocab_size: usize,
        reported: &Reported<'_>,
        out: Logprobs<'_>,
    ) -> Result<(), Error> {
        let num_rows = check_logits(logits, vocab_size)?;
        let rows = check_indices("rows", reported.rows, num_rows)?;
        let tokens = check_indices("token_ids", reported.token_ids, vocab_size)?;
        let counts = check_indices("counts", reported.counts, vocab_size + 1)?;
        let total = counts.iter().sum();
        for (name, expected, len) in [
            ("token_ids", rows.len(), tokens.len()),
            ("counts", rows.len(), counts.len()),
            ("logprobs", rows.len(), out.logprobs.len()),
            ("ranks", rows.len(), out.ranks.len()),
            ("top_ids", total, out.top_ids.len()),
            ("top_logprobs", total, out.top_logprobs.len()),
        ] {
            same_length(name, expected, len)?;
        }
        let (mut top_ids, mut top_logprobs) = (out.top_ids, out.top_logprobs);
        let mut tasks = Vec::with_capacity(rows.len());
        let chosen = rows.into_iter().zip(tokens).zip(counts);
        for (((row, token), count), out) in chosen.zip(out.logprobs.iter_mut().zip(out.ranks)) {
            let (ids, other_ids) = top_ids.split_at_mut(count);
            let (logprobs, other_logprobs) = top_logprobs.split_at_mut(count);
            (top_ids, top_logprobs) = (other_ids, other_logprobs);
            let row = &logits[row * vocab_size..][..vocab_size];
            tasks.push((row, token, out, ids, logprobs));
        }
        self.each_row(
            vocab_size,
            tasks,
            |(row, token, out, top_ids, top_logprobs), memory| {
                let work = Report {
                    memory,
                    row,
                    token,
                    logprob: out.0,
                    rank: out.1,
                    top_ids,
                    top_logprobs,
                };
                best_build(self.isa(), work);
            },
        );
        Ok(())
    }
}

struct Report<'a, E> {
    memory: &'a mut Memory,
    row: &'a [E],
    token: usize,
    logprob: &'a mut f32,
    rank: &'a mut i64,
    top_ids: &'a mut [i64],
    top_logprobs: &'a mut [f32],
}

impl<E: Element> InEachBuild for Report<'_, E> {
    #[inline(always)]
    fn run(self) {
        let Self {
            memory,
            row,
            token,
            logprob: logprob_of_token,
            rank,
            top_ids,
            top_logprobs,
        } = self;
        let peak = memory.groups.scan(row);
        let logarithm = match peak.is_finite() {
            true => f64::from(peak) + sum_of_exponentials(row, peak).ln(),
            false => f64::from(peak), // infinite less infinite is no number
        };
        let logprob = |logit: E| (f64::from(logit.widen()) - logarithm) as f32;
        *logprob_of_token = logprob(row[token]);
        *rank = 1 + num_ahead(row, token) as i64;
        memory.take_top(row, peak, top_ids);
        for (top_logprob, &id) in top_logprobs.iter_mut().zip(&*top_ids) {
            *top_logprob = logprob(row[id as usize]);
        }
    }
}

/// Of `e ^ (logit - peak)`.
#[inline(always)]
fn sum_of_exponentials<E: Element>(row: &[E], peak: f32) -> f64 {
    let mut total = 0.0;
    for block in row.chunks(BLOCK) {
        let mut sums = [0.0f32; LANES];
        let (wide, rest) = block.as_chunks::<LANES>();
        for logits in wide {
            for lane in 0..LANES {
                sums[lane] += exp2((logits[lane].widen() - peak) * LOG2_E);
            }
        }
        for (sum, logit) in sums.iter_mut().zip(rest) {
            *sum += exp2((logit.widen() - peak) * LOG2_E);
        }
        total += sums.iter().map(|&sum| f64::from(sum)).sum::<f64>();
    }
    total
}

/// The number of tokens that are more probable than `token`, or as probable with a lower id.
#[inline(always)]
fn num_ahead<E: Element>(row: &[E], token: usize) -> usize {
    let chosen = row[token].widen();
    let before = row[..token]
        .iter()
        .map(|it| u32::from(it.widen() >= chosen));
    let behind = row[token..].iter().map(|it| u32::from(it.widen() > chosen));
    (before.sum::<u32>() + behind.sum::<u32>()) as usize
}

impl Memory {
    /// Writes the ids of the largest logits of the row that `groups` scanned, equal ones by id.
    #[inline(always)]
    fn take_top<E: Element>(&mut self, row: &[E], peak: f32, top: &mut [i64]) {
        if top.is_empty() {
            return;
        }
        let bound = if peak.is_nan() {
            None
        } else {
            self.groups.bound(top.len())
        };
        let of = |id: usize| u64::from(key(row[id].widen())) << 32 | u64::from(!(id as u32));
        self.keys.clear();
        if bound.is_some_and(|bound| self.groups.reaching(row, bound, &mut self.ids)) {
            self.keys.extend(self.ids.iter().map(|&id| of(id as usize)));
        } else {
            self.keys.extend((0..row.len()).map(of));
        }
        let last = top.len() - 1;
        let largest_first = |a: &u64, b: &u64| b.cmp(a);
        self.keys.select_nth_unstable_by(last, largest_first);
        self.keys[..=last].sort_unstable_by(largest_first);
        for (id, &key) in top.iter_mut().zip(&self.keys) {
            *id = i64::from(!(key as u32));
        }
    }
}
