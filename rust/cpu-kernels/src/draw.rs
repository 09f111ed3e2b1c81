//! Tokens drawn from logits, and the largest logits.
//!
//! A filter is a *floor*: tokens below it are out, all others stay, whatever the order of equal logits. Min-p is the first
//! filter, then top-k, then top-p, the nucleus of what is left (Holtzman et al., 2020, arXiv:1904.09751). The draw is by
//! inverse transform: the first token, in order of id, at which the cumulated weight exceeds the random number times the
//! total. Weights are `exp((logit - largest) / temperature)`, all in float64.
//!
//! Sums have a fixed order: a row's token depends on the row alone, and is the same at every level of instructions.

use std::cell::RefCell;
use std::cmp::Reverse;

use crate::attention::Attention;
use crate::builds::{InEachBuild, best_build};
use crate::element::Element;
use crate::error::Error;
use crate::exponential::exp;
use crate::logits::{Groups, key, nth_largest};
use crate::step::{above_zero, same_length};

/// Logits of a thread, at least.
pub(crate) const MIN_TASK: usize = 1 << 15;

/// Weights whose sum is kept.
const BLOCK: usize = 256;

/// Weights that are added up side by side.
const LANES: usize = 8;

/// Tokens of similar logits that the search for a nucleus adds up: so many per unit of `logit / temperature`. The last
/// bucket has the rest.
const BUCKETS: usize = 1024;
const PER_UNIT: f64 = 32.0;

/// Sums of a bucket: neighbouring tokens are added to different ones, since each addition waits for the one before.
const SPREAD: usize = 2;

/// Tokens among which a nucleus is looked for first: most have fewer.
const HEAD: usize = 256;

/// Adding it to a number leaves the nearest integer in the low bits: 2^52.
const ROUND: f64 = 4_503_599_627_370_496.0;

/// Rows to draw from, with their settings: arrays of one length.
#[derive(Clone, Copy, Debug)]
pub struct Draws<'a> {
    /// Rows of the logits.
    pub rows: &'a [i64],
    /// Above 0.
    pub temperature: &'a [f64],
    /// The least weight, relative to the largest; 0 is off.
    pub min_p: &'a [f64],
    /// The number of tokens; 0 is off.
    pub top_k: &'a [f64],
    /// The share of the weights; 1 is off.
    pub top_p: &'a [f64],
    /// Random numbers, at least 0 and below 1.
    pub numbers: &'a [f64],
}

impl Attention {
    /// `out` becomes the place of the largest of each row of `logits` `[rows, vocab_size]`: of equal ones the lowest. It is
    /// the first NaN if there is one.
    ///
    /// # Errors
    ///
    /// Arrays that do not fit each other: nothing is written then.
    pub fn largest<E: Element>(
        &self,
        logits: &[E],
        vocab_size: usize,
        out: &mut [i64],
    ) -> Result<(), Error> {
        check_logits(logits, vocab_size)?;
        same_length("out", logits.len() / vocab_size, out.len())?;
        let tasks: Vec<_> = logits.chunks(vocab_size).zip(out).collect();
        self.each_row(vocab_size, tasks, |(row, token), memory| {
            best_build(self.isa(), Largest { memory, row, token });
        });
        Ok(())
    }

