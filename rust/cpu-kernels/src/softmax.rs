//! The softmax of a part: scores of a row become weights of its values.

use std::f32::consts::LOG2_E;
use std::ops::Range;

use crate::kernel::How;
use crate::lanes::{exp2, larger};

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

/// Scores of a row become weights `2 ^ (score - reference)` of its keys, 0 for keys beside those in `seen`, which are
/// counted from the first. Returns the reference, which is the largest score, and the sum of the weights.
#[inline(always)]
pub(crate) fn soften<const L: usize>(
    how: How,
    scores: &mut [[f32; L]],
    seen: Range<i32>,
) -> [f32; 2] {
    let factor = cap(how, scores.as_flattened_mut());
    for (position, score) in (0..).zip(scores.as_flattened_mut()) {
        let is_seen = (seen.start <= position) & (position < seen.end);
        let scaled = *score * factor;
        *score = if is_seen { scaled } else { f32::NEG_INFINITY };
    }
    let mut largest = [f32::NEG_INFINITY; L];
    for score in &*scores {
        for lane in 0..L {
            largest[lane] = larger(score[lane], largest[lane]);
        }
    }
    let reference = largest.into_iter().fold(f32::NEG_INFINITY, larger);
    for score in scores.as_flattened_mut() {
        let power = exp2(*score - reference);
        let is_hidden = *score == f32::NEG_INFINITY;
        *score = if is_hidden { 0.0 } else { power };
    }
    let mut totals = [0.0; L];
    for score in &*scores {
        for lane in 0..L {
            totals[lane] += score[lane];
        }
    }
    [reference, sum_of(totals)]
}

/// The sum of the lanes: of its two halves, added up lane by lane, and so on.
#[inline(always)]
fn sum_of<const L: usize>(mut lanes: [f32; L]) -> f32 {
    let mut width = L / 2;
    while width > 0 {
        for lane in 0..width {
            lanes[lane] += lanes[lane + width];
        }
        width /= 2;
    }
    lanes[0]
}
