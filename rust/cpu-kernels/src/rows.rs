//! Operations of a decoder on rows beside products and attention: sums, norms, activations. Each is computed in float32 and
//! rounded once; a row has the same bits in every batch, with any number of threads and at every level.

use crate::activation::{Activation, Cap, Function, Scale, Sigmoid, WithFunction};
use crate::attention::Attention;
use crate::builds::{InEachBuild, best_build};
use crate::element::Element;
use crate::error::Error;
use crate::norm::sum_of_squares;
use crate::step::{above_zero, same_length};

/// Numbers that are added up side by side: the same for all builds.
const LANES: usize = 16;

/// Numbers of a task, about.
const MANY: usize = 6_000;

/// A norm over rows: `(x - mean) / sqrt(mean of squares + epsilon) * (offset + weight) + bias`.
#[derive(Clone, Copy, Debug)]
pub struct Norm<'a, E> {
    /// Numbers of a row.
    pub size: usize,
    /// True for a layer norm (Ba et al., 2016, arXiv:1607.06450); without it no mean is subtracted (Zhang and Sennrich,
    /// 2019, arXiv:1910.07467).
    pub is_centered: bool,
    /// `[size]`, ones if there is none.
    pub weight: Option<&'a [E]>,
    /// `[size]`, zeros if there is none.
    pub bias: Option<&'a [E]>,
    /// Added under the root.
    pub epsilon: f32,
    /// 1 where weights are kept as differences from 1, else 0.
    pub offset: f32,
}

/// A function of each number.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Map {
    /// An activation.
    Activation(Activation),
    /// `1 / (1 + e ^ -x)`.
    Sigmoid,
    /// `x * factor`.
    Scale(f32),
    /// `cap * tanh(x / cap)`.
    Cap(f32),
}

/// How the two halves of a row become one.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Gate {
    /// `activation(gate) * up`.
    Activation(Activation),
    /// `gate * sigmoid(alpha * gate) * (up + 1)`, with `gate` at most `limit` and `up` from `-limit` to it.
    Clamped {
        /// The factor in the sigmoid.
        alpha: f32,
        /// The bound.
        limit: f32,
    },
}

impl Attention {
    /// Adds `change` times `scale` to `stream`, both `[rows, size]`, and rounds it; `out` becomes the norm of that.
    ///
    /// # Errors
    ///
    /// Arrays of shapes that do not match; nothing is written.
    pub fn add_norm<E: Element>(
        &self,
        stream: &mut [E],
        change: &[E],
        scale: f32,
        norm: &Norm<'_, E>,
        out: &mut [E],
    ) -> Result<(), Error> {
        norm.check(stream.len(), out.len())?;
        same_length("change", stream.len(), change.len())?;
        let size = norm.task();
        let tasks = stream.chunks_mut(size).zip(change.chunks(size));
        let tasks = tasks.zip(out.chunks_mut(size));
        let tasks = tasks.map(|((stream, change), out)| AddNorm {
            stream,
            change,
            scale,
            norm,
            out,
        });
        self.run_each(tasks.collect());
        Ok(())
    }

    /// `out` becomes the norm of `rows` `[rows, size]`.
    ///
    /// # Errors
    ///
    /// Arrays of shapes that do not match; nothing is written.
    pub fn norm<E: Element>(
        &self,
        rows: &[E],
        norm: &Norm<'_, E>,
        out: &mut [E],
    ) -> Result<(), Error> {
        norm.check(rows.len(), out.len())?;
        let size = norm.task();
        let tasks = rows.chunks(size).zip(out.chunks_mut(size));
        let tasks = tasks.map(|(rows, out)| Normalise { rows, norm, out });
        self.run_each(tasks.collect());
        Ok(())
    }

    /// Adds `addends` times `scale` to `sums`.
    ///
    /// # Errors
    ///
    /// Arrays of different lengths; nothing is written.
    pub fn add<E: Element>(&self, sums: &mut [E], addends: &[E], scale: f32) -> Result<(), Error> {
        same_length("addends", sums.len(), addends.len())?;
        let tasks = sums.chunks_mut(MANY).zip(addends.chunks(MANY));
        let tasks = tasks.map(|(sums, addends)| Add {
            sums,
            addends,
            scale,
        });
        self.run_each(tasks.collect());
        Ok(())
    }

    /// `out` becomes the function of each of `numbers`.
    ///
    /// # Errors
    ///
    /// Arrays of different lengths; nothing is written.
    pub fn map<E: Element>(&self, numbers: &[E], map: Map, out: &mut [E]) -> Result<(), Error> {
        same_length("out", numbers.len(), out.len())?;
        let tasks = numbers.chunks(MANY).zip(out.chunks_mut(MANY));
        let tasks = tasks.map(|(numbers, out)| Mapped { numbers, map, out });
        self.run_each(tasks.collect());
        Ok(())
    }

