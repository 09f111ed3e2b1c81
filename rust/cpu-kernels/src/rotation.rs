//! Queries and keys as attention wants them: normalised head by head (arXiv:1910.07467) and turned by their positions
//! (RoPE, Su et al., 2021, arXiv:2104.09864), the keys straight into their slots. Computed in float32, rounded once.

use crate::attention::Attention;
use crate::builds::{InEachBuild, best_build};
use crate::element::{Element, widen};
use crate::error::Error;
use crate::norm::sum_of_squares;
use crate::step::{CacheShape, same_length};
use crate::stored::Stored;
use crate::write::{CacheArrays, CopyRows, Rows, check_write};

/// Numbers that a thread turns at a time, about, and beyond which threads share the work.
const MANY: usize = 20_000;

/// How the numbers of a head are paired.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Number `i` and `i + size / 2`, as in GPT-NeoX.
    Halves,
    /// Numbers `2 i` and `2 i + 1`.
    Pairs,
}

/// The numbers of a head that are rotated: the first `size`, by the angles in every `step`th column.
#[derive(Clone, Copy, Debug)]
pub struct Layout {
    /// Numbers, even.
    pub size: usize,
    /// How they are paired.
    pub order: Order,
    /// Pair `i` has the angle in column `i * step`.
    pub step: usize,
}

/// A norm over each head: `x / rms(x) * (offset + weight)`.
#[derive(Clone, Copy, Debug)]
pub struct HeadNorm<'a, E> {
    /// `[dim_k]`, of queries.
    pub query: &'a [E],
    /// `[dim_k]`, of keys.
    pub key: &'a [E],
    /// Added under the root.
    pub epsilon: f32,
    /// 1 where weights are kept as differences from 1, else 0.
    pub offset: f32,
}

/// The queries, keys and values of new tokens.
#[derive(Clone, Copy, Debug)]
pub struct NewRows<'a, E> {
    /// `[rows, heads, dim_k]`
    pub query: Rows<'a, E>,
    /// `[rows, kv_heads, dim_k]`
    pub key: Rows<'a, E>,
    /// `[rows, kv_heads, dim_v]`
    pub value: Rows<'a, E>,
}

/// What is done to queries and keys; angles are of either format.
#[derive(Clone, Copy, Debug)]
pub struct Rotation<'a, E, A> {
    /// `[rows, columns]`.
    pub cos: &'a [A],
    /// Likewise.
    pub sin: &'a [A],
    /// The numbers that are rotated.
    pub layout: Layout,
    /// The norm before the rotation.
    pub norm: Option<HeadNorm<'a, E>>,
}

impl Attention {
    /// As [`Attention::write`], with keys that are turned first; the queries, turned, go to `turned`
    /// `[rows, heads, dim_k]`.
    ///
    /// # Errors
    ///
    /// Arrays that do not fit each other, or a slot beyond the cache: nothing is written then.
    pub fn write_turned<E: Element, A: Element, C: Stored<E>>(
        &self,
        shape: &CacheShape,
        slots: &[i64],
        NewRows { query, key, value }: NewRows<'_, E>,
        rotation: &Rotation<'_, E, A>,
        cache: CacheArrays<'_, C>,
        turned: &mut [E],
    ) -> Result<(), Error> {
        check_write(shape, slots, key, value, &cache)?;
        let heads = query.width() / shape.dim_k;
        let width = CacheShape::elements(1, heads, shape.dim_k)?;
        same_length("query", width, query.width())?;
        same_length("the rows of query", slots.len(), query.len())?;
        let expected = CacheShape::elements(slots.len(), heads, shape.dim_k)?;
        same_length("the turned query", expected, turned.len())?;
        rotation.check(slots.len(), shape.dim_k)?;
        let of_keys = Turning {
            rotation,
            rows: key,
            first: 0,
            dim: shape.dim_k,
            weight: rotation.norm.map(|norm| norm.key),
        };
        let mut tasks = vec![
            Task::Keys(of_keys, slots, cache.keys),
            Task::Values(CopyRows {
                slots,
                rows: value,
                dim: shape.dim_v,
                cache: cache.values,
            }),
        ];
        let chunk = (MANY / width.max(1)).max(1);
        for (number, out) in turned.chunks_mut((chunk * width).max(1)).enumerate() {
            let of_queries = Turning {
                rows: query,
                first: number * chunk,
                weight: rotation.norm.map(|norm| norm.query),
                ..of_keys
            };
            tasks.push(Task::Queries(of_queries, out));
        }
        let num_threads = match expected > MANY / 2 {
            true => self.threads().count().min(tasks.len()),
            false => 1,
        };
        self.threads()
            .each(num_threads, tasks, |task| best_build(self.isa(), task));
        Ok(())
    }
}

impl<E, A> Rotation<'_, E, A> {
    fn check(&self, num_rows: usize, dim: usize) -> Result<(), Error> {
        let Layout { size, step, .. } = self.layout;
        if size == 0 || size % 2 == 1 || size > dim || step == 0 {
            return Err(Error::Layout { size, step, dim });
        }
        let columns = self.cos.len().checked_div(num_rows).unwrap_or(0);
        let last = (size / 2 - 1).checked_mul(step).ok_or(Error::TooLarge)?;
        let needed = num_rows
            .checked_mul(last.checked_add(1).ok_or(Error::TooLarge)?)
            .ok_or(Error::TooLarge)?;
        let whole = (columns * num_rows).max(needed);
        same_length("the cosines", whole, self.cos.len())?;
        same_length("the sines", whole, self.sin.len())?;
        if let Some(norm) = &self.norm {
            same_length("the weight of the queries' norm", dim, norm.query.len())?;
            same_length("the weight of the keys' norm", dim, norm.key.len())?;
        }
        Ok(())
    }
}

