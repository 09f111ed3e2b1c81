//! The largest logits of a row, found without a sort of the row.

use std::cmp::Reverse;

use crate::element::{Element, widen};
use crate::lanes::larger;

/// Logits that are compared side by side.
const LANES: usize = 64;

/// Half of them: one comparison finds a NaN in either.
const HALF: usize = LANES / 2;

/// Groups of a large row, about.
const MANY: usize = 4096;

/// A share of the groups: rows with more groups to look at are read as a whole.
const FEW: usize = 8;

/// The largest logits of the groups of a row. A chunk has [`LANES`] groups, of every such logit each.
#[derive(Debug, Default)]
pub(crate) struct Groups {
    largest: Vec<f32>,
    ranked: Vec<u32>,
    chunk: usize,
}

impl Groups {
    /// Reads a row. Returns its largest logit, NaN if one is.
    #[inline(always)]
    pub(crate) fn scan<E: Element>(&mut self, row: &[E]) -> f32 {
        self.chunk = LANES * (row.len() / MANY).clamp(4, 64);
        self.largest.clear();
        let mut peaks = [f32::NEG_INFINITY; LANES];
        let mut nans = [0u32; HALF];
        for chunk in row.chunks(self.chunk) {
            let mut largest = [f32::NEG_INFINITY; LANES];
            let (wide, rest) = chunk.as_chunks::<LANES>();
            for logits in wide {
                raise(&mut largest, &mut nans, |lane| logits[lane].widen());
            }
            if !rest.is_empty() {
                let mut floats = [f32::NEG_INFINITY; LANES];
                widen(rest, &mut floats);
                raise(&mut largest, &mut nans, |lane| floats[lane]);
            }
            for lane in 0..LANES {
                peaks[lane] = larger(largest[lane], peaks[lane]);
            }
            self.largest.extend_from_slice(&largest);
        }
        match nans.iter().any(|&nan| nan > 0) {
            true => f32::NAN,
            false => peaks.into_iter().fold(f32::NEG_INFINITY, larger),
        }
    }

    /// The first place of the largest logit in the row that was scanned; of NaN, if that is what the scan returned.
    #[inline(always)]
    pub(crate) fn index_of<E: Element>(&self, row: &[E], peak: f32) -> usize {
        if peak.is_nan() {
            let index = row.iter().position(|logit| logit.widen().is_nan());
            return index.unwrap_or(0);
        }
        let (chunks, _) = self.largest.as_chunks::<LANES>();
        let chunk = chunks.iter().position(|largest| largest.contains(&peak));
        let first = chunk.unwrap_or(0) * self.chunk;
        let index = row[first..].iter().position(|it| it.widen() == peak);
        first + index.unwrap_or(0)
    }

    /// A lower bound of the `count`-th largest logit of the row that was scanned, usually close to it: so many groups have
    /// a logit that reaches it. `None` if `count` is 0, or too large for that.
    pub(crate) fn bound(&mut self, count: usize) -> Option<f32> {
        if count == 0 || count > self.largest.len() / FEW {
            return None;
        }
        Some(nth_largest(&self.largest, count, &mut self.ranked))
    }

    /// The ids of the logits of the scanned row that reach `bound`, in ascending order. False if they may be many: none are
    /// returned then.
    #[inline(always)]
    pub(crate) fn reaching<E: Element>(&self, row: &[E], bound: f32, ids: &mut Vec<u32>) -> bool {
        ids.clear();
        let reaching = |it: &[f32; LANES]| it.iter().filter(|&&it| it >= bound).count();
        let (chunks, _) = self.largest.as_chunks::<LANES>();
        if chunks.iter().map(reaching).sum::<usize>() > self.largest.len() / FEW * 2 {
            return false;
        }
        for (number, largest) in chunks.iter().enumerate() {
            if largest.iter().all(|&it| it < bound) {
                continue;
            }
            let (first, before) = (number * self.chunk, ids.len());
            let chunk = &row[first..row.len().min(first + self.chunk)];
            for lane in (0..LANES).filter(|&lane| largest[lane] >= bound) {
                for index in (lane..chunk.len()).step_by(LANES) {
                    if chunk[index].widen() >= bound {
                        ids.push((first + index) as u32);
                    }
                }
            }
            ids[before..].sort_unstable();
        }
        true
    }
}

/// Raises each lane to its logit, and marks NaN. Lanes are counted through, so that they stay in registers.
#[inline(always)]
fn raise(largest: &mut [f32; LANES], nans: &mut [u32; HALF], logit: impl Fn(usize) -> f32) {
    for lane in 0..HALF {
        let (first, second) = (logit(lane), logit(lane + HALF));
        largest[lane] = larger(first, largest[lane]);
        largest[lane + HALF] = larger(second, largest[lane + HALF]);
        nans[lane] |= u32::from(first.is_nan() | second.is_nan());
    }
}

/// The `count`-th largest of `floats`, from 1 to their number. `ranked` is memory.
pub(crate) fn nth_largest(floats: &[f32], count: usize, ranked: &mut Vec<u32>) -> f32 {
    ranked.clear();
    ranked.extend(floats.iter().map(|&float| key(float)));
    let (_, &mut nth, _) = ranked.select_nth_unstable_by_key(count - 1, |&key| Reverse(key));
    let flipped = if nth >> 31 == 1 { nth ^ 1 << 31 } else { !nth };
    f32::from_bits(flipped)
}

/// An integer in the order of the number: equal for 0 and -0, the largest for NaN.
#[inline(always)]
pub(crate) fn key(float: f32) -> u32 {
    let float = if float == 0.0 { 0.0 } else { float };
    let bits = if float.is_nan() {
        0x7fc0_0000
    } else {
        float.to_bits()
    };
    bits ^ ((bits as i32 >> 31) as u32 | 1 << 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_logits_reach_the_bound_of_the_largest_ones() {
        for size in [20_001, 262_144] {
            let logit = |at: usize| (at * 7919 % 100_003) as f32;
            let row: Vec<f32> = (0..size).map(logit).collect();
            let (mut groups, mut ids) = (Groups::default(), vec![]);
            assert_eq!(groups.scan(&row), row.iter().copied().fold(0.0, f32::max));
            for count in [1, 50, 200] {
                let bound = groups.bound(count).expect("there are more groups");
                assert!(groups.reaching(&row, bound, &mut ids));
                let reaching = |&id: &u32| row[id as usize] >= bound;
                let expected: Vec<u32> = (0..size as u32).filter(reaching).collect();
                assert_eq!(ids, expected);
                assert!(
                    (count..=4 * count + 8).contains(&ids.len()),
                    "{}",
                    ids.len()
                );
            }
            assert_eq!(groups.bound(0), None);
            assert_eq!(groups.bound(size), None);
            assert!(!groups.reaching(&row, 0.0, &mut ids));
        }
    }

    #[test]
    fn keys_are_in_the_order_of_the_numbers() {
        let floats = [
            f32::NEG_INFINITY,
            f32::MIN,
            -1.5,
            -1e-45,
            0.0,
            1e-45,
            2.0,
            f32::INFINITY,
        ];
        assert!(floats.map(key).is_sorted_by(|a, b| a < b));
        assert_eq!(key(0.0), key(-0.0));
        assert!(key(-f32::NAN) > key(f32::INFINITY));
        for count in 1..=floats.len() {
            let actual = nth_largest(&floats, count, &mut vec![]);
            assert_eq!(actual.to_bits(), floats[floats.len() - count].to_bits());
        }
    }
}
