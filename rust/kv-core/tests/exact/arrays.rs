//! Arrays of exactly so many cells, for the scripts that fill them.

use kv_core::{
    BlockManager, Error, IntArray, PlanKey, SharedI32, SharedI64, StepArrays, TableRows,
};

/// The value of cells that were not written.
pub(crate) const LEFT: i64 = -777;

/// Arrays that hold so many elements each; a cell more than the caller says.
pub(crate) struct Arrays {
    pub(crate) cells: [Vec<SharedI64>; 7],
    pub(crate) narrow: Vec<SharedI32>,
    sizes: Sizes,
}

#[derive(Clone, Copy)]
pub(crate) struct Sizes {
    pub(crate) groups: usize,
    pub(crate) tokens: usize,
    pub(crate) slots: usize,
    pub(crate) starts: usize,
    pub(crate) sequences: usize,
    pub(crate) rows: usize,
    pub(crate) columns: usize,
    pub(crate) samples: usize,
}

impl Sizes {
    /// Exactly what a plan of so many tokens, sequences, columns and samples needs.
    pub(crate) fn exactly(tokens: usize, sequences: usize, columns: usize, samples: usize) -> Self {
        Self {
            groups: 1,
            tokens,
            slots: tokens,
            starts: sequences + 1,
            sequences,
            rows: sequences,
            columns,
            samples,
        }
    }
}

impl Arrays {
    pub(crate) fn new(sizes: Sizes) -> Self {
        let lens = [
            sizes.tokens,
            sizes.tokens,
            sizes.groups * sizes.slots,
            sizes.starts,
            sizes.sequences,
            sizes.groups * sizes.rows * sizes.columns,
            sizes.samples,
        ];
        Self {
            cells: lens.map(|len| vec![SharedI64::new(LEFT); len]),
            narrow: vec![SharedI32::new(LEFT as i32); sizes.tokens],
            sizes,
        }
    }

    pub(crate) fn views(&self) -> StepArrays<'_> {
        let [ids, positions, slots, starts, lens, tables, logits] =
            self.cells.each_ref().map(|cells| IntArray::I64(cells));
        StepArrays {
            input_ids: ids,
            positions,
            slot_mapping: slots,
            slots_width: self.sizes.slots,
            query_start_loc: starts,
            seq_lens: lens,
            block_tables: tables,
            table_rows: self.sizes.rows,
            table_width: self.sizes.columns,
            logits_indices: logits,
        }
    }

    pub(crate) fn fill(&self, m: &BlockManager, plan: PlanKey) -> Result<(), Error> {
        m.fill(plan, &self.views(), &mut TableRows::default())
    }

    /// Of an array, in the order of `StepArrays`.
    pub(crate) fn values(&self, array: usize) -> Vec<i64> {
        self.cells[array].iter().map(SharedI64::get).collect()
    }

    pub(crate) fn untouched(&self) -> bool {
        let mut cells = self.cells.iter().flatten();
        cells.all(|cell| cell.get() == LEFT)
    }
}

pub(crate) const IDS: usize = 0;
pub(crate) const POSITIONS: usize = 1;
pub(crate) const SLOTS: usize = 2;
pub(crate) const STARTS: usize = 3;
pub(crate) const LENS: usize = 4;
pub(crate) const TABLES: usize = 5;
pub(crate) const LOGITS: usize = 6;