    /// `out` `[rows, size]` becomes the gated `rows` `[rows, 2 * size]`, whose first halves are the gates.
    ///
    /// # Errors
    ///
    /// A size of 0, or arrays of shapes that do not match; nothing is written.
    pub fn gate<E: Element>(
        &self,
        rows: &[E],
        size: usize,
        gate: Gate,
        out: &mut [E],
    ) -> Result<(), Error> {
        above_zero("the size of a gate", size)?;
        let count = out.len() / size;
        same_length("out", count * size, out.len())?;
        let expected = count.checked_mul(size).and_then(|it| it.checked_mul(2));
        same_length("rows", expected.ok_or(Error::TooLarge)?, rows.len())?;
        let chunk = (MANY / size).max(1) * size;
        let tasks = rows.chunks(2 * chunk).zip(out.chunks_mut(chunk));
        let tasks = tasks.map(|(rows, out)| Gated {
            rows,
            size,
            gate,
            out,
        });
        self.run_each(tasks.collect());
        Ok(())
    }

    /// Runs the tasks, in parallel if there are several.
    fn run_each<T: InEachBuild + Send>(&self, tasks: Vec<T>) {
        let num_threads = self.threads().count().min(tasks.len());
        self.threads()
            .share_out(num_threads, tasks, |task| best_build(self.isa(), task));
    }
}

impl<E: Element> Norm<'_, E> {
    fn check(&self, rows: usize, out: usize) -> Result<(), Error> {
        above_zero("the size of a norm", self.size)?;
        for (name, vector) in [("weight", self.weight), ("bias", self.bias)] {
            same_length(name, self.size, vector.map_or(self.size, <[E]>::len))?;
        }
        same_length("rows", rows / self.size * self.size, rows)?;
        same_length("out", rows, out)
    }

    /// Numbers of a task, whole rows.
    fn task(&self) -> usize {
        (MANY / self.size).max(1) * self.size
    }

    /// Normalises a row whose squares have this sum.
    #[inline(always)]
    fn write(&self, row: &[E], squares: f32, out: &mut [E]) {
        let mut mean = 0.0;
        let mut squares = squares;
        if self.is_centered {
            mean = sum(row, Of) / self.size as f32;
            squares = sum(row, SquareFrom(mean));
        }
        let scale = 1.0 / (squares / self.size as f32 + self.epsilon).sqrt();
        let offset = self.offset;
        match (self.weight, self.bias) {
            (None, _) => {
                for (out, element) in out.iter_mut().zip(row) {
                    *out = E::narrow((element.widen() - mean) * scale);
                }
            }
            (Some(weight), None) => {
                for ((out, element), weight) in out.iter_mut().zip(row).zip(weight) {
                    let normal = (element.widen() - mean) * scale;
                    *out = E::narrow(normal * (offset + weight.widen()));
                }
            }
            (Some(weight), Some(bias)) => {
                let terms = weight.iter().zip(bias);
                for ((out, element), (weight, bias)) in out.iter_mut().zip(row).zip(terms) {
                    let normal = (element.widen() - mean) * scale;
                    *out = E::narrow(normal.mul_add(offset + weight.widen(), bias.widen()));
                }
            }
        }
    }
}

#[derive(Clone, Copy)]
struct Of;

impl Function for Of {
    #[inline(always)]
    fn of(self, x: f32) -> f32 {
        x
    }
}

/// The square of the distance from a mean.
#[derive(Clone, Copy)]
struct SquareFrom(f32);

impl Function for SquareFrom {
    #[inline(always)]
    fn of(self, x: f32) -> f32 {
        (x - self.0) * (x - self.0)
    }
}

/// The sum of a function, in lanes.
#[inline(always)]
fn sum<E: Element>(row: &[E], function: impl Function) -> f32 {
    let mut sums = [0.0f32; LANES];
    let (wide, rest) = row.as_chunks::<LANES>();
    for elements in wide {
        for lane in 0..LANES {
            sums[lane] += function.of(elements[lane].widen());
        }
    }
    for (sum, element) in sums.iter_mut().zip(rest) {
        *sum += function.of(element.widen());
    }
    sums.iter().sum()
}

