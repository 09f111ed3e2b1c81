//! How queries and keys are turned before they attend, as Python says it.

use cpu_kernels::{
    Attention, CacheArrays, CacheShape, Error, HeadNorm, Layout, NewRows, Order, Rotation, Stored,
};
use pyo3::buffer::{Element, PyBuffer};
use pyo3::prelude::*;

use crate::float_arrays::{apart, array, is_of};
use crate::memory::shared_slice;

/// Cosines and sines `[T, columns]`, both float32 or both the bits of bfloat16; how many numbers of a head they turn,
/// whether those are neighbours, the columns from one angle to the next; and the head norm, if there is one.
#[derive(FromPyObject)]
pub(crate) struct RotationArguments<'py>(
    Bound<'py, PyAny>,
    Bound<'py, PyAny>,
    usize,
    bool,
    usize,
    Option<NormArguments<'py>>,
);

/// Weights of queries and of keys, `[head_dim_k]`, epsilon, and the offset of the weights.
type NormArguments<'py> = (Bound<'py, PyAny>, Bound<'py, PyAny>, f32, f32);

type Two<T> = [PyBuffer<T>; 2];

enum Angles {
    Float32(Two<f32>),
    BFloat16(Two<u16>),
}

/// The same, with its arrays checked; `T` is the type of queries and keys.
pub(crate) struct Turning<T: Element> {
    angles: Angles,
    layout: Layout,
    norm: Option<(Two<T>, f32, f32)>,
}

impl<T: Element + cpu_kernels::Element> Turning<T> {
    pub(crate) fn new(arguments: RotationArguments<'_>) -> PyResult<Self> {
        let RotationArguments(cos, sin, size, are_neighbours, step, norm) = arguments;
        let angles = match is_of::<u16>(&cos) {
            true => Angles::BFloat16([array("cos", &cos, 2)?, array("sin", &sin, 2)?]),
            false => Angles::Float32([array("cos", &cos, 2)?, array("sin", &sin, 2)?]),
        };
        let norm = norm.map(|(query, key, epsilon, offset)| {
            let query = array("the weight of the queries' norm", &query, 1)?;
            let key = array("the weight of the keys' norm", &key, 1)?;
            PyResult::Ok(([query, key], epsilon, offset))
        });
        let order = match are_neighbours {
            true => Order::Pairs,
            false => Order::Halves,
        };
        Ok(Self {
            angles,
            layout: Layout { size, order, step },
            norm: norm.transpose()?,
        })
    }

    /// Refuses a `target` that shares memory with the rotation's arrays.
    pub(crate) fn apart<U>(&self, target: (&str, &PyBuffer<U>)) -> PyResult<()> {
        match &self.angles {
            Angles::Float32([cos, sin]) => apart(target, &[("cos", cos), ("sin", sin)])?,
            Angles::BFloat16([cos, sin]) => apart(target, &[("cos", cos), ("sin", sin)])?,
        }
        match &self.norm {
            Some(([query, key], ..)) => apart(target, &[("norm", query), ("norm", key)]),
            None => Ok(()),
        }
    }

    /// [`Attention::write_turned`].
    pub(crate) fn write<C: Stored<T>>(
        &self,
        attention: &Attention,
        shape: &CacheShape,
        slots: &[i64],
        rows: NewRows<'_, T>,
        cache: CacheArrays<'_, C>,
        turned: &mut [T],
    ) -> Result<(), Error> {
        match &self.angles {
            Angles::Float32(angles) => {
                let rotation = self.rotation(angles);
                attention.write_turned(shape, slots, rows, &rotation, cache, turned)
            }
            Angles::BFloat16(angles) => {
                let rotation = self.rotation(angles);
                attention.write_turned(shape, slots, rows, &rotation, cache, turned)
            }
        }
    }

    fn rotation<'a, A: Element>(&'a self, [cos, sin]: &'a Two<A>) -> Rotation<'a, T, A> {
        Rotation {
            cos: shared_slice(cos),
            sin: shared_slice(sin),
            layout: self.layout,
            norm: self
                .norm
                .as_ref()
                .map(|([query, key], epsilon, offset)| HeadNorm {
                    query: shared_slice(query),
                    key: shared_slice(key),
                    epsilon: *epsilon,
                    offset: *offset,
                }),
        }
    }
}
