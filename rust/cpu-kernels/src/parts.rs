//! Merges the states of a query in several parts, always in the order of the parts.

use crate::element::Element;
use crate::job::{HEADER, Job, state_len};
use crate::lanes::{exp2, larger};

/// Merges the states of all parts and writes the results.
#[inline(always)]
pub(crate) fn finish_rows<E: Element>(
    job: &Job<'_, E>,
    states: &[f32],
    count: usize,
    out: &mut [E],
) {
    let mut own = vec![0.0; state_len(job.shape.dim_v)];
    for (index, out) in out.chunks_exact_mut(job.shape.dim_v).enumerate() {
        gather(job, states, count, index, &mut own);
        divide(&own[HEADER..], own[1], out);
    }
}

/// Merges the states of one query in several parts into `own`. `index`: that of the query in `[rows, query heads]`.
#[inline(always)]
pub(crate) fn gather<E>(
    job: &Job<'_, E>,
    states: &[f32],
    count: usize,
    index: usize,
    own: &mut [f32],
) {
    own.fill(0.0);
    own[..HEADER].copy_from_slice(&job.nothing(index % job.heads));
    for (number, part) in states.chunks_exact(count * job.per_row()).enumerate() {
        let part = &part[index * own.len()..][..own.len()];
        match number == 0 && job.sinks.is_none() {
            true => own.copy_from_slice(part),
            false => merge_row(own, part),
        }
    }
}

/// Adds the state of one query in the next part to that in the parts before.
#[inline(always)]
fn merge_row(sums: &mut [f32], part: &[f32]) {
    let now = larger(part[0], sums[0]);
    let (own, other) = (faded(sums[0], now), faded(part[0], now));
    sums[0] = now;
    add(&mut sums[1..], &part[1..], own, other);
}

/// The factor that rescales a state from the reference `before` to `now`.
#[inline(always)]
pub(crate) fn faded(before: f32, now: f32) -> f32 {
    let less = exp2(before - now);
    if before == now { 1.0 } else { less }
}

/// `sums * own + part * other`.
#[inline(always)]
pub(crate) fn add(sums: &mut [f32], part: &[f32], own: f32, other: f32) {
    for (sum, part) in sums.iter_mut().zip(part) {
        *sum = part.mul_add(other, *sum * own);
    }
}

#[inline(always)]
pub(crate) fn divide<E: Element>(sums: &[f32], total: f32, out: &mut [E]) {
    let share = 1.0 / total;
    for (element, &sum) in out.iter_mut().zip(sums) {
        *element = E::narrow(sum * share);
    }
}