    /// `out` becomes a token for each of the rows of `draws`, drawn from `logits` `[rows, vocab_size]`. Rows whose largest
    /// logit is no number or infinite have no distribution: theirs is that of [`Attention::largest`].
    ///
    /// # Errors
    ///
    /// Rows that there are not, or arrays that do not fit each other: nothing is written then.
    pub fn draw<E: Element>(
        &self,
        logits: &[E],
        vocab_size: usize,
        draws: &Draws<'_>,
        out: &mut [i64],
    ) -> Result<(), Error> {
        let count = check_logits(logits, vocab_size)?;
        let rows = check_indices("rows", draws.rows, count)?;
        for (name, len) in [
            ("temperature", draws.temperature.len()),
            ("min_p", draws.min_p.len()),
            ("top_k", draws.top_k.len()),
            ("top_p", draws.top_p.len()),
            ("numbers", draws.numbers.len()),
            ("out", out.len()),
        ] {
            same_length(name, rows.len(), len)?;
        }
        let tasks = rows
            .into_iter()
            .zip(out)
            .enumerate()
            .map(|(at, (row, token))| {
                let settings = Settings {
                    temperature: draws.temperature[at],
                    min_p: draws.min_p[at],
                    top_k: draws.top_k[at] as usize,
                    top_p: draws.top_p[at],
                    number: draws.numbers[at],
                };
                (&logits[row * vocab_size..][..vocab_size], settings, token)
            });
        self.each_row(
            vocab_size,
            tasks.collect(),
            |(row, settings, token), memory| {
                let work = Draw {
                    memory,
                    row,
                    settings,
                    token,
                };
                best_build(self.isa(), work);
            },
        );
        Ok(())
    }

    /// Calls `work` with each row's task, and with memory of its thread.
    pub(crate) fn each_row<T: Send>(
        &self,
        vocab_size: usize,
        tasks: Vec<T>,
        work: impl Fn(T, &mut Memory) + Sync,
    ) {
        thread_local! {
            static MEMORY: RefCell<Memory> = RefCell::default();
        }
        let worthwhile = (tasks.len() * vocab_size / MIN_TASK).max(1);
        let num_threads = self.threads().count().min(tasks.len()).min(worthwhile);
        self.threads().share_out(num_threads, tasks, |task| {
            MEMORY.with_borrow_mut(|memory| work(task, memory));
        });
    }
}

/// The number of rows.
pub(crate) fn check_logits<E>(logits: &[E], vocab_size: usize) -> Result<usize, Error> {
    above_zero("the vocabulary", vocab_size)?;
    u32::try_from(vocab_size).map_err(|_| Error::TooLarge)?;
    let count = logits.len() / vocab_size;
    same_length("logits", count * vocab_size, logits.len())?;
    Ok(count)
}

/// `indices`, all of which are below `count`.
pub(crate) fn check_indices(
    name: &'static str,
    indices: &[i64],
    count: usize,
) -> Result<Vec<usize>, Error> {
    let check = |(at, &value): (usize, &i64)| {
        let index = usize::try_from(value).ok().filter(|&it| it < count);
        index.ok_or(Error::Index {
            name,
            at,
            value,
            count,
        })
    };
    indices.iter().enumerate().map(check).collect()
}

/// Memory of a thread, kept from row to row.
#[derive(Debug, Default)]
pub(crate) struct Memory {
    pub(crate) groups: Groups,
    pub(crate) ids: Vec<u32>,
    pub(crate) keys: Vec<u64>,
    floats: Vec<f32>,
    ranked: Vec<u32>,
    weights: Vec<f64>,
    sums: Vec<f64>,
    masses: Vec<[f64; SPREAD]>,
    pairs: Vec<(f32, f64)>,
}

struct Largest<'a, E> {
    memory: &'a mut Memory,
    row: &'a [E],
    token: &'a mut i64,
}

impl<E: Element> InEachBuild for Largest<'_, E> {
    #[inline(always)]
    fn run(self) {
        let groups = &mut self.memory.groups;
        let peak = groups.scan(self.row);
        *self.token = groups.index_of(self.row, peak) as i64;
    }
}

#[derive(Clone, Copy)]
struct Settings {
    temperature: f64,
    min_p: f64,
    top_k: usize,
    top_p: f64,
    number: f64,
}

struct Draw<'a, E> {
    memory: &'a mut Memory,
    row: &'a [E],
    settings: Settings,
    token: &'a mut i64,
}

impl<E: Element> InEachBuild for Draw<'_, E> {
    #[inline(always)]
    fn run(self) {
        let Self {
            memory,
            row,
            settings,
            token,
        } = self;
        let peak = memory.groups.scan(row);
        let drawn = match peak.is_finite() {
            true => memory.draw(row, peak, settings),
            false => None,
        };
        *token = drawn.unwrap_or_else(|| memory.groups.index_of(row, peak)) as i64;
    }
}

