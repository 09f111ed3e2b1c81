//! One task of a linear layer: some outputs of some rows.

use std::cell::Cell;
use std::slice::Chunks;

use crate::activation::Activation;
#[cfg(target_arch = "x86_64")]
use crate::bf16_dots;
use crate::builds::{InEachBuild, InVectors, best_build, best_vectors};
use crate::element::{Element, widen};
use crate::float8_weight::{Float8, add_scaled_products};
use crate::isa::Isa;
use crate::lanes::Vector;
#[cfg(target_arch = "x86_64")]
use crate::lines::Lines;
use crate::lines::WIDTH;
use crate::packed_weight::{PackedWeight, Panels};
use crate::product::{Columns, Floats, add_products, add_widened_products};
#[cfg(target_arch = "x86_64")]
use crate::tile_product::Product;

/// Floats for the rows and sums of a task in bfloat16, and for its gates.
#[derive(Default)]
struct Memory {
    rows: Vec<f32>,
    sums: Vec<f32>,
    gates: Vec<f32>,
}

thread_local! {
    /// From task to task of a thread.
    static KEPT: Cell<Memory> = Cell::default();
}

/// A task: some outputs of some rows.
pub(crate) struct Multiply<'a, 'b, E> {
    pub(crate) columns: Columns<'a, 'b, E, E>,
    pub(crate) weight: &'a PackedWeight,
    /// The initial values of the sums.
    pub(crate) bias: Option<&'a [E]>,
    /// Sums are multiplied with the activations of the products with it.
    pub(crate) gate: Option<(&'a PackedWeight, Activation)>,
}

impl<E: Element> Multiply<'_, '_, E> {
    pub(crate) fn run(mut self, isa: Isa) {
        let mut memory = KEPT.take();
        let Columns { rows, first, .. } = self.columns;
        let width = self.columns.out.first().map_or(1, |out| out.len());
        memory.gates.clear();
        if let Some((gate, _)) = self.gate {
            memory.gates.resize(width * self.columns.out.len(), 0.0);
            let out = memory.gates.chunks_mut(width).collect();
            let columns = Columns { rows, first, out };
            add(isa, columns, gate, &mut memory.rows);
        }
        let mut out = E::sums(&mut self.columns.out, &mut memory.sums);
        for out in &mut out {
            match self.bias {
                Some(bias) => widen(&bias[first * WIDTH..], out),
                None => out.fill(0.0),
            }
        }
        let columns = Columns { rows, first, out };
        let sums = add(isa, columns, self.weight, &mut memory.rows);
        if let Some((_, activation)) = self.gate {
            let work = Gate {
                sums,
                gates: memory.gates.chunks(width),
                activation,
            };
            best_build(isa, work);
        }
        let (sums, out) = (memory.sums.chunks(width), &mut self.columns.out);
        best_build(isa, Round { sums, out });
        KEPT.set(memory);
    }
}

#[cfg(target_arch = "x86_64")]
impl<'a> Multiply<'a, '_, u16> {
    /// The product for tiles, if all weights are bfloat16.
    pub(crate) fn in_halves(&self) -> Option<Product<'a>> {
        let halves = |weight: &'a PackedWeight| match &weight.panels {
            Panels::Halves(lines) => Some(lines),
            Panels::Floats(_) | Panels::Bytes(_) => None,
        };
        Some(Product {
            weight: halves(self.weight)?,
            bias: self.bias,
            gate: match self.gate {
                Some((gate, activation)) => Some((halves(gate)?, activation)),
                None => None,
            },
        })
    }
}

/// Adds products of rows in bfloat16 with a weight in bfloat16.
#[cfg(target_arch = "x86_64")]
type AddHalves = fn(&mut Columns<'_, '_, u16, f32>, &Lines<u32>);

/// Products of bfloat16 itself, where they are faster than those of float32.
#[cfg(target_arch = "x86_64")]
fn product_of_halves(isa: Isa) -> Option<AddHalves> {
    match isa {
        Isa::Avx512Bf16 if bf16_dots::are_fast() => Some(bf16_dots::add_dots),
        _ => None,
    }
}

/// Adds the products of the rows with the weight, and returns the sums.
fn add<'b, E: Element>(
    isa: Isa,
    columns: Columns<'_, 'b, E, f32>,
    weight: &PackedWeight,
    scratch: &mut Vec<f32>,
) -> Vec<&'b mut [f32]> {
    let Columns { rows, first, out } = columns;
    #[cfg(target_arch = "x86_64")]
    if let (Some(add), Panels::Halves(lines), Some(rows)) =
        (product_of_halves(isa), &weight.panels, E::halves(rows))
    {
        let mut columns = Columns { rows, first, out };
        add(&mut columns, lines);
        return columns.out;
    }
    let rows = E::floats(rows, scratch);
    let mut columns = Columns { rows, first, out };
    let added = &mut columns;
    match &weight.panels {
        Panels::Floats(lines) => best_vectors(isa, AddProducts(added, lines)),
        Panels::Halves(lines) => best_vectors(isa, AddProducts(added, lines)),
        Panels::Bytes(float8) => best_vectors(isa, AddProducts(added, float8)),
    }
    columns.out
}

/// Adds products to the columns. A type for each kind of weight: one function with all of them takes the compiler much
/// longer than three.
struct AddProducts<'a, 'b, 'c, W>(&'a mut Columns<'b, 'c, f32, f32>, &'a W);

impl InVectors for AddProducts<'_, '_, '_, Lines<f32>> {
    #[inline(always)]
    fn run<V: Vector<L>, const L: usize>(self) {
        add_products::<Floats, V, L>(self.0, self.1);
    }
}

impl InVectors for AddProducts<'_, '_, '_, Lines<u32>> {
    #[inline(always)]
    fn run<V: Vector<L>, const L: usize>(self) {
        add_widened_products::<V, L>(self.0, self.1);
    }
}

impl InVectors for AddProducts<'_, '_, '_, Float8> {
    #[inline(always)]
    fn run<V: Vector<L>, const L: usize>(self) {
        add_scaled_products::<V, L>(self.0, self.1);
    }
}

/// Multiplies the sums of each row with the activations of its gates.
struct Gate<'a, 'b> {
    sums: Vec<&'b mut [f32]>,
    gates: Chunks<'a, f32>,
    activation: Activation,
}

impl InEachBuild for Gate<'_, '_> {
    #[inline(always)]
    fn run(self) {
        for (sums, gates) in self.sums.into_iter().zip(self.gates) {
            self.activation.apply(sums, gates);
        }
    }
}

/// The elements of each row become its sums, if these lie elsewhere.
struct Round<'a, 'b, E> {
    sums: Chunks<'a, f32>,
    out: &'a mut [&'b mut [E]],
}

impl<E: Element> InEachBuild for Round<'_, '_, E> {
    #[inline(always)]
    fn run(self) {
        for (out, sums) in self.out.iter_mut().zip(self.sums) {
            for (element, &sum) in out.iter_mut().zip(sums) {
                *element = E::narrow(sum);
            }
        }
    }
}
