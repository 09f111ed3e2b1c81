//! The arithmetic: the rows of a run over a part of their keys, and how parts come together.

use crate::attention::Job;
use crate::lanes::{LANES, Lanes, dot8, exp, larger};
use crate::step::Run;

/// Keys that are scored before their values are read: keys and values of a head stay in the L1 cache
/// from one query to the next.
const TILE: usize = 32;

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

/// Attends with the rows of `run` over the keys of a part, from nothing.
///
/// `state` is `[rows, query heads, state_len]`. The keys are the positions from `part` times
/// `part_keys` on.
pub(crate) fn attend(
    isa: Isa,
    job: &Job<'_>,
    run: &Run,
    part: std::ops::Range<usize>,
    state: &mut [f32],
) {
    #[cfg(target_arch = "x86_64")]
    if isa == Isa::Avx2 && Isa::detect() == Isa::Avx2 {
        #[target_feature(enable = "avx2,fma")]
        fn avx2(job: &Job<'_>, run: &Run, part: std::ops::Range<usize>, state: &mut [f32]) {
            attend_lanes(job, run, part, state);
        }
        // SAFETY: the machine has AVX2 and FMA, as was looked up.
        #[allow(unsafe_code)]
        return unsafe { avx2(job, run, part, state) };
    }
    let _ = isa;
    attend_lanes(job, run, part, state);
}

/// The keys of a tile that a query sees, and where the keys stand in the cache.
struct Tile {
    slots: [usize; TILE],
    start: usize,
}

#[inline(always)]
fn attend_lanes(job: &Job<'_>, run: &Run, part: std::ops::Range<usize>, state: &mut [f32]) {
    let (shape, group) = (job.shape, job.group);
    for one in state.chunks_exact_mut(state_len(shape.dim_v)) {
        one.fill(0.0);
        one[0] = f32::NEG_INFINITY;
    }
    let (low, high) = (job.low(run.position), run.position + run.count);
    let table = &job.step.blocks[run.blocks.clone()];
    for start in part.clone().step_by(TILE) {
        let (first, end) = (start.max(low), (start + TILE).min(part.end).min(high));
        if first >= end {
            continue;
        }
        let mut tile = Tile {
            slots: [0; TILE],
            start,
        };
        for (at, slot) in tile.slots.iter_mut().enumerate() {
            let position = (start + at).clamp(first, end - 1); // beside the tile: not looked at
            let block = table[position / shape.block_size] as usize;
            *slot = block * shape.block_size + position % shape.block_size;
        }
        for kv_head in 0..shape.kv_heads {
            for row in 0..run.count {
                let position = run.position + row;
                let sees = first.max(job.low(position))..end.min(position + 1);
                if sees.is_empty() {
                    continue;
                }
                for head in kv_head * group..(kv_head + 1) * group {
                    let at = (run.first_row + row) * job.heads + head;
                    let query = &job.query[at * shape.dim_k..][..shape.dim_k];
                    let size = state_len(shape.dim_v);
                    let state = &mut state[(row * job.heads + head) * size..][..size];
                    attend_tile(job, &tile, kv_head, sees.clone(), query, state);
                }
            }
        }
    }
}

/// One query over one tile.
#[inline(always)]
fn attend_tile(
    job: &Job<'_>,
    tile: &Tile,
    kv_head: usize,
    sees: std::ops::Range<usize>,
    query: &[f32],
    state: &mut [f32],
) {
    let shape = job.shape;
    let (begin, end) = (sees.start - tile.start, sees.end - tile.start);
    let mut weights = [Lanes::splat(f32::NEG_INFINITY); TILE / LANES];
    let mut largest = f32::NEG_INFINITY;
    for at in begin / LANES..end.div_ceil(LANES) {
        let slots = &tile.slots[at * LANES..][..LANES];
        let mut keys = [query; LANES];
        for (key, slot) in keys.iter_mut().zip(slots) {
            let start = (slot * shape.kv_heads + kv_head) * shape.dim_k;
            *key = &job.keys[start..][..shape.dim_k];
        }
        let mut scores = dot8(query, keys).scale(job.scaling);
        if let Some(cap) = job.softcap {
            for score in &mut scores.0 {
                *score = cap * (*score / cap).tanh();
            }
        }
        for (lane, score) in scores.0.iter_mut().enumerate() {
            let key = at * LANES + lane;
            *score = if key >= begin && key < end {
                *score
            } else {
                f32::NEG_INFINITY
            };
        }
        weights[at] = scores;
        largest = larger(scores.max(), largest);
    }
    let (header, sum) = state.split_at_mut(HEADER);
    let before = header[0];
    let now = larger(before, largest);
    let faded = if now == before {
        1.0
    } else {
        exp(before - now)
    };
    let mut total = Lanes::splat(0.0);
    for (at, scores) in weights.iter_mut().enumerate() {
        if at < begin / LANES || at >= end.div_ceil(LANES) {
            continue;
        }
        let mut from_largest = *scores;
        for score in &mut from_largest.0 {
            *score -= now;
        }
        let mut powers = from_largest.exp();
        for (power, score) in powers.0.iter_mut().zip(scores.0) {
            *power = if score == f32::NEG_INFINITY {
                0.0
            } else {
                *power
            };
        }
        total = total.add(powers);
        *scores = powers;
    }
    header[0] = now;
    header[1] = header[1].mul_add(faded, total.sum());
    let first_value = kv_head * shape.dim_v;
    let row_len = shape.kv_heads * shape.dim_v;
    let weight = |key: usize| weights[key / LANES].0[key % LANES];
    let mut done = 0;
    while shape.dim_v - done >= 8 * LANES {
        weigh::<8>(
            job.values,
            &tile.slots[begin..end],
            first_value + done,
            row_len,
            |at| weight(begin + at),
            faded,
            &mut sum[done..],
        );
        done += 8 * LANES;
    }
    while shape.dim_v - done >= LANES {
        weigh::<1>(
            job.values,
            &tile.slots[begin..end],
            first_value + done,
            row_len,
            |at| weight(begin + at),
            faded,
            &mut sum[done..],
        );
        done += LANES;
    }
    for element in done..shape.dim_v {
        let mut found = sum[element] * faded;
        for (at, slot) in tile.slots[begin..end].iter().enumerate() {
            found = weight(begin + at)
                .mul_add(job.values[slot * row_len + first_value + element], found);
        }
        sum[element] = found;
    }
}

/// Adds weighted values to `sum`, `N` times eight elements of each.
#[inline(always)]
fn weigh<const N: usize>(
    values: &[f32],
    slots: &[usize],
    first: usize,
    row_len: usize,
    weight: impl Fn(usize) -> f32,
    faded: f32,
    sum: &mut [f32],
) {
    let (sum, _) = sum.as_chunks_mut::<LANES>();
    let sum = &mut sum[..N];
    let mut lanes = [Lanes::splat(0.0); N];
    for at in 0..N {
        lanes[at] = Lanes(sum[at]).scale(faded);
    }
    for (key, slot) in slots.iter().enumerate() {
        let (value, _) = values[slot * row_len + first..][..N * LANES].as_chunks::<LANES>();
        let weight = Lanes::splat(weight(key));
        for at in 0..N {
            lanes[at] = weight.mul_add(&value[at], lanes[at]);
        }
    }
    for at in 0..N {
        sum[at] = lanes[at].0;
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