impl Memory {
    /// A token of the row that `groups` scanned. `None` if rounding leaves none.
    #[inline(always)]
    fn draw<E: Element>(&mut self, row: &[E], peak: f32, settings: Settings) -> Option<usize> {
        let weigh = Weigh::new(peak, settings);
        let mut floats = std::mem::take(&mut self.floats);
        let mut index = None;
        let bound = self.bound(peak, settings);
        if bound.is_some_and(|it| self.groups.reaching(row, it, &mut self.ids)) {
            floats.clear();
            floats.extend(self.ids.iter().map(|&id| row[id as usize].widen()));
            let is_bare_nucleus = settings.min_p <= 0.0 && settings.top_k == 0;
            let total = is_bare_nucleus.then(|| weigh.total(row));
            let among = self.draw_from(&floats, &weigh, total);
            index = among.map(|index| self.ids[index] as usize);
        }
        if index.is_none() {
            index = self.draw_from(E::floats(row, &mut floats), &weigh, None);
        }
        self.floats = floats;
        index
    }

    /// A logit that all tokens reach which pass min-p and top-k; or the head of a row, in which its nucleus is likely.
    /// `None` if there is none that is quickly found.
    #[inline(always)]
    fn bound(&mut self, peak: f32, settings: Settings) -> Option<f32> {
        let is_bare_nucleus = settings.min_p <= 0.0 && settings.top_k == 0 && settings.top_p < 1.0;
        let wanted = if is_bare_nucleus {
            HEAD
        } else {
            settings.top_k
        };
        let of_top_k = self.groups.bound(wanted);
        if settings.min_p <= 0.0 {
            return of_top_k;
        }
        // A little lower than it is, as logarithm and sum are rounded.
        let distance = settings.temperature * (settings.min_p.ln() * (1.0 + 1e-9) - 1e-9);
        let of_min_p = ((f64::from(peak) + distance) as f32).next_down();
        Some(of_top_k.map_or(of_min_p, |it| it.max(of_min_p)))
    }

    /// A place in `logits`, which are all that may pass the filters, in order of id. `total` are the weights of the whole row
    /// if they are its head: `None` then if the nucleus may be longer.
    #[inline(always)]
    fn draw_from(&mut self, logits: &[f32], weigh: &Weigh, total: Option<f64>) -> Option<usize> {
        let Settings {
            top_k,
            top_p,
            number,
            ..
        } = weigh.settings;
        self.weights.resize(logits.len(), 0.0);
        weigh.write(logits, &mut self.weights);
        if 0 < top_k && top_k < logits.len() {
            let floor = nth_largest(logits, top_k, &mut self.ranked);
            self.drop_below(floor, logits);
        }
        if top_p < 1.0 {
            let floor = self.nucleus_floor(logits, weigh, total)?;
            self.drop_below(floor, logits);
        }
        self.pick(number)
    }

    /// Weights of logits below the floor become 0.
    #[inline(always)]
    fn drop_below(&mut self, floor: f32, logits: &[f32]) {
        for (weight, &logit) in self.weights.iter_mut().zip(logits) {
            *weight = if logit >= floor { *weight } else { 0.0 };
        }
    }

