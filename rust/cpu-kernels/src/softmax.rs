//! The softmax, as keys come: scores of a tile become weights of its values.

use std::f32::consts::LOG2_E;

use crate::kernel::{Bounds, How};
use crate::lanes::{exp2, larger};
use crate::parts::faded;
use crate::step::TILE;

/// Caps scores, if that is asked for; what they are to be multiplied with, for powers of 2.
#[inline(always)]
pub(crate) fn cap((scaling, softcap): How, scores: &mut [f32]) -> f32 {
    let Some(cap) = softcap else {
        return scaling * LOG2_E;
    };
    for score in scores {
        *score = cap * (*score * scaling / cap).tanh();
    }
    LOG2_E
}

/// Scores as they are compared, for powers of 2.
#[cfg(target_arch = "x86_64")] // the others scale as they look for the largest
#[inline(always)]
pub(crate) fn capped(how: How, scores: &mut [f32]) {
    let factor = cap(how, scores);
    for score in scores {
        *score *= factor;
    }
}

/// Multiplies scores; the largest of each lane.
#[inline(always)]
pub(crate) fn scale<const L: usize>(scores: &mut [[f32; L]; TILE], factor: f32) -> [f32; L] {
    let mut largest = [f32::NEG_INFINITY; L];
    for score in scores {
        for lane in 0..L {
            score[lane] *= factor;
            largest[lane] = larger(score[lane], largest[lane]);
        }
    }
    largest
}

/// The same, and what a lane does not see is minus infinity.
#[inline(always)]
pub(crate) fn scale_and_hide<const L: usize>(
    scores: &mut [[f32; L]; TILE],
    factor: f32,
    (start, bounds): (usize, &Bounds<L>),
) -> [f32; L] {
    let mut largest = [f32::NEG_INFINITY; L];
    for (at, score) in scores.iter_mut().enumerate() {
        let position = (start + at) as i32;
        for lane in 0..L {
            let is_seen = bounds.lows[lane] <= position && position < bounds.highs[lane];
            let scaled = score[lane] * factor;
            score[lane] = if is_seen { scaled } else { f32::NEG_INFINITY };
            largest[lane] = larger(score[lane], largest[lane]);
        }
    }
    largest
}

/// How much larger than the reference a score may be before it becomes the reference: weights stay below `2 ^ 12`, and
/// sums need not fade for each new largest score (as in FlashAttention-4).
const SLACK: f32 = 12.0;

/// Turns scores into weights `2 ^ (score - reference)` and brings the header up to them; how much what was found
/// before counts now, unless it counts in full.
#[inline(always)]
pub(crate) fn soften<const L: usize>(
    weights: &mut [[f32; L]; TILE],
    largest: [f32; L],
    header: &mut [[f32; L]],
) -> Option<[f32; L]> {
    let before = header[0];
    let mut now = before;
    for lane in 0..L {
        let is_beyond = largest[lane] > before[lane] + SLACK;
        now[lane] = if is_beyond {
            largest[lane]
        } else {
            before[lane]
        };
    }
    let mut total = header[1];
    let mut less = None;
    if now != before {
        let less = less.insert([1.0; L]);
        for lane in 0..L {
            less[lane] = faded(before[lane], now[lane]);
            total[lane] *= less[lane];
        }
        header[0] = now;
    }
    for weight in weights {
        for lane in 0..L {
            let power = exp2(weight[lane] - now[lane]);
            let is_hidden = weight[lane] == f32::NEG_INFINITY;
            weight[lane] = if is_hidden { 0.0 } else { power };
            total[lane] += weight[lane];
        }
    }
    header[1] = total;
    less
}