/// Rows of heads to be turned, from row `first` on.
struct Turning<'a, E, A> {
    rotation: &'a Rotation<'a, E, A>,
    rows: Rows<'a, E>,
    first: usize,
    dim: usize,
    weight: Option<&'a [E]>,
}

impl<E: Copy, A> Clone for Turning<'_, E, A> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<E: Copy, A> Copy for Turning<'_, E, A> {}

enum Task<'a, E, A, C> {
    Keys(Turning<'a, E, A>, &'a [i64], &'a mut [C]),
    Values(CopyRows<'a, E, C>),
    Queries(Turning<'a, E, A>, &'a mut [E]),
}

impl<E: Element, A: Element, C: Stored<E>> InEachBuild for Task<'_, E, A, C> {
    #[inline(always)]
    fn run(self) {
        match self {
            Task::Queries(turning, out) => {
                let mut floats = Floats::of(&turning);
                let width = turning.rows.width().max(1);
                for (at, out) in out.chunks_exact_mut(width).enumerate() {
                    turning.turn(turning.first + at, &mut floats, out);
                }
            }
            Task::Keys(turning, slots, cache) => {
                let (mut floats, mut scratch) = (Floats::of(&turning), vec![]);
                let dim = turning.dim;
                let width = turning.rows.width() / dim * C::width(dim);
                for (row, &slot) in slots.iter().enumerate() {
                    if let Ok(slot) = usize::try_from(slot) {
                        let kept = &mut cache[slot * width..][..width];
                        turning.turn(row, &mut floats, C::target(kept, dim, &mut scratch));
                        C::finish(&scratch, dim, kept);
                    }
                }
            }
            Task::Values(copy) => copy.run(),
        }
    }
}

/// A row's angles, a norm's weight and a head, in float32.
struct Floats {
    cos: Vec<f32>,
    sin: Vec<f32>,
    weight: Vec<f32>,
    head: Vec<f32>,
}

impl Floats {
    #[inline(always)]
    fn of<E: Element, A>(turning: &Turning<'_, E, A>) -> Self {
        let half = turning.rotation.layout.size / 2;
        let offset = turning.rotation.norm.map_or(0.0, |it| it.offset);
        let weight = turning.weight.unwrap_or_default();
        Self {
            cos: vec![0.0; half],
            sin: vec![0.0; half],
            weight: weight
                .iter()
                .map(|weight| offset + weight.widen())
                .collect(),
            head: vec![0.0; turning.dim],
        }
    }
}

impl<E: Element, A: Element> Turning<'_, E, A> {
    /// All heads of one row.
    #[inline(always)]
    fn turn(&self, row: usize, floats: &mut Floats, out: &mut [E]) {
        let Rotation {
            cos, sin, layout, ..
        } = self.rotation;
        let columns = cos.len() / self.rows.len();
        let Floats {
            cos: c,
            sin: s,
            weight,
            head: x,
        } = floats;
        for (to, from) in [(&mut *c, cos), (&mut *s, sin)] {
            let from = &from[row * columns..][..columns];
            match layout.step {
                1 => widen(from, to),
                step => {
                    for (to, from) in to.iter_mut().zip(from.iter().step_by(step)) {
                        *to = from.widen();
                    }
                }
            }
        }
        let half = layout.size / 2;
        let heads = self.rows.row(row).chunks_exact(self.dim);
        for (head, out) in heads.zip(out.chunks_exact_mut(self.dim)) {
            widen(head, x);
            if let Some(norm) = &self.rotation.norm {
                let mean = sum_of_squares(x) / self.dim as f32;
                let scale = 1.0 / (mean + norm.epsilon).sqrt();
                for (x, weight) in x.iter_mut().zip(&*weight) {
                    *x = *x * scale * weight;
                }
            }
            let (turned, rest) = out.split_at_mut(layout.size);
            match layout.order {
                Order::Halves => {
                    let halves = x[..layout.size].split_at(half).into();
                    turn_halves(halves, c, s, turned.split_at_mut(half).into());
                }
                Order::Pairs => {
                    let pairs = turned.as_chunks_mut::<2>().0.iter_mut();
                    let pairs = pairs.zip(x.as_chunks::<2>().0);
                    for ((out, &[first, second]), (&c, &s)) in pairs.zip(c.iter().zip(&*s)) {
                        out[0] = E::narrow(first * c - second * s);
                        out[1] = E::narrow(second * c + first * s);
                    }
                }
            }
            for (out, &float) in rest.iter_mut().zip(&x[layout.size..]) {
                *out = E::narrow(float);
            }
        }
    }
}

/// All of one length.
#[inline(always)]
fn turn_halves<E: Element>(
    [first, second]: [&[f32]; 2],
    c: &[f32],
    s: &[f32],
    [low, high]: [&mut [E]; 2],
) {
    let size = first.len();
    let (second, c, s) = (&second[..size], &c[..size], &s[..size]);
    let (low, high) = (&mut low[..size], &mut high[..size]); // so that the loop need not look
    for i in 0..size {
        low[i] = E::narrow(first[i] * c[i] - second[i] * s[i]);
        high[i] = E::narrow(second[i] * c[i] + first[i] * s[i]);
    }
}
