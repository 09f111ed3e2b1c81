//! The arithmetic: the rows of a run over a part of their keys, and how parts come together.

use std::ops::Range;

use crate::attention::{Job, Member};
use crate::element::Element;
#[cfg(target_arch = "x86_64")]
use crate::lanes::Avx2;
use crate::lanes::{LANES, Lanes, Plain, Shuffles, dot8, exp, larger, largest, sum_all};
use crate::step::Run;

/// Keys that are scored before their values are read: keys and values of a head stay in the L1 cache
/// from one query to the next.
pub(crate) const TILE: usize = 32;

/// Which build of the arithmetic runs. They give the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Isa {
    /// What the target has in any case.
    Portable,
    /// x86-64 with AVX2 and FMA.
    Avx2,
}

impl Isa {
    /// The best that this machine has.
    #[must_use]
    pub fn detect() -> Self {
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
            return Self::Avx2;
        }
        Self::Portable
    }

    /// Whether this machine has an instruction that multiplies and adds with one rounding. Without,
    /// the kernel is right, and slow.
    #[must_use]
    pub fn is_fast() -> bool {
        cfg!(target_feature = "fma")
            || cfg!(target_arch = "aarch64")
            || Self::detect() == Self::Avx2
    }
}

/// What a query has found so far: the largest score, the sum of `e ^ (score - largest)`, and the sum of
/// the values so weighted. In memory one after the other.
const HEADER: usize = 2;

/// Floats of the state of one query.
pub(crate) fn state_len(dim_v: usize) -> usize {
    HEADER + dim_v
}

/// Attends with the rows of some runs over the keys of a part, from nothing.
///
/// The state of each is `[rows, query heads, state_len]`. Where there are several runs, they have the blocks
/// of the part in common. What is computed for a row does not depend on who else is there.
pub(crate) fn attend<E: Element>(
    isa: Isa,
    job: &Job<'_, E>,
    members: &mut [Member<'_>],
    part: Range<usize>,
) {
    #[cfg(target_arch = "x86_64")]
    if isa == Isa::Avx2 && Isa::detect() == Isa::Avx2 {
        #[target_feature(enable = "avx2,fma")]
        fn avx2<E: Element>(job: &Job<'_, E>, members: &mut [Member<'_>], part: Range<usize>) {
            attend_lanes::<E, Avx2>(job, members, part);
        }
        // SAFETY: the machine has AVX2 and FMA, as was looked up.
        #[allow(unsafe_code)]
        return unsafe { avx2(job, members, part) };
    }
    let _ = isa;
    attend_lanes::<E, Plain>(job, members, part);
}