    /// The lowest logit of the nucleus: the fewest most probable tokens whose weights add up to `top_p` of the total, by
    /// default that of all weights. `None` if these do not. Tokens of similar logits are added up first; only those around
    /// the last one are sorted.
    #[inline(always)]
    fn nucleus_floor(&mut self, logits: &[f32], weigh: &Weigh, total: Option<f64>) -> Option<f32> {
        self.masses.clear();
        self.masses.resize(BUCKETS, [0.0; SPREAD]);
        for (at, (&logit, &weight)) in logits.iter().zip(&self.weights).enumerate() {
            self.masses[weigh.bucket(logit)][at % SPREAD] += weight;
        }
        let masses = self.masses.iter().map(|it| it.iter().sum::<f64>());
        let limit = weigh.settings.top_p * total.unwrap_or_else(|| masses.clone().sum());
        let mut reached = 0.0;
        let last = masses.clone().position(|mass| {
            let is_last = reached + mass >= limit;
            reached += if is_last { 0.0 } else { mass };
            is_last
        })?;
        self.pairs.clear();
        for (&logit, &weight) in logits.iter().zip(&self.weights) {
            if weight > 0.0 && weigh.bucket(logit) == last {
                self.pairs.push((logit, weight));
            }
        }
        self.pairs
            .sort_unstable_by_key(|&(logit, _)| Reverse(key(logit)));
        let mut lowest = None; // the last one if the bucket's sum was rounded up
        for &(logit, weight) in &self.pairs {
            lowest = Some(logit);
            reached += weight;
            if reached >= limit {
                break;
            }
        }
        lowest
    }

    /// The first place at which the cumulated weight exceeds `number` times the total.
    #[inline(always)]
    fn pick(&mut self, number: f64) -> Option<usize> {
        self.sums.clear();
        let mut total = 0.0;
        for weights in self.weights.chunks(BLOCK) {
            total += sum(weights);
            self.sums.push(total);
        }
        let target = number * total;
        let block = self.sums.iter().position(|&sum| sum > target)?;
        let first = block * BLOCK;
        let mut reached = block.checked_sub(1).map_or(0.0, |before| self.sums[before]);
        let mut index = None; // the last one with a weight if the block's sum was rounded up
        for (at, &weight) in self.weights[first..].iter().take(BLOCK).enumerate() {
            if weight > 0.0 {
                index = Some(first + at);
                reached += weight;
            }
            if reached > target {
                break;
            }
        }
        index
    }
}

/// The weights of a row's tokens.
struct Weigh {
    peak: f64,
    settings: Settings,
    /// Buckets per logit.
    factor: f64,
}

impl Weigh {
    #[inline(always)]
    fn new(peak: f32, settings: Settings) -> Self {
        Self {
            peak: f64::from(peak),
            settings,
            factor: (PER_UNIT / settings.temperature).min(f64::MAX), // finite: the peak is in bucket 0
        }
    }

    /// Those of `logits`: 0 if below min-p.
    #[inline(always)]
    fn write<E: Element>(&self, logits: &[E], weights: &mut [f64]) {
        let Settings {
            temperature, min_p, ..
        } = self.settings;
        for (weight, logit) in weights.iter_mut().zip(logits) {
            let power = exp((f64::from(logit.widen()) - self.peak) / temperature);
            *weight = if power < min_p { 0.0 } else { power };
        }
    }

    /// Their sum.
    #[inline(always)]
    fn total<E: Element>(&self, row: &[E]) -> f64 {
        let mut weights = [0.0; BLOCK];
        let mut total = 0.0;
        for logits in row.chunks(BLOCK) {
            self.write(logits, &mut weights);
            total += sum(&weights[..logits.len()]);
        }
        total
    }

    /// A bucket for each logit: that of a lower logit is the same, or a later one.
    #[inline(always)]
    fn bucket(&self, logit: f32) -> usize {
        let distance = (self.peak - f64::from(logit)) * self.factor;
        let last = (BUCKETS - 1) as f64;
        let nearest = (if distance < last { distance } else { last }) + ROUND;
        nearest.to_bits() as usize % BUCKETS
    }
}

/// The sum of a block, lane by lane.
#[inline(always)]
fn sum(weights: &[f64]) -> f64 {
    let mut sums = [0.0; LANES];
    let (wide, rest) = weights.as_chunks::<LANES>();
    for weights in wide {
        for lane in 0..LANES {
            sums[lane] += weights[lane];
        }
    }
    for (sum, weight) in sums.iter_mut().zip(rest) {
        *sum += weight;
    }
    sums.iter().sum()
}