/// Adds to a row and rounds it; returns the sum of its squares, in lanes.
#[inline(always)]
fn add_to<E: Element>(row: &mut [E], change: &[E], scale: f32) -> f32 {
    let mut squares = [0.0f32; LANES];
    let (wide, rest) = row.as_chunks_mut::<LANES>();
    let (changes, rest_of_changes) = change.as_chunks::<LANES>();
    for (elements, changes) in wide.iter_mut().zip(changes) {
        for lane in 0..LANES {
            let sum = changes[lane].widen().mul_add(scale, elements[lane].widen());
            elements[lane] = E::narrow(sum);
            let float = elements[lane].widen();
            squares[lane] = float.mul_add(float, squares[lane]);
        }
    }
    for ((square, element), change) in squares.iter_mut().zip(rest).zip(rest_of_changes) {
        *element = E::narrow(change.widen().mul_add(scale, element.widen()));
        *square = element.widen().mul_add(element.widen(), *square);
    }
    squares.iter().sum()
}

struct AddNorm<'a, E> {
    stream: &'a mut [E],
    change: &'a [E],
    scale: f32,
    norm: &'a Norm<'a, E>,
    out: &'a mut [E],
}

impl<E: Element> InEachBuild for AddNorm<'_, E> {
    #[inline(always)]
    fn run(self) {
        let size = self.norm.size;
        let rows = self.stream.chunks_exact_mut(size);
        let rows = rows.zip(self.change.chunks_exact(size));
        for ((row, change), out) in rows.zip(self.out.chunks_exact_mut(size)) {
            let squares = add_to(row, change, self.scale);
            self.norm.write(row, squares, out);
        }
    }
}

struct Normalise<'a, E> {
    rows: &'a [E],
    norm: &'a Norm<'a, E>,
    out: &'a mut [E],
}

impl<E: Element> InEachBuild for Normalise<'_, E> {
    #[inline(always)]
    fn run(self) {
        let size = self.norm.size;
        let rows = self.rows.chunks_exact(size);
        for (row, out) in rows.zip(self.out.chunks_exact_mut(size)) {
            self.norm.write(row, sum_of_squares(row), out);
        }
    }
}

struct Add<'a, E> {
    sums: &'a mut [E],
    addends: &'a [E],
    scale: f32,
}

impl<E: Element> InEachBuild for Add<'_, E> {
    #[inline(always)]
    fn run(self) {
        for (sum, addend) in self.sums.iter_mut().zip(self.addends) {
            *sum = E::narrow(addend.widen().mul_add(self.scale, sum.widen()));
        }
    }
}

struct Mapped<'a, E> {
    numbers: &'a [E],
    map: Map,
    out: &'a mut [E],
}

impl<E: Element> InEachBuild for Mapped<'_, E> {
    #[inline(always)]
    fn run(self) {
        match self.map {
            Map::Activation(activation) => activation.dispatch(self),
            Map::Sigmoid => WithFunction::run(self, Sigmoid),
            Map::Scale(factor) => WithFunction::run(self, Scale(factor)),
            Map::Cap(cap) => WithFunction::run(self, Cap(cap)),
        }
    }
}

impl<E: Element> WithFunction for Mapped<'_, E> {
    #[inline(always)]
    fn run(self, function: impl Function) {
        for (out, number) in self.out.iter_mut().zip(self.numbers) {
            *out = E::narrow(function.of(number.widen()));
        }
    }
}

struct Gated<'a, E> {
    rows: &'a [E],
    size: usize,
    gate: Gate,
    out: &'a mut [E],
}

impl<E: Element> InEachBuild for Gated<'_, E> {
    #[inline(always)]
    fn run(self) {
        match self.gate {
            Gate::Activation(activation) => activation.dispatch(self),
            Gate::Clamped { alpha, limit } => self.clamped(alpha, limit),
        }
    }
}

impl<E: Element> WithFunction for Gated<'_, E> {
    #[inline(always)]
    fn run(self, function: impl Function) {
        let rows = self.rows.chunks_exact(2 * self.size);
        for (row, out) in rows.zip(self.out.chunks_exact_mut(self.size)) {
            let (gates, ups) = row.split_at(self.size);
            for ((out, gate), up) in out.iter_mut().zip(gates).zip(ups) {
                *out = E::narrow(function.of(gate.widen()) * up.widen());
            }
        }
    }
}

impl<E: Element> Gated<'_, E> {
    #[inline(always)]
    fn clamped(self, alpha: f32, limit: f32) {
        let rows = self.rows.chunks_exact(2 * self.size);
        for (row, out) in rows.zip(self.out.chunks_exact_mut(self.size)) {
            let (gates, ups) = row.split_at(self.size);
            for ((out, gate), up) in out.iter_mut().zip(gates).zip(ups) {
                let (gate, up) = (gate.widen(), up.widen());
                let gate = if gate > limit { limit } else { gate };
                let up = if up > limit { limit } else { up };
                let up = if up < -limit { -limit } else { up };
                *out = E::narrow(gate * Sigmoid.of(alpha * gate) * (up + 1.0));
            }
        }
    }
}