/// The keys and values of one head that a tile holds, as floats. Beside those that are seen, some are
/// repeated.
struct Tile<'a> {
    start: usize,
    keys: [&'a [f32]; TILE],
    values: [&'a [f32]; TILE],
}

#[inline(always)]
fn attend_lanes<E: Element, S: Shuffles>(
    job: &Job<'_, E>,
    members: &mut [Member<'_>],
    part: Range<usize>,
) {
    let (shape, size) = (job.shape, state_len(job.shape.dim_v));
    let per_row = job.heads * shape.dim_k;
    let (mut wide_keys, mut wide_values) = (vec![], vec![]);
    let mut wide_queries = vec![vec![]; members.len()];
    let mut queries = Vec::with_capacity(members.len());
    let (mut low, mut high) = (usize::MAX, 0);
    for ((run, state), wide) in members.iter_mut().zip(&mut wide_queries) {
        let run = &job.step.runs[*run];
        let rows = &job.query[run.first_row * per_row..][..run.count * per_row];
        queries.push(E::floats(rows, wide));
        low = low.min(job.low(run.position));
        high = high.max(run.position + run.count);
        for one in state.chunks_exact_mut(size) {
            one.fill(0.0);
            one[0] = f32::NEG_INFINITY;
        }
    }
    let model = &job.step.runs[members[0].0];
    for start in part.clone().step_by(TILE) {
        let seen = start.max(low)..(start + TILE).min(part.end).min(high);
        if seen.is_empty() {
            continue;
        }
        let slots = slots(job, model, start, &seen);
        let near = seen.start - start..seen.end - start;
        for kv_head in 0..shape.kv_heads {
            let rows = slots.map(|slot| slot * shape.kv_heads + kv_head);
            let keys = rows.map(|row| &job.keys[row * shape.dim_k..][..shape.dim_k]);
            let values = rows.map(|row| &job.values[row * shape.dim_v..][..shape.dim_v]);
            let tile = Tile {
                start,
                keys: E::tile(keys, &near, &mut wide_keys),
                values: E::tile(values, &near, &mut wide_values),
            };
            for ((run, state), queries) in members.iter_mut().zip(&queries) {
                attend_run::<E, S>(
                    job,
                    &tile,
                    (&job.step.runs[*run], &seen),
                    kv_head,
                    (queries, state),
                );
            }
        }
    }
}

/// The rows of a run over a tile, of one KV head.
#[inline(always)]
fn attend_run<E: Element, S: Shuffles>(
    job: &Job<'_, E>,
    tile: &Tile<'_>,
    (run, seen): (&Run, &Range<usize>),
    kv_head: usize,
    (queries, state): (&[f32], &mut [f32]),
) {
    let (dim_k, size) = (job.shape.dim_k, state_len(job.shape.dim_v));
    for row in 0..run.count {
        let position = run.position + row;
        let sees = seen.start.max(job.low(position))..seen.end.min(position + 1);
        if sees.is_empty() {
            continue;
        }
        for head in kv_head * job.group..(kv_head + 1) * job.group {
            let at = row * job.heads + head;
            let query = &queries[at * dim_k..][..dim_k];
            attend_tile::<E, S>(
                job,
                tile,
                sees.clone(),
                query,
                &mut state[at * size..][..size],
            );
        }
    }
}

/// Where the keys of the tile at `start` stand in the cache; beside `seen`, its first or last one.
#[inline(always)]
fn slots<E: Element>(
    job: &Job<'_, E>,
    run: &Run,
    start: usize,
    seen: &Range<usize>,
) -> [usize; TILE] {
    let (table, size) = (&job.step.blocks[run.blocks.clone()], job.shape.block_size);
    let mut slots = [0; TILE];
    for (at, slot) in slots.iter_mut().enumerate() {
        let position = (start + at).clamp(seen.start, seen.end - 1);
        *slot = table[position / size] as usize * size + position % size;
    }
    slots
}

/// One query over one tile, of which it sees the positions `sees`.
#[inline(always)]
fn attend_tile<E: Element, S: Shuffles>(
    job: &Job<'_, E>,
    tile: &Tile<'_>,
    sees: Range<usize>,
    query: &[f32],
    state: &mut [f32],
) {
    let sees = sees.start - tile.start..sees.end - tile.start;
    let mut weights = scores::<E, S>(job, tile, &sees, query);
    let (header, sum) = state.split_at_mut(HEADER);
    let before = header[0];
    let now = larger(before, largest(&weights));
    let faded = if now == before {
        1.0
    } else {
        exp(before - now)
    };
    for weight in &mut weights {
        let power = exp(*weight - now);
        *weight = if *weight == f32::NEG_INFINITY {
            0.0
        } else {
            power
        };
    }
    header[0] = now;
    header[1] = header[1].mul_add(faded, sum_all(&weights));
    let (weights, values) = (&weights[sees.clone()], &tile.values[sees]);
    let (wide, rest) = sum.split_at_mut(sum.len() / WIDE * WIDE);
    for (at, sum) in wide.chunks_exact_mut(WIDE).enumerate() {
        weigh::<8>(weights, values, at * WIDE, faded, sum);
    }
    let first = wide.len();
    let (narrow, rest) = rest.split_at_mut(rest.len() / LANES * LANES);
    for (at, sum) in narrow.chunks_exact_mut(LANES).enumerate() {
        weigh::<1>(weights, values, first + at * LANES, faded, sum);
    }
    let first = first + narrow.len();
    for (at, sum) in rest.iter_mut().enumerate() {
        *sum *= faded;
        for (&weight, value) in weights.iter().zip(values) {
            *sum = weight.mul_add(value[first + at], *sum);
        }
    }
}

/// The scores of a query in a tile; negative infinity for what it does not see.
#[inline(always)]
fn scores<E: Element, S: Shuffles>(
    job: &Job<'_, E>,
    tile: &Tile<'_>,
    sees: &Range<usize>,
    query: &[f32],
) -> [f32; TILE] {
    let mut scores = [f32::NEG_INFINITY; TILE];
    let (eights, _) = scores.as_chunks_mut::<LANES>();
    let (keys, _) = tile.keys.as_chunks::<LANES>();
    for at in sees.start / LANES..sees.end.div_ceil(LANES) {
        eights[at] = dot8::<S>(query, &keys[at]).scale(job.scaling).0;
    }
    if let Some(cap) = job.softcap {
        for score in &mut scores[sees.clone()] {
            *score = cap * (*score / cap).tanh();
        }
    }
    for (at, score) in scores.iter_mut().enumerate() {
        let is_seen = at >= sees.start && at < sees.end;
        *score = if is_seen { *score } else { f32::NEG_INFINITY };
    }
    scores
}

/// Elements of a value that are added up at a time: as many as registers hold.
const WIDE: usize = 8 * LANES;

/// Adds weighted values, from element `first` on, to `sum`, which is `N` times eight elements.
#[inline(always)]
fn weigh<const N: usize>(
    weights: &[f32],
    values: &[&[f32]],
    first: usize,
    faded: f32,
    sum: &mut [f32],
) {
    let (sum, _) = sum.as_chunks_mut::<LANES>();
    let mut lanes = [Lanes::splat(0.0); N];
    for (lanes, sum) in lanes.iter_mut().zip(&*sum) {
        *lanes = Lanes(*sum).scale(faded);
    }
    for (&weight, value) in weights.iter().zip(values) {
        let (value, _) = value[first..][..N * LANES].as_chunks::<LANES>();
        let weight = Lanes::splat(weight);
        for at in 0..N {
            lanes[at] = weight.mul_add(&value[at], lanes[at]);
        }
    }
    for (sum, lanes) in sum.iter_mut().zip(lanes) {
        *sum = lanes.0;
    }
}

/// Brings the parts of one query together and divides: `states` are `[parts, stride]`, of which the
/// first `state_len` floats count. A sink is a score without a value.
pub(crate) fn finish(states: &[f32], stride: usize, sink: Option<f32>, out: &mut [f32]) {
    let mut largest = sink.unwrap_or(f32::NEG_INFINITY);
    for state in states.chunks(stride) {
        largest = larger(largest, state[0]);
    }
    let mut total = sink.map_or(0.0, |sink| exp(sink - largest));
    out.fill(0.0);
    for state in states.chunks(stride) {
        let (header, sum) = state.split_at(HEADER);
        if header[1] == 0.0 {
            continue; // it sees nothing of this part
        }
        let faded = exp(header[0] - largest);
        total = header[1].mul_add(faded, total);
        for (element, &found) in out.iter_mut().zip(sum) {
            *element += found * faded;
        }
    }
    for element in out {
        *element /= total;
    }
}
